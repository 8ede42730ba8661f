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

# Seconds between two looks at the progress of the runs.
_LOOK = 1.0
# Seconds between two states of the bar, in a terminal and in a file.
_IN_TERMINAL = 1.0
_IN_FILE = 60.0
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
        # Environments take longer to make than models.
        tasks.setdefault(_task_key(run), []).append(run)

    checked: set[str] = set()
    style = {
        "unit": "run",
        "delay": _SILENT_SECONDS,
        "leave": False,
        "disable": None,
    }

    with tqdm(total=len(runs), desc="Checking the plan", **style) as bar:
        for group in tasks.values():
            _check_task(group, checked, bar)


def _task_key(run: Run) -> str:
    """Return what the environments of a run depend on."""
    task: object = run.env_id
    protocol = atari_protocol(run.env_id)
    # With a backend of the user's choice, a game may be missing in it.
    if protocol is not None and run.backend == "auto":
        task = dataclasses.replace(protocol, game="")
    wrapper = run.hyperparameters.get("env_wrapper")
    return repr((task, run.backend, run.imports, run.env_kwargs, wrapper))


def _check_task(
    group: Sequence[Run],
    checked: set[str],
    bar: tqdm,
) -> None:
    """Make the environment of some runs, and the models of their configurations."""
    run = group[0]
    task = run.env_id

    try:
        for module in run.imports:
            # They register tasks.
            importlib.import_module(module)
        require_integer("n_envs", run.hyperparameters["n_envs"])

        with warnings.catch_warnings():
            # Gymnasium's, which contain terminal codes, such as those about old versions of a task.
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            warnings.filterwarnings("ignore", "\x1b")

            with contextlib.closing(make_env(run, 1)) as env:
                for run in group:
                    if run.env_id != task and existing_game(run.env_id) is None:
                        raise ValueError("no installed package has this game")
                    _check_model(run, env, checked)
                    bar.update()
    # A task is a user's code, which can raise anything.
    except Exception as error:
        raise ValueError(f"{run.algorithm} cannot be trained on {run.env_id}: {error or repr(error)}") from error


def _check_model(run: Run, env: VecEnv, checked: set[str]) -> None:
    """Make a model, unless one with the same settings was made for spaces of the same kinds."""
    observations = env.observation_space
    dimensions = None
    if observations.shape is not None:
        dimensions = len(observations.shape)
    spaces = (type(observations), dimensions, type(env.action_space))
    # Spaces of the same kinds take the same policies.
    key = repr((run.algorithm, run.hyperparameters, spaces))
    if key in checked:
        return
    checked.add(key)

    require_integer("n_envs", run.hyperparameters["n_envs"])
    require_integer("frame_stack", run.hyperparameters.get("frame_stack") or 1)

    with warnings.catch_warnings():
        # About the size of a rollout with one environment.
        warnings.simplefilter("ignore")
        make_model(run, wrapped(run, env))


def show_plan(runs: Sequence[Run], finished: Collection[str]) -> None:
    """Print a table of the plan: one row per algorithm and configuration.

    :param runs: all runs of the plan
    :param finished: names of the finished runs
    """
    # A row for tasks and seeds together
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        changed = [f"{name}={value}" for name, value in run.changed.items()]
        groups.setdefault((run.algorithm, ", ".join(changed)), []).append(run)
    # The last row is the sum.
    groups["all", ""] = list(runs)

    rows = []
    for names, group in groups.items():
        missing = []
        tasks = set()
        for run in group:
            tasks.add(run.env_id)
            if run.name not in finished:
                missing.append(run.total_timesteps)
        rows.append([*names, f"{len(tasks):,}", f"{len(group):,}", f"{len(missing):,}", f"{sum(missing):,}"])

    table = rich.table.Table(box=None)
    for title in ("algorithm", "changed"):
        table.add_column(title, overflow="fold")
    for index, title in enumerate(("tasks", "runs", "to train", "steps to train"), start=2):
        # Numbers are never broken over lines: texts are, instead.
        width = max(len(row[index]) for row in rows)
        table.add_column(title, justify="right", min_width=width)

    for row in rows:
        # Names are not markup.
        cells = [rich.text.Text(cell, overflow="fold") for cell in row]
        table.add_row(*cells)

    rich.print(table)


def execute(
    runs: Sequence[Run],
    executor: Pool,
    results: ResultsWriter,
    options: Mapping[str, Any],
) -> dict[str, WorkerError]:
    """Train the missing runs of a plan. Finished runs are kept, whatever happens to the others.

    :param runs: runs without results
    :param executor: pool of processes, which is closed at the end
    :param results: directory of the results
    :param options: further arguments of :func:`sb3_ano.bench.training.train`
    :return: error of each run that failed, by name
    :raises OSError: if the results cannot be written
    """
    # Errors of runs do not end the others; errors of the disk do.
    errors = {}
    try:
        futures = {}
        for run in runs:
            directory = results.begin(run.name).absolute()
            request = {
                "run": dataclasses.asdict(run),
                "directory": str(directory),
                **options,
            }
            futures[executor.submit("sb3_ano.bench.training:train_request", request)] = run

        for run, future in _ended(futures, results):
            error = _published(run, future, results)
            if error is not None:
                errors[run.name] = error
                # Now, because others may train for days.
                tqdm.write(f"{run.name}: {error}", file=sys.stderr)
                results.record_failure(run.name, error.details or error.message)
    except OSError as error:
        raise OSError(f"{results.path} cannot be written: {error}; the same command resumes") from error
    finally:
        executor.close()

    return errors


def _published(
    run: Run,
    future: Future[Any],
    results: ResultsWriter,
) -> WorkerError | None:
    """Add a run that has ended to the results, or return its error."""
    error = future.exception()
    if error is None:
        try:
            # The result of a run on another machine is its files.
            results.publish(run.name, future.result())
        except ValueError as damaged:
            error = damaged

    if error is None:
        return None
    return WorkerError.of(error)


def _ended(futures: dict[Future[Any], Run], results: ResultsWriter) -> Iterator[tuple[Run, Future[Any]]]:
    """Yield the runs as they end, and show meanwhile the steps of all runs, which are read from their Monitor files."""
    runs = len(futures)
    total = sum(run.total_timesteps for run in futures.values())

    def steps() -> int:
        missing = 0
        for run in futures.values():
            # The last rollout may end after the last step.
            missing += max(0, run.total_timesteps - results.timesteps(run.name))
        return total - missing

    # A file keeps all states.
    interval = _IN_FILE
    if sys.stderr.isatty():
        interval = _IN_TERMINAL
    style = {
        "unit": "step",
        "unit_scale": True,
        "smoothing": 0.0,
        "miniters": 0,
        "mininterval": interval,
    }

    with tqdm(total=total, initial=steps(), **style) as bar:
        while futures:
            for future in wait(futures, _LOOK, FIRST_COMPLETED).done:
                yield futures.pop(future), future
            bar.set_postfix_str(f"{runs - len(futures)} of {runs} runs", refresh=False)
            done = steps()
            # A run that resumes goes back to its checkpoint.
            bar.initial = min(bar.initial, done)
            bar.update(done - bar.n)
