"""The states of the process-wide random generators; ``bench`` uses them without checkpoints."""

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return the picklable states of Python's, NumPy's and PyTorch's generators, of GPUs only if PyTorch uses them."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore a state that :func:`random_state` returned; GPUs that this machine lacks are ignored."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
