"""LSTM policies with and without masks, and the evaluation of sb3-contrib's policies."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.distributions import (
    MaskableBernoulliDistribution,
    MaskableCategoricalDistribution,
    MaskableMultiCategoricalDistribution,
    make_masked_proba_distribution,
)
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from sb3_contrib.common.recurrent import policies
from stable_baselines3.common.distributions import CategoricalDistribution, Distribution, MultiCategoricalDistribution
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

from sb3_ano.algorithms import actor, policy_evaluation
from sb3_ano.algorithms.policy_evaluation import MASKED, PolicyEvaluation, choices, has_stock_distribution


def _plain_distribution(space: spaces.Space[Any]) -> Distribution:
    """Return SB3's distribution whose logits can be masked; MultiBinary has two actions per dimension, as in sb3-contrib."""
    sizes = choices(space)
    return CategoricalDistribution(sizes[0]) if isinstance(space, spaces.Discrete) else MultiCategoricalDistribution(sizes)


class _WholeSequences(policies.RecurrentActorCriticPolicy):
    """Run the LSTM over whole sequences, because a rollout's sequences are cut where episodes start."""

    def make_features_extractor(self) -> BaseFeaturesExtractor:
        extractor = super().make_features_extractor()
        # For MultiDiscrete observations it is a NumPy integer, which PyTorch's LSTM rejects.
        extractor._features_dim = int(extractor.features_dim)
        return extractor

    @staticmethod
    def _process_sequence(features: Any, lstm_states: Any, episode_starts: Any, lstm: Any) -> Any:
        starts = episode_starts.reshape(lstm_states[0].shape[1], -1)
        if bool(starts[:, 1:].any()):
            return policies.RecurrentActorCriticPolicy._process_sequence(features, lstm_states, episode_starts, lstm)
        kept = (1.0 - starts[:, 0])[None, :, None]
        sequences = features.reshape(*starts.shape, lstm.input_size).transpose(0, 1)
        output, states = lstm(sequences, (kept * lstm_states[0], kept * lstm_states[1]))
        return output.transpose(0, 1).flatten(end_dim=1), states


class MlpLstmPolicy(_WholeSequences, policies.RecurrentActorCriticPolicy):
    """sb3-contrib's policy of this name, with a faster LSTM."""


class CnnLstmPolicy(_WholeSequences, policies.RecurrentActorCriticCnnPolicy):
    """sb3-contrib's policy of this name, with a faster LSTM."""


class MultiInputLstmPolicy(_WholeSequences, policies.RecurrentMultiInputActorCriticPolicy):
    """sb3-contrib's policy of this name, with a faster LSTM."""


class MaskedLstmPolicy(policies.RecurrentActorCriticPolicy):
    """Apply masks to the distribution of a recurrent policy."""

    def _build(self, lr_schedule: Any) -> None:
        self._masks: Any = None
        self.action_dist = _plain_distribution(self.action_space)
        super()._build(lr_schedule)

    def _get_action_dist_from_latent(self, latent_pi: torch.Tensor, latent_sde: None = None) -> Distribution:
        logits = self.action_net(latent_pi)
        if self._masks is not None:
            masks = torch.as_tensor(self._masks, dtype=torch.bool, device=logits.device).reshape(logits.shape)
            logits = torch.where(masks, logits, MASKED)
        return self.action_dist.proba_distribution(action_logits=logits)

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


class MaskedEvaluation(PolicyEvaluation):
    """Evaluate sb3-contrib's maskable policies with SB3's distributions of masked logits, which can be compiled."""

    @staticmethod
    def make_distribution(policy: Any) -> Distribution:
        return make_masked_proba_distribution(policy.action_space)

    def __init__(self, policy: Any, precision: str = "float32") -> None:
        super().__init__(policy, precision)
        self._plain = _plain_distribution(policy.action_space)
        self._standard = self._standard and has_stock_distribution(policy)

    def _distribution(self, latent_pi: torch.Tensor, masks: torch.Tensor | None) -> Distribution:
        logits = self.policy.action_net(latent_pi)
        if masks is not None:  # in float32 in sb3-contrib's buffer
            logits = torch.where(masks.bool(), logits, MASKED)
        return self._plain.proba_distribution(action_logits=logits)


class RecurrentEvaluation(PolicyEvaluation):
    """Evaluate recurrent policies on padded sequences; what is returned has no padding."""

    @staticmethod
    def make_distribution(policy: Any) -> Distribution:
        masked = isinstance(policy, MaskedLstmPolicy)
        return _plain_distribution(policy.action_space) if masked else PolicyEvaluation.make_distribution(policy)

    def __call__(self, samples: Any, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        masks = {"action_masks": samples.action_masks} if hasattr(samples, "action_masks") else {}
        sequences = (samples.observations, actions, samples.lstm_states, samples.episode_starts)
        values, log_prob, entropy = self.policy.evaluate_actions(*sequences, **masks)  # type: ignore[call-arg]
        present = samples.present
        return values.flatten()[present], log_prob[present], None if entropy is None else entropy[present]


policy_evaluation.EVALUATIONS |= {
    MaskableActorCriticPolicy: MaskedEvaluation,
    policies.RecurrentActorCriticPolicy: RecurrentEvaluation,
    MaskedLstmPolicy: RecurrentEvaluation,
}
for kind in (MaskableCategoricalDistribution, MaskableMultiCategoricalDistribution, MaskableBernoulliDistribution):
    actor.SAMPLERS[kind] = actor.SAMPLERS[CategoricalDistribution]
