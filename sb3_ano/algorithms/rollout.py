"""Collection of rollouts: what SB3's loop does, with little Python a step, and a guard against numbers that are none."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    CheckpointCallback,
    ConvertCallback,
    EvalCallback,
    EveryNTimesteps,
    LogEveryNTimesteps,
    ProgressBarCallback,
    StopTrainingOnMaxEpisodes,
    StopTrainingOnNoModelImprovement,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnvStepReturn

from sb3_ano.algorithms.actor import Actor, Snapshot, make_actor
from sb3_ano.algorithms.buffers import FlatRolloutBuffer
from sb3_ano.algorithms.validation import require_arguments

Arrays: TypeAlias = np.ndarray | dict[str, np.ndarray] | tuple[np.ndarray, ...]


class RolloutCollection(OnPolicyAlgorithm):
    """SB3's on-policy algorithm with a faster ``collect_rollouts``."""

    check_finite: bool = True

    def collect_rollouts(
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int
    ) -> bool:
        """Fill the buffer; see SB3, whose callbacks find the same local variables here.

        :return: False if a callback ended the training
        :raises ValueError: if an environment returns NaN or infinity
        """
        require_arguments(self)  # a user or a callback may have changed them
        if isinstance(rollout_buffer, FlatRolloutBuffer):
            rollout_buffer.buffer_size = n_rollout_steps  # the buffer is laid out anew if n_steps has changed
        if not self.check_finite:
            return self._collect(env, callback, rollout_buffer, n_rollout_steps, lambda *step: None)
        with checked_steps(env, self.num_timesteps // env.num_envs, self._last_obs) as check:
            return self._collect(env, callback, rollout_buffer, n_rollout_steps, check)

    def _collect(
        self,
        env: VecEnv,
        callback: BaseCallback,
        rollout_buffer: RolloutBuffer,
        n_rollout_steps: int,
        check: Callable[[Any, np.ndarray, np.ndarray, list[dict]], None],
    ) -> bool:
        self.policy.set_training_mode(False)
        n_steps = 0
        rollout_buffer.reset()
        if self.use_sde:
            self.policy.reset_noise(env.num_envs)
        in_bounds = self._to_action_space()
        discrete = isinstance(self.action_space, spaces.Discrete)
        # Tensors are for callbacks, and for buffers that are not ours.
        takes_arrays = getattr(rollout_buffer.add, "__func__", None) is FlatRolloutBuffer.add
        as_tensors = not (_sees_nothing(callback) and takes_arrays)
        callback.on_rollout_start()
        actor = make_actor(self, env.num_envs)
        snapshot = None if _changes_nothing(callback) else Snapshot(self.policy)
        values: Any
        log_probs: Any

        while n_steps < n_rollout_steps:
            if self.use_sde and self.sde_sample_freq > 0 and n_steps % self.sde_sample_freq == 0:
                self.policy.reset_noise(env.num_envs)

            actions, values, log_probs = actor(self._last_obs)  # type: ignore[arg-type]
            if as_tensors:
                obs_tensor = obs_as_tensor(self._last_obs, self.device)  # type: ignore[arg-type]
                values, log_probs = self._as_tensor(values), self._as_tensor(log_probs)
            if actions.dtype.kind == "f" and not math.isfinite(np.vdot(actions, actions)):
                require_finite_actions(actions, self.num_timesteps)
            clipped_actions = in_bounds(actions)
            new_obs, rewards, dones, infos = env.step(clipped_actions)
            check(new_obs, rewards, dones, infos)
            self.num_timesteps += env.num_envs

            if as_tensors:  # callbacks read these variables under SB3's names
                callback.update_locals(locals())
            if not callback.on_step():
                return False
            if snapshot is not None and not snapshot.is_current():
                actor, snapshot = make_actor(self, env.num_envs), Snapshot(self.policy)

            self._update_info_buffer(infos, dones)
            n_steps += 1
            if discrete:
                actions = actions.reshape(-1, 1)
            if np.count_nonzero(dones):
                bootstrap_truncations(rewards, dones, infos, actor, self.gamma)

            rollout_buffer.add(
                self._last_obs,  # type: ignore[arg-type]
                actions,
                rewards,
                self._last_episode_starts,  # type: ignore[arg-type]
                values,
                log_probs,
            )
            self._last_obs = new_obs  # type: ignore[assignment]
            self._last_episode_starts = dones

        values = self._as_tensor(actor.values(new_obs))  # type: ignore[arg-type]
        rollout_buffer.compute_returns_and_advantage(last_values=values, dones=dones)
        callback.update_locals(locals())
        callback.on_rollout_end()
        return True

    def _as_tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(array, device=self.device)

    def _to_action_space(self) -> Any:
        """A function from the policy's actions to those that the environments take."""
        space = self.action_space
        if not isinstance(space, spaces.Box):
            return lambda actions: actions
        if self.policy.squash_output:
            return self.policy.unscale_action
        low, high = space.low, space.high
        return lambda actions: np.minimum(np.maximum(actions, low), high)


def require_finite_actions(actions: np.ndarray, step: int) -> None:
    """Complain of a policy that has become not a number, before an environment is blamed.

    :raises ValueError: if an action is NaN or infinite
    """
    if not np.isfinite(actions).all():
        raise ValueError(f"the policy returned actions that are not finite after {step} steps; look at its parameters")


def _sees_nothing(callback: BaseCallback) -> bool:
    """Whether this is what SB3 puts in place of no callback, a progress bar, or one that says ``reads_locals = False``."""
    if isinstance(callback, CallbackList):
        return all(map(_sees_nothing, callback.callbacks))
    if getattr(callback, "reads_locals", True) is False:
        return True
    return type(callback) is ProgressBarCallback or (type(callback) is ConvertCallback and callback.callback is None)


# Callbacks of SB3 that leave the policy alone, and the attributes under which they call others.
_READERS: dict[type[BaseCallback], tuple[str, ...]] = {
    CheckpointCallback: (),
    EvalCallback: ("callback", "callback_on_new_best"),
    EveryNTimesteps: ("callback",),
    LogEveryNTimesteps: (),
    StopTrainingOnMaxEpisodes: (),
    StopTrainingOnNoModelImprovement: (),
    StopTrainingOnRewardThreshold: (),
}


def _changes_nothing(callback: BaseCallback | None) -> bool:
    """Whether a callback is known to leave the policy alone; then no step looks for changes."""
    if callback is None or (not isinstance(callback, CallbackList) and _sees_nothing(callback)):
        return True
    if isinstance(callback, CallbackList):
        return all(map(_changes_nothing, callback.callbacks))
    called = _READERS.get(type(callback))
    replaced = vars(callback).keys() & {"on_step", "_on_step", "_log_data"}
    return called is not None and not replaced and all(_changes_nothing(getattr(callback, name)) for name in called)


def bootstrap_truncations(rewards: np.ndarray, dones: np.ndarray, infos: list[dict], actor: Actor, gamma: float) -> None:
    """Add the discounted value of the last observation to the rewards of episodes that were cut off, not ended.

    :param rewards: of one step, ``(n_envs,)``, changed in place
    :param dones: ``(n_envs,)``
    :param infos: of the environments, with ``terminal_observation`` and ``TimeLimit.truncated``
    :param gamma: discount factor
    """
    truncated = [
        int(index)
        for index in np.flatnonzero(dones)
        if infos[index].get("terminal_observation") is not None and infos[index].get("TimeLimit.truncated", False)
    ]
    if not truncated:
        return
    terminal = [infos[index]["terminal_observation"] for index in truncated]
    # Assigned, which rounds to the type of the rewards as in SB3, where integers stay integers.
    rewards[truncated] = rewards[truncated] + gamma * actor.terminal_values(terminal)


class FiniteCheck:
    """Raises where a step returned NaN or infinity, naming the environment and the step.

    :param step: steps that each environment has made so far in this training, for the message
    """

    def __init__(self, step: int) -> None:
        self._step = step

    def __call__(self, observations: Any, rewards: np.ndarray, dones: np.ndarray, infos: list[dict]) -> None:
        self._step += 1
        # A sum of squares is not finite where a term is not: one pass, and in the rare case of an overflow a second one.
        if not math.isfinite(np.vdot(rewards, rewards)):
            require_finite("reward", rewards, self._step)
        for array in _arrays(observations):
            if array.dtype.kind == "f" and not math.isfinite(np.vdot(array, array)):
                require_finite("observation", observations, self._step)
        if not np.count_nonzero(dones):
            return
        for index in np.flatnonzero(dones):
            terminal = infos[index].get("terminal_observation")
            if terminal is not None:
                require_finite("terminal observation", terminal, self._step, environment=int(index))


@contextlib.contextmanager
def checked_steps(env: VecEnv, step: int, last_observations: Any) -> Iterator[FiniteCheck]:
    """Check what a rollout starts from, and below VecNormalize each step; yields the check for the steps of ``env``.

    VecNormalize would spread one bad number over the statistics of all environments, and clip an infinite one. The check
    below it is no wrapper, because SB3's callbacks compare the wrappers of training and evaluation.

    :param env: the training environment
    :param step: steps that each environment has made so far
    :param last_observations: where the rollout starts
    :raises ValueError: if an observation or reward is not finite
    """
    normalize = unwrap_vec_normalize(env)
    if normalize is not None:
        require_finite("observation", normalize.old_obs, step)
    require_finite("observation", last_observations, step)
    if normalize is None:
        yield FiniteCheck(step)
        return
    below, check = normalize.venv, FiniteCheck(step)
    step_wait, custom = below.step_wait, vars(below).get("step_wait")

    def checked_step_wait() -> VecEnvStepReturn:
        result = step_wait()
        check(*result)
        return result

    below.step_wait = checked_step_wait  # type: ignore[method-assign]
    try:
        yield FiniteCheck(step)
    finally:
        if vars(below).get("step_wait") is checked_step_wait:
            del below.step_wait  # the method of the class remains
            if custom is not None:
                below.step_wait = custom  # type: ignore[method-assign]


def require_finite(what: str, values: Arrays, step: int, environment: int | None = None) -> None:
    """Complain of the first number in ``values`` that is none.

    :param what: what the values are, for the message
    :param values: with the environments along the first axis, unless ``environment`` says whose they are
    :raises ValueError: naming environment and step
    """
    for key, array in _named_arrays(values):
        array = np.asarray(array)
        if array.dtype.kind != "f" or np.isfinite(array).all():
            continue
        where = np.argwhere(~np.isfinite(array))[0]
        index = int(where[0]) if environment is None else environment
        raise ValueError(
            f"environment {index} returned {array[tuple(where)]} in its {what}{key} at step {step} of the training "
            "(environments count from 0, steps for each environment); observations and rewards must be finite, or "
            "check_finite=False leaves them to the policy"
        )


def _arrays(values: Arrays) -> list[np.ndarray]:
    if isinstance(values, np.ndarray):
        return [values]
    return [np.asarray(array) for _, array in _named_arrays(values)]


def _named_arrays(values: Arrays) -> list[tuple[str, np.ndarray]]:
    if isinstance(values, dict):
        return [(f" {name!r}", array) for name, array in values.items()]
    if isinstance(values, tuple):
        return [(f" {i}", array) for i, array in enumerate(values)]
    return [("", values)]
