"""The data of a report: a row, a learning curve and the diagnostics of each run."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from sb3_ano.bench.algorithms import CLASSES
from sb3_ano.bench.results import Results, RunFiles
from sb3_ano.bench.scores import DEFAULT_TABLES, ReferenceScores
from sb3_ano.bench.statistics import Bootstrap, area_under_curve
from sb3_ano.bench.training import EVALUATIONS, PROGRESS

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
    """How a report is made.

    :param returns: ``"evaluation"`` or ``"training"``, which returns scores come from
    :param last: number of last evaluations that a final return averages
    :param threshold: normalized score whose time is measured
    :param reps: resamples of the bootstrap
    :param seed: seed of the bootstrap
    :param tables: tables of reference scores
    :param command: command line, for the record
    """

    returns: str = "evaluation"
    last: int = 1
    threshold: float = 0.5
    reps: int = 2000
    seed: int = 0
    tables: tuple[str, ...] = DEFAULT_TABLES
    command: str = ""

    @property
    def bootstrap(self) -> Bootstrap:
        """How intervals are computed."""
        return Bootstrap(self.reps, self.seed)


@dataclass(frozen=True)
class Chapter:
    """The runs of a suite. Row ``i`` of ``runs`` has curve ``i`` and updates ``i``.

    :param name: name of the suite, with the number of steps if it was changed
    :param runs: ``run.json`` as columns, with ``final`` (final return), ``score`` (the same, normalized), ``area_score`` (mean
        over the training, normalized), ``steps_per_second``, ``seconds_to_threshold`` and the means of :data:`DIAGNOSTICS`
    :param curves: for each run, rows of ``timesteps``, ``value``, ``score``
    :param updates: for each run, rows of ``timesteps`` and :data:`DIAGNOSTICS`
    :param references: reference scores
    :param settings: how the report is made
    :param notes: what was left out while loading
    """

    name: str
    runs: pd.DataFrame
    curves: Sequence[pd.DataFrame]
    updates: Sequence[pd.DataFrame]
    references: ReferenceScores
    settings: Settings
    notes: Sequence[str] = field(default=())

    @property
    def tasks(self) -> list[str]:
        """All tasks, sorted."""
        return sorted(self.runs["env_id"].unique())

    @property
    def scored_tasks(self) -> list[str]:
        """Tasks with reference scores."""
        return [task for task in self.tasks if self.references.find(task) is not None]

    @property
    def unit(self) -> str:
        """Name of the normalized score, for axes."""
        units = {row[0].unit for task in self.tasks if (row := self.references.find(task)) is not None}
        return units.pop() if len(units) == 1 else "Normalized score"


def load_chapters(results: Results, settings: Settings) -> list[Chapter]:
    """Read all runs of a directory of results, a chapter per suite and changed number of steps.

    :param results: directory of results
    :param settings: how the report is made
    :raises ValueError: if runs are damaged, or there are none with the returns that are asked for
    """
    references = ReferenceScores(settings.tables)
    groups: dict[str, list[RunFiles]] = {}
    for run in results.runs():
        steps = run.document["changed"].get(LENGTH)
        groups.setdefault(run.document["suite"] + (f", {steps:,} steps" if steps else ""), []).append(run)
    chapters = [_load_chapter(name, groups[name], references, settings) for name in sorted(groups)]
    if all(chapter.runs.empty for chapter in chapters):
        reason = f"has {settings.returns} returns; imported runs need --returns training" if chapters else "has finished"
        raise ValueError(f"{results.path}: no run {reason}")
    return [chapter for chapter in chapters if not chapter.runs.empty]


def _load_chapter(name: str, files: Sequence[RunFiles], references: ReferenceScores, settings: Settings) -> Chapter:
    rows, curves, updates, empty = [], [], [], []
    for run in sorted(files, key=lambda run: (algorithm_order(run.document["algorithm"]), run.path.name)):
        curve = _evaluations(run) if settings.returns == "evaluation" else _training_returns(run)
        if curve.empty:
            empty.append(run.path.name)
            continue
        progress = run.updates() if run.has(PROGRESS) else pd.DataFrame()
        nothing = pd.Series(dtype=float)
        diagnostics = {key: sign * progress.get(column, nothing) for key, (column, sign) in DIAGNOSTICS.items()}
        update = pd.DataFrame({"timesteps": progress.get("time/total_timesteps", nothing), **diagnostics})
        curve["score"] = references.normalize(run.document["env_id"], curve["value"].to_numpy(float))
        curves.append(curve)
        updates.append(update)
        rows.append({**run.document, **_summary(run, curve, progress, settings), **update[list(DIAGNOSTICS)].mean()})
    runs = pd.DataFrame(rows)
    notes = [f"Without {settings.returns} returns, and in no figure: {', '.join(empty)}."] if empty else []
    if "backend_used" in runs:
        for task, backends in runs.groupby("env_id")["backend_used"].unique().items():
            if len(backends) > 1:
                names = ", ".join(map(str, backends))
                notes.append(f"Runs of {task} used different backends, which may differ in protocol: {names}.")
    return Chapter(name, runs, curves, updates, references, settings, notes)


def _summary(run: RunFiles, curve: pd.DataFrame, progress: pd.DataFrame, settings: Settings) -> dict[str, float]:
    last = curve.tail(settings.last if settings.returns == "evaluation" else 1)
    reached = curve[curve["score"] >= settings.threshold]["timesteps"]
    to_threshold = float("inf") if reached.empty else float("nan")
    if "time/seconds" in progress and len(reached):
        to_threshold = float(np.interp(reached.iloc[0], progress["time/total_timesteps"], progress["time/seconds"]))
    seconds = run.document.get("seconds")
    return {
        "final": float(last["value"].mean()),
        "score": float(last["score"].mean()),
        "area_score": area_under_curve(curve["timesteps"].to_numpy(float), curve["score"].to_numpy(float)),
        "steps_per_second": run.document.get("timesteps", 0) / seconds if seconds else float("nan"),
        "seconds_to_threshold": to_threshold,
    }


def _evaluations(run: RunFiles) -> pd.DataFrame:
    evaluations = run.evaluations() if run.has(EVALUATIONS) else pd.DataFrame(columns=["timesteps", "mean"])
    return evaluations.rename(columns={"mean": "value"})[["timesteps", "value"]]


def _training_returns(run: RunFiles) -> pd.DataFrame:
    """Mean returns of the last 100 episodes, at fiftieths of the training after the first episode."""
    episodes = run.episodes()
    ends = np.arange(1, _TRAINING_POINTS + 1) * run.document[LENGTH] / _TRAINING_POINTS
    ends[-1] = max(ends[-1], episodes["timesteps"].max() if len(episodes) else 0.0)
    averaged = episodes["r"].rolling(_TRAINING_EPISODES, min_periods=1).mean().to_numpy()
    counts = np.searchsorted(episodes["timesteps"], ends, side="right")
    return pd.DataFrame({"timesteps": ends[counts > 0], "value": averaged[counts[counts > 0] - 1]})


def algorithm_order(algorithm: str) -> tuple[int, str]:
    """Return a key that sorts labels of algorithms in the order of the paper, and others by name."""
    names, name = list(CLASSES), algorithm.partition(":")[0]
    return (names.index(name) if name in names else len(names), algorithm)


def title(algorithm: str) -> str:
    """Return the name of an algorithm for readers: ``"ANO (shaping=spo)"`` for ``"ano:shaping=spo"``."""
    name, _, options = algorithm.partition(":")
    name = name.upper() if name in CLASSES else name
    return f"{name} ({options.replace(',', ', ')})" if options else name
