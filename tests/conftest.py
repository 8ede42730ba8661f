"""Shared set-up: one thread a worker, because the tests run in parallel on small networks."""

import pytest
import torch

from sb3_ano import _secrets

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def forgotten_secrets():
    """Forget the secrets of a test, which would be hidden in the texts of the next ones."""
    before = set(_secrets._remembered)
    yield
    _secrets._remembered.clear()
    _secrets._remembered.update(before)
