"""State outside of Python attributes: simulators, generators of spaces, monitor files, process-wide random generators."""

import importlib
import os
import random
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.monitor import ResultsWriter

#: A picklable state by name.
State: TypeAlias = dict[str, Any]


class NativeState(NamedTuple):
    """Read the state of an object as a picklable value, and restore it."""

    get: Callable[[Any], Any]
    set: Callable[[Any, Any], None]


def native_state(kind: type) -> NativeState | None:
    """Return how the state of a class's instances is read and restored; None if their attributes hold it."""
    if issubclass(kind, spaces.Space):
        return NativeState(lambda space: space._np_random, _set_generator)
    if issubclass(kind, ResultsWriter):
        return NativeState(_synced_size, _truncate)
    # By name, because neither library needs to be installed.
    package = kind.__module__.partition(".")[0]
    return _SIMULATORS.get((package, kind.__name__))


def _set_generator(space: spaces.Space[Any], generator: Any) -> None:
    space._np_random = generator


def _mujoco_state(data: Any) -> State:
    """Return what the integration depends on, and all arrays.

    Quantities that are derived from positions lag behind them after a step, and environments read them. Recomputed, they
    would differ from those of the uninterrupted run.
    """
    mujoco = importlib.import_module("mujoco")  # installed, because it made the data
    kind = mujoco.mjtState.mjSTATE_INTEGRATION

    integration = np.empty(mujoco.mj_stateSize(data.model, kind))
    mujoco.mj_getState(data.model, data, integration, kind)
    # The next step would change the arrays.
    arrays = {name: array.copy() for name, array in simulator_arrays(data).items()}
    return {"integration": integration, "arrays": arrays}


def simulator_arrays(found: object) -> dict[str, np.ndarray]:
    """Return the arrays in the memory of MuJoCo's data by name; none of other objects."""
    arrays = {}
    if type(found).__name__ == "MjData":
        for name in dir(found):
            if name.startswith("_"):
                continue
            value = getattr(found, name)
            if isinstance(value, np.ndarray):
                arrays[name] = value

    return arrays


def _set_mujoco_state(data: Any, state: State) -> None:
    mujoco = importlib.import_module("mujoco")
    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    mujoco.mj_setState(data.model, data, state["integration"], kind)

    for name, array in state["arrays"].items():
        target = getattr(data, name)
        # The number of constraints varies. Those of the last step are recomputed in the next one.
        if target.shape == array.shape and target.flags.writeable:
            target[...] = array


def _synced_size(writer: ResultsWriter) -> int:
    """Write a monitor file to the disk, and return its size in bytes."""
    # Otherwise the file may be shorter than its size here after the machine has failed.
    writer.file_handler.flush()
    descriptor = writer.file_handler.fileno()
    os.fsync(descriptor)
    return os.fstat(descriptor).st_size


def _truncate(writer: ResultsWriter, size: int) -> None:
    """Remove the episodes after a checkpoint, which are trained again, unless the file is a new and shorter one."""
    descriptor = writer.file_handler.fileno()
    if os.fstat(descriptor).st_size > size:
        os.ftruncate(descriptor, size)


def _ale_state(ale: Any) -> object:
    return ale.cloneState(include_rng=True)


def _set_ale_state(ale: Any, state: object) -> None:
    ale.restoreState(state)


# By package and name of the class.
_SIMULATORS = {
    ("mujoco", "MjData"): NativeState(_mujoco_state, _set_mujoco_state),
    ("mujoco", "MjModel"): NativeState(lambda model: None, lambda model, state: None),  # constant
    ("ale_py", "ALEInterface"): NativeState(_ale_state, _set_ale_state),
}


def random_state() -> State:
    """Return the picklable states of Python's, NumPy's and PyTorch's generators, of GPUs only if PyTorch uses them."""
    cuda = []
    if torch.cuda.is_initialized():
        cuda = torch.cuda.get_rng_state_all()
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def set_random_state(state: State) -> None:
    """Restore a state that :func:`random_state` returned; GPUs that this machine lacks are ignored."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    count = torch.cuda.device_count()
    torch.cuda.set_rng_state_all(state["cuda"][:count])
