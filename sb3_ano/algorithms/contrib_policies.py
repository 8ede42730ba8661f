"""LSTM policies with and without masks."""

import contextlib
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import torch
from sb3_contrib.common.maskable.policies import MaskableMultiInputActorCriticPolicy
from sb3_contrib.common.recurrent import policies
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import Schedule
from torch import nn

from sb3_ano.fast.policy import MASKED, plain_distribution, whole_sequences
from sb3_ano.policies import CriticOnlyKeys

#: Actions that are allowed, bool, or None for all.
Masks: TypeAlias = np.ndarray | torch.Tensor | None


class _IntegerFeatures(policies.RecurrentActorCriticPolicy):
    """Take MultiDiscrete observations, whose number of features is a NumPy integer, which PyTorch's LSTM rejects."""

    def make_features_extractor(self) -> BaseFeaturesExtractor:
        extractor = super().make_features_extractor()
        # The sum of the sizes of the codes, which NumPy adds.
        extractor._features_dim = int(extractor.features_dim)
        return extractor


class MlpLstmPolicy(_IntegerFeatures, policies.RecurrentActorCriticPolicy):
    """sb3-contrib's policy of this name."""


class CnnLstmPolicy(_IntegerFeatures, policies.RecurrentActorCriticCnnPolicy):
    """sb3-contrib's policy of this name."""


class MultiInputLstmPolicy(_IntegerFeatures, policies.RecurrentMultiInputActorCriticPolicy):
    """sb3-contrib's policy of this name."""


class AsymmetricLstmPolicy(CriticOnlyKeys, MultiInputLstmPolicy):
    """The MultiInputLstmPolicy with ``critic_only_keys``."""


class MaskableAsymmetricPolicy(CriticOnlyKeys, MaskableMultiInputActorCriticPolicy):
    """The MultiInputPolicy of MaskablePPO with ``critic_only_keys``."""


class MaskedLstmPolicy(policies.RecurrentActorCriticPolicy):
    """Apply masks to the distribution of a recurrent policy."""

    def _build(self, lr_schedule: Schedule) -> None:
        self._masks: Masks = None
        # Before the head is built, which has the size that the distribution asks for.
        self.action_dist = plain_distribution(self.action_space)

        super()._build(lr_schedule)

    def _get_action_dist_from_latent(self, latent_pi: torch.Tensor, latent_sde: None = None) -> Distribution:
        logits = self.action_net(latent_pi)

        if self._masks is not None:
            # As the logits are: the update passes one row per step of the sequences.
            masks = torch.as_tensor(self._masks, dtype=torch.bool, device=logits.device).reshape(logits.shape)
            logits = torch.where(masks, logits, MASKED)

        return self.action_dist.proba_distribution(action_logits=logits)

    @staticmethod
    def _process_sequence(  # type: ignore[override]  # sb3-contrib's annotation lacks the cell state
        features: torch.Tensor,
        lstm_states: tuple[torch.Tensor, torch.Tensor],
        episode_starts: torch.Tensor,
        lstm: nn.LSTM,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        # The number of sequences is that of the states.
        starts = episode_starts.reshape(lstm_states[0].shape[1], -1)
        # Someone else's sequences may have starts in them.
        if bool(starts[:, 1:].any()):
            plain = policies.RecurrentActorCriticPolicy
            return plain._process_sequence(features, lstm_states, episode_starts, lstm)  # type: ignore[return-value]

        # A rollout's sequences are cut where episodes start.
        return whole_sequences(lstm, features, lstm_states, episode_starts)

    # An attribute during a call, because sb3-contrib's methods take no masks that they could hand on.
    @contextlib.contextmanager
    def _masked(self, masks: Masks) -> Iterator[None]:
        self._masks = masks
        try:
            yield
        finally:
            # The next call may have none.
            self._masks = None

    # Dict observations are dictionaries, which sb3-contrib does not annotate.
    def forward(  # type: ignore[override]
        self,
        obs: torch.Tensor,
        lstm_states: RNNStates,
        episode_starts: torch.Tensor,
        deterministic: bool = False,
        action_masks: Masks = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, RNNStates]:
        """Act; see sb3-contrib's recurrent policies.

        :param action_masks: actions that are allowed, or None for all
        """
        with self._masked(action_masks):
            return super().forward(obs, lstm_states, episode_starts, deterministic)

    def evaluate_actions(  # type: ignore[override]
        self,
        obs: torch.Tensor,
        actions: torch.Tensor,
        lstm_states: RNNStates,
        episode_starts: torch.Tensor,
        action_masks: Masks = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Evaluate actions; see sb3-contrib's recurrent policies.

        :param action_masks: actions that were allowed, or None for all
        """
        with self._masked(action_masks):
            return super().evaluate_actions(obs, actions, lstm_states, episode_starts)

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
        action_masks: Masks = None,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """Return actions and states; see sb3-contrib's recurrent policies.

        :param action_masks: actions that are allowed, or None for all
        """
        with self._masked(action_masks):
            return super().predict(observation, state, episode_start, deterministic)


class MaskableMlpLstmPolicy(MaskedLstmPolicy, MlpLstmPolicy):
    """The MlpLstmPolicy with masks."""


class MaskableCnnLstmPolicy(MaskedLstmPolicy, CnnLstmPolicy):
    """The CnnLstmPolicy with masks."""


class MaskableMultiInputLstmPolicy(MaskedLstmPolicy, MultiInputLstmPolicy):
    """The MultiInputLstmPolicy with masks."""


class MaskableAsymmetricLstmPolicy(MaskedLstmPolicy, AsymmetricLstmPolicy):
    """The AsymmetricLstmPolicy with masks."""
