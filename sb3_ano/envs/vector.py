"""SB3's contract for gymnasium's vector environments."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from stable_baselines3.common.vec_env import VecEnv, VecMonitor
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn


def from_vector_env(env: VectorEnv) -> VecEnv:
    """Wrap a vector environment of gymnasium, in any of its three modes of automatic resets.

    Environments that are done are reset in the same step. In the modes ``NEXT_STEP`` and ``DISABLED``, this is a reset with
    ``options={"reset_mask": ...}``, which ``env`` has to support. SB3's VecMonitor is around the result, and computes episode
    statistics from the rewards that ``env`` returns.

    :param env: environments with ``metadata["autoreset_mode"]``
    :raises ValueError: if the mode is missing, or cannot be followed
    """
    return VecMonitor(_Vectorized(env))


class _Vectorized(VecEnv):
    """Vector environment of gymnasium; see :func:`from_vector_env`."""

    def __init__(self, env: VectorEnv) -> None:
        mode = env.metadata.get("autoreset_mode")
        if not isinstance(mode, AutoresetMode):
            raise ValueError(
                f"metadata['autoreset_mode']={mode!r} of {env} is not allowed; allowed are members of AutoresetMode"
            )
        # gymnasium's processes without shared memory would reset a second time.
        if mode is AutoresetMode.NEXT_STEP and not getattr(env.unwrapped, "shared_memory", True):
            raise ValueError(f"{env} with shared_memory=False is not allowed in the mode NEXT_STEP; SAME_STEP is allowed")
        self.env: Any = env
        self.render_mode = env.render_mode
        self._resets_itself = mode is AutoresetMode.SAME_STEP
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)

    def reset(self) -> VecEnvObs:
        """Reset all environments, with seed and options if those were set.

        :raises ValueError: if the environments have different options
        """
        options = self._options[0]
        if self._options != [options] * self.num_envs:
            raise ValueError(f"options={self._options} are not allowed; a vector environment has the same for all")
        # Environment i gets the seed plus i.
        observations, infos = self.env.reset(seed=self._seeds[0], options=dict(options) or None)

        # Both are for one reset.
        self._reset_seeds()
        self._reset_options()
        self.reset_infos = _of_each(infos, self.num_envs)
        arrived: VecEnvObs = deepcopy(observations)
        return arrived

    def step_async(self, actions: np.ndarray) -> None:
        """Store the actions of the next step.

        :param actions: shape ``(n_envs, ...)``
        """
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """Step all environments; those that are done are reset in the same step.

        :return: observations ``(n_envs, ...)``, rewards ``(n_envs,)`` float32, dones ``(n_envs,)`` bool, infos
        """
        observations, rewards, terminated, truncated, batch = self.env.step(self._actions)
        # The environment may write into the same arrays in the next step.
        observations = deepcopy(observations)
        dones = np.logical_or(terminated, truncated)
        infos = _of_each(batch, self.num_envs)

        # Most steps end no episode.
        if dones.any():
            final = observations
            starts = infos
            ends = infos
            if self._resets_itself:
                if "final_obs" not in batch:
                    raise RuntimeError(f"{self.env} has no infos['final_obs'], which the mode SAME_STEP requires")
                final = batch["final_obs"]
                ends = _of_each(batch.get("final_info", {}), self.num_envs)
            else:
                observations, batch = self._reset_some(dones, observations)
                starts = _of_each(batch, self.num_envs)

            for index in np.flatnonzero(dones).tolist():
                self.reset_infos[index] = starts[index]
                infos[index] = ends[index]
                infos[index]["terminal_observation"] = deepcopy(row_of(final, index))

        for index, info in enumerate(infos):
            info["TimeLimit.truncated"] = bool(truncated[index] and not terminated[index])
        return observations, np.array(rewards, dtype=np.float32), dones, infos

    def _reset_some(self, dones: np.ndarray, before: Any) -> tuple[Any, dict[str, Any]]:
        """Reset the environments that are done.

        :raises RuntimeError: if others were reset, too
        """
        observations, infos = self.env.reset(options={"reset_mask": dones.copy()})
        for index in np.flatnonzero(~dones).tolist():
            rows: list[Any] = [spaces.flatten(self.observation_space, row_of(part, index)) for part in (before, observations)]
            if not np.array_equal(rows[0], rows[1], equal_nan=True):
                raise RuntimeError(
                    f"{self.env} resets all environments in spite of options={{'reset_mask': ...}}; it needs "
                    "AutoresetMode.SAME_STEP"
                )
        return deepcopy(observations), infos

    def close(self) -> None:
        """Close the environments."""
        self.env.close()

    def get_images(self) -> Sequence[np.ndarray | None]:
        """Return the images that ``env.render()`` returns."""
        return [*(self.env.render() or ())]

    def has_attr(self, attr_name: str) -> bool:
        """Tell whether all single environments have an attribute."""
        # An attribute that one does not have would end gymnasium's processes.
        call = getattr(self.env.unwrapped, "call", None)
        return call is not None and all(call("has_wrapper_attr", attr_name))

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Return an attribute of each environment.

        :raises AttributeError: if they do not have it, or ``env`` does not reach them
        """
        values = [self.render_mode] * self.num_envs
        # Which SB3 asks for before it knows anything else.
        if attr_name != "render_mode":
            if not self.has_attr(attr_name):
                raise AttributeError(f"the single environments of {self.env} do not have or do not show {attr_name!r}")
            values = self.env.unwrapped.call("get_wrapper_attr", attr_name)
        return [values[index] for index in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Set an attribute of environments.

        :raises AttributeError: if ``env`` does not reach them
        """
        # gymnasium sets the attribute of all environments, to a value for each.
        values = [value] * self.num_envs
        if self.has_attr(attr_name):
            values = self.get_attr(attr_name)
        for index in self._get_indices(indices):
            values[index] = value
        self.env.unwrapped.set_attr(attr_name, values)

    def env_method(self, method_name: str, *args: Any, indices: VecEnvIndices = None, **kwargs: Any) -> list[Any]:
        """Call a method of all environments.

        :raises AttributeError: if ``env`` does not reach them
        :raises ValueError: if only some are asked for
        """
        chosen = [*self._get_indices(indices)]
        if len(chosen) < self.num_envs:
            raise ValueError(f"indices={indices} are not allowed; {self.env} calls methods of all environments")
        values = self.env.unwrapped.call(method_name, *args, **kwargs)
        return [values[index] for index in chosen]

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        """Return False: a vector environment does not tell."""
        return [False for _ in self._get_indices(indices)]


def row_of(values: Any, index: int) -> Any:
    """Return the observation of one environment."""
    if isinstance(values, dict):
        return {key: part[index] for key, part in values.items()}
    if isinstance(values, tuple):
        return tuple(part[index] for part in values)
    return values[index]


def _of_each(batch: dict[str, Any], n_envs: int) -> list[dict[str, Any]]:
    """Return the infos of each environment; ``_key`` tells which of them have the key."""
    infos: list[dict[str, Any]] = [{} for _ in range(n_envs)]
    for key, values in batch.items():
        is_mask = key.startswith("_") and key[1:] in batch
        if is_mask or key in ("final_info", "final_obs"):
            continue
        rows = values
        if isinstance(values, dict):
            rows = _of_each(values, n_envs)
        elif np.shape(values)[:1] != (n_envs,):
            rows = [values] * n_envs
        for index in np.flatnonzero(batch.get(f"_{key}", np.ones(n_envs))):
            infos[index][key] = rows[index]
    return infos
