"""SB3's contract for vectorized environments, over environments that another library steps as one batch."""

import ctypes
import functools
import os
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor, ResultsWriter
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from sb3_ano._system import cores
from sb3_ano.envs.atari import AtariProtocol

#: gymnasium's space of any values.
Space = spaces.Space[Any]
#: An array, or arrays by the names of a Dict space.
Observations = np.ndarray | dict[str, np.ndarray]

# Attributes of environments that are the same for the whole batch.
_SHARED = ("action_space", "metadata", "observation_space", "render_mode", "spec")
# Threads of PyTorch that are worth ending for a step. Each takes some 40 microseconds to start again.
_MOST_ENDED = 3


class NoSingleEnvError(NotImplementedError, AttributeError):
    """A batch cannot do what needs single Python environments; an AttributeError, because ``has_attr`` catches it."""


class Transition(NamedTuple):
    """One step of all environments, before those that are done are restarted.

    :param observations: shape ``(n_envs, ...)``, or a dictionary of such arrays
    :param rewards: shape ``(n_envs,)``, float32
    :param scores: rewards before clipping, shape ``(n_envs,)``
    :param terminated: shape ``(n_envs,)``, bool
    :param truncated: shape ``(n_envs,)``, bool
    :param over: whether the game has ended, shape ``(n_envs,)``. A lost life can end the learner's episode, but not the game;
        otherwise it is ``terminated | truncated``
    :param details: array that the backend needs to restart environments
    """

    observations: Observations
    rewards: np.ndarray
    scores: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    over: np.ndarray
    details: np.ndarray | None = None


class BatchedVecEnv(VecEnv):
    """SB3's VecEnv over a batch. A backend implements ``_open``, ``_begin``, ``_advance``, ``_restart`` and ``_release``.

    Episode statistics are computed for all environments at once: ``infos[i]["episode"]`` has the keys and meaning of
    SB3's Monitor, with the unclipped score. Returned arrays are new at each step and belong to the caller.

    :param env_id: id of the task
    :param n_envs: number of environments
    :param atari: protocol of an Atari game, or None
    :param num_threads: number of threads; None: one per processor, at most ``n_envs``
    :param seed: environment ``i`` gets ``seed + i`` at the first reset; None draws seeds
    :param monitor_dir: directory of ``0.monitor.csv``, one file for the batch; None writes none
    :param override_existing: whether to replace the file of an earlier batch instead of appending to it
    :param env_kwargs: settings of the task in the backend's names
    :raises ValueError: if the backend does not have the task, or SB3's policies do not support its spaces
    :raises TypeError: if the task does not have a setting
    """

    #: Name of the backend.
    backend: str

    def __init__(
        self,
        env_id: str,
        n_envs: int,
        atari: AtariProtocol | None,
        num_threads: int | None,
        *,
        seed: int | None,
        monitor_dir: str | None,
        override_existing: bool = True,
        env_kwargs: dict[str, object],
    ) -> None:
        self.env_id = env_id
        self.num_envs = n_envs
        self.num_threads = min(n_envs, num_threads or cores())
        self.spec = gym.registry.get(env_id)
        # VecEnv asks get_attr for it when it is made.
        self.render_mode: str | None = None
        observation_space, action_space = self._open(atari, env_kwargs)
        super().__init__(n_envs, observation_space, action_space)

        self._actions: np.ndarray | None = None
        self._started = False
        self._closed = False

        # Of the running episodes.
        self._returns = np.zeros(n_envs)
        self._lengths = np.zeros(n_envs, np.int64)
        self._t_start = time.time()
        self._writer: ResultsWriter | None = None
        if monitor_dir is not None:
            header: dict[str, float | str] = {"t_start": self._t_start, "env_id": env_id}
            file = os.path.join(monitor_dir, "0")
            self._writer = ResultsWriter(file, header, override_existing=override_existing)
            # If close() is never called.
            weakref.finalize(self, self._writer.close)

        # After VecEnv's constructor, which sets all seeds to None.
        if seed is not None:
            self.seed(seed)

    @abstractmethod
    def _open(self, atari: AtariProtocol | None, env_kwargs: dict[str, object]) -> tuple[Space, Space]:
        """Check the task and its settings, and prepare the batch.

        :return: observation space and action space of one environment
        """

    @abstractmethod
    def _begin(self, seeds: list[int] | None) -> Observations:
        """Start new episodes in all environments.

        :param seeds: one seed per environment, or None to continue with the present generators
        :return: observations, shape ``(n_envs, ...)``, or a dictionary of such arrays
        """

    @abstractmethod
    def _advance(self, actions: np.ndarray) -> Transition:
        """Step all environments.

        :param actions: valid actions, shape ``(n_envs, ...)``
        """

    @abstractmethod
    def _restart(self, indices: np.ndarray, transition: Transition) -> tuple[Observations, Observations]:
        """Start the learner's next episode in the environments that are done.

        :param indices: indices of these environments, ascending
        :return: copies of the last observations of the old episodes, and the first observations of the new ones
        """

    @abstractmethod
    def _release(self) -> None:
        """Free the backend's resources; called once."""

    def reset(self) -> VecEnvObs:
        """Start new episodes in all environments, with new seeds after ``seed()``.

        :return: observations, shape ``(n_envs, ...)``, or a dictionary of such arrays
        :raises RuntimeError: after ``close``
        """
        self._require_open()
        # VecEnv forgets the seeds after a reset, so that the generators continue in the next one.
        seeds = None
        if self._seeds[0] is not None:
            seeds = [int(seed) for seed in self._seeds if seed is not None]
        elif not self._started:
            # EnvPool's own default is the same number for every pool.
            seeds = np.random.default_rng().integers(2**31, size=self.num_envs).tolist()

        observations: VecEnvObs = self._begin(seeds)
        self._reset_seeds()
        self._started = True
        self._actions = None

        # Also of the episodes that the reset interrupts, as Monitor does.
        self._returns[:] = 0.0
        self._lengths[:] = 0
        self.reset_infos = [{} for _ in range(self.num_envs)]
        return observations

    def step_async(self, actions: np.ndarray) -> None:
        """Store the actions of the next step.

        :param actions: shape ``(n_envs, ...)``
        :raises ValueError: if the shape differs, or a discrete action is not in the action space
        """
        actions = np.asarray(actions)
        allowed = (self.num_envs, *(self.action_space.shape or ()))
        if actions.shape != allowed:
            raise ValueError(f"actions of shape {actions.shape} are not allowed; allowed is {allowed}")

        # The libraries use actions as indices without checking them.
        if isinstance(self.action_space, spaces.Discrete | spaces.MultiDiscrete):
            first = self.action_space.start
            if isinstance(self.action_space, spaces.Discrete):
                count = self.action_space.n
            else:
                count = self.action_space.nvec

            inside = (actions >= first) & (actions < first + count)
            if not inside.all():
                raise ValueError(f"actions={actions[~inside]} are not in {self.action_space}")

        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """Step all environments; those that are done start their next episode in the same step.

        :return: observations ``(n_envs, ...)``, rewards ``(n_envs,)`` float32, dones ``(n_envs,)`` bool, infos
        :raises RuntimeError: before ``reset``, without ``step_async``, or after ``close``
        """
        self._require_open()
        if not self._started or self._actions is None:
            raise RuntimeError(f"{self.env_id}: call reset() before the first step, and step_async() before step_wait()")

        # PyTorch's threads spin for milliseconds after their work. Where processors are few, they slow the environments.
        idle = max(0, cores() - self.num_threads)
        if idle < torch.get_num_threads() - 1 <= _MOST_ENDED:
            end_idle_threads()

        transition = self._advance(self._actions)
        self._actions = None
        self._returns += transition.scores
        self._lengths += 1

        observations = transition.observations
        dones = transition.terminated | transition.truncated
        # In the infos of every step, as from SB3's own classes.
        infos: list[dict[str, object]] = [{"TimeLimit.truncated": False} for _ in range(self.num_envs)]

        # Most steps end no episode.
        if dones.any():
            indices = np.flatnonzero(dones)
            only_truncated = transition.truncated & ~transition.terminated
            terminal, first = self._restart(indices, transition)

            # SB3 expects the first observation of the next episode in this step.
            if isinstance(observations, dict):
                for key, part in observations.items():
                    part[indices] = first[key]
            else:
                observations[indices] = first

            for row, index in enumerate(indices.tolist()):
                infos[index]["terminal_observation"] = mapped(itemgetter(row), terminal)
                # SB3 bootstraps the value of the last observation only after a truncation.
                infos[index]["TimeLimit.truncated"] = bool(only_truncated[index])
                self.reset_infos[index] = {}
                # A lost life ends the learner's episode, but not the score's.
                if transition.over[index]:
                    infos[index]["episode"] = self._finish_episode(index)

        return observations, transition.rewards, dones, infos

    def _finish_episode(self, index: int) -> dict[str, float]:
        """Return the statistics of an environment's episode, rounded as by Monitor, and reset them."""
        episode = {
            "r": round(float(self._returns[index]), 6),
            "l": int(self._lengths[index]),
            "t": round(time.time() - self._t_start, 6),
        }
        self._returns[index] = 0.0
        self._lengths[index] = 0

        # The rows are in the order in which episodes end, as those of VecMonitor.
        if self._writer is not None:
            self._writer.write_row(episode)
        return episode

    def close(self) -> None:
        """Free all resources; a second call does nothing."""
        if self._closed:
            return
        # First, so that an error of the library is not raised again by another call.
        self._closed = True
        self._release()
        if self._writer is not None:
            self._writer.close()

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"{self.env_id}: the environment is closed")

    def set_options(self, options: list[dict[str, Any]] | dict[str, Any] | None = None) -> None:
        """Reject reset options, which a batch does not have.

        :raises NoSingleEnvError: if there are options
        """
        # One dictionary for all environments, or one for each.
        given = options
        if isinstance(options, list):
            given = next(filter(None, options), None)

        if given:
            raise self._needs_single_envs("take reset options")

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Return ``render_mode``, ``spec``, ``metadata``, ``observation_space`` or ``action_space`` once per environment.

        :raises NoSingleEnvError: for other attributes, because there are no Python environments
        """
        if attr_name not in _SHARED:
            raise self._needs_single_envs(f"get {attr_name!r}, only {', '.join(_SHARED)}")
        return [getattr(self, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: object, indices: VecEnvIndices = None) -> None:
        """Raise NoSingleEnvError."""
        raise self._needs_single_envs(f"set {attr_name!r}")

    def env_method(self, method_name: str, *args: object, indices: VecEnvIndices = None, **kwargs: object) -> list[Any]:
        """Raise NoSingleEnvError."""
        raise self._needs_single_envs(f"call {method_name!r}")

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        """Return True for Monitor, whose statistics are computed here, so that SB3 reads ``infos[i]["episode"]``."""
        return [issubclass(Monitor, wrapper_class) for _ in self._get_indices(indices)]

    def get_images(self) -> Sequence[np.ndarray | None]:
        """Return an image per environment.

        :raises NoSingleEnvError: if the environments do not render
        """
        raise self._needs_single_envs("render these environments")

    def render(self, mode: str | None = None) -> np.ndarray | None:
        """Return the images of all environments as one image.

        :raises NoSingleEnvError: if the environments do not render
        """
        # SB3 would only warn, and return None.
        if self.render_mode is None:
            self.get_images()
        return super().render(mode)

    def _needs_single_envs(self, what: str) -> NoSingleEnvError:
        return NoSingleEnvError(f"backend {self.backend!r} cannot {what}; backend='gymnasium' can")


def mapped(function: Callable[[Any], Any], values: Any) -> Any:
    """Apply a function to an array or tensor, or to each entry of a dictionary."""
    if isinstance(values, dict):
        return {key: function(part) for key, part in values.items()}

    return function(values)


def end_idle_threads() -> None:
    """End PyTorch's threads on the CPU until the next operation that is worth several; nothing happens if OpenMP cannot."""
    pause = _pause_of_openmp()
    if pause is not None:
        pause(1)  # omp_pause_soft


@functools.cache
def _pause_of_openmp() -> Callable[[int], int] | None:
    # Of the library that PyTorch's own is linked with: there may be others in the process.
    try:
        pause: Callable[[int], int] = ctypes.CDLL(torch._C.__file__).omp_pause_resource_all
        return pause
    except (OSError, AttributeError):
        return None
