"""The sections of a report on how well algorithms do on a suite."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sb3_ano.bench.report.data import LENGTH, Chapter, title
from sb3_ano.bench.report.figures import Line, Style, draw_intervals, draw_lines, frame_of
from sb3_ano.bench.report.tables import Table
from sb3_ano.bench.report.variants import LEARNING_RATE, Block, blocks, on_task, select, variants
from sb3_ano.bench.statistics import (
    METRICS,
    Estimate,
    aggregate,
    estimate,
    interquartile_mean,
    mean,
    performance_profile,
    probability_of_improvement,
)

_PAPER = {
    "mujoco": "The paper, with 10 million steps and 5 seeds: ANO has the highest mean and IQM. From a learning rate of 3e-4 "
    "to 1e-3, PPO changes by -37.3 %, ANO by -7.1 %.",
    "atari": "The paper, with 5 seeds: mean 4.514 for ANO and 3.783 for SPO, IQM 0.706 and 0.721.",
}


@dataclass(frozen=True)
class Picture:
    """A figure of the report.

    :param name: name of its files
    :param caption: text below
    :param figure: the figure
    :param data: the numbers in it
    """

    name: str
    caption: str
    figure: Figure
    data: pd.DataFrame


@dataclass(frozen=True)
class Section:
    """A part of the report.

    :param title: heading
    :param text: paragraphs
    :param pictures: figures
    :param tables: tables
    :param notes: what was left out, and why
    """

    title: str
    text: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()


class View:
    """What is compared in a chapter.

    :param chapter: the runs
    """

    def __init__(self, chapter: Chapter) -> None:
        self.chapter = chapter
        self.everything = variants(chapter)
        self.chosen = select(chapter, self.everything)
        self.blocks, self.notes = blocks(chapter, self.chosen)
        self.style = Style(variant.algorithm for variant in self.everything)
        self.bootstrap = chapter.settings.bootstrap
        self.unit = chapter.unit
        longest = chapter.runs[LENGTH].max()
        self.steps_unit = 1e6 if longest >= 1e6 else 1e3
        self.steps_label = f"{'Million' if longest >= 1e6 else 'Thousand'} environment steps"

    def name(self, of: str) -> str:
        """Return the name of the files of a figure or table."""
        return "-".join("".join(letter if letter.isalnum() else " " for letter in f"{self.chapter.name} {of}".lower()).split())

    def lines(self, of: str, caption: str, panels: Mapping[str, Sequence[Line]], **options: Any) -> Picture:
        """Draw lines, see :func:`~sb3_ano.bench.report.figures.draw_lines`."""
        return Picture(self.name(of), caption, draw_lines(panels, self.style, **options), frame_of(panels))

    def row(self, block: Block, cells: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row of a table on the runs of a block."""
        return {"Algorithm": block.variant.label, "Seeds": len(block.seeds), **cells}


def aggregates(view: View) -> Section:
    """Compute IQM, mean, median and optimality gap (the paper's Figure 2), also for all other settings."""
    searched = [f"{variant.label} (best of {variant.alternatives})" for variant in view.chosen if variant.alternatives > 1]
    away = [variant.label for variant in view.chosen if LEARNING_RATE in variant.changed]
    text = ["Figures show each algorithm at the suite's learning rate."]
    if searched:
        text.append(f"Selected by IQM on the runs shown, as in the paper, which flatters: {', '.join(searched)}.")
    text += [f"Not run at the suite's learning rate, and shown at the lowest: {', '.join(away)}."] if away else []
    text += [said for name, said in _PAPER.items() if view.chapter.name.startswith(name)]
    if not view.blocks:
        return Section("Aggregate scores", text, notes=[*view.notes, "No algorithm has a seed with runs of all tasks."])
    found = {block.variant: aggregate(block.column(), view.bootstrap) for block in view.blocks}
    labels = {metric: view.unit + (", lower is better" if metric == "Optimality gap" else "") for metric in METRICS}
    panels = {
        metric: [(title(variant.algorithm), variant.algorithm, values[metric]) for variant, values in found.items()]
        for metric in METRICS
    }
    tables = [Table(view.name("aggregates"), "Aggregates", [view.row(block, found[block.variant]) for block in view.blocks])]
    caption = f"Aggregates of the {view.unit} over {view.blocks[0].rows.shape[1]} tasks, with 95 % intervals."
    picture = Picture(view.name("aggregates"), caption, draw_intervals(panels, view.style, labels), tables[0].data())
    notes = list(view.notes)
    if len(view.everything) > len(view.chosen):
        made, missing = blocks(view.chapter, view.everything)
        rows = [view.row(block, aggregate(block.column(), view.bootstrap)) for block in made]
        tables += [Table(view.name("all settings"), "All settings", rows)] if rows else []
        notes += [note for note in missing if note not in notes]
    return Section("Aggregate scores", text, (picture,), tables, notes)


def profiles(view: View) -> Section | None:
    """Compute the fraction of runs above each score."""
    if not view.blocks:
        return None
    scores = np.concatenate([block.column().ravel() for block in view.blocks])
    # A few Atari games in which the reference player is surpassed a hundredfold would take up most of the axis.
    highest = max(min(scores.max(), max(1.0, 4.0 * np.quantile(scores, 0.9))), 0.1)
    taus = np.linspace(min(0.0, scores.min()), highest, 101)
    panels = {"": [line_of(block, taus, performance_profile(block.column(), taus, view.bootstrap)) for block in view.blocks]}
    caption = "Performance profiles: the fraction of runs that score above τ, with pointwise 95 % intervals (Wilson)."
    labels = {"xlabel": f"{view.unit} τ", "ylabel": "Fraction of runs above τ"}
    return Section("Performance profiles", (), (view.lines("profiles", caption, panels, steps=True, **labels),))


def line_of(block: Block, x: np.ndarray, values: Estimate) -> Line:
    return Line(block.variant.algorithm, x, values)


def improvement(view: View) -> Section | None:
    """Compute the probability that one algorithm does better than another."""
    rows, bars = [], []
    for index, block in enumerate(view.blocks):
        for other in view.blocks[:index]:
            found = probability_of_improvement(block.column(), other.column(), view.bootstrap)
            names = title(block.variant.algorithm), title(other.variant.algorithm)
            bars.append((" > ".join(names), block.variant.algorithm, found))
            rows.append({"X": names[0], "Y": names[1], "P(X > Y)": found})
    if not rows:
        return None
    table = Table(view.name("improvement"), "Probability of improvement", rows)
    caption = (
        "Probability that a run of the first algorithm scores higher than a run of the second on the same task, averaged over "
        f"tasks, with 95 % intervals that are not corrected for the {len(rows)} comparisons."
    )
    figure = draw_intervals({"": bars}, view.style, {"": "Probability of improvement"}, mark=0.5)
    return Section(
        "Probability of improvement", (), (Picture(view.name("improvement"), caption, figure, table.data()),), (table,)
    )


def sample_efficiency(view: View) -> Section | None:
    """Compute the IQM during the training, and the area below it."""
    if not view.blocks:
        return None
    lines, rows = [], []
    for block in view.blocks:
        percents, scores = _common_curve(block)
        lines.append(line_of(block, percents, estimate(interquartile_mean, scores, bootstrap=view.bootstrap)))
        areas = block.column("area_score")
        found = {name: estimate(METRICS[name], areas, bootstrap=view.bootstrap) for name in ("IQM", "Mean")}
        rows.append(view.row(block, found))
    caption = "IQM during the training, from the first measurement of all tasks to the last, with pointwise 95 % intervals."
    labels = {"xlabel": "Training, % of the environment steps", "ylabel": f"IQM, {view.unit}"}
    table = Table(view.name("area"), "Area under the learning curve: mean score between first and last measurement", rows)
    return Section("Sample efficiency", (), (view.lines("efficiency", caption, {"": lines}, **labels),), (table,))


def _common_curve(block: Block) -> tuple[np.ndarray, np.ndarray]:
    """Percents of the training and scores ``(points, seeds, tasks)``, interpolated between measurements only."""
    curves = [block.chapter.curves[row] for row in block.rows.flat]
    lengths = block.column(LENGTH).ravel()
    places = [100 * curve["timesteps"].to_numpy(float) / length for curve, length in zip(curves, lengths, strict=True)]
    first, last = max(place[0] for place in places), min(place[-1] for place in places)
    finest = max(places, key=len)
    grid = finest[(finest >= first) & (finest <= last)] if first <= last else finest[:0]
    grid = grid if len(grid) else np.array([first])
    values = [np.interp(grid, place, curve["score"]) for place, curve in zip(places, curves, strict=True)]
    return grid, np.stack(values, axis=-1).reshape(len(grid), *block.rows.shape)


def tasks(view: View) -> Section:
    """Draw a learning curve per task, and list final returns."""
    chapter, rows = view.chapter, []
    panels: dict[str, list[Line]] = {}
    for task in chapter.tasks:
        for variant in view.chosen:
            own = on_task(chapter, variant, task)
            if not own:
                continue
            steps, returns = _returns([chapter.curves[row].set_index("timesteps")["value"] for row in own])
            band = estimate(mean, returns, bootstrap=view.bootstrap)
            panels.setdefault(task, []).append(Line(variant.algorithm, steps / view.steps_unit, band))
            final, score = (chapter.runs[[name]].to_numpy(float)[own] for name in ("final", "score"))
            row = {"Task": task, "Algorithm": variant.label, "Seeds": len(own)}
            row |= {
                "Return": estimate(mean, final, bootstrap=view.bootstrap),
                "SD": float(chapter.runs["final"].iloc[own].std()),
            }
            scored = np.isfinite(score).all()
            rows.append(row | {view.unit: estimate(mean, score, bootstrap=view.bootstrap) if scored else np.nan})
    source = {
        "evaluation": f"Final returns are means of the last evaluations ({chapter.settings.last}).",
        "training": "Returns are those of training episodes, averaged over the last 100.",
    }[chapter.settings.returns]
    caption = "Mean returns over seeds at the steps where they were measured, with pointwise 95 % intervals."
    labels = {"xlabel": view.steps_label, "ylabel": "Return"}
    table = Table(view.name("tasks"), "Final returns: mean over seeds with its 95 % interval, standard deviation (SD)", rows)
    return Section("Tasks", (source,), (view.lines("tasks", caption, panels, columns=3, **labels),), (table,), chapter.notes)


def _returns(curves: Sequence[pd.Series]) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and returns ``(points, seeds, 1)`` of runs of one task. Seeds of imported runs differ in their steps."""
    frame = pd.concat(curves, axis=1).sort_index()
    frame = frame.interpolate(method="index", limit_area="inside").dropna() if frame.isna().any(axis=None) else frame
    return frame.index.to_numpy(float), frame.to_numpy(float)[:, :, None]
