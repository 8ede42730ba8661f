"""Functions in separate processes. A process ends with its parent, and its errors come back as one line.

A process runs ``python -m sb3_ano.bench.pool MODULE:FUNCTION FILE LABEL``. The request of the function, in the
file, and its result are JSON.
"""

import json
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

# Variables of the libraries that would otherwise take all processors in each process.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
_LINES_OF_ERRORS = 200


class WorkerError(RuntimeError):
    """Report that a function failed, or that its process was killed.

    :param message: one line
    :param details: last lines that the process wrote to standard error
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    @classmethod
    def of(cls, error: BaseException) -> "WorkerError":
        """Convert an error; Ray, for example, wraps errors and loses machines.

        :param error: error of any class
        """
        if isinstance(error, WorkerError):
            return cls(error.message, error.details)
        # Ray's errors have the traceback of the node below.
        first = next(iter(str(error).strip().splitlines()), "")
        return cls(f"{type(error).__name__}: {first}", str(error))


def call(
    target: str,
    request: Mapping[str, Any],
    *,
    threads: int = 1,
    stdin: int = subprocess.PIPE,
    held: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
    started: Callable[[subprocess.Popen[str]], None] = lambda process: None,
) -> Any:
    """Call a function in a new process, and return its result.

    :param target: ``"module:function"``
    :param request: argument of the function, JSON
    :param threads: threads of PyTorch and of the libraries below it
    :param stdin: file descriptor whose end ends the process; by default, it ends with this one
    :param held: file descriptors that stay open while the process lives
    :param environment: further environment variables
    :param python: interpreter to run, this one by default
    :param started: called with the process
    :raises WorkerError: if the function raised an error, or its process was killed
    """
    variables = {**os.environ, "PYTHONWARNINGS": "ignore"}
    variables |= dict.fromkeys(_THREADS, str(threads))
    variables |= environment or {}
    # For those who list processes.
    label = json.dumps({"directory": request.get("directory")})

    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory() as directory:
        # In a file, because an argument of a process has at most 128 kB on Linux.
        file = Path(directory, "request.json")
        file.write_text(json.dumps({**request, "threads": threads}))

        with subprocess.Popen(
            [python, "-m", "sb3_ano.bench.pool", target, str(file), label],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=variables,
            pass_fds=held if os.name == "posix" else (),
        ) as process:
            # Now, because the pool must be able to kill it.
            started(process)
            written = process.stdout.read() if process.stdout else ""
            status = process.wait()

        answer = json.loads(written or "{}")
        # A process that is killed may have answered.
        if status == 0 and "result" in answer:
            return answer["result"]

        log.seek(0)
        # The causes of an error come first.
        lines = log.read().decode(errors="replace").splitlines()[-_LINES_OF_ERRORS:]

    # Python has a negative number for a signal.
    ended = f"its process ended with status {status}"
    if status < 0:
        ended = f"its process was killed by {signal.Signals(-status).name}"
    raise WorkerError(answer.get("error", ended), "\n".join(lines))


class Pool:
    """Call functions in a bounded number of processes.

    :param jobs: processes at a time
    :param threads: threads of each process
    :param held: file descriptors that stay open while a process lives
    """

    def __init__(
        self,
        jobs: int,
        threads: int = 1,
        held: Sequence[int] = (),
    ) -> None:
        # A thread waits for each process.
        self._executor = ThreadPoolExecutor(jobs)
        self._processes: list[subprocess.Popen[str]] = []
        # Standard input of all processes: when this process is killed, it ends, and they end.
        self._life, self._end = os.pipe()
        self._options: dict[str, Any] = {
            "threads": threads,
            "held": held,
            "stdin": self._life,
        }

    def submit(
        self,
        target: str,
        request: Mapping[str, Any],
    ) -> "Future[Any]":
        """Call a function as soon as a process is free; see :func:`call`.

        :param target: ``"module:function"``
        :param request: argument of the function, JSON
        """
        return self._executor.submit(
            call,
            target,
            request,
            started=self._processes.append,
            **self._options,
        )

    def close(self) -> None:
        """End running processes, and start no other."""
        # Queued calls must not start while the running ones end.
        self._executor.shutdown(wait=False, cancel_futures=True)
        os.close(self._end)
        # A process in a call of C code that holds Python's lock cannot notice that its standard input has ended.
        for process in self._processes:
            process.kill()
        self._executor.shutdown()
        os.close(self._life)


def main() -> None:
    """Call the function that the command line names."""
    threading.Thread(target=_exit_with_stdin, daemon=True).start()
    # Libraries print; what they print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    try:
        file = Path(sys.argv[2])
        request = json.loads(file.read_text())
        # It would remain if the parent is killed.
        shutil.rmtree(file.parent, ignore_errors=True)
        # Before the function imports what reads it.
        torch.set_num_threads(request["threads"])
        function = pkgutil.resolve_name(sys.argv[1])
        print(json.dumps({"result": function(request)}), file=answers)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}), file=answers)
        raise


def _exit_with_stdin() -> None:
    """Wait for the end of standard input, which the parent holds open while it lives and needs this process."""
    while os.read(0, 1):
        pass
    os._exit(3)


if __name__ == "__main__":
    main()
