"""Summarize an update for the log, under SB3's names and more."""

from dataclasses import dataclass, field

import numpy as np
import torch

from sb3_ano.algorithms.update import SCALARS, ClipRange, StepResult, approximate_kl


@dataclass
class UpdateStatistics:
    """Collect the results of one call of ``train``, to be read at its end, because reading waits for the device.

    :param clip_range: radii of the update
    """

    clip_range: ClipRange
    _results: list[StepResult] = field(default_factory=list)
    _epoch_start: int = 0

    def start_epoch(self) -> None:
        """Mark the beginning of an epoch, because SB3's ``approx_kl`` is the mean of the last one."""
        self._epoch_start = len(self._results)

    def add(self, result: StepResult) -> None:
        """Record a minibatch."""
        self._results.append(result)

    def __len__(self) -> int:
        return len(self._results)

    def epoch_kl(self) -> float:
        """Return the mean KL of the current epoch's minibatches that were not skipped; NaN if there was none."""
        kls = [approximate_kl(result.log_ratio) for result in self._results[self._epoch_start :] if not bool(result.skipped)]
        return torch.stack(kls).mean().item() if kls else float("nan")

    def skipped(self) -> list[int]:
        """Return the minibatches that were skipped because they were not finite, counted from 0."""
        return torch.nonzero(torch.stack([result.skipped for result in self._results])).flatten().tolist()

    def non_finite_term(self, minibatch: int) -> str:
        """Name the first loss term of a skipped minibatch that is NaN or Inf, or else the gradient.

        :param minibatch: number of the minibatch, counted from 0
        """
        finite = self._results[minibatch].scalars.isfinite().tolist()
        name = next((name for name, is_finite in zip(SCALARS, finite, strict=True) if not is_finite), "grad_norm")
        return {"loss": "the weighted sum of the losses (vf_coef, ent_coef)", "grad_norm": "the gradient"}.get(name, name)

    def summary(self) -> dict[str, float]:
        """Average over the minibatches of the update, under SB3's names if it has one.

        Skipped minibatches are left out. ``approx_kl`` and ``loss`` mean what they mean in SB3 (the last epoch, the last
        minibatch); ``kl_mean`` and ``kl_max`` look at the whole update. ``ppo_discarded_gradient`` is the share of the
        surrogate's gradient, in absolute value over samples, that comes from samples whose gradient PPO's clip would have
        set to zero.
        """
        left_out = set(self.skipped())
        kept = [number for number in range(len(self._results)) if number not in left_out]
        results = [self._results[number] for number in kept]
        scalars = _read(torch.stack([result.scalars for result in results]))
        log_ratio = _read(torch.cat([result.log_ratio for result in results]))
        advantages = _read(torch.cat([result.advantages for result in results]))
        stopped = torch.stack([result.stop for result in results]).cpu().numpy()
        sizes = np.array([len(result.log_ratio) for result in results])
        gradient = np.abs(_read(torch.cat([result.log_ratio_grad for result in results]))) * np.repeat(~stopped, sizes)
        starts = np.cumsum(sizes) - sizes

        def means(values: np.ndarray) -> np.ndarray:
            averages: np.ndarray = np.add.reduceat(values, starts) / sizes
            return averages

        with np.errstate(over="ignore"):  # a ratio may leave even float64; then its mean and KL are infinite
            ratio = np.exp(log_ratio)
            kl = means(ratio - 1.0 - log_ratio)
        above, below = ratio > 1.0 + self.clip_range.high.item(), ratio < 1.0 - self.clip_range.low.item()
        fraction_above, fraction_below = (float(means(side.astype(float)).mean()) for side in (above, below))
        last_epoch = kl[[number >= self._epoch_start for number in kept]]
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
