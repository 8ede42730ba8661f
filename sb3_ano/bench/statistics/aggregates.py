"""Aggregates of normalised scores with stratified bootstrap intervals, through rliable.

Scores have the shape ``(seeds, tasks)``. Resampling draws seeds anew for each task.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from sb3_ano.extras import missing_extra

try:
    from rliable import library, metrics
except ImportError as error:
    raise missing_extra("bench", error.name or "rliable") from error


def interquartile_mean(scores: np.ndarray) -> float:
    """The mean of the middle half of all scores; rliable's, without what SciPy's checks add to each call."""
    return float(_middle_half(np.sort(scores, axis=None)).mean())


def _middle_half(ordered: np.ndarray) -> np.ndarray:
    cut = len(ordered) // 4
    return ordered[cut : len(ordered) - cut]


#: The aggregates by the names that the field uses.
METRICS: Mapping[str, Callable[[np.ndarray], float]] = {
    "IQM": interquartile_mean,
    "mean": metrics.aggregate_mean,
    "median": metrics.aggregate_median,
    "optimality gap": metrics.aggregate_optimality_gap,
}


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are made.

    :param reps: resamples
    :param seed: of their draws; one seed gives the same interval, whatever was drawn before
    :param confidence: of the intervals
    :raises ValueError: for a number that is not allowed
    """

    reps: int = 2000
    seed: int = 0
    confidence: float = 0.95

    def __post_init__(self) -> None:
        if self.reps < 1:
            raise ValueError(f"reps={self.reps} is not allowed; allowed are whole numbers from 1")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} is not allowed; allowed are whole numbers from 0 to 2**32 - 1")
        if not 0.0 < self.confidence < 1.0:
            raise ValueError(f"confidence={self.confidence} is not allowed; allowed are numbers between 0 and 1")


@dataclass(frozen=True)
class Estimate:
    """A number with its interval.

    :param value: the point estimate
    :param low: lower end; NaN where there is one seed only, which says nothing about others
    :param high: upper end, likewise
    """

    value: float
    low: float = np.nan
    high: float = np.nan


@dataclass(frozen=True)
class Band:
    """A curve with its pointwise interval; all of shape ``(points,)``.

    :param values: the point estimates
    :param low: lower ends, NaN where there is one seed only
    :param high: upper ends, likewise
    """

    values: np.ndarray
    low: np.ndarray
    high: np.ndarray


def aggregate(scores: np.ndarray, bootstrap: Bootstrap) -> dict[str, Estimate]:
    """All of :data:`METRICS`.

    :param scores: shape ``(seeds, tasks)``
    :param bootstrap: how intervals are made
    :raises ValueError: for another shape, or numbers that are not finite
    """

    def all_metrics(sample: np.ndarray) -> np.ndarray:
        return np.array([metric(sample) for metric in METRICS.values()])

    band = _estimate(all_metrics, [_checked(scores)], bootstrap)
    return dict(zip(METRICS, _estimates(band), strict=True))


def performance_profile(scores: np.ndarray, thresholds: np.ndarray, bootstrap: Bootstrap) -> Band:
    """The share of runs whose score is above each threshold.

    :param scores: shape ``(seeds, tasks)``
    :param thresholds: scores, shape ``(points,)``
    :param bootstrap: how intervals are made
    :raises ValueError: for another shape, or numbers that are not finite
    """

    # rliable's own function compares all runs with one threshold after the other, forty times slower.
    def share_above(sample: np.ndarray) -> np.ndarray:
        return 1.0 - np.searchsorted(np.sort(sample, axis=None), thresholds, side="right") / sample.size

    return _estimate(share_above, [_checked(scores)], bootstrap)


def iqm_curve(scores: np.ndarray, bootstrap: Bootstrap) -> Band:
    """The interquartile mean at each point of the training.

    :param scores: shape ``(seeds, tasks, points)``
    :param bootstrap: how intervals are made
    :raises ValueError: for another shape, or numbers that are not finite
    """

    def iqm(sample: np.ndarray) -> np.ndarray:
        return _middle_half(np.sort(sample.reshape(-1, sample.shape[-1]), axis=0)).mean(axis=0)

    return _estimate(iqm, [_checked(scores, 3)], bootstrap)


def probability_of_improvement(scores: np.ndarray, others: np.ndarray, bootstrap: Bootstrap) -> Estimate:
    """The probability that a run of one algorithm scores higher than one of another on the same task, a tie counting half.

    :param scores: shape ``(seeds, tasks)``
    :param others: of the other algorithm, shape ``(other seeds, tasks)``
    :param bootstrap: how intervals are made; both are resampled
    :raises ValueError: for other shapes, or numbers that are not finite
    """
    both = _same_tasks(scores, others)

    # rliable's own function makes a rank test for each task, two thousand times slower; the value is the same.
    def probability(sample: np.ndarray, other: np.ndarray) -> np.ndarray:
        difference = sample[:, None, :] - other[None, :, :]
        return np.array([np.mean((difference > 0) + 0.5 * (difference == 0))])

    return _estimates(_estimate(probability, both, bootstrap))[0]


def relative_change(
    before: np.ndarray, after: np.ndarray, bootstrap: Bootstrap, metric: Callable[[np.ndarray], float] = METRICS["IQM"]
) -> Estimate:
    """The change of an aggregate in units of what it was; -0.4 is a drop of 40 %.

    :param before: scores, shape ``(seeds, tasks)``
    :param after: scores, shape ``(other seeds, tasks)``
    :param bootstrap: how intervals are made; both are resampled
    :param metric: the aggregate
    :return: NaN where the aggregate was not above 0, where the unit means nothing; resamples like that make the interval NaN
    :raises ValueError: for other shapes, or numbers that are not finite
    """

    def change(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        unit = metric(old)
        return np.array([metric(new) / unit - 1.0 if unit > 0 else np.nan])

    return _estimates(_estimate(change, _same_tasks(before, after), bootstrap))[0]


def _estimate(function: Callable[..., np.ndarray], samples: list[np.ndarray], bootstrap: Bootstrap) -> Band:
    """What ``function`` makes of the samples, and percentiles of what it makes of resamples."""
    if min(len(sample) for sample in samples) < 2:
        values = function(*samples)
        return Band(values, np.full_like(values, np.nan), np.full_like(values, np.nan))
    with _numpy_seed(bootstrap.seed):
        points, intervals = library.get_interval_estimates(
            {"": samples[0] if len(samples) == 1 else samples},
            function,
            reps=bootstrap.reps,
            confidence_interval_size=bootstrap.confidence,
        )
    return Band(points[""], *intervals[""])


@contextmanager
def _numpy_seed(seed: int) -> Iterator[None]:
    """rliable draws from NumPy's global generator, whatever ``random_state`` it is given."""
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(state)


def _estimates(band: Band) -> list[Estimate]:
    return [Estimate(*map(float, numbers)) for numbers in zip(band.values, band.low, band.high, strict=True)]


def _checked(scores: np.ndarray, dimensions: int = 2) -> np.ndarray:
    scores = np.asarray(scores, np.float64)
    if scores.ndim != dimensions or not scores.size:
        axes = "(seeds, tasks, points)" if dimensions == 3 else "(seeds, tasks)"
        raise ValueError(f"scores of shape {scores.shape} are not allowed; allowed is {axes}, none of them empty")
    if not np.isfinite(scores).all():
        raise ValueError(f"{np.sum(~np.isfinite(scores))} of {scores.size} scores are not finite")
    return scores


def _same_tasks(scores: np.ndarray, others: np.ndarray) -> list[np.ndarray]:
    first, second = _checked(scores), _checked(others)
    if first.shape[1] != second.shape[1]:
        raise ValueError(f"scores of {first.shape[1]} tasks cannot be compared with those of {second.shape[1]}")
    return [first, second]
