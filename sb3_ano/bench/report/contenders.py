"""What is compared: algorithms, their settings, and the runs of both that belong together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sb3_ano.bench.report.results import SuiteResults
from sb3_ano.bench.statistics import METRICS
from sb3_ano.extras import missing_extra

try:
    import pandas as pd
except ImportError as error:
    raise missing_extra("bench", "pandas") from error

#: The order of tables and figures; other algorithms follow by name.
_ORDER = ("ppo", "trpo", "spo", "papo", "ano")
_LEARNING_RATE = "learning_rate"
_LENGTH = "total_timesteps"


@dataclass(frozen=True)
class Contender:
    """An algorithm with its settings.

    :param algorithm: label of the algorithm
    :param settings: those that its runs of one task differ in, and their values
    :param rows: its runs, as rows of :class:`SuiteResults`
    :param alternatives: number of settings among which it was chosen
    """

    algorithm: str
    settings: tuple[tuple[str, Any], ...]
    rows: tuple[int, ...]
    alternatives: int = 1

    @property
    def label(self) -> str:
        """Algorithm and settings."""
        return " ".join([self.algorithm, *(f"{name}={setting_text(value)}" for name, value in self.settings)])

    def value(self, name: str) -> Any:
        """The value of a setting, None if its runs do not differ in it."""
        return dict(self.settings).get(name)

    def without(self, name: str) -> tuple[tuple[str, Any], ...]:
        """All other settings."""
        return tuple(setting for setting in self.settings if setting[0] != name)


@dataclass(frozen=True)
class Block:
    """Runs of a contender, every seed on every task.

    :param contender: whose they are
    :param seeds: that have a run of each task
    :param rows: of :class:`SuiteResults`, shape ``(seeds, tasks)``
    :param left_out: its other runs of these tasks, as rows
    """

    contender: Contender
    seeds: tuple[int, ...]
    rows: np.ndarray
    left_out: tuple[int, ...]


def contenders(results: SuiteResults) -> list[Contender]:
    """All algorithms with all of their settings, in the order of the paper."""
    found = []
    for algorithm in sorted(results.runs["algorithm"].unique(), key=_position):
        runs = results.runs[results.runs["algorithm"] == algorithm]
        names = _varied(runs)
        settings = _settings(runs)
        keys = [tuple((name, one[name]) for name in names if name in one) for one in settings]
        for key in sorted(set(keys), key=_sorted_by):
            rows = tuple(int(row) for row, of in zip(runs.index, keys, strict=True) if of == key)
            found.append(Contender(algorithm, key, rows))
    return found


def _settings(runs: pd.DataFrame) -> list[dict[str, Any]]:
    return [{**of, _LENGTH: int(length)} for of, length in zip(runs["settings"], runs[_LENGTH], strict=True)]


def _varied(runs: pd.DataFrame) -> list[str]:
    """Settings that differ between runs of the same task; those of a task's own preset do not count."""
    tasks, settings = runs["env_id"].tolist(), _settings(runs)
    values: dict[tuple[str, str], set[Any]] = {}
    for task, of in zip(tasks, settings, strict=True):
        for name, value in of.items():
            values.setdefault((name, task), set()).add(value)
    return sorted({name for (name, _), seen in values.items() if len(seen) > 1})


def select(results: SuiteResults, everyone: Sequence[Contender]) -> list[Contender]:
    """For each algorithm its best settings at its lowest learning rate, by IQM, on the runs that are reported.

    :param results: of the suite
    :param everyone: from :func:`contenders`
    :return: one for each algorithm
    """
    chosen = []
    for algorithm in dict.fromkeys(one.algorithm for one in everyone):
        own = [one for one in everyone if one.algorithm == algorithm]
        rates = [one.value(_LEARNING_RATE) for one in own]
        lowest = min(rates, key=_key)
        candidates = [one for one, rate in zip(own, rates, strict=True) if rate == lowest]
        best = max(candidates, key=_quality(results, candidates)) if len(candidates) > 1 else candidates[0]
        chosen.append(Contender(best.algorithm, best.settings, best.rows, len(candidates)))
    return chosen


def _quality(results: SuiteResults, candidates: Sequence[Contender]) -> Any:
    """IQM over the tasks that all candidates have; where nothing is normalised, the mean rank among them."""
    blocks, tasks = rectangles(results, candidates, results.scored_tasks)
    if tasks:
        scores = results.runs["score"].to_numpy()
        values = {block.contender: METRICS["IQM"](scores[block.rows]) for block in blocks}
    else:
        final = results.runs["final"]
        means = pd.DataFrame(
            {one.label: final.iloc[list(one.rows)].groupby(results.runs["env_id"]).mean() for one in candidates}
        )
        ranks = means.rank(axis=1).mean()
        values = {one: ranks[one.label] for one in candidates}
    return lambda one: values.get(one, -np.inf)


def rectangles(results: SuiteResults, which: Sequence[Contender], tasks: Iterable[str]) -> tuple[list[Block], list[str]]:
    """Runs that can be aggregated: the tasks that all contenders have, and for each contender the seeds that it has on all.

    :param results: of the suite
    :param which: the contenders
    :param tasks: among which to look
    :return: the blocks of those that have a seed on all tasks, and the tasks
    """
    env_ids, seeds = results.runs["env_id"].to_numpy(), results.runs["seed"].to_numpy()
    found = [{(env_ids[row], int(seeds[row])): row for row in one.rows} for one in which]
    common = [task for task in tasks if all(any(task == of for of, _ in runs) for runs in found)]
    blocks = []
    for one, runs in zip(which, found, strict=True):
        whole = [seed for seed in sorted({seed for _, seed in runs}) if all((task, seed) in runs for task in common)]
        if common and whole:
            rows = np.array([[runs[task, seed] for task in common] for seed in whole])
            others = tuple(row for (task, _), row in runs.items() if task in common and row not in rows)
            blocks.append(Block(one, tuple(whole), rows, others))
    return blocks, common


def with_other(everyone: Sequence[Contender], chosen: Contender, name: str) -> list[Contender]:
    """The contenders that differ from one in a single setting at most, in the order of its values.

    :param everyone: from :func:`contenders`
    :param chosen: the one
    :param name: of the setting
    """
    return [
        one
        for one in everyone
        if one.algorithm == chosen.algorithm and one.without(name) == chosen.without(name) and one.value(name) is not None
    ]


def varied_settings(everyone: Sequence[Contender]) -> list[str]:
    """Names of all settings that differ between contenders of one algorithm."""
    return sorted({name for one in everyone for name, _ in one.settings})


def run_names(run_ids: Iterable[str]) -> list[str]:
    """Names of runs, shortened as a shell would expand them: ``..__seed{0,1,2}``."""
    seeds: dict[str, list[int]] = {}
    names: dict[str, None] = {}
    for run_id in run_ids:
        stem, separator, seed = run_id.rpartition("__seed")
        name = stem if separator and seed.isdecimal() else run_id
        names[name] = None
        if name != run_id:
            seeds.setdefault(name, []).append(int(seed))
    return [f"{name}__seed{_braces(sorted(seeds[name]))}" if name in seeds else name for name in names]


def _braces(seeds: list[int]) -> str:
    return str(seeds[0]) if len(seeds) == 1 else f"{{{','.join(map(str, seeds))}}}"


def short_label(algorithm: str) -> str:
    """``ano:identity`` for ``ano:shaping=identity``, for figures."""
    return algorithm.replace(":shaping=", ":")


def _position(algorithm: str) -> tuple[int, str]:
    name = algorithm.partition(":")[0]
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), algorithm)


def _key(value: Any) -> tuple[int, float, str]:
    """Numbers first, in their order."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (0, float(value), "")
    return (1, 0.0, str(value))


def _sorted_by(settings: tuple[tuple[str, Any], ...]) -> list[tuple[str, tuple[int, float, str]]]:
    return [(name, _key(value)) for name, value in settings]


def setting_text(value: Any) -> str:
    """A value of a setting as it is shown."""
    return f"{value:g}" if isinstance(value, float) else str(value)
