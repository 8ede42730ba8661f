"""EnvPool's environments, stepped as one batch in C++ threads."""

import math
import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from sb3_ano._system import cores
from sb3_ano.envs.atari import AtariProtocol, require_integer
from sb3_ano.envs.batched import BatchedVecEnv, Space, Transition
from sb3_ano.envs.make import require_known_settings
from sb3_ano.extras import hint, needs_extra

with needs_extra("envpool"):
    import envpool
    from envpool.registration import registry

_ATARI = "envpool.atari"
# Tasks that "auto" takes instead of gymnasium's of the same name: the same spaces, limits and rewards, and faster.
# Their environments start by the seed plus i, which :func:`ignores_seeds` thus need not try out.
# EnvPool's Box2D tasks have other bounds than gymnasium's, and classic control costs less in Python than waking threads.
_REPLACES_GYMNASIUM = {_ATARI, "envpool.mujoco.gym"}
# Settings that are arguments of make_vec_env, or fixed here.
_OF_THE_POOL = {
    "base_path",
    "batch_size",
    "env_seed",
    "gym_reset_return_info",
    "max_num_players",
    "num_envs",
    "num_threads",
    "seed",
    "thread_affinity_offset",
}
# Settings that EnvPool does not check; gymnasium takes -1 for no limit.
_COUNTS = ("frame_skip", "max_episode_steps")
_NOT_PINNED = -1
# Steps after which environments of different seeds must have differed. Some start with the same image and differ later.
_TRIED_STEPS = 100


def has(env_id: str) -> bool:
    """Tell whether EnvPool has a task of this name."""
    return env_id in registry.specs


def has_game(game: str) -> bool:
    """Tell whether EnvPool has the Atari game, for example ``SpaceInvaders``."""
    return has(f"{game}-v5") and registry.specs[f"{game}-v5"][0] == _ATARI


def replaces_gymnasium(env_id: str) -> bool:
    """Tell whether ``"auto"`` may take the task instead of gymnasium's of the same name."""
    return registry.specs[env_id][0] in _REPLACES_GYMNASIUM


def takes(task: str, env_kwargs: dict[str, Any]) -> bool:
    """Tell whether the task has all of these settings, and takes their values."""
    try:
        _spaces(task, env_kwargs)
    except (TypeError, ValueError):
        return False
    return True


def ignores_seeds(task: str, settings: dict[str, Any]) -> bool:
    """Tell whether all environments of a task start and continue equally, whatever their seeds.

    Nothing in EnvPool says so, so that two environments are tried out, once per task and settings.

    :param task: name of the task in EnvPool
    :param settings: settings of the task
    """
    if replaces_gymnasium(task):
        return False

    key = (task, repr(sorted(settings.items())))
    if key not in _tried:
        _tried[key] = _plays_equally(task, settings)
    return _tried[key]


_tried: dict[tuple[str, str], bool] = {}


def _plays_equally(task: str, settings: dict[str, Any]) -> bool:
    """Play two environments of different seeds with the same actions, and tell whether they return the same."""
    _, action_space = _spaces(task, settings)
    action_space.seed(0)

    # Not a property of the class: it may depend on the settings.
    pool = _make_pool(task, num_envs=2, num_threads=1, seed=[0, 1], **settings)
    try:
        observations = pool.reset()[0]
        for _ in range(_TRIED_STEPS):
            if not _are_equal(observations):
                return False

            action = np.asarray(action_space.sample())
            actions = np.stack([action, action]).astype(_action_dtype(action_space))
            observations = pool.step(actions)[0]
        return _are_equal(observations)
    finally:
        pool.close()


def _make_pool(task: str, **settings: Any) -> Any:
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # gymnasium's, about rounding the bounds
        pool: Any = envpool.make_gymnasium(task, **settings)
        # They are made when they are first read, which may be in a step.
        pool.observation_space  # noqa: B018
        pool.action_space  # noqa: B018
    return pool


def _are_equal(observations: np.ndarray) -> bool:
    return bool((observations == observations[0]).all())


def _action_dtype(action_space: Space) -> type[np.number[Any]]:
    """Return the type of actions that EnvPool takes."""
    if isinstance(action_space, spaces.Discrete):
        return np.int32
    return np.float64


class EnvPoolVecEnv(BatchedVecEnv):
    """A VecEnv over EnvPool in synchronous mode. ``render_mode`` in ``env_kwargs`` may be ``"rgb_array"``.

    EnvPool restarts an environment in the step after the end of its episode, and ignores the action of that step. Here, the
    environment is restarted before the observations are returned, so that every transition belongs to the task. EnvPool takes
    seeds only when a pool is made: the first ``reset`` after ``seed`` makes a new pool.

    In Atari games with ``episodic_life``, EnvPool itself continues after a lost life with up to ``noop_max`` no-op frames, and
    presses the fire button if the game has one.
    """

    backend = "envpool"

    def _open(self, atari: AtariProtocol | None, env_kwargs: dict[str, Any]) -> tuple[spaces.Box, Space]:
        self._task = self.env_id
        if atari is not None:
            self._task = f"{atari.game}-v5"
        if not has(self._task):
            raise ValueError(f"env_id={self.env_id!r} is unknown to backend 'envpool'{hint(self._task, registry.specs)}")

        self._pool: Any = None
        self._settings = env_kwargs
        self.render_mode = env_kwargs.pop("render_mode", None)
        if self.render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode={self.render_mode!r} is not allowed with backend 'envpool'; allowed is 'rgb_array'")

        self._atari = atari is not None
        if atari is not None:
            if atari.noop_max < 1:  # the pool would crash
                raise ValueError("noop_max=0 is not allowed with backend 'envpool'; allowed are positive integers")
            self._settings.update(
                atari.emulator_settings,
                episodic_life=atari.episodic_life,
                reward_clip=atari.clip_reward,
                frame_skip=atari.frame_skip,
                max_episode_steps=math.ceil(atari.max_frames / atari.frame_skip),  # EnvPool counts steps, not frames
            )
        return _spaces(self._task, self._settings)

    def _begin(self, seeds: list[int] | None) -> np.ndarray:
        if seeds is not None:
            self._release()
            settings = dict(self._settings)
            if self.render_mode is not None:
                settings["render_mode"] = self.render_mode
            # Threads that may run anywhere are often woken on the processor of the thread that wakes them: a step of 8
            # cheetahs takes 350 us on two processors instead of 260. Fewer threads than processors are not pinned, because
            # all processes would crowd the first processors.
            offset = _NOT_PINNED
            if self.num_threads == cores() == os.cpu_count():
                offset = 0
            self._pool = _make_pool(
                self._task,
                num_envs=self.num_envs,
                num_threads=self.num_threads,
                thread_affinity_offset=offset,
                seed=[seed % 2**31 for seed in seeds],
                **settings,
            )

        observations: np.ndarray = self._pool.reset()[0]
        if seeds is not None and _are_equal(observations) and ignores_seeds(self._task, self._settings):
            warnings.warn(
                f"EnvPool's {self._task} ignores seeds: all environments start in the same state and continue in the same "
                "way; different episodes need a policy that samples its actions",
                stacklevel=3,
            )
        return observations

    def _advance(self, actions: np.ndarray) -> Transition:
        actions = actions.astype(_action_dtype(self.action_space))
        observations, rewards, terminated, truncated, info = self._pool.step(actions)
        if not self._atari:
            return Transition(observations, rewards, rewards, terminated, truncated, terminated | truncated)

        # EnvPool's terminated is the learner's, and its rewards are clipped.
        over = (info["terminated"] != 0) | truncated
        return Transition(observations, rewards, info["reward"], terminated, truncated, over)

    def _restart(self, indices: np.ndarray, transition: Transition) -> tuple[np.ndarray, np.ndarray]:
        indices = indices.astype(np.int32)
        if self._atari:
            # A reset would end the game if only a life is lost. EnvPool's own restart, which is the next step of a finished
            # episode, does not.
            first, *_, info = self._pool.step(np.zeros(len(indices), np.int32), indices)
        else:
            first, info = self._pool.reset(indices)

        # EnvPool returns the environments in the order in which they are ready.
        return transition.observations[indices], first[np.argsort(info["env_id"])]

    def _release(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def get_images(self) -> Sequence[np.ndarray | None]:
        """Return an image per environment, each of shape ``(height, width, 3)``, uint8.

        :raises NoSingleEnvError: without ``env_kwargs={"render_mode": "rgb_array"}``
        :raises RuntimeError: before the first reset
        """
        if self.render_mode is None:
            raise self._needs_single_envs("render without env_kwargs={'render_mode': 'rgb_array'}")
        if self._pool is None:
            raise RuntimeError(f"{self.env_id}: call reset() before rendering")

        return list(self._pool.render(np.arange(self.num_envs)))


def _spaces(task: str, settings: dict[str, Any]) -> tuple[spaces.Box, Space]:
    """Return observation and action space of one environment, with gymnasium's types, so that models fit either library.

    :raises TypeError: if the task does not know a setting, or a value's type
    :raises ValueError: if a number is out of range, or a space is not supported
    """
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # gymnasium's, about rounding the bounds
        known = set(envpool.make_spec(task).config._asdict()) - _OF_THE_POOL
        require_known_settings(settings, known, f"EnvPool's {task}")
        for name in _COUNTS:
            require_integer(name, settings.get(name, 1))

        try:
            spec = envpool.make_spec(task, **settings)
        except TypeError as mistake:  # it shows the signature in C++
            raise TypeError(f"env_kwargs={settings} has a value of a type that EnvPool's {task} does not know") from mistake

        observations = spec.observation_space
        actions = spec.action_space

    if not isinstance(observations, spaces.Box) or not isinstance(actions, spaces.Box | spaces.Discrete):
        raise ValueError(f"env_id={task!r} has spaces that backend 'envpool' does not support: {observations}, {actions}")
    if isinstance(actions, spaces.Discrete):
        return observations, spaces.Discrete(int(actions.n), start=int(actions.start))
    # EnvPool computes with float64; gymnasium's environments take float32.
    low = actions.low.astype(np.float32)
    high = actions.high.astype(np.float32)
    return observations, spaces.Box(low, high, actions.shape, np.float32)
