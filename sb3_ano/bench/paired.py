"""Differences between two ways of training that share their seeds, with intervals."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sb3_ano.extras import missing_extra

try:
    from scipy.stats import t as student_t
except ImportError as error:
    raise missing_extra("bench", "scipy") from error

Interval = tuple[float, float]


@dataclass(frozen=True)
class PairedDifference:
    """What a contender gets beyond a reference, seed by seed.

    :param n: pairs
    :param mean: of the contender
    :param reference_mean: of the reference
    :param difference: mean of the differences, in units of the return
    :param t_interval: its interval by Student's t
    :param bootstrap_interval: its interval by percentiles of resampled pairs
    :param share: the difference in units of the reference's mean, in absolute value
    :param share_interval: ``t_interval`` in the same units
    :param within: whether ``share`` lies within the margin
    :param interval_within: whether all of ``share_interval`` does
    """

    n: int
    mean: float
    reference_mean: float
    difference: float
    t_interval: Interval
    bootstrap_interval: Interval
    share: float
    share_interval: Interval
    within: bool
    interval_within: bool


def paired_difference(
    values: Sequence[float],
    reference: Sequence[float],
    *,
    margin: float = 0.2,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> PairedDifference:
    """Compare values that belong together pair by pair.

    :param values: of the contender, one a seed
    :param reference: of the reference, for the same seeds
    :param margin: share of the reference's mean within which a difference counts as none
    :param confidence: of both intervals
    :param resamples: of the bootstrap
    :param seed: of the bootstrap
    :raises ValueError: if the lengths differ, or there are fewer than two pairs
    """
    if len(values) != len(reference) or len(values) < 2:
        raise ValueError(f"{len(values)} values and {len(reference)} of the reference; two pairs are the least")
    differences = np.asarray(values, float) - np.asarray(reference, float)
    mean = float(differences.mean())
    half = half_width(differences, confidence)
    draws = np.random.default_rng(seed).choice(differences, size=(resamples, len(differences))).mean(axis=1)
    low, high = np.quantile(draws, [(1.0 - confidence) / 2.0, (1.0 + confidence) / 2.0])
    unit = abs(float(np.mean(reference)))
    share_low, share, share_high = (_in_units(value, unit) for value in (mean - half, mean, mean + half))
    return PairedDifference(
        n=len(differences),
        mean=float(np.mean(values)),
        reference_mean=float(np.mean(reference)),
        difference=mean,
        t_interval=(mean - half, mean + half),
        bootstrap_interval=(float(low), float(high)),
        share=share,
        share_interval=(share_low, share_high),
        within=abs(share) <= margin,
        interval_within=-margin <= share_low and share_high <= margin,
    )


def half_width(values: np.ndarray, confidence: float = 0.95) -> float:
    """Half the width of Student's interval of a mean.

    :param values: at least two, shape ``(n,)``
    :param confidence: of the interval
    """
    quantile = float(student_t.ppf((1.0 + confidence) / 2.0, len(values) - 1))
    return quantile * float(values.std(ddof=1)) / float(np.sqrt(len(values)))


def _in_units(value: float, unit: float) -> float:
    return value / unit if unit else float(np.copysign(np.inf, value)) if value else 0.0
