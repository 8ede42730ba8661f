"""What ``python -m sb3_ano.bench speed`` measures: names and settings, as data."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeVar


@dataclass(frozen=True)
class Contender:
    """One way to train.

    :param name: as in tables and options
    :param library: ``"sb3"``, ``"sbx"`` or ``"ano"``: whose algorithm; ``"sb3"`` and ``"sbx"`` mean PPO
    :param envs: ``"sb3"`` or ``"ano"``: whose function makes the environments
    :param options: arguments of the constructor beside those of the case
    :param env_only: step the environments with random actions instead of training
    :param compile_cache: ``"cold"`` gives each run an empty folder for compiled code, ``"warm"`` a folder that an earlier run
        has filled, None the user's own
    """

    name: str
    library: str
    envs: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    env_only: bool = False
    compile_cache: str | None = None


@dataclass(frozen=True)
class Case:
    """One task with one set of hyperparameters.

    :param name: as in options and file names
    :param title: what a reader sees, one line
    :param env_id: the task, as this package names it
    :param sb3_env_id: the same task, as SB3 names it
    :param contenders: all that can be measured; the first is the reference
    :param n_envs: number of environments, or None to give the algorithm the id alone
    :param policy: name of SB3's policy class
    :param settings: arguments of every contender's constructor
    :param atari: whether SB3's side takes its wrappers and frame stack for Atari
    :param total_steps: None measures the steady state; a number, whole runs of so many environment steps, each in a process of
        its own, construction and compilation included
    """

    name: str
    title: str
    env_id: str
    sb3_env_id: str
    contenders: tuple[Contender, ...]
    n_envs: int | None = None
    policy: str = "MlpPolicy"
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    atari: bool = False
    total_steps: int | None = None

    @property
    def reference(self) -> Contender:
        """The contender that the others are compared with."""
        return self.contenders[0]


def _options(**options: Any) -> Mapping[str, Any]:
    return MappingProxyType(options)


SB3 = Contender("sb3", "sb3", "sb3")
SB3_FAST_ENVS = Contender("sb3-fast-envs", "sb3", "ano")
SBX = Contender("sbx", "sbx", "sb3")
ANO_EAGER = Contender("ano-eager", "ano", "ano", _options(torch_compile=False))
ANO_COMPILED = Contender("ano-compiled", "ano", "ano", _options(torch_compile=True))
ANO_BFLOAT16 = Contender("ano-bfloat16", "ano", "ano", _options(torch_compile=True, precision="bfloat16"))
ANO_AUTO = Contender("ano-auto", "ano", "ano", _options(torch_compile="auto"))
PPO_COMPILED = Contender("ppo-compiled", "ano", "ano", _options(torch_compile=True, shaping="ppo"))
ANO_COLD = Contender("ano-cold", "ano", "ano", _options(torch_compile=True), compile_cache="cold")
ANO_WARM = Contender("ano-warm", "ano", "ano", _options(torch_compile=True), compile_cache="warm")
ENV_SB3 = Contender("env-sb3", "sb3", "sb3", env_only=True)
ENV_ANO = Contender("env-ano", "ano", "ano", env_only=True)

CASES: tuple[Case, ...] = (
    Case(
        "defaults",
        "HalfCheetah-v5 by its id, SB3's defaults",
        "HalfCheetah-v5",
        "HalfCheetah-v5",
        (SB3, SBX, ANO_EAGER, ANO_COMPILED, PPO_COMPILED, ENV_SB3, ENV_ANO),
    ),
    Case(
        "vec8",
        "HalfCheetah-v4, 8 x 256 steps, batch 64",
        "HalfCheetah-v4",
        "HalfCheetah-v4",
        (SB3, SB3_FAST_ENVS, SBX, ANO_EAGER, ANO_COMPILED, ANO_BFLOAT16, PPO_COMPILED, ENV_SB3, ENV_ANO),
        n_envs=8,
        settings=_options(n_steps=256, batch_size=64, n_epochs=10),
    ),
    Case(
        "paper",
        "HalfCheetah-v4 as in the paper: 128 x 32 steps, batch 1024, 256-256",
        "HalfCheetah-v4",
        "HalfCheetah-v4",
        (SB3, SB3_FAST_ENVS, SBX, ANO_EAGER, ANO_COMPILED, ANO_BFLOAT16, ENV_SB3, ENV_ANO),
        n_envs=128,
        settings=_options(
            n_steps=32, batch_size=1024, n_epochs=10, policy_kwargs={"net_arch": {"pi": [256, 256], "vf": [256, 256]}}
        ),
    ),
    Case(
        "pong",
        "Pong, 8 x 128 steps, batch 256, NatureCNN",
        "Pong-v5",
        "PongNoFrameskip-v4",
        (SB3, SB3_FAST_ENVS, ANO_EAGER, ANO_COMPILED, ANO_BFLOAT16, ENV_SB3, ENV_ANO),
        n_envs=8,
        policy="CnnPolicy",
        settings=_options(
            n_steps=128, batch_size=256, n_epochs=4, learning_rate=2.5e-4, clip_range=0.1, ent_coef=0.01, vf_coef=0.25
        ),
        atari=True,
    ),
    Case(
        "cartpole",
        "CartPole-v1 by its id, SB3's defaults, a whole run of 20,000 steps",
        "CartPole-v1",
        "CartPole-v1",
        (SB3, ANO_AUTO),
        total_steps=20_000,
    ),
    Case(
        "run100k",
        "HalfCheetah-v5 by its id, SB3's defaults, a whole run of 100,000 steps",
        "HalfCheetah-v5",
        "HalfCheetah-v5",
        (SB3, ANO_COLD, ANO_WARM),
        total_steps=100_000,
    ),
)


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_T = TypeVar("_T", bound=_Named)


def select(available: Iterable[_T], names: Iterable[str], what: str) -> tuple[_T, ...]:
    """Those of ``available`` that are named, in the order of ``available``.

    :param available: cases or contenders
    :param names: from the command line
    :param what: ``"case"`` or ``"contender"``, for the message
    :raises ValueError: for a name that is not there
    """
    by_name = {item.name: item for item in available}
    wanted = list(names)
    for name in wanted:
        if name not in by_name:
            near = difflib.get_close_matches(name, by_name, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown {what} {name!r}{hint} ({what}s are {', '.join(by_name)})")
    return tuple(item for name, item in by_name.items() if name in wanted)


def all_contenders(cases: Iterable[Case]) -> tuple[Contender, ...]:
    """Every contender of these cases, once."""
    return tuple({contender.name: contender for case in cases for contender in case.contenders}.values())
