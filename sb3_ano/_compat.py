"""End the idle threads of PyTorch, which has no public name for it."""

import ctypes
import functools
from typing import Any

import torch


def end_idle_threads() -> None:
    """End PyTorch's threads on the CPU until the next operation that is worth several; nothing happens if OpenMP cannot."""
    if (pause := _pause_of_openmp()) is not None:
        pause(1)  # omp_pause_soft


@functools.cache
def _pause_of_openmp() -> Any:
    try:  # of the library that PyTorch's own is linked with: there may be others in the process
        return ctypes.CDLL(torch._C.__file__).omp_pause_resource_all
    except (OSError, AttributeError):
        return None
