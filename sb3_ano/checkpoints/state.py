"""The state of a training: the attributes of its model, environments and callbacks, as one pickle.

The program that resumes builds these objects again, and only their attributes are restored. Objects are found by following
attributes and are named after the path to them. Inside the pickle, a reference to one of them is its name.
"""

import contextlib
import io
import os
import pickle
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import cloudpickle  # type: ignore[import-untyped]
import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback, ProgressBarCallback
from stable_baselines3.common.monitor import ResultsWriter
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import FloatSchedule
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper

from sb3_ano.checkpoints.native import native_state, simulator_arrays

# Objects that the resuming program builds itself.
_BUILT = (BaseAlgorithm, BaseCallback, VecEnv, gym.Env, gym.spaces.Space, ResultsWriter)
_DESCRIPTIONS = (types.ModuleType, types.MappingProxyType, EnvSpec)
# Attributes that are not part of the state: arguments of constructors, and those that belong to the process.
_ENVIRONMENT = {"_saved_kwargs", "class_attributes"}
_CALLBACK = {"globals", "locals", "verbose"}
_MODEL = {
    "_logger",
    "_total_timesteps",
    "policy_kwargs",
    "rollout_buffer_kwargs",
    "start_time",
    "tensorboard_log",
    "verbose",
}
# Windows and surfaces in gymnasium's environments. Other environments may use the names for data, which can be pickled.
_RENDERERS = {"clock", "mujoco_renderer", "renderer", "screen", "surf", "viewer", "window", "window_surface"}


@dataclass(frozen=True)
class _NotStored:
    """Stand for a value that the resuming program must have itself: a path, or what cannot be pickled.

    :param description: the path; None if the value cannot be pickled
    """

    description: str | None


class TrainingState:
    """The objects of a training by name. Their attributes are captured, and restored in another process.

    :param model: model with its environments
    :param callback: all callbacks of the training, or None
    :param exclude: callback that is not part of the state
    """

    def __init__(
        self,
        model: OnPolicyAlgorithm,
        callback: BaseCallback | None,
        exclude: BaseCallback | None = None,
    ) -> None:
        self.objects: dict[str, Any] = {}
        self._names: dict[int, str] = {id(exclude): "not part of the state"}
        self._excluded_of_model = set(_MODEL)
        # SB3 saves these in other ways, or not at all.
        for name in (*model._excluded_save_params(), *model._get_torch_save_params()[0]):
            if not name.startswith("_last_"):  # what a rollout starts from, which SB3 does not save
                self._excluded_of_model.add(name)

        self._find("model", model)
        if callback is not None:
            self._find("callback", callback)
        for name, module in model.policy.named_modules():
            self.objects[f"model.policy.{name}"] = module
        self.objects["model.rollout_buffer"] = model.rollout_buffer

        # Callbacks can also refer to these, whose state is stored elsewhere.
        self._referable = {**self.objects, "model.policy.optimizer": model.policy.optimizer}
        for name, parameter in model.policy.named_parameters():
            self._referable[f"parameter {name}"] = parameter
        # Environments of MuJoCo keep views of its memory.
        for name, found in self.objects.items():
            for key, array in simulator_arrays(found).items():
                self._referable[f"{name}.{key}"] = array

        if hasattr(model, "_logger"):
            for place, part in enumerate([model.logger, *model.logger.output_formats]):
                self._referable[f"logger {place}"] = part
        self._names = {id(value): name for name, value in self._referable.items()}

    def _find(self, name: str, found: object) -> None:
        """Add an object that the program built, and those in its attributes."""
        # Objects refer to each other in circles.
        if id(found) in self._names:
            return

        if isinstance(found, BaseCallback):
            # Numbered by class and not by place, which one more or one fewer callback would change.
            kind = f"callback {_kind(found)}"
            number = 0
            while f"{kind} {number}" in self.objects:
                number += 1
            name = f"{kind} {number}"

        self.objects[name] = found
        self._names[id(found)] = name
        for attribute, value in getattr(found, "__dict__", {}).items():  # simulators have none
            for place, part in _built_parts(value).items():
                # What an opaque batch holds is not the state of the training.
                if not _is_opaque(found) or isinstance(part, ResultsWriter):
                    self._find(f"{name}.{attribute}{place}", part)

    def capture(self) -> dict[str, Any]:
        """Pickle the attributes of all objects.

        :return: ``attributes``: the pickle; ``without_state``: classes of training environments whose state cannot be pickled,
            or belongs to another library or process; ``dropped``: names of the other attributes that cannot be pickled, and of
            such environments in callbacks
        """
        objects: dict[str, tuple[str, Any]] = {}
        lost: list[tuple[str, str]] = []  # objects, and places in them
        for name, found in self.objects.items():
            objects[name] = (_kind(found), self._state_of(name, found))
            if _is_opaque(found) or _is_connected(found):
                lost.append((name, name))

        # At once, because pickling each attribute alone would take longer, and would copy what they share.
        state = {"environments": self._environments(), "objects": objects}
        try:
            content = self._pickled(state)
        except Exception:  # an object can raise anything when it is pickled
            lost += self._replace_unpicklable(objects)
            content = self._pickled(state)

        # Environments that start new episodes are told apart from attributes that keep the values of the program.
        without_state = set()
        dropped = []
        for name, place in lost:
            if _is_training_env(name):
                without_state.add(_kind(self.objects[name]))
            else:
                dropped.append(place)
        for name, found in self.objects.items():
            # Opponents in an environment, for example, whose parameters are stored nowhere.
            if isinstance(found, BaseAlgorithm) and name != "model":
                dropped.append(name)
        return {
            "attributes": content,
            "without_state": sorted(without_state),
            "dropped": dropped,
        }

    def _replace_unpicklable(self, objects: dict[str, tuple[str, Any]]) -> Iterator[tuple[str, str]]:
        """Replace attributes that cannot be pickled, and yield objects and places of those that are lost."""
        for name, (_, attributes) in objects.items():
            # Of a simulator
            if not isinstance(attributes, dict):
                continue

            for key, value in attributes.items():
                try:
                    self._pickled(value)
                except Exception:  # as above
                    # Equal code in the resuming program does the same.
                    code = _code(value)
                    attributes[key] = _NotStored(code)
                    is_rendered_again = key in _RENDERERS and isinstance(self.objects[name], gym.Env)
                    if code is None and not is_rendered_again:
                        yield name, f"{name}.{key}"

    def _state_of(self, name: str, found: object) -> object:
        native = native_state(type(found))
        if native is not None:
            return native.get(found)
        if _is_opaque(found) or _is_connected(found) or isinstance(found, ProgressBarCallback):
            return {}

        state = {}
        for key, value in vars(found).items():
            if self._is_skipped(found, key, value):
                continue
            if isinstance(value, _DESCRIPTIONS) or _is_built_again(name, value):
                continue
            # The directory may have been moved.
            if _is_path_setting(found, value):
                value = _NotStored(os.fspath(value))
            state[key] = value

        if isinstance(found, BaseAlgorithm) and hasattr(found, "shaping"):
            # Models do not save a shape, which may be a function without a name.
            state["shaping"] = found.shaping
        return state

    def _is_skipped(self, found: object, key: str, value: object) -> bool:
        """Return whether an attribute is stored elsewhere, belongs to the process, or is an argument of the program."""
        if isinstance(found, BaseAlgorithm):
            return key in self._excluded_of_model

        if isinstance(found, BaseCallback):
            # Functions connect a callback with the rest of its program, and copies of what they refer to would not.
            return key in _CALLBACK or _is_nameless(value)

        if isinstance(found, torch.nn.Module | RolloutBuffer):
            # Parameters and buffers are in the model file, and a rollout starts with an empty rollout buffer.
            return not isinstance(value, int | float | str | None)
        return key in _ENVIRONMENT

    def _pickled(self, value: object) -> bytes:
        file = io.BytesIO()
        pickler = _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL)
        pickler.names = self._names
        pickler.dump(value)
        return file.getvalue()

    def restore(self, content: bytes) -> list[str]:
        """Set the attributes of all objects to those that were captured.

        :return: names of attributes that differ from the captured ones and cannot be restored
        :raises ValueError: if the environments have other classes or wrappers than those of the checkpoint, or the program
            lacks a class or function that the checkpoint refers to
        """
        unpickler = Unpickler(io.BytesIO(content))
        unpickler.persistent_load = self._referable.get  # type: ignore[method-assign]
        try:
            state = unpickler.load()
        except (AttributeError, ImportError) as error:
            raise ValueError(f"the checkpoint refers to an object that this program does not define: {error}") from error

        # Before anything is changed
        self._require_environments(state["environments"])

        different = []
        for name, (kind, attributes) in state["objects"].items():
            found: Any = self.objects.get(name)
            if kind != _kind(found):  # a callback that the program has added or removed
                continue

            native = native_state(type(found))
            if native is not None:
                native.set(found, attributes)
                continue

            for key, value in attributes.items():
                if key == "shaping" and isinstance(found, BaseAlgorithm):
                    model: Any = found
                    restored = _connected(model.shaping, value)
                    if restored != model.shaping:
                        model.shaping = restored  # the setter makes it take effect
                    continue

                # What is not stored stays as the program built it, and is only compared.
                built = vars(found).get(key)
                if isinstance(value, _NotStored) or _is_path_setting(found, built):
                    if _path(built) != _path(value):
                        different.append(f"{name}.{key}")
                    continue
                vars(found)[key] = _connected(built, value)

        return different

    def _require_environments(self, there: dict[str, str]) -> None:
        here = self._environments()
        names = {name for name, _ in here.items() ^ there.items()}
        if names:
            # The outermost wrapper says most.
            name = min(names, key=lambda name: (len(name), name))
            now = here.get(name, "missing")
            before = there.get(name, "missing")
            raise ValueError(
                f"{name.removeprefix('model.')} is {now}, but {before} in the checkpoint; "
                "use as many environments and the same wrappers as before"
            )

    def _environments(self) -> dict[str, str]:
        """Return the classes of the training environments and their wrappers by name."""
        environments = {}
        for name, found in self.objects.items():
            if isinstance(found, VecEnv | gym.Env) and _is_training_env(name):
                environments[name] = _kind(found)
        return environments


def _is_training_env(name: str) -> bool:
    return name == "model.env" or name.startswith(("model.env.", "model.env["))


def _built_parts(value: object) -> dict[str, object]:
    """Return the built objects that a value is, or that a list, tuple or dict holds, by their place in it."""
    if _is_built(type(value)):
        return {"": value}

    parts: Iterable[tuple[object, object]] = []
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list | tuple):
        kinds = set(map(type, value))  # long lists of numbers are common
        if any(map(_is_built, kinds)):
            parts = enumerate(value)

    built = {}
    for place, part in parts:
        if _is_built(type(part)):
            built[f"[{place!r}]"] = part
    return built


def _is_built_again(name: str, value: object) -> bool:
    """Tell whether the resuming program sets an attribute itself, because the value is nothing but built objects.

    Between training environments references are restored: a wrapper can switch from one environment to another. Their
    names exist there, because the environments are the same. Those of spaces and callbacks may not.
    """
    parts = _built_parts(value).values()
    length = 1
    if isinstance(value, dict | list | tuple):
        length = len(value)
    # Numbers among them would be lost.
    if len(parts) != length or length == 0:
        return False
    if not _is_training_env(name):
        return True
    are_environments = all(isinstance(part, VecEnv | gym.Env) for part in parts)
    return not are_environments


def _is_built(kind: type) -> bool:
    return issubclass(kind, _BUILT) or native_state(kind) is not None


def _is_opaque(found: object) -> bool:
    """Tell whether an object is a batch of environments of another library or another process."""
    return isinstance(found, VecEnv) and not isinstance(found, DummyVecEnv | VecEnvWrapper)


def _is_connected(found: object) -> bool:
    """Tell whether an environment holds a connection to a simulator, whose objects its other attributes may number."""
    if not isinstance(found, gym.Env):
        return False
    for name, value in vars(found).items():
        # Windows are made again.
        if name not in _RENDERERS and _has_finalizer(value) and not _is_built(type(value)):
            return True
    return False


def _has_finalizer(value: object) -> bool:
    """Tell whether a value owns something outside of Python, which its copy would use and close, as PyBullet's clients do."""
    return isinstance(getattr(type(value), "__del__", None), types.FunctionType)


def _is_path_setting(owner: object, value: object) -> bool:
    """Tell whether a value is a path in a callback, which differs if the directory has been moved."""
    if not isinstance(owner, BaseCallback):
        return False
    if isinstance(value, str):
        return os.path.dirname(value) != "" or os.path.exists(value)
    return isinstance(value, os.PathLike)


def _path(value: object) -> str | None:
    """Return a path, or what stands for one, as text; None for other values, which are not compared."""
    if isinstance(value, _NotStored):
        return value.description
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    return _code(value)


def _code(value: object) -> str | None:
    """Return text that is equal for equal functions without a name; None for other values."""
    function: Any = getattr(value, "value_schedule", value)
    if not _is_nameless(function):
        return None
    return f"code {function.__qualname__} {function.__code__.co_code.hex()}"


def _connected(built: Any, value: Any) -> Any:
    """Return a restored value, but the program's own function, connected with the rest of it, if the code is the same."""
    if isinstance(value, FloatSchedule) and isinstance(built, FloatSchedule):
        value.value_schedule = _connected(built.value_schedule, value.value_schedule)
        return value

    # Another function is taken as it was stored.
    if not (_is_nameless(value) and _is_nameless(built) and value.__code__ == built.__code__):
        return value

    cells = built.__closure__ or ()
    stored_cells = value.__closure__ or ()
    for cell, stored in zip(cells, stored_cells, strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            cell.cell_contents = _connected(cell.cell_contents, stored.cell_contents)
    built.__defaults__ = value.__defaults__
    built.__kwdefaults__ = value.__kwdefaults__
    return built


def _is_nameless(value: object) -> bool:
    """Tell whether a value is a lambda, or a function that was defined in another one."""
    return isinstance(value, types.FunctionType) and "<" in value.__qualname__


def _array(content: bytes, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array that owns its memory, which an array of NumPy's own pickles does not."""
    return np.frombuffer(content, dtype).reshape(shape).copy()


def _kind(found: object) -> str:
    return type(found).__qualname__


class Unpickler(pickle.Unpickler):
    """Unpickle tensors of a GPU on the CPU if this machine has no GPU."""

    def find_class(self, module: str, name: str) -> object:
        is_storage = (module, name) == ("torch.storage", "_load_from_bytes")
        if is_storage and not torch.cuda.is_available():
            return _load_on_cpu
        return super().find_class(module, name)


def _load_on_cpu(content: bytes) -> object:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickle references to built objects as their names, functions without a name by their code, and the rest as usual.

    Arrays that share memory share it afterwards, too.
    """

    names: dict[int, str]
    # Without cloudpickle's copies of files and buffers, which are neither. A plain dictionary, because cloudpickle's chained
    # one takes a microsecond per object.
    dispatch_table: ClassVar[dict[type, Any]] = dict(cloudpickle.Pickler.dispatch_table)
    for _kind_of_file in (io.TextIOWrapper, memoryview):
        dispatch_table.pop(_kind_of_file, None)

    def persistent_id(self, value: object) -> str | None:
        return self.names.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, gym.utils.EzPickle | gym.Env | VecEnv) or _has_finalizer(value):
            # Unpickled, an EzPickle object is as its constructor made it.
            raise pickle.PicklingError(f"{type(value).__qualname__} is pickled without its state")

        # NumPy's own pickles of arrays would each get memory of their own.
        if type(value) is np.ndarray and not value.dtype.hasobject:
            root = value
            if type(value.base) is np.ndarray:
                root = value.base
            if root.flags.c_contiguous and root is value:
                return _array, (value.tobytes(), value.dtype, value.shape)
            if root.flags.c_contiguous:
                # A view of an array that is pickled once
                start = value.__array_interface__["data"][0]
                offset = start - root.__array_interface__["data"][0]
                return np.ndarray, (value.shape, value.dtype, root, offset, value.strides)

        # Methods of built objects stay connected with them.
        if isinstance(value, types.MethodType):
            owner = value.__self__
            name = value.__name__
            if getattr(owner, name, None) == value:
                return getattr, (owner, name)

        # Named functions and classes are those of the resuming program, which may compare them with its own.
        is_part_of_code = isinstance(value, type) and value.__module__ == "builtins"
        if _is_nameless(value) or is_part_of_code:
            return super().reducer_override(value)
        return NotImplemented
