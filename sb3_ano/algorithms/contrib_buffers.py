"""Rollout buffers with masks, LSTM states, or both."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from gymnasium import spaces
from sb3_contrib.common.recurrent.buffers import RecurrentDictRolloutBuffer, RecurrentRolloutBuffer
from stable_baselines3.common.buffers import RolloutBuffer

from sb3_ano.algorithms.buffers import DictFlatRolloutBuffer, FlatRolloutBuffer
from sb3_ano.algorithms.policy_evaluation import choices


class _Masks(RolloutBuffer):
    """Keep the masks of each step."""

    def reset(self) -> None:
        super().reset()
        self.action_masks = np.ones((self.buffer_size, self.n_envs, sum(choices(self.action_space))), dtype=bool)


class MaskedRolloutBuffer(_Masks, FlatRolloutBuffer):
    """The default buffer of MaskableANO."""


class DictMaskedRolloutBuffer(_Masks, DictFlatRolloutBuffer):  # type: ignore[misc]
    """The same for Dict observations."""


class _Sequences(RolloutBuffer):
    """Hand out padded sequences, and the numbers of the loss without padding.

    The LSTM needs observations of sequences, all of the same length. The loss is a mean over samples; it gets only those.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *args: Any,
        **options: Any,
    ):
        # The shape of the states is known when there is a policy.
        states = (buffer_size, 0, options.get("n_envs", 1), 0)
        super().__init__(buffer_size, observation_space, action_space, states, *args, **options)  # type: ignore[arg-type]

    def _get_samples(self, batch_inds: np.ndarray, env_change: Any = None, env: Any = None) -> Any:  # type: ignore[override]
        if env_change is None:
            env_change = (np.arange(self.buffer_size * self.n_envs) % self.buffer_size == 0)[:, None]
        samples: Any = super()._get_samples(batch_inds, env_change, env)  # type: ignore[call-arg]
        present = samples.mask > 1e-8
        scalars = {name: getattr(samples, name)[present] for name in ("old_values", "old_log_prob", "advantages", "returns")}
        # MultiBinary actions are integers in sb3-contrib, with which its RecurrentPPO fails.
        return SimpleNamespace(**{**samples._asdict(), **scalars, "actions": samples.actions.float(), "present": present})


class _MaskedSequences(_Masks, _Sequences):
    """The same, with masks."""

    def add(self, *args: Any, action_masks: np.ndarray | None = None, **options: Any) -> None:
        """Store one step; see sb3-contrib.

        :param action_masks: actions that were allowed, ``(n_envs, n)``, or None for all
        """
        if action_masks is not None:
            self.action_masks[self.pos] = action_masks
        super().add(*args, **options)

    def get(self, batch_size: int | None = None) -> Iterator[Any]:  # type: ignore[override]
        if not self.generator_ready:
            self.action_masks = self.swap_and_flatten(self.action_masks)
        return super().get(batch_size)

    def _get_samples(self, batch_inds: np.ndarray, env_change: Any = None, env: Any = None) -> Any:  # type: ignore[override]
        samples = super()._get_samples(batch_inds, env_change, env)
        masks = self.pad(self.action_masks[batch_inds])  # type: ignore[attr-defined]
        # Padding allows all actions: it must not make NaN.
        samples.action_masks = masks.reshape(len(samples.present), -1) | ~samples.present[:, None]
        return samples


class SequenceRolloutBuffer(_Sequences, RecurrentRolloutBuffer):
    """The default buffer of RecurrentANO."""


class DictSequenceRolloutBuffer(_Sequences, RecurrentDictRolloutBuffer):  # type: ignore[misc]
    """The same for Dict observations."""


class MaskedSequenceRolloutBuffer(_MaskedSequences, RecurrentRolloutBuffer):  # type: ignore[misc]
    """The default buffer of RecurrentMaskableANO."""


class DictMaskedSequenceRolloutBuffer(_MaskedSequences, RecurrentDictRolloutBuffer):  # type: ignore[misc]
    """The same for Dict observations."""
