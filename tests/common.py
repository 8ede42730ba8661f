"""Provide settings and comparisons for several test modules."""

import os
import shutil

import pytest
import torch

from sb3_ano import ANO, PAPO, SPO

ALGORITHMS = [ANO, SPO, PAPO]
#: Settings under which a rollout and its update take a moment.
SMALL = {"n_steps": 32, "batch_size": 32, "n_epochs": 2, "seed": 0}

needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None and "CI" not in os.environ, reason="torch.compile needs a C++ compiler"
)


def parameters(model) -> torch.Tensor:
    """All parameters of a model's policy, as one vector."""
    return torch.nn.utils.parameters_to_vector(model.policy.parameters()).detach()


def pseudo_huber(x: torch.Tensor) -> torch.Tensor:
    """A custom shape that can be found again by its name."""
    return 1 + x - torch.sqrt(1 + x.square())
