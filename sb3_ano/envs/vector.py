"""SB3's contract for gymnasium's vector environments."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from stable_baselines3.common.vec_env import VecEnv, VecMonitor
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

# The infos of an environment, or of a batch in gymnasium's form, by their names.
_Infos: TypeAlias = dict[str, Any]


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

        # Any, because the methods call, set_attr and get_attr are those of gymnasium's two classes, not of their base.
        self.env: Any = env
        # VecEnv asks get_attr for it when it is made.
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
        # The environment may write into the same arrays in the next step, while SB3 still has these.
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
        # As in reset.
        observations = deepcopy(observations)
        dones = np.logical_or(terminated, truncated)
        infos = _of_each(batch, self.num_envs)

        # Most steps end no episode.
        if dones.any():
            final = observations
            starts = infos
            ends = infos
            if self._resets_itself:
                # The batch has the next episode's first observations and infos. Those of the end are under these two keys.
                if "final_obs" not in batch:
                    raise RuntimeError(f"{self.env} has no infos['final_obs'], which the mode SAME_STEP requires")
                final = batch["final_obs"]
                ends = _of_each(batch.get("final_info", {}), self.num_envs)
            else:
                # SB3 expects the first observation of the next episode in this step.
                observations, batch = self._reset_some(dones, observations)
                starts = _of_each(batch, self.num_envs)

            for index in np.flatnonzero(dones).tolist():
                self.reset_infos[index] = starts[index]
                infos[index] = ends[index]
                # Its own memory, because SB3 evaluates it after the step.
                last = row_of(final, index)
                infos[index]["terminal_observation"] = deepcopy(last)

        # SB3 bootstraps the value of the last observation only after a truncation.
        for index, info in enumerate(infos):
            info["TimeLimit.truncated"] = bool(truncated[index] and not terminated[index])

        # gymnasium's rewards are float64.
        rewards = np.array(rewards, dtype=np.float32)
        return observations, rewards, dones, infos

    def _reset_some(self, dones: np.ndarray, before: VecEnvObs) -> tuple[VecEnvObs, _Infos]:
        """Reset the environments that are done.

        :raises RuntimeError: if others were reset, too
        """
        # A copy, because the environment may keep it or write into it, while SB3 gets the dones.
        mask = dones.copy()
        observations, infos = self.env.reset(options={"reset_mask": mask})

        # An environment that does not know the option resets all, which would cut the other episodes without a sign.
        space = self.observation_space
        for index in np.flatnonzero(~dones).tolist():
            row_before = np.asarray(spaces.flatten(space, row_of(before, index)))
            row_after = np.asarray(spaces.flatten(space, row_of(observations, index)))
            # The same NaN twice is no reset.
            if not np.array_equal(row_before, row_after, equal_nan=True):
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
        images = self.env.render()
        # None without a render mode.
        return list(images or ())

    def has_attr(self, attr_name: str) -> bool:
        """Tell whether all single environments have an attribute."""
        # Batches that are written as such have no single environments to call.
        call = getattr(self.env.unwrapped, "call", None)
        if call is None:
            return False

        # Asked first, because an attribute that one does not have would end gymnasium's processes.
        return all(call("has_wrapper_attr", attr_name))

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Return an attribute of each environment.

        :raises AttributeError: if they do not have it, or ``env`` does not reach them
        """
        # SB3 asks for it when it makes a VecEnv, also over batches without single environments.
        if attr_name == "render_mode":
            return [self.render_mode for _ in self._get_indices(indices)]

        if not self.has_attr(attr_name):
            raise AttributeError(f"the single environments of {self.env} do not have or do not show {attr_name!r}")
        values = self.env.unwrapped.call("get_wrapper_attr", attr_name)
        return [values[index] for index in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: object, indices: VecEnvIndices = None) -> None:
        """Set an attribute of environments.

        :raises AttributeError: if ``env`` does not reach them
        """
        # gymnasium sets the attribute of all environments, to a value for each: the others keep theirs.
        values = [value] * self.num_envs
        if self.has_attr(attr_name):
            values = self.get_attr(attr_name)
        for index in self._get_indices(indices):
            values[index] = value

        self.env.unwrapped.set_attr(attr_name, values)

    def env_method(self, method_name: str, *args: object, indices: VecEnvIndices = None, **kwargs: object) -> list[Any]:
        """Call a method of all environments.

        :raises AttributeError: if ``env`` does not reach them
        :raises ValueError: if only some are asked for
        """
        chosen = [*self._get_indices(indices)]
        if len(chosen) < self.num_envs:
            raise ValueError(f"indices={indices} are not allowed; {self.env} calls methods of all environments")

        # In the order of the indices, as SB3's classes return them.
        values = self.env.unwrapped.call(method_name, *args, **kwargs)
        return [values[index] for index in chosen]

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        """Return False: a vector environment does not tell."""
        return [False for _ in self._get_indices(indices)]


def row_of(values: VecEnvObs, index: int) -> VecEnvObs:
    """Return the observation of one environment."""
    if isinstance(values, dict):
        return {key: part[index] for key, part in values.items()}
    if isinstance(values, tuple):
        return tuple(part[index] for part in values)
    row: np.ndarray = values[index]
    return row


def _of_each(batch: _Infos, n_envs: int) -> list[_Infos]:
    """Return the infos of each environment; ``_key`` tells which of them have the key."""
    infos: list[_Infos] = [{} for _ in range(n_envs)]

    for key, values in batch.items():
        is_mask = key.startswith("_") and key[1:] in batch
        # SB3 has the last observation under its own name, and the last infos in the infos of the step.
        if is_mask or key in ("final_info", "final_obs"):
            continue

        rows = values
        if isinstance(values, dict):
            rows = _of_each(values, n_envs)
        elif np.shape(values)[:1] != (n_envs,):
            # One value for the whole batch.
            rows = [values] * n_envs

        # Without a mask, all environments have the key.
        mask = batch.get(f"_{key}", np.ones(n_envs))
        for index in np.flatnonzero(mask):
            infos[index][key] = rows[index]

    return infos
