"""The zoo's commands in this process, which imports the zoo once, and in processes that can be killed."""

import argparse
import contextlib
import io
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import matplotlib.pyplot as plt
import optuna
import pytest
from stable_baselines3.common.monitor import Monitor, ResultsWriter

from sb3_ano.zoo import cli, commands, register  # noqa: F401  # what a command would import

#: Variables of the environment that commands set.
VARIABLES = ("PATH", "MUJOCO_GL", "TRUST_REMOTE_CODE")


#: The end of a command; the time in seconds if it had a process.
Finished = namedtuple("Finished", ["status", "output", "errors", "seconds"], defaults=["", 0.0])


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
def zoo(tmp_path, monkeypatch):
    """Run commands in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRUST_REMOTE_CODE", raising=False)
    return run


@pytest.fixture(autouse=True)
def nothing_stays_replaced():
    """A command that ends leaves the zoo and the standard library as they were."""
    register()
    zoos = [module for name, module in sys.modules.items() if name.startswith(("rl_zoo3", "huggingface_sb3", "requests"))]
    before = {owner: dict(vars(owner)) for owner in (argparse.ArgumentParser, subprocess, Monitor, ResultsWriter, *zoos)}
    show, variables = plt.show, [os.environ.get(name) for name in VARIABLES]
    yield
    assert (plt.show, [os.environ.get(name) for name in VARIABLES]) == (show, variables)
    for owner, names in before.items():
        assert {name: vars(owner)[name] for name in names} == names


@pytest.fixture
def small_rollouts(monkeypatch):
    """Let trials of a search have rollouts of 32 steps and minibatches of 32 samples.

    In the zoo's space, a rollout can have a thousand times as many minibatches.
    """
    suggest = optuna.Trial.suggest_int
    monkeypatch.setattr(optuna.Trial, "suggest_int", lambda trial, name, low, high: suggest(trial, name, 5, 5))


def start_command(command: str, directory: Path | str = ".") -> subprocess.Popen[str]:
    """Start a command in a process of its own."""
    program = [sys.executable, "-m", "sb3_ano.zoo", *command.split()]
    return subprocess.Popen(program, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run_there(directory: Path, command: str) -> None:
    """Run a command in this process, which ends with it."""
    os.chdir(directory)
    for stream in (1, 2):
        os.dup2(os.open("output.txt", os.O_WRONLY | os.O_APPEND), stream)
    raise SystemExit(cli.main(shlex.split(command)))


@pytest.fixture(scope="session")
def run_until():
    """Run a command in a process that is killed: after some seconds, when there is a file like a pattern, or never."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["tests.conftest", "tests.zoo.conftest"])  # so that the libraries are imported once
    first = server.Process(target=os.getpid)
    first.start()
    first.join()  # until then, which belongs to no command's time
    from tests.zoo.conftest import run_there  # by the name that processes can import; pytest's is "conftest"

    def run_in_process(command: str, directory: Path, kill_after: float | str | None) -> Finished:
        directory.mkdir(exist_ok=True)
        output = directory / "output.txt"
        output.write_text("")
        process, began = server.Process(target=run_there, args=(directory, command)), time.monotonic()
        process.start()
        while kill_after is not None and process.is_alive():
            if any(directory.glob(kill_after)) if isinstance(kill_after, str) else time.monotonic() - began >= kill_after:
                process.kill()
            time.sleep(0.002)
        process.join()
        return Finished(process.exitcode, output.read_text(), seconds=time.monotonic() - began)

    return run_in_process
