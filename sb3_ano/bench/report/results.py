"""What the report needs of the runs: a row and a few curves of each, suite by suite."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sb3_ano.bench.scores import ReferenceScores
from sb3_ano.bench.statistics import area_under_curve, time_to_threshold, window_means
from sb3_ano.bench.store import Store
from sb3_ano.extras import missing_extra

try:
    import pandas as pd
except ImportError as error:
    raise missing_extra("bench", "pandas") from error

#: Where scores may come from, and the table that has them.
SCORES = {"evaluation": "evaluations", "training": "episodes"}
#: Diagnostics that are drawn; those that a store does not have are left out.
DIAGNOSTICS = ("approx_kl", "ratio_max", "clip_fraction", "entropy")
# SB3 logs the entropy with the sign that it has in the loss.
_LOGGED = {"entropy": ("entropy_loss", -1.0)}
# Points of a curve of training episodes, and of one of evaluations where a run does not tell its own number.
_POINTS = {"evaluation": 20, "training": 50}
_MOST_POINTS = 1000
#: Share of the training whose episodes make the final score, where scores are those of the training.
LAST = 0.1


@dataclass(frozen=True)
class SuiteResults:
    """The runs of a suite. Row ``i`` of ``runs`` belongs to row ``i`` of the arrays.

    :param name: of the suite
    :param runs: the store's columns, and ``steps_per_second``; ``final`` (mean return at the end of the training) and
        ``score`` (the same, normalised); ``area`` (mean return over the training) and ``area_score``; ``seconds_to_threshold``
    :param fractions: of the training at which curves have their points, shape ``(points,)``
    :param returns: mean returns, shape ``(runs, points)``
    :param scores: the same, normalised; NaN where reference scores are missing
    :param diagnostics: by name, shape ``(runs, points)``, NaN where there are none
    :param references: by which returns were normalised
    :param empty: runs without any episode, which are in nothing of this
    """

    name: str
    runs: pd.DataFrame
    fractions: np.ndarray
    returns: np.ndarray
    scores: np.ndarray
    diagnostics: dict[str, np.ndarray]
    references: ReferenceScores
    empty: tuple[str, ...] = field(default=())

    @property
    def tasks(self) -> list[str]:
        """All tasks, in the order of their names."""
        return sorted(self.runs["env_id"].unique())

    @property
    def scored_tasks(self) -> list[str]:
        """The tasks that have reference scores."""
        return [task for task in self.tasks if self.references.find(task) is not None]


def load_results(
    store: Store, references: ReferenceScores, kind: str = "evaluation", threshold: float = 0.5
) -> list[SuiteResults]:
    """All runs of a store.

    :param store: where they are
    :param references: by which returns are normalised
    :param kind: ``"evaluation"`` takes deterministic evaluations, ``"training"`` the episodes of the training
    :param threshold: normalised score whose time is measured
    :raises ValueError: for another ``kind``, or if there are no runs
    """
    if kind not in SCORES:
        raise ValueError(f"score={kind!r} is not allowed; allowed are {', '.join(SCORES)}")
    runs = store.runs()
    if runs.empty:
        raise ValueError(f"{store.path} has no finished runs")
    return [
        _load_suite(store, str(name), of_suite.reset_index(drop=True), references, kind, threshold)
        for name, of_suite in runs.groupby("suite", sort=True)
    ]


def _load_suite(
    store: Store, name: str, runs: pd.DataFrame, references: ReferenceScores, kind: str, threshold: float
) -> SuiteResults:
    n_points = _n_points(runs, kind)
    fractions = np.arange(1, n_points + 1) / n_points
    returns = np.full((len(runs), len(fractions)), np.nan)
    final, to_threshold = np.full((2, len(runs)), np.nan)
    diagnostics = {name: np.full_like(returns, np.nan) for name in DIAGNOSTICS}
    # Task by task: the episodes of all runs together may be more than fits into memory.
    for env_id, of_task in runs.groupby("env_id", sort=False):
        rows, lengths = of_task.index.to_numpy(), of_task["total_timesteps"].to_numpy(float)
        run_ids = of_task["run_id"].tolist()
        episodes = _Samples(store.table(SCORES[kind], run_ids), run_ids, lengths)
        curves = episodes.windows(n_points) if kind == "training" else episodes.evaluations()
        final[rows] = episodes.final() if kind == "training" else [_last(curve) for _, _, curve in curves]
        for row, (steps, seconds, values) in zip(rows, curves, strict=True):
            if len(values):
                # The last evaluation follows a whole rollout, a little after the number of steps that was asked for.
                length = runs["total_timesteps"][row]
                returns[row] = np.interp(fractions * length, np.minimum(steps, length), values)
                to_threshold[row] = time_to_threshold(seconds, references.normalise(str(env_id), values), threshold)
        logged = _Samples(store.table("diagnostics", run_ids), run_ids, lengths)
        for diagnostic, values in diagnostics.items():
            column, sign = _LOGGED.get(diagnostic, (diagnostic, 1.0))
            values[rows] = sign * logged.window_means(column, n_points)
    return _assemble(name, runs, fractions, returns, final, to_threshold, diagnostics, references)


def _n_points(runs: pd.DataFrame, kind: str) -> int:
    if kind == "evaluation" and "evaluation" in runs:
        return min(_MOST_POINTS, *(int(evaluation["points"]) for evaluation in runs["evaluation"]))
    return _POINTS[kind]


def _assemble(
    name: str,
    runs: pd.DataFrame,
    fractions: np.ndarray,
    returns: np.ndarray,
    final: np.ndarray,
    to_threshold: np.ndarray,
    diagnostics: dict[str, np.ndarray],
    references: ReferenceScores,
) -> SuiteResults:
    whole = np.isfinite(final) & np.isfinite(returns).all(axis=1)
    tasks = runs["env_id"].tolist()
    scores = np.array([references.normalise(task, curve) for task, curve in zip(tasks, returns, strict=True)])
    area = np.array([area_under_curve(fractions, curve) for curve in returns])
    runs = runs.assign(
        steps_per_second=runs["total_timesteps"] / runs["wall_seconds"],
        final=final,
        score=[float(references.normalise(task, value)) for task, value in zip(tasks, final, strict=True)],
        area=area,
        area_score=[float(references.normalise(task, value)) for task, value in zip(tasks, area, strict=True)],
        seconds_to_threshold=to_threshold,
    )
    empty = tuple(runs["run_id"][~whole])
    return SuiteResults(
        name,
        runs[whole].reset_index(drop=True),
        fractions,
        returns[whole],
        scores[whole],
        {key: values[whole] for key, values in diagnostics.items() if np.isfinite(values[whole]).any()},
        references,
        empty,
    )


Curve = tuple[np.ndarray, np.ndarray, np.ndarray]


class _Samples:
    """Rows of several runs.

    :param table: with the columns run_id and timesteps
    :param run_ids: of all runs, with rows or without
    :param lengths: of the runs, environment steps, shape ``(runs,)``
    """

    def __init__(self, table: pd.DataFrame, run_ids: Sequence[str], lengths: np.ndarray) -> None:
        self._table, self._lengths = table, lengths
        self._runs = pd.Categorical(table["run_id"], categories=list(run_ids)).codes.astype(np.int64)
        self._progress = table["timesteps"].to_numpy(float) / lengths[self._runs]

    def evaluations(self) -> list[Curve]:
        """For each run, steps, seconds and mean return of its evaluations."""
        means = self._table.groupby([self._runs, "timesteps"])[["wall_seconds", "episode_return"]].mean()
        run, steps = (means.index.get_level_values(level).to_numpy() for level in (0, 1))
        return [(steps[run == number], *means.to_numpy()[run == number].T) for number in range(len(self._lengths))]

    def windows(self, n_windows: int) -> list[Curve]:
        """For each run, end in steps, mean seconds and mean return of those windows in which episodes ended."""
        seconds, returns = (self.window_means(column, n_windows) for column in ("wall_seconds", "episode_return"))
        curves = []
        for length, when, values in zip(self._lengths, seconds, returns, strict=True):
            there = ~np.isnan(values)
            ends = length * np.arange(1, n_windows + 1) / n_windows
            curves.append((ends[there], when[there], values[there]))
        return curves

    def window_means(self, column: str, n_windows: int) -> np.ndarray:
        """Means of a column in windows of the training, shape ``(runs, n_windows)``, NaN where there are no rows."""
        if column not in self._table:
            return np.full((len(self._lengths), n_windows), np.nan)
        # A row at the very end of a window belongs to it; algorithms may go on for a part of a rollout after the last.
        window = np.clip(np.ceil(self._progress * n_windows).astype(np.int64) - 1, 0, n_windows - 1)
        groups = self._runs * n_windows + window
        values = window_means(groups, self._table[column].to_numpy(float), len(self._lengths) * n_windows)
        return values.reshape(-1, n_windows)

    def final(self) -> np.ndarray:
        """Mean return of the episodes that ended in the last part of the training, or of the last one; shape ``(runs,)``."""
        returns = self._table["episode_return"].to_numpy(float)
        late = self._progress > 1.0 - LAST
        means = window_means(self._runs[late], returns[late], len(self._lengths))
        last = self._table["episode_return"].groupby(self._runs).last().reindex(range(len(self._lengths))).to_numpy()
        return np.where(np.isnan(means), last, means)


def _last(values: np.ndarray) -> float:
    return float(values[-1]) if len(values) else np.nan
