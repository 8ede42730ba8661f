"""EnvPool's environments, stepped as one batch in C++ threads."""

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from sb3_ano.envs.atari import AtariProtocol
from sb3_ano.envs.batched import BatchedVecEnv, NoSingleEnvError, Transition, processors
from sb3_ano.envs.make import did_you_mean, unknown_settings
from sb3_ano.extras import missing_extra

try:
    import envpool
    from envpool.registration import registry
except ImportError as error:
    raise missing_extra("envpool", error.name or "envpool") from error

_ATARI = "envpool.atari"
# Tasks that stand for gymnasium's of the same name without being asked for: the same spaces, limits and rewards, and faster.
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
_NOT_PINNED = -1


def has(env_id: str) -> bool:
    """Whether EnvPool has a task of this name."""
    return env_id in registry.specs


def has_game(game: str) -> bool:
    """Whether EnvPool has the Atari game, for example ``SpaceInvaders``."""
    return has(f"{game}-v5") and registry.specs[f"{game}-v5"][0] == _ATARI


def replaces_gymnasium(env_id: str) -> bool:
    """Whether the task may stand for gymnasium's of the same name without being asked for."""
    return registry.specs[env_id][0] in _REPLACES_GYMNASIUM


def takes(env_id: str, env_kwargs: dict[str, Any]) -> bool:
    """Whether the task knows all of these settings."""
    return not set(env_kwargs) - _configuration(env_id)


def _configuration(env_id: str) -> set[str]:
    """The names of a task's settings."""
    with _bounds_in_double_precision():
        return set(envpool.make_spec(env_id).config._asdict()) - _OF_THE_POOL


def _one_thread_a_processor(n_threads: int) -> bool:
    """Whether the pool has a thread for each processor of the machine, so that each may stay on its own.

    Otherwise the operating system often wakes them where the thread that wakes them runs: a step of 8 cheetahs took 350 us on
    two processors, and takes 260. Fewer threads would crowd the first processors, beside those of other processes.
    """
    return n_threads == processors() == os.cpu_count()


class EnvPoolVecEnv(BatchedVecEnv):
    """A VecEnv over EnvPool in synchronous mode.

    EnvPool restarts an environment in the step after the one that ended its episode, and ignores that step's action. Here it
    is restarted before the observations are returned, so that every transition is one of the task. EnvPool takes seeds only
    when a pool is made: the first ``reset`` after ``seed`` makes a new pool.

    In Atari games with ``episodic_life``, EnvPool itself goes on after a lost life: up to ``noop_max`` frames without action,
    and the fire button where the game has one.

    :param env_id: EnvPool's name of the task; of an Atari game, any that ``atari`` came from
    :param n_envs: number of environments
    :param num_threads: threads that step them; None takes as many as there are processors, at most ``n_envs``
    :param atari: the protocol, for Atari games
    :param env_kwargs: settings of the task, in EnvPool's names; ``render_mode`` may be ``"rgb_array"``
    :raises ValueError: for an unknown task, or one whose spaces SB3's policies cannot use
    :raises TypeError: for settings that the task does not know
    """

    def __init__(
        self,
        env_id: str,
        n_envs: int,
        *,
        num_threads: int | None = None,
        atari: AtariProtocol | None = None,
        env_kwargs: dict[str, Any] | None = None,
        seed: int | None = None,
        monitor_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self._task = env_id if atari is None else f"{atari.game}-v5"
        if not has(self._task):
            hint = did_you_mean(self._task, envpool.list_all_envs())
            raise ValueError(f"env_id={env_id!r} is unknown to backend 'envpool'{hint}")
        settings = dict(env_kwargs or {})
        render_mode = settings.pop("render_mode", None)
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode={render_mode!r} is not allowed with backend 'envpool'; allowed is 'rgb_array'")
        known = _configuration(self._task)
        if unknown := set(settings) - known:
            raise unknown_settings(unknown, f"EnvPool's {self._task}", known)
        self._atari = atari is not None
        if atari is not None:
            settings |= _atari_settings(atari)
        self._settings = settings
        self._threads = min(n_envs, num_threads or processors())
        observation_space, action_space = _spaces(self._task, settings)
        self._action_dtype = np.int32 if isinstance(action_space, spaces.Discrete) else np.float64
        self._pool: Any = None
        super().__init__(
            env_id,
            "envpool",
            n_envs,
            observation_space,
            action_space,
            seed=seed,
            monitor_dir=monitor_dir,
            render_mode=render_mode,
        )

    def _begin(self, seeds: list[int] | None) -> np.ndarray:
        if seeds is not None:
            self._make_pool([seed % 2**31 for seed in seeds])
        return self._pool.reset()[0]

    def _make_pool(self, seeds: list[int]) -> None:
        """A pool in place of the present one.

        :param seeds: one for each environment; EnvPool takes 31 bits
        """
        self._release()
        rendering = {} if self.render_mode is None else {"render_mode": self.render_mode}
        self._pool = envpool.make_gymnasium(
            self._task,
            num_envs=self.num_envs,
            num_threads=self._threads,
            thread_affinity_offset=0 if _one_thread_a_processor(self._threads) else _NOT_PINNED,
            seed=seeds,
            **rendering,
            **self._settings,
        )

    def _advance(self, actions: np.ndarray) -> Transition:
        observations, rewards, terminated, truncated, info = self._pool.step(actions.astype(self._action_dtype))
        if not self._atari:
            return Transition(observations, rewards, rewards, terminated, truncated, terminated | truncated)
        over = (info["terminated"] != 0) | truncated
        return Transition(observations, rewards, info["reward"], terminated, truncated, over)

    def _restart(self, indices: np.ndarray, transition: Transition) -> tuple[np.ndarray, np.ndarray]:
        indices = indices.astype(np.int32)
        terminal = transition.observations[indices]
        if self._atari:
            # An explicit reset would end the game also where only a life is lost; EnvPool's own restart, which the next
            # step of a finished episode is, does not.
            first, *_, info = self._pool.step(np.zeros(len(indices), np.int32), indices)
        else:
            first, info = self._pool.reset(indices)
        return terminal, first[np.argsort(info["env_id"])]

    def _release(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def get_images(self) -> Sequence[np.ndarray | None]:
        """Pictures of all environments, each ``(height, width, 3)``, uint8.

        :raises NotImplementedError: without ``env_kwargs={"render_mode": "rgb_array"}``
        :raises RuntimeError: before the first reset
        """
        if self.render_mode is None:
            raise NoSingleEnvError(
                f"{self.env_id} was made without env_kwargs={{'render_mode': 'rgb_array'}}; backend='gymnasium' renders too"
            )
        if self._pool is None:
            raise RuntimeError(f"{self.env_id}: call reset() before rendering")
        return list(self._pool.render(np.arange(self.num_envs)))


def _atari_settings(atari: AtariProtocol) -> dict[str, Any]:
    if atari.noop_max < 1:
        raise ValueError("noop_max=0 is not allowed with backend 'envpool', which crashes; allowed are whole numbers from 1")
    return {
        "repeat_action_probability": atari.repeat_action_probability,
        "episodic_life": atari.episodic_life,
        "reward_clip": atari.clip_reward,
        "noop_max": atari.noop_max,
        "frame_skip": atari.frame_skip,
        "stack_num": atari.frame_stack,
        "img_height": atari.screen_size,
        "img_width": atari.screen_size,
        "full_action_space": atari.full_action_space,
        # EnvPool counts steps.
        "max_episode_steps": -(-atari.max_frames // atari.frame_skip),
    }


def _spaces(task: str, settings: dict[str, Any]) -> tuple[spaces.Box, spaces.Space]:
    """The spaces of one environment, with gymnasium's types, so that models work with either."""
    with _bounds_in_double_precision():
        spec = envpool.make_spec(task, **settings)
        observation_space, action_space = spec.observation_space, spec.action_space
    if not isinstance(observation_space, spaces.Box) or not isinstance(action_space, spaces.Box | spaces.Discrete):
        raise ValueError(
            f"env_id={task!r} has spaces that backend 'envpool' does not support: {observation_space}, {action_space}"
        )
    if isinstance(action_space, spaces.Box):
        # EnvPool computes with float64; gymnasium's environments take float32.
        low, high = (bound.astype(np.float32) for bound in (action_space.low, action_space.high))
        action_space = spaces.Box(low, high, action_space.shape, np.float32)
    elif action_space.dtype != np.int64:
        action_space = spaces.Discrete(int(action_space.n), start=int(action_space.start))
    return observation_space, action_space


@contextlib.contextmanager
def _bounds_in_double_precision() -> Iterator[None]:
    """Without gymnasium's warning that it rounds them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered by casting")
        yield
