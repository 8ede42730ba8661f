"""LSTM policies with and without masks."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from sb3_contrib.common.recurrent import policies
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

from sb3_ano.fast.policy import MASKED, plain_distribution, whole_sequences


class _IntegerFeatures(policies.RecurrentActorCriticPolicy):
    """Take MultiDiscrete observations, whose number of features is a NumPy integer, which PyTorch's LSTM rejects."""

    def make_features_extractor(self) -> BaseFeaturesExtractor:
        extractor = super().make_features_extractor()
        extractor._features_dim = int(extractor.features_dim)
        return extractor


class MlpLstmPolicy(_IntegerFeatures, policies.RecurrentActorCriticPolicy):
    """sb3-contrib's policy of this name."""


class CnnLstmPolicy(_IntegerFeatures, policies.RecurrentActorCriticCnnPolicy):
    """sb3-contrib's policy of this name."""


class MultiInputLstmPolicy(_IntegerFeatures, policies.RecurrentMultiInputActorCriticPolicy):
    """sb3-contrib's policy of this name."""


class MaskedLstmPolicy(policies.RecurrentActorCriticPolicy):
    """Apply masks to the distribution of a recurrent policy."""

    def _build(self, lr_schedule: Any) -> None:
        self._masks: Any = None
        self.action_dist = plain_distribution(self.action_space)
        super()._build(lr_schedule)

    def _get_action_dist_from_latent(self, latent_pi: torch.Tensor, latent_sde: None = None) -> Distribution:
        logits = self.action_net(latent_pi)
        if self._masks is not None:
            masks = torch.as_tensor(self._masks, dtype=torch.bool, device=logits.device).reshape(logits.shape)
            logits = torch.where(masks, logits, MASKED)
        return self.action_dist.proba_distribution(action_logits=logits)

    @staticmethod
    def _process_sequence(
        features: Any,
        lstm_states: Any,
        episode_starts: Any,
        lstm: Any,
    ) -> Any:
        starts = episode_starts.reshape(lstm_states[0].shape[1], -1)
        # Someone else's sequences may have starts in them.
        if bool(starts[:, 1:].any()):
            return policies.RecurrentActorCriticPolicy._process_sequence(features, lstm_states, episode_starts, lstm)
        # A rollout's sequences are cut where episodes start.
        return whole_sequences(lstm, features, lstm_states, episode_starts)

    @contextlib.contextmanager
    def _masked(self, masks: Any) -> Iterator[None]:
        self._masks = masks
        try:
            yield
        finally:
            self._masks = None

    def forward(self, *args: Any, action_masks: Any = None, **options: Any) -> Any:
        """Act; see sb3-contrib's recurrent policies.

        :param action_masks: actions that are allowed, or None for all
        """
        with self._masked(action_masks):
            return super().forward(*args, **options)

    def evaluate_actions(self, *args: Any, action_masks: Any = None, **options: Any) -> Any:
        """Evaluate actions; see sb3-contrib's recurrent policies.

        :param action_masks: actions that were allowed, or None for all
        """
        with self._masked(action_masks):
            return super().evaluate_actions(*args, **options)

    def predict(self, *args: Any, action_masks: Any = None, **options: Any) -> Any:
        """Return actions and states; see sb3-contrib's recurrent policies.

        :param action_masks: actions that are allowed, or None for all
        """
        with self._masked(action_masks):
            return super().predict(*args, **options)


class MaskableMlpLstmPolicy(MaskedLstmPolicy, MlpLstmPolicy):
    """The MlpLstmPolicy with masks."""


class MaskableCnnLstmPolicy(MaskedLstmPolicy, CnnLstmPolicy):
    """The CnnLstmPolicy with masks."""


class MaskableMultiInputLstmPolicy(MaskedLstmPolicy, MultiInputLstmPolicy):
    """The MultiInputLstmPolicy with masks."""
