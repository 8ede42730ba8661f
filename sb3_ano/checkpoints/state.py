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
from typing import Any

import gymnasium as gym
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils import EzPickle
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback, ProgressBarCallback
from stable_baselines3.common.monitor import ResultsWriter
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper

from sb3_ano.checkpoints.native import native_state

_BUILT = (BaseAlgorithm, BaseCallback, VecEnv, gym.Env, spaces.Space, ResultsWriter)
# Code and descriptions, which the program that goes on has itself.
_CODE = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.ModuleType,
    types.MappingProxyType,
    type,
    EnvSpec,
)
# Settings of callbacks, which differ where a folder has been moved.
_PATHS = (str, os.PathLike)
# What environments of gymnasium draw on, which has no part in their steps.
_DRAWING = {"clock", "mujoco_renderer", "renderer", "screen", "surf", "viewer", "window", "window_surface"}
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
        self._find("model", model)
        if callback is not None:
            self._find("callback", callback)

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
        """Attributes of model and callbacks that cannot be pickled, as ``object.attribute``. Known after :meth:`capture`."""
        return [
            f"{name}.{attribute}"
            for name, attributes in self._incomplete.items()
            for attribute in attributes
            if isinstance(self.objects[name], BaseAlgorithm | BaseCallback)
        ]

    def capture(self) -> bytes:
        """Pickle the attributes of all objects, without those that cannot be pickled."""
        objects = {name: (_kind(found), self._captured(found)) for name, found in self.objects.items()}
        state = {"environments": self._environments(), "objects": objects}
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
        code: tuple[type, ...] = _CODE
        if isinstance(found, BaseAlgorithm):
            skipped = self._model_skips
        elif isinstance(found, BaseCallback):
            skipped, code = _OF_CALLBACKS, (*_CODE, *_PATHS)
        elif isinstance(found, gym.Env):
            skipped = _DRAWING
        for key, value in vars(found).items():
            schedule = isinstance(found, BaseAlgorithm) and callable(value)
            if not (key in skipped or schedule or isinstance(value, code) or _is_link(value)):
                yield key, value

    def _drop(self, objects: dict[str, tuple[str, Any]]) -> None:
        """Take out what cannot be pickled."""
        for name, (_, attributes) in objects.items():
            if not isinstance(attributes, dict):
                continue
            for key in list(attributes):
                try:
                    self._pickled(attributes[key])
                except Exception:
                    del attributes[key]
                    self._incomplete.setdefault(name, []).append(key)

    def _pickled(self, value: Any) -> bytes:
        file = io.BytesIO()
        _Pickler(file, self._names).dump(value)
        return file.getvalue()

    def restore(self, content: bytes) -> None:
        """Give all objects the attributes that were captured.

        :raises ValueError: if the environments are built in another way than those of the checkpoint
        """
        state = _Unpickler(io.BytesIO(content), self.objects).load()
        self._require_environments(state["environments"])
        for name, (kind, attributes) in state["objects"].items():
            found = self.objects.get(name)
            if found is None or kind != _kind(found):
                continue
            native = native_state(type(found))
            if native is not None:
                native.set(found, attributes)
            else:
                # Also where there was none, a path stays what it is now.
                kept = {
                    key for key, value in vars(found).items() if isinstance(found, BaseCallback) and isinstance(value, _PATHS)
                }
                vars(found).update({key: value for key, value in attributes.items() if key not in kept})

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
