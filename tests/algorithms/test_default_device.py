"""Trainings inside of PyTorch's defaults for devices and types, which are for the user's own tensors."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sb3_ano import ANO, PAPO, SPO, MaskableANO, RecurrentANO, RecurrentMaskableANO
from tests.algorithms.comparison import traced_only
from tests.algorithms.test_equals_sb3_contrib import make
from tests.common import parameters


@contextlib.contextmanager
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


DEFAULTS = {"meta": lambda: torch.device("meta"), "float64": float64}
CASES = [
    *((cls, "Box", False) for cls in (ANO, SPO, PAPO, RecurrentANO)),
    *((cls, case, False) for cls in (MaskableANO, RecurrentMaskableANO) for case in ("Discrete", "MultiDiscrete")),
    *((ANO, case, False) for case in ("gSDE", "MultiBinary", "Dict", "image")),
    *((ANO, case, True) for case in ("Box", "Dict")),
    (MaskableANO, "Discrete", True),
]


def trained(cls: type, case: str, compiled: bool, default: Any) -> torch.Tensor:
    recurrent = cls in (RecurrentANO, RecurrentMaskableANO)
    with traced_only() if compiled else contextlib.nullcontext():
        model: Any = make(cls, case, n_epochs=2, **({} if recurrent else {"torch_compile": compiled}))
        with default():
            model.learn(2 * model.n_steps * model.n_envs)
    return parameters(model)


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize(("cls", "case", "compiled"), CASES)
def test_defaults_of_pytorch_change_nothing(cls, case, compiled, default):
    expected = trained(cls, case, compiled, contextlib.nullcontext)
    found = trained(cls, case, compiled, DEFAULTS[default])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
