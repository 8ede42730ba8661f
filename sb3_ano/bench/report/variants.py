"""What a report compares: algorithms with their settings, and the runs of these that can be aggregated."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from sb3_ano.bench.algorithms import Algorithm, number
from sb3_ano.bench.report.data import Chapter, title
from sb3_ano.bench.statistics import interquartile_mean

LEARNING_RATE = "learning_rate"
#: Value of a setting whose suite has different values for its tasks.
OF_SUITE = "suite's"


@dataclass(frozen=True)
class Variant:
    """Runs of one algorithm with equal settings, on all tasks.

    :param algorithm: label of the algorithm
    :param settings: values of the settings that its runs differ in
    :param rows: its runs, as rows of :attr:`Chapter.runs`
    :param changed: settings that are not the suite's
    :param alternatives: number of variants that it was selected from
    """

    algorithm: str
    settings: tuple[tuple[str, Any], ...]
    rows: tuple[int, ...]
    changed: frozenset[str] = frozenset()
    alternatives: int = 1

    @property
    def label(self) -> str:
        """Name of the algorithm with the settings."""
        return " ".join([title(self.algorithm), *(f"{name}={_text(value)}" for name, value in self.settings)])

    def value(self, name: str) -> float | None:
        """Return the value of a setting, or None if the runs do not differ in it, or it is not a number."""
        return number(dict(self.settings).get(name))

    def without(self, name: str) -> tuple[str, tuple[tuple[str, Any], ...]]:
        """Return the algorithm and all settings but one."""
        return self.algorithm, tuple(setting for setting in self.settings if setting[0] != name)


@dataclass(frozen=True)
class Block:
    """Runs of a variant that can be aggregated: each seed on each task.

    :param variant: the variant
    :param seeds: seeds that have a run of each task
    :param rows: rows of :attr:`Chapter.runs`, shape ``(seeds, tasks)``
    :param chapter: the runs
    """

    variant: Variant
    seeds: tuple[int, ...]
    rows: np.ndarray
    chapter: Chapter

    def column(self, name: str = "score") -> np.ndarray:
        """Return a column of the runs, shape ``(seeds, tasks)``."""
        return self.chapter.runs[name].to_numpy(float)[self.rows]


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    found = number(value)
    return found if found is not None else str(value)


def variants(chapter: Chapter) -> list[Variant]:
    """Return all algorithms with all settings that were run.

    :param chapter: the runs
    """
    made = []
    for algorithm, runs in chapter.runs.groupby("algorithm", sort=False):
        defaults = Algorithm(str(algorithm).partition(":")[0])
        given = sorted({name for hyperparameters in runs["hyperparameters"] for name in hyperparameters})
        columns = {
            name: [_plain(own[name] if name in own else defaults.default(name)) for own in runs["hyperparameters"]]
            for name in given
        }
        values = pd.DataFrame(columns, index=runs.index, dtype=object)
        names = sorted(name for name in given if values[name].astype(str).groupby(runs["env_id"]).nunique().max() > 1)
        values = values[names].copy()
        for name in names:
            of_suite = np.array([name not in changed for changed in runs["changed"]])
            if values.loc[of_suite, name].nunique() > 1:
                values.loc[of_suite, name] = OF_SUITE
        groups: dict[tuple[tuple[str, Any], ...], list[int]] = {}
        for row in sorted(values.index, key=lambda row: [(number(value) or 0.0, str(value)) for value in values.loc[row]]):
            groups.setdefault(tuple(values.loc[row].items()), []).append(row)
        for settings, rows in groups.items():
            changed = frozenset(name for row in rows for name in runs["changed"][row])
            made.append(Variant(str(algorithm), settings, tuple(rows), changed))
    return made


def select(chapter: Chapter, everything: Sequence[Variant]) -> list[Variant]:
    """Return one variant per algorithm: the best at the suite's learning rate, or at the lowest if that was not run.

    :param chapter: the runs
    :param everything: all variants
    """
    chosen = []
    for algorithm in dict.fromkeys(variant.algorithm for variant in everything):
        own = [variant for variant in everything if variant.algorithm == algorithm]
        lowest = min(own, key=lambda variant: variant.value(LEARNING_RATE) or 0.0).value(LEARNING_RATE)
        candidates = [variant for variant in own if LEARNING_RATE not in variant.changed]
        candidates = candidates or [variant for variant in own if variant.value(LEARNING_RATE) == lowest]
        made, _ = blocks(chapter, candidates)
        best = max(made, key=lambda block: float(interquartile_mean(block.column()))).variant if made else candidates[0]
        chosen.append(replace(best, alternatives=len(candidates)))
    return chosen


def blocks(chapter: Chapter, which: Sequence[Variant]) -> tuple[list[Block], list[str]]:
    """Return the runs that can be aggregated, and a note for everything that is left out.

    These are the tasks with reference scores that all variants have, and for each variant the seeds with runs of all of them.

    :param chapter: the runs
    :param which: variants to compare
    """
    runs = chapter.runs
    there = [set(runs["env_id"].iloc[list(variant.rows)]) for variant in which]
    tasks = [task for task in chapter.scored_tasks if all(task in own for own in there)]
    notes = [f"{task} is not aggregated: {reason}." for task, reason in chapter.references.missing(chapter.tasks).items()]
    for task in chapter.scored_tasks:
        missing = [variant.label for variant, own in zip(which, there, strict=True) if task not in own]
        notes += [f"{task} is not aggregated: no runs of {', '.join(missing)}."] if missing else []
    made = []
    for variant in which:
        own = runs.iloc[list(variant.rows)]
        table = own.assign(row=own.index).pivot(index="seed", columns="env_id", values="row").reindex(columns=tasks)
        complete = table.dropna()
        unused = table.drop(complete.index).stack() if tasks else pd.Series(dtype=int)
        if len(unused):
            names = ", ".join(runs["name"].iloc[int(row)] for row in unused.to_numpy())
            notes.append(f"Not aggregated, because their seed has no run of another task: {names}.")
        if tasks and len(complete):
            made.append(Block(variant, tuple(complete.index), complete.to_numpy(int), chapter))
    single = [block.variant.label for block in made if len(block.seeds) == 1]
    return made, notes + ([f"One seed only, and therefore no interval: {', '.join(single)}."] if single else [])


def on_task(chapter: Chapter, variant: Variant, task: str) -> list[int]:
    """Return the runs of a variant on one task, as rows.

    :param chapter: the runs
    :param variant: the variant
    :param task: id of the task
    """
    return [row for row in variant.rows if chapter.runs["env_id"].iloc[row] == task]


def families(everything: Sequence[Variant], name: str) -> list[list[Variant]]:
    """Return the groups of variants that differ in one setting only, each in the order of its values.

    :param everything: all variants
    :param name: name of the setting
    """
    groups: dict[Any, list[Variant]] = {}
    for variant in everything:
        if variant.value(name) is not None:
            groups.setdefault(variant.without(name), []).append(variant)
    return [sorted(group, key=lambda variant: variant.value(name) or 0.0) for group in groups.values() if len(group) > 1]


def varied(everything: Sequence[Variant]) -> Collection[str]:
    """Return the settings that differ between variants of one algorithm, the learning rate first."""
    names = {name for variant in everything for name, _ in variant.settings}
    return sorted(names, key=lambda name: (name != LEARNING_RATE, name))
