"""Execution of a plan: checks, attempts and progress."""

import contextlib
import dataclasses
import importlib
import warnings
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sb3_ano.bench.plan import Run
from sb3_ano.bench.pool import Pool, WorkerError
from sb3_ano.bench.results import ResultsWriter
from sb3_ano.bench.training import check_device, make_model
from sb3_ano.envs import make_vec_env

ATTEMPTS = 2
_TARGET = "sb3_ano.bench.training:train_request"


def check_runs(runs: Sequence[Run], device: str = "cpu", need_envs: bool = True) -> None:
    """Make each task and each configuration once, because an error should not show up after hours.

    :param runs: runs of a plan
    :param device: SB3's ``device``
    :param need_envs: whether environments that cannot be made here are an error; a cluster may have what this machine lacks
    :raises ValueError: naming what cannot be made
    """
    if need_envs:
        check_device(device)
    samples: dict[object, Run] = {(run.env_id, run.backend, run.imports): run for run in runs}
    samples |= {repr((run.algorithm, run.hyperparameters)): run for run in runs}
    for run in dict.fromkeys(samples.values()):
        try:
            for module in run.imports:
                importlib.import_module(module)
            env = make_vec_env(run.env_id, 1, backend=run.backend, env_kwargs=dict(run.env_kwargs))
        except Exception as error:  # a task is a user's code
            if not need_envs:
                continue
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


def execute(
    runs: Sequence[Run], executor: Pool, results: ResultsWriter, options: Mapping[str, Any], console: Console | None = None
) -> dict[str, WorkerError]:
    """Train the missing runs of a plan. Finished runs are kept, whatever happens to the others.

    :param runs: runs without results
    :param executor: pool of processes, which is closed at the end
    :param results: directory of the results
    :param options: further arguments of :func:`sb3_ano.bench.training.train`
    :param console: output of the progress, standard error by default
    :return: last error of each run that failed in all attempts, by name
    :raises OSError: if the results cannot be written
    """
    errors: dict[str, list[WorkerError]] = {}
    waiting: dict[Future[Any], Run] = {}
    done = dict.fromkeys((run.name for run in runs), 0.0)
    columns = [TextColumn("{task.completed:,.0f} of {task.total:,.0f} steps"), BarColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console or Console(stderr=True), speed_estimate_period=600.0) as progress:
        bar = progress.add_task("", total=sum(run.total_timesteps for run in runs))

        def reached(run: Run, steps: float) -> None:
            done[run.name] = min(steps, run.total_timesteps)
            progress.update(bar, completed=sum(done.values()))

        def submit(run: Run, resume: bool) -> None:
            directory = str(results.begin(run.name, resume).absolute())
            request = {"run": dataclasses.asdict(run), "directory": directory, **options}
            waiting[executor.submit(_TARGET, request, lambda steps: reached(run, steps))] = run

        def finish(run: Run, future: "Future[Any]") -> None:
            failed = errors.setdefault(run.name, [])
            try:
                results.publish(run.name, future.result(), attempts=len(failed) + 1)
            except Exception as caught:  # a training runs a user's code
                error = WorkerError.of(caught)
                if error.disk_is_full:
                    raise OSError(error.message) from error
                failed.append(error)
                again = len(failed) < ATTEMPTS
                text = f"{run.name}: {error}{'; it is run again' if again else ''}"
                progress.console.print(text, markup=False, highlight=False)
                if again:  # after an error from the start, which its checkpoint may lead to again
                    submit(run, error.killed)
                else:
                    results.record_failure(run.name, [attempt.details or attempt.message for attempt in failed])
            else:
                del errors[run.name]
                reached(run, run.total_timesteps)

        try:
            for run in runs:
                submit(run, True)
            while waiting:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    finish(waiting.pop(future), future)
        except OSError as error:
            kept = "finished runs are kept, and the same command resumes"
            raise OSError(f"{results.path} cannot be written: {error}; {kept}") from error
        finally:
            executor.close()
    return {name: failed[-1] for name, failed in errors.items()}
