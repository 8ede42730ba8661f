"""SB3's contract for environments that are stepped as tensors on one device, such as those of robot simulators on a GPU."""

import time
from abc import abstractmethod
from typing import Any, NamedTuple, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

#: Observations ``(n_envs, ...)``, or a dictionary of those.
TensorObs: TypeAlias = torch.Tensor | dict[str, torch.Tensor]

# Keys under which simulators return the observations before a reset: ManiSkill's, and gymnasium's.
_FINAL = ("final_observation", "final_obs")
# Bounds of actions whose space has none. SB3 rejects infinite ones; Isaac Lab's wrapper for SB3 takes the same number.
_BOUND = 100.0


class TensorStep(NamedTuple):
    """One step of all environments, in which those that ended have begun their next episode.

    :param observations: observations after the step, of the new episode for environments that ended
    :param rewards: float32, ``(n_envs,)``
    :param terminated: bool, ``(n_envs,)``
    :param truncated: bool, ``(n_envs,)``
    :param final_observations: observations before the reset, of which the rows of environments that ended are read; None if
        the environments do not tell
    """

    observations: TensorObs
    rewards: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor
    final_observations: TensorObs | None


#: Environment, and statistics as SB3's Monitor has them, of an episode that has ended.
Episode: TypeAlias = tuple[int, dict[str, float]]


class TensorVecEnv(VecEnv):
    """Step environments as tensors; a subclass implements :meth:`begin` and :meth:`advance`.

    On the device, :meth:`reset_tensors` and :meth:`step_tensors` wait for nothing. ``reset`` and ``step`` are SB3's, with
    NumPy arrays and infos, for ``evaluate_policy`` and everything else that is written for SB3; each of their calls waits for
    the device, and copies observations, rewards and ends.

    A subclass may have a method ``action_masks()`` that returns the allowed actions as a bool tensor ``(n_envs, n)``.

    :param num_envs: number of environments
    :param observation_space: observation space of one environment
    :param action_space: action space of one environment; infinite bounds of a Box become -100 and 100
    :param device: device of all tensors
    """

    #: Name of the backend, as of other environments of this package.
    backend = "tensor"

    def __init__(
        self,
        num_envs: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self.render_mode: str | None = None
        if isinstance(action_space, spaces.Box):
            low = np.where(np.isfinite(action_space.low), action_space.low, -_BOUND)
            high = np.where(np.isfinite(action_space.high), action_space.high, _BOUND)
            action_space = spaces.Box(low, high, dtype=action_space.dtype.type)
        super().__init__(num_envs, observation_space, action_space)

        self._actions: np.ndarray | None = None
        self._t_start = time.time()
        self._start_episodes()

    def _start_episodes(self) -> None:
        # Returns and lengths of the running episodes, and ends and copies of these at each step since they were last read.
        self._totals = torch.zeros(2, self.num_envs, dtype=torch.float64, device=self.device)
        self._ended: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []

    @abstractmethod
    def begin(self, seed: int | None) -> TensorObs:
        """Start new episodes in all environments, and return their observations.

        :param seed: seed of the environments, or None to continue with the present random numbers
        """

    @abstractmethod
    def advance(self, actions: torch.Tensor) -> TensorStep:
        """Step all environments; those that end begin their next episode.

        :param actions: shape ``(n_envs, ...)``, within the bounds of the action space
        """

    def reset_tensors(self) -> TensorObs:
        """Start new episodes in all environments, with new seeds after ``seed()``."""
        seed = self._seeds[0]
        observations = self.begin(None if seed is None else int(seed))

        self._reset_seeds()
        self._start_episodes()
        self.reset_infos = [{} for _ in range(self.num_envs)]
        return observations

    def step_tensors(self, actions: torch.Tensor) -> TensorStep:
        """Step all environments, and note rewards and ends for the statistics of episodes.

        :param actions: actions on the device, ``(n_envs, ...)``
        """
        step = self.advance(actions)
        ended = step.terminated | step.truncated

        self._totals[0] += step.rewards
        self._totals[1] += 1.0
        self._ended.append(ended)
        self._sums.append(self._totals.clone())
        self._totals.masked_fill_(ended, 0.0)
        return step

    def end_rollout(self) -> list[Episode]:
        """Return the episodes that ended since the last call, waiting for the device once."""
        if not self._ended:
            return []
        steps, environments = torch.stack(self._ended).nonzero(as_tuple=True)
        totals = torch.stack(self._sums)[steps, :, environments]
        rows = torch.cat([environments[:, None], totals], dim=1).tolist()
        self._ended = []
        self._sums = []

        seconds = round(time.time() - self._t_start, 6)
        return [(int(index), {"r": round(total, 6), "l": int(length), "t": seconds}) for index, total, length in rows]

    def reset(self) -> VecEnvObs:
        """Start new episodes in all environments; see :meth:`reset_tensors`.

        :return: observations as NumPy arrays
        """
        observations: VecEnvObs = to_numpy(self.reset_tensors())
        return observations

    def step_async(self, actions: np.ndarray) -> None:
        """Store the actions of the next step.

        :param actions: shape ``(n_envs, ...)``
        """
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """Step all environments, wait for the device, and copy the results.

        :return: observations, rewards ``(n_envs,)`` float32, dones ``(n_envs,)`` bool, infos
        :raises RuntimeError: without ``step_async``
        """
        if self._actions is None:
            raise RuntimeError("call step_async(actions) before step_wait()")
        step = self.step_tensors(torch.as_tensor(self._actions, device=self.device))
        self._actions = None

        terminated = step.terminated.cpu().numpy()
        truncated = step.truncated.cpu().numpy()
        infos: list[dict[str, Any]] = [{"TimeLimit.truncated": False} for _ in range(self.num_envs)]
        for index, episode in self.end_rollout():
            infos[index]["episode"] = episode
            infos[index]["TimeLimit.truncated"] = bool(truncated[index] and not terminated[index])
            self.reset_infos[index] = {}
            if step.final_observations is not None:
                infos[index]["terminal_observation"] = to_numpy(step.final_observations, index)
        rewards = np.array(step.rewards.cpu().numpy(), dtype=np.float32)
        return to_numpy(step.observations), rewards, terminated | truncated, infos

    def close(self) -> None:
        """Free the environments; nothing to do unless a subclass does it."""

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Return an attribute of the batch once per environment.

        :raises AttributeError: if the batch does not have it
        """
        value = getattr(self, attr_name)
        return [value for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Raise NotImplementedError, because there are no single environments."""
        raise NotImplementedError(f"these environments are one batch: attribute {attr_name!r} of some cannot be set")

    def env_method(self, method_name: str, *args: Any, indices: VecEnvIndices = None, **kwargs: Any) -> list[Any]:
        """Return the rows of ``action_masks()`` as NumPy arrays.

        :raises NotImplementedError: for other methods, because there are no single environments
        """
        if method_name != "action_masks":
            raise NotImplementedError(f"these environments are one batch: method {method_name!r} of some cannot be called")
        masks = self.get_attr(method_name)[0]().cpu().numpy()
        return [masks[index] for index in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        """Return True for Monitor, whose statistics are computed here, so that SB3 reads ``infos[i]["episode"]``."""
        return [issubclass(Monitor, wrapper_class) for _ in self._get_indices(indices)]


def to_numpy(values: TensorObs, index: Any = ...) -> Any:
    """Copy tensors, or some rows of them, to NumPy arrays that share no memory with them."""
    if isinstance(values, dict):
        return {key: to_numpy(part, index) for key, part in values.items()}
    return np.array(values[index].cpu().numpy())


class _Simulator(TensorVecEnv):
    """Environments of a simulator; see :func:`from_tensor_env`."""

    def __init__(self, env: Any, group: str | None) -> None:
        space = env.single_observation_space
        if group is None and isinstance(space, spaces.Dict) and len(space.spaces) == 1:
            group = next(iter(space.spaces))
        if group is not None and (not isinstance(space, spaces.Dict) or group not in space.spaces):
            raise ValueError(f"group={group!r} is not in the observation space {space}")

        self._env = env
        self._group = group
        if group is not None:
            space = space[group]
        super().__init__(env.num_envs, space, env.single_action_space, env.device)
        if hasattr(env, "action_masks"):
            self.action_masks = env.action_masks

    def begin(self, seed: int | None) -> TensorObs:
        observations, _ = self._env.reset(seed=seed)
        return self._observed(observations)

    def advance(self, actions: torch.Tensor) -> TensorStep:
        observations, rewards, terminated, truncated, extras = self._env.step(actions)
        final = None
        for name in _FINAL:
            if name in extras:
                final = self._observed(extras[name])
        ends = terminated.bool().flatten(), truncated.bool().flatten()
        return TensorStep(self._observed(observations), rewards.float().flatten(), *ends, final)

    def _observed(self, observations: Any) -> TensorObs:
        """Return the chosen group of observations, or all of them as an ordinary dictionary."""
        if self._group is not None:
            chosen: torch.Tensor = observations[self._group]
            return chosen
        return dict(observations.items()) if hasattr(observations, "items") else observations

    def close(self) -> None:
        self._env.close()


def from_tensor_env(env: Any, group: str | None = None) -> TensorVecEnv:
    """Wrap environments with gymnasium's vectorized interface whose arrays are tensors, such as Isaac Lab's and ManiSkill's.

    ``env.reset(seed=...)`` returns observations and extras; ``env.step(actions)`` returns observations, rewards, terminated,
    truncated and extras, and resets the environments that ended. ``num_envs``, ``device``, ``single_observation_space`` and
    ``single_action_space`` describe them, and a method ``action_masks`` is passed on.

    Truncated episodes are bootstrapped with the observation before the reset if extras contain it, as ``final_observation`` or
    ``final_obs``, a whole batch. Otherwise the value of the observation before the step stands for it, as in RSL-RL.

    :param env: environments
    :param group: key of the observations to use; None takes all as a Dict, or the only one by itself
    :raises ValueError: if there is no such group
    """
    return _Simulator(env, group)
