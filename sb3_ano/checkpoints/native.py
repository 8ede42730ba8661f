"""The state of objects that keep it outside of Python's attributes: simulators, generators of spaces, monitor files."""

import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.monitor import ResultsWriter


class NativeState(NamedTuple):
    """How to read the state of an object, as something that can be pickled, and how to give it back."""

    get: Callable[[Any], Any]
    set: Callable[[Any, Any], None]


def native_state(kind: type) -> NativeState | None:
    """How the state of objects of a class is had, if their attributes are not the place; None if they are."""
    if issubclass(kind, spaces.Space):
        return _SPACE
    if issubclass(kind, ResultsWriter):
        return _MONITOR_FILE
    # By name, because neither library need be installed.
    return _SIMULATORS.get((kind.__module__.split(".")[0], kind.__name__))


def _set_generator(space: spaces.Space, generator: Any) -> None:
    space._np_random = generator


def _mujoco_state(data: Any) -> dict[str, Any]:
    """What the integration depends on, and every array beside it.

    Quantities that follow from positions lag behind them after a step, and environments read them: computed afresh, they
    would differ from those of the run that goes on.
    """
    mujoco = importlib.import_module("mujoco")  # which the environment needs anyway

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(data.model, kind))
    mujoco.mj_getState(data.model, data, state, kind)
    arrays = {name: getattr(data, name) for name in dir(data) if not name.startswith("_")}
    return {
        "integration": state,
        "arrays": {name: array.copy() for name, array in arrays.items() if isinstance(array, np.ndarray)},
    }


def _set_mujoco_state(data: Any, state: dict[str, Any]) -> None:
    mujoco = importlib.import_module("mujoco")

    mujoco.mj_setState(data.model, data, state["integration"], mujoco.mjtState.mjSTATE_INTEGRATION)
    for name, array in state["arrays"].items():
        target = getattr(data, name)
        # Constraints of the last step, whose number varies, are computed in the next one.
        if target.shape == array.shape and target.flags.writeable:
            target[...] = array


def _size_of_monitor_file(writer: ResultsWriter) -> int:
    """Bytes, which are on the disk from now on."""
    writer.file_handler.flush()
    os.fsync(writer.file_handler.fileno())
    return os.fstat(writer.file_handler.fileno()).st_size


def _cut_monitor_file(writer: ResultsWriter, size: int) -> None:
    """Take away the episodes that are going to be played again. A file that is shorter was begun anew, and stays."""
    descriptor = writer.file_handler.fileno()
    if os.fstat(descriptor).st_size > size:
        os.ftruncate(descriptor, size)


def _nothing(found: Any, state: None = None) -> None:
    """Stays as it was built."""


_SPACE = NativeState(lambda space: space._np_random, _set_generator)
_MONITOR_FILE = NativeState(_size_of_monitor_file, _cut_monitor_file)
_SIMULATORS = {
    ("mujoco", "MjData"): NativeState(_mujoco_state, _set_mujoco_state),
    ("mujoco", "MjModel"): NativeState(_nothing, _nothing),
    ("ale_py", "ALEInterface"): NativeState(
        lambda ale: ale.cloneState(include_rng=True), lambda ale, state: ale.restoreState(state)
    ),
}
