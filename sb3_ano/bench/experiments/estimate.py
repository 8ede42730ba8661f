"""How long a plan will take."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from sb3_ano.bench.experiments.algorithms import algorithm
from sb3_ano.bench.experiments.plan import Run

#: Seconds before a process of its own begins to train.
STARTUP_SECONDS = 5.0


@dataclass(frozen=True)
class Estimate:
    """Expected seconds of a run.

    :param seconds: None where nothing is known
    :param measured: whether finished runs say so, and not the suite
    """

    seconds: float | None
    measured: bool


def estimates(
    runs: Sequence[Run], finished: Iterable[Mapping[str, Any]], steps_per_second: Mapping[str, float]
) -> dict[str, Estimate]:
    """Expected seconds of each run, by name: from finished runs of the same task and algorithm, or else the suite's speeds.

    :param runs: those to come
    :param finished: ``run.json`` of those that are there
    :param steps_per_second: of the suite, by the algorithm's name
    """
    speeds: dict[tuple[str, str], list[float]] = {}
    for document in finished:
        speed = document["total_timesteps"] / document["process_seconds"]
        speeds.setdefault((document["env_id"], document["algorithm"]), []).append(speed)
    found = {}
    for run in runs:
        measured = speeds.get((run.env_id, run.algorithm))
        speed = median(measured) if measured else steps_per_second.get(algorithm(run.algorithm).name)
        seconds = None if speed is None else STARTUP_SECONDS + run.total_timesteps / speed
        found[run.run_id] = Estimate(seconds, bool(measured))
    return found


def in_words(seconds: float) -> str:
    """A duration for a reader, such as ``"about 3 h 20 min"``."""
    minutes = round(seconds / 60.0)
    if minutes < 1:
        return "less than a minute"
    if minutes < 100:
        return f"about {minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"about {hours} h {minutes} min"
    return f"about {seconds / 86400.0:.1f} days"
