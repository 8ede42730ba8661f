"""Provide settings and comparisons for several test modules."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from sb3_ano import ANO, PAPO, SPO

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ALGORITHMS = [ANO, SPO, PAPO]
#: Settings under which a rollout and its update take a moment.
SMALL = {"n_steps": 32, "batch_size": 32, "n_epochs": 2, "seed": 0}

has_compiler = shutil.which("c++") is not None or "CI" in os.environ
needs_compiler = pytest.mark.skipif(not has_compiler, reason="torch.compile needs a C++ compiler")


def variables(**others: str) -> dict[str, str]:
    """Variables of a process that can import this repository, and what is in its working directory."""
    paths = os.pathsep.join([str(ROOT), ".", os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **others}


def python(*arguments, cwd=None, check=False) -> subprocess.CompletedProcess:
    """Run Python with these variables."""
    options = {"capture_output": True, "text": True, "timeout": 500}
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, check=check, env=variables(), **options)


def parameters(model) -> torch.Tensor:
    """All parameters of a model's policy, as one vector."""
    return torch.nn.utils.parameters_to_vector(model.policy.parameters()).detach()


def pseudo_huber(x: torch.Tensor) -> torch.Tensor:
    """A custom shape that can be found again by its name."""
    return 1 + x - torch.sqrt(1 + x.square())
