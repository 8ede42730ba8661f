"""The same runs on a Ray cluster; results come back to the folder of the driver."""

import contextlib
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from sb3_ano.bench.experiments.plan import Run
from sb3_ano.bench.experiments.process import RunError, TrainingProcess
from sb3_ano.extras import missing_extra

try:
    import ray
    from ray.exceptions import RayError
    from ray.util.queue import Empty, Queue
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise missing_extra("ray", error.name or "ray") from error

# Lost workers and machines; a training that fails is not Ray's business.
_MOST_LOSSES = 10
_POLL_SECONDS = 0.5
_CONNECT_SECONDS = 10.0


class RayBackend:
    """Trainings as tasks of a cluster, each in a process of its own on the node that Ray gives it.

    Every node has this package, and the modules that a suite imports, installed.

    :param address: ``HOST:PORT`` of the cluster's head, or ``"auto"``, on one of its nodes; None starts one on this machine
    :param jobs: processors that a cluster on this machine has; None takes all
    :param threads: of a training, which is given as many processors
    :param device: SB3's ``device``; a training on ``"cuda"`` is given a GPU
    :param report: gets a run and the number of its steps that are done
    :raises ValueError: if the address is none
    :raises OSError: if there is no cluster there
    """

    def __init__(
        self, address: str | None, jobs: int | None, threads: int, device: str, report: Callable[[Run, int], None]
    ) -> None:
        self._threads, self._device, self._report = threads, device, report
        self._runs: dict[str, Run] = {}
        if address not in (None, "auto"):
            _require_reachable(str(address))
        processors = jobs * threads if address is None and jobs is not None else None
        try:
            ray.init(address=address, num_cpus=processors, log_to_driver=False, logging_level="ERROR")
        except ConnectionError as error:
            raise OSError(f"--address {address}: no Ray cluster was found: {error}") from error
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._steps = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
        self._closed = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def submit(self, run: Run) -> "Future[Mapping[str, bytes] | None]":
        """Queue a training; where its worker or machine is lost, Ray runs it again."""
        self._runs[run.run_id] = run
        task = ray.remote(
            num_cpus=self._threads,
            num_gpus=1 if self._device.startswith("cuda") else 0,
            max_retries=_MOST_LOSSES,
            retry_exceptions=False,
            scheduling_strategy="SPREAD",
        )(_train)
        return _as_run_error(task.remote(run, self._threads, self._device, self._steps).future())

    def _listen(self) -> None:
        """Hand on the progress that the nodes report."""
        while not self._closed.is_set():
            with contextlib.suppress(Empty, RayError):
                run_id, done = self._steps.get(timeout=_POLL_SECONDS)
                self._report(self._runs[run_id], done)

    def close(self) -> None:
        """End what still runs, and leave the cluster."""
        self._closed.set()
        self._listener.join()
        ray.shutdown()


def _require_reachable(address: str) -> None:
    """Complain at once of an address where nothing answers; Ray tries for minutes.

    :raises ValueError: if it is not ``HOST:PORT``
    :raises OSError: if nothing answers
    """
    host, _, port = address.rpartition(":")
    if "//" in address or not host or not port.isdecimal():
        raise ValueError(f"--address {address} is not allowed; allowed are auto, and HOST:PORT of a cluster's head")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise OSError(f"--address {address}: no Ray cluster was found: {error}") from error


def _as_run_error(lost: "Future[Any]") -> "Future[Mapping[str, bytes] | None]":
    """The same future with Ray's own errors as :class:`RunError`."""
    result: Future[Mapping[str, bytes] | None] = Future()

    def pass_on(done: "Future[Any]") -> None:
        error = done.exception()
        if error is None:
            result.set_result(done.result())
        elif isinstance(error, RunError):
            result.set_exception(RunError(error.message, error.details))
        else:
            result.set_exception(RunError(f"{type(error).__name__}: {' '.join(str(error).split())}"))

    lost.add_done_callback(pass_on)
    return result


def _train(run: Run, threads: int, device: str, steps: Any) -> dict[str, bytes]:
    """Train on a node.

    :return: the files of the run by name
    :raises RunError: if it failed there
    """

    def report(done: int) -> None:
        with contextlib.suppress(RayError):
            steps.actor.put_nowait.remote((run.run_id, done))

    with tempfile.TemporaryDirectory() as folder:
        process = TrainingProcess(run, Path(folder), threads, device)
        try:
            process.follow(report)
        finally:
            process.kill()
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}
