"""The zoo's commands in this process, which imports the zoo once, and in processes that can be killed."""

import argparse
import contextlib
import io
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import pytest
import rl_zoo3.train
import rl_zoo3.utils
from stable_baselines3.common.monitor import ResultsWriter

from sb3_ano.zoo import cli, register

ROOT = Path(__file__).resolve().parents[2]


class Finished(NamedTuple):
    """How a command ended: exit status, output and errors, and its time in seconds if it had a process."""

    status: int
    output: str
    errors: str = ""
    seconds: float = 0.0


def run(command: str, *, status: int = 0) -> Finished:
    """Run a command in the current directory.

    :param command: command line, as typed after ``python -m sb3_ano.zoo``
    :param status: expected exit status
    """
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        finished = Finished(cli.main(shlex.split(command)), output.getvalue(), errors.getvalue())
    assert finished.status == status, finished
    return finished


def rejected(command: str) -> str:
    """Run a command that must fail, and return its one line that says why."""
    errors = run(command, status=2).errors
    assert re.fullmatch(r"error: .+\n", errors), errors
    assert errors[:-1].isprintable()
    return errors


@pytest.fixture
def zoo(tmp_path, monkeypatch) -> Callable[..., Finished]:
    """Run commands in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRUST_REMOTE_CODE", raising=False)
    return run


@pytest.fixture(autouse=True)
def nothing_stays_replaced() -> Iterator[None]:
    """A command that ends leaves the zoo and the standard library as they were."""

    def state() -> tuple[object, ...]:
        parser, utils = argparse.ArgumentParser, rl_zoo3.utils
        zoos = rl_zoo3.train.ExperimentManager, utils.get_latest_run_id, utils.get_saved_hyperparams, utils.create_test_env
        variables = [os.environ.get(name) for name in ("PATH", "MUJOCO_GL", "TRUST_REMOTE_CODE")]
        return parser.parse_args, parser.error, subprocess.call, plt.show, ResultsWriter.__init__, *zoos, *variables

    register()
    before = state()
    yield
    assert state() == before


@pytest.fixture(scope="module")
def run_until() -> Iterator[Callable[..., Finished]]:
    """Run a command in a process that is killed: after some seconds, when there is a file like a pattern, or never."""
    driver = subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", str(Path(__file__).with_name("kill_driver.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert "ready\n" in iter(driver.stdout.readline, "")

    def run_in_process(command: str, directory: Path, kill_after: float | str | None) -> Finished:
        directory.mkdir(exist_ok=True)
        output, ended, began = directory / "output.txt", threading.Event(), time.monotonic()
        output.unlink(missing_ok=True)
        driver.stdin.write(f"{directory} {command}\n")
        driver.stdin.flush()
        process = int(driver.stdout.readline())

        def kill() -> None:
            while not ended.wait(0.002):
                is_file = isinstance(kill_after, str)
                if any(directory.glob(kill_after)) if is_file else time.monotonic() - began >= (kill_after or math.inf):
                    with contextlib.suppress(ProcessLookupError):  # it ended by itself
                        os.kill(process, signal.SIGKILL)
                    return

        killer = threading.Thread(target=kill)
        killer.start()
        status = int(driver.stdout.readline())
        ended.set()
        killer.join()
        return Finished(status, output.read_text(), seconds=time.monotonic() - began)

    yield run_in_process
    driver.stdin.close()
    driver.stdout.close()
    assert driver.wait(10) == 0
