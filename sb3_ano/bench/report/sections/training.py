"""What happens during the training, and how long it takes."""

import numpy as np

from sb3_ano.bench.report.contenders import Contender, short_label
from sb3_ano.bench.report.content import Cell, Row, Section, Table, number, number_cell, plural
from sb3_ano.bench.report.figures import Bar, Line, draw_bars, draw_line_grid
from sb3_ano.bench.report.view import SuiteView
from sb3_ano.bench.statistics import Band, Estimate

_NAMES = {
    "approx_kl": "KL of an update",
    "ratio_max": "largest ratio",
    "clip_fraction": "share beyond the radius",
    "entropy": "entropy",
}
_LOGARITHMIC = ("approx_kl", "ratio_max")
# Above this number of tasks, one row of panels stands for all.
_MOST_TASKS = 6


def dynamics(view: SuiteView) -> Section | None:
    """KL divergence, ratios and entropy during the training."""
    if not view.results.diagnostics:
        return None
    apart = len(view.results.tasks) <= _MOST_TASKS
    rows = {
        task: {_NAMES[name]: lines for name in view.results.diagnostics if (lines := _lines(view, name, task))}
        for task in (view.results.tasks if apart else [""])
    }
    rows = {task: row for task, row in rows.items() if row}
    if not rows:
        return None
    drawn = draw_line_grid(rows, view.style, xlabel="training, %", logarithmic=[_NAMES[name] for name in _LOGARITHMIC])
    which = "seeds" if apart else "runs of all tasks"
    caption = (
        f"What an update does to the policy: medians over {which}, bands from quartile to quartile. The KL divergence is the "
        "mean of r - 1 - log r over the rollout after its update; the radius is each algorithm's own."
    )
    run_ids = view.run_ids(row for one in view.chosen for row in one.rows)
    picture = view.picture("dynamics", drawn, caption, f"Training dynamics. {_spoken(view)}", run_ids)
    return Section("Ratio and KL dynamics", pictures=(picture,), tables=(_dynamics_table(view),))


def _lines(view: SuiteView, name: str, task: str) -> list[Line]:
    lines = []
    for one in view.chosen:
        own = view.on_task(one, task) if task else list(one.rows)
        values = view.results.diagnostics[name][own]
        there = np.isfinite(values).any(axis=0)
        if not there.any():
            continue
        low, middle, high = np.nanquantile(values[:, there], [0.25, 0.5, 0.75], axis=0)
        x, band = 100 * view.results.fractions[there], Band(middle, low, high)
        lines.append(Line(short_label(one.algorithm), one.algorithm, x, band))
    return lines


def _spoken(view: SuiteView) -> str:
    said = []
    for name, values in view.results.diagnostics.items():
        medians = [(short_label(one.algorithm), _median(values, one)) for one in view.chosen]
        shown = ", ".join(f"{algorithm} {number(value)}" for algorithm, value in medians if np.isfinite(value))
        said.append(f"Median {_NAMES[name]}: {shown}.")
    return " ".join(said)


def _median(values: np.ndarray, one: Contender) -> float:
    own = values[list(one.rows)]
    return float(np.median(own[np.isfinite(own)])) if np.isfinite(own).any() else np.nan


def _dynamics_table(view: SuiteView) -> Table:
    names = list(view.results.diagnostics)
    rows = []
    for one in view.chosen:
        cells = [number_cell(_median(view.results.diagnostics[name], one)) for name in names]
        rows.append(Row((Cell(one.label), *cells), view.run_ids(one.rows)))
    columns = ("algorithm", *(_NAMES[name] for name in names))
    return Table("Medians over all tasks, seeds and the whole training", columns, tuple(rows))


def wall_clock(view: SuiteView) -> Section:
    """Steps a second, and the time to a score."""
    runs, bars, rows = view.results.runs, [], []
    for one in view.chosen:
        speeds = runs["steps_per_second"].to_numpy()[list(one.rows)]
        found = Estimate(float(np.median(speeds)), float(speeds.min()), float(speeds.max()))
        bars.append(Bar(short_label(one.algorithm), one.algorithm, found))
        hours = runs["wall_seconds"].to_numpy()[list(one.rows)] / 3600
        cells = (Cell(one.label), number_cell(found.value), number_cell(found.low), number_cell(found.high))
        rows.append(Row((*cells, number_cell(float(hours.sum()))), view.run_ids(one.rows)))
    drawn = draw_bars({"Training speed": bars}, view.style, xlabel="environment steps a second")
    caption = (
        "Steps a second of whole trainings, without evaluations: ticks are medians over runs, bars reach from the slowest to "
        "the fastest."
    )
    spoken = ", ".join(f"{bar.label} {number(bar.estimate.value)}" for bar in bars)
    run_ids = view.run_ids(row for one in view.chosen for row in one.rows)
    picture = view.picture("speed", drawn, caption, f"Median steps a second: {spoken}.", run_ids)
    columns = ("algorithm", "median steps/s", "slowest", "fastest", "hours in all")
    tables = [Table("Training speed", columns, tuple(rows))]
    if view.results.scored_tasks:
        tables.append(_threshold_table(view))
    text = "Runs that share a machine slow each other down; the table of runs says where each was made."
    return Section("Wall-clock time", (text,), (picture,), tuple(tables))


def _threshold_table(view: SuiteView) -> Table:
    runs, rows = view.results.runs, []
    for task in view.results.scored_tasks:
        for one in view.chosen:
            own = view.on_task(one, task)
            if not own:
                continue
            seconds = runs["seconds_to_threshold"].to_numpy()[own]
            reached = int(np.isfinite(seconds).sum())
            shown = f"{reached} of {plural(len(own), 'run')}"
            cells = (Cell(task), Cell(one.label), Cell(shown, reached / len(own)), number_cell(float(np.median(seconds))))
            rows.append(Row(cells, view.run_ids(own)))
    caption = f"Training time until a normalised score of {view.settings.threshold:g}; ∞ where half of the runs never reach it"
    return Table(caption, ("task", "algorithm", "reached by", "median seconds"), tuple(rows))
