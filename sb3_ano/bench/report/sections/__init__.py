"""The sections of a report, each a function from a suite to figures and tables."""

from sb3_ano.bench.report.sections.geometry import geometry
from sb3_ano.bench.report.sections.performance import aggregates, improvement, profiles, sample_efficiency
from sb3_ano.bench.report.sections.records import records
from sb3_ano.bench.report.sections.robustness import learning_rates, sensitivity
from sb3_ano.bench.report.sections.tasks import tasks
from sb3_ano.bench.report.sections.training import dynamics, wall_clock

#: The sections of a suite, in their order; one that has nothing to say returns None.
SECTIONS = (
    aggregates,
    profiles,
    improvement,
    sample_efficiency,
    tasks,
    learning_rates,
    sensitivity,
    dynamics,
    wall_clock,
    records,
)

__all__ = ["SECTIONS", "geometry"]
