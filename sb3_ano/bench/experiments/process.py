"""The other end of :mod:`sb3_ano.bench.experiments.worker`: a run in a process of its own."""

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from sb3_ano.bench.experiments.plan import Run

_WORKER = "sb3_ano.bench.experiments.worker"
_LINES = 40


class RunError(RuntimeError):
    """A run could not be made.

    :param message: one line
    :param details: what its process said last
    :param number: ``errno`` of the error, or None
    """

    def __init__(self, message: str, details: str = "", number: int | None = None) -> None:
        super().__init__(message, details, number)  # as it was constructed, or it could not be sent between processes
        self.message, self.details, self.number = message, details, number

    def __str__(self) -> str:
        return self.message

    @property
    def out_of_space(self) -> bool:
        """Whether the files of the run could not be written, so that another attempt would fail, too."""
        return self.number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class TrainingProcess:
    """A training, started at once.

    :param run: what to train
    :param folder: for its files, empty
    :param threads: of PyTorch and the environments
    :param device: SB3's ``device``
    :param held: descriptors of files that stay open for as long as the process lives
    """

    def __init__(self, run: Run, folder: Path, threads: int, device: str, held: Sequence[int] = ()) -> None:
        request = {
            "suite": run.suite,
            "specification": run.specification(),
            "folder": str(folder.absolute()),
            "threads": threads,
            "device": device,
        }
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", _WORKER, json.dumps(request)],
            stdin=subprocess.PIPE,  # its end tells the process that we are no more
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **_thread_variables(threads), "PYTHONWARNINGS": "ignore"},
            pass_fds=held if os.name == "posix" else (),
        )

    def follow(self, report: Callable[[int], None]) -> None:
        """Wait for the end.

        :param report: gets the number of environment steps that are done, after each update
        :raises RunError: if the training failed, or its process was killed
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        error: RunError | None = None
        with self._log, self._process.stdin, self._process.stdout:
            for line in self._process.stdout:
                if line.strip().isdecimal():
                    report(int(line))
                elif line.startswith("{"):
                    answer = json.loads(line)
                    error = RunError(answer["error"], number=answer["errno"])
            status = self._process.wait()
            if status != 0:
                raise self._explained(error, status)

    def _explained(self, error: RunError | None, status: int) -> RunError:
        self._log.seek(0)
        said = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        details = "\n".join(said[-_LINES:])
        if error is not None:
            return RunError(error.message, details, error.number)
        if status < 0:
            return RunError(f"its process was killed by {signal.Signals(-status).name}", details)
        return RunError(said[-1].strip() if said else f"its process ended with status {status}", details)

    def kill(self) -> None:
        """End it."""
        self._process.kill()


def _thread_variables(threads: int) -> dict[str, str]:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
    return dict.fromkeys(names, str(threads))
