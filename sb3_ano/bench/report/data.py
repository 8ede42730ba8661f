"""The data of a report: a row, a learning curve and the diagnostics of each run, and the variants that are compared."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from sb3_ano.bench.algorithms import CLASSES, Algorithm, is_linear, number, replaced, title
from sb3_ano.bench.looks import looks
from sb3_ano.bench.results import Results, RunFiles
from sb3_ano.bench.scores import DEFAULT_TABLES, ReferenceScores
from sb3_ano.bench.statistics import METRICS, Estimate, estimate, interquartile_mean

LENGTH = "total_timesteps"
LEARNING_RATE = "learning_rate"
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
_TRAINING_POINTS = 50
_TRAINING_EPISODES = 100


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
        texts = [title(self.algorithm)]
        for name, value in self.settings:
            # Rounding errors would make names long.
            if isinstance(value, float):
                value = f"{value:g}"
            texts.append(f"{name}={value}")
        return " ".join(texts)

    def value(self, name: str) -> float | None:
        """Return the value of a setting, or None if the runs do not differ in it, or it is not a finite number.

        :param name: name of the setting
        """
        value = number(dict(self.settings).get(name))
        # No axis has a place for infinity.
        if value is None or math.isinf(value):
            return None
        return value

    def without(self, name: str) -> "Variant":
        """Return the algorithm with all settings but one, of which it keeps a schedule, and no runs.

        :param name: name of the setting to leave out
        """
        kept = dict(self.settings)
        value = kept.pop(name, None)
        # A schedule and a constant are two lines of a figure.
        if is_linear(value):
            kept[name] = "linear"
        return Variant(self.algorithm, tuple(sorted(kept.items())), ())


def _find_variants(runs: pd.DataFrame) -> list[Variant]:
    """Return all algorithms with all settings that were run. A run can be one of the suite's values and one of a value.

    :param runs: table of runs with ``name``, ``env_id``, ``seed``, ``algorithm``, ``hyperparameters`` and ``changed``
    :raises ValueError: if two runs of a variant have the same task and seed
    """
    variants = []
    for algorithm, rows in runs.groupby("algorithm", sort=False):
        values = _values_of_settings(str(algorithm), rows)
        groups: dict[tuple[tuple[str, Any], ...], list[int]] = {}

        # A run counts for each combination of the values that it has.
        for place, row in enumerate(rows.index):
            choices = [values[name][place] for name in values]
            for chosen in itertools.product(*choices):
                settings = tuple(zip(values, chosen, strict=True))
                groups.setdefault(settings, []).append(row)

        for settings in sorted(groups, key=_order_of_settings):
            members = rows.loc[groups[settings]]
            key = ["env_id", "seed"]
            equal = members[members.duplicated(key, keep=False)].sort_values(key)

            # Their mean would count the seed twice.
            if len(equal):
                names = " and ".join(equal["name"].head(2))
                raise ValueError(f"{names} have the same algorithm, hyperparameters, task and seed; move one to other results")
            changed: frozenset[str] = frozenset().union(*members["changed"])
            variants.append(Variant(str(algorithm), settings, tuple(groups[settings]), changed))

    return variants


def _order_of_settings(settings: tuple[tuple[str, Any], ...]) -> list[tuple[float, str]]:
    return [(number(value) or 0.0, str(value)) for _, value in settings]


def _values_of_settings(algorithm: str, rows: pd.DataFrame) -> dict[str, list[set[Any]]]:
    """Return what the runs of an algorithm differ in: for each setting, the values that each run counts for."""
    default = Algorithm(algorithm.partition(":")[0]).default
    tasks = rows["env_id"]
    found = {}

    for name in sorted(set().union(*rows["hyperparameters"])):
        given = [hyperparameters.get(name, default(name)) for hyperparameters in rows["hyperparameters"]]
        # Only what differs within a task is a setting.
        values = _comparable(given, tasks)
        if values.groupby(tasks).nunique().max() == 1:
            continue

        is_changed = np.array([name in changed for changed in rows["changed"]])
        of_grid = set(values[is_changed])
        of_suite = values[~is_changed]
        values_per_task = of_suite.groupby(tasks[~is_changed]).nunique()

        # One value in each task, and not the same in all
        differs_by_task = values_per_task.max() == 1 < of_suite.nunique()
        if not differs_by_task:
            # If the suite was edited between the runs, its values are like others.
            found[name] = [{value} for value in values]
            continue

        # Tasks may have different values in the suite, which count as one setting all the same, and also as the value if
        # other tasks have it from the grid.
        has_all_tasks = len(values_per_task) == tasks.nunique()
        found[name] = []
        for value, changed in zip(values, is_changed, strict=True):
            counts_for = {value}
            if not changed:
                counts_for &= of_grid
            if not changed and (has_all_tasks or not counts_for):
                counts_for.add(_OF_SUITE)
            found[name].append(counts_for)

    return found


def _comparable(values: Sequence[Any], tasks: pd.Series) -> pd.Series:
    """Return numbers, as floats, and texts; of a linear schedule the number, unless a task has the constant, too."""
    numbers = []
    schedules = []

    for value in values:
        found = number(value)
        # Texts, because lists and mappings cannot be compared with numbers.
        numbers.append(str(value) if found is None else found)
        schedules.append(replaced(value, numbers[-1]))

    by_number = pd.Series(numbers, tasks.index, object)
    by_schedule = pd.Series(schedules, tasks.index, object)
    is_ambiguous = by_schedule.groupby([tasks, by_number], sort=False).nunique().max() > 1
    if is_ambiguous:
        return by_schedule
    return by_number


class Chapter:
    """Hold the runs of a suite, and the variants that are compared.

    ``variants`` are all algorithms with all settings; ``chosen`` is one variant per algorithm, with the number of variants
    that it was selected from; ``blocks`` and ``notes`` are those of :meth:`complete` for the chosen variants.

    :param name: name of the suite, with the number of steps if it was changed
    :param files: finished runs
    :param references: reference scores
    :param settings: settings of the report
    """

    def __init__(
        self,
        name: str,
        files: Iterable[RunFiles],
        references: ReferenceScores,
        settings: Settings,
    ) -> None:
        self.name = name
        self.references = references
        self.settings = settings
        #: For each run, rows of ``timesteps``, ``percent`` (of the training), ``value`` and ``score``.
        self.curves: list[pd.DataFrame] = []
        #: Notes on the runs.
        self.run_notes: list[str] = []

        rows = []
        empty = []

        for run in files:
            # Its rows are kept in the same order as those of the table.
            row = self._read(run)
            if row is None:
                empty.append(run.path.name)
            else:
                rows.append(row)

        if empty:
            names = ", ".join(empty)
            self.run_notes.append(f"Without a finite final return of {settings.returns}, and in no figure: {names}.")
        #: ``run.json`` as columns, with ``final`` (final return), ``score`` (the same, normalized), ``steps_per_second`` and
        #: the means of :data:`DIAGNOSTICS`.
        self.runs = pd.DataFrame(rows)
        if self.runs.empty:
            return

        if "backend_used" in self.runs:
            for task, backends in self.runs.groupby("env_id")["backend_used"]:
                # They may differ in preprocessing, or in the end of an episode.
                different = backends.map(str).unique()
                if len(different) > 1:
                    protocols = f"used different backends, which may differ in protocol: {', '.join(different)}"
                    self.run_notes.append(f"Runs of {task} {protocols}.")

        self.tasks = sorted(self.runs["env_id"].unique())
        #: Tasks with reference scores, and the name of their normalized score, for axes.
        self.scored: list[str] = []
        units = set()

        for task in self.tasks:
            reference = references.find(task)
            if reference is not None:
                self.scored.append(task)
                units.add(reference["unit"])

        # Tasks of several tables have no common unit.
        self.unit = "Normalized score"
        if len(units) == 1:
            self.unit = units.pop()

        self.variants = _find_variants(self.runs)
        self.looks = looks(variant.algorithm for variant in self.variants)
        self.chosen = self._choose()
        self.blocks, self.notes = self.complete(self.chosen)

    def _read(self, run: RunFiles) -> dict[str, object] | None:
        """Read the rows of a run, and return its row of the table, or None if it has no finite final return."""
        task = run.document["env_id"]

        if self.settings.returns == "evaluation":
            evaluations = run.evaluations()
            curve = evaluations[["timesteps", "mean"]].rename(columns={"mean": "value"})
            final = curve["value"].tail(self.settings.last).mean()
        else:
            curve = _training_returns(run)
            final = curve["value"].tail(1).mean()

        # A diverged run has no score; the notes name it.
        if not np.isfinite(final):
            return None

        is_finite = np.isfinite(curve["value"].to_numpy(float))
        if not is_finite.all():
            odd = f"{(~is_finite).sum()} of {len(curve)} returns of {run.path.name} are not finite"
            self.run_notes.append(f"{odd}, and are left out of curves.")
            curve = curve[is_finite].copy()

        # Rounded, so that equal steps of different tasks are equal numbers.
        percent = 100.0 * curve["timesteps"] / run.document[LENGTH]
        curve["percent"] = percent.round(6)
        curve["score"] = self.references.normalize(task, curve["value"].to_numpy(float))
        self.curves.append(curve)

        progress = run.updates()
        diagnostics = dict.fromkeys(DIAGNOSTICS, np.nan)
        for key, (column, sign) in DIAGNOSTICS.items():
            # Not all algorithms log all of them.
            if column in progress:
                diagnostics[key] = sign * progress[column].astype(float).mean()

        # Results of other programs may lack it.
        seconds = run.document.get("seconds")
        speed = np.nan
        if seconds:
            speed = run.document.get("timesteps", 0) / seconds
        return {
            **run.document,
            "final": final,
            "score": float(self.references.normalize(task, final)),
            "steps_per_second": speed,
            **diagnostics,
        }

    def rows_of(self, variant: Variant, task: str) -> list[int]:
        """Return the row numbers of a variant's runs of a task.

        :param variant: variant of an algorithm
        :param task: id of the task
        """
        return [row for row in variant.rows if self.runs["env_id"][row] == task]

    def values(
        self,
        rows: pd.DataFrame | Sequence[int],
        column: str = "score",
    ) -> np.ndarray:
        """Return a column of some of the runs, in the shape of their row numbers.

        :param rows: row numbers
        :param column: column of the table of runs
        """
        return self.runs[column].to_numpy(float)[np.asarray(rows, int)]

    def estimate(
        self,
        metric: str,
        rows: pd.DataFrame | Sequence[int],
        column: str = "score",
    ) -> Estimate:
        """Compute one of the metrics over some of the runs, with its interval.

        :param metric: key of :data:`sb3_ano.bench.statistics.METRICS`
        :param rows: row numbers, by seed and task, or by seed
        :param column: column of the table of runs
        """
        values = self.values(rows, column)
        # Runs of one task have one dimension.
        scores = values.reshape(len(values), -1)
        return estimate(METRICS[metric], scores, reps=self.settings.reps)

    def complete(
        self,
        variants: Iterable[Variant],
        tasks: Sequence[str] | None = None,
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
            # A row per seed, a column per task
            runs = self.runs.loc[list(variant.rows), ["seed", "env_id"]]
            runs["row"] = runs.index
            tables[variant] = runs.pivot(index="seed", columns="env_id", values="row")

        common = []
        notes = []

        for task in self.tasks:
            without = [variant.label for variant, table in tables.items() if task not in table]
            if task not in candidates:
                notes.append(f"{task} is not aggregated: no scores in {', '.join(self.references.tables)}.")
            elif without:
                notes.append(f"{task} is not aggregated: no runs of {', '.join(without)}.")
            else:
                common.append(task)

        blocks = {}
        single = []

        for variant, table in tables.items():
            if not common:
                break
            # Every seed with all tasks: an aggregate over different tasks compares the tasks.
            block = table[common].dropna().astype(int)
            unused = table[common].drop(block.index).stack()

            if len(unused):
                names = ", ".join(self.runs["name"][unused.to_numpy(int)])
                notes.append(f"Not aggregated, because their seed has no run of another task: {names}.")

            if len(block):
                blocks[variant] = block
            if len(block) == 1:
                single.append(variant.label)

        if single:
            notes.append(f"One seed only, and therefore no interval: {', '.join(single)}.")
        if tables and not blocks:
            notes.append("No algorithm has a seed with runs of all tasks.")
        return blocks, notes

    def _choose(self) -> dict[Variant, int]:
        """Choose one variant of each algorithm at the suite's learning rate, or at the lowest if that was not run.

        The best by IQM is chosen. Without an IQM, it is the one with the fewest changed settings, which is selected from one.
        """
        chosen = {}
        for _, group in itertools.groupby(self.variants, key=lambda variant: variant.algorithm):
            # Without a number, runs do not differ in it.
            rates = {variant: variant.value(LEARNING_RATE) or 0.0 for variant in group}
            # All algorithms at the same rate, because it decides more than the algorithm does.
            candidates = [variant for variant in rates if LEARNING_RATE not in variant.changed]

            if not candidates:
                lowest = min(rates.values())
                candidates = [variant for variant, rate in rates.items() if rate == lowest]

            # Without reference scores, or without a seed of all tasks, there is no IQM.
            blocks, _ = self.complete(candidates)
            scores = {}
            for variant, rows in blocks.items():
                scores[variant] = float(interquartile_mean(self.values(rows)))
            if scores:
                best = max(scores, key=scores.__getitem__)
                chosen[best] = len(candidates)
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
        name = run.document["suite"]
        if LENGTH in run.document["changed"]:
            # Runs of different length are not compared.
            name += f", {run.document[LENGTH]:,} steps"
        groups.setdefault(name, []).append(run)

    chapters = []
    for name in sorted(groups):
        chapter = Chapter(name, groups[name], references, settings)
        if len(chapter.runs):
            chapters.append(chapter)

    # Chapters without a finite return have been left out.
    if not chapters:
        raise ValueError(f"{results.path}: no run has a finite final return of {settings.returns}")
    return chapters


def _order(run: RunFiles) -> tuple[int, str, str]:
    """Sort algorithms in the order of the classes, and others by name."""
    algorithm = run.document["algorithm"]
    name = algorithm.partition(":")[0]
    # The last place is that of all others.
    names = [*CLASSES, name]
    return names.index(name), algorithm, run.path.name


def _training_returns(run: RunFiles) -> pd.DataFrame:
    """Return means of the last 100 episodes at fiftieths of the training, which are the same for all runs."""
    length = run.document[LENGTH]

    # Episodes end at other steps in each run, and curves need common ones.
    episodes = run.episodes()
    means = episodes["r"].rolling(_TRAINING_EPISODES, min_periods=1).mean()
    fiftieth = np.ceil(_TRAINING_POINTS * episodes["timesteps"] / length).clip(upper=_TRAINING_POINTS)
    values = means.groupby(fiftieth).last()
    steps = values.index * length / _TRAINING_POINTS
    return pd.DataFrame({"timesteps": steps, "value": values.to_numpy()})
