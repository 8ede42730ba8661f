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
import rich.text
from stable_baselines3.common.vec_env import VecEnv
from tqdm import tqdm

from sb3_ano.bench.plan import Run
from sb3_ano.bench.pool import Pool, WorkerError
from sb3_ano.bench.results import ResultsWriter
from sb3_ano.bench.training import make_env, make_model, wrapped
from sb3_ano.envs.atari import atari_protocol, require_integer
from sb3_ano.envs.vec_env import existing_game

# Seconds between two looks at the progress of the runs, and between two states of the bar in a terminal and in a file.
_LOOK, _IN_TERMINAL, _IN_FILE = 1.0, 1.0, 60.0
# Seconds after which a check shows a bar.
_SILENT_SECONDS = 2.0


def check_runs(runs: Sequence[Run]) -> None:
    """Make each task once, and a model of each configuration, because an error should not show up after hours.

    Atari games with the same settings differ in nothing but the game, so one of them is made.

    :param runs: runs of a plan
    :raises ValueError: naming what cannot be made
    """
    tasks: dict[str, list[Run]] = {}
    for run in runs:
        tasks.setdefault(_task_key(run), []).append(run)

    checked: set[str] = set()
    style = {"unit": "run", "delay": _SILENT_SECONDS, "leave": False, "disable": None}
    with tqdm(total=len(runs), desc="Checking the plan", **style) as bar:
        for group in tasks.values():
            _check_task(group, checked, bar)


def _check_task(group: Sequence[Run], checked: set[str], bar: tqdm) -> None:
    """Make the environment of some runs, and the models of their configurations."""
    run = group[0]
    task = run.env_id
    try:
        for module in run.imports:
            importlib.import_module(module)
        require_integer("n_envs", run.hyperparameters["n_envs"])
        with warnings.catch_warnings():
            _ignore_upstream_warnings()
            with contextlib.closing(make_env(run, 1)) as env:
                for run in group:
                    if run.env_id != task and existing_game(run.env_id) is None:
                        raise ValueError("no installed package has this game")
                    _check_model(run, env, checked)
                    bar.update()
    except Exception as error:  # a task is a user's code
        raise ValueError(f"{run.algorithm} cannot be trained on {run.env_id}: {error or repr(error)}") from error


def _task_key(run: Run) -> str:
    """Return what the environments of a run depend on."""
    protocol = atari_protocol(run.env_id)
    # With a backend of the user's choice, a game may be missing in it.
    task: object = run.env_id if protocol is None or run.backend != "auto" else dataclasses.replace(protocol, game="")
    return repr((task, run.backend, run.imports, run.env_kwargs, run.hyperparameters.get("env_wrapper")))


def _check_model(run: Run, env: VecEnv, checked: set[str]) -> None:
    """Make a model, unless one with the same settings was made for spaces of the same kinds."""
    spaces = (type(env.observation_space), env.observation_space.shape is None or len(env.observation_space.shape))
    key = repr((run.algorithm, run.hyperparameters, spaces, type(env.action_space)))
    if key in checked:
        return
    checked.add(key)
    require_integer("n_envs", run.hyperparameters["n_envs"])
    require_integer("frame_stack", run.hyperparameters.get("frame_stack") or 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the size of a rollout with one environment
        make_model(run, wrapped(run, env, env)[0])


def _ignore_upstream_warnings() -> None:
    """Ignore gymnasium's warnings, which contain terminal codes, such as those about old versions of a task."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", "\x1b")


def show_plan(runs: Sequence[Run], finished: Collection[str]) -> None:
    """Print a table of the plan: one row per algorithm and configuration.

    :param runs: all runs of the plan
    :param finished: names of the finished runs
    """
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        changed = ", ".join(f"{name}={value}" for name, value in run.changed.items())
        groups.setdefault((run.algorithm, changed), []).append(run)

    rows: list[list[str]] = []
    for names, group in [*groups.items(), (("all", ""), runs)]:
        missing = [run.total_timesteps for run in group if run.name not in finished]
        tasks = len({run.env_id for run in group})
        rows.append([*names, f"{tasks:,}", f"{len(group):,}", f"{len(missing):,}", f"{sum(missing):,}"])

    table = rich.table.Table(box=None)
    for title in ("algorithm", "changed"):
        table.add_column(title, overflow="fold")
    for index, title in enumerate(("tasks", "runs", "to train", "steps to train"), start=2):
        # Numbers are never broken over lines: texts are, instead.
        table.add_column(title, justify="right", min_width=max(len(row[index]) for row in rows))
    for row in rows:
        cells = [rich.text.Text(cell, overflow="fold") for cell in row]  # names are not markup
        table.add_row(*cells)
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
