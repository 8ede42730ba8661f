"""The sections of a report: each has at most one figure and one table, and the texts of ``sections.yml``."""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from sb3_ano.bench import statistics
from sb3_ano.bench.report import tables
from sb3_ano.bench.report.data import DIAGNOSTICS, LENGTH, Chapter
from sb3_ano.bench.report.figures import draw_intervals, draw_lines, points
from sb3_ano.bench.report.variants import LEARNING_RATE, Variant, families, title

_TEXTS = yaml.safe_load(Path(__file__).with_name("sections.yml").read_text(encoding="utf-8"))


class Section:
    """A part of a report.

    :param chapter: chapter of the section
    :param kind: key of ``sections.yml``
    :param lines: points of the figure, see :mod:`sb3_ano.bench.report.figures`; none for a section without a figure
    :param rows: rows of the table, whose cells may be estimates; none for a section without a table
    :param of: what of several things of its kind the section is about, such as the name of a setting
    :param text: paragraphs
    :param notes: what was left out, and why
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
        names = {"of": of, "unit": chapter.unit, "steps": f"{chapter.steps_unit[1]} environment steps"}
        texts = _filled(_TEXTS[kind], names)
        self.title = texts["title"].strip()
        self.name = "-".join(re.findall(r"[^\W_]+", f"{chapter.name} {kind} {of}".lower()))
        self.text, self.notes = [*filter(None, [texts.get("text")]), *text], list(notes)
        self.caption, self.table_caption = texts.get("figure"), texts.get("table")
        self.table = tables.frame(rows)
        self.data = pd.concat([pd.DataFrame(), *lines])
        self.figure = None
        if not self.data.empty:
            draw = draw_lines if "lines" in texts else draw_intervals
            self.figure = draw(self.data, chapter.looks, **texts["lines" if "lines" in texts else "intervals"])


def _filled(part: Any, names: Mapping[str, str]) -> Any:
    if isinstance(part, dict):
        return {key: _filled(value, names) for key, value in part.items()}
    return part.format(**names) if isinstance(part, str) else part


def make_sections(chapter: Chapter) -> list[Section]:
    """Return the sections of a chapter, without those that have nothing to show."""
    sections = [section for make in _SECTIONS for section in make(chapter)]
    return [section for section in sections if section.figure or section.notes or not section.table.empty]


def _row(variant: Variant, rows: Sized, cells: Mapping[str, Any]) -> dict[str, Any]:
    return {"Algorithm": variant.label, "Seeds": len(rows), **cells}


def aggregates(chapter: Chapter) -> Iterator[Section]:
    """Compute IQM, mean, median and optimality gap (the paper's Figure 2), also for all other settings."""
    searched = [f"{variant.label} (best of {among})" for variant, among in chapter.chosen.items() if among > 1]
    away = [variant.label for variant in chapter.chosen if LEARNING_RATE in variant.changed]
    text = ["Figures show each algorithm at the suite's learning rate."]
    if searched:
        text.append(f"Selected by IQM on the runs shown, as in the paper, which flatters: {', '.join(searched)}.")
    text += [f"Not run at the suite's learning rate, and shown at the lowest: {', '.join(away)}."] if away else []
    text += [said for name, said in _TEXTS["paper"].items() if chapter.name.startswith(name)]
    empty = [] if chapter.blocks else ["No algorithm has a seed with runs of all tasks."]
    found = {
        variant: statistics.aggregate(chapter.values(rows), chapter.bootstrap) for variant, rows in chapter.blocks.items()
    }
    lines = [points(variant.algorithm, 0, part, name) for variant, parts in found.items() for name, part in parts.items()]
    table = [_row(variant, chapter.blocks[variant], parts) for variant, parts in found.items()]
    yield Section(chapter, "aggregates", lines, table, text=text, notes=chapter.notes + empty)
    if len(chapter.variants) > len(chapter.chosen):
        blocks, notes = chapter.complete(chapter.variants)
        table = [_row(*block, statistics.aggregate(chapter.values(block[1]), chapter.bootstrap)) for block in blocks.items()]
        yield Section(chapter, "all settings", rows=table, notes=[note for note in notes if note not in chapter.notes])


def profiles(chapter: Chapter) -> Iterator[Section]:
    """Compute the fraction of runs above each score."""
    scores = {variant: chapter.values(rows) for variant, rows in chapter.blocks.items()}
    if not scores:
        return
    together = np.concatenate([own.ravel() for own in scores.values()])
    # A few Atari games in which the reference player is surpassed a hundredfold would take up most of the axis.
    highest = max(min(together.max(), max(1.0, 4.0 * np.quantile(together, 0.9))), 0.1)
    taus = np.linspace(min(0.0, together.min()), highest, 101)
    fractions = {variant: statistics.performance_profile(own, taus, chapter.bootstrap) for variant, own in scores.items()}
    yield Section(chapter, "profiles", [points(variant.algorithm, taus, part) for variant, part in fractions.items()])


def improvement(chapter: Chapter) -> Iterator[Section]:
    """Compute the probability that one algorithm does better than another."""
    lines, table = [], []
    for other, variant in itertools.combinations(chapter.blocks, 2):
        scores, others = (chapter.values(chapter.blocks[which]) for which in (variant, other))
        found = statistics.probability_of_improvement(scores, others, chapter.bootstrap)
        names = title(variant.algorithm), title(other.algorithm)
        lines.append(points(variant.algorithm, 0, found, line=" > ".join(names)))
        table.append({"X": names[0], "Y": names[1], "P(X > Y)": found})
    if table:
        yield Section(chapter, "improvement", lines, table)


def efficiency(chapter: Chapter) -> Iterator[Section]:
    """Compute the IQM during the training, and the area below it."""
    lines, table = [], []
    for variant, rows in chapter.blocks.items():
        percents, scores = _common_curve(chapter, rows)
        lines.append(
            points(
                variant.algorithm,
                percents,
                statistics.estimate(statistics.interquartile_mean, scores, bootstrap=chapter.bootstrap),
            )
        )
        table.append(_row(variant, rows, {name: chapter.estimate(name, rows, "area_score") for name in ("IQM", "Mean")}))
    if table:
        yield Section(chapter, "efficiency", lines, table)


def _common_curve(chapter: Chapter, rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Percents of the training and scores ``(points, seeds, tasks)``, interpolated between measurements only."""
    curves = [chapter.curves[index] for index in rows.to_numpy().flat]
    lengths = chapter.values(rows, LENGTH).ravel()
    places = [100 * curve["timesteps"].to_numpy(float) / length for curve, length in zip(curves, lengths, strict=True)]
    first, last = max(place[0] for place in places), min(place[-1] for place in places)
    finest = max(places, key=len)
    grid = finest[(finest >= first) & (finest <= last)]
    grid = grid if len(grid) else np.array([first])
    values = [np.interp(grid, place, curve["score"]) for place, curve in zip(places, curves, strict=True)]
    return grid, np.stack(values, axis=-1).reshape(len(grid), *rows.shape)


def tasks(chapter: Chapter) -> Iterator[Section]:
    """Draw a learning curve per task, and list final returns."""
    lines, table = [], []
    for task, variant in itertools.product(chapter.tasks, chapter.chosen):
        own = [index for index in variant.rows if chapter.runs["env_id"][index] == task]
        if not own:
            continue
        # Seeds of imported runs differ in their steps.
        curves = pd.concat([chapter.curves[index].set_index("timesteps")["value"] for index in own], axis=1).sort_index()
        curves = curves.interpolate(method="index", limit_area="inside").dropna()
        band = statistics.estimate(statistics.mean, curves.to_numpy()[:, :, None], bootstrap=chapter.bootstrap)
        lines.append(points(variant.algorithm, curves.index.to_numpy() / chapter.steps_unit[0], band, task))
        cells = {"Return": chapter.estimate("Mean", own, "final"), "SD": chapter.runs["final"][own].std()}
        score = {chapter.unit: chapter.estimate("Mean", own)} if task in chapter.scored else {}
        table.append({"Task": task, **_row(variant, own, cells | score)})
    text = _TEXTS["returns"][chapter.settings.returns].format(last=chapter.settings.last)
    yield Section(chapter, "tasks", lines, table, text=[text], notes=chapter.run_notes)


def sensitivity(chapter: Chapter) -> Iterator[Section]:
    """Compare scores at all values of each setting that was varied (the paper's Figure 3 for the learning rate)."""
    names = {name for variant in chapter.variants for name, _ in variant.settings}
    for name in sorted(names, key=lambda name: (name != LEARNING_RATE, name)):
        groups = families(chapter.variants, name)
        blocks, notes = chapter.complete([variant for group in groups for variant in group])
        lines, table, pairs = [], [], []
        for group in filter(None, ([variant for variant in group if variant in blocks] for group in groups)):
            base = next((variant for variant in group if name not in variant.changed), group[0])
            for variant in group:
                line = " ".join([title(variant.algorithm), *(f"{key}={value}" for key, value in variant.without(name)[1])])
                found = chapter.estimate("IQM", blocks[variant])
                lines.append(points(variant.algorithm, variant.value(name), found, line=line))
                table.append(_row(variant, blocks[variant], _changes(chapter, blocks[base], blocks[variant])))
            pairs += [(base, variant) for variant in group if variant is not base]
        if not lines:
            notes.append(f"No figure of {name}: its values are not numbers, or no task has runs at all of them.")
        trpo = name == LEARNING_RATE and any(variant.algorithm.startswith("trpo") for variant in blocks)
        text = ["The learning rate of TRPO is that of its critic alone."] if trpo else []
        yield Section(chapter, "sensitivity", lines, table, name, text, notes)
        if name == LEARNING_RATE and (table := _interactions(chapter, blocks, pairs)):
            yield Section(chapter, "interactions", rows=table)


def _changes(chapter: Chapter, base: pd.DataFrame, rows: pd.DataFrame) -> dict[str, statistics.Estimate]:
    """IQM and mean, and their changes in percent relative to other runs, paired if the seeds are the same."""
    cells = {}
    paired = base.index.equals(rows.index)
    for name in ("IQM", "Mean"):
        cells[name] = chapter.estimate(name, rows)
        if base is not rows:
            scores = chapter.values(base), chapter.values(rows)
            change = statistics.relative_change(*scores, chapter.bootstrap, paired=paired, metric=statistics.METRICS[name])
            cells[f"{name}, change in %"] = statistics.Estimate(*(100.0 * part for part in change))
    return cells


def _interactions(
    chapter: Chapter, blocks: Mapping[Variant, pd.DataFrame], pairs: Sequence[tuple[Variant, Variant]]
) -> list[dict[str, Any]]:
    table = []
    for changes in itertools.combinations(pairs, 2):
        (rates, other_rates) = ([f"{variant.value(LEARNING_RATE):g}" for variant in change] for change in changes)
        if changes[0][0].algorithm == changes[1][0].algorithm or rates != other_rates:
            continue
        scores = [[chapter.values(blocks[variant]) for variant in change] for change in changes]
        paired = len({tuple(blocks[variant].index) for change in changes for variant in change}) == 1
        names = {"X": changes[0][1].label, "Y": changes[1][1].label, "From": rates[0], "To": rates[1]}
        table.append(
            {**names, "Change of X - change of Y": statistics.interaction(scores[0], scores[1], chapter.bootstrap, paired)}
        )
    return table


def dynamics(chapter: Chapter) -> Iterator[Section]:
    """Draw KL divergence, ratios and entropy during the training, at every learning rate."""
    if not chapter.runs[list(DIAGNOSTICS)].notna().any(axis=None):
        return
    alike = {variant.without(LEARNING_RATE) for variant in chapter.chosen}
    lines: dict[float | None, list[pd.DataFrame]] = {}
    for variant, name in itertools.product(chapter.variants, DIAGNOSTICS):
        if variant.without(LEARNING_RATE) in alike:
            curve = _median_curve([chapter.updates[index] for index in variant.rows], name)
            band = statistics.Estimate.exact(curve[name].to_numpy())
            own = points(variant.algorithm, curve["timesteps"] / chapter.steps_unit[0], band, name)
            lines.setdefault(variant.value(LEARNING_RATE), []).append(own)
    for rate, parts in lines.items():
        yield Section(chapter, "dynamics", parts, of="" if rate is None else f"at learning rate {rate:g}")
    table = []
    for variant in chapter.variants:
        means = chapter.runs.loc[list(variant.rows), list(DIAGNOSTICS)].median()
        table.append({"Algorithm": variant.label, **means})
    yield Section(chapter, "diagnostics", rows=table)


def _median_curve(updates: Sequence[pd.DataFrame], name: str) -> pd.DataFrame:
    """Medians over runs in fiftieths of the training."""
    frame = pd.concat(updates, keys=range(len(updates)), names=["run"])[["timesteps", name]].dropna()
    fiftieth = np.ceil(50 * frame["timesteps"] / frame["timesteps"].max()).rename("fiftieth")
    return frame.groupby([fiftieth, "run"]).mean().groupby("fiftieth").median()


def matched_kl(chapter: Chapter) -> Iterator[Section]:
    """Plot the score against the measured KL divergence per update, which compares algorithms at equal step sizes."""
    blocks, _ = chapter.complete(chapter.variants)
    sizes = {variant: chapter.values(rows, "KL divergence").mean() for variant, rows in blocks.items()}
    order = list(chapter.looks)
    ordered = sorted(blocks, key=lambda variant: (order.index(variant.algorithm), sizes[variant]))
    lines = [points(each.algorithm, sizes[each], chapter.estimate("IQM", blocks[each])) for each in ordered if sizes[each] > 0]
    if len(lines) > 1:
        yield Section(chapter, "matched kl", lines)


def speed(chapter: Chapter) -> Iterator[Section]:
    """List steps per second, and the time to a score."""
    table = []
    for variant in chapter.chosen:
        runs = chapter.runs.loc[list(variant.rows)]
        low, middle, high = runs["steps_per_second"].quantile([0.0, 0.5, 1.0])
        cells = {"Algorithm": variant.label, "Steps per second": middle, "Slowest": low, "Fastest": high}
        for task, seconds in runs[runs["env_id"].isin(chapter.scored)].groupby("env_id")["seconds_to_threshold"]:
            cells[f"Seconds to {chapter.settings.threshold:g} on {task}"] = seconds.median()
        table.append(cells)
    yield Section(chapter, "speed", rows=table)


def records(chapter: Chapter) -> Iterator[Section]:
    """List all hyperparameters and all runs."""
    given, table = chapter.runs["hyperparameters"], []
    for name in sorted(set().union(*given)):
        cells = {"Hyperparameter": name}
        for variant in chapter.chosen:
            values = [given[index].get(name, "default") for index in variant.rows]
            texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
            cells[title(variant.algorithm)] = ", ".join(dict.fromkeys(texts))
        table.append(cells)
    yield Section(chapter, "hyperparameters", rows=table)
    columns = ["name", "env_id", "algorithm", "seed", LENGTH, "final", "score", "area_score", "seconds", "finished", "commit"]
    yield Section(chapter, "runs", rows=chapter.runs.reindex(columns=columns).to_dict("records"))


_SECTIONS = (
    *(aggregates, profiles, improvement, efficiency, tasks),
    *(sensitivity, dynamics, matched_kl, speed, records),
)
