"""Aggregates of normalized scores over tasks and seeds (Agarwal et al. 2021), with intervals that hold their level of 95 %.

Scores have the shape ``(..., seeds, tasks)``. The point estimates are those of rliable. Its percentile intervals contain the
truth in about 80 % of cases with three seeds, instead of 95 %, because resampling underestimates the variance by the factor
``(n - 1) / n`` and ignores its uncertainty. The intervals here are ``estimate +- t * error``: the standard error
comes from a stratified bootstrap of scores whose distances from the mean of their task are stretched by ``sqrt(n / (n - 1))``,
and Student's t has the degrees of freedom of Satterthwaite (1946), from each task's share of the statistic's variance.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student_t
from scipy.stats import trim_mean

Statistic = Callable[..., np.ndarray]
# Upper quantile of two-sided intervals of 95 %.
_QUANTILE = 0.975
_PROBABILITIES = np.linspace(0.0, 1.0, 10_001)


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """Return the mean of the middle half of all scores.

    :param scores: shape ``(..., seeds, tasks)``
    """
    together = scores.reshape(*scores.shape[:-2], -1)
    return trim_mean(together, 0.25, axis=-1)


def mean(scores: np.ndarray) -> np.ndarray:
    """Return the mean of all scores.

    :param scores: shape ``(..., seeds, tasks)``
    """
    return scores.mean(axis=(-2, -1))


def median(scores: np.ndarray) -> np.ndarray:
    """Return the median over tasks of the mean over seeds.

    :param scores: shape ``(..., seeds, tasks)``
    """
    of_tasks = scores.mean(axis=-2)
    return np.median(of_tasks, axis=-1)


def optimality_gap(scores: np.ndarray) -> np.ndarray:
    """Return the mean shortfall of scores from 1, where scores above 1 count as 1.

    :param scores: shape ``(..., seeds, tasks)``
    """
    limited = np.minimum(scores, 1.0)
    return 1.0 - limited.mean(axis=(-2, -1))


#: The aggregates by the names that the field uses.
METRICS: Mapping[str, Statistic] = {
    "IQM": interquartile_mean,
    "Mean": mean,
    "Median": median,
    "Optimality gap": optimality_gap,
}


class Estimate(NamedTuple):
    """Hold a number, or an array of numbers, with its interval.

    :param value: point estimate
    :param low: lower end of the interval, NaN if there is a single seed
    :param high: upper end of the interval, likewise
    """

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def exact(cls, value: np.ndarray) -> "Estimate":
        """Return values without intervals.

        :param value: values of any shape
        """
        unknown = np.full_like(value, np.nan)
        return cls(value, unknown, unknown)


def estimate(
    statistic: Statistic,
    *samples: np.ndarray,
    reps: int = 2000,
    paired: bool = False,
) -> Estimate:
    """Compute a statistic of one or several sets of runs with its interval.

    :param statistic: function from arrays ``(..., seeds, tasks)`` to an array ``(...)``
    :param samples: scores, each of shape ``(..., seeds, tasks)``, of the same tasks
    :param reps: number of resamples of the bootstrap
    :param paired: whether row ``i`` of all samples has the same seed; they are then resampled together
    :raises ValueError: for other shapes, or scores that are not finite
    """
    arrays = _checked(samples, paired)
    value = np.asarray(statistic(*arrays))
    # A single seed shows nothing of the spread.
    if min(array.shape[-2] for array in arrays) < 2:
        return Estimate.exact(value)

    rng = np.random.default_rng(0)
    resamples = []
    rows = None

    for array in arrays:
        seeds, tasks = array.shape[-2:]
        # Paired samples have the same seeds in each resample.
        if rows is None or not paired:
            # The same runs at all points of a curve, which are the leading dimensions.
            points = (1,) * (array.ndim - 2)
            rows = rng.integers(seeds, size=(reps, *points, seeds, tasks))

        # Because resampling underestimates the variance by (n - 1) / n.
        stretch = np.sqrt(seeds / (seeds - 1))
        center = array.mean(axis=-2, keepdims=True)
        stretched = center + stretch * (array - center)
        resamples.append(np.take_along_axis(stretched[None], rows, axis=-2))

    # All resamples at once, along the first dimension
    error = np.asarray(statistic(*resamples)).std(axis=0, ddof=1)
    degrees = _degrees_of_freedom(statistic, arrays, paired)
    half = _quantile(degrees) * error
    return Estimate(value, value - half, value + half)


def _quantile(degrees_of_freedom: np.ndarray | float) -> np.ndarray:
    """Return by how many standard errors an interval of 95 % extends to each side."""
    return student_t.ppf(_QUANTILE, degrees_of_freedom)


def _degrees_of_freedom(
    statistic: Statistic,
    arrays: list[np.ndarray],
    paired: bool,
) -> np.ndarray:
    """Return Satterthwaite's (1946) degrees of freedom: few if one task has most of the variance of the statistic.

    A task's share is the variance of the statistic if the scores of this task alone move by the distances of its ``n`` seeds
    from their mean, each divided by ``sqrt(n - 1)``. For a mean, it is the squared standard error of the task's mean, and the
    result that of Welch (1947). Paired samples move together; of others, each has shares and degrees of freedom of its own.
    """
    # Distances by seed, which then is the first dimension.
    errors = []

    for array in arrays:
        seeds = array.shape[-2]
        distances = array - array.mean(axis=-2, keepdims=True)
        errors.append(np.moveaxis(distances, -2, 0) / np.sqrt(seeds - 1))

    together = [[index] for index in range(len(arrays))]
    if paired:
        together = [list(range(len(arrays)))]
    total = np.zeros(())
    squares = np.zeros(())

    for moving in together:
        seeds = len(errors[moving[0]])
        for task in range(arrays[0].shape[-1]):
            # One copy of the scores for each seed, in which the task's scores move by its distance.
            moved = [np.repeat(array[None], seeds, axis=0) for array in arrays]
            for index in moving:
                moved[index][..., task] += errors[index][..., None, task]

            share = np.var(statistic(*moved), axis=0)
            total = total + share
            squares = squares + share**2 / (seeds - 1)

    return np.divide(total**2, squares, out=np.ones_like(total), where=squares > 0)


def aggregate(scores: np.ndarray, reps: int = 2000) -> dict[str, Estimate]:
    """Compute all of :data:`METRICS`.

    :param scores: shape ``(seeds, tasks)``
    :param reps: number of resamples of the bootstrap
    :raises ValueError: for another shape, or scores that are not finite
    """
    estimates = {}
    for name, statistic in METRICS.items():
        estimates[name] = estimate(statistic, scores, reps=reps)
    return estimates


def probability_of_improvement(scores: np.ndarray, others: np.ndarray) -> Estimate:
    """Compute the probability that a run of one algorithm scores higher than one of another on the same task.

    A tie counts one half. The interval is the score interval of Newcombe (2006, method 5), which does not collapse if all
    pairs agree, as they often do with few seeds.

    :param scores: shape ``(seeds, tasks)``
    :param others: scores of the other algorithm, shape ``(other seeds, tasks)``
    :raises ValueError: for other shapes, or scores that are not finite
    """
    first, second = _checked((scores, others))
    n, tasks = first.shape
    m = len(second)

    # Each run against each other one of the same task
    difference = first[:, None, :] - second[None, :, :]
    wins = (difference > 0) + 0.5 * (difference == 0)
    value = np.mean(wins)
    if min(n, m) < 2:
        return Estimate.exact(value)

    # The interval has the probabilities whose own variance makes the value likely.
    p = _PROBABILITIES
    of_pairs = (1 - p) / (2 - p) + p / (1 + p)
    variance = p * (1 - p) * (1 + ((n + m) / 2 - 1) * of_pairs) / (n * m * tasks)
    widest = _quantile(tasks * (n + m - 2)) * np.sqrt(variance)
    inside = p[np.abs(p - value) <= widest]
    # The grid may have no point inside.
    low = np.minimum(inside.min(initial=1.0), value)
    high = np.maximum(inside.max(initial=0.0), value)
    return Estimate(value, low, high)


def relative_change(
    before: np.ndarray,
    after: np.ndarray,
    reps: int = 2000,
    paired: bool = False,
    metric: Statistic = interquartile_mean,
) -> Estimate:
    """Compute the relative change of an aggregate; -0.4 is a decrease of 40 %.

    :param before: scores, shape ``(seeds, tasks)``
    :param after: scores, shape ``(other seeds, tasks)``
    :param reps: number of resamples of the bootstrap, which is computed on the scale of the logarithm
    :param paired: whether both have the same seeds
    :param metric: aggregate to compare
    :return: NaN if the aggregate is not positive; the interval is NaN if that of a resample is not
    :raises ValueError: for other shapes, or scores that are not finite
    """

    def log_ratio(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        base = metric(old)
        value = metric(new)
        ratio = np.full(np.shape(value), np.nan)
        # Of a base at or below 0, no change in percent makes sense.
        np.divide(value, base, out=ratio, where=(base > 0) & (value > 0))
        # On the scale of the logarithm a change and its inverse are alike.
        return np.log(ratio)

    change = estimate(log_ratio, before, after, reps=reps, paired=paired)
    return Estimate(*(np.expm1(part) for part in change))


def _checked(samples: tuple[np.ndarray, ...], paired: bool = False) -> list[np.ndarray]:
    """Return arrays of finite scores of the same tasks, of the same seeds if they are paired."""
    arrays = []
    for sample in samples:
        array = np.asarray(sample, np.float64)
        if not np.isfinite(array).all():
            raise ValueError("scores must be finite")
        arrays.append(array)

    # The same tasks, and for pairs the same number of seeds
    shapes = [array.shape for array in arrays]
    compared = set(shapes)
    if not paired:
        compared = {shape[-1:] for shape in shapes}
    if len(compared) > 1:
        raise ValueError(f"scores of shapes {', '.join(map(str, shapes))} cannot be compared")
    return arrays
