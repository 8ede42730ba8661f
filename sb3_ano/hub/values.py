"""Arguments as JSON: plain values as themselves, classes by allow-listed names, everything else by name for information.

An object whose key starts with ``$`` stands for what JSON has no word for: ``$tuple``, ``$float`` (infinity and NaN),
``$class`` (one of :data:`CLASSES`), ``$schedule``, and ``$custom``, which only the caller of ``load_safe`` can supply.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, NatureCNN

from sb3_ano.algorithms.buffers import DictFlatRolloutBuffer, FlatRolloutBuffer
from sb3_ano.algorithms.papo import DictTDRolloutBuffer, TDRolloutBuffer
from sb3_ano.hub.documents import SafeFormatError, fields, refused, text
from sb3_ano.hub.schedules import (
    SCHEDULES,
    decode_schedule,
    decode_unknown,
    dotted_name,
    encode_schedule,
    encode_unknown,
)

# fmt: off
_ACTIVATIONS = (
    "CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "LogSigmoid", "Mish",
    "PReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink",
)
_OPTIMIZERS = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)
# fmt: on


def _by_name(*classes: type) -> dict[str, type]:
    return {f"{each.__module__}.{each.__qualname__}": each for each in classes}


#: The classes that a file may name, by the argument that takes them.
CLASSES: dict[str, dict[str, type]] = {
    "activation_fn": {f"torch.nn.{name}": getattr(torch.nn, name) for name in _ACTIVATIONS},
    "optimizer_class": {f"torch.optim.{name}": getattr(torch.optim, name) for name in _OPTIMIZERS} | _by_name(RMSpropTFLike),
    "features_extractor_class": _by_name(FlattenExtractor, NatureCNN, CombinedExtractor),
    "rollout_buffer_class": _by_name(
        RolloutBuffer,
        DictRolloutBuffer,
        FlatRolloutBuffer,
        DictFlatRolloutBuffer,
        TDRolloutBuffer,
        DictTDRolloutBuffer,
    ),
}


class CustomObjects:
    """What the caller supplies in place of what a file says or cannot say, by dotted name such as ``policy_kwargs.x``.

    :param objects: as given to ``load_safe``
    :raises TypeError: if it is no mapping from strings
    """

    def __init__(self, objects: Mapping[str, Any] | None) -> None:
        if objects is not None and not (isinstance(objects, Mapping) and all(isinstance(name, str) for name in objects)):
            raise TypeError(f"custom_objects={objects!r} is not allowed; allowed is a dict with strings as keys")
        self._objects = dict(objects or {})
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._objects

    def take(self, name: str) -> Any:
        """The object of this name, which counts as used from now on."""
        self._used.add(name)
        return self._objects[name]

    def touches(self, *names: str) -> bool:
        """Whether one of these, or a part of it, was taken."""
        return any(used == name or used.startswith(f"{name}.") for used in self._used for name in names)

    def require_used(self, allowed: list[str]) -> None:
        """Complain of a name that nothing asked for.

        :raises TypeError: if there is one
        """
        unused = sorted(self._objects.keys() - self._used)
        if unused:
            raise TypeError(f"custom_objects has {unused[0]!r}, which the agent does not have; allowed are {allowed}")


def encode(value: Any, name: str, custom: dict[str, Any]) -> Any:
    """A value as JSON.

    :param name: dotted name of the argument, or of the part of one
    :param custom: takes up, by dotted name, what only the caller of ``load_safe`` will be able to supply
    """
    # bool before int, and NumPy's scalars as Python's
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, list | tuple):
        items = [encode(each, f"{name}.{index}", custom) for index, each in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, dict) and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(each, f"{name}.{key}", custom) for key, each in value.items()}
    if name in SCHEDULES and callable(value):
        known = encode_schedule(value)
        if known is not None:
            return known
        custom[name] = value
        return encode_unknown(value, name)
    for dotted, allowed in CLASSES.get(_key(name), {}).items():
        if value is allowed:
            return {"$class": dotted}
    custom[name] = value
    return {"$custom": dotted_name(value)}


def decode(value: Any, name: str, custom: CustomObjects) -> Any:
    """The value that :func:`encode` described; nothing is imported.

    :param name: dotted name of the argument, or of the part of one
    :raises SafeFormatError: if it names a class that is not allowed there, or something that the caller has to supply
    """
    if name in custom:
        return custom.take(name)
    if isinstance(value, list):
        return [decode(each, f"{name}.{index}", custom) for index, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: decode(each, f"{name}.{key}", custom) for key, each in value.items()}
    if "$schedule" in value and name in SCHEDULES:
        return decode_schedule(value, name)
    if "$custom" in value and "initial" in value and name in SCHEDULES:
        return decode_unknown(value, name)
    return _decode_tag(value, name, custom)


def _decode_tag(value: dict[str, Any], name: str, custom: CustomObjects) -> Any:
    tag = min(value)
    fields(value, name, (tag,))
    content = value[tag]
    if tag == "$tuple" and isinstance(content, list):
        return tuple(decode(each, f"{name}.{index}", custom) for index, each in enumerate(content))
    if tag == "$float" and content in ("inf", "-inf", "nan"):
        return float(content)
    if tag == "$class":
        allowed = CLASSES.get(_key(name), {})
        if not isinstance(content, str) or content not in allowed:
            raise refused(name, content, f"{', '.join(allowed)}" if allowed else "values that are no class")
        return allowed[content]
    if tag == "$custom":
        raise SafeFormatError(
            f"{name} was {text(content, name)}, which is not built in and is never imported by its name; pass it as "
            f"custom_objects={{{name!r}: ...}}"
        )
    raise refused(name, value, "plain values, $tuple, $float, $class, $schedule and $custom")


def _key(name: str) -> str:
    """The last part of a dotted name, by which classes are allowed."""
    return name.rpartition(".")[2]
