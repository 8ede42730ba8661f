"""Does the fast path learn as well as SB3's PPO? The same task, seeds and hyperparameters, compared pair by pair."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from sb3_ano.bench.cases import Contender
from sb3_ano.bench.files import read_json
from sb3_ano.bench.paired import half_width, paired_difference
from sb3_ano.bench.processes import describe_contender
from sb3_ano.bench.progress import Reporter

ENVS = ("HalfCheetah-v4", "Hopper-v4")
CONTENDERS: tuple[Contender, ...] = (
    Contender("sb3", "sb3", "sb3"),
    Contender("fast-float32", "ano", "ano", {"shaping": "ppo", "torch_compile": True}),
    Contender("fast-bfloat16", "ano", "ano", {"shaping": "ppo", "torch_compile": True, "precision": "bfloat16"}),
)
REFERENCE = CONTENDERS[0].name
#: What is compared, and what it is called.
MEASURES = {"final_return": "last tenth of training", "evaluation_return": "deterministic evaluation"}
MARGIN = 0.2
_CURVE_POINTS = 50


@dataclass(frozen=True)
class Settings:
    """What all runs share.

    :param steps: environment steps of a training
    :param eval_episodes: deterministic episodes after it
    :param n_envs: environments of a run
    :param n_steps: steps of each in a rollout
    """

    steps: int = 300_000
    eval_episodes: int = 20
    n_envs: int = 8
    n_steps: int = 256


@dataclass(frozen=True)
class Run:
    """One training.

    :param env_id: the task, in gymnasium's name
    :param contender: how
    :param seed: of model and environments
    :param settings: shared with the others
    """

    env_id: str
    contender: Contender
    seed: int
    settings: Settings

    @property
    def name(self) -> str:
        """For a reader, and as a file."""
        return f"{self.env_id.replace('/', '-')}_{self.contender.name}_{self.seed}"

    def specification(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "env_id": self.env_id,
            "seed": self.seed,
            "contender": describe_contender(self.contender),
            "settings": dataclasses.asdict(self.settings),
        }

    def file(self, folder: Path) -> Path:
        """Where its result is kept."""
        return folder / "runs" / f"{self.name}.json"


def all_runs(envs: Iterable[str], contenders: Sequence[Contender], seeds: int, settings: Settings) -> list[Run]:
    """Every run, seed by seed, so that an interrupted comparison has whole pairs."""
    tasks = list(envs)
    return [Run(env_id, contender, seed, settings) for seed in range(seeds) for env_id in tasks for contender in contenders]


def finished(runs: Iterable[Run], folder: Path) -> dict[Run, dict[str, Any]]:
    """Results that are there.

    :param runs: those to look for
    :param folder: of the results
    :raises ValueError: if one was made with other settings
    """
    results = {}
    for run in runs:
        content = read_json(run.file(folder))
        if content is None:
            continue
        if content.get("spec") != run.specification():
            raise ValueError(f"{run.file(folder)} was made with other settings; --force runs again, --out goes elsewhere")
        results[run] = content
    return results


class RunPool:
    """Runs in processes of one thread each, so many at a time.

    :param folder: of the results
    :param reporter: progress, in environment steps
    """

    def __init__(self, folder: Path, reporter: Reporter) -> None:
        self._folder = folder
        self._reporter = reporter
        self._lock = threading.Lock()
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._stopped = False

    def execute(self, runs: Sequence[Run], jobs: int) -> list[str]:
        """Train.

        :param runs: those without a result
        :param jobs: processes at a time
        :return: a line for each run that failed
        """
        failures = []
        with ThreadPoolExecutor(jobs) as executor:
            try:
                for future in as_completed([executor.submit(self._execute, run) for run in runs]):
                    line = future.result()
                    if line is not None:
                        failures.append(line)
                        self._reporter.note(line)
            finally:
                self._stop()
        return failures

    def _stop(self) -> None:
        """End what still runs; runs that wait do not start."""
        with self._lock:
            self._stopped = True
            for process in self._processes.values():
                process.kill()

    def _execute(self, run: Run) -> str | None:
        with tempfile.TemporaryFile() as log:
            with self._lock:
                if self._stopped:
                    return None
                process = self._start(run, log)
                self._processes[run.name] = process
            self._describe()
            self._follow(process, run.settings.steps)
            status = process.wait()
            with self._lock:
                del self._processes[run.name]
            self._describe()
            if status == 0 or self._stopped:
                return None
            log.seek(0)
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
            return f"{run.name}: {lines[-1] if lines else f'the process ended with status {status}'}"

    def _start(self, run: Run, log: Any) -> subprocess.Popen[str]:
        request = {"spec": run.specification(), "output": str(run.file(self._folder).absolute())}
        one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), "1")
        return subprocess.Popen(
            [sys.executable, "-m", "sb3_ano.bench.parity_run", json.dumps(request)],
            stdin=subprocess.PIPE,  # its end tells the run that we are no more
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **one, "PYTHONWARNINGS": "ignore"},
        )

    def _follow(self, process: subprocess.Popen[str], steps: int) -> None:
        """Turn the numbers that a run prints into progress."""
        assert process.stdin is not None
        assert process.stdout is not None
        done = 0
        with process.stdin, process.stdout:
            for line in process.stdout:
                if line.strip().isdecimal():
                    reached = min(int(line), steps)
                    self._reporter.advance(reached - done)
                    done = reached
        if process.wait() == 0:
            self._reporter.advance(steps - done)

    def _describe(self) -> None:
        with self._lock:
            self._reporter.describe(", ".join(self._processes) or "done")


def summarise(results: Mapping[Run, Mapping[str, Any]]) -> dict[str, Any]:
    """Means, paired differences and intervals.

    :param results: of all runs that are there
    :return: ``comparisons`` (one for each environment, contender and measure), ``speed``, and where the numbers are from
    """
    comparisons, speed = [], []
    for env_id, name, runs in _groups(results):
        contents = [results[run] for run in runs]
        rate = [content["steps"] / content["train_seconds"] for content in contents]
        seconds = median(content["train_seconds"] for content in contents)
        speed.append({"env_id": env_id, "contender": name, "train_seconds": seconds, "steps_per_second": median(rate)})
        for measure in MEASURES:
            row: dict[str, Any] = {"env_id": env_id, "contender": name, "measure": measure, "n": len(runs)}
            row["mean"] = fmean(content[measure] for content in contents)
            row["per_seed"] = {str(run.seed): results[run][measure] for run in runs}
            row["against_sb3"] = None if name == REFERENCE else _against_reference(results, env_id, name, measure)
            comparisons.append(row)
    any_result: Mapping[str, Any] = next(iter(results.values()), {})
    return {
        "comparisons": comparisons,
        "speed": speed,
        "margin": MARGIN,
        "settings": [dataclasses.asdict(settings) for settings in {run.settings: None for run in results}],
        "dates": sorted({content["date"][:10] for content in results.values()}),
        "machine": any_result.get("machine"),
        "versions": any_result.get("versions"),
    }


def _groups(results: Mapping[Run, Any]) -> Iterator[tuple[str, str, list[Run]]]:
    """Runs by environment and contender, in seed order; contenders in the order of the table."""
    order = [contender.name for contender in CONTENDERS]
    keys = {(run.env_id, run.contender.name) for run in results}
    for env_id, name in sorted(keys, key=lambda key: (key[0], order.index(key[1]))):
        runs = [run for run in results if (run.env_id, run.contender.name) == (env_id, name)]
        yield env_id, name, sorted(runs, key=lambda run: run.seed)


def _against_reference(
    results: Mapping[Run, Mapping[str, Any]], env_id: str, name: str, measure: str
) -> dict[str, Any] | None:
    """The paired difference over the seeds that both have, or None if these are fewer than two."""

    def values(of: str) -> dict[int, float]:
        runs = [run for run in results if run.env_id == env_id and run.contender.name == of]
        return {run.seed: results[run][measure] for run in runs}

    own, reference = values(name), values(REFERENCE)
    seeds = sorted(own.keys() & reference.keys())
    if len(seeds) < 2:
        return None
    difference = paired_difference([own[seed] for seed in seeds], [reference[seed] for seed in seeds], margin=MARGIN)
    return dataclasses.asdict(difference)


def markdown(summary: Mapping[str, Any]) -> str:
    """The summary as Markdown.

    :param summary: from :func:`summarise`
    """
    parts = []
    for measure, title in MEASURES.items():
        parts.append(f"Return, {title}:\n\n" + "\n".join(_comparison_lines(summary, measure)))
    lines = ["| environment | contender | seconds | steps/s |", "|---|---|--:|--:|"]
    for row in summary["speed"]:
        lines.append(f"| {row['env_id']} | {row['contender']} | {row['train_seconds']:.1f} | {row['steps_per_second']:,.0f} |")
    parts.append("Training time, median of the runs, several at a time on one machine:\n\n" + "\n".join(lines))
    parts.append(_origin(summary))
    return "\n\n".join(parts) + "\n"


def _comparison_lines(summary: Mapping[str, Any], measure: str) -> list[str]:
    margin = f"{100 * summary['margin']:.0f} %"
    lines = [
        f"| environment | contender | seeds | mean | minus sb3 (95% interval) | bootstrap | share of sb3 (interval) | "
        f"within {margin} | interval within |",
        "|---|---|--:|--:|--:|--:|--:|---|---|",
    ]
    for row in summary["comparisons"]:
        if row["measure"] != measure:
            continue
        cells = [row["env_id"], row["contender"], str(row["n"]), f"{row['mean']:.1f}"]
        found = row["against_sb3"]
        if found is None:
            cells += [""] * 5
        else:
            low, high = (100 * share for share in found["share_interval"])
            cells.append("{:+.1f} ({:+.1f} to {:+.1f})".format(found["difference"], *found["t_interval"]))
            cells.append("{:+.1f} to {:+.1f}".format(*found["bootstrap_interval"]))
            cells.append(f"{100 * found['share']:+.1f} % ({low:+.1f} to {high:+.1f})")
            cells += ["yes" if found[key] else "no" for key in ("within", "interval_within")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _origin(summary: Mapping[str, Any]) -> str:
    machine, numbers = summary["machine"] or {}, summary["versions"] or {}
    settings = "; ".join(", ".join(f"{name} {value}" for name, value in each.items()) for each in summary["settings"])
    versions = ", ".join(f"{name} {number}" for name, number in numbers.items())
    return f"{', '.join(summary['dates'])}; {machine.get('cpu')}, {machine.get('cores')} cores; {settings}; {versions}."


Curve = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def learning_curves(results: Mapping[Run, Mapping[str, Any]]) -> dict[str, dict[str, Curve]]:
    """Mean training return over the seeds with its 95% interval, at common steps.

    :param results: of all runs that are there
    :return: for each environment and contender: steps, mean, lower and upper end, each ``(points,)``
    """
    curves: dict[str, dict[str, Curve]] = {}
    for env_id, name, runs in _groups(results):
        grid = np.linspace(0.0, max(results[run]["steps"] for run in runs), _CURVE_POINTS + 1)
        each = np.stack([_binned(results[run]["episodes"], grid) for run in runs])
        mean = each.mean(axis=0)
        half = np.array([half_width(column) for column in each.T]) if len(runs) > 1 else np.zeros_like(mean)
        curves.setdefault(env_id, {})[name] = (grid[1:], mean, mean - half, mean + half)
    return curves


def _binned(episodes: Mapping[str, Sequence[float]], grid: np.ndarray) -> np.ndarray:
    """Mean return of the episodes that ended between two points of ``grid``; gaps are interpolated."""
    returns = np.asarray(episodes["returns"], float)
    place = np.searchsorted(grid, np.asarray(episodes["timesteps"]), side="left").clip(1, len(grid) - 1) - 1
    count = np.bincount(place, minlength=len(grid) - 1)
    total = np.bincount(place, weights=returns, minlength=len(grid) - 1)
    filled = np.flatnonzero(count)
    return np.interp(np.arange(len(grid) - 1), filled, total[filled] / count[filled])
