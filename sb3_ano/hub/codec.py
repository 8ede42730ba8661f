"""Constructor arguments as JSON and back: one codec, and the list of everything that a file may name.

Plain values stand for themselves. An object with a key that starts with ``$`` stands for what JSON has no word for:

- ``$tuple``: a tuple;
- ``$float``: infinity or NaN;
- ``$class``: one of :data:`CLASSES`;
- ``$schedule``: a linear schedule;
- ``$custom``: the name of something that only the caller of ``load_safe`` can supply. It is never imported.
"""

import inspect
import json
import math
import types
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, NatureCNN
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule

from sb3_ano._arguments import NOT_HYPERPARAMETERS, constructor_parameters
from sb3_ano._registry import ALGORITHMS
from sb3_ano.algorithms import ShapedPolicyAlgorithm
from sb3_ano.hub.documents import SafeFormatError, rejected, require_like, shown
from sb3_ano.shaping import SHAPINGS

# fmt: off
_ACTIVATIONS = (
    "CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "LogSigmoid", "Mish",
    "PReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink",
)
# fmt: on
_OPTIMIZERS = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


def _by_name(*classes: type) -> dict[str, type]:
    return {f"{cls.__module__}.{cls.__qualname__}": cls for cls in classes}


def _of_module(module: types.ModuleType, names: Iterable[str]) -> dict[str, type]:
    return {f"{module.__name__}.{name}": getattr(module, name) for name in names}


def _policies() -> dict[str, type]:
    """Return SB3's policies by SB3's short names, and the masked and recurrent ones by their full names."""
    policies: dict[str, type] = dict(ShapedPolicyAlgorithm.policy_aliases)
    for entry in ALGORITHMS.values():
        for policy in entry.algorithm.policy_aliases.values():
            if policy not in policies.values():
                policies |= _by_name(policy)
    return policies


#: The allow-list: the classes that a file may name, by the argument that takes them. A file may also name the algorithms of
#: ``sb3_ano._registry``, the shapes of :data:`~sb3_ano.shaping.SHAPINGS`, and the spaces of ``spaces.py``, and nothing else.
CLASSES: dict[str, dict[str, type]] = {
    "policy": _policies(),
    "activation_fn": _of_module(torch.nn, _ACTIVATIONS),
    "optimizer_class": _of_module(torch.optim, _OPTIMIZERS) | _by_name(RMSpropTFLike),
    "features_extractor_class": _by_name(FlattenExtractor, NatureCNN, CombinedExtractor),
}
#: Arguments that may be schedules of the remaining progress.
SCHEDULES = ("learning_rate", "clip_range", "clip_range_high", "clip_range_vf", "desired_kl")
# The RL Zoo's schedule, by name, because this module does without the zoo.
_ZOO_LINEAR = ("rl_zoo3.utils", "SimpleLinearSchedule")
# Policy and shape have entries of their own. The directory of the logs is a path on the author's machine, to which training
# would write.
_NOT_STORED = (NOT_HYPERPARAMETERS - {"seed"}) | {"policy", "shaping"}
# Arguments that are used before the algorithm checks its arguments, or that it does not check.
_UNCHECKED = ("n_steps", "use_sde")
# Packages whose rollout buffers hold the same data.
_BUFFER_LIBRARIES = ("sb3_ano", "sb3_contrib", "stable_baselines3")
# Attributes whose names differ from those of the arguments.
_ATTRIBUTES = {"stats_window_size": "_stats_window_size"}
# Layers take time to build.
_MAX_ITEMS = 1000
# Arguments of an LSTM with which sb3-contrib's policies work. A device would take memory before sizes are compared.
_LSTM = {"bias": True, "dropout": 0.0}


def dotted_name(thing: Any) -> str:
    """Return ``"module:name"`` of a class or function, or of the class of any other object, for information only."""
    owner = thing if hasattr(thing, "__qualname__") else type(thing)
    module = str(owner.__module__)
    # A module that was loaded by its path may have any name, even that path.
    is_name = all(part.isidentifier() for part in module.split("."))
    return f"{module if is_name else '__main__'}:{owner.__qualname__}"


def is_built_in(shaping_name: str | list[str]) -> bool:
    """Return whether every shape of this name is one of :data:`~sb3_ano.shaping.SHAPINGS`."""
    names = [shaping_name] if isinstance(shaping_name, str) else shaping_name
    return all(name in SHAPINGS for name in names)


def encode(value: Any, name: str, custom: dict[str, Any]) -> Any:
    """Convert a value to JSON.

    :param value: constructor argument, or part of one
    :param name: dotted name of the value, by which classes and schedules are recognized
    :param custom: dictionary that collects, by dotted name, what only the caller of ``load_safe`` can supply
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{name}.{index}", custom) for index, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, dict) and _has_plain_keys(value):
        return {key: encode(item, f"{name}.{key}", custom) for key, item in value.items()}

    while isinstance(value, FloatSchedule):
        value = value.value_schedule
    if name in SCHEDULES:
        schedule = _encode_schedule(value)
        if schedule is not None:
            return schedule
    for known, cls in _allowed_classes(name).items():
        if value is cls:
            return {"$class": known}
    custom[name] = value
    return {"$custom": dotted_name(value)}


def _has_plain_keys(value: dict[Any, Any]) -> bool:
    return all(isinstance(key, str) and not key.startswith("$") for key in value)


def _allowed_classes(name: str) -> dict[str, type]:
    return CLASSES.get(name.rpartition(".")[2], {})


def _encode_schedule(schedule: Any) -> Any:
    """Convert a constant or linear schedule to JSON; None for any other."""
    kind = type(schedule)  # a subclass may compute something else
    if kind is ConstantSchedule:
        return float(schedule.val)
    if (kind.__module__, kind.__qualname__) == _ZOO_LINEAR:
        schedule = LinearSchedule(schedule.initial_value, 0.0, 1.0)
    elif kind is not LinearSchedule:
        return None
    return {
        "$schedule": "linear",
        "start": float(schedule.start),
        "end": float(schedule.end),
        "end_fraction": float(schedule.end_fraction),
    }


def decode(value: Any, name: str, custom: dict[str, Any]) -> Any:
    """Convert JSON to the value that :func:`encode` described. Nothing is imported.

    :param value: decoded JSON
    :param name: dotted name of the value
    :param custom: what the caller supplies by dotted name, instead of what the file says or cannot say;
        what is used is removed
    :raises SafeFormatError: if the value names a class that is not allowed there, or something that the caller has to supply
    """
    if name in custom:
        return custom.pop(name)
    if isinstance(value, list):
        if len(value) > _MAX_ITEMS:
            raise rejected(name, value, f"lists of up to {_MAX_ITEMS} elements")
        return [decode(item, f"{name}.{index}", custom) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value

    tag = _tag(value)
    if tag is None:
        return {key: decode(item, f"{name}.{key}", custom) for key, item in value.items()}
    content = value[tag]
    if content == "linear" and tag == "$schedule" and name in SCHEDULES:
        return _decode_schedule(value, name)

    require_like(value, {tag: None}, name)
    if tag == "$tuple" and isinstance(content, list):
        return tuple(decode(content, name, custom))
    if tag == "$float" and content in ("inf", "-inf", "nan"):
        return float(content)
    if tag == "$class":
        allowed = _allowed_classes(name)
        if not isinstance(content, str) or content not in allowed:
            raise rejected(name, content, ", ".join(allowed) or "values that are not classes")
        return allowed[content]
    if tag == "$custom" and isinstance(content, str):
        raise SafeFormatError(
            f"{name} was {shown(content)}, which is not built in and is never imported by its name; pass it as "
            f"custom_objects={{{name!r}: ...}}"
        )
    raise rejected(name, value, "plain values, $tuple, $float, $class, $schedule and $custom")


def _tag(value: dict[str, Any]) -> str | None:
    for key in value:
        if key.startswith("$"):
            return key
    return None


def _decode_schedule(value: dict[str, Any], name: str) -> LinearSchedule:
    require_like(value, {"$schedule": None, "start": 1.0, "end": 0.0, "end_fraction": 1.0}, name)
    if not value["end_fraction"] > 0.0:
        raise rejected(f"{name}.end_fraction", value["end_fraction"], "numbers above 0")
    if value["start"] < 0.0:
        raise rejected(f"{name}.start", value["start"], "numbers from 0")
    return LinearSchedule(value["start"], value["end"], value["end_fraction"])


def stored_arguments(algorithm: type[ShapedPolicyAlgorithm]) -> dict[str, Any]:
    """Return the names and defaults of an algorithm's arguments that the format stores."""
    defaults = {}
    for name, parameter in constructor_parameters(algorithm).items():
        if name not in _NOT_STORED:
            defaults[name] = parameter.default
    return defaults


def encode_arguments(model: ShapedPolicyAlgorithm, custom: dict[str, Any]) -> dict[str, Any]:
    """Convert the constructor arguments of a model to JSON.

    :param model: algorithm that keeps its arguments as attributes
    :param custom: dictionary that collects, by dotted name, what only the caller of ``load_safe`` can supply
    """
    arguments = {}
    for name in stored_arguments(type(model)):
        value = getattr(model, _ATTRIBUTES.get(name, name))
        if name == "rollout_buffer_class":
            library, _, _ = value.__module__.partition(".")
            if library in _BUFFER_LIBRARIES:
                value = None  # the algorithm chooses it again, by its observations
        arguments[name] = encode(value, name, custom)
    return arguments


def decode_arguments(document: Any, algorithm: type[ShapedPolicyAlgorithm], custom: dict[str, Any]) -> dict[str, Any]:
    """Convert JSON to the attributes of a model that :func:`encode_arguments` described.

    An argument that the JSON lacks has its default, because the algorithm may have got it later. Types and ranges are left to
    the algorithm, which checks its arguments before it is set up, and to the policy. What the caller supplies is not checked.

    :raises SafeFormatError: if an argument is unknown, or has to be supplied by the caller; or if one that is used before the
        algorithm checks it has another type
    """
    defaults = stored_arguments(algorithm) | {"policy_kwargs": {}}
    stored = document
    if isinstance(document, dict):
        stored = defaults | document
    examples = {name: defaults[name] if name in _UNCHECKED else None for name in defaults}
    require_like(stored, examples, "arguments")

    attributes = {}
    for name in defaults:
        attributes[_ATTRIBUTES.get(name, name)] = decode(stored[name], name, custom)
    _require_cheap(attributes["policy_kwargs"])
    return attributes


def require_numbers(values: Any, taker: Any, name: str) -> None:
    """Check the arguments of a class from a library whose defaults are numbers: they are finite numbers, too.

    Many classes of PyTorch take NaN, infinity and booleans without an error.

    :param values: arguments by name; anything else is left to the class
    :param taker: class
    :param name: dotted name of the arguments, for messages
    :raises SafeFormatError: if one is not
    """
    if not isinstance(values, dict):
        return
    for key, parameter in inspect.signature(taker).parameters.items():
        default = parameter.default
        examples = default if isinstance(default, tuple) else (default,)
        takes_numbers = all(type(example) in (int, float) for example in examples)
        if not takes_numbers or key not in values:
            continue

        given = values[key]
        for number in given if isinstance(given, tuple | list) else (given,):
            if type(number) not in (int, float) or not math.isfinite(number):
                raise rejected(f"{name}.{key}", given, "finite numbers")


def _require_cheap(policy_kwargs: Any) -> None:
    """Reject what takes memory or minutes even where a policy is built without memory."""
    layers = policy_kwargs.get("n_lstm_layers", 1)
    if type(layers) is not int or layers > _MAX_ITEMS:
        raise rejected("policy_kwargs.n_lstm_layers", layers, f"integers up to {_MAX_ITEMS}")
    options = policy_kwargs.get("lstm_kwargs") or {}
    examples = {name: example for name, example in _LSTM.items() if name in options}
    require_like(options, examples, "policy_kwargs.lstm_kwargs")


def decode_policy(document: Any, custom: dict[str, Any]) -> type[BasePolicy]:
    """Return the policy class that :func:`encode` described; the names of SB3's stand alone.

    :raises SafeFormatError: if the name is not SB3's, or the caller has to supply the class
    """
    policy = decode(document, "policy", custom)
    if isinstance(policy, str) and policy in CLASSES["policy"]:
        return CLASSES["policy"][policy]
    if not (isinstance(policy, type) and issubclass(policy, BasePolicy)):
        raise rejected("policy", policy, ", ".join(CLASSES["policy"]))
    return policy


def readable(encoded: Any) -> Any:
    """Replace the tags in what :func:`encode` returned by what the zoo's files have for them.

    Schedules become the zoo's text, or their numbers by name; classes become their names, and tuples lists.
    """
    return json.loads(json.dumps(encoded), object_hook=_without_tag)


def _without_tag(value: dict[str, Any]) -> Any:
    tag = _tag(value)
    if tag is None:
        return value
    if tag == "$float":
        return float(value[tag])
    if tag != "$schedule":
        return value[tag]

    schedule = _decode_schedule(value, "schedule")
    if (schedule.end, schedule.end_fraction) == (0.0, 1.0) and schedule.start > 0.0:
        return f"lin_{schedule.start}"
    return {"start": schedule.start, "end": schedule.end, "end_fraction": schedule.end_fraction}
