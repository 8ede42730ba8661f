"""Trainings on a Ray cluster. The files of the runs come back to the driver's directory."""

import socket
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray

from sb3_ano._io import versions
from sb3_ano.bench.plan import Run
from sb3_ano.bench.pool import Report, Worker, WorkerError
from sb3_ano.bench.runner import TARGET, request_of

# Lost workers and machines; Ray does not retry a training that fails.
_MOST_LOSSES = 10
_CONNECT_SECONDS = 10.0


class RayBackend:
    """Trainings as tasks of a cluster, each in a process of its own on the node that Ray chooses.

    Every node needs this package in the same version, and the modules that a suite imports.

    :param address: ``HOST:PORT`` of the cluster's head, or ``"auto"`` on one of its nodes; None starts Ray on this machine
    :param jobs: trainings at a time if Ray is started on this machine; None uses all processors
    :param threads: processors of a training
    :param options: further arguments of :func:`sb3_ano.bench.training.train`; a training on ``"cuda"`` gets a GPU
    :raises ValueError: if the address is invalid
    :raises OSError: if there is no cluster at the address
    """

    def __init__(self, address: str | None, jobs: int | None, threads: int, options: dict[str, Any]) -> None:
        self._threads, self._options = threads, options
        if address not in (None, "auto"):
            _require_reachable(str(address))
        processors = jobs * threads if address is None and jobs is not None else None
        try:
            # "local" starts a cluster; with None, Ray would join one that happens to run here, and reject num_cpus.
            ray.init(address=address or "local", num_cpus=processors, log_to_driver=False, logging_level="ERROR")
        except ConnectionError as error:
            raise OSError(f"--address {address}: no Ray cluster was found: {error}") from error

    def submit(self, run: Run, resume: bool, report: Report) -> "Future[dict[str, bytes] | None]":
        """Queue a training, of which only the end is reported. If its machine is lost, Ray runs it again from the start."""
        task = ray.remote(
            num_cpus=self._threads,
            num_gpus=1 if self._options.get("device", "cpu").startswith("cuda") else 0,
            max_retries=_MOST_LOSSES,
            retry_exceptions=False,
            scheduling_strategy="SPREAD",
        )(_train)
        return _with_worker_errors(task.remote(run, self._threads, self._options, versions(["sb3-ano"])).future())

    def close(self) -> None:
        """End what still runs, and leave the cluster."""
        ray.shutdown()


def _require_reachable(address: str) -> None:
    """Check at once whether something answers; Ray tries for minutes."""
    host, _, port = address.rpartition(":")
    if "//" in address or not host or not port.isdecimal():
        raise ValueError(f"--address {address} is not allowed; allowed are auto, and HOST:PORT of a cluster's head")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise OSError(f"--address {address}: no Ray cluster was found: {error}") from error


def _with_worker_errors(lost: "Future[Any]") -> "Future[dict[str, bytes] | None]":
    """The same future, with Ray's errors as the first line of a WorkerError."""
    result: Future[dict[str, bytes] | None] = Future()

    def pass_on(done: "Future[Any]") -> None:
        error = done.exception()
        if error is None:
            result.set_result(done.result())
        elif isinstance(error, WorkerError):
            result.set_exception(WorkerError(error.message, error.details))  # a full disk there is not one here
        else:
            first = next(iter(str(error).strip().splitlines()), "")
            result.set_exception(WorkerError(f"{type(error).__name__}: {first}", str(error)))

    lost.add_done_callback(pass_on)
    return result


def _train(run: Run, threads: int, options: dict[str, Any], expected: dict[str, str]) -> dict[str, bytes]:
    """Train on a node, and return the files of the run."""
    if versions(["sb3-ano"]) != expected:
        raise WorkerError(
            f"this node has {versions(['sb3-ano'])}, the driver {expected}; install the same version on all nodes"
        )

    with tempfile.TemporaryDirectory() as directory:
        worker = Worker(TARGET, request_of(run, Path(directory), options), threads=threads)
        try:
            worker.result()
        finally:
            worker.kill()
        return {file.name: file.read_bytes() for file in Path(directory).iterdir() if file.is_file()}
