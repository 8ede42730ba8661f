"""The state of a training: the attributes of its model, environments and callbacks, as one pickle.

Those objects themselves are built again by the program that goes on, and only get their attributes back. They are found by
following attributes, and are known by how they were reached; a reference to one of them is stored as its name.
"""

import io
import os
import pickle
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils import EzPickle
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback, ProgressBarCallback
from stable_baselines3.common.monitor import ResultsWriter
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper

from sb3_ano.checkpoints.native import native_state

_BUILT = (BaseAlgorithm, BaseCallback, VecEnv, gym.Env, spaces.Space, ResultsWriter)
# Descriptions, which the program that resumes has itself.
_DESCRIPTIONS = (types.ModuleType, types.MappingProxyType, EnvSpec)
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type)
# The attributes of networks and rollout buffers that are stored here. Parameters are in the model's file.
_PLAIN = (bool, int, float, str, type(None))
# What environments of gymnasium draw on, and the arguments of wrappers, which have no part in their steps.
_NOT_IN_STEPS = {
    "_saved_kwargs",
    "clock",
    "mujoco_renderer",
    "renderer",
    "screen",
    "surf",
    "viewer",
    "window",
    "window_surface",
}
_OF_CALLBACKS = {"globals", "locals", "verbose"}
_OF_MODELS = {
    "_logger",
    "_total_timesteps",
    "policy_kwargs",
    "rollout_buffer_kwargs",
    "start_time",
    "tensorboard_log",
    "verbose",
}


@dataclass(frozen=True)
class _NotStored:
    """Stands in the state for a value that the program that resumes must have itself: a path, or code without a name.

    :param description: equal descriptions mean equal values
    """

    description: Any


class TrainingState:
    """The objects of a training by name, whose attributes are captured, and restored in another process.

    :param model: with its environments
    :param callback: all callbacks of the training, or None
    :param without: callbacks that are no part of the state
    """

    def __init__(self, model: BaseAlgorithm, callback: BaseCallback | None, without: BaseCallback | None = None) -> None:
        self._without = without
        self.objects: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        skips = {*_OF_MODELS, *model._excluded_save_params(), *model._get_torch_save_params()[0]}
        # What a rollout starts from is not saved with every model.
        self._model_skips = {name for name in skips if not name.startswith("_last_")}
        self._incomplete: dict[str, list[str]] = {}
        self._links: dict[str, str] = {}
        self._find("model", model)
        if callback is not None:
            self._find("callback", callback)
        self._references = dict(_references(model))
        for name, module in model.policy.named_modules():
            self.objects[f"model.policy.{name}"] = module
        if isinstance(model, OnPolicyAlgorithm):
            self.objects["model.rollout_buffer"] = model.rollout_buffer
        self._names |= {id(value): name for name, value in (self.objects | self._references).items()}

    def _find(self, name: str, found: Any) -> None:
        if id(found) in self._names or found is self._without or isinstance(found, ProgressBarCallback):
            return
        if isinstance(found, BaseCallback):
            # Not by place: a progress bar more or less moves the others.
            kind = f"callback {type(found).__qualname__}"
            name = f"{kind} {sum(other.startswith(kind + ' ') for other in self.objects)}"
        self.objects[name] = found
        self._names[id(found)] = name
        if native_state(type(found)) is not None and not isinstance(found, spaces.Space):
            return
        for attribute, value in vars(found).items():
            for place, part in _built_parts(value).items():
                if not _is_opaque(found) or isinstance(part, ResultsWriter):
                    self._find(f"{name}.{attribute}{place}", part)
                if _is_training_env(name) and id(part) in self._names:
                    self._links[f"{name}.{attribute}{place}"] = self._names[id(part)]

    def environments_without_state(self) -> list[str]:
        """Kinds of training environments whose state is out of reach: those of another library or process, and those with
        attributes that cannot be pickled. Known after :meth:`capture`.
        """
        return list(
            dict.fromkeys(
                _kind(found)
                for name, found in self.objects.items()
                if _is_training_env(name) and (name in self._incomplete or _is_opaque(found))
            )
        )

    @property
    def dropped(self) -> list[str]:
        """State outside of the training environments that cannot be stored: attributes that cannot be pickled, as
        ``object.attribute``, and environments of callbacks. Known after :meth:`capture`.
        """
        attributes = [f"{name}.{attribute}" for name, lost in self._incomplete.items() for attribute in lost]
        opaque = [name for name, found in self.objects.items() if _is_opaque(found)]
        return [name for name in (*attributes, *opaque) if not _is_training_env(name)]

    def capture(self) -> bytes:
        """Pickle the attributes of all objects, without those that cannot be pickled."""
        objects = {name: (_kind(found), self._captured(found)) for name, found in self.objects.items()}
        state = {"environments": self._environments(), "links": self._links, "objects": objects}
        try:
            return self._pickled(state)
        except Exception:  # an object may raise anything when it is pickled
            self._drop(objects)
            return self._pickled(state)

    def _captured(self, found: Any) -> Any:
        native = native_state(type(found))
        if native is not None:
            return native.get(found)
        return dict(self._attributes(found))

    def _attributes(self, found: Any) -> Iterator[tuple[str, Any]]:
        """The attributes that make the state of an object."""
        if _is_opaque(found):
            return
        skipped: set[str] = {"class_attributes"}
        if isinstance(found, BaseAlgorithm):
            skipped = self._model_skips
        elif isinstance(found, BaseCallback):
            skipped = _OF_CALLBACKS
        elif isinstance(found, gym.Env):
            skipped = _NOT_IN_STEPS
        elif isinstance(found, torch.nn.Module | RolloutBuffer):
            skipped = {key for key, value in vars(found).items() if not isinstance(value, _PLAIN)}
        for key, value in vars(found).items():
            if key in skipped or isinstance(value, _DESCRIPTIONS) or _is_link(value):
                continue
            is_code = isinstance(value, _CODE) or (isinstance(found, BaseAlgorithm) and callable(value))
            if _is_path_setting(found, value) or (is_code and not self._can_pickle(value)):
                value = _NotStored(_description(value))
            yield key, value

    def _can_pickle(self, value: Any) -> bool:
        if isinstance(value, types.MethodType):
            # It is found again by its name, which may mean another method there.
            method = getattr(type(value.__self__), value.__name__, None)
            if method is not value.__func__:
                return False
        try:
            self._pickled(value)
        except Exception:  # an object may raise anything when it is pickled
            return False
        return True

    def _drop(self, objects: dict[str, tuple[str, Any]]) -> None:
        """Take out what cannot be pickled."""
        for name, (_, attributes) in objects.items():
            if not isinstance(attributes, dict):
                continue
            for key in list(attributes):
                if not self._can_pickle(attributes[key]):
                    del attributes[key]
                    self._incomplete.setdefault(name, []).append(key)

    def _pickled(self, value: Any) -> bytes:
        file = io.BytesIO()
        _Pickler(file, self._names).dump(value)
        return file.getvalue()

    def restore(self, content: bytes) -> list[str]:
        """Give all objects the attributes that were captured.

        :return: attributes that differ from those that were captured, and cannot be restored
        :raises ValueError: if the environments are built in another way than those of the checkpoint, or classes or functions
            in it do not exist any more
        """
        try:
            state = _Unpickler(io.BytesIO(content), self.objects | self._references).load()
        except (AttributeError, ImportError) as error:
            raise ValueError(f"the checkpoint holds an object that this program does not define: {error}") from error
        self._require_environments(state["environments"])
        links = state.get("links", {})
        different = [place for place, target in self._links.items() if links.get(place, target) != target]
        for name, (kind, attributes) in state["objects"].items():
            found = self.objects.get(name)
            if found is None or kind != _kind(found):
                continue
            native = native_state(type(found))
            if native is not None:
                native.set(found, attributes)
            else:
                for key, value in attributes.items():
                    built = vars(found).get(key)
                    if not (isinstance(value, _NotStored) or _is_path_setting(found, built)):
                        vars(found)[key] = value
                    elif _description(built) != _description(value):
                        different.append(f"{name}.{key}")
        return different

    def _environments(self) -> dict[str, str]:
        """The training environments and their wrappers, by name: what they are."""
        return {
            name: _kind(found)
            for name, found in self.objects.items()
            if _is_training_env(name) and isinstance(found, VecEnv | gym.Env)
        }

    def _require_environments(self, captured: dict[str, str]) -> None:
        built = self._environments()
        for name in sorted({*built, *captured}, key=len):
            here, there = built.get(name, "missing"), captured.get(name, "missing")
            if here != there:
                raise ValueError(
                    f"{name.removeprefix('model.')} is {here}, and {there} in the checkpoint; a training goes on only with as "
                    "many environments and the same wrappers as before"
                )


def _is_training_env(name: str) -> bool:
    return re.match(r"model\.env\b", name) is not None


def _built_parts(value: Any) -> dict[str, Any]:
    """A value, or parts of a list, tuple or dict, that are objects of their own, by place."""
    parts = {f"[{key!r}]": part for key, part in value.items()} if isinstance(value, dict) else {"": value}
    if isinstance(value, list | tuple):
        if not any(map(_is_built, set(map(type, value)))):  # long lists of numbers are common
            return {}
        parts = {f"[{index}]": part for index, part in enumerate(value)}
    return {place: part for place, part in parts.items() if _is_built(type(part))}


def _is_link(value: Any) -> bool:
    """Whether a value is nothing but such objects, which the program that goes on has linked itself."""
    return len(_built_parts(value)) == (len(value) or -1 if isinstance(value, dict | list | tuple) else 1)


def _is_built(kind: type) -> bool:
    return issubclass(kind, _BUILT) or native_state(kind) is not None


def _is_opaque(found: Any) -> bool:
    """Whether these are environments of another library or another process."""
    return isinstance(found, VecEnv) and not isinstance(found, DummyVecEnv | VecEnvWrapper)


def _is_path_setting(found: Any, value: Any) -> bool:
    """Whether this is a path in a callback, which differs where a folder has been moved."""
    if not isinstance(found, BaseCallback):
        return False
    separators = (os.sep, os.altsep or os.sep)
    return isinstance(value, os.PathLike) or (
        isinstance(value, str) and (any(separator in value for separator in separators) or os.path.exists(value))
    )


def _description(value: Any) -> Any:
    """Plain values by which two attributes can be compared; functions are not called for it."""
    if isinstance(value, _NotStored):
        return value.description
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    value = getattr(value, "value_schedule", value)  # which SB3 wraps
    function = getattr(value, "__func__", value)
    if not isinstance(function, types.FunctionType):
        return value if isinstance(value, _PLAIN) else getattr(value, "__qualname__", _kind(value))
    code = function.__code__
    held = [*code.co_consts, *(function.__defaults__ or ()), *map(_content, function.__closure__ or ())]
    return [function.__module__, function.__qualname__, code.co_code, [part for part in held if isinstance(part, _PLAIN)]]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _references(model: BaseAlgorithm) -> Iterator[tuple[str, Any]]:
    """Parts of the model to which callbacks may refer, and whose state is stored elsewhere."""
    yield "model.policy.optimizer", model.policy.optimizer
    for name, parameter in model.policy.named_parameters():
        yield f"parameter {name}", parameter
    logger = getattr(model, "_logger", None)
    for place, part in enumerate([logger, *logger.output_formats] if logger else []):
        yield f"logger {place}", part


def _kind(found: Any) -> str:
    return type(found).__qualname__


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, names: dict[int, str]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._names = names

    def persistent_id(self, value: Any) -> str | None:
        return self._names.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, EzPickle | gym.Env | VecEnv):
            # EzPickle would come back as it was made, without its state.
            raise pickle.PicklingError(f"{type(value).__qualname__} does not take its state along")
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, objects: dict[str, Any]) -> None:
        super().__init__(file)
        self._objects = objects

    def persistent_load(self, name: str) -> Any:
        return self._objects.get(name)
