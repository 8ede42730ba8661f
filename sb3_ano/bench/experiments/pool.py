"""Execution of a plan: attempts, failures, and what is finished; where the trainings run is a backend's business."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol

from sb3_ano.bench.experiments.plan import Run
from sb3_ano.bench.experiments.process import RunError, TrainingProcess
from sb3_ano.bench.progress import Reporter
from sb3_ano.bench.store import ResultsFolder

ATTEMPTS = 2


class Backend(Protocol):
    """Where trainings run."""

    def submit(self, run: Run) -> "Future[Mapping[str, bytes] | None]":
        """Start a training as soon as there is room for it.

        :return: its files by name, or None if they are in its unfinished folder already; :class:`RunError` where it failed
        """

    def close(self) -> None:
        """End what still runs."""


class LocalBackend:
    """Trainings in processes of this machine.

    :param results: where they go
    :param jobs: processes at a time
    :param threads: of each
    :param device: SB3's ``device``
    :param report: gets a run and the number of its steps that are done; called from several threads
    """

    def __init__(
        self, results: ResultsFolder, jobs: int, threads: int, device: str, report: Callable[[Run, int], None]
    ) -> None:
        self._results, self._threads, self._device, self._report = results, threads, device, report
        self._executor = ThreadPoolExecutor(jobs)
        self._lock = threading.Lock()
        self._processes: set[TrainingProcess] = set()
        self._stopped = False

    def submit(self, run: Run) -> "Future[Mapping[str, bytes] | None]":
        """See :class:`Backend`."""
        return self._executor.submit(self._train, run)

    def _train(self, run: Run) -> None:
        held = () if self._results.lock is None else (self._results.lock,)
        with self._lock:
            if self._stopped:
                raise RunError("stopped")
            try:
                folder = self._results.begin(run.run_id)
                process = TrainingProcess(run, folder, self._threads, self._device, held)
            except OSError as error:
                raise RunError(str(error), number=error.errno) from error
            self._processes.add(process)
        try:
            process.follow(lambda done: self._report(run, done))
        finally:
            with self._lock:
                self._processes.remove(process)

    def close(self) -> None:
        """End what still runs; runs that wait do not start."""
        with self._lock:
            self._stopped = True
            for process in self._processes:
                process.kill()
        self._executor.shutdown(cancel_futures=True)


class RunProgress:
    """Progress of a plan, in seconds that its runs are expected to take.

    :param reporter: the bar
    :param seconds: expected of each run, by name
    :param total: number of runs of the plan
    :param finished: number of those that are there already
    """

    def __init__(self, reporter: Reporter, seconds: Mapping[str, float], total: int, finished: int) -> None:
        self._reporter, self._seconds = reporter, seconds
        self._total, self._finished = total, finished
        self._shares: dict[str, float] = {}
        self._lock = threading.Lock()

    def reached(self, run: Run, done: int) -> None:
        """So many steps of a run are done."""
        with self._lock:
            self._set(run, min(done / run.total_timesteps, 1.0))

    def finish(self, run: Run) -> None:
        """A run is there."""
        with self._lock:
            self._set(run, 1.0)
            del self._shares[run.run_id]
            self._finished += 1
            self._describe()

    def fail(self, run: Run, message: str, again: bool) -> None:
        """An attempt has failed."""
        with self._lock:
            if again:
                self._set(run, 0.0)
                self._shares.pop(run.run_id, None)
            self._reporter.note(f"{run.run_id}: {message}{'; it is run again' if again else ''}")
            self._describe()

    def _set(self, run: Run, share: float) -> None:
        self._reporter.advance((share - self._shares.get(run.run_id, 0.0)) * self._seconds[run.run_id])
        if run.run_id not in self._shares:
            self._shares[run.run_id] = share
            self._describe()
        self._shares[run.run_id] = share

    def _describe(self) -> None:
        self._reporter.describe(f"{self._finished} of {self._total} runs")


def execute(
    runs: Sequence[Run], backend: Backend, results: ResultsFolder, progress: RunProgress, attempts: int = ATTEMPTS
) -> dict[str, RunError]:
    """Train what is not there yet. What is finished is kept, whatever happens to the rest.

    :param runs: those without results
    :param backend: where they run; it is closed
    :param results: where they go
    :param progress: told of everything
    :param attempts: tries of a run that fails
    :return: the last error of each run that failed for good, by name
    :raises OSError: if the results cannot be written
    """
    errors: dict[str, list[RunError]] = {}
    full: RunError | None = None
    try:
        waiting = {backend.submit(run): run for run in runs}
        while waiting and full is None:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                run = waiting.pop(future)
                tried = errors.setdefault(run.run_id, [])
                try:
                    _keep(run, future, results, len(tried) + 1)
                except RunError as error:
                    full = error if error.out_of_space else full
                    tried.append(error)
                    again = full is None and len(tried) < attempts
                    progress.fail(run, error.message, again)
                    if again:
                        waiting[backend.submit(run)] = run
                    elif full is None:
                        results.record_failure(run.run_id, [one.details or one.message for one in tried])
                else:
                    del errors[run.run_id]
                    progress.finish(run)
    finally:
        backend.close()
    if full is not None:
        raise _cannot_write(results, full)
    return {run_id: tried[-1] for run_id, tried in errors.items()}


def _keep(run: Run, future: "Future[Mapping[str, bytes] | None]", results: ResultsFolder, attempt: int) -> None:
    """Make a run that has ended a finished one.

    :raises RunError: if it failed, or its files are damaged
    """
    files = future.result()
    try:
        if files is not None:
            results.receive(run.run_id, files)
        results.publish(run.run_id, attempt)
    except OSError as error:
        raise RunError(str(error), number=error.errno) from error
    except ValueError as error:
        raise RunError(str(error)) from error


def _cannot_write(results: ResultsFolder, error: RunError) -> OSError:
    finished = len(list((results.path / "runs").glob("*")))
    return OSError(
        f"{results.path} cannot be written: {error.message}; its {finished} finished runs are kept, and the same command goes "
        "on from there"
    )
