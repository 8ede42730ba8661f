"""Rollout buffers with masks and LSTM states, which sb3-contrib has separately only."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from sb3_contrib.common.recurrent.buffers import RecurrentDictRolloutBuffer, RecurrentRolloutBuffer
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.type_aliases import TensorDict
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ano.fast.policy import choices


class MaskedSequenceSamples(NamedTuple):
    """sb3-contrib's samples for an LSTM, with the masks of each step, ``(n_sequences * length, n)``."""

    observations: torch.Tensor | TensorDict
    actions: torch.Tensor
    old_values: torch.Tensor
    old_log_prob: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    lstm_states: RNNStates
    episode_starts: torch.Tensor
    mask: torch.Tensor
    action_masks: torch.Tensor


class _MaskedSequences(RolloutBuffer):
    """Keep the masks of each step next to the states."""

    def reset(self) -> None:
        super().reset()

        # All actions are allowed where nobody says otherwise, as in sb3-contrib's buffers with masks.
        self.action_masks = np.ones((self.buffer_size, self.n_envs, sum(choices(self.action_space))), dtype=bool)

    def add(self, *args: Any, action_masks: np.ndarray | None = None, **options: Any) -> None:
        """Store one step; see sb3-contrib.

        :param action_masks: actions that were allowed, ``(n_envs, n)``, or None for all
        """
        # Before the base class moves on to the next position.
        if action_masks is not None:
            self.action_masks[self.pos] = action_masks

        super().add(*args, **options)

    def get(self, batch_size: int | None = None) -> Iterator[MaskedSequenceSamples]:  # type: ignore[override]
        # Rearranged once, with the other arrays, which the base class rearranges at its first call.
        if not self.generator_ready:
            self.action_masks = self.swap_and_flatten(self.action_masks)

        return super().get(batch_size)  # type: ignore[return-value]

    def _get_samples(  # type: ignore[override]
        self,
        batch_inds: np.ndarray,
        env_change: np.ndarray,
        env: VecNormalize | None = None,
    ) -> MaskedSequenceSamples:
        # This also makes self.pad, for the sequences of this minibatch.
        samples: Any = super()._get_samples(batch_inds, env_change, env)  # type: ignore[call-arg, arg-type]
        masks = self.pad(self.action_masks[batch_inds]).reshape(len(samples.mask), -1)  # type: ignore[attr-defined]
        is_padding = samples.mask <= 1e-8

        # Padding allows all actions: it must not make NaN.
        return MaskedSequenceSamples(**samples._asdict(), action_masks=masks.bool() | is_padding[:, None])


class MaskedSequenceRolloutBuffer(_MaskedSequences, RecurrentRolloutBuffer):  # type: ignore[misc]
    """The buffer of RecurrentMaskableANO."""


class DictMaskedSequenceRolloutBuffer(_MaskedSequences, RecurrentDictRolloutBuffer):  # type: ignore[misc]
    """The same for Dict observations."""
