"""Vectorised environments by id, from the library that steps them fastest."""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import error
from stable_baselines3.common import env_util
from stable_baselines3.common.atari_wrappers import AtariWrapper, EpisodicLifeEnv, MaxAndSkipEnv, NoopResetEnv
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecTransposeImage

from sb3_ano.envs.atari import AtariProtocol, atari_protocol
from sb3_ano.envs.direct import DirectVecEnv
from sb3_ano.envs.make import did_you_mean, explained_missing_packages, prepare_env, settings_of, unknown_settings

BACKENDS = ("auto", "gymnasium", "envpool", "ale")


def make_vec_env(
    env_id: str | Callable[..., gym.Env],
    n_envs: int = 1,
    seed: int | None = None,
    start_index: int = 0,
    monitor_dir: str | os.PathLike[str] | None = None,
    wrapper_class: Callable[[gym.Env], gym.Env] | None = None,
    env_kwargs: dict[str, Any] | None = None,
    vec_env_cls: Callable[..., VecEnv] | None = None,
    vec_env_kwargs: dict[str, Any] | None = None,
    monitor_kwargs: dict[str, Any] | None = None,
    wrapper_kwargs: dict[str, Any] | None = None,
    *,
    backend: str = "auto",
    num_threads: int | None = None,
) -> VecEnv:
    """Make environments that keep SB3's contract, whichever library steps them.

    The arguments are those of SB3's ``make_vec_env``, in its order; ``backend`` and ``num_threads`` are keywords. The
    attribute ``backend`` of the result names the library: ``"gymnasium"``, ``"envpool"`` or ``"ale"``.

    ``"auto"`` takes EnvPool for Atari games, several of MuJoCo's tasks and what gymnasium does not know, ale-py for Atari
    games without EnvPool, and gymnasium for the rest, and wherever an argument is given that only gymnasium knows. Atari games
    are played as in the experiments, on all backends, and may be named ``NAME-v5`` or ``NAMENoFrameskip-v4``, without sticky
    actions, or ``ALE/NAME-v5``, with. ``env_kwargs`` changes the protocol in the names of ``AtariProtocol``, for example
    ``{"episodic_life": False}``.

    :param env_id: id of a task; for gymnasium also a class or function that returns an environment
    :param n_envs: number of environments
    :param seed: seed of the environments; environment ``i`` gets ``seed + i`` at the first reset
    :param start_index: number of the first monitor file, added to the seeds of the action spaces; only for gymnasium
    :param monitor_dir: directory for monitor files; None writes none
    :param wrapper_class: gymnasium wrapper for each environment, only for gymnasium; for Atari games it replaces the protocol
    :param env_kwargs: settings of the task
    :param vec_env_cls: class of the result, only for gymnasium, for example ``SubprocVecEnv``; None takes ``DirectVecEnv``
    :param vec_env_kwargs: arguments of ``vec_env_cls``
    :param monitor_kwargs: arguments of SB3's Monitor; only for gymnasium
    :param wrapper_kwargs: arguments of ``wrapper_class``
    :param backend: ``"auto"``, ``"gymnasium"``, ``"envpool"`` or ``"ale"``
    :param num_threads: number of threads of EnvPool and ale-py; None takes one per processor. gymnasium has one
    :return: environments with episode statistics in their infos, as with SB3's Monitor
    :raises ValueError: for an unknown id or backend, a number that is not allowed, or arguments that a backend cannot have
    :raises TypeError: for a key of ``env_kwargs`` that the task does not know
    :raises MissingExtraError: if a package is not installed
    """
    _check_number("n_envs", n_envs)
    if num_threads is not None:
        _check_number("num_threads", num_threads)
    if seed is not None and not isinstance(seed, int | np.integer):
        hint = f"; the backend is a keyword argument: backend={seed!r}" if seed in BACKENDS else ""
        raise ValueError(f"seed={seed!r} is not allowed; allowed are integers and None{hint}")
    if backend not in BACKENDS:
        hint = did_you_mean(str(backend), BACKENDS)
        raise ValueError(f"backend={backend!r} is unknown{hint}; allowed are {', '.join(BACKENDS)}")
    given: dict[str, Any] = {
        "start_index": start_index,
        "wrapper_class": wrapper_class,
        "vec_env_cls": vec_env_cls,
        "vec_env_kwargs": vec_env_kwargs,
        "monitor_kwargs": monitor_kwargs,
        "wrapper_kwargs": wrapper_kwargs,
    }
    only_gymnasium = {name: value for name, value in given.items() if value}
    settings = dict(env_kwargs or {})
    if not isinstance(env_id, str):
        if backend not in ("auto", "gymnasium"):
            raise ValueError(
                f"env_id={env_id!r} is not allowed with backend {backend!r}, which takes ids; 'gymnasium' takes it"
            )
        return _gymnasium(env_id, n_envs, None, seed=seed, monitor_dir=monitor_dir, env_kwargs=settings, **only_gymnasium)
    atari = _existing_game(env_id) if wrapper_class is None else None
    if wrapper_kwargs and wrapper_class is None:
        where = "; the settings of an Atari game go into env_kwargs" if atari is not None else ""
        raise ValueError(f"wrapper_kwargs={wrapper_kwargs!r} is not allowed without wrapper_class{where}")
    if backend == "auto":
        backend = "gymnasium" if only_gymnasium else _fastest(env_id, n_envs, atari, settings)
    elif backend == "gymnasium" and num_threads is not None:
        raise ValueError(f"num_threads={num_threads} is not allowed with backend 'gymnasium', which has one thread")
    elif backend != "gymnasium" and only_gymnasium:
        raise ValueError(f"{', '.join(only_gymnasium)} is not allowed with backend {backend!r}; backend 'gymnasium' takes it")
    if atari is not None:
        atari, settings = atari.changed(settings)

    common: dict[str, Any] = {"seed": seed, "monitor_dir": monitor_dir, "env_kwargs": settings}
    if backend == "envpool":
        env = _module("envpool").EnvPoolVecEnv(env_id, n_envs, num_threads=num_threads, atari=atari, **common)
    elif backend == "ale":
        module = _module("ale")
        if atari is None:
            atari = atari_protocol(env_id) or AtariProtocol(env_id)  # which it then names as unknown
        env = module.AleVecEnv(env_id, n_envs, atari, num_threads=num_threads, **common)
    else:
        env = _gymnasium(env_id, n_envs, atari, **common, **only_gymnasium)
    env.unwrapped.made_from = (env_id, dict(env_kwargs or {}))  # for others, who have to make it again
    return env


def _check_number(name: str, value: Any) -> None:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} is not allowed; allowed are whole numbers from 1")


def _module(backend: str) -> ModuleType:
    """The module of EnvPool or ale-py, which imports what need not be installed."""
    return importlib.import_module(f"sb3_ano.envs.{backend}_backend")


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _existing_game(env_id: str) -> AtariProtocol | None:
    """The Atari game that an id names, if an installed package has it."""
    atari = atari_protocol(env_id)
    if atari is None:
        return None
    for backend, package in (("ale", "ale_py"), ("envpool", "envpool")):
        if _installed(package) and _module(backend).has_game(atari.game):
            return atari
    return None


def _fastest(env_id: str, n_envs: int, atari: AtariProtocol | None, env_kwargs: dict[str, Any]) -> str:
    """The backend that ``"auto"`` stands for: never one on which the id means something else."""
    if "render_mode" in env_kwargs:
        return "gymnasium"
    if atari is not None:
        rest = atari.changed(env_kwargs)[1]
        if _installed("envpool") and _module("envpool").has_game(atari.game):
            return "envpool" if _module("envpool").takes(f"{atari.game}-v5", rest) else "gymnasium"
        return "gymnasium" if rest else "ale"
    if _installed("envpool") and _module("envpool").has(env_id):
        module = _module("envpool")
        # To wake a thread and wait for it costs three times a cheetah's step.
        replaces = module.replaces_gymnasium(env_id) and (n_envs > 1 or not _installed("mujoco"))
        if (env_id not in gym.registry or replaces) and module.takes(env_id, env_kwargs):
            return "envpool"
    return "gymnasium"


def _gymnasium(
    env_id: str | Callable[..., gym.Env],
    n_envs: int,
    atari: AtariProtocol | None,
    *,
    monitor_dir: str | os.PathLike[str] | None,
    env_kwargs: dict[str, Any],
    vec_env_cls: Callable[..., VecEnv] = DirectVecEnv,
    **arguments: Any,
) -> VecEnv:
    """Python environments, with SB3's wrappers for Atari games.

    :param arguments: other arguments of SB3's ``make_vec_env``
    """
    # Made from its id, SB3 makes an environment ready to be rendered to images.
    make, registered = env_id, env_id
    if atari is not None:
        make, registered = functools.partial(_frames_skipped, atari), "ALE/"
        # The rest of the protocol goes above Monitor, which thus counts the learner's steps and the game's own score.
        arguments["wrapper_class"] = functools.partial(_LearnersGame, atari=atari)
    with _explained_mistakes(env_id, atari, env_kwargs):
        prepare_env(registered)
        if isinstance(make, str):
            gym.spec(make)  # raises what would otherwise be raised in the processes of SubprocVecEnv
        env: Any = env_util.make_vec_env(
            make,
            n_envs,
            monitor_dir=None if monitor_dir is None else str(monitor_dir),
            env_kwargs=env_kwargs,
            vec_env_cls=functools.partial(_prepared, registered, vec_env_cls),  # type: ignore[arg-type]
            **arguments,
        )
    if atari is not None:
        env = VecTransposeImage(env)
        env = VecFrameStack(env, atari.frame_stack) if atari.frame_stack > 1 else env
    env.backend = "gymnasium"
    return env


def _prepared(
    env_id: str | Callable[..., gym.Env],
    vec_env_cls: Callable[..., VecEnv],
    env_fns: list[Callable[[], gym.Env]],
    **vec_env_kwargs: Any,
) -> VecEnv:
    """Prepare the processes of the environments, which may be others than this one, before they make them."""

    def prepared(env_fn: Callable[[], gym.Env]) -> Callable[[], gym.Env]:
        def make() -> gym.Env:
            prepare_env(env_id)
            return env_fn()

        return make

    return vec_env_cls([prepared(env_fn) for env_fn in env_fns], **vec_env_kwargs)


@contextlib.contextmanager
def _explained_mistakes(
    env_id: str | Callable[..., gym.Env], atari: AtariProtocol | None, env_kwargs: dict[str, Any]
) -> Iterator[None]:
    """Turn gymnasium's errors about ids and their settings into one line each."""
    try:
        with explained_missing_packages():
            yield
    except error.DependencyNotInstalled:
        raise
    except error.UnregisteredEnv as unknown:
        hint = did_you_mean(str(env_id), gym.registry)
        if atari_protocol(str(env_id)) is not None and not (_installed("ale_py") or _installed("envpool")):
            hint += "; if it is an Atari game, it needs ale-py: pip install 'sb3-ano[atari]'"
        raise ValueError(f"env_id={env_id!r} is unknown to backend 'gymnasium'{hint}") from unknown
    except error.Error as unusable:
        raise ValueError(f"env_id={env_id!r} cannot be made by backend 'gymnasium': {unusable}") from unusable
    except TypeError as mistake:
        unexpected = re.search(r"unexpected keyword argument '(\w+)'", str(mistake))
        if unexpected is None or unexpected[1] not in env_kwargs:
            raise
        known = settings_of(env_id) if atari is None else inspect.signature(AtariProtocol).parameters
        raise unknown_settings([unexpected[1]], f"gymnasium's {env_id}", known) from mistake


def _frames_skipped(atari: AtariProtocol, **env_kwargs: Any) -> gym.Env:
    """The game with the part of the protocol that is about frames: no-ops at the start, and several frames a step."""
    env = gym.make(
        f"ALE/{atari.game}-v5",
        frameskip=1,
        repeat_action_probability=atari.repeat_action_probability,
        full_action_space=atari.full_action_space,
        max_num_frames_per_episode=atari.max_frames,
        **env_kwargs,
    )
    if atari.noop_max > 0:
        env = NoopResetEnv(env, atari.noop_max)
    return MaxAndSkipEnv(env, atari.frame_skip)


class _LearnersGame(gym.Wrapper):
    """The part of the protocol that is about what the learner sees, by SB3's wrapper.

    :param env: the game, with frames already skipped
    :param atari: the protocol
    """

    def __init__(self, env: gym.Env, atari: AtariProtocol) -> None:
        super().__init__(
            AtariWrapper(
                env,
                noop_max=0,
                frame_skip=1,
                screen_size=atari.screen_size,
                terminal_on_life_loss=atari.episodic_life,
                clip_reward=atari.clip_reward,
            )
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start the next episode of the learner; with a seed, another game.

        SB3's wrapper would go on with a game that is not over, and the seed would have no effect.
        """
        env: gym.Env = self.env
        while seed is not None and isinstance(env, gym.Wrapper):
            if isinstance(env, EpisodicLifeEnv):
                env.was_real_done = True
            env = env.env
        return self.env.reset(seed=seed, options=options)
