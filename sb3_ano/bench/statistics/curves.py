"""What is read off one learning curve."""

import numpy as np


def window_means(groups: np.ndarray, values: np.ndarray, n_groups: int) -> np.ndarray:
    """The mean of the values in each group, NaN for a group without any; values that are NaN do not count.

    :param groups: the group of each value, shape ``(values,)``, whole numbers from 0
    :param values: shape ``(values,)``
    :param n_groups: number of groups
    :return: shape ``(n_groups,)``
    """
    there = ~np.isnan(values)
    counts = np.bincount(groups[there], minlength=n_groups)
    sums = np.bincount(groups[there], weights=values[there], minlength=n_groups)
    return np.divide(sums, counts, out=np.full(n_groups, np.nan), where=counts > 0)


def area_under_curve(steps: np.ndarray, returns: np.ndarray) -> float:
    """The mean height of a learning curve between its first and last point, by the trapezoidal rule.

    :param steps: increasing, shape ``(points,)``
    :param returns: shape ``(points,)``
    :return: in units of the return; of a single point, its height
    """
    if len(steps) == 1:
        return float(returns[0])
    heights = (returns[1:] + returns[:-1]) / 2.0
    return float(np.sum(heights * np.diff(steps)) / (steps[-1] - steps[0]))


def time_to_threshold(seconds: np.ndarray, returns: np.ndarray, threshold: float) -> float:
    """When a learning curve first reaches a return.

    :param seconds: since the start of the training, shape ``(points,)``
    :param returns: shape ``(points,)``
    :param threshold: the return to reach
    :return: seconds, infinite if it never does
    """
    reached = np.flatnonzero(returns >= threshold)
    return float(seconds[reached[0]]) if len(reached) else np.inf
