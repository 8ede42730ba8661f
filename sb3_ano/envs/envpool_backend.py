"""EnvPool's environments, stepped as one batch in C++ threads."""

import contextlib
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from torch import nn

from sb3_ano._system import cores
from sb3_ano.envs.atari import AtariProtocol, require_integer
from sb3_ano.envs.batched import BatchedVecEnv, Observations, Space, Transition, mapped
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
# MiniGrid's "images" are kinds, colors and states of objects, up to this number. SB3 would take boxes up to 255 for pixels.
_MINIGRID = "envpool.minigrid"
_VIZDOOM = "envpool.vizdoom"
_MINIGRID_SYMBOLS = 10
# Steps after which environments of different seeds must have differed. Some start with the same image and differ later.
_TRIED_STEPS = 100


def family(env_id: str) -> str | None:
    """Return the module that has a task, for example ``"envpool.mujoco.dmc"``, or None."""
    if env_id not in registry.specs:
        return None
    return registry.specs[env_id][0]


def has(env_id: str) -> bool:
    """Tell whether EnvPool has a task of this name."""
    return env_id in registry.specs


def has_game(game: str) -> bool:
    """Tell whether EnvPool has the Atari game, for example ``SpaceInvaders``."""
    return family(f"{game}-v5") == _ATARI


def replaces_gymnasium(env_id: str) -> bool:
    """Tell whether ``"auto"`` may take the task instead of gymnasium's of the same name."""
    return family(env_id) in _REPLACES_GYMNASIUM


def takes(task: str, env_kwargs: dict[str, object]) -> bool:
    """Tell whether the task has all of these settings, and takes their values."""
    try:
        _Interface(task, env_kwargs)
    except (TypeError, ValueError):
        return False
    return True


def ignores_seeds(task: str, settings: dict[str, object]) -> bool:
    """Tell whether all environments of a task start and continue equally, whatever their seeds.

    Nothing in EnvPool says so, so that two environments are tried out, once per task and settings.

    :param task: name of the task in EnvPool
    :param settings: settings of the task
    :raises ValueError: if EnvPool cannot make the task, or SB3's policies do not support its spaces
    """
    # MiniGrid's tasks that start in the same state do so in the Python package, too.
    if replaces_gymnasium(task) or family(task) == _MINIGRID:
        return False

    key = (task, repr(sorted(settings.items())))
    if key not in _tried:
        _tried[key] = _plays_equally(task, settings)
    return _tried[key]


_tried: dict[tuple[str, str], bool] = {}


def _plays_equally(task: str, settings: dict[str, object]) -> bool:
    """Play two environments of different seeds with the same actions, and tell whether they return the same."""
    interface = _Interface(task, settings)
    action_space = interface.action_space
    action_space.seed(0)

    # Not a property of the class: it may depend on the settings.
    pool = _make_pool(task, num_envs=2, num_threads=1, seed=[0, 1], **settings)
    try:
        observations = interface.observations(pool.reset()[0])
        for _ in range(_TRIED_STEPS):
            if not _are_equal(observations):
                return False

            action = np.asarray(action_space.sample())
            actions = interface.actions(np.stack([action, action]))
            observations = interface.observations(pool.step(actions)[0])
        return _are_equal(observations)
    finally:
        pool.close()


def _make_pool(task: str, **settings: object) -> Any:
    with _explained(task):
        pool: Any = envpool.make_gymnasium(task, **settings)
        # They are made when they are first read, which may be in a step.
        pool.observation_space  # noqa: B018
        pool.action_space  # noqa: B018
    return pool


@contextlib.contextmanager
def _explained(task: str) -> Iterator[None]:
    """Turn EnvPool's errors about missing libraries and files into one line."""
    try:
        # gymnasium's, about rounding the bounds
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            yield
    except (ImportError, OSError, RuntimeError) as missing:
        reason = " ".join(str(missing).split())
        raise ValueError(f"env_id={task!r} cannot be made by backend 'envpool': {reason}") from missing


def _are_equal(observations: Observations) -> bool:
    """Tell whether all environments have returned the same."""
    parts: Iterable[np.ndarray] = [observations]  # type: ignore[list-item]
    if isinstance(observations, dict):
        parts = observations.values()

    return all((part == part[0]).all() for part in parts)


class EnvPoolVecEnv(BatchedVecEnv):
    """A VecEnv over EnvPool in synchronous mode. ``render_mode`` in ``env_kwargs`` may be ``"rgb_array"``.

    EnvPool restarts an environment in the step after the end of its episode, and ignores the action of that step. Here, the
    environment is restarted before the observations are returned, so that every transition belongs to the task. EnvPool takes
    seeds only when a pool is made: the first ``reset`` after ``seed`` makes a new pool.

    In Atari games with ``episodic_life``, EnvPool itself continues after a lost life with up to ``noop_max`` no-op frames, and
    presses the fire button if the game has one.
    """

    backend = "envpool"

    def _open(self, atari: AtariProtocol | None, env_kwargs: dict[str, object]) -> tuple[Space, Space]:
        self._task = self.env_id
        if atari is not None:
            self._task = f"{atari.game}-v5"
        if not has(self._task):
            raise ValueError(f"env_id={self.env_id!r} is unknown to backend 'envpool'{hint(self._task, registry.specs)}")

        self._pool: Any = None
        self._settings = env_kwargs
        # Not a setting of the task, so that it is given to the pool only.
        render_mode = env_kwargs.pop("render_mode", None)
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode={render_mode!r} is not allowed with backend 'envpool'; allowed is 'rgb_array'")
        self.render_mode = render_mode

        self._atari = atari is not None
        if atari is not None:
            # The pool would crash.
            if atari.noop_max < 1:
                raise ValueError("noop_max=0 is not allowed with backend 'envpool'; allowed are positive integers")

            # EnvPool counts steps, not frames.
            most_steps = math.ceil(atari.max_frames / atari.frame_skip)
            self._settings.update(
                atari.emulator_settings,
                episodic_life=atari.episodic_life,
                reward_clip=atari.clip_reward,
                frame_skip=atari.frame_skip,
                max_episode_steps=most_steps,
            )

        self._interface = _Interface(self._task, self._settings)
        return self._interface.observation_space, self._interface.action_space

    def _begin(self, seeds: list[int] | None) -> Observations:
        if seeds is not None:
            # EnvPool takes seeds only here.
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

        returned, _ = self._pool.reset()
        observations = self._interface.observations(returned)

        # Different first observations are enough to know, and cost less than trying out two environments.
        may_ignore_seeds = seeds is not None and _are_equal(observations)
        if may_ignore_seeds and ignores_seeds(self._task, self._settings):
            warnings.warn(
                f"EnvPool's {self._task} ignores seeds: all environments start in the same state and continue in the same "
                "way; different episodes need a policy that samples its actions",
                stacklevel=3,
            )
        return observations

    def _advance(self, actions: np.ndarray) -> Transition:
        translated = self._interface.actions(actions)
        returned, rewards, terminated, truncated, info = self._pool.step(translated)
        observations = self._interface.observations(returned)

        if not self._atari:
            over = terminated | truncated
            return Transition(observations, rewards, rewards, terminated, truncated, over)

        # EnvPool's terminated is the learner's, and its rewards are clipped.
        over = (info["terminated"] != 0) | truncated
        return Transition(observations, rewards, info["reward"], terminated, truncated, over)

    def _restart(self, indices: np.ndarray, transition: Transition) -> tuple[Observations, Observations]:
        indices = indices.astype(np.int32)
        if self._atari:
            # A reset would end the game if only a life is lost. EnvPool's own restart, which is the next step of a finished
            # episode, does not.
            first, *_, info = self._pool.step(np.zeros(len(indices), np.int32), indices)
        else:
            first, info = self._pool.reset(indices)

        # EnvPool returns the environments in the order in which they are ready.
        order = np.argsort(info["env_id"])
        first = self._interface.observations(first)
        first = mapped(itemgetter(order), first)

        # An array of indices makes copies, as the caller expects.
        terminal = mapped(itemgetter(indices), transition.observations)
        return terminal, first

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


class _Part(NamedTuple):
    """One array of a task's observations.

    :param name: its key for SB3, the names of ``path`` with slashes between them
    :param path: names that lead to it in EnvPool's nested dictionaries; empty if it is the whole observation
    :param space: its space for SB3
    :param first: EnvPool's number for 0
    """

    name: str
    path: tuple[str, ...]
    space: Space
    first: int = 0


class _Interface:
    """Translate between EnvPool's spaces and values and those that SB3's policies support.

    :param task: name of the task in EnvPool
    :param settings: settings of the task
    :raises TypeError: if the task does not know a setting, or a value's type
    :raises ValueError: if a number is out of range, EnvPool cannot make the task, or a space is not supported
    """

    def __init__(self, task: str, settings: dict[str, object]) -> None:
        self._task = task
        with _explained(task):
            spec = _make_spec(task, settings)
            observations = spec.observation_space
            actions = spec.action_space
        players = spec.config.max_num_players
        if players > 1:
            raise ValueError(f"env_id={task!r} is a game of {players} players; environments of SB3 have one")

        # In the order of gymnasium's Dict spaces.
        parts = self._find_parts(observations)
        self._parts = sorted(parts, key=attrgetter("name"))
        self._is_dict = isinstance(observations, spaces.Dict)
        self.observation_space = self._parts[0].space
        if self._is_dict:
            by_name = {part.name: part.space for part in self._parts}
            self.observation_space = spaces.Dict(by_name)

        self._first_action: np.ndarray | int = 0
        self.action_space = self._supported_actions(actions)

    def observations(self, returned: Any) -> Observations:
        """Return EnvPool's observations of several environments as values of the observation space."""
        converted = {}
        for name, path, space, first in self._parts:
            values = returned
            for key in path:
                values = values[key]

            # SB3's one-hot encoding counts from 0.
            if first != 0:
                values = values - first

            # Of a single number, EnvPool returns one dimension less or more.
            shape = (len(values), *(space.shape or ()))
            # Without a copy if the type is right: the arrays of a step are new.
            values = np.asarray(values, space.dtype)
            converted[name] = values.reshape(shape)

        if not self._is_dict:
            return converted[""]
        return converted

    def actions(self, actions: np.ndarray) -> np.ndarray:
        """Return actions as EnvPool numbers them; it converts their type itself."""
        return actions + self._first_action

    def _find_parts(self, space: Space, path: tuple[str, ...] = ()) -> Iterator[_Part]:
        name = "/".join(path)
        # SB3 names parts of a network by these, which may not be attributes of a ModuleDict, such as "values".
        if hasattr(nn.ModuleDict, name):
            name += "_"

        # Of EnvPool's spaces, SB3's preprocessing takes these.
        if isinstance(space, spaces.Dict):
            for key, inner in space.spaces.items():
                yield from self._find_parts(inner, (*path, key))
        elif isinstance(space, spaces.Discrete):
            yield _Part(name, path, spaces.Discrete(int(space.n)), int(space.start))
        elif isinstance(space, spaces.MultiBinary):
            yield _Part(name, path, space)
        elif isinstance(space, spaces.Box):
            yield _Part(name, path, self._supported_box(space))
        else:
            raise ValueError(f"env_id={self._task!r} has observations that SB3's policies do not support: {space}")

    def _supported_box(self, box: spaces.Box) -> spaces.Box:
        low = box.low
        high = box.high
        if np.issubdtype(box.dtype, np.floating):
            # EnvPool's marks of numbers without bounds.
            limits = np.finfo(low.dtype.name)
            low = np.where(low == limits.tiny, -np.inf, low)
            high = np.where(high == limits.max, np.inf, high)
        elif family(self._task) == _MINIGRID and len(box.shape) > 1:
            high = np.full_like(high, _MINIGRID_SYMBOLS)

        # SB3's extractors of Dict observations need at least one dimension.
        shape = box.shape or (1,)
        return spaces.Box(low.reshape(shape), high.reshape(shape), shape, box.dtype.type)

    def _supported_actions(self, actions: Space) -> Space:
        if isinstance(actions, spaces.Discrete):
            return spaces.Discrete(int(actions.n), start=int(actions.start))

        if not isinstance(actions, spaces.Box):
            raise ValueError(f"env_id={self._task!r} has actions that SB3's policies do not support: {actions}")
        if np.issubdtype(actions.dtype, np.integer):
            self._first_action = actions.low
            return spaces.MultiDiscrete(actions.high.astype(np.int64) - actions.low + 1)

        # EnvPool computes with float64; gymnasium's environments take float32.
        with np.errstate(over="ignore"):
            low = actions.low.astype(np.float32)
            high = actions.high.astype(np.float32)
        if not np.isfinite([low, high]).all():
            advice = ""
            if family(self._task) == _VIZDOOM:
                advice = "; with env_kwargs={'use_combined_action': True} they are discrete"
            raise ValueError(f"env_id={self._task!r} has actions without bounds, which SB3's policies do not support{advice}")
        return spaces.Box(low, high, actions.shape, np.float32)


def _make_spec(task: str, settings: dict[str, object]) -> Any:
    """Return EnvPool's description of a task; the errors are those of :class:`_Interface`."""
    known = set(envpool.make_spec(task).config._asdict()) - _OF_THE_POOL
    require_known_settings(settings, known, f"EnvPool's {task}")
    for name in _COUNTS:
        require_integer(name, settings.get(name, 1))

    try:
        return envpool.make_spec(task, **settings)
    except TypeError as mistake:
        # EnvPool's message shows the signature in C++.
        raise TypeError(f"env_kwargs={settings} has a value of a type that EnvPool's {task} does not know") from mistake
