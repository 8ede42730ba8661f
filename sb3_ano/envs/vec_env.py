"""Vectorized environments by id, from the library that steps them fastest."""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium import error
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, load_env_creator, parse_env_id
from stable_baselines3.common import env_util
from stable_baselines3.common.atari_wrappers import AtariWrapper, EpisodicLifeEnv, MaxAndSkipEnv, NoopResetEnv
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecTransposeImage

from sb3_ano.envs.atari import AtariProtocol, atari_protocol, require_integer
from sb3_ano.envs.batched import BatchedVecEnv
from sb3_ano.envs.direct import DirectVecEnv
from sb3_ano.envs.make import explained_missing_packages, prepare_env, require_known_settings
from sb3_ano.envs.process import ProcessVecEnv
from sb3_ano.extras import MissingExtraError, hint

BACKENDS = ("auto", "gymnasium", "process", "envpool", "ale")
# Packages of the backends that step a batch, and their classes.
_BATCHES = {"ale": ("ale_py", "AleVecEnv"), "envpool": ("envpool", "EnvPoolVecEnv")}

_EnvId = str | Callable[..., gym.Env]
# The entry point in gymnasium's registry of ids that only EnvPool has.
_ONLY_ENVPOOL = "sb3_ano.envs.vec_env:raise_only_envpool"


def make_vec_env(
    env_id: _EnvId,
    n_envs: int = 1,
    seed: int | None = None,
    start_index: int = 0,
    monitor_dir: str | os.PathLike[str] | None = None,
    wrapper_class: Callable[..., gym.Env] | None = None,
    env_kwargs: dict[str, Any] | None = None,
    vec_env_cls: Callable[..., VecEnv] | None = None,
    vec_env_kwargs: dict[str, Any] | None = None,
    monitor_kwargs: dict[str, Any] | None = None,
    wrapper_kwargs: dict[str, Any] | None = None,
    *,
    backend: str = "auto",
    num_threads: int | None = None,
) -> VecEnv:
    """Make vectorized environments that follow SB3's contract, whichever library steps them.

    The arguments are those of SB3's ``make_vec_env``, in its order; ``backend`` and ``num_threads`` are keyword-only. The
    attribute ``backend`` of the result names the library: ``"gymnasium"``, ``"envpool"`` or ``"ale"``.

    ``"auto"`` selects EnvPool for Atari games, gymnasium's MuJoCo tasks that it has, and tasks that gymnasium does not have.
    It selects ale-py for Atari games if EnvPool is not installed, and gymnasium for everything else, or if an argument is
    given that only gymnasium supports. It rejects tasks of EnvPool that ignore seeds.

    All backends play Atari games by the same protocol. The ids are ``NAME-v5`` and ``NAMENoFrameskip-v4`` without sticky
    actions, and ``ALE/NAME-v5`` with them. ``env_kwargs`` changes the protocol by the names of ``AtariProtocol``, for example
    ``{"episodic_life": False}``.

    :param env_id: id of a task; for gymnasium also a class or function that returns an environment
    :param n_envs: number of environments
    :param seed: seed of the environments; environment ``i`` gets ``seed + i`` at the first reset
    :param start_index: number of the first monitor file, added to the seeds of the action spaces; only for gymnasium
    :param monitor_dir: directory for monitor files; None writes none
    :param wrapper_class: gymnasium wrapper for each environment, only for gymnasium; for Atari games it replaces the protocol
    :param env_kwargs: settings of the task; ``render`` needs ``{"render_mode": "rgb_array"}``, which SB3 sets without asking
    :param vec_env_cls: class of the result, only for gymnasium, for example ``SubprocVecEnv``; None takes ``DirectVecEnv``
    :param vec_env_kwargs: arguments of ``vec_env_cls``
    :param monitor_kwargs: arguments of SB3's Monitor; EnvPool and ale-py take ``override_existing`` only
    :param wrapper_kwargs: arguments of ``wrapper_class``
    :param backend: ``"auto"``, ``"gymnasium"``, ``"process"``, ``"envpool"`` or ``"ale"``
    :param num_threads: number of threads of EnvPool and ale-py, and of processes of ``"process"``; None: one per processor.
        gymnasium has one thread
    :return: environments with episode statistics in their infos, as from SB3's Monitor
    :raises ValueError: if the id or backend is unknown, a number is out of range, or the backend does not support an argument
    :raises TypeError: if the task does not have a setting in ``env_kwargs``
    :raises MissingExtraError: if a package is not installed
    """
    _require_numbers(n_envs, num_threads, seed)

    # Every backend writes monitor files, and can append to them.
    monitor_kwargs = dict(monitor_kwargs or {})
    override_existing = monitor_kwargs.pop("override_existing", True)
    given: dict[str, object] = {
        "start_index": start_index,
        "wrapper_class": wrapper_class,
        "vec_env_cls": vec_env_cls,
        "vec_env_kwargs": vec_env_kwargs,
        "monitor_kwargs": monitor_kwargs,
        "wrapper_kwargs": wrapper_kwargs,
    }
    only_gymnasium = {name: value for name, value in given.items() if value}

    # A wrapper of the user's replaces the protocol of Atari games.
    atari = None
    if isinstance(env_id, str):
        env_id = _registered_id(env_id)
        if wrapper_class is None:
            atari = existing_game(env_id)

    # The backend is chosen by all settings, before the protocol takes its own.
    settings = dict(env_kwargs or {})
    backend = _chosen_backend(backend, env_id, n_envs, num_threads, atari, settings, only_gymnasium)
    if atari is not None:
        atari, settings = atari.changed(settings)

    # SB3's own argument is a str.
    if monitor_dir is not None:
        monitor_dir = os.fspath(monitor_dir)

    env: VecEnv
    if backend in ("gymnasium", "process"):
        if backend == "process":
            processes = {"n_workers": num_threads, **(vec_env_kwargs or {})}
            only_gymnasium |= {"vec_env_cls": ProcessVecEnv, "vec_env_kwargs": processes}
        if not override_existing:
            only_gymnasium["monitor_kwargs"] = {**monitor_kwargs, "override_existing": False}
        arguments = {"seed": seed, "monitor_dir": monitor_dir, "env_kwargs": settings}
        env = _gymnasium(env_id, n_envs, atari, **arguments, **only_gymnasium)
        env.backend = backend  # type: ignore[attr-defined]
    else:
        vec_env_class: type[BatchedVecEnv] = getattr(_module(backend), _BATCHES[backend][1])
        env = vec_env_class(
            str(env_id),
            n_envs,
            atari,
            num_threads,
            seed=seed,
            monitor_dir=monitor_dir,
            override_existing=override_existing,
            env_kwargs=settings,
        )

    # For code that makes the same environments again, such as that of evaluations.
    if isinstance(env_id, str):
        env.unwrapped.made_from = (env_id, dict(env_kwargs or {}))  # type: ignore[attr-defined]
    return env


def _require_numbers(n_envs: int, num_threads: int | None, seed: int | None) -> None:
    require_integer("n_envs", n_envs)
    if num_threads is not None:
        require_integer("num_threads", num_threads)
    if seed is not None and not isinstance(seed, int | np.integer):
        advice = ""
        if seed in BACKENDS:
            advice = f"; the backend is a keyword argument: backend={seed!r}"
        raise ValueError(f"seed={seed!r} is not allowed; allowed are integers and None{advice}")


def _registered_id(env_id: str) -> str:
    """Return the id that ``module:id``, or an id without its version, stands for, as ``gymnasium.make`` reads them."""
    module, _, name = env_id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as missing:
            raise ValueError(f"env_id={env_id!r} cannot be made: {missing}") from missing

    # If gymnasium cannot read an id, a backend explains it.
    with contextlib.suppress(error.Error):
        namespace, bare, version = parse_env_id(name)
        if version is None and name not in gym.registry:
            newest = find_highest_version(namespace, bare)
            if newest is not None:
                return get_env_id(namespace, bare, newest)

    return name


def _module(backend: str) -> ModuleType:
    """Import the module of EnvPool or ale-py, which need not be installed."""
    return importlib.import_module(f"sb3_ano.envs.{backend}_backend")


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def existing_game(env_id: _EnvId) -> AtariProtocol | None:
    """Return the protocol of the Atari game that an id names, or None if no installed package has the game.

    :param env_id: id, or a class or function that returns an environment
    """
    if not isinstance(env_id, str):
        return None
    atari = atari_protocol(env_id)
    if atari is None:
        return None

    # An id of this form may be another package's.
    for backend, (package, _) in _BATCHES.items():
        if _installed(package) and _module(backend).has_game(atari.game):
            return atari
    return None


def envpool_family(env_id: str) -> str | None:
    """Return the family of a task that EnvPool has and gymnasium lacks, or None.

    MiniGrid's tasks are EnvPool's also where the Python package is installed: SB3 does not take its observations, which have a
    text, without a wrapper.

    :param env_id: id of a task; ids of Atari games have another meaning
    :return: name of EnvPool's module, for example ``"envpool.mujoco.dmc"``
    """
    spec = gym.registry.get(env_id)
    is_gymnasiums = spec is not None and not str(spec.entry_point).startswith((_ONLY_ENVPOOL, "minigrid."))
    if is_gymnasiums or atari_protocol(env_id) is not None or not _installed("envpool"):
        return None

    family: str | None = _module("envpool").family(env_id)
    return family


def register_envpool(env_id: str) -> None:
    """Register an id that only EnvPool has, for code that looks in gymnasium's registry, such as the RL Zoo's."""
    if envpool_family(env_id) is not None:
        gym.registry.setdefault(env_id, EnvSpec(env_id, _ONLY_ENVPOOL))


def raise_only_envpool(**env_kwargs: object) -> gym.Env:
    """Raise ValueError, instead of making an environment, for an id of :func:`register_envpool`."""
    raise ValueError("only EnvPool has this environment: take it with make_vec_env, or with the zoo's key backend: auto")


def _chosen_backend(
    backend: str,
    env_id: _EnvId,
    n_envs: int,
    num_threads: int | None,
    atari: AtariProtocol | None,
    env_kwargs: dict[str, object],
    only_gymnasium: dict[str, object],
) -> str:
    """Return the backend to use, and reject arguments that it does not support.

    :param only_gymnasium: given arguments that only gymnasium supports
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown{hint(str(backend), BACKENDS)}; allowed are {', '.join(BACKENDS)}")

    needs_gymnasium = callable(env_id) or bool(only_gymnasium)
    if backend == "auto" and needs_gymnasium:
        return "gymnasium"
    if backend == "auto":
        return _fastest(str(env_id), n_envs, atari, env_kwargs)

    # A named backend is never exchanged for another one, and ignores no argument.
    if backend == "gymnasium" and num_threads is not None:
        raise ValueError(f"num_threads={num_threads} is not allowed with backend 'gymnasium', which has one thread")
    if backend == "process":
        if "vec_env_cls" in only_gymnasium:
            raise ValueError(f"vec_env_cls={only_gymnasium['vec_env_cls']!r} is not allowed with backend 'process'")
        return backend

    if backend != "gymnasium" and needs_gymnasium:
        unsupported = ", ".join(only_gymnasium) or f"env_id={env_id!r}"
        raise ValueError(f"{unsupported} is not allowed with backend {backend!r}; backend 'gymnasium' takes it")
    return backend


def _fastest(env_id: str, n_envs: int, atari: AtariProtocol | None, env_kwargs: dict[str, object]) -> str:
    """Return the backend that ``"auto"`` selects: never one for which the id means another task."""
    # EnvPool finds its own files only, and renders in another way.
    if {"render_mode", "xml_file"} & env_kwargs.keys():
        return "gymnasium"

    pool = None
    if _installed("envpool"):
        pool = _module("envpool")

    if atari is not None:
        atari, rest = atari.changed(env_kwargs)
        # EnvPool crashes without no-ops.
        has_game = pool is not None and pool.has_game(atari.game) and atari.noop_max > 0
        if pool is not None and has_game and pool.takes(f"{atari.game}-v5", rest):
            return "envpool"

        # Settings of an emulator's library, which gymnasium's environments may have.
        if has_game or rest:
            return "gymnasium"
        return "ale"

    if pool is None or not pool.has(env_id):
        return "gymnasium"

    if envpool_family(env_id) is not None:
        # If EnvPool cannot make the task, this raises the reason.
        if pool.ignores_seeds(env_id, env_kwargs):
            raise ValueError(
                f"env_id={env_id!r} is only known to EnvPool, where all environments start in the same state, whatever the "
                "seed; backend='envpool' takes it"
            )
        return "envpool"

    if not pool.replaces_gymnasium(env_id) or not pool.takes(env_id, env_kwargs):
        return "gymnasium"

    # To wake a thread and wait for it takes three times as long as a step of HalfCheetah.
    if n_envs == 1 and _installed("mujoco") and _gymnasium_makes(env_id):
        return "gymnasium"
    return "envpool"


@functools.cache
def _gymnasium_makes(env_id: str) -> bool:
    """Tell whether gymnasium still makes a registered environment; MuJoCo's oldest ones raise an error."""
    prepare_env(env_id)
    try:
        # The warning is shown when it is made to be used.
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            gym.make(env_id).close()
    except (ImportError, error.DependencyNotInstalled):
        return False
    return True


def _gymnasium(env_id: _EnvId, n_envs: int, atari: AtariProtocol | None, **arguments: Any) -> VecEnv:
    """Make Python environments, with SB3's wrappers for Atari games.

    :param arguments: other arguments of SB3's ``make_vec_env``
    """
    if "wrapper_kwargs" in arguments and "wrapper_class" not in arguments:
        advice = ""
        if atari is not None:
            advice = "; the settings of an Atari game go into env_kwargs"
        raise ValueError(f"wrapper_kwargs={arguments['wrapper_kwargs']!r} is not allowed without wrapper_class{advice}")

    make = env_id
    registered = env_id
    if atari is not None:
        make = functools.partial(_frames_skipped, atari)
        registered = "ALE/"
        # The rest of the protocol is above Monitor, which thus counts the learner's steps and the unclipped score.
        arguments["wrapper_class"] = functools.partial(_LearnersGame, atari=atari)
    vec_env_cls = arguments.get("vec_env_cls", DirectVecEnv)
    arguments["vec_env_cls"] = functools.partial(_prepared, registered, vec_env_cls)

    with _explained_mistakes(env_id, atari, arguments["env_kwargs"]):
        prepare_env(registered)
        if isinstance(make, str):
            # Raises here instead of in the processes of SubprocVecEnv.
            gym.spec(make)
            # SB3 makes ids with a render mode, in which each step of LunarLander also simulates the engines' particles.
            make = functools.partial(gym.make, make)
        env: VecEnv = env_util.make_vec_env(make, n_envs, **arguments)

    # SB3's wrappers for single environments return images with the channel last, and do not stack them.
    if atari is not None:
        env = VecTransposeImage(env)
        if atari.frame_stack > 1:
            env = VecFrameStack(env, atari.frame_stack)
    return env


def _prepared(
    env_id: _EnvId, vec_env_cls: Callable[..., VecEnv], env_fns: list[Callable[[], gym.Env]], **vec_env_kwargs: object
) -> VecEnv:
    """Make vectorized environments whose processes, which may be others than this one, are prepared first."""
    spec = None
    if isinstance(env_id, str):
        spec = gym.registry.get(env_id)

    def prepared(env_fn: Callable[[], gym.Env]) -> gym.Env:
        prepare_env(env_id)
        # Another process lacks what a script or --gym-packages registered.
        if spec is not None:
            gym.registry.setdefault(spec.id, spec)
        return env_fn()

    prepared_fns = [functools.partial(prepared, env_fn) for env_fn in env_fns]
    return vec_env_cls(prepared_fns, **vec_env_kwargs)


@contextlib.contextmanager
def _explained_mistakes(env_id: _EnvId, atari: AtariProtocol | None, env_kwargs: dict[str, object]) -> Iterator[None]:
    """Turn gymnasium's errors about ids and settings into one line each."""
    try:
        with explained_missing_packages():
            yield
    except error.UnregisteredEnv as unknown:
        advice = hint(str(env_id), gym.registry)
        if atari_protocol(str(env_id)) is not None and not (_installed("ale_py") or _installed("envpool")):
            advice += "; if it is an Atari game, it needs ale-py: pip install 'sb3-ano[atari]'"
        advice = _envpool_has(env_id) or advice
        raise ValueError(f"env_id={env_id!r} is unknown to backend 'gymnasium'{advice}") from unknown
    except error.Error as unusable:
        reason = f"{str(unusable).rstrip('.')}{_envpool_has(env_id)}"
        raise ValueError(f"env_id={env_id!r} cannot be made by backend 'gymnasium': {reason}") from unusable
    except ImportError as moved:
        # gymnasium's own, of environments that it no longer has, but not those of the user's imports.
        if isinstance(moved, ModuleNotFoundError | MissingExtraError) or not isinstance(env_id, str):
            raise

        reason = f"{str(moved).rstrip('.')}{_envpool_has(env_id)}"
        raise ValueError(f"env_id={env_id!r} cannot be made by backend 'gymnasium': {reason}") from moved
    except TypeError as mistake:
        # Not a mistake of the environment's own code.
        unexpected = re.search(r"unexpected keyword argument '(\w+)'", str(mistake))
        if unexpected is not None and unexpected[1] in env_kwargs:
            creator: Any = env_id
            if atari is not None:
                creator = AtariProtocol
            elif isinstance(env_id, str):
                creator = gym.spec(env_id).entry_point
            if isinstance(creator, str):
                creator = load_env_creator(creator)
            known = inspect.signature(creator).parameters
            require_known_settings([unexpected[1]], set(known) - {unexpected[1]}, f"gymnasium's {env_id}")
        raise


def _envpool_has(env_id: _EnvId) -> str:
    """Return advice for an environment that gymnasium lacks, or an empty string."""
    if isinstance(env_id, str) and _installed("envpool") and _module("envpool").has(env_id):
        return "; backend 'envpool' has it, but does not take all arguments"
    return ""


def _frames_skipped(atari: AtariProtocol, **env_kwargs: Any) -> gym.Env:
    """Make a game with the part of the protocol below Monitor: no-ops at the start, and several frames per step."""
    env = gym.make(
        f"ALE/{atari.game}-v5",
        frameskip=1,
        repeat_action_probability=atari.repeat_action_probability,
        full_action_space=atari.full_action_space,
        max_num_frames_per_episode=atari.max_frames,
        **env_kwargs,
    )

    # Below the skipped frames, because no-ops are counted in frames.
    if atari.noop_max > 0:
        env = NoopResetEnv(env, atari.noop_max)
    return MaxAndSkipEnv(env, atari.frame_skip)


class _LearnersGame(gym.Wrapper):
    """Apply the part of the protocol above Monitor: SB3's wrapper, but a reset continues a game only after a lost life.

    :param env: game whose frames are already skipped
    :param atari: protocol of the game
    """

    def __init__(self, env: gym.Env, atari: AtariProtocol) -> None:
        unskipped = {"noop_max": 0, "frame_skip": 1, "screen_size": atari.screen_size}
        super().__init__(
            AtariWrapper(env, terminal_on_life_loss=atari.episodic_life, clip_reward=atari.clip_reward, **unskipped)
        )
        self._episode_ended = False

    def step(self, action: Any) -> tuple[np.ndarray, SupportsFloat, bool, bool, dict[str, object]]:
        """Play one step of the learner's episode."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._episode_ended = terminated or truncated
        return observation, reward, terminated, truncated, info

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[np.ndarray, dict[str, object]]:
        """Start the learner's next episode: after a lost life, the game continues; otherwise, or with a seed, it is a new one.

        SB3's wrapper would continue every game that is not over, also in the middle of a life, unlike EnvPool and ale-py.
        """
        lives = env_util.unwrap_wrapper(self, EpisodicLifeEnv)
        if isinstance(lives, EpisodicLifeEnv) and (seed is not None or not self._episode_ended):
            lives.was_real_done = True

        self._episode_ended = False
        return self.env.reset(seed=seed, options=options)
