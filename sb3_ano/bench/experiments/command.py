"""What ``python -m sb3_ano.bench run`` does with its options."""

import argparse
import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable, Sequence

from sb3_ano.bench.experiments.algorithms import NAMES
from sb3_ano.bench.experiments.estimate import Estimate, estimates
from sb3_ano.bench.experiments.plan import Run, make_plan, parse_grid
from sb3_ano.bench.experiments.pool import Backend, LocalBackend, RunProgress, execute
from sb3_ano.bench.experiments.process import RunError
from sb3_ano.bench.experiments.show import show_plan
from sb3_ano.bench.experiments.suites import Suite, load_suite
from sb3_ano.bench.experiments.training import make_model
from sb3_ano.bench.files import cores
from sb3_ano.bench.progress import reporting
from sb3_ano.bench.store import ResultsFolder, Store, check_format
from sb3_ano.envs import make_vec_env


def run_experiments(options: argparse.Namespace) -> int:
    """Plan, show the plan, and run what is not there yet.

    :param options: of the command line
    :return: exit status, 1 if a run failed
    :raises ValueError: for names or values that are not allowed, or results that were made otherwise
    :raises OSError: if the results cannot be written, or another process writes them
    """
    suite = load_suite(options.suite, options.version)
    if options.envs:
        suite = suite.with_tasks(options.envs)
    runs = make_plan(suite, options.algos or NAMES, options.seeds, parse_grid(options.grid or ()), options.steps)
    if options.address is not None and options.backend != "ray":
        raise ValueError(f"--address {options.address} is not allowed without --backend ray")
    jobs = options.jobs or max(1, cores() // options.threads)
    if options.plan:
        there = Store(options.out) if check_format(options.out) else None
        known = estimates(runs, there.documents() if there else (), suite.steps_per_second)
        show_plan(suite, runs, set(there.run_ids()) if there else set(), known, options, jobs)
        return 0
    if options.backend == "local":  # a cluster's nodes may have what this machine has not
        check_runs(suite, runs)
    with ResultsFolder(options.out) as results:
        finished = results.finished({run.run_id: run.specification() for run in runs})
        known = estimates(runs, Store(results.path).documents(), suite.steps_per_second)
        show_plan(suite, runs, finished, known, options, jobs)
        missing = [run for run in runs if run.run_id not in finished]
        failures = _execute(missing, len(runs), known, results, options, jobs) if missing else {}
    return _verdict(failures, len(runs))


def check_runs(suite: Suite, runs: Sequence[Run]) -> None:
    """Make each task, and each algorithm with each set of its hyperparameters, once: errors show before hours have passed.

    :param suite: whose tasks they are
    :param runs: of a plan
    :raises ValueError: naming what cannot be made
    """
    for module in suite.imports:
        try:
            importlib.import_module(module)
        except Exception as broken:
            raise ValueError(f"suite {suite.name!r} imports {module!r}, which cannot be imported: {broken}") from broken
    tasks: set[str] = set()
    models: set[str] = set()
    for run in runs:
        settings = repr((run.algorithm, run.hyperparameters))
        if run.env_id in tasks and settings in models:
            continue
        try:
            env = make_vec_env(run.env_id, backend=run.backend, env_kwargs=dict(run.env_kwargs))
        except Exception as unusable:  # whatever is in a user's code
            raise ValueError(f"{run.env_id} cannot be made: {unusable or repr(unusable)}") from unusable
        with contextlib.closing(env), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the size of a rollout with one environment
            if settings not in models:
                try:
                    make_model(run, env, "cpu")
                except Exception as wrong:
                    raise ValueError(f"{run.run_id} cannot be trained: {wrong}") from wrong
        tasks.add(run.env_id)
        models.add(settings)


def _execute(
    runs: Sequence[Run],
    total: int,
    known: dict[str, Estimate],
    results: ResultsFolder,
    options: argparse.Namespace,
    jobs: int,
) -> dict[str, RunError]:
    typical = [one.seconds for one in known.values() if one.seconds is not None] or [60.0]
    average = sum(typical) / len(typical)
    seconds = {run.run_id: known[run.run_id].seconds or average for run in runs}
    with reporting(sum(seconds.values()), remaining=True) as reporter:
        progress = RunProgress(reporter, seconds, total, total - len(runs))
        backend = _backend(results, options, jobs, progress.reached)
        return execute(runs, backend, results, progress)


def _backend(results: ResultsFolder, options: argparse.Namespace, jobs: int, report: Callable[[Run, int], None]) -> Backend:
    if options.backend == "local":
        return LocalBackend(results, jobs, options.threads, options.device, report)
    from sb3_ano.bench.experiments.ray_backend import RayBackend

    return RayBackend(options.address, options.jobs, options.threads, options.device, report)


def _verdict(failures: dict[str, RunError], total: int) -> int:
    if not failures:
        return 0
    for run_id, error in failures.items():
        print(f"failed: {run_id}: {error}", file=sys.stderr)
    rest = "the others are kept, and the same command tries these again"
    print(f"error: {len(failures)} of {total} runs failed; {rest}", file=sys.stderr)
    return 1
