"""Simple Policy Optimization."""

import torch

from sb3_ano.algorithms.base import ShapedPolicyAlgorithm
from sb3_ano.algorithms.buffers import RolloutSamples
from sb3_ano.algorithms.update import ClipRange
from sb3_ano.shaping import spo, surrogate


class SPO(ShapedPolicyAlgorithm):
    """Simple Policy Optimization (Xie et al. 2025): PPO with a quadratic penalty instead of the clip.

    Eq. f_SPO of the ANO paper; the same as ``ANO(shaping="spo")``. The arguments are those of
    :class:`~sb3_ano.algorithms.base.ShapedPolicyAlgorithm`, that is, of SB3's PPO.
    """

    def policy_loss(
        self, log_ratio: torch.Tensor, advantages: torch.Tensor, clip_range: ClipRange, samples: RolloutSamples
    ) -> torch.Tensor:
        """Compute minus the mean of ``r A - |A| (r - 1)^2 / (2 eps)``."""
        return -surrogate(log_ratio, advantages, spo, eps_low=clip_range.low, eps_high=clip_range.high).mean()
