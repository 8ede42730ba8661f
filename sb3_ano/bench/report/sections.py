"""The sections of a report: each has at most one figure and one table, and the texts of ``sections.yml``."""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from sb3_ano.bench import statistics
from sb3_ano.bench.algorithms import title
from sb3_ano.bench.report.data import DIAGNOSTICS, LEARNING_RATE, Chapter, Variant
from sb3_ano.bench.report.figures import draw_intervals, draw_lines, points

_TEXTS = yaml.safe_load(Path(__file__).with_name("sections.yml").read_text(encoding="utf-8"))
#: Ends of the names of the columns of a value and of its interval.
ENDS = ("", " low", " high")


class Section:
    """Build one part of a report.

    :param chapter: chapter of the section
    :param kind: key of ``sections.yml``
    :param lines: points of the figure, see :mod:`sb3_ano.bench.report.figures`; none for a section without a figure
    :param rows: rows of the table, whose cells may be estimates; none for a section without a table
    :param of: name of the setting or other thing that distinguishes sections of one kind
    :param text: paragraphs
    :param notes: notes on what was left out, and why
    """

    def __init__(
        self,
        chapter: Chapter,
        kind: str,
        lines: Iterable[pd.DataFrame] = (),
        rows: Iterable[Mapping[Any, Any]] = (),
        of: str = "",
        text: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> None:
        texts = _filled(_TEXTS[kind], {"of": of, "unit": chapter.unit})
        self.title = texts["title"].strip()
        self.name = "-".join(re.findall(r"[^\W_]+", f"{chapter.name} {kind} {of}".lower()))
        self.text, self.notes = [*filter(None, [texts.get("text")]), *text], list(notes)
        self.caption, self.table_caption = texts.get("figure"), texts.get("table")
        self.table = pd.DataFrame([_cells(row) for row in rows])
        self.data = pd.concat([pd.DataFrame(), *lines])
        self.figure = None
        for key, draw in (("lines", draw_lines), ("intervals", draw_intervals)):
            if key in texts and not self.data.empty:
                self.figure = draw(self.data, chapter.looks, **texts[key])


def _filled(part: Any, names: Mapping[str, str]) -> Any:
    if isinstance(part, dict):
        return {key: _filled(value, names) for key, value in part.items()}
    return part.format(**names) if isinstance(part, str) else part


def _cells(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the cells of a row, with three columns for each estimate."""
    cells: dict[str, Any] = {}
    for name, cell in row.items():
        parts = map(float, cell) if isinstance(cell, statistics.Estimate) else (cell,)
        cells |= {f"{name}{end}": part for end, part in zip(ENDS, parts, strict=False)}
    return cells


def make_sections(chapter: Chapter) -> list[Section]:
    """Return the sections of a chapter, without those that have nothing to show.

    :param chapter: chapter to write
    """
    sections = [section for make in _SECTIONS for section in make(chapter)]
    return [section for section in sections if section.figure or section.notes or not section.table.empty]


def _row(variant: Variant, rows: Sized, cells: Mapping[str, Any]) -> dict[str, Any]:
    return {"Algorithm": variant.label, "Seeds": len(rows), **cells}


def aggregates(chapter: Chapter) -> Iterator[Section]:
    """Compute IQM and mean (as the paper's Figure 2), median and optimality gap, also for all other settings.

    :param chapter: chapter of the section
    """
    searched = [f"{variant.label} (best of {among})" for variant, among in chapter.chosen.items() if among > 1]
    away = [variant.label for variant in chapter.chosen if LEARNING_RATE in variant.changed]
    text = ["Figures show each algorithm at the suite's learning rate."]
    if searched:
        text.append(f"Selected by IQM on the runs shown, which flatters: {', '.join(searched)}.")
    text += [f"Not run at the suite's learning rate, and shown at the lowest: {', '.join(away)}."] if away else []
    table = _aggregate_rows(chapter, chapter.blocks)
    metrics = itertools.product(zip(chapter.blocks, table, strict=True), statistics.METRICS)
    lines = [points(variant.algorithm, 0, cells[name], name) for (variant, cells), name in metrics]
    yield Section(chapter, "aggregates", lines, table, text=text, notes=chapter.notes)
    if len(chapter.variants) > len(chapter.chosen):
        blocks, notes = chapter.complete(chapter.variants)
        notes = [note for note in notes if note not in chapter.notes]
        yield Section(chapter, "all settings", rows=_aggregate_rows(chapter, blocks), notes=notes)


def _aggregate_rows(chapter: Chapter, blocks: Mapping[Variant, pd.DataFrame]) -> list[dict[str, Any]]:
    scores = {variant: chapter.values(rows) for variant, rows in blocks.items()}
    return [_row(variant, blocks[variant], statistics.aggregate(scores[variant], chapter.settings.reps)) for variant in scores]


def profiles(chapter: Chapter) -> Iterator[Section]:
    """Compute the fraction of runs above each score.

    :param chapter: chapter of the section
    """
    scores = {variant: chapter.values(rows) for variant, rows in chapter.blocks.items()}
    if not scores:
        return
    together = np.concatenate([values.ravel() for values in scores.values()])
    # A few Atari games in which the reference player is surpassed a hundredfold would take up most of the axis.
    highest = max(min(together.max(), max(1.0, 4.0 * np.quantile(together, 0.9))), 0.1)
    taus = np.linspace(min(0.0, together.min()), highest, 101)
    fractions = {variant: statistics.performance_profile(values, taus) for variant, values in scores.items()}
    yield Section(chapter, "profiles", [points(variant.algorithm, taus, part) for variant, part in fractions.items()])


def improvement(chapter: Chapter) -> Iterator[Section]:
    """Compute the probability that one algorithm does better than another.

    :param chapter: chapter of the section
    """
    lines, table = [], []
    for other, variant in itertools.combinations(chapter.blocks, 2):
        scores, others = (chapter.values(chapter.blocks[key]) for key in (variant, other))
        probability = statistics.probability_of_improvement(scores, others)
        names = title(variant.algorithm), title(other.algorithm)
        lines.append(points(variant.algorithm, 0, probability, line=" > ".join(names)))
        table.append({"X": names[0], "Y": names[1], "P(X > Y)": probability})
    yield Section(chapter, "improvement", lines, table)


def efficiency(chapter: Chapter) -> Iterator[Section]:
    """Compute the IQM during the training.

    :param chapter: chapter of the section
    """
    lines = []
    for variant, rows in chapter.blocks.items():
        curves = _aligned_curves(chapter, rows.to_numpy().flat, "percent", "score")
        if len(curves):  # otherwise the tasks have no step in common
            scores = curves.to_numpy().reshape(len(curves), *rows.shape)
            band = statistics.estimate(statistics.interquartile_mean, scores, reps=chapter.settings.reps)
            lines.append(points(variant.algorithm, curves.index.to_numpy(), band))
    yield Section(chapter, "efficiency", lines)


def _aligned_curves(chapter: Chapter, rows: Iterable[int], index: str, column: str) -> pd.DataFrame:
    """Return the curves of runs at the steps of all of them, interpolated between the measurements of each run only."""
    curves = [chapter.curves[row].set_index(index)[column] for row in rows]
    return pd.concat(curves, axis=1).sort_index().interpolate(method="index", limit_area="inside").dropna()


def tasks(chapter: Chapter) -> Iterator[Section]:
    """Draw a learning curve per task, and list final returns.

    :param chapter: chapter of the section
    """
    lines, table = [], []
    for task, variant in itertools.product(chapter.tasks, chapter.chosen):
        rows = [row for row in variant.rows if chapter.runs["env_id"][row] == task]
        if not rows:
            continue
        curves = _aligned_curves(chapter, rows, "timesteps", "value")
        band = statistics.estimate(statistics.mean, curves.to_numpy()[:, :, None], reps=chapter.settings.reps)
        lines.append(points(variant.algorithm, curves.index.to_numpy(), band, task))
        cells = {"Return": chapter.estimate("Mean", rows, "final"), "SD": chapter.runs["final"][rows].std()}
        score = {chapter.unit: chapter.estimate("Mean", rows)} if task in chapter.scored else {}
        speed = {"Steps per second": chapter.runs["steps_per_second"][rows].quantile()}
        table.append({"Task": task, **_row(variant, rows, cells | score | speed)})
    yield Section(chapter, "tasks", lines, table, notes=chapter.run_notes)


def sensitivity(chapter: Chapter) -> Iterator[Section]:
    """Compare scores at all values of each setting that was varied (the paper's Figure 3 for the learning rate).

    :param chapter: chapter of the section
    """
    names = {name for variant in chapter.variants for name, _ in variant.settings}
    for name in sorted(names, key=lambda name: (name != LEARNING_RATE, name)):
        groups = _families(chapter.variants, name)
        blocks, notes = chapter.complete(itertools.chain(*groups))
        lines, table, pairs = [], [], []
        for group in filter(None, ([variant for variant in group if variant in blocks] for group in groups)):
            base = next((variant for variant in group if name not in variant.changed), group[0])
            for variant in group:
                cells = _changes(chapter, blocks[base], blocks[variant])
                lines.append(points(variant.algorithm, variant.value(name), cells["IQM"], line=variant.without(name).label))
                table.append(_row(variant, blocks[variant], cells))
            pairs += [(base, variant) for variant in group if variant is not base]
        if not lines:
            notes.append(f"No figure of {name}: its values are not numbers, or no task has runs at all of them.")
        yield Section(chapter, "sensitivity", lines, table, name, notes=notes)
        if name == LEARNING_RATE:
            yield Section(chapter, "interactions", rows=_interactions(chapter, blocks, pairs))


def _families(variants: Sequence[Variant], name: str) -> list[list[Variant]]:
    """Return the groups of variants that differ in one setting only, each in the order of its values."""
    groups: dict[Any, list[Variant]] = {}
    for variant in variants:
        if variant.value(name) is not None:
            groups.setdefault(variant.without(name), []).append(variant)
    return [group for group in groups.values() if len(group) > 1]


def _changes(chapter: Chapter, base: pd.DataFrame, rows: pd.DataFrame) -> dict[str, statistics.Estimate]:
    """Return IQM and mean, and their changes in percent relative to other runs, paired if the seeds are the same."""
    cells = {}
    for name in ("IQM", "Mean"):
        cells[name] = chapter.estimate(name, rows)
        if base is not rows:
            scores, paired = (chapter.values(base), chapter.values(rows)), base.index.equals(rows.index)
            change = statistics.relative_change(*scores, chapter.settings.reps, paired, statistics.METRICS[name])
            cells[f"{name}, change in %"] = statistics.Estimate(*(100.0 * part for part in change))
    return cells


def _interactions(
    chapter: Chapter, blocks: Mapping[Variant, pd.DataFrame], pairs: Sequence[tuple[Variant, Variant]]
) -> Iterator[dict[str, Any]]:
    """Yield a row per pair of algorithms, and change of the learning rate that both have runs of."""
    for first, second in itertools.combinations(pairs, 2):
        rates, others = ([variant.value(LEARNING_RATE) for variant in pair] for pair in (first, second))
        if first[0].algorithm != second[0].algorithm and rates == others:
            change, other = ([chapter.values(blocks[variant]) for variant in pair] for pair in (first, second))
            paired = len({tuple(blocks[variant].index) for variant in first + second}) == 1
            difference = statistics.interaction(change, other, chapter.settings.reps, paired)
            yield {"X": first[1].label, "Y": second[1].label, "From": f"{rates[0]:g}", "Change of X - change of Y": difference}


def dynamics(chapter: Chapter) -> Iterator[Section]:
    """Draw KL divergence, ratios and entropy during the training, at every learning rate.

    :param chapter: chapter of the section
    """
    if not chapter.runs[list(DIAGNOSTICS)].notna().any(axis=None):
        return
    alike = {variant.without(LEARNING_RATE) for variant in chapter.chosen}
    lines: dict[float | None, list[pd.DataFrame]] = {}
    for variant, name in itertools.product(chapter.variants, DIAGNOSTICS):
        if variant.without(LEARNING_RATE) in alike:
            curve = _median_curve([chapter.updates[row] for row in variant.rows], name)
            band = statistics.Estimate.exact(curve[name].to_numpy())
            line = points(variant.algorithm, curve["timesteps"], band, name)
            lines.setdefault(variant.value(LEARNING_RATE), []).append(line)
    for rate, parts in lines.items():
        yield Section(chapter, "dynamics", parts, of="" if rate is None else f"at learning rate {rate:g}")
    medians = {variant: chapter.runs.loc[list(variant.rows), list(DIAGNOSTICS)].median() for variant in chapter.variants}
    yield Section(chapter, "diagnostics", rows=[{"Algorithm": variant.label, **medians[variant]} for variant in medians])


def _median_curve(updates: Sequence[pd.DataFrame], name: str) -> pd.DataFrame:
    """Return medians over runs in fiftieths of the training."""
    frame = pd.concat(updates, keys=range(len(updates)), names=["run"])[["timesteps", name]].dropna()
    fiftieth = np.ceil(50 * frame["timesteps"] / frame["timesteps"].max()).rename("fiftieth")
    return frame.groupby([fiftieth, "run"]).mean().groupby("fiftieth").median()


def matched_kl(chapter: Chapter) -> Iterator[Section]:
    """Plot the score against the measured KL divergence per update, which compares algorithms at equal step sizes.

    :param chapter: chapter of the section
    """
    blocks, _ = chapter.complete(chapter.variants)
    sizes = {variant: chapter.values(rows, "KL divergence").mean() for variant, rows in blocks.items()}
    scores = {variant: chapter.estimate("IQM", rows) for variant, rows in blocks.items() if sizes[variant] > 0}
    if len(scores) > 1:
        yield Section(chapter, "matched kl", [points(key.algorithm, sizes[key], score) for key, score in scores.items()])


def records(chapter: Chapter) -> Iterator[Section]:
    """List all hyperparameters and all runs.

    :param chapter: chapter of the section
    """
    given = chapter.runs["hyperparameters"]
    names = sorted(set().union(*given))
    table = {"Hyperparameter": names}
    for variant in chapter.chosen:
        texts = [dict.fromkeys(str(given[row].get(name, "default")) for row in variant.rows) for name in names]
        table[title(variant.algorithm)] = [", ".join(values) for values in texts]
    yield Section(chapter, "hyperparameters", rows=pd.DataFrame(table).to_dict("records"))
    columns = ["name", "env_id", "algorithm", "seed", "total_timesteps", "final", "score", "seconds", "finished", "commit"]
    yield Section(chapter, "runs", rows=chapter.runs.reindex(columns=columns).to_dict("records"))


_SECTIONS = (aggregates, profiles, improvement, efficiency, tasks, sensitivity, dynamics, matched_kl, records)
