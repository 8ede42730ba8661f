"""Aggregates over tasks and seeds, with intervals, as the field reports them (Agarwal et al. 2021)."""

from sb3_ano.bench.statistics.aggregates import (
    METRICS,
    Band,
    Bootstrap,
    Estimate,
    aggregate,
    iqm_curve,
    performance_profile,
    probability_of_improvement,
    relative_change,
)
from sb3_ano.bench.statistics.curves import area_under_curve, time_to_threshold, window_means

__all__ = [
    "METRICS",
    "Band",
    "Bootstrap",
    "Estimate",
    "aggregate",
    "area_under_curve",
    "iqm_curve",
    "performance_profile",
    "probability_of_improvement",
    "relative_change",
    "time_to_threshold",
    "window_means",
]
