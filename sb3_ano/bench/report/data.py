"""The data of a report: a row, a learning curve and the diagnostics of each run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from sb3_ano.bench.algorithms import CLASSES
from sb3_ano.bench.report.figures import looks
from sb3_ano.bench.report.variants import LEARNING_RATE, Variant, find_variants
from sb3_ano.bench.results import Results, RunFiles
from sb3_ano.bench.scores import DEFAULT_TABLES, ReferenceScores
from sb3_ano.bench.statistics import METRICS, Bootstrap, Estimate, area_under_curve, estimate, interquartile_mean

LENGTH = "total_timesteps"
#: Diagnostics of an update: columns of ``progress.csv`` with their signs. SB3 logs the entropy as a loss.
DIAGNOSTICS = {
    "KL divergence": ("update/approx_kl", 1.0),
    "Largest ratio": ("update/ratio_max", 1.0),
    "Fraction outside": ("update/clip_fraction", 1.0),
    "Entropy": ("train/entropy_loss", -1.0),
}
# Points of a curve of training returns, and the episodes that each point averages, as in CleanRL.
_TRAINING_POINTS, _TRAINING_EPISODES = 50, 100


@dataclass(frozen=True)
class Settings:
    """Describe how a report is made.

    :param returns: ``"evaluation"`` or ``"training"``, which returns scores come from
    :param last: number of last evaluations that a final return averages
    :param threshold: normalized score whose time is measured
    :param bootstrap: how intervals are computed
    :param tables: tables of reference scores
    :param command: command line, for the record
    """

    returns: str = "evaluation"
    last: int = 1
    threshold: float = 0.5
    bootstrap: Bootstrap = field(default_factory=Bootstrap)
    tables: tuple[str, ...] = DEFAULT_TABLES
    command: str = ""


class Chapter:
    """Hold the runs of a suite, and what is compared in them.

    ``variants`` are all algorithms with all settings; ``chosen`` is one variant per algorithm, with the number of variants
    that it was selected from; ``blocks`` and ``notes`` are those of :meth:`complete` for the chosen variants.

    :param name: name of the suite, with the number of steps if it was changed
    :param files: finished runs
    :param references: reference scores
    :param settings: how the report is made
    """

    def __init__(self, name: str, files: Iterable[RunFiles], references: ReferenceScores, settings: Settings) -> None:
        self.name, self.references, self.settings = name, references, settings
        self.bootstrap = settings.bootstrap
        #: For each run, rows of ``timesteps``, ``value``, ``score``; and rows of ``timesteps`` and :data:`DIAGNOSTICS`.
        self.curves: list[pd.DataFrame] = []
        self.updates: list[pd.DataFrame] = []
        rows = {run.path.name: self._read(run) for run in files}
        empty = ", ".join(name for name, row in rows.items() if row is None)
        #: Notes on the runs.
        self.run_notes = [f"Without {settings.returns} returns, and in no figure: {empty}."] if empty else []
        #: ``run.json`` as columns, with ``final`` (final return), ``score`` (the same, normalized), ``area_score`` (mean over
        #: the training, normalized), ``steps_per_second``, ``seconds_to_threshold`` and the means of :data:`DIAGNOSTICS`.
        self.runs = pd.DataFrame([row for row in rows.values() if row is not None])
        if self.runs.empty:
            return
        for task, runs in self.runs.groupby("env_id"):
            if len(backends := dict.fromkeys(runs.get("backend_used", runs["env_id"]).map(str))) > 1:
                different = f"used different backends, which may differ in protocol: {', '.join(backends)}"
                self.run_notes.append(f"Runs of {task} {different}.")
        self.tasks = sorted(self.runs["env_id"].unique())
        found = {task: row for task in self.tasks if (row := references.find(task)) is not None}
        #: Tasks with reference scores, and the name of their normalized score, for axes.
        self.scored = list(found)
        units = {table.unit for table, _ in found.values()}
        self.unit = units.pop() if len(units) == 1 else "Normalized score"
        #: Unit of environment steps in figures, and its name.
        self.steps_unit = (1e6, "Million") if self.runs[LENGTH].max() >= 1e6 else (1e3, "Thousand")
        self.variants = find_variants(self.runs)
        self.looks = looks(variant.algorithm for variant in self.variants)
        self.chosen = self._choose()
        self.blocks, self.notes = self.complete(self.chosen)

    def _read(self, run: RunFiles) -> dict[str, object] | None:
        """Read the rows of a run, and return its row of the table, or None if it has no returns."""
        evaluations = run.evaluations().rename(columns={"mean": "value"})[["timesteps", "value"]]
        curve = evaluations if self.settings.returns == "evaluation" else _training_returns(run)
        if curve.empty:
            return None
        curve["score"] = self.references.normalize(run.document["env_id"], curve["value"].to_numpy(float))
        progress = run.updates()
        nothing = pd.Series(dtype=float)
        diagnostics = {key: sign * progress.get(column, nothing) for key, (column, sign) in DIAGNOSTICS.items()}
        update = pd.DataFrame({"timesteps": progress["time/total_timesteps"], **diagnostics})
        self.curves.append(curve)
        self.updates.append(update)
        last = curve.tail(self.settings.last if self.settings.returns == "evaluation" else 1)
        reached = curve[curve["score"] >= self.settings.threshold]["timesteps"]
        to_threshold = float("inf") if reached.empty else float("nan")
        if "time/seconds" in progress and len(reached):
            to_threshold = float(np.interp(reached.iloc[0], progress["time/total_timesteps"], progress["time/seconds"]))
        seconds = run.document.get("seconds")
        return {
            **run.document,
            "final": last["value"].mean(),
            "score": last["score"].mean(),
            "area_score": area_under_curve(curve["timesteps"].to_numpy(float), curve["score"].to_numpy(float)),
            "steps_per_second": run.document.get("timesteps", 0) / seconds if seconds else float("nan"),
            "seconds_to_threshold": to_threshold,
            **update[list(DIAGNOSTICS)].mean(),
        }

    def values(self, rows: pd.DataFrame | Sequence[int], column: str = "score") -> np.ndarray:
        """Return a column of some of the runs, in the shape of their row numbers."""
        return self.runs[column].to_numpy(float)[np.asarray(rows, int)]

    def estimate(self, metric: str, rows: pd.DataFrame | Sequence[int], column: str = "score") -> Estimate:
        """Compute one of the metrics over some of the runs, with its interval.

        :param metric: key of :data:`sb3_ano.bench.statistics.METRICS`
        :param rows: row numbers, by seed and task, or by seed
        :param column: column of the table of runs
        """
        values = self.values(rows, column)
        return estimate(METRICS[metric], values.reshape(len(values), -1), bootstrap=self.bootstrap)

    def complete(self, variants: Iterable[Variant]) -> tuple[dict[Variant, pd.DataFrame], list[str]]:
        """Return the runs that can be aggregated, and a note for everything that is left out.

        These are the tasks with reference scores that all variants have, and for each variant the seeds that have all of them.

        :param variants: variants to compare
        :return: row numbers of runs by seed and task, for each variant that has any; and the notes
        """
        tables = {}
        for variant in variants:
            own = self.runs.iloc[list(variant.rows)]
            tables[variant] = own.assign(row=own.index).pivot(index="seed", columns="env_id", values="row")
        missing = {task: [variant.label for variant in tables if task not in tables[variant]] for task in self.scored}
        tasks = [task for task in self.scored if not missing[task]]
        reasons = self.references.missing(self.tasks)
        reasons |= {task: f"no runs of {', '.join(labels)}" for task, labels in missing.items() if labels}
        notes = [f"{task} is not aggregated: {reason}." for task, reason in reasons.items()]
        blocks = {}
        for variant, table in tables.items() if tasks else ():
            table = table[tasks]
            blocks[variant] = table.dropna().astype(int)
            if len(unused := table.drop(blocks[variant].index).stack()):
                names = ", ".join(self.runs["name"].iloc[int(row)] for row in unused.to_numpy())
                notes.append(f"Not aggregated, because their seed has no run of another task: {names}.")
        blocks = {variant: rows for variant, rows in blocks.items() if len(rows)}
        single = [variant.label for variant, rows in blocks.items() if len(rows) == 1]
        return blocks, notes + ([f"One seed only, and therefore no interval: {', '.join(single)}."] if single else [])

    def _choose(self) -> dict[Variant, int]:
        """Choose the best variant of each algorithm at the suite's learning rate, or at the lowest if that was not run."""
        chosen = {}
        for algorithm in dict.fromkeys(variant.algorithm for variant in self.variants):
            own = [variant for variant in self.variants if variant.algorithm == algorithm]
            lowest = min(variant.value(LEARNING_RATE) or 0.0 for variant in own)
            candidates = [variant for variant in own if LEARNING_RATE not in variant.changed]
            candidates = candidates or [variant for variant in own if (variant.value(LEARNING_RATE) or 0.0) == lowest]
            blocks, _ = self.complete(candidates)
            best = max(
                blocks, key=lambda variant: float(interquartile_mean(self.values(blocks[variant]))), default=candidates[0]
            )
            chosen[best] = len(candidates)
        return chosen


def load_chapters(results: Results, settings: Settings) -> list[Chapter]:
    """Read all runs of a directory of results, a chapter per suite and changed number of steps.

    :param results: directory of results
    :param settings: how the report is made
    :raises ValueError: if runs are damaged, or there are none with the returns that are asked for
    """
    references = ReferenceScores(settings.tables)
    groups: dict[str, list[RunFiles]] = {}
    for run in sorted(results.runs(), key=_order):
        steps = run.document["changed"].get(LENGTH)
        groups.setdefault(run.document["suite"] + (f", {steps:,} steps" if steps else ""), []).append(run)
    chapters = [Chapter(name, groups[name], references, settings) for name in sorted(groups)]
    chapters = [chapter for chapter in chapters if len(chapter.runs)]
    if not chapters:
        reason = f"has {settings.returns} returns; imported runs need --returns training" if groups else "has finished"
        raise ValueError(f"{results.path}: no run {reason}")
    return chapters


def _order(run: RunFiles) -> tuple[int, str, str]:
    """Algorithms in the order of the paper, and others by name."""
    names, algorithm = list(CLASSES), run.document["algorithm"]
    name = algorithm.partition(":")[0]
    return names.index(name) if name in names else len(names), algorithm, run.path.name


def _training_returns(run: RunFiles) -> pd.DataFrame:
    """Mean returns of the last 100 episodes, at fiftieths of the training after the first episode."""
    episodes = run.episodes()
    ends = np.arange(1, _TRAINING_POINTS + 1) * run.document[LENGTH] / _TRAINING_POINTS
    ends[-1] = max(ends[-1], episodes["timesteps"].max() if len(episodes) else 0.0)
    averaged = episodes["r"].rolling(_TRAINING_EPISODES, min_periods=1).mean().to_numpy()
    counts = np.searchsorted(episodes["timesteps"], ends, side="right")
    return pd.DataFrame({"timesteps": ends[counts > 0], "value": averaged[counts[counts > 0] - 1]})
