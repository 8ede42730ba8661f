"""Diagnostics of an update, under SB3's names and more."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from sb3_ano.algorithms.update import LossTerms, TrustRegion, approximate_kl


class _Minibatch(NamedTuple):
    """What is kept of a minibatch for the statistics: scalars, and vectors ``(batch,)``."""

    scalars: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    log_ratio: torch.Tensor
    advantages: torch.Tensor
    gradient: torch.Tensor | None
    grad_norm: torch.Tensor | None


@dataclass
class UpdateStatistics:
    """Diagnostics of one call of ``train``: minibatches are only kept, and :meth:`summary` looks at them all at once."""

    region: TrustRegion
    skipped: int = 0
    not_finite: list[str] = field(default_factory=list)
    _minibatches: list[_Minibatch] = field(default_factory=list)
    _epoch_start: int = 0

    def start_epoch(self) -> None:
        """Mark the beginning of an epoch, because SB3's ``approx_kl`` is the mean of the last one."""
        self._epoch_start = len(self._minibatches)

    def skip(self, not_finite: list[str]) -> None:
        """Count a minibatch that was skipped, and remember what was not finite in it."""
        self.skipped += 1
        self.not_finite = not_finite

    def add(self, terms: LossTerms, probe: torch.Tensor, grad_norm: torch.Tensor | None) -> None:
        """Record a minibatch; ``grad_norm`` is None where ``target_kl`` stopped the update before its gradient."""
        scalars = (terms.policy_loss.detach(), terms.value_loss.detach(), terms.entropy_loss.detach(), terms.loss.detach())
        self._minibatches.append(_Minibatch(scalars, terms.log_ratio, terms.advantages, probe.grad, grad_norm))

    def epoch_kl(self) -> float:
        """Mean KL of the minibatches of the current epoch; NaN if there was none."""
        kls = [approximate_kl(minibatch.log_ratio) for minibatch in self._minibatches[self._epoch_start :]]
        return torch.stack(kls).mean().item() if kls else float("nan")

    def summary(self) -> dict[str, float]:
        """Means over the minibatches of the update, under SB3's names where it has one; empty if there was none.

        ``approx_kl`` and ``loss`` mean what they mean in SB3 (the last epoch, the last minibatch); ``kl_mean`` and
        ``kl_max`` look at the whole update. ``ppo_discarded_gradient`` is the share of the surrogate's gradient, in
        absolute value over samples, that comes from samples whose gradient PPO's clip would have set to zero.
        """
        kept = self._minibatches
        if not kept:
            return {}
        losses = _read(torch.stack([torch.stack(minibatch.scalars) for minibatch in kept]))
        log_ratio = _read(torch.cat([minibatch.log_ratio for minibatch in kept]))
        advantages = _read(torch.cat([minibatch.advantages for minibatch in kept]))
        sizes = np.array([len(minibatch.log_ratio) for minibatch in kept])
        starts = np.cumsum(sizes) - sizes

        def means(values: np.ndarray) -> np.ndarray:
            return np.add.reduceat(values, starts) / sizes

        with np.errstate(over="ignore"):  # a ratio may leave even float64; then its mean and KL are infinite
            ratio = np.exp(log_ratio)
            kl = means(ratio - 1.0 - log_ratio)
        above, below = ratio > 1.0 + self.region.eps_high.item(), ratio < 1.0 - self.region.eps_low.item()
        fraction_above, fraction_below = (float(means(side.astype(float)).mean()) for side in (above, below))
        last_epoch = kl[self._epoch_start :]
        norms = [minibatch.grad_norm for minibatch in kept if minibatch.grad_norm is not None]
        return {
            "policy_gradient_loss": float(losses[:, 0].mean()),
            "value_loss": float(losses[:, 1].mean()),
            "entropy_loss": float(losses[:, 2].mean()),
            "loss": float(losses[-1, 3]),
            "approx_kl": float(last_epoch.mean()) if len(last_epoch) else float(kl.mean()),
            "kl_mean": float(kl.mean()),
            "kl_max": float(kl.max()),
            "ratio_mean": float(means(ratio).mean()),
            "ratio_max": float(ratio.max()),
            "clip_fraction": fraction_above + fraction_below,
            "fraction_above": fraction_above,
            "fraction_below": fraction_below,
            "ppo_discarded_gradient": self._discarded_gradient(np.where(advantages >= 0.0, above, below)),
            "grad_norm": float(_read(torch.stack(norms)).mean()) if norms else 0.0,
        }

    def _discarded_gradient(self, clipped: np.ndarray) -> float:
        gradients = [
            torch.zeros_like(minibatch.log_ratio) if minibatch.gradient is None else minibatch.gradient.abs()
            for minibatch in self._minibatches
        ]
        gradient = _read(torch.cat(gradients))
        total = gradient.sum()
        return float(gradient[clipped].sum() / total) if total > 0.0 else 0.0


def _read(values: torch.Tensor) -> np.ndarray:
    """Bring a tensor to the host, in float64."""
    return values.double().cpu().numpy()
