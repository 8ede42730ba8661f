"""Summarize an update for the log, under SB3's names and more."""

import numpy as np
import torch

from sb3_ano.algorithms.update import SCALARS, ClipRange, StepResult

# Samples whose log-ratios, advantages and gradients are kept until they are summarized: little memory, and few waits.
_SAMPLES = 2**16
# Numbers that are kept of each minibatch, in addition to SCALARS: whether it was skipped, whether it ended the update, means
# over its samples, the largest ratio, and the gradient's sum in absolute value, of samples that PPO's clip would discard, and
# of all.
_COLUMNS = (*SCALARS, "skipped", "stop", "kl", "ratio_mean", "ratio_max", "above", "below", "discarded", "gradient")


class UpdateStatistics:
    """Collect the results of one call of ``train``, to be read rarely, because reading waits for the device.

    What is kept of a minibatch does not grow with its size.

    :param clip_range: radii of the update
    """

    def __init__(self, clip_range: ClipRange) -> None:
        self._clip_range = clip_range
        self._results: list[StepResult] = []
        self._n_samples = 0
        self._rows: list[np.ndarray] = []
        self._length = 0
        self._epoch_start = 0

    def start_epoch(self) -> None:
        """Mark the beginning of an epoch, because SB3's ``approx_kl`` is the mean of the last one."""
        self._epoch_start = self._length

    def add(self, result: StepResult) -> None:
        """Record a minibatch."""
        self._results.append(result)
        self._length += 1
        self._n_samples += len(result.log_ratio)
        if self._n_samples >= _SAMPLES:
            self._summarize_minibatches()

    def __len__(self) -> int:
        return self._length

    def _summarize_minibatches(self) -> None:
        """Replace the results that have been collected by their numbers."""
        results = self._results
        numbers = np.empty((len(results), len(_COLUMNS)))
        numbers[:, :5] = _read(torch.stack([result.scalars for result in results]))
        numbers[:, 5] = _read(torch.stack([result.skipped for result in results]))
        numbers[:, 6] = _read(torch.stack([result.stop for result in results]))

        log_ratio = _read(torch.cat([result.log_ratio for result in results]))
        advantages = _read(torch.cat([result.advantages for result in results]))
        gradient = np.abs(_read(torch.cat([result.log_ratio_grad for result in results])))
        sizes = np.array([len(result.log_ratio) for result in results])
        starts = np.cumsum(sizes) - sizes

        # A ratio may leave even float64; then its mean and KL are infinite. Skipped minibatches may have NaN.
        with np.errstate(over="ignore", invalid="ignore"):
            ratio = np.exp(log_ratio)
            numbers[:, 7] = np.add.reduceat(ratio - 1.0 - log_ratio, starts) / sizes
            numbers[:, 8] = np.add.reduceat(ratio, starts) / sizes
            numbers[:, 9] = np.maximum.reduceat(ratio, starts)
            above = ratio > 1.0 + self._clip_range.high.item()
            below = ratio < 1.0 - self._clip_range.low.item()
            numbers[:, 10] = np.add.reduceat(above.astype(float), starts) / sizes
            numbers[:, 11] = np.add.reduceat(below.astype(float), starts) / sizes
            clipped = np.where(advantages >= 0.0, above, below)
            numbers[:, 12] = np.add.reduceat(np.where(clipped, gradient, 0.0), starts)
            numbers[:, 13] = np.add.reduceat(gradient, starts)

        self._rows.append(numbers)
        self._results = []
        self._n_samples = 0

    def _table(self) -> dict[str, np.ndarray]:
        """Return the numbers of all minibatches by name, each ``(len(self),)``."""
        if self._results:
            self._summarize_minibatches()
        return dict(zip(_COLUMNS, np.concatenate(self._rows).T, strict=True))

    def epoch_kl(self) -> float:
        """Return the mean KL of the current epoch's minibatches that were not skipped; NaN if there was none."""
        table = self._table()
        kept = table["skipped"] == 0.0
        kept[: self._epoch_start] = False
        return float(table["kl"][kept].mean()) if kept.any() else float("nan")

    def skipped(self) -> list[int]:
        """Return the minibatches that were skipped because they were not finite, counted from 0."""
        return np.flatnonzero(self._table()["skipped"]).tolist()

    def non_finite_term(self, minibatch: int) -> str:
        """Name the first loss term of a skipped minibatch that is NaN or Inf, or else the gradient.

        :param minibatch: number of the minibatch, counted from 0
        """
        table = self._table()
        name = "grad_norm"
        for term in reversed(SCALARS):
            if not np.isfinite(table[term][minibatch]):
                name = term
        return {"loss": "the weighted sum of the losses (vf_coef, ent_coef)", "grad_norm": "the gradient"}.get(name, name)

    def summary(self) -> dict[str, float]:
        """Average over the minibatches of the update, under SB3's names if it has one.

        Skipped minibatches are left out. ``approx_kl`` and ``loss`` mean what they mean in SB3 (the last epoch, the last
        minibatch); ``kl_mean`` and ``kl_max`` look at the whole update. ``ppo_discarded_gradient`` is the share of the
        surrogate's gradient, in absolute value over samples, that comes from samples whose gradient PPO's clip would have
        set to zero.
        """
        table = self._table()
        kept = table["skipped"] == 0.0
        is_last_epoch = (np.arange(self._length) >= self._epoch_start)[kept]
        table = {name: column[kept] for name, column in table.items()}

        kl = table["kl"]
        moved = table["stop"] == 0.0  # the others have no gradient
        gradient = table["gradient"][moved].sum()
        above = float(table["above"].mean())
        below = float(table["below"].mean())
        return {
            "policy_gradient_loss": float(table["policy_loss"].mean()),
            "value_loss": float(table["value_loss"].mean()),
            "entropy_loss": float(table["entropy_loss"].mean()),
            "loss": float(table["loss"][-1]),
            "approx_kl": float(kl[is_last_epoch].mean()) if is_last_epoch.any() else float(kl.mean()),
            "kl_mean": float(kl.mean()),
            "kl_max": float(kl.max()),
            "ratio_mean": float(table["ratio_mean"].mean()),
            "ratio_max": float(table["ratio_max"].max()),
            "clip_fraction": above + below,
            "fraction_above": above,
            "fraction_below": below,
            "ppo_discarded_gradient": float(table["discarded"][moved].sum() / gradient) if gradient > 0.0 else 0.0,
            "grad_norm": float(table["grad_norm"][moved].mean()) if moved.any() else 0.0,
        }


def _read(values: torch.Tensor) -> np.ndarray:
    """Bring a tensor to the host, in float64."""
    return values.double().cpu().numpy()
