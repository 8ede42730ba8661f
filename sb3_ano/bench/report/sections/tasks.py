"""How well algorithms do on each task."""

import numpy as np

from sb3_ano.bench.report.contenders import short_label
from sb3_ano.bench.report.content import Cell, Picture, Row, Section, Table, number, number_cell
from sb3_ano.bench.report.figures import Line, draw_lines
from sb3_ano.bench.report.view import SuiteView, slug
from sb3_ano.bench.statistics import Band

_UNITS = ((1e6, "million"), (1e3, "thousand"), (1.0, ""))


def tasks(view: SuiteView) -> Section:
    """A learning curve a task, and final returns as they are."""
    pictures = tuple(_learning_curves(view, task) for task in view.results.tasks)
    table = Table(
        "Mean return at the end of the training, over seeds; ± is the standard deviation between seeds",
        ("task", "algorithm", "seeds", "return", "±", "normalised", "area under the curve"),
        tuple(row for task in view.results.tasks for row in _rows(view, task)),
    )
    source = {
        "evaluation": "Returns are those of deterministic evaluation episodes",
        "training": "Returns are those of the episodes of the training; final ones, of its last tenth",
    }[view.settings.kind]
    text = f"{source}. Lines are means over seeds, bands reach from the lowest to the highest seed."
    empty = [f"Without any episode, and so in nothing of this: {', '.join(view.results.empty)}."] if view.results.empty else []
    return Section("Tasks", (text,), pictures, (table,), tuple(empty))


def _learning_curves(view: SuiteView, task: str) -> Picture:
    lines, rows, spoken = [], [], []
    for one in view.chosen:
        own = view.on_task(one, task)
        if not own:
            continue
        curves = view.results.returns[own]
        several = len(own) > 1
        ends = (curves.min(axis=0), curves.max(axis=0)) if several else (np.full(curves.shape[1], np.nan),) * 2
        length = int(view.results.runs["total_timesteps"].iloc[own[0]])
        band, name = Band(curves.mean(axis=0), *ends), short_label(one.algorithm)
        lines.append(Line(name, one.algorithm, view.results.fractions * length, band))
        rows += own
        spoken.append(f"{name} {number(float(curves[:, -1].mean()))}")
    longest = max((line.x[-1] for line in lines), default=1.0)
    unit, word = next(pair for pair in _UNITS if longest >= pair[0] or pair[0] == 1.0)
    scaled = [Line(line.label, line.algorithm, line.x / unit, line.band) for line in lines]
    drawn = draw_lines(scaled, view.style, xlabel=f"{word} steps".strip(), ylabel="return", title=task, small=True)
    alt = f"Learning curves on {task}. Mean return at the end: {', '.join(spoken)}."
    return view.picture(f"task-{slug(task)}", drawn, "", alt, view.run_ids(rows), small=True)


def _rows(view: SuiteView, task: str) -> list[Row]:
    runs, rows = view.results.runs, []
    for one in view.chosen:
        own = view.on_task(one, task)
        if not own:
            continue
        final, score, area = (runs[column].to_numpy()[own] for column in ("final", "score", "area"))
        spread = float(final.std(ddof=1)) if len(own) > 1 else np.nan
        cells = (
            Cell(task),
            Cell(one.label),
            Cell(str(len(own)), len(own)),
            *(number_cell(float(value)) for value in (final.mean(), spread, score.mean(), area.mean())),
        )
        rows.append(Row(cells, view.run_ids(own)))
    return rows
