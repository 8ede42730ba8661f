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
from sb3_ano.bench.algorithms import CLASSES, Algorithm, title
from sb3_ano.bench.report.data import DIAGNOSTICS, LEARNING_RATE, LENGTH, Chapter, Variant
from sb3_ano.bench.report.figures import draw_intervals, draw_lines, points

_TEXTS = yaml.safe_load(Path(__file__).with_name("sections.yml").read_text(encoding="utf-8"))
#: Ends of the names of the columns of a value and of its interval.
ENDS = ("", " low", " high")
# With fewer seeds, an interval is wider than the differences that a figure shows, and every seed can be drawn.
_SEEDS_FOR_INTERVALS = 5
# Tasks that the figure of training dynamics has separate rows for.
_TASKS_WITH_DYNAMICS = 6
# Points of a curve of training dynamics.
_PARTS = 50
# Letters of a suite's or a setting's name in the names of files.
_LONGEST_NAME = 60
# Tasks that are listed for a value of a hyperparameter.
_LISTED_TASKS = 3


class Section:
    """Build one part of a report.

    :param chapter: chapter of the section
    :param kind: key of ``sections.yml``
    :param lines: points of the figure, see :mod:`sb3_ano.bench.report.figures`; none for a section without a figure
    :param rows: rows of the table, whose cells may be estimates; none for a section without a table
    :param wide: rows of the table in LaTeX, by default the same; they have a column per algorithm, as tables of papers do
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
        wide: Iterable[Mapping[Any, Any]] = (),
        of: str = "",
        text: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> None:
        texts = _filled(_TEXTS[kind], {"of": of, "unit": chapter.unit})
        self.title = texts["title"].strip()
        # Names of files: in letters that every file system has, and not too long for any.
        words = re.findall(r"[a-z0-9]+", f"{chapter.name[:_LONGEST_NAME]} {kind} {of[:_LONGEST_NAME]}".lower())
        self.name = "-".join(words)
        self.text, self.notes = [*filter(None, [texts.get("text")]), *text], list(notes)
        self.caption, self.table_caption = texts.get("figure"), texts.get("table")
        self.table = pd.DataFrame([_cells(row) for row in rows])
        wide_rows = [_cells(row) for row in wide]
        self.wide = pd.DataFrame(wide_rows) if wide_rows else self.table
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


def _wide(name: str, cells: Iterable[tuple[str, str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a table with a column per algorithm.

    :param name: title of the first column
    :param cells: first cell of the row, title of the column, and content of each cell
    """
    rows: dict[str, dict[str, Any]] = {}
    for row, column, content in cells:
        rows.setdefault(row, {name: row})[column] = content
    return list(rows.values())


def _seeds(
    variant: Variant, seeds: Iterable[int], x: Any, values: Iterable[np.ndarray], panel: str = "", line: str = ""
) -> Iterator[pd.DataFrame]:
    """Yield the points of each seed of a line, if there are too few seeds to draw an interval.

    :param variant: variant of the line
    :param seeds: seeds
    :param x: places of the points
    :param values: values of each seed
    :param panel: title of the panel
    :param line: text of the legend
    """
    pairs = list(zip(seeds, values, strict=True))
    if 1 < len(pairs) < _SEEDS_FOR_INTERVALS:
        for seed, part in pairs:
            yield points(variant.algorithm, x, statistics.Estimate.exact(np.asarray(part)), panel, line, int(seed))


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
    lines = []
    wide = []
    for (variant, cells), (name, metric) in itertools.product(
        zip(chapter.blocks, table, strict=True), statistics.METRICS.items()
    ):
        rows = chapter.blocks[variant]
        lines.append(points(variant.algorithm, 0, cells[name], name))
        lines += _seeds(variant, rows.index, 0, [metric(chapter.values(rows)[[i]]) for i in range(len(rows))], name)
        wide.append((name, title(variant.algorithm), cells[name]))
    yield Section(chapter, "aggregates", lines, table, wide=_wide("Score", wide), text=text, notes=chapter.notes)
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
    # Only runs of the same task are compared, which needs no reference scores.
    blocks, notes = chapter.complete(chapter.chosen, chapter.tasks)
    for other, variant in itertools.combinations(blocks, 2):
        returns, others = (chapter.values(blocks[key], "final") for key in (variant, other))
        probability = statistics.probability_of_improvement(returns, others)
        names = title(variant.algorithm), title(other.algorithm)
        lines.append(points(variant.algorithm, 0, probability, line=" > ".join(names)))
        table.append({"X": names[0], "Y": names[1], "Tasks": returns.shape[1], "P(X > Y)": probability})
    notes = [note for note in notes if note not in chapter.notes] if len(chapter.chosen) > 1 else []
    yield Section(chapter, "improvement", lines, table, notes=notes)


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
            x = curves.index.to_numpy()
            lines.append(points(variant.algorithm, x, band))
            of_seeds = [statistics.interquartile_mean(scores[:, [i]]) for i in range(len(rows))]
            lines += _seeds(variant, rows.index, x, of_seeds)
    yield Section(chapter, "efficiency", lines)


def _aligned_curves(chapter: Chapter, rows: Iterable[int], index: str, column: str) -> pd.DataFrame:
    """Return the curves of runs at the steps of all of them, interpolated between the measurements of each run only."""
    curves = [chapter.curves[row].set_index(index)[column] for row in rows]
    return pd.concat(curves, axis=1).sort_index().interpolate(method="index", limit_area="inside").dropna()


def tasks(chapter: Chapter) -> Iterator[Section]:
    """Draw a learning curve per task, and list final returns.

    :param chapter: chapter of the section
    """
    lines, table, wide = [], [], []
    for task, variant in itertools.product(chapter.tasks, chapter.chosen):
        rows = [row for row in variant.rows if chapter.runs["env_id"][row] == task]
        if not rows:
            continue
        curves = _aligned_curves(chapter, rows, "timesteps", "value")
        if len(curves):  # otherwise the seeds have no step in common
            band = statistics.estimate(statistics.mean, curves.to_numpy()[:, :, None], reps=chapter.settings.reps)
            x = curves.index.to_numpy()
            lines.append(points(variant.algorithm, x, band, task))
            lines += _seeds(variant, chapter.runs["seed"][rows], x, curves.to_numpy().T, task)

        finals = chapter.runs["final"][rows]
        cells = {"Return": chapter.estimate("Mean", rows, "final"), "SD": finals.std(), "Worst seed": finals.min()}
        score = {chapter.unit: chapter.estimate("Mean", rows)} if task in chapter.scored else {}
        speed = {"Steps per second": chapter.runs["steps_per_second"][rows].quantile()}
        table.append({"Task": task, **_row(variant, rows, cells | score | speed)})
        wide.append((task, title(variant.algorithm), cells["Return"]))
    yield Section(chapter, "tasks", lines, table, wide=_wide("Task", wide), notes=chapter.run_notes)


def sensitivity(chapter: Chapter) -> Iterator[Section]:
    """Compare scores at all values of each setting that was varied (the paper's Figure 3 for the learning rate).

    :param chapter: chapter of the section
    """
    names = {name for variant in chapter.variants for name, _ in variant.settings}
    for name in sorted(names, key=lambda name: (name != LEARNING_RATE, name)):
        groups = _families(chapter.variants, name)
        blocks, notes = chapter.complete(itertools.chain(*groups))
        lines, table, wide, pairs = [], [], [], []
        for group in filter(None, ([variant for variant in group if variant in blocks] for group in groups)):
            base = next((variant for variant in group if name not in variant.changed), group[0])
            for variant in group:
                cells = _changes(chapter, blocks[base], blocks[variant])
                line = variant.without(name).label
                value = variant.value(name) or 0.0  # a number, as in all families
                lines.append(points(variant.algorithm, value, cells["IQM"], line=line))
                of_seeds = [statistics.interquartile_mean(scores) for scores in chapter.values(blocks[variant])[:, None]]
                lines += _seeds(variant, blocks[variant].index, value, of_seeds, line=line)
                table.append(_row(variant, blocks[variant], cells))
                wide.append((value, line, cells["IQM"]))
            pairs += [(base, variant) for variant in group if variant is not base]
        if not lines:
            notes.append(f"No figure of {name}: its values are not numbers, or no task has runs at all of them.")
        ordered = [(f"{value:g}", line, score) for value, line, score in sorted(wide, key=lambda cell: cell[0])]
        yield Section(chapter, "sensitivity", lines, table, _wide(name, ordered), name, notes=notes)
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
    """Return IQM and mean, and their changes in percent relative to other runs, paired if the seeds are the same.

    Without an interval of the base that is above 0, there is no change in percent: its base may be any number.
    """
    cells = {}
    for name in ("IQM", "Mean"):
        cells[name] = chapter.estimate(name, rows)
        if base is rows:
            continue
        if chapter.estimate(name, base).low > 0.0:
            scores, paired = (chapter.values(base), chapter.values(rows)), base.index.equals(rows.index)
            change = statistics.relative_change(*scores, chapter.settings.reps, paired, statistics.METRICS[name])
        else:
            change = statistics.Estimate.exact(np.array(np.nan))
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

    Few tasks have a row of panels each, because their updates and entropies are not comparable. Many have medians together.

    :param chapter: chapter of the section
    """
    if not chapter.runs[list(DIAGNOSTICS)].notna().any(axis=None):
        return
    alike = {variant.without(LEARNING_RATE) for variant in chapter.chosen}
    rates: dict[float | None, list[Variant]] = {}
    for variant in chapter.variants:
        if variant.without(LEARNING_RATE) in alike:
            rates.setdefault(variant.value(LEARNING_RATE), []).append(variant)

    for rate, variants in rates.items():
        notes: list[str] = []
        runs: dict[tuple[str, Variant], list[int]] = {}
        if len(chapter.tasks) <= _TASKS_WITH_DYNAMICS:
            for task, variant in itertools.product(chapter.tasks, variants):
                runs[task, variant] = [row for row in variant.rows if chapter.runs["env_id"][row] == task]
        else:
            # Of tasks that only some of the algorithms have, the medians would compare tasks.
            blocks, notes = chapter.complete(variants, chapter.tasks)
            runs = {("", variant): rows.to_numpy().ravel().tolist() for variant, rows in blocks.items()}

        lines = []
        for (task, variant), (index, name) in itertools.product(runs, enumerate(DIAGNOSTICS)):
            x, medians = _median_curve(chapter, runs[task, variant], name)
            panel = f"{name}, {task}" if task else name
            line = points(variant.algorithm, x, statistics.Estimate.exact(medians), panel)
            lines.append((task, index, line))
        # Panels are in the order of their first points: a row per task, a column per diagnostic.
        lines.sort(key=lambda item: item[:2])
        of = "" if rate is None else f"at learning rate {rate:g}"
        yield Section(chapter, "dynamics", [line for *_, line in lines if len(line)], of=of, notes=notes)

    yield Section(chapter, "diagnostics", rows=_diagnostics(chapter))


def _median_curve(chapter: Chapter, rows: Sequence[int], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return percents of the training, and medians over runs of a diagnostic from the first update of all of them on.

    Runs have their updates at different steps if their rollouts differ in length. Each run is therefore carried forward: its
    value in a fiftieth of the training without an update is the last one. Otherwise the median would be that of the runs that
    happen to have an update there.
    """
    curves = []
    for row in rows:
        update = chapter.updates[row][["timesteps", name]].dropna()
        if update.empty:
            continue
        part = np.ceil(_PARTS * update["timesteps"] / chapter.runs[LENGTH][row]).clip(upper=_PARTS)
        means = update[name].groupby(part).mean()
        curves.append(means.reindex(range(1, _PARTS + 1)).ffill())
    if not curves:
        return np.zeros(0), np.zeros(0)
    together = pd.concat(curves, axis=1).dropna()
    return together.index.to_numpy() * 100.0 / _PARTS, together.median(axis=1).to_numpy()


def _diagnostics(chapter: Chapter) -> Iterator[dict[str, Any]]:
    """Yield a row per task and variant with medians over its runs."""
    for task, variant in itertools.product(chapter.tasks, chapter.variants):
        rows = [row for row in variant.rows if chapter.runs["env_id"][row] == task]
        if rows:
            medians = chapter.runs.loc[rows, list(DIAGNOSTICS)].median()
            yield {"Task": task, **_row(variant, rows, dict(zip(DIAGNOSTICS, medians, strict=True)))}


def matched_kl(chapter: Chapter) -> Iterator[Section]:
    """Plot the score against the measured KL divergence per update, which compares algorithms at equal step sizes.

    :param chapter: chapter of the section
    """
    blocks, _ = chapter.complete(chapter.variants)
    sizes = {variant: chapter.values(rows, "KL divergence").mean() for variant, rows in blocks.items()}
    scores = {variant: chapter.estimate("IQM", rows) for variant, rows in blocks.items() if 0 < sizes[variant] < np.inf}
    if len(scores) < 2:
        return
    lines = []
    for variant, score in scores.items():
        lines.append(points(variant.algorithm, sizes[variant], score, line=variant.label))
        of_seeds = [statistics.interquartile_mean(values) for values in chapter.values(blocks[variant])[:, None]]
        lines += _seeds(variant, blocks[variant].index, sizes[variant], of_seeds, line=variant.label)
    yield Section(chapter, "matched kl", lines)


def records(chapter: Chapter) -> Iterator[Section]:
    """List all hyperparameters and all runs.

    :param chapter: chapter of the section
    """
    names = sorted(set().union(*chapter.runs["hyperparameters"]))
    table = {"Hyperparameter": names}
    for variant in chapter.chosen:
        table[title(variant.algorithm)] = [_values_of_tasks(chapter, variant, name) for name in names]
    yield Section(chapter, "hyperparameters", rows=pd.DataFrame(table).to_dict("records"))
    columns = ["name", "env_id", "algorithm", "seed", "total_timesteps", "final", "score", "seconds", "finished", "commit"]
    yield Section(chapter, "runs", rows=chapter.runs.reindex(columns=columns).to_dict("records"))


def _values_of_tasks(chapter: Chapter, variant: Variant, name: str) -> str:
    """Return the value of a hyperparameter, or the values with their tasks: ``"0.98; 0.9 (Pendulum-v1)"``."""
    tasks: dict[str, list[str]] = {}
    for row in variant.rows:
        value = _hyperparameter(chapter.runs["hyperparameters"][row], variant.algorithm, name)
        names = tasks.setdefault(value, [])
        if chapter.runs["env_id"][row] not in names:
            names.append(chapter.runs["env_id"][row])
    if len(tasks) == 1:
        return next(iter(tasks))

    texts: list[str] = []
    for value, names in sorted(tasks.items(), key=lambda item: -len(item[1])):
        # The first value has the most tasks, which need not be listed if they are all of the others.
        is_rest = not texts and len(names) > _LISTED_TASKS
        texts.append(f"{value} (other tasks)" if is_rest else f"{value} ({', '.join(names)})")
    return "; ".join(texts)


def _hyperparameter(given: Mapping[str, Any], label: str, name: str) -> str:
    """Return the value that a run was given, the algorithm's default, or ``"-"`` if the algorithm lacks the hyperparameter."""
    if name in given:
        return str(given[name])
    algorithm = Algorithm(label.partition(":")[0])
    if algorithm.name not in CLASSES or name not in algorithm.hyperparameters:
        return "-"
    return f"{algorithm.default(name)} (default)"


_SECTIONS = (aggregates, profiles, improvement, efficiency, tasks, sensitivity, dynamics, matched_kl, records)
