"""Collect rollouts as SB3 does, with less Python per step, and name the environment that returned NaN or Inf."""

import copy
import math
from collections.abc import Sequence
from typing import Any

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

from sb3_ano.algorithms.actor import Actor, NotFiniteError, Observations, Snapshot, acts_with_copies, make_actor
from sb3_ano.algorithms.arguments import require_arguments, require_env
from sb3_ano.algorithms.buffers import FlatRolloutBuffer, is_stock
from sb3_ano.envs import DirectVecEnv, make_env


class RolloutMixin(OnPolicyAlgorithm):
    """SB3's on-policy algorithm with faster environments and a faster ``collect_rollouts``."""

    @staticmethod
    def _wrap_env(env: GymEnv | str, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        """Wrap an environment, or make and wrap one of an id, as SB3 does, in :class:`~sb3_ano.envs.DirectVecEnv`."""
        if isinstance(env, str):
            env = make_env(env, verbose)
        if isinstance(env, gym.Env | VecEnv):
            require_env(env)
        if isinstance(env, gym.Env):
            single = env if is_wrapped(env, Monitor) or not monitor_wrapper else Monitor(env)
            env = DirectVecEnv([lambda: single])
            if verbose >= 1:
                print("Wrapping the env in a DirectVecEnv.")
        elif verbose >= 1 and hasattr(env, "backend"):
            print(f"The environments run on backend {env.backend!r}.")
        return OnPolicyAlgorithm._wrap_env(env, verbose, monitor_wrapper)

    def _setup_learn(self, *arguments: Any, **keywords: Any) -> tuple[int, BaseCallback]:
        env: VecEnv = self.env  # type: ignore[assignment]
        before = _statistics(env)  # VecNormalize learns from the first observations
        prepared = super()._setup_learn(*arguments, **keywords)
        FiniteCheck(self, env, before)
        return prepared

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
        self.policy.set_training_mode(False)
        n_steps = 0
        rollout_buffer.reset()
        if self.use_sde:
            self.policy.reset_noise(env.num_envs)
        in_bounds = self._to_action_space()
        discrete = isinstance(self.action_space, spaces.Discrete)
        # Tensors are for callbacks, and for buffers that are not ours.
        as_tensors = not (_needs_no_locals(callback) and is_stock(rollout_buffer, "add"))
        callback.on_rollout_start()  # TrainingCheckpoints restores a resumed training here
        if isinstance(rollout_buffer, FlatRolloutBuffer) and rollout_buffer.buffer_size != n_rollout_steps:
            n_rollout_steps = rollout_buffer.buffer_size  # a callback had changed n_steps before the checkpoint
            rollout_buffer.reset()
        check = FiniteCheck(self, env)
        actor = self._make_actor(env)
        snapshot = None if _changes_nothing(callback) else Snapshot(self.policy, acts_with_copies(self))
        values: Any
        log_probs: Any

        while n_steps < n_rollout_steps:
            if self.use_sde and self.sde_sample_freq > 0 and n_steps % self.sde_sample_freq == 0:
                self.policy.reset_noise(env.num_envs)

            try:
                actions, values, log_probs = actor(self._last_obs)  # type: ignore[arg-type]
            except (ValueError, RuntimeError) as error:
                check.explain(error)
                raise
            columns = actor.columns  # of the actor of this step: a callback may replace it below
            if as_tensors:
                obs_tensor = obs_as_tensor(self._last_obs, self.device)  # type: ignore[arg-type]
                values, log_probs = (torch.as_tensor(array, device=self.device) for array in (values, log_probs))
            clipped_actions = in_bounds(actions)
            new_obs, rewards, dones, infos = env.step(clipped_actions)
            self.num_timesteps += env.num_envs
            check.step(actions, new_obs, rewards)

            if as_tensors:  # callbacks read these variables under SB3's names
                callback.update_locals({**locals(), **actor.variables})
            if not callback.on_step():
                return False
            if snapshot is not None and not snapshot.is_current(self.policy):
                actor = self._make_actor(env)
                snapshot = Snapshot(self.policy, acts_with_copies(self))

            self._update_info_buffer(infos, dones)
            n_steps += 1
            if discrete:
                actions = actions.reshape(-1, 1)
            if np.count_nonzero(dones):
                check.ends(dones, infos)
                bootstrap_truncations(rewards, dones, infos, actor, self.gamma)

            row = (self._last_obs, actions, rewards, self._last_episode_starts, values, log_probs)
            rollout_buffer.add(*row, **columns())  # type: ignore[arg-type]
            self._last_obs = new_obs  # type: ignore[assignment]
            self._last_episode_starts = dones

        values = torch.as_tensor(actor.values(new_obs), device=self.device)  # type: ignore[arg-type]
        rollout_buffer.compute_returns_and_advantage(last_values=values, dones=dones)
        callback.update_locals(locals())
        callback.on_rollout_end()
        return True

    def _make_actor(self, env: VecEnv) -> Actor:
        """Return the policy of a rollout in the training environment."""
        return make_actor(self, env.num_envs)

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
    """Tell whether a callback is SB3's placeholder for none, a progress bar, or says ``reads_locals = False``."""
    if type(callback) is CallbackList:
        return all(map(_needs_no_locals, callback.callbacks))
    if getattr(callback, "reads_locals", True) is False:
        return True
    return type(callback) is ProgressBarCallback or (type(callback) is ConvertCallback and callback.callback is None)


def _changes_nothing(callback: BaseCallback | None) -> bool:
    """Tell whether a callback is known to leave the policy alone; then the policy need not be compared at each step."""
    if type(callback) is CallbackList:
        return all(map(_changes_nothing, callback.callbacks))
    if callback is None or _needs_no_locals(callback):
        return True
    # SB3's own callbacks only read the policy, unless they call a function or callback of the user's.
    if type(callback).__module__ != BaseCallback.__module__:
        return False
    replaced = vars(callback).keys() & {"on_step", "_on_step", "_log_data"}
    called = [vars(callback).get(name) for name in ("callback", "callback_on_new_best")]
    return not replaced and all(map(_changes_nothing, called))


def bootstrap_truncations(
    rewards: np.ndarray, dones: np.ndarray, infos: list[dict[str, Any]], actor: Actor, gamma: float
) -> None:
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
    # Assigned instead of +=, which raises for rewards that are integers. Their sum is truncated, as in SB3.
    rewards[truncated] = rewards[truncated] + gamma * actor.terminal_values(terminal, truncated)


def _statistics(env: VecEnv) -> dict[str, Any]:
    """Copy what VecNormalize has learned; empty without VecNormalize."""
    normalize = unwrap_vec_normalize(env)
    kept = {} if normalize is None else vars(normalize)
    return {name: copy.deepcopy(kept[name]) for name in kept.keys() & {"obs_rms", "ret_rms", "returns"}}


class FiniteCheck:
    """Check a rollout for NaN and Inf at each step, before they reach the policy, and name the environment.

    VecNormalize spreads NaN over the statistics of all environments. The check looks at what VecNormalize received, and puts
    back the statistics of the beginning of the rollout.

    :param model: algorithm with ``check_finite``, ``num_timesteps``, and the observations that the rollout starts with
    :param env: training environment
    :param statistics: attributes of VecNormalize to put back; None takes the present ones
    :raises ValueError: if the first observation is NaN or Inf; the methods raise it for later observations and rewards
    """

    def __init__(self, model: Any, env: VecEnv, statistics: dict[str, Any] | None = None) -> None:
        self._model, self._n_envs, self._enabled = model, env.num_envs, model.check_finite
        self._normalize = normalize = unwrap_vec_normalize(env)
        self._statistics = _statistics(env) if statistics is None else statistics
        if self._enabled:  # what VecNormalize received is kept from its first step or reset on
            if normalize is not None and hasattr(normalize, "old_obs"):
                self._reject("observation", normalize.old_obs)
            self._reject("observation", model._last_obs, for_policy=True)

    def step(self, actions: np.ndarray, observations: Any, rewards: np.ndarray) -> None:
        """Check what the environments have just returned.

        :param actions: actions of the policy, which may be the reason
        """
        if self._enabled:
            if self._normalize is not None:
                self._require("observation", self._normalize.old_obs, actions)
                self._require("reward", self._normalize.old_reward, actions)
            if not _has_finite_squares(observations):
                self._reject_actions(actions)
                self._reject("observation", observations, for_policy=True)
            self._require("reward", rewards, actions)

    def explain(self, error: Exception) -> None:
        """Raise an error that names the reason, if the policy has failed because of NaN or Inf.

        :param error: error of the policy
        :raises ValueError: with the parameter or the observation
        """
        if not isinstance(error, NotFiniteError) and not any(part in str(error) for part in _ERRORS_OF_DISTRIBUTIONS):
            return
        policy = self._model.policy
        failed = f"the policy returned NaN or Inf at {self._place()}"

        largest: tuple[float, str] = (0.0, "")
        for name, parameter in policy.named_parameters():
            size = parameter.detach().abs().max().item() if parameter.numel() else 0.0
            if not math.isfinite(size):
                raise ValueError(f"{failed}; look at its parameters: policy.{name} has NaN or Inf") from error
            largest = max(largest, (size, name))

        for name, part in _parts("observation", self._model._last_obs):
            sizes = np.abs(np.asarray(part, dtype=np.float64))
            # NaN counts as largest.
            environment, *index = np.unravel_index(np.where(np.isnan(sizes), np.inf, sizes).argmax(), sizes.shape)
            value = np.asarray(part)[(environment, *index)]
            if not abs(value) <= _LARGE:
                raise ValueError(
                    f"{failed}, because environment {environment} returned {value:.12g} in its {_indexed(name, index)}; "
                    "scale or clip observations, for instance with VecNormalize"
                ) from error
        size, name = largest
        raise ValueError(f"{failed}; look at its parameters: the largest is {size:.6g} in policy.{name}") from error

    def _require(self, what: str, values: Observations, actions: np.ndarray) -> None:
        if not _has_finite_squares(values):
            self._reject_actions(actions)
            self._reject(what, values)

    def _reject_actions(self, actions: np.ndarray) -> None:
        finite = np.isfinite(actions)
        if not finite.all():
            environment = int(np.argwhere(~finite)[0][0])
            raise ValueError(
                f"the policy returned NaN or Inf at {self._place()} for environment {environment}; look at its parameters"
            )

    def ends(self, dones: np.ndarray, infos: list[dict[str, Any]]) -> None:
        """Check the last observations of episodes."""
        for index in np.flatnonzero(dones) if self._enabled else ():
            terminal = infos[index].get("terminal_observation")
            if terminal is not None:
                self._reject("terminal observation", terminal, int(index), for_policy=True)

    def _place(self) -> str:
        return f"step {self._model.num_timesteps // self._n_envs} of the training"

    def _reject(self, what: str, values: Observations, environment: int | None = None, for_policy: bool = False) -> None:
        """Raise if values are not finite.

        :param what: name of the values
        :param values: values with the environments along the first axis, or those of one environment
        :param environment: number of that environment
        :param for_policy: whether the policy reads them, in float32
        """
        for name, part in _parts(what, values):
            valid = np.isfinite(part)
            if for_policy and np.asarray(part).dtype == np.float64:
                valid &= np.abs(part) <= _MAX_FLOAT32
            if valid.all():
                continue

            where = tuple(np.argwhere(~valid)[0])
            value = np.asarray(part)[where]
            reason = ""
            if np.isfinite(value):
                reason = f", which is Inf in the policy's float32, whose largest number is {_MAX_FLOAT32:.2g}"
            if self._normalize is not None:
                received = getattr(self._normalize, "old_obs", None) if what == "observation" else None
                raw = dict(_parts(what, received)).get(name) if received is not None else None
                if raw is not None and np.isfinite(raw[where]):
                    reason = f", of which VecNormalize made {value}"
                    value = raw[where]
                vars(self._normalize).update(self._statistics)

            # The environment is the first index of a batch.
            number = where[0] if environment is None else environment
            index = where[1:] if environment is None else where
            raise ValueError(
                f"environment {number} returned {value:.12g} in its {_indexed(name, index)} at {self._place()}{reason} "
                "(environments count from 0, steps for each environment); observations and rewards must be finite, or "
                "check_finite=False leaves them to the policy"
            )


_MAX_FLOAT32 = float(np.finfo(np.float32).max)
# Observations from which on a network may overflow.
_LARGE = 1e6
# Parts of the messages with which PyTorch's distributions reject NaN and Inf.
_ERRORS_OF_DISTRIBUTIONS = (
    "Expected parameter",
    "Expected p_in",
    "probability tensor contains",
    "invalid multinomial distribution",
)


def _parts(what: str, values: Observations) -> list[tuple[str, Any]]:
    """Return arrays with their names; those of a dictionary have their key in it."""
    if isinstance(values, dict):
        return [(f"{what} {key!r}", part) for key, part in values.items()]
    return [(what, values)]


def _indexed(name: str, index: Sequence[Any]) -> str:
    """Return the name of one number of an array, such as ``observation[1, 2]``."""
    return f"{name}[{', '.join(map(str, index))}]" if len(index) else name


def _has_finite_squares(values: Observations) -> bool:
    """Tell in one pass that values are finite; False if one is not, or if their sum of squares overflows."""
    if isinstance(values, dict):
        return all(map(_has_finite_squares, values.values()))
    values = np.asarray(values)
    return values.dtype.kind != "f" or math.isfinite(np.vdot(values, values))
