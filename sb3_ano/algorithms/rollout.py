"""Collect rollouts as SB3 does, with less Python per step, and name the environment that returned NaN or Inf."""

import copy
import math
import operator
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, ConvertCallback, ProgressBarCallback
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize

from sb3_ano.algorithms.actor import Actor, Snapshot, make_actor
from sb3_ano.algorithms.arguments import require_arguments, require_env
from sb3_ano.algorithms.buffers import FlatRolloutBuffer, is_stock, mapped
from sb3_ano.envs import DirectVecEnv, make_env

Arrays: TypeAlias = np.ndarray | dict[str, np.ndarray]


class RolloutMixin(OnPolicyAlgorithm):
    """SB3's on-policy algorithm with faster environments and a faster ``collect_rollouts``."""

    check_finite: bool = True

    @staticmethod
    def _wrap_env(env: GymEnv | str, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        """Wrap an environment, or make and wrap one of an id, as SB3 does, in :class:`~sb3_ano.envs.DirectVecEnv`."""
        if isinstance(env, str):
            env = make_env(env, verbose)
        require_env(env)
        if isinstance(env, gym.Env):
            single = env if is_wrapped(env, Monitor) or not monitor_wrapper else Monitor(env)
            env = DirectVecEnv([lambda: single])
            if verbose >= 1:
                print("Wrapping the env in a DirectVecEnv.")
        elif verbose >= 1 and hasattr(env, "backend"):
            print(f"The environments run on backend {env.backend!r}.")
        return OnPolicyAlgorithm._wrap_env(env, verbose, monitor_wrapper)

    def _update_current_progress_remaining(self, num_timesteps: int, total_timesteps: int) -> None:
        # The last rollout may overshoot; a negative progress would make linear learning rates climb the loss.
        self._current_progress_remaining = max(0.0, 1.0 - num_timesteps / total_timesteps)

    def collect_rollouts(
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int
    ) -> bool:
        """Fill the buffer; see SB3, whose callbacks find the same local variables here.

        :return: False if a callback ended the training
        :raises ValueError: if an environment returns NaN or Inf
        """
        require_arguments(self)  # a user or a callback may have changed them
        if isinstance(rollout_buffer, FlatRolloutBuffer):
            rollout_buffer.buffer_size = n_rollout_steps  # n_steps may have changed
        check = FiniteCheck(env, self.check_finite)
        try:
            training_continues = self._collect(env, callback, rollout_buffer, n_rollout_steps, check)
        except Exception:
            # NaN makes distributions and simulators raise errors that do not name it.
            check.require_finite(rollout_buffer, self._last_obs, even_if_finite=True)
            raise
        check.require_finite(rollout_buffer, self._last_obs)
        return training_continues

    def _collect(
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int, check: "FiniteCheck"
    ) -> bool:
        self.policy.set_training_mode(False)
        n_steps = 0
        rollout_buffer.reset()
        if self.use_sde:
            self.policy.reset_noise(env.num_envs)
        in_bounds = self._to_action_space()
        discrete = isinstance(self.action_space, spaces.Discrete)
        # Tensors are for callbacks, and for buffers that are not ours.
        as_tensors = not (_needs_no_locals(callback) and is_stock(rollout_buffer, "add"))
        callback.on_rollout_start()  # a resumed training is restored here
        check.start(self.num_timesteps // env.num_envs)
        actor = self._make_actor(env)
        snapshot = None if _changes_nothing(callback) else Snapshot(self.policy)
        values: Any
        log_probs: Any

        while n_steps < n_rollout_steps:
            if self.use_sde and self.sde_sample_freq > 0 and n_steps % self.sde_sample_freq == 0:
                self.policy.reset_noise(env.num_envs)

            actions, values, log_probs = actor(self._last_obs)  # type: ignore[arg-type]
            columns = actor.columns  # of this actor, because a callback may lead to another one
            if as_tensors:
                obs_tensor = obs_as_tensor(self._last_obs, self.device)  # type: ignore[arg-type]
                values, log_probs = self._as_tensor(values), self._as_tensor(log_probs)
            # A sum of squares is not finite if a term is not; the second look is for sums that overflow.
            if actions.dtype.kind == "f" and not math.isfinite(np.vdot(actions, actions)) and not np.isfinite(actions).all():
                raise ValueError(
                    f"the policy returned actions that are not finite after {self.num_timesteps} steps; look at its parameters"
                )
            clipped_actions = in_bounds(actions)
            new_obs, rewards, dones, infos = env.step(clipped_actions)
            check.add_step()
            self.num_timesteps += env.num_envs

            if as_tensors:  # callbacks read these variables under SB3's names
                callback.update_locals(locals())
            if not callback.on_step():
                return False
            if snapshot is not None and not snapshot.is_current():
                actor, snapshot = self._make_actor(env), Snapshot(self.policy)

            self._update_info_buffer(infos, dones)
            n_steps += 1
            if discrete:
                actions = actions.reshape(-1, 1)
            if np.count_nonzero(dones):
                check.require_finite_ends(dones, infos, self.num_timesteps // env.num_envs)
                bootstrap_truncations(rewards, dones, infos, actor, self.gamma)

            row = (self._last_obs, actions, rewards, self._last_episode_starts, values, log_probs)
            rollout_buffer.add(*row, **columns())  # type: ignore[arg-type]
            self._last_obs = new_obs  # type: ignore[assignment]
            self._last_episode_starts = dones

        values = self._as_tensor(actor.values(new_obs))  # type: ignore[arg-type]
        rollout_buffer.compute_returns_and_advantage(last_values=values, dones=dones)
        callback.update_locals(locals())
        callback.on_rollout_end()
        return True

    def _make_actor(self, env: VecEnv) -> Actor:
        """Return the policy of a rollout in the training environment."""
        return make_actor(self, env.num_envs)

    def _as_tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(array, device=self.device)

    def _to_action_space(self) -> Any:
        """Return a function from the policy's actions to those that the environments take."""
        space = self.action_space
        if not isinstance(space, spaces.Box):
            return lambda actions: actions
        if self.policy.squash_output:
            return self.policy.unscale_action
        low, high = space.low, space.high
        return lambda actions: np.minimum(np.maximum(actions, low), high)


def _needs_no_locals(callback: BaseCallback) -> bool:
    """Tell whether a callback is SB3's stand-in for none, a progress bar, or one that says ``reads_locals = False``."""
    if isinstance(callback, CallbackList):
        return all(map(_needs_no_locals, callback.callbacks))
    if getattr(callback, "reads_locals", True) is False:
        return True
    return type(callback) is ProgressBarCallback or (type(callback) is ConvertCallback and callback.callback is None)


def _changes_nothing(callback: BaseCallback | None) -> bool:
    """Tell whether a callback is known to leave the policy alone; then the policy need not be compared at each step."""
    if isinstance(callback, CallbackList):
        return all(map(_changes_nothing, callback.callbacks))
    if callback is None or _needs_no_locals(callback):
        return True
    # SB3's own callbacks read the policy, except for the one that wraps a user's function, and those that call a user's.
    of_sb3 = type(callback).__module__ == BaseCallback.__module__ and type(callback) is not ConvertCallback
    replaced = vars(callback).keys() & {"on_step", "_on_step", "_log_data"}
    called = [vars(callback).get(name) for name in ("callback", "callback_on_new_best")]
    return of_sb3 and not replaced and all(map(_changes_nothing, called))


def bootstrap_truncations(rewards: np.ndarray, dones: np.ndarray, infos: list[dict], actor: Actor, gamma: float) -> None:
    """Add the discounted value of the last observation to the rewards of episodes that were truncated, not terminated.

    :param rewards: rewards of one step, ``(n_envs,)``, changed in place
    :param dones: ends of episodes, ``(n_envs,)``
    :param infos: info dictionaries of the environments, with ``terminal_observation`` and ``TimeLimit.truncated``
    :param actor: policy of the rollout
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
    rewards[truncated] = rewards[truncated] + gamma * actor.terminal_values(terminal, truncated)


class FiniteCheck:
    """Check a rollout for NaN and Inf once it is collected, and name the environment and the step.

    VecNormalize spreads NaN over the statistics of all environments. The check keeps references to what VecNormalize received,
    looks at them only if the rollout is not finite, and puts the statistics back.

    :param env: training environment
    :param enabled: False to check nothing
    """

    def __init__(self, env: VecEnv, enabled: bool) -> None:
        self._enabled = enabled
        self._step = 0
        self._normalize = unwrap_vec_normalize(env) if enabled else None
        self._received: list[tuple[Any, Any]] = []
        self._statistics: dict[str, Any] = {}

    def start(self, step: int) -> None:
        """Keep the statistics and the observations that the rollout starts with.

        :param step: steps that each environment has made so far in this training
        """
        self._step = step
        if self._normalize is not None:
            names = vars(self._normalize).keys() & {"obs_rms", "ret_rms", "returns"}
            self._statistics = {name: copy.deepcopy(vars(self._normalize)[name]) for name in names}
            self._received.append((self._normalize.old_obs, None))

    def add_step(self) -> None:
        """Keep the observations and rewards that VecNormalize received in the last step."""
        if self._normalize is not None:
            self._received.append((self._normalize.old_obs, self._normalize.old_reward))

    def require_finite_ends(self, dones: np.ndarray, infos: list[dict], step: int) -> None:
        """Check the last observations of episodes, which never get into the buffer.

        :raises ValueError: if one is NaN or Inf, naming environment and step
        """
        for index in np.flatnonzero(dones) if self._enabled else ():
            terminal = infos[index].get("terminal_observation")
            if terminal is not None:
                require_finite("terminal observation", terminal, step, environment=int(index))

    def require_finite(self, buffer: RolloutBuffer, last_observations: Any, even_if_finite: bool = False) -> None:
        """Check the rollout in the buffer.

        :param buffer: rollout buffer, filled up to its position
        :param last_observations: observations after the last step
        :param even_if_finite: whether to look at what VecNormalize received although the rollout is finite
        :raises ValueError: if an observation or reward is NaN or Inf
        """
        normalize = self._normalize
        # With fixed statistics, VecNormalize makes a finite number of Inf.
        clips = normalize is not None and not normalize.training
        finite = not self._enabled or all(map(_is_finite, (buffer.rewards, buffer.observations, last_observations)))
        if finite and not (self._enabled and (even_if_finite or clips)):
            return
        received = self._received
        if normalize is not None and received:
            received = [*received, (normalize.old_obs, normalize.old_reward)]
        observations = [mapped(operator.itemgetter(row), buffer.observations) for row in range(buffer.pos)]
        stored = zip([*observations, last_observations], [None, *buffer.rewards[: buffer.pos]], strict=True)
        try:
            for history in (received, stored):
                for step, (observation, reward) in enumerate(history, start=self._step):
                    require_finite("observation", observation, step)
                    if reward is not None:
                        require_finite("reward", reward, step)
        except ValueError:
            if normalize is not None:
                vars(normalize).update(self._statistics)
            raise


def _is_finite(values: Arrays) -> bool:
    arrays = map(np.asarray, values.values() if isinstance(values, dict) else [values])
    return all(array.dtype.kind != "f" or bool(np.isfinite(array).all()) for array in arrays)


def require_finite(what: str, values: Arrays, step: int, environment: int | None = None) -> None:
    """Check observations or rewards of one step.

    :param what: name of the values for the message
    :param values: array or dictionary of arrays, with the environments along the first axis unless ``environment`` is given
    :param step: steps that each environment has made so far
    :param environment: number of the environment whose values these are
    :raises ValueError: if one is NaN or Inf, naming environment and step
    """
    parts = {f" {key!r}": part for key, part in values.items()} if isinstance(values, dict) else {"": values}
    for key, part in parts.items():
        if not _is_finite(part):
            array = np.asarray(part)
            where = np.argwhere(~np.isfinite(array))[0]
            index = int(where[0]) if environment is None else environment
            raise ValueError(
                f"environment {index} returned {array[tuple(where)]} in its {what}{key} at step {step} of the training "
                "(environments count from 0, steps for each environment); observations and rewards must be finite, or "
                "check_finite=False leaves them to the policy"
            )
