"""Diagnostics of an update, under SB3's names and more."""

from dataclasses import dataclass, field

import numpy as np
import torch

from sb3_ano.algorithms.update import StepResult, TrustRegion, approximate_kl


@dataclass
class UpdateStatistics:
    """Diagnostics of one call of ``train``: results are only kept, and :meth:`summary` looks at them all at once."""

    region: TrustRegion
    _results: list[StepResult] = field(default_factory=list)
    _indices: list[torch.Tensor | None] = field(default_factory=list)
    _epoch_start: int = 0

    def start_epoch(self) -> None:
        """Mark the beginning of an epoch, because SB3's ``approx_kl`` is the mean of the last one."""
        self._epoch_start = len(self._results)

    def add(self, result: StepResult, indices: torch.Tensor | None = None) -> None:
        """Record a minibatch, and where it lies in the rollout."""
        self._results.append(result)
        self._indices.append(indices)

    def __len__(self) -> int:
        return len(self._results)

    def recorded(self, minibatch: int) -> tuple[StepResult, torch.Tensor | None]:
        """What was recorded of a minibatch, counted from 0."""
        return self._results[minibatch], self._indices[minibatch]

    def epoch_kl(self) -> float:
        """Mean KL of the finite minibatches of the current epoch; NaN if there was none."""
        kls = [approximate_kl(result.log_ratio) for result in self._results[self._epoch_start :] if bool(result.finite)]
        return torch.stack(kls).mean().item() if kls else float("nan")

    def skipped(self) -> list[int]:
        """Minibatches that were not finite, counted from 0."""
        if not self._results:
            return []
        finite = torch.stack([result.finite for result in self._results]) | torch.stack([r.stop for r in self._results])
        return [] if bool(finite.all()) else torch.nonzero(~finite).flatten().tolist()

    def summary(self) -> dict[str, float]:
        """Means over the minibatches of the update, under SB3's names where it has one; empty if there was none.

        Skipped minibatches are left out. ``approx_kl`` and ``loss`` mean what they mean in SB3 (the last epoch, the last
        minibatch); ``kl_mean`` and ``kl_max`` look at the whole update. ``ppo_discarded_gradient`` is the share of the
        surrogate's gradient, in absolute value over samples, that comes from samples whose gradient PPO's clip would have
        set to zero.
        """
        left_out = set(self.skipped())
        kept = [(number, result) for number, result in enumerate(self._results) if number not in left_out]
        if not kept:
            return {}
        results = [result for _, result in kept]
        scalars = _read(torch.stack([result.scalars for result in results]))
        log_ratio = _read(torch.cat([result.log_ratio for result in results]))
        advantages = _read(torch.cat([result.advantages for result in results]))
        stopped = torch.stack([result.stop for result in results]).cpu().numpy()
        sizes = np.array([len(result.log_ratio) for result in results])
        gradient = np.abs(_read(torch.cat([result.gradient for result in results]))) * np.repeat(~stopped, sizes)
        starts = np.cumsum(sizes) - sizes

        def means(values: np.ndarray) -> np.ndarray:
            return np.add.reduceat(values, starts) / sizes

        with np.errstate(over="ignore"):  # a ratio may leave even float64; then its mean and KL are infinite
            ratio = np.exp(log_ratio)
            kl = means(ratio - 1.0 - log_ratio)
        above, below = ratio > 1.0 + self.region.eps_high.item(), ratio < 1.0 - self.region.eps_low.item()
        fraction_above, fraction_below = (float(means(side.astype(float)).mean()) for side in (above, below))
        last_epoch = kl[[number >= self._epoch_start for number, _ in kept]]
        clipped = np.where(advantages >= 0.0, above, below)
        norms = scalars[~stopped, 4]
        return {
            "policy_gradient_loss": float(scalars[:, 0].mean()),
            "value_loss": float(scalars[:, 1].mean()),
            "entropy_loss": float(scalars[:, 2].mean()),
            "loss": float(scalars[-1, 3]),
            "approx_kl": float(last_epoch.mean()) if len(last_epoch) else float(kl.mean()),
            "kl_mean": float(kl.mean()),
            "kl_max": float(kl.max()),
            "ratio_mean": float(means(ratio).mean()),
            "ratio_max": float(ratio.max()),
            "clip_fraction": fraction_above + fraction_below,
            "fraction_above": fraction_above,
            "fraction_below": fraction_below,
            "ppo_discarded_gradient": float(gradient[clipped].sum() / gradient.sum()) if gradient.sum() > 0.0 else 0.0,
            "grad_norm": float(norms.mean()) if len(norms) else 0.0,
        }


def _read(values: torch.Tensor) -> np.ndarray:
    """Bring a tensor to the host, in float64."""
    return values.double().cpu().numpy()
