"""Collect rollouts as SB3 does, with less Python per step.

The loop is that of SB3's ``OnPolicyAlgorithm.collect_rollouts``, line by line, because callbacks read its local variables.
Three things differ: actors instead of the policy, arrays instead of tensors where nobody looks, and no loop over environments
that have not ended.
"""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano.fast.act import Actor, Observations, RolloutCheck, Snapshot
from sb3_ano.fast.engine import Accelerated
from sb3_ano.fast.masks import MaskedActor
from sb3_ano.fast.rules import changes_nothing, needs_no_locals


class FastCollection(Accelerated):
    """An on-policy algorithm of SB3 whose rollouts are collected by the engine."""

    def _rollout_check(self, env: VecEnv) -> RolloutCheck | None:
        """Return an object that checks what environments and policy return in a rollout, or None."""
        return None

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: BaseCallback,
        rollout_buffer: RolloutBuffer,
        n_rollout_steps: int,
        use_masking: bool = False,
    ) -> bool:
        """Fill the buffer; see SB3, whose callbacks find the same local variables here.

        :param use_masking: whether to ask the environments for masks of actions, as sb3-contrib's MaskablePPO does
        :return: False if a callback ended the training
        """
        # Evaluation mode, as in SB3: dropout and batch normalization act in the update only.
        self.policy.set_training_mode(False)
        n_steps = 0

        # At each rollout, because a user or a callback may have changed the model since the last one.
        decisions, _ = self.engine.decide(self, self.engine_options())
        writes_arrays = decisions.rollout is None
        if writes_arrays:
            # n_steps may have changed.
            rollout_buffer.buffer_size = n_rollout_steps
        rollout_buffer.reset()

        if self.use_sde:
            self.policy.reset_noise(env.num_envs)
        is_discrete = isinstance(self.action_space, spaces.Discrete)
        # Tensors are for callbacks, and for custom buffers.
        as_tensors = not writes_arrays or not needs_no_locals(callback)

        # TrainingCheckpoints restores a resumed training here.
        callback.on_rollout_start()
        if writes_arrays and rollout_buffer.buffer_size != n_rollout_steps:
            # A callback had changed n_steps before the checkpoint.
            n_rollout_steps = rollout_buffer.buffer_size
            rollout_buffer.reset()

        # After on_rollout_start, because a resumed training has other first observations.
        check = self._rollout_check(env)
        sees_policy = not changes_nothing(callback)
        if sees_policy:
            # on_rollout_start may have changed the policy already.
            decisions, _ = self.engine.decide(self, self.engine_options())

        # A callback that looks at each step would wait for the device each time.
        if decisions.device is None and not sees_policy:
            if not self.engine.collect_on_device(self, env, callback, check, n_rollout_steps, use_masking):
                return False
            callback.update_locals(locals())
            callback.on_rollout_end()
            return True

        actor = self._make_actor(env, use_masking)
        snapshot = None
        if sees_policy:
            snapshot = Snapshot(self.policy, actor.holds_copies)
        values: np.ndarray | torch.Tensor
        log_probs: np.ndarray | torch.Tensor

        while n_steps < n_rollout_steps:
            if self.use_sde and self.sde_sample_freq > 0 and n_steps % self.sde_sample_freq == 0:
                self.policy.reset_noise(env.num_envs)

            try:
                actions, values, log_probs = actor(self._last_obs)  # type: ignore[arg-type]
            except (ValueError, RuntimeError) as error:
                # Distributions raise if the policy returns NaN, and name nothing that a user knows.
                if check is not None:
                    check.explain(error)
                raise
            # Of the actor of this step: a callback may replace it below.
            stored = actor.stored
            if as_tensors:
                obs_tensor = obs_as_tensor(self._last_obs, self.device)  # type: ignore[arg-type]
                values = torch.as_tensor(values, device=self.device)
                log_probs = torch.as_tensor(log_probs, device=self.device)

            # The buffer gets the actions that were drawn, the environments those within their bounds, as in SB3.
            clipped_actions = self._in_bounds(actions)
            new_obs, rewards, dones, infos = env.step(clipped_actions)
            self.num_timesteps += env.num_envs

            # Before callbacks and buffer, so that nothing of a bad step is learned from.
            if check is not None:
                check.step(actions, new_obs, rewards)  # type: ignore[arg-type]

            if as_tensors:
                # Callbacks read these variables under SB3's names.
                callback.update_locals({**locals(), **actor.variables()})
            if not callback.on_step():
                return False

            # The callback has changed the policy: the next step acts with the new one, as it would in SB3.
            if snapshot is not None and not snapshot.is_current(self.policy):
                self.engine.decide(self, self.engine_options())
                actor = self._make_actor(env, use_masking)
                snapshot = Snapshot(self.policy, actor.holds_copies)

            self._update_info_buffer(infos, dones)
            n_steps += 1
            if is_discrete:
                # Reshaped after the callbacks, as in SB3.
                actions = actions.reshape(-1, 1)

            # SB3 looks at the infos of all environments at each step.
            if np.count_nonzero(dones):
                if check is not None:
                    check.ends(dones, infos)
                bootstrap_truncations(rewards, dones, infos, actor, self.gamma)

            row = (self._last_obs, actions, rewards, self._last_episode_starts, values, log_probs)
            if writes_arrays:
                store_step(rollout_buffer, *row, **stored())  # type: ignore[arg-type]
            else:
                rollout_buffer.add(*row, **stored())  # type: ignore[arg-type]
            self._last_obs = new_obs  # type: ignore[assignment]
            self._last_episode_starts = dones

        # The value of what follows the last step, for the advantages.
        last_values = actor.values(new_obs)  # type: ignore[arg-type]
        values = torch.as_tensor(last_values, device=self.device)
        if writes_arrays:
            compute_advantages(rollout_buffer, last_values, dones)
        else:
            rollout_buffer.compute_returns_and_advantage(last_values=values, dones=dones)
        callback.update_locals(locals())
        callback.on_rollout_end()

        # A callback that sees the policy may have changed anything since the rollout began: the update decides again.
        if sees_policy:
            self.engine.expire_decisions()
        return True

    def _make_actor(self, env: VecEnv, use_masking: bool) -> Actor:
        """Return the policy of a rollout in the training environment."""
        actor = self.engine.make_actor(self, self.engine_options())
        if use_masking:
            return MaskedActor(actor, env, self)
        return actor

    def _in_bounds(self, actions: np.ndarray) -> np.ndarray:
        """Return the actions that the environments take."""
        space = self.action_space
        if not isinstance(space, spaces.Box):
            return actions
        if self.policy.squash_output:
            return self.policy.unscale_action(actions)
        # What np.clip does, with less overhead per call.
        return np.minimum(np.maximum(actions, space.low), space.high)


def bootstrap_truncations(
    rewards: np.ndarray,
    dones: np.ndarray,
    infos: list[dict[str, Any]],
    actor: Actor,
    gamma: float,
) -> None:
    """Add the discounted value of the last observation to the rewards of episodes that were truncated, not terminated.

    :param rewards: rewards of one step, ``(n_envs,)``, changed in place
    :param dones: ends of episodes, ``(n_envs,)``
    :param infos: info dictionaries of the environments, with ``terminal_observation`` and ``TimeLimit.truncated``
    :param actor: policy of the rollout
    :param gamma: discount factor
    """
    truncated = []
    terminal = []
    for index in np.flatnonzero(dones).tolist():
        observation = infos[index].get("terminal_observation")
        if observation is not None and infos[index].get("TimeLimit.truncated", False):
            truncated.append(index)
            terminal.append(observation)

    if truncated:
        # Assigned instead of +=, which raises for rewards that are integers. Their sum is truncated, as in SB3.
        rewards[truncated] = rewards[truncated] + gamma * actor.terminal_values(terminal, truncated)


def store_step(
    buffer: Any,
    observations: Observations,
    actions: np.ndarray,
    rewards: np.ndarray,
    episode_starts: np.ndarray,
    values: np.ndarray | torch.Tensor,
    log_probs: np.ndarray | torch.Tensor,
    action_masks: np.ndarray | None = None,
) -> None:
    """Store one step of all environments in a buffer of SB3, as its ``add`` does.

    :param buffer: rollout buffer of SB3, or one with masks of sb3-contrib
    :param values: values, an array or a tensor on any device, as are ``log_probs``
    :param action_masks: actions that were allowed, for buffers with masks
    """
    # Rows are filled in place. SB3's add() converts and copies everything before that.
    position = buffer.pos
    if isinstance(observations, dict):
        for key, array in buffer.observations.items():
            row = array[position]
            row[...] = observations[key].reshape(row.shape)
    else:
        row = buffer.observations[position]
        row[...] = observations.reshape(row.shape)

    buffer.actions[position] = actions.reshape(buffer.n_envs, buffer.action_dim)
    buffer.rewards[position] = rewards
    buffer.episode_starts[position] = episode_starts
    buffer.values[position] = _array(values).reshape(buffer.n_envs)
    buffer.log_probs[position] = _array(log_probs).reshape(buffer.n_envs)
    if action_masks is not None:
        buffer.action_masks[position] = action_masks

    buffer.pos = position + 1
    buffer.full = buffer.pos == buffer.buffer_size


def _array(values: np.ndarray | torch.Tensor) -> np.ndarray:
    if isinstance(values, np.ndarray):
        return values
    return values.cpu().numpy()


def compute_advantages(buffer: RolloutBuffer, last_values: np.ndarray, dones: np.ndarray) -> None:
    """Compute advantages and lambda-returns as SB3's ``compute_returns_and_advantage`` does.

    :param buffer: full rollout buffer of SB3
    :param last_values: values of the observations after the rollout, ``(n_envs,)`` or ``(n_envs, 1)``
    :param dones: whether the last step ended an episode, ``(n_envs,)``
    """
    # 1 where the next step belongs to the same episode.
    continues = np.empty_like(buffer.episode_starts)
    np.subtract(np.float32(1.0), buffer.episode_starts[1:], out=continues[:-1])
    continues[-1] = np.float32(1.0) - np.asarray(dones, dtype=np.float32).reshape(buffer.n_envs)

    # The TD errors of all steps at once, in place, because a rollout may be large.
    errors = buffer.returns
    errors[:-1] = buffer.values[1:]
    errors[-1] = last_values.reshape(buffer.n_envs)
    errors *= np.float32(buffer.gamma)
    errors *= continues
    errors += buffer.rewards
    errors -= buffer.values

    # The recursion A_t = error_t + gamma lambda (1 - done_t) A_{t+1}, for all environments at once. continues is not needed
    # again, and becomes its factor.
    decay = continues
    decay *= np.float32(buffer.gamma * buffer.gae_lambda)
    advantage = np.zeros(buffer.n_envs, dtype=np.float32)
    for step in range(buffer.buffer_size - 1, -1, -1):
        np.multiply(decay[step], advantage, out=advantage)
        np.add(advantage, errors[step], out=advantage)
        buffer.advantages[step] = advantage
    # The errors were there.
    np.add(buffer.advantages, buffer.values, out=buffer.returns)
