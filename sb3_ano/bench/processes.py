"""The other end of :mod:`sb3_ano.bench.worker`: starting processes and talking to them."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sb3_ano.bench.cases import Case, Contender

_SCRIPT = Path(__file__).with_name("worker.py")


class WorkerError(RuntimeError):
    """A contender could not do what it was asked for; the message is one line."""


class SkippedError(RuntimeError):
    """A contender is not there to be measured; the message says what would change that."""


@dataclass(frozen=True)
class Threads:
    """Threads of one contender.

    :param torch: of PyTorch (or JAX) and its libraries
    :param envs: of environments that are stepped in C++
    """

    torch: int = 1
    envs: int = 1


def specification(case: Case, contender: Contender, threads: Threads, device: str, seed: int = 0) -> dict[str, Any]:
    """The first line for a worker.

    :param case: what to train on
    :param contender: how
    :param threads: see :class:`Threads`
    :param device: SB3's ``device``
    :param seed: of model and environments
    """
    return {
        "case": describe_case(case),
        "contender": describe_contender(contender),
        "threads": dataclasses.asdict(threads),
        "device": device,
        "seed": seed,
    }


def describe_case(case: Case) -> dict[str, Any]:
    """The settings of a case, without its contenders, as JSON has them."""
    fields = {field.name: getattr(case, field.name) for field in dataclasses.fields(case) if field.name != "contenders"}
    return fields | {"settings": dict(case.settings)}


def describe_contender(contender: Contender) -> dict[str, Any]:
    """A contender as JSON has it."""
    fields = {field.name: getattr(contender, field.name) for field in dataclasses.fields(contender)}
    return fields | {"options": dict(contender.options)}


class Worker:
    """One contender in a process of its own, which ends with the block.

    :param spec: from :func:`specification`
    :param python: the interpreter that has the contender's library
    :param environment: variables beside those for the threads
    :raises WorkerError: if the process cannot import what it needs
    """

    def __init__(self, spec: Mapping[str, Any], python: str, environment: Mapping[str, str] | None = None) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            [python, "-P", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **_thread_variables(spec["threads"]["torch"]), **(environment or {})},
        )
        try:
            #: What the process said of itself: versions, memory after its imports
            self.description = self._exchange(spec)
        except BaseException:
            self.close()
            raise

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the worker's session.

        :param do: ``"build"``, ``"run"``, ``"whole"`` or ``"profile"``
        :param arguments: of that method
        :raises WorkerError: with the error there
        """
        return self._exchange({"do": do, **arguments})

    def _exchange(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(message), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerError(f"the process ended with status {self._process.wait()}: {self._last_words()}")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(" ".join(reply["error"].split()))
        return reply

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    def close(self) -> None:
        """End the process and wait for its end."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _thread_variables(threads: int) -> dict[str, str]:
    variables = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    # JAX has no setting of its own; XLA's thread pool reads NPROC.
    variables["NPROC"] = str(threads)
    if threads == 1:
        flags = [os.environ.get("XLA_FLAGS", ""), "--xla_cpu_multi_thread_eigen=false"]
        variables["XLA_FLAGS"] = " ".join(flags).strip()
    return {**variables, "PYTHONWARNINGS": "ignore"}


def find_sbx(python: str | None) -> str | None:
    """The interpreter that has sbx.

    :param python: the one to take, or None for this one if it has sbx
    :return: its path, or None if none was asked for and this one has no sbx
    :raises ValueError: if the given one has no sbx, or is none
    """
    if python is None:
        return sys.executable if importlib.util.find_spec("sbx") else None
    check = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sbx') is None)"
    try:
        status = subprocess.run([python, "-P", "-c", check], capture_output=True).returncode
    except OSError as error:
        raise ValueError(f"--sbx-python {python} cannot be run: {error.strerror}") from error
    if status:
        raise ValueError(f"--sbx-python {python} has no sbx; install it there with: pip install sbx-rl")
    return python
