"""The zoo's commands in this process, which imports the zoo once."""

import argparse
import contextlib
import io
import os
import shlex
import subprocess
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import pytest
import rl_zoo3.train
import rl_zoo3.utils

from sb3_ano.zoo import cli, register


class Finished(NamedTuple):
    """How a command ended: exit status, output and errors."""

    status: int
    output: str
    errors: str


def run(command: str, *, status: int | None = 0) -> Finished:
    """Run a command in the current directory.

    :param command: command line, as typed after ``python -m sb3_ano.zoo``
    :param status: expected exit status; None if it does not matter
    """
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        finished = Finished(cli.main(shlex.split(command)), output.getvalue(), errors.getvalue())
    assert status in (None, finished.status), finished
    return finished


@pytest.fixture
def zoo(tmp_path, monkeypatch) -> Callable[..., Finished]:
    """Runs commands in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRUST_REMOTE_CODE", raising=False)
    return run


@pytest.fixture(autouse=True)
def nothing_stays_replaced() -> Iterator[None]:
    """A command that ends leaves the zoo and the standard library as they were."""
    register()
    before = replaceable()
    yield
    assert replaceable() == before


def replaceable() -> tuple[Any, ...]:
    parser, train, utils = argparse.ArgumentParser, rl_zoo3.train.ExperimentManager, rl_zoo3.utils
    zoos = train, utils.get_latest_run_id, utils.get_saved_hyperparams, utils.create_test_env
    return (
        parser.parse_args,
        parser.error,
        subprocess.call,
        plt.show,
        *zoos,
        *map(os.environ.get, ("PATH", "MUJOCO_GL", "TRUST_REMOTE_CODE")),
    )
