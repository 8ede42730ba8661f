"""Execution of a plan: checks and progress."""

import contextlib
import dataclasses
import importlib
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import rich.table
from tqdm import tqdm

from sb3_ano.bench.plan import Run
from sb3_ano.bench.pool import Pool, WorkerError
from sb3_ano.bench.results import ResultsWriter
from sb3_ano.bench.training import make_env, make_model, wrapped
from sb3_ano.envs.atari import require_integer

# Seconds between two looks at the progress of the runs, and between two states of the bar in a terminal and in a file.
_LOOK, _IN_TERMINAL, _IN_FILE = 1.0, 1.0, 60.0


def check_runs(runs: Sequence[Run]) -> None:
    """Make each task and each configuration once, because an error should not show up after hours.

    :param runs: runs of a plan
    :raises ValueError: naming what cannot be made
    """
    samples: dict[object, Run] = {(run.env_id, run.backend, run.imports): run for run in runs}
    samples |= {repr((run.algorithm, run.hyperparameters)): run for run in runs}
    for run in dict.fromkeys(samples.values()):
        try:
            for module in run.imports:
                importlib.import_module(module)
            require_integer("n_envs", run.hyperparameters["n_envs"])
            require_integer("frame_stack", run.hyperparameters.get("frame_stack") or 1)
            with contextlib.closing(make_env(run, 1)) as env, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about the size of a rollout with one environment
                make_model(run, wrapped(run, env, env)[0])
        except Exception as error:  # a task is a user's code
            raise ValueError(f"{run.algorithm} cannot be trained on {run.env_id}: {error or repr(error)}") from error


def show_plan(runs: Sequence[Run], finished: Collection[str]) -> None:
    """Print a table of the plan: one row per algorithm and configuration.

    :param runs: all runs of the plan
    :param finished: names of the finished runs
    """
    titles = ("algorithm", "changed", "tasks", "runs", "to train", "environment steps to train")
    table = rich.table.Table(*(rich.table.Column(title, overflow="fold") for title in titles), box=None)
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        changed = ", ".join(f"{name}={value}" for name, value in run.changed.items())
        groups.setdefault((run.algorithm, changed), []).append(run)
    for names, group in [*groups.items(), (("all", ""), runs)]:
        missing = [run.total_timesteps for run in group if run.name not in finished]
        tasks = len({run.env_id for run in group})
        table.add_row(*names, *map(str, (tasks, len(group), len(missing))), f"{sum(missing):,}")
    rich.print(table)


def execute(runs: Sequence[Run], executor: Pool, results: ResultsWriter, options: Mapping[str, Any]) -> dict[str, WorkerError]:
    """Train the missing runs of a plan. Finished runs are kept, whatever happens to the others.

    :param runs: runs without results
    :param executor: pool of processes, which is closed at the end
    :param results: directory of the results
    :param options: further arguments of :func:`sb3_ano.bench.training.train`
    :return: error of each run that failed, by name
    :raises OSError: if the results cannot be written
    """
    errors: dict[str, WorkerError] = {}
    try:
        futures: dict[Future[Any], Run] = {}
        for run in runs:
            request = {"run": dataclasses.asdict(run), "directory": str(results.begin(run.name).absolute()), **options}
            futures[executor.submit("sb3_ano.bench.training:train_request", request)] = run
        for run, future in _ended(futures, results):
            caught = future.exception()  # its result is a run's files
            if caught is None:
                try:
                    results.publish(run.name, future.result())
                except ValueError as damaged:
                    caught = damaged
            if caught is not None:
                errors[run.name] = error = WorkerError.of(caught)
                tqdm.write(f"{run.name}: {error}", file=sys.stderr)
                results.record_failure(run.name, error.details or error.message)
    except OSError as error:
        raise OSError(f"{results.path} cannot be written: {error}; the same command resumes") from error
    finally:
        executor.close()
    return errors


def _ended(futures: dict[Future[Any], Run], results: ResultsWriter) -> Iterator[tuple[Run, Future[Any]]]:
    """Yield the runs as they end, and show meanwhile the steps of all runs, which are read from their Monitor files."""
    runs, total = len(futures), sum(run.total_timesteps for run in futures.values())

    def steps() -> int:
        return total - sum(max(0, run.total_timesteps - results.timesteps(run.name)) for run in futures.values())

    style = {"unit": "step", "unit_scale": True, "smoothing": 0.0, "miniters": 0}
    with tqdm(total=total, initial=steps(), mininterval=_IN_TERMINAL if sys.stderr.isatty() else _IN_FILE, **style) as bar:
        while futures:
            for future in wait(futures, _LOOK, FIRST_COMPLETED).done:
                yield futures.pop(future), future
            bar.set_postfix_str(f"{runs - len(futures)} of {runs} runs", refresh=False)
            bar.initial = min(bar.initial, done := steps())  # a run that resumes goes back to its checkpoint
            bar.update(done - bar.n)
