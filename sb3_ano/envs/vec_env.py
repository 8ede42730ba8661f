"""Vectorized environments by id, from the library that steps them fastest."""

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
from gymnasium.envs.registration import load_env_creator
from stable_baselines3.common import env_util
from stable_baselines3.common.atari_wrappers import AtariWrapper, EpisodicLifeEnv, MaxAndSkipEnv, NoopResetEnv
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecTransposeImage

from sb3_ano.envs.atari import AtariProtocol, atari_protocol, require_integer
from sb3_ano.envs.direct import DirectVecEnv
from sb3_ano.envs.make import did_you_mean, explained_missing_packages, prepare_env, require_known_settings

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
    """Make vectorized environments that follow SB3's contract, whichever library steps them.

    The arguments are those of SB3's ``make_vec_env``, in its order; ``backend`` and ``num_threads`` are keyword-only. The
    attribute ``backend`` of the result names the library: ``"gymnasium"``, ``"envpool"`` or ``"ale"``.

    ``"auto"`` selects EnvPool for Atari games, several MuJoCo tasks, and tasks that gymnasium does not have. It selects ale-py
    for Atari games if EnvPool is not installed, and gymnasium for everything else, or if an argument is given that only
    gymnasium supports. All backends play Atari games by the same protocol. The ids are ``NAME-v5`` and
    ``NAMENoFrameskip-v4`` without sticky actions, and ``ALE/NAME-v5`` with them. ``env_kwargs`` changes the protocol by the
    names of ``AtariProtocol``, for example ``{"episodic_life": False}``.

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
    :param num_threads: number of threads of EnvPool and ale-py; None: one per processor. gymnasium has one thread
    :return: environments with episode statistics in their infos, as from SB3's Monitor
    :raises ValueError: if the id or backend is unknown, a number is out of range, or the backend does not support an argument
    :raises TypeError: if the task does not have a setting in ``env_kwargs``
    :raises MissingExtraError: if a package is not installed
    """
    for name, value in (("n_envs", n_envs), ("num_threads", 1 if num_threads is None else num_threads)):
        require_integer(name, value)
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
    atari = _existing_game(env_id) if wrapper_class is None else None
    if wrapper_kwargs and wrapper_class is None:
        hint = "" if atari is None else "; the settings of an Atari game go into env_kwargs"
        raise ValueError(f"wrapper_kwargs={wrapper_kwargs!r} is not allowed without wrapper_class{hint}")
    settings = dict(env_kwargs or {})
    if backend == "auto":
        backend = "gymnasium" if only_gymnasium or callable(env_id) else _fastest(env_id, n_envs, atari, settings)
    elif backend == "gymnasium" and num_threads is not None:
        raise ValueError(f"num_threads={num_threads} is not allowed with backend 'gymnasium', which has one thread")
    elif backend != "gymnasium" and (only_gymnasium or callable(env_id)):
        unsupported = ", ".join(only_gymnasium) or f"env_id={env_id!r}"
        raise ValueError(f"{unsupported} is not allowed with backend {backend!r}; backend 'gymnasium' takes it")
    if atari is not None:
        atari, settings = atari.changed(settings)
    arguments: dict[str, Any] = {"seed": seed, "monitor_dir": monitor_dir, "env_kwargs": settings}
    if backend == "gymnasium":
        env = _gymnasium(env_id, n_envs, atari, **arguments, **only_gymnasium)
    elif backend == "envpool":
        env = _module("envpool").EnvPoolVecEnv(env_id, n_envs, atari, num_threads, **arguments)
    else:
        game = atari or atari_protocol(str(env_id)) or AtariProtocol(str(env_id))  # AleVecEnv rejects unknown games
        env = _module("ale").AleVecEnv(env_id, n_envs, game, num_threads, **arguments)
    if isinstance(env_id, str):  # for code that makes the same environments again
        env.unwrapped.made_from = (env_id, dict(env_kwargs or {}))  # type: ignore[attr-defined]
    return env


def _module(backend: str) -> ModuleType:
    """Import the module of EnvPool or ale-py, which need not be installed."""
    return importlib.import_module(f"sb3_ano.envs.{backend}_backend")


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _existing_game(env_id: str | Callable[..., gym.Env]) -> AtariProtocol | None:
    """Return the protocol of the Atari game that an id names, if an installed package has the game."""
    atari = atari_protocol(env_id) if isinstance(env_id, str) else None
    if atari is None:
        return None
    packages = {"ale": "ale_py", "envpool": "envpool"}.items()
    exists = any(_installed(package) and _module(backend).has_game(atari.game) for backend, package in packages)
    return atari if exists else None


def _fastest(env_id: str, n_envs: int, atari: AtariProtocol | None, env_kwargs: dict[str, Any]) -> str:
    """Return the backend that ``"auto"`` selects: never one for which the id means another task."""
    if "render_mode" in env_kwargs:
        return "gymnasium"
    pool = _module("envpool") if _installed("envpool") else None
    if atari is not None:
        rest = atari.changed(env_kwargs)[1]
        if pool is not None and pool.has_game(atari.game):
            return "envpool" if pool.takes(f"{atari.game}-v5", rest) else "gymnasium"
        return "gymnasium" if rest else "ale"
    if pool is None or not pool.has(env_id) or not pool.takes(env_id, env_kwargs):
        return "gymnasium"
    # To wake a thread and wait for it takes three times as long as a step of HalfCheetah.
    replaces = pool.replaces_gymnasium(env_id) and (n_envs > 1 or not _installed("mujoco"))
    return "envpool" if replaces or env_id not in gym.registry else "gymnasium"


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
    """Make Python environments, with SB3's wrappers for Atari games.

    :param arguments: other arguments of SB3's ``make_vec_env``
    """
    # SB3 sets the render mode only of environments that it makes from an id.
    make, registered = env_id, env_id
    if atari is not None:
        make, registered = functools.partial(_frames_skipped, atari), "ALE/"
        # The rest of the protocol is above Monitor, which thus counts the learner's steps and the unclipped score.
        arguments["wrapper_class"] = functools.partial(_LearnersGame, atari=atari)
    with _explained_mistakes(env_id, atari, env_kwargs):
        prepare_env(registered)
        if isinstance(make, str):
            gym.spec(make)  # raises here instead of in the processes of SubprocVecEnv
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
    """Make vectorized environments whose processes, which may be others than this one, are prepared first."""

    def prepared(env_fn: Callable[[], gym.Env]) -> gym.Env:
        prepare_env(env_id)
        return env_fn()

    return vec_env_cls([functools.partial(prepared, env_fn) for env_fn in env_fns], **vec_env_kwargs)


@contextlib.contextmanager
def _explained_mistakes(
    env_id: str | Callable[..., gym.Env], atari: AtariProtocol | None, env_kwargs: dict[str, Any]
) -> Iterator[None]:
    """Turn gymnasium's errors about ids and settings into one line each."""
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
        if unexpected is not None and unexpected[1] in env_kwargs:
            creator: Any = AtariProtocol if atari else gym.spec(env_id).entry_point if isinstance(env_id, str) else env_id
            known = inspect.signature(load_env_creator(creator) if isinstance(creator, str) else creator).parameters
            require_known_settings([unexpected[1]], set(known) - {unexpected[1]}, f"gymnasium's {env_id}")
        raise


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
    if atari.noop_max > 0:
        env = NoopResetEnv(env, atari.noop_max)
    return MaxAndSkipEnv(env, atari.frame_skip)


class _LearnersGame(gym.Wrapper):
    """Apply the part of the protocol above Monitor: SB3's wrapper, whose episodes a seed can end.

    :param env: game whose frames are already skipped
    :param atari: protocol of the game
    """

    def __init__(self, env: gym.Env, atari: AtariProtocol) -> None:
        unskipped = {"noop_max": 0, "frame_skip": 1, "screen_size": atari.screen_size}
        super().__init__(
            AtariWrapper(env, terminal_on_life_loss=atari.episodic_life, clip_reward=atari.clip_reward, **unskipped)
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start the learner's next episode; with a seed, a new game.

        SB3's wrapper would continue a game that is not over, so that the seed would have no effect.
        """
        lives = env_util.unwrap_wrapper(self, EpisodicLifeEnv)
        if seed is not None and isinstance(lives, EpisodicLifeEnv):
            lives.was_real_done = True
        return self.env.reset(seed=seed, options=options)
