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
from sb3_ano.bench.report.data import DIAGNOSTICS, LEARNING_RATE, Chapter, Variant
from sb3_ano.bench.report.figures import draw_intervals, draw_lines, points
from sb3_ano.bench.statistics import Estimate, interquartile_mean

_TEXTS = yaml.safe_load(Path(__file__).with_name("sections.yml").read_text(encoding="utf-8"))
#: Ends of the names of the columns of a value and of its interval.
ENDS = ("", " low", " high")
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
    :param of: name of the setting or other thing that distinguishes sections of one kind
    :param text: paragraphs
    :param notes: notes on what was left out, and why
    """

    def __init__(
        self,
        chapter: Chapter,
        kind: str,
        lines: Sequence[pd.DataFrame] = (),
        rows: Iterable[Mapping[Any, Any]] = (),
        of: str = "",
        text: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> None:
        # Texts name the setting and the unit.
        texts = _filled(_TEXTS[kind], {"of": of, "unit": chapter.unit})
        self.title = texts["title"].strip()
        # Names of files: in letters that every file system has, and not too long for any.
        words = re.findall(r"[a-z0-9]+", f"{chapter.name[:_LONGEST_NAME]} {kind} {of[:_LONGEST_NAME]}".lower())
        self.name = "-".join(words)
        self.text = list(text)
        self.notes = list(notes)
        self.caption = texts.get("figure")
        self.table_caption = texts.get("table")
        self.table = pd.DataFrame([_cells(row) for row in rows])

        self.data = pd.DataFrame()
        self.figure = None
        if not lines:
            return
        self.data = pd.concat(lines)
        if self.data.empty:
            return

        if "lines" in texts:
            self.figure = draw_lines(self.data, chapter.looks, **texts["lines"])
        else:
            self.figure = draw_intervals(self.data, chapter.looks, **texts["intervals"])


def _filled(part: Any, names: Mapping[str, str]) -> Any:
    """Return texts with the names that they have in braces."""
    if isinstance(part, dict):
        return {key: _filled(value, names) for key, value in part.items()}
    if isinstance(part, str):
        return part.format(**names)
    return part


def _cells(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the cells of a row, with three columns for each estimate."""
    cells = {}
    for name, cell in row.items():
        # An interval has columns of its own, for programs that read the file.
        if isinstance(cell, Estimate):
            for end, part in zip(ENDS, cell, strict=True):
                cells[f"{name}{end}"] = float(part)
        else:
            cells[name] = cell

    return cells


def make_sections(chapter: Chapter) -> list[Section]:
    """Return the sections of a chapter, without those that have nothing to show.

    :param chapter: chapter to write
    """
    sections = []

    # In the order of the page: from the answer to its details.
    for make in (aggregates, improvement, efficiency, tasks, sensitivity, diagnostics, matched_kl, records):
        for section in make(chapter):
            if section.figure or section.notes or not section.table.empty:
                sections.append(section)

    return sections


def _row(
    variant: Variant,
    rows: Sized,
    cells: Mapping[str, Any],
) -> dict[str, Any]:
    return {"Algorithm": variant.label, "Seeds": len(rows), **cells}


def _new(notes: Iterable[str], chapter: Chapter) -> list[str]:
    """Return the notes that the chapter's first section does not have."""
    return [note for note in notes if note not in chapter.notes]


def aggregates(chapter: Chapter) -> Iterator[Section]:
    """Compute IQM and mean (as the paper's Figure 2), median and optimality gap, also for all other settings.

    :param chapter: chapter of the section
    """
    searched = []
    away = []

    # What the reader must know before the first number
    for variant, among in chapter.chosen.items():
        if among > 1:
            searched.append(f"{variant.label} (best of {among})")
        if LEARNING_RATE in variant.changed:
            away.append(variant.label)

    text = ["Figures show each algorithm at the suite's learning rate."]
    if searched:
        text.append(f"Selected by IQM on the runs shown, which flatters: {', '.join(searched)}.")
    if away:
        text.append(f"Not run at the suite's learning rate, and shown at the lowest: {', '.join(away)}.")

    table = _aggregate_rows(chapter, chapter.blocks)
    lines = []

    for variant, cells in zip(chapter.blocks, table, strict=True):
        for name in statistics.METRICS:
            lines.append(points(variant.algorithm, 0, cells[name], name))

    yield Section(chapter, "aggregates", lines, table, text=text, notes=chapter.notes)

    # Otherwise the same table
    if len(chapter.variants) > len(chapter.chosen):
        blocks, notes = chapter.complete(chapter.variants)
        yield Section(
            chapter,
            "all settings",
            rows=_aggregate_rows(chapter, blocks),
            notes=_new(notes, chapter),
        )


def _aggregate_rows(chapter: Chapter, blocks: Mapping[Variant, pd.DataFrame]) -> list[dict[str, Any]]:
    table = []
    for variant, rows in blocks.items():
        cells = statistics.aggregate(chapter.values(rows), chapter.settings.reps)
        table.append(_row(variant, rows, cells))
    return table


def improvement(chapter: Chapter) -> Iterator[Section]:
    """Compute the probability that one algorithm does better than another.

    :param chapter: chapter of the section
    """
    lines = []
    table = []
    # Only runs of the same task are compared, which needs no reference scores.
    blocks, notes = chapter.complete(chapter.chosen, chapter.tasks)

    for second, first in itertools.combinations(blocks, 2):
        returns = chapter.values(blocks[first], "final")
        others = chapter.values(blocks[second], "final")
        # In the order of the figure, the later algorithm is the first.
        probability = statistics.probability_of_improvement(returns, others)
        x = title(first.algorithm)
        y = title(second.algorithm)
        lines.append(points(first.algorithm, 0, probability, line=f"{x} > {y}"))
        table.append({"X": x, "Y": y, "Tasks": returns.shape[1], "P(X > Y)": probability})

    if len(chapter.chosen) > 1:
        yield Section(chapter, "improvement", lines, table, notes=_new(notes, chapter))


def efficiency(chapter: Chapter) -> Iterator[Section]:
    """Compute the IQM during the training.

    :param chapter: chapter of the section
    """
    lines = []
    for variant, rows in chapter.blocks.items():
        curves = _aligned_curves(chapter, rows.to_numpy().flat, "percent", "score")
        # The tasks may have no step in common.
        if len(curves):
            scores = curves.to_numpy().reshape(len(curves), *rows.shape)
            band = statistics.estimate(interquartile_mean, scores, reps=chapter.settings.reps)
            lines.append(points(variant.algorithm, curves.index.to_numpy(), band))

    yield Section(chapter, "efficiency", lines)


def _aligned_curves(
    chapter: Chapter,
    rows: Iterable[int],
    index: str,
    column: str,
) -> pd.DataFrame:
    """Return the curves of runs at the steps of all of them, interpolated between the measurements of each run only."""
    curves = []
    for row in rows:
        curves.append(chapter.curves[row].set_index(index)[column])
    together = pd.concat(curves, axis=1).sort_index()
    # Beyond its last measurement, nothing is known of a run.
    return together.interpolate(method="index", limit_area="inside").dropna()


def tasks(chapter: Chapter) -> Iterator[Section]:
    """Draw a learning curve per task, and list final returns.

    :param chapter: chapter of the section
    """
    lines = []
    table = []

    for task, variant in itertools.product(chapter.tasks, chapter.chosen):
        rows = chapter.rows_of(variant, task)
        if not rows:
            continue

        curves = _aligned_curves(chapter, rows, "timesteps", "value")
        # The seeds may have no step in common.
        if len(curves):
            # Returns of one task: seeds are the only dimension to resample.
            returns = curves.to_numpy()
            band = statistics.estimate(
                statistics.mean,
                returns[:, :, None],
                reps=chapter.settings.reps,
            )
            lines.append(points(variant.algorithm, curves.index.to_numpy(), band, task))

        finals = chapter.runs["final"][rows]
        cells: dict[str, Any] = {
            "Return": chapter.estimate("Mean", rows, "final"),
            "SD": finals.std(),
            "Worst seed": finals.min(),
        }
        if task in chapter.scored:
            cells[chapter.unit] = chapter.estimate("Mean", rows)
        # The median, of which pandas does not warn if runs have no time.
        cells["Steps per second"] = chapter.runs["steps_per_second"][rows].quantile()
        table.append({"Task": task, **_row(variant, rows, cells)})

    yield Section(chapter, "tasks", lines, table, notes=chapter.run_notes)


def sensitivity(chapter: Chapter) -> Iterator[Section]:
    """Compare scores at all values of each setting that was varied (the paper's Figure 3 for the learning rate).

    :param chapter: chapter of the section
    """
    names: set[str] = set()
    for variant in chapter.variants:
        names |= dict(variant.settings).keys()

    # The learning rate first, because it decides most.
    for name in sorted(names, key=lambda name: (name != LEARNING_RATE, name)):
        families = _families(chapter.variants, name)
        blocks, notes = chapter.complete(itertools.chain(*families))
        lines = []
        table = []

        for family in families:
            variants = [variant for variant in family if variant in blocks]
            if not variants:
                continue
            # Changes are relative to the suite's value, or to the lowest one.
            base = variants[0]
            for variant in variants:
                if name not in variant.changed:
                    base = variant
                    break

            for variant in variants:
                rows = blocks[variant]
                cells = _changes(chapter, blocks[base], rows)
                line = variant.without(name).label
                lines.append(points(variant.algorithm, variant.value(name), cells["IQM"], line=line))
                table.append(_row(variant, rows, cells))

        if not lines:
            notes.append(f"No figure of {name}: its values are not numbers, or no task has runs at all of them.")
        yield Section(chapter, "sensitivity", lines, table, of=name, notes=notes)


def _families(variants: Sequence[Variant], name: str) -> list[list[Variant]]:
    """Return the groups of variants that differ in one setting only, each in the order of its values."""
    # Variants that are equal without the setting are a line of the figure.
    groups: dict[Variant, list[Variant]] = {}
    for variant in variants:
        if variant.value(name) is not None:
            groups.setdefault(variant.without(name), []).append(variant)
    return [group for group in groups.values() if len(group) > 1]


def _changes(
    chapter: Chapter,
    base: pd.DataFrame,
    rows: pd.DataFrame,
) -> dict[str, Estimate]:
    """Return IQM and mean, and their changes in percent relative to other runs, paired if the seeds are the same.

    Without an interval of the base that is above 0, there is no change in percent: its base may be any number.
    """
    before = chapter.values(base)
    after = chapter.values(rows)
    paired = base.index.equals(rows.index)
    cells = {}

    for name in ("IQM", "Mean"):
        cells[name] = chapter.estimate(name, rows)
        # The base changes by 0 % relative to itself.
        if base is rows:
            continue

        change = Estimate.exact(np.array(np.nan))
        if chapter.estimate(name, base).low > 0.0:
            metric = statistics.METRICS[name]
            change = statistics.relative_change(
                before,
                after,
                chapter.settings.reps,
                paired,
                metric,
            )
        cells[f"{name}, change in %"] = Estimate(*(100.0 * part for part in change))

    return cells


def diagnostics(chapter: Chapter) -> Iterator[Section]:
    """List what an update does to the policy: a row per task and variant, with medians over its runs.

    :param chapter: chapter of the section
    """
    if not chapter.runs[list(DIAGNOSTICS)].notna().any(axis=None):
        return

    table = []
    for task, variant in itertools.product(chapter.tasks, chapter.variants):
        rows = chapter.rows_of(variant, task)
        if rows:
            # Medians, because a single run can have a huge ratio.
            medians = chapter.runs.loc[rows, list(DIAGNOSTICS)].median()
            cells = {name: medians[name] for name in DIAGNOSTICS}
            table.append({"Task": task, **_row(variant, rows, cells)})

    yield Section(chapter, "diagnostics", rows=table)


def matched_kl(chapter: Chapter) -> Iterator[Section]:
    """Plot the score against the measured KL divergence per update, which compares algorithms at equal step sizes.

    :param chapter: chapter of the section
    """
    blocks, _ = chapter.complete(chapter.variants)
    lines = []
    shown = set()

    for variant, rows in blocks.items():
        # TRPO may take no step, which a logarithmic axis cannot show.
        size = chapter.values(rows, "KL divergence").mean()
        if 0.0 < size < np.inf:
            score = chapter.estimate("IQM", rows)
            lines.append(points(variant.algorithm, size, score, line=variant.label))
            shown.add(variant)

    # A single point compares nothing.
    if len(shown) > 1:
        yield Section(chapter, "matched kl", lines)


def records(chapter: Chapter) -> Iterator[Section]:
    """List all hyperparameters and all runs.

    :param chapter: chapter of the section
    """
    rows = []
    # All that any run was given
    for name in sorted(set().union(*chapter.runs["hyperparameters"])):
        row = {"Hyperparameter": name}
        for variant in chapter.chosen:
            row[title(variant.algorithm)] = _values_of_tasks(chapter, variant, name)
        rows.append(row)

    yield Section(chapter, "hyperparameters", rows=rows)

    # Some columns are missing in results of other programs.
    columns = ["name", "env_id", "algorithm", "seed", "total_timesteps", "final", "score", "seconds", "finished", "commit"]
    runs = chapter.runs.reindex(columns=columns)
    yield Section(chapter, "runs", rows=runs.to_dict("records"))


def _values_of_tasks(
    chapter: Chapter,
    variant: Variant,
    name: str,
) -> str:
    """Return the value of a hyperparameter, or the values with their tasks: ``"0.98; 0.9 (Pendulum-v1)"``."""
    tasks: dict[str, list[str]] = {}
    for row in variant.rows:
        value = _hyperparameter(chapter.runs["hyperparameters"][row], variant.algorithm, name)
        # Several seeds of a task have the same value.
        names = tasks.setdefault(value, [])
        if chapter.runs["env_id"][row] not in names:
            names.append(chapter.runs["env_id"][row])

    if len(tasks) == 1:
        return next(iter(tasks))

    texts: list[str] = []
    by_number = sorted(tasks.items(), key=lambda item: -len(item[1]))

    for value, names in by_number:
        # The first value has the most tasks, which need not be listed if they are all of the others.
        listed = ", ".join(names)
        if not texts and len(names) > _LISTED_TASKS:
            listed = "other tasks"
        texts.append(f"{value} ({listed})")

    return "; ".join(texts)


def _hyperparameter(
    given: Mapping[str, Any],
    label: str,
    name: str,
) -> str:
    """Return the value that a run was given, the algorithm's default, or ``"-"`` if the algorithm lacks the hyperparameter."""
    if name in given:
        return str(given[name])

    algorithm = Algorithm(label.partition(":")[0])
    if algorithm.name not in CLASSES or name not in algorithm.hyperparameters:
        return "-"
    return f"{algorithm.default(name)} (default)"
