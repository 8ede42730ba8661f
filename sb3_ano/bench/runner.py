"""Execution of a plan: checks and progress."""

import contextlib
import dataclasses
import importlib
import warnings
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, as_completed
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from sb3_ano.bench.plan import Run
from sb3_ano.bench.pool import Pool, WorkerError
from sb3_ano.bench.results import ResultsWriter
from sb3_ano.bench.training import make_model
from sb3_ano.envs import make_vec_env

_TARGET = "sb3_ano.bench.training:train_request"


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
            env = make_vec_env(run.env_id, 1, backend=run.backend, env_kwargs=dict(run.env_kwargs))
        except Exception as error:  # a task is a user's code
            raise ValueError(f"{run.env_id} cannot be made: {error or repr(error)}") from error
        with contextlib.closing(env), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the size of a rollout with one environment
            try:
                make_model(run, env)
            except Exception as error:
                raise ValueError(f"{run.algorithm} cannot be trained on {run.env_id}: {error}") from error


def show_plan(runs: Sequence[Run], finished: Collection[str]) -> None:
    """Print a table of the plan: one row per algorithm and configuration.

    :param runs: all runs of the plan
    :param finished: names of the finished runs
    """
    table = Table("algorithm", "changed", "tasks", "runs", "to train", "environment steps to train", box=None)
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        changed = ", ".join(f"{name}={value}" for name, value in run.changed.items())
        groups.setdefault((run.algorithm, changed), []).append(run)
    for names, group in [*groups.items(), (("all", ""), runs)]:
        missing = [run.total_timesteps for run in group if run.name not in finished]
        tasks = len({run.env_id for run in group})
        table.add_row(*names, *map(str, (tasks, len(group), len(missing))), f"{sum(missing):,}")
    Console().print(table)


def execute(runs: Sequence[Run], executor: Pool, results: ResultsWriter, options: Mapping[str, Any]) -> dict[str, WorkerError]:
    """Train the missing runs of a plan. Finished runs are kept, whatever happens to the others.

    :param runs: runs without results
    :param executor: pool of processes, which is closed at the end
    :param results: directory of the results
    :param options: further arguments of :func:`sb3_ano.bench.training.train`
    :return: error of each run that failed, by name
    :raises OSError: if the results cannot be written
    """
    console, errors = Console(stderr=True), {}
    try:
        futures: dict[Future[Any], Run] = {}
        for run in runs:
            request = {"run": dataclasses.asdict(run), "directory": str(results.begin(run.name).absolute()), **options}
            futures[executor.submit(_TARGET, request)] = run
        for future in track(as_completed(futures), "runs", len(runs), console=console):
            run, caught = futures.pop(future), future.exception()  # its result is a run's files
            if caught is None:
                try:
                    results.publish(run.name, future.result())
                except ValueError as damaged:
                    caught = damaged
            if caught is not None:
                errors[run.name] = error = WorkerError.of(caught)
                console.print(f"{run.name}: {error}", markup=False, highlight=False, soft_wrap=True)
                results.record_failure(run.name, error.details or error.message)
    except OSError as error:
        kept = "finished runs are kept, and the same command resumes"
        raise OSError(f"{results.path} cannot be written: {error}; {kept}") from error
    finally:
        executor.close()
    return errors
