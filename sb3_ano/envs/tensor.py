"""SB3's contract for environments that are stepped as tensors on one device, such as those of robot simulators on a GPU."""

import time
from abc import abstractmethod
from types import EllipsisType
from typing import Any, NamedTuple, TypeAlias, overload

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from sb3_ano.envs.batched import Observations, Space

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
        observation_space: Space,
        action_space: Space,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        # VecEnv asks get_attr for it when it is made.
        self.render_mode: str | None = None

        if isinstance(action_space, spaces.Box):
            low = action_space.low
            high = action_space.high
            low = np.where(np.isfinite(low), low, -_BOUND)
            high = np.where(np.isfinite(high), high, _BOUND)
            action_space = spaces.Box(low, high, dtype=action_space.dtype.type)

        super().__init__(num_envs, observation_space, action_space)

        self._actions: np.ndarray | None = None
        self._t_start = time.time()
        self._start_episodes()

    def _start_episodes(self) -> None:
        # Returns and lengths of the running episodes. Monitor, too, adds rewards in float64.
        self._totals = torch.zeros(2, self.num_envs, dtype=torch.float64, device=self.device)

        # Ends, and copies of the totals, per step since the last call of end_rollout. To look at a single end would wait for
        # the device.
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
        # A simulator takes one seed for all environments. It may check for int, and seeds can be NumPy's.
        seed = self._seeds[0]
        if seed is not None:
            seed = int(seed)
        observations = self.begin(seed)

        # SB3's seeds are for one reset, so that the generators continue in the next one.
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
        # A copy, because the next line starts the next episodes in the same memory.
        self._sums.append(self._totals.clone())
        self._totals.masked_fill_(ended, 0.0)
        return step

    def end_rollout(self) -> list[Episode]:
        """Return the episodes that ended since the last call, waiting for the device once."""
        if not self._ended:
            return []

        steps, environments = torch.stack(self._ended).nonzero(as_tuple=True)
        totals = torch.stack(self._sums)[steps, :, environments]
        # One transfer for all three numbers.
        rows = torch.cat([environments[:, None], totals], dim=1).tolist()
        self._ended = []
        self._sums = []

        # Keys and rounding are Monitor's.
        episodes = []
        seconds = round(time.time() - self._t_start, 6)
        for index, total, length in rows:
            statistics = {"r": round(total, 6), "l": int(length), "t": seconds}
            episodes.append((int(index), statistics))
        return episodes

    def reset(self) -> VecEnvObs:
        """Start new episodes in all environments; see :meth:`reset_tensors`.

        :return: observations as NumPy arrays
        """
        return to_numpy(self.reset_tensors())

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

        actions = torch.as_tensor(self._actions, device=self.device)
        step = self.step_tensors(actions)
        self._actions = None

        terminated = step.terminated.cpu().numpy()
        truncated = step.truncated.cpu().numpy()
        dones = terminated | truncated
        # In the infos of every step, as from SB3's own classes.
        infos: list[dict[str, object]] = [{"TimeLimit.truncated": False} for _ in range(self.num_envs)]

        # Read at every step, so that the episodes are those that end here.
        for index, episode in self.end_rollout():
            infos[index]["episode"] = episode
            infos[index]["TimeLimit.truncated"] = bool(truncated[index] and not terminated[index])
            self.reset_infos[index] = {}
            # SB3 bootstraps truncated episodes with it.
            if step.final_observations is not None:
                infos[index]["terminal_observation"] = to_numpy(step.final_observations, index)

        # On the CPU, tensors share the simulator's memory, and SB3 keeps rewards beyond the next step.
        rewards = np.array(step.rewards.cpu().numpy(), dtype=np.float32)
        return to_numpy(step.observations), rewards, dones, infos

    def close(self) -> None:
        """Free the environments; nothing to do unless a subclass does it."""

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Return an attribute of the batch once per environment.

        :raises AttributeError: if the batch does not have it
        """
        value = getattr(self, attr_name)
        return [value for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: object, indices: VecEnvIndices = None) -> None:
        """Raise NotImplementedError, because there are no single environments."""
        raise NotImplementedError(f"these environments are one batch: attribute {attr_name!r} of some cannot be set")

    def env_method(self, method_name: str, *args: object, indices: VecEnvIndices = None, **kwargs: object) -> list[Any]:
        """Return the rows of ``action_masks()`` as NumPy arrays.

        :raises NotImplementedError: for other methods, because there are no single environments
        """
        if method_name != "action_masks":
            raise NotImplementedError(f"these environments are one batch: method {method_name!r} of some cannot be called")

        # sb3-contrib asks for masks by this name.
        masks = self.get_attr(method_name)[0]().cpu().numpy()
        return [masks[index] for index in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        """Return True for Monitor, whose statistics are computed here, so that SB3 reads ``infos[i]["episode"]``."""
        return [issubclass(Monitor, wrapper_class) for _ in self._get_indices(indices)]


@overload
def to_numpy(values: torch.Tensor, index: int | EllipsisType = ...) -> np.ndarray: ...
@overload
def to_numpy(values: TensorObs, index: int | EllipsisType = ...) -> Observations: ...
def to_numpy(values: TensorObs, index: int | EllipsisType = ...) -> Observations:
    """Copy tensors, or one row of them, to NumPy arrays that share no memory with them."""
    if isinstance(values, dict):
        return {key: to_numpy(part, index) for key, part in values.items()}
    # A tensor on the CPU and its NumPy array are the same memory.
    shared = values[index].cpu().numpy()
    return np.array(shared)


class _Simulator(TensorVecEnv):
    """Environments of a simulator; see :func:`from_tensor_env`."""

    def __init__(self, env: Any, group: str | None) -> None:
        space: Space = env.single_observation_space
        groups: dict[str, Space] = {}
        if isinstance(space, spaces.Dict):
            groups = space.spaces
        # Isaac Lab's tasks often have the group "policy" only. By itself, it needs no MultiInputPolicy.
        if group is None and len(groups) == 1:
            group = next(iter(groups))

        if group is not None:
            if group not in groups:
                raise ValueError(f"group={group!r} is not in the observation space {space}")
            space = groups[group]

        self._env = env
        self._group = group
        super().__init__(env.num_envs, space, env.single_action_space, env.device)
        # Only where the simulator has masks: has_attr("action_masks") tells masked algorithms so.
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

        # Simulators differ in types, and some return columns.
        return TensorStep(
            observations=self._observed(observations),
            rewards=rewards.float().flatten(),
            terminated=terminated.bool().flatten(),
            truncated=truncated.bool().flatten(),
            final_observations=final,
        )

    def _observed(self, observations: TensorObs) -> TensorObs:
        """Return the chosen group of observations, or all of them as an ordinary dictionary."""
        if self._group is not None:
            chosen: torch.Tensor = observations[self._group]  # type: ignore[index]
            return chosen

        # Also of a TensorDict, which is no dict.
        if hasattr(observations, "items"):
            return dict(observations.items())
        return observations

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
