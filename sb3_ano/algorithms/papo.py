"""Proximal Absolute Policy Optimization."""

from typing import Any

import torch

from sb3_ano.algorithms.arguments import inherit_signature
from sb3_ano.algorithms.base import ShapedPolicyAlgorithm
from sb3_ano.algorithms.buffers import DictFlatRolloutBuffer, FlatRolloutBuffer, RolloutSamples
from sb3_ano.algorithms.diagnostics import UpdateStatistics
from sb3_ano.algorithms.update import ClipRange, approximate_kl
from sb3_ano.shaping import MAX_LOG_RATIO, ppo, surrogate


class TDRolloutBuffer(FlatRolloutBuffer):
    """The default buffer of PAPO: the one of ANO under the name that saved models and checkpoints contain."""


class DictTDRolloutBuffer(DictFlatRolloutBuffer):
    """The same for Dict observations."""


class PAPO(ShapedPolicyAlgorithm):
    """Proximal Absolute Policy Optimization (Zhao et al. 2024), in the form of the ANO paper's official code.

    A mean-and-variance surrogate on top of PPO's clip; ``docs/deviations.md`` compares it with the original. The
    arguments are those of :class:`~sb3_ano.algorithms.base.ShapedPolicyAlgorithm`, except ``desired_kl``, and the following.
    A custom ``rollout_buffer_class`` must derive from :class:`~sb3_ano.algorithms.buffers.FlatRolloutBuffer`, or
    :class:`~sb3_ano.algorithms.buffers.DictFlatRolloutBuffer` for Dict observations.

    :param k: weight of the two variance terms, from the probability factor of the lower bound
    :param omega1: scale of both variance terms, for the infinity norm of the mean
    :param omega2: weight of the linear part of the mean variance, for the maximum of the KL
    :param max_epoch_kl: limit of an epoch's mean KL, beyond which the epoch is the last one of its update; None for no limit
    """

    _default_buffers = TDRolloutBuffer, DictTDRolloutBuffer

    @inherit_signature(ShapedPolicyAlgorithm, without="desired_kl")
    def __init__(
        self,
        *,
        k: float = 7.0,
        omega1: float = 0.005,
        omega2: float = 0.005,
        max_epoch_kl: float | None = 0.02,
        **arguments: Any,
    ):
        self.k = k
        self.omega1 = omega1
        self.omega2 = omega2
        self.max_epoch_kl = max_epoch_kl
        super().__init__(**arguments)

    def _setup_model(self) -> None:
        super()._setup_model()
        if not isinstance(self.rollout_buffer, FlatRolloutBuffer):
            raise ValueError(f"rollout_buffer_class={self.rollout_buffer_class!r} gives PAPO no td_errors; leave it as it is")

    def policy_loss(
        self, log_ratio: torch.Tensor, advantages: torch.Tensor, clip_range: ClipRange, samples: RolloutSamples
    ) -> torch.Tensor:
        """Compute ``-(J - k (MV + VM))`` of the minibatch; see ``docs/papo.md`` for the terms."""
        td_errors, values = samples.td_errors, samples.old_values
        ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
        clipped = ratio.clamp(1.0 - clip_range.low, 1.0 + clip_range.high)

        mean = surrogate(log_ratio, advantages, ppo, eps_low=clip_range.low, eps_high=clip_range.high).mean()

        def variance_of(r: torch.Tensor) -> torch.Tensor:
            return (r - 1.0) * td_errors.square() + 2.0 * self.omega2 * r * td_errors

        mean_variance = self.omega1 * torch.minimum(variance_of(ratio), variance_of(clipped)).mean()

        scale = self.omega1 * (1.0 - self.gamma**2) / self.k
        second_moment = scale * (advantages.square() + 2.0 * advantages.abs() * values).mean()
        bias = 4.0 * self.gamma * approximate_kl(log_ratio.detach()) * advantages.max() / (1.0 - self.gamma) ** 2
        squared_mean = torch.where(mean.detach() + values.mean() - bias < 0.0, 0.0, mean.square() + 2.0 * values.mean() * mean)
        variance_mean = second_moment - squared_mean
        return -(mean - self.k * (mean_variance + variance_mean))

    def _is_last_epoch(self, statistics: UpdateStatistics) -> bool:
        return self.max_epoch_kl is not None and statistics.epoch_kl() > self.max_epoch_kl
