"""What SB3 expects of a vectorised environment, on top of environments that another library steps as one batch."""

import os
import time
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor, ResultsWriter
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class NoSingleEnvError(NotImplementedError, AttributeError):
    """Asked of one environment what only a batch of Python environments has; an AttributeError for ``has_attr``."""


class Transition(NamedTuple):
    """One step of all environments, before those that ended are restarted; arrays have ``n_envs`` rows.

    ``scores`` are the rewards before any clipping. ``over`` says where the game has ended, which a lost life that ends the
    learner's episode does not; everywhere else it is ``terminated | truncated``. ``details`` is the backend's own.
    """

    observations: np.ndarray
    rewards: np.ndarray
    scores: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    over: np.ndarray
    details: Any = None


class BatchedVecEnv(VecEnv):
    """SB3's VecEnv over a batch; a backend implements ``_begin``, ``_advance``, ``_restart`` and ``_release``.

    Statistics of episodes are kept here for all environments at once: ``infos[i]["episode"]`` has the keys and meaning of
    SB3's Monitor, with the unclipped score. Arrays that are returned are new at every step and belong to the caller.

    :param env_id: named in errors and in the monitor file
    :param backend: name of the backend
    :param n_envs: number of environments
    :param observation_space: of one environment
    :param action_space: of one environment
    :param seed: environment ``i`` gets ``seed + i`` at the first reset; None draws seeds
    :param monitor_dir: folder for ``0.monitor.csv``, one file for the batch; None writes none
    :param render_mode: None or ``"rgb_array"``
    """

    def __init__(
        self,
        env_id: str,
        backend: str,
        n_envs: int,
        observation_space: spaces.Box,
        action_space: spaces.Space,
        *,
        seed: int | None = None,
        monitor_dir: str | os.PathLike[str] | None = None,
        render_mode: str | None = None,
    ) -> None:
        self.env_id = env_id
        self.backend = backend
        self._attributes = {
            "action_space": action_space,
            "metadata": {"render_modes": ["rgb_array"] if render_mode else []},
            "observation_space": observation_space,
            "render_mode": render_mode,
            "spec": gym.registry.get(env_id),
        }
        super().__init__(n_envs, observation_space, action_space)
        self._action_shape = (n_envs, *(action_space.shape or ()))
        self._actions: np.ndarray | None = None
        self._started = False
        self._closed = False
        self._returns = np.zeros(n_envs)
        self._lengths = np.zeros(n_envs, np.int64)
        self._t_start = time.time()
        self._writer: ResultsWriter | None = None
        if monitor_dir is not None:
            header: dict[str, float | str] = {"t_start": self._t_start, "env_id": env_id}
            self._writer = ResultsWriter(os.path.join(monitor_dir, "0"), header=header)
            weakref.finalize(self, self._writer.close)  # also without close()
        if seed is not None:
            self.seed(seed)

    @abstractmethod
    def _begin(self, seeds: list[int] | None) -> np.ndarray:
        """Start new episodes everywhere.

        :param seeds: one for each environment, or None to go on with the generators as they are
        :return: observations, shape ``(n_envs, ...)``
        """

    @abstractmethod
    def _advance(self, actions: np.ndarray) -> Transition:
        """Step all environments.

        :param actions: shape ``(n_envs, ...)``, already checked
        """

    @abstractmethod
    def _restart(self, indices: np.ndarray, transition: Transition) -> tuple[np.ndarray, np.ndarray]:
        """Start the next episode of the learner in the environments that are done.

        :param indices: of those environments, ascending
        :return: copies of the last observations of the old episodes, and the first of the new ones
        """

    @abstractmethod
    def _release(self) -> None:
        """Give back what the backend holds; called once."""

    def reset(self) -> VecEnvObs:
        """Start new episodes everywhere, with new seeds after ``seed()``.

        :return: observations, shape ``(n_envs, ...)``
        """
        self._check_open()
        seeds = None if self._seeds[0] is None else [int(seed) for seed in self._seeds if seed is not None]
        if seeds is None and not self._started:
            seeds = [int(seed) for seed in np.random.default_rng().integers(2**31, size=self.num_envs)]
        observations = self._begin(seeds)
        self._reset_seeds()
        self._started = True
        self._actions = None
        self._returns[:] = 0.0
        self._lengths[:] = 0
        self.reset_infos = [{} for _ in range(self.num_envs)]
        return observations

    def step_async(self, actions: np.ndarray) -> None:
        """Take the actions for the next step.

        :param actions: shape ``(n_envs, ...)``
        :raises ValueError: if they have another shape, or a discrete one is not in the action space
        """
        actions = np.asarray(actions)
        if actions.shape != self._action_shape:
            raise ValueError(f"actions of shape {actions.shape} are not allowed; allowed is {self._action_shape}")
        if isinstance(self.action_space, spaces.Discrete):
            # The libraries underneath index with them, unchecked.
            inside = (actions >= self.action_space.start) & (actions < self.action_space.start + self.action_space.n)
            if not inside.all():
                raise ValueError(f"actions={actions[~inside]} are not in {self.action_space}")
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """Step all environments; those that are done start their next episode at once.

        :return: observations ``(n_envs, ...)``, rewards ``(n_envs,)`` float32, dones ``(n_envs,)`` bool, infos
        :raises RuntimeError: before ``reset``, without ``step_async``, or after ``close``
        """
        self._check_open()
        if not self._started or self._actions is None:
            raise RuntimeError(f"{self.env_id}: call reset() before the first step, and step_async() before step_wait()")
        transition = self._advance(self._actions)
        self._actions = None
        self._returns += transition.scores
        self._lengths += 1
        dones = transition.terminated | transition.truncated
        infos: list[dict[str, Any]] = [{"TimeLimit.truncated": False} for _ in range(self.num_envs)]
        observations = transition.observations
        if dones.any():
            indices = np.flatnonzero(dones)
            terminal, first = self._restart(indices, transition)
            observations[indices] = first
            for row, index in enumerate(indices.tolist()):
                info = infos[index]
                info["terminal_observation"] = terminal[row]
                info["TimeLimit.truncated"] = bool(transition.truncated[index] and not transition.terminated[index])
                self.reset_infos[index] = {}
                if transition.over[index]:
                    info["episode"] = self._finished_episode(index)
        return observations, transition.rewards, dones, infos

    def _finished_episode(self, index: int) -> dict[str, float]:
        """Statistics of the episode that ended in environment ``index``, rounded as Monitor does, and counted afresh."""
        episode = {
            "r": round(float(self._returns[index]), 6),
            "l": int(self._lengths[index]),
            "t": round(time.time() - self._t_start, 6),
        }
        self._returns[index] = 0.0
        self._lengths[index] = 0
        if self._writer is not None:
            self._writer.write_row(episode)
        return episode

    def close(self) -> None:
        """Give everything back; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._release()
        if self._writer is not None:
            self._writer.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"{self.env_id}: the environment is closed")

    def set_options(self, options: list[dict] | dict | None = None) -> None:
        """Batches take no options at reset.

        :raises NotImplementedError: if there are any
        """
        if any(options if isinstance(options, list) else [options or {}]):
            raise NotImplementedError(f"backend {self.backend!r} takes no reset options; backend='gymnasium' does")

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """``render_mode``, ``spec``, ``metadata``, ``observation_space`` or ``action_space``, once for each environment.

        :raises NoSingleEnvError: for any other, because there are no Python environments to ask
        """
        if attr_name not in self._attributes:
            raise NoSingleEnvError(
                f"backend {self.backend!r} has no environments with an attribute {attr_name!r}; "
                f"it answers {', '.join(self._attributes)}, and backend='gymnasium' all of them"
            )
        return [self._attributes[attr_name] for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Not possible.

        :raises NoSingleEnvError: always
        """
        raise NoSingleEnvError(f"backend {self.backend!r} cannot set {attr_name!r}; backend='gymnasium' can")

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Not possible.

        :raises NoSingleEnvError: always
        """
        raise NoSingleEnvError(f"backend {self.backend!r} cannot call {method_name!r}; backend='gymnasium' can")

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        """True for Monitor, whose statistics are kept here, so that SB3 reads ``infos[i]["episode"]``."""
        return [issubclass(Monitor, wrapper_class) for _ in self._get_indices(indices)]

    def get_images(self) -> Sequence[np.ndarray | None]:
        """Pictures of all environments.

        :raises NotImplementedError: if this backend draws none
        """
        raise NotImplementedError(
            f"backend {self.backend!r} does not render; use backend='gymnasium' with env_kwargs={{'render_mode': 'rgb_array'}}"
        )

    def render(self, mode: str | None = None) -> np.ndarray | None:
        """The pictures of all environments as one.

        :raises NotImplementedError: if the environments were not made to be rendered
        """
        if self.render_mode is None:
            self.get_images()
        return super().render(mode)
