"""Functions on a Ray cluster. The files that they write come back to the driver."""

import tempfile
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray

from sb3_ano._system import require_reachable, versions
from sb3_ano.bench.pool import Pool, WorkerError, call

# How often a run starts again after its machine was lost.
_MOST_RESTARTS = 10


class RayPool(Pool):
    """Run functions as tasks of a cluster, each in a new process on the node that Ray chooses.

    Every node needs this package in the same version, and the modules that a suite imports.

    :param address: ``HOST:PORT`` of the cluster's head, or ``"auto"`` on one of its nodes; None starts Ray on this machine
    :param jobs: tasks at a time if Ray is started on this machine; None uses all processors
    :param threads: processors of a task
    :raises ValueError: if the address is invalid
    :raises OSError: if there is no cluster at the address
    """

    def __init__(
        self,
        address: str | None,
        jobs: int | None,
        threads: int,
    ) -> None:
        self._threads = threads
        # Ray would try for minutes.
        if address is not None and address != "auto":
            require_reachable("--address", address)

        processors = None
        if address is None and jobs is not None:
            processors = jobs * threads
        # "local" starts a cluster; with None, Ray would join one that happens to run here, and reject num_cpus.
        ray.init(
            address=address or "local",
            num_cpus=processors,
            log_to_driver=False,
            logging_level="ERROR",
        )

    def submit(
        self,
        target: str,
        request: Mapping[str, Any],
    ) -> "Future[dict[str, bytes]]":
        """Queue a function. If its machine is lost, Ray runs it again from the start.

        :param target: ``"module:function"``
        :param request: argument of the function; ``directory`` becomes one on the node, and ``device="cuda"`` gets a GPU
        :return: content of the files in the directory, by name
        """
        # Without one, Ray hides all GPUs from the task.
        gpus = 0
        if request.get("device", "cpu").startswith("cuda"):
            gpus = 1
        task = ray.remote(
            num_cpus=self._threads,
            num_gpus=gpus,
            max_retries=_MOST_RESTARTS,
            # A training that fails would fail again.
            retry_exceptions=False,
            scheduling_strategy="SPREAD",
        )(_call)
        return task.remote(target, dict(request), self._threads, versions(["sb3-ano"])).future()

    def close(self) -> None:
        """End running tasks, and leave the cluster."""
        ray.shutdown()


def _call(
    target: str,
    request: dict[str, Any],
    threads: int,
    expected: dict[str, str],
) -> dict[str, bytes]:
    """Call the function on a node, and return the files that it wrote."""
    # Rows of different versions must not be mixed unnoticed.
    installed = versions(["sb3-ano"])
    if installed != expected:
        raise WorkerError(f"this node has {installed}, the driver {expected}; install the same version on all nodes")

    with tempfile.TemporaryDirectory() as directory:
        call(target, {**request, "directory": directory}, threads=threads)
        files = {}

        for file in Path(directory).iterdir():
            if file.is_file():
                files[file.name] = file.read_bytes()
        return files
