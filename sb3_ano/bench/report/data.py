"""The data of a report: a row, a learning curve and the diagnostics of each run, and the variants that are compared."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from sb3_ano.bench.algorithms import CLASSES, Algorithm, number, replaced, title
from sb3_ano.bench.looks import looks
from sb3_ano.bench.results import Results, RunFiles, require_different
from sb3_ano.bench.scores import DEFAULT_TABLES, ReferenceScores
from sb3_ano.bench.statistics import METRICS, Estimate, estimate, interquartile_mean

LENGTH, LEARNING_RATE = "total_timesteps", "learning_rate"
#: Diagnostics of an update: columns of ``progress.csv`` with their signs. SB3 logs the entropy as a loss.
DIAGNOSTICS = {
    "KL divergence": ("update/kl_after", 1.0),
    "Largest ratio": ("update/ratio_max_after", 1.0),
    "Fraction outside": ("update/outside_after", 1.0),
    "Entropy": ("train/entropy_loss", -1.0),
}
# Value of a setting whose suite has different values for its tasks.
_OF_SUITE = "suite's"
# Points of a curve of training returns, and the episodes that each point averages, as in CleanRL.
_TRAINING_POINTS, _TRAINING_EPISODES = 50, 100


@dataclass(frozen=True)
class Settings:
    """Specify how a report is made.

    :param returns: ``"evaluation"`` or ``"training"``, the returns that scores come from
    :param last: number of last evaluations that a final return averages
    :param reps: number of resamples of the bootstrap that intervals come from
    :param tables: tables of reference scores
    :param command: command line to report
    """

    returns: str = "evaluation"
    last: int = 1
    reps: int = 2000
    tables: tuple[str, ...] = DEFAULT_TABLES
    command: str = ""


@dataclass(frozen=True)
class Variant:
    """Group the runs of one algorithm with equal settings, on all tasks.

    :param algorithm: label of the algorithm
    :param settings: values of the settings that the algorithm's runs differ in
    :param rows: row numbers in the table of runs
    :param changed: names of the settings that are not the suite's
    """

    algorithm: str
    settings: tuple[tuple[str, Any], ...]
    rows: tuple[int, ...]
    changed: frozenset[str] = frozenset()

    @property
    def label(self) -> str:
        """Return the name of the algorithm with the settings."""
        texts = [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in self.settings]
        return " ".join([title(self.algorithm), *texts])

    def value(self, name: str) -> float | None:
        """Return the value of a setting, or None if the runs do not differ in it, or it is not a finite number.

        :param name: name of the setting
        """
        value = number(dict(self.settings).get(name))
        return None if value is None or math.isinf(value) else value

    def without(self, name: str) -> "Variant":
        """Return the algorithm with all settings but one, of which it keeps a schedule, and no runs.

        :param name: name of the setting to leave out
        """
        kept = {key: value if key != name else "linear" for key, value in self.settings if key != name or "lin_" in str(value)}
        return Variant(self.algorithm, tuple(kept.items()), ())


def _find_variants(runs: pd.DataFrame) -> list[Variant]:
    """Return all algorithms with all settings that were run. A run can be one of the suite's values and one of a value.

    :param runs: table of runs with ``name``, ``env_id``, ``seed``, ``algorithm``, ``hyperparameters`` and ``changed``
    :raises ValueError: if two runs differ in neither
    """
    variants = []
    for algorithm, rows in runs.groupby("algorithm", sort=False):
        default = Algorithm(str(algorithm).partition(":")[0]).default
        given = rows["hyperparameters"]
        labels: dict[str, pd.Series] = {}
        for name in sorted(set().union(*given)):
            column = _comparable([settings.get(name, default(name)) for settings in given], rows["env_id"])
            if column.groupby(rows["env_id"]).nunique().max() > 1:
                of_suite = np.array([name not in changed for changed in rows["changed"]])
                suites, others = column[of_suite], set(column[~of_suite])
                per_task = suites.groupby(rows["env_id"]).nunique()
                labels[name] = column.map(lambda value: {value})
                # Tasks may have different values in the suite, which count as one setting all the same, and also as the value
                # if other tasks have it from the grid. If the suite was edited between the runs, its values are like others.
                if per_task.max() == 1 < suites.nunique():
                    always = {_OF_SUITE} if len(per_task) == rows["env_id"].nunique() else set()
                    labels[name][of_suite] = [always | others & {value} or {_OF_SUITE} for value in suites]
        groups: dict[tuple[tuple[str, Any], ...], list[int]] = {}
        for row, *cells in zip(rows.index, *labels.values(), strict=True):
            for values in itertools.product(*cells):
                groups.setdefault(tuple(zip(labels, values, strict=True)), []).append(row)
        for settings in sorted(groups, key=lambda settings: [(number(value) or 0.0, str(value)) for _, value in settings]):
            require_different(runs.loc[groups[settings]], ["env_id", "seed"])
            changed = frozenset(name for row in groups[settings] for name in rows["changed"][row])
            variants.append(Variant(str(algorithm), settings, tuple(groups[settings]), changed))
    return variants


def _comparable(values: Sequence[Any], tasks: pd.Series) -> pd.Series:
    """Return numbers, as floats, and texts; of a linear schedule the number, unless a task has the constant, too."""
    numbers = pd.Series([str(value) if number(value) is None else number(value) for value in values], tasks.index, object)
    schedules = pd.Series(map(replaced, values, numbers), tasks.index, object)
    return numbers if schedules.groupby([tasks, numbers], sort=False).nunique().max() == 1 else schedules


class Chapter:
    """Hold the runs of a suite, and the variants that are compared.

    ``variants`` are all algorithms with all settings; ``chosen`` is one variant per algorithm, with the number of variants
    that it was selected from; ``blocks`` and ``notes`` are those of :meth:`complete` for the chosen variants.

    :param name: name of the suite, with the number of steps if it was changed
    :param files: finished runs
    :param references: reference scores
    :param settings: settings of the report
    """

    def __init__(self, name: str, files: Iterable[RunFiles], references: ReferenceScores, settings: Settings) -> None:
        self.name, self.references, self.settings = name, references, settings
        #: For each run, rows of ``timesteps``, ``percent`` (of the training), ``value`` and ``score``.
        #: For each run, rows of ``timesteps`` and :data:`DIAGNOSTICS`.
        self.curves: list[pd.DataFrame] = []
        self.updates: list[pd.DataFrame] = []
        #: Notes on the runs.
        self.run_notes: list[str] = []
        rows = {run.path.name: self._read(run) for run in files}
        empty = ", ".join(name for name, row in rows.items() if row is None)
        if empty:
            self.run_notes.append(f"Without a finite final return of {settings.returns}, and in no figure: {empty}.")
        #: ``run.json`` as columns, with ``final`` (final return), ``score`` (the same, normalized), ``steps_per_second`` and
        #: the means of :data:`DIAGNOSTICS`.
        self.runs = pd.DataFrame([row for row in rows.values() if row is not None])
        if self.runs.empty:
            return
        for task, runs in self.runs.groupby("env_id"):
            if len(backends := dict.fromkeys(runs.get("backend_used", runs["env_id"]).map(str))) > 1:
                different = f"used different backends, which may differ in protocol: {', '.join(backends)}"
                self.run_notes.append(f"Runs of {task} {different}.")
        self.tasks = sorted(self.runs["env_id"].unique())
        scores = {task: row for task in self.tasks if (row := references.find(task)) is not None}
        #: Tasks with reference scores, and the name of their normalized score, for axes.
        self.scored = list(scores)
        units = {row["unit"] for row in scores.values()}
        self.unit = units.pop() if len(units) == 1 else "Normalized score"
        self.variants = _find_variants(self.runs)
        self.looks = looks(variant.algorithm for variant in self.variants)
        self.chosen = self._choose()
        self.blocks, self.notes = self.complete(self.chosen)

    def _read(self, run: RunFiles) -> dict[str, object] | None:
        """Read the rows of a run, and return its row of the table, or None if it has no finite final return."""
        settings, progress, seconds = self.settings, run.updates(), run.document.get("seconds")
        evaluations = run.evaluations().rename(columns={"mean": "value"})[["timesteps", "value"]]
        curve = evaluations if settings.returns == "evaluation" else _training_returns(run)
        last = curve["value"].tail(settings.last if settings.returns == "evaluation" else 1)
        if not np.isfinite(last.mean()):
            return None
        finite = np.isfinite(curve["value"].to_numpy(float))
        if not finite.all():
            odd = f"{(~finite).sum()} of {len(finite)} returns of {run.path.name} are not finite"
            self.run_notes.append(f"{odd}, and are left out of curves.")
            curve = curve[finite].copy()
        # Rounded, so that equal steps of different tasks are equal numbers.
        curve["percent"] = (100.0 * curve["timesteps"] / run.document[LENGTH]).round(6)
        curve["score"] = self.references.normalize(run.document["env_id"], curve["value"].to_numpy(float))
        diagnostics = {
            key: sign * progress.get(column, pd.Series(dtype=float)).astype(float)
            for key, (column, sign) in DIAGNOSTICS.items()
        }
        update = pd.DataFrame({"timesteps": progress["time/total_timesteps"], **diagnostics})
        self.curves.append(curve)
        self.updates.append(update)
        return {
            **run.document,
            "final": last.mean(),
            "score": float(self.references.normalize(run.document["env_id"], last.mean())),
            "steps_per_second": run.document.get("timesteps", 0) / seconds if seconds else float("nan"),
            **update[list(DIAGNOSTICS)].mean(),
        }

    def values(self, rows: pd.DataFrame | Sequence[int], column: str = "score") -> np.ndarray:
        """Return a column of some of the runs, in the shape of their row numbers.

        :param rows: row numbers
        :param column: column of the table of runs
        """
        return self.runs[column].to_numpy(float)[np.asarray(rows, int)]

    def estimate(self, metric: str, rows: pd.DataFrame | Sequence[int], column: str = "score") -> Estimate:
        """Compute one of the metrics over some of the runs, with its interval.

        :param metric: key of :data:`sb3_ano.bench.statistics.METRICS`
        :param rows: row numbers, by seed and task, or by seed
        :param column: column of the table of runs
        """
        values = self.values(rows, column)
        return estimate(METRICS[metric], values.reshape(len(values), -1), reps=self.settings.reps)

    def complete(
        self, variants: Iterable[Variant], tasks: Sequence[str] | None = None
    ) -> tuple[dict[Variant, pd.DataFrame], list[str]]:
        """Return the runs that can be aggregated, and notes on those that are left out.

        Aggregated are the tasks that all variants have, and for each variant the seeds that have all of these tasks.

        :param variants: variants to compare
        :param tasks: tasks to aggregate; by default, those with reference scores
        :return: row numbers of runs by seed and task, for each variant that has any; and the notes
        """
        candidates = self.scored if tasks is None else tasks
        tables = {}
        for variant in variants:
            runs = self.runs.iloc[list(variant.rows)]
            tables[variant] = runs.assign(row=runs.index).pivot(index="seed", columns="env_id", values="row")

        missing = {task: [variant.label for variant in tables if task not in tables[variant]] for task in candidates}
        common = [task for task in candidates if not missing[task]]
        tables_read = ", ".join(self.references.tables)
        reasons = {task: f"no scores in {tables_read}" for task in self.tasks if task not in candidates}
        reasons |= {task: f"no runs of {', '.join(labels)}" for task, labels in missing.items() if labels}
        notes = [f"{task} is not aggregated: {reason}." for task, reason in reasons.items()]

        blocks = {}
        for variant, table in tables.items() if common else ():
            blocks[variant] = table[common].dropna().astype(int)
            if len(unused := table[common].drop(blocks[variant].index).stack()):
                names = ", ".join(self.runs["name"].iloc[int(row)] for row in unused.to_numpy())
                notes.append(f"Not aggregated, because their seed has no run of another task: {names}.")
        blocks = {variant: rows for variant, rows in blocks.items() if len(rows)}

        single = [variant.label for variant, rows in blocks.items() if len(rows) == 1]
        notes += [f"One seed only, and therefore no interval: {', '.join(single)}."] if single else []
        return blocks, notes if blocks or not tables else [*notes, "No algorithm has a seed with runs of all tasks."]

    def _choose(self) -> dict[Variant, int]:
        """Choose one variant of each algorithm at the suite's learning rate, or at the lowest if that was not run.

        The best by IQM is chosen. Without an IQM, it is the one with the fewest changed settings, which is selected from one.
        """
        chosen = {}
        for _, group in itertools.groupby(self.variants, key=lambda variant: variant.algorithm):
            rates = {variant: variant.value(LEARNING_RATE) or 0.0 for variant in group}
            candidates = [variant for variant in rates if LEARNING_RATE not in variant.changed]
            candidates = candidates or [variant for variant in rates if rates[variant] == min(rates.values())]
            blocks, _ = self.complete(candidates)
            scores = {variant: float(interquartile_mean(self.values(rows))) for variant, rows in blocks.items()}
            if scores:
                chosen[max(scores, key=scores.__getitem__)] = len(candidates)
            else:
                chosen[min(candidates, key=lambda variant: len(variant.changed))] = 1
        return chosen


def load_chapters(results: Results, settings: Settings) -> list[Chapter]:
    """Read all runs of a directory of results, a chapter per suite and changed number of steps.

    :param results: directory of results
    :param settings: settings of the report
    :raises ValueError: if runs are damaged, or if no run has the returns that the settings ask for
    """
    references = ReferenceScores(settings.tables)
    groups: dict[str, list[RunFiles]] = {}
    for run in sorted(results.runs(), key=_order):
        steps = f", {run.document[LENGTH]:,} steps" if LENGTH in run.document["changed"] else ""
        groups.setdefault(run.document["suite"] + steps, []).append(run)
    chapters = [Chapter(name, groups[name], references, settings) for name in sorted(groups)]
    chapters = [chapter for chapter in chapters if len(chapter.runs)]
    if not chapters:
        raise ValueError(f"{results.path}: no run has {settings.returns} returns; imported runs need --returns training")
    return chapters


def _order(run: RunFiles) -> tuple[int, str, str]:
    """Sort algorithms in the order of the classes, and others by name."""
    places, algorithm = {name: place for place, name in enumerate(CLASSES)}, run.document["algorithm"]
    return places.get(algorithm.partition(":")[0], len(places)), algorithm, run.path.name


def _training_returns(run: RunFiles) -> pd.DataFrame:
    """Return means of the last 100 episodes at fiftieths of the training, which are the same for all runs."""
    episodes = run.episodes()
    episodes["value"] = episodes["r"].rolling(_TRAINING_EPISODES, min_periods=1).mean()
    fiftieth = np.ceil(_TRAINING_POINTS * episodes["timesteps"] / run.document[LENGTH]).clip(upper=_TRAINING_POINTS)
    values = episodes["value"].groupby(fiftieth).last()
    return pd.DataFrame({"timesteps": values.index * run.document[LENGTH] / _TRAINING_POINTS, "value": values.to_numpy()})
