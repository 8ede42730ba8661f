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
from sb3_ano.hub.documents import Document, SafeFormatError, rejected, require_like, shown
from sb3_ano.shaping import SHAPINGS

# fmt: off
_ACTIVATIONS = (
    "CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "LogSigmoid", "Mish",
    "PReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink",
)
# fmt: on
_OPTIMIZERS = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


def _by_name(*classes: type) -> dict[str, type]:
    named = {}
    for cls in classes:
        named[f"{cls.__module__}.{cls.__qualname__}"] = cls
    return named


def _of_module(module: types.ModuleType, names: Iterable[str]) -> dict[str, type]:
    """Return classes by the names that users write, which are not those of the modules that define them."""
    named = {}
    for name in names:
        named[f"{module.__name__}.{name}"] = getattr(module, name)
    return named


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


def dotted_name(thing: object) -> str:
    """Return ``"module:name"`` of a class or function, or of the class of any other object, for information only."""
    owner: Any = thing
    if not hasattr(thing, "__qualname__"):
        owner = type(thing)

    module = str(owner.__module__)
    # A module that was loaded by its path may have any name, even that path.
    if not all(map(str.isidentifier, module.split("."))):
        module = "__main__"
    return f"{module}:{owner.__qualname__}"


def is_built_in(shaping_name: str | list[str]) -> bool:
    """Return whether every shape of this name is one of :data:`~sb3_ano.shaping.SHAPINGS`."""
    if isinstance(shaping_name, str):
        return shaping_name in SHAPINGS
    return SHAPINGS.keys() >= set(shaping_name)


def encode(value: Any, name: str, custom: Document) -> Any:
    """Convert a value to JSON.

    :param value: constructor argument, or part of one
    :param name: dotted name of the value, by which classes and schedules are recognized
    :param custom: dictionary that collects, by dotted name, what only the caller of ``load_safe`` can supply
    """
    # JSON knows Python's numbers only.
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return {"$float": repr(value)}

    if isinstance(value, list | tuple):
        items = []
        for index, item in enumerate(value):
            items.append(encode(item, f"{name}.{index}", custom))
        if isinstance(value, tuple):
            return {"$tuple": items}
        return items
    if isinstance(value, dict) and _has_plain_keys(value):
        document = {}
        for key, item in value.items():
            document[key] = encode(item, f"{name}.{key}", custom)
        return document

    # SB3 wraps schedules, and also what it has wrapped before.
    while isinstance(value, FloatSchedule):
        value = value.value_schedule
    if name in SCHEDULES:
        schedule = _encode_schedule(value)
        if schedule is not None:
            return schedule

    for known, cls in _allowed_classes(name).items():
        if value is cls:
            return {"$class": known}
    # Whatever is left has no word in the format.
    custom[name] = value
    return {"$custom": dotted_name(value)}


def _has_plain_keys(value: dict[object, object]) -> bool:
    # Keys with a dollar sign are tags.
    return all(isinstance(key, str) and not key.startswith("$") for key in value)


def _allowed_classes(name: str) -> dict[str, type]:
    return CLASSES.get(name.rpartition(".")[2], {})


def _encode_schedule(schedule: Any) -> float | Document | None:
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


def decode(value: object, name: str, custom: Document) -> Any:
    """Convert JSON to the value that :func:`encode` described. Nothing is imported.

    :param value: decoded JSON
    :param name: dotted name of the value
    :param custom: what the caller supplies by dotted name, instead of what the file says or cannot say;
        what is used is removed
    :raises SafeFormatError: if the value names a class that is not allowed there, or something that the caller has to supply
    """
    # What the caller supplies comes first, whatever the file says.
    if name in custom:
        return custom.pop(name)

    if isinstance(value, list):
        if len(value) > _MAX_ITEMS:
            raise rejected(name, value, f"lists of up to {_MAX_ITEMS} elements")
        items = []
        for index, item in enumerate(value):
            items.append(decode(item, f"{name}.{index}", custom))
        return items
    if not isinstance(value, dict):
        return value

    tag = _tag(value)
    if tag is None:
        decoded = {}
        for key, item in value.items():
            decoded[key] = decode(item, f"{name}.{key}", custom)
        return decoded

    # A schedule is the only tag with several keys.
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


def _tag(value: Document) -> str | None:
    for key in value:
        if key.startswith("$"):
            return key
    return None


def _decode_schedule(value: Document, name: str) -> LinearSchedule:
    require_like(value, {"$schedule": None, "start": 1.0, "end": 0.0, "end_fraction": 1.0}, name)
    if not value["end_fraction"] > 0.0:
        raise rejected(f"{name}.end_fraction", value["end_fraction"], "numbers above 0")
    if value["start"] < 0.0:
        raise rejected(f"{name}.start", value["start"], "numbers from 0")
    return LinearSchedule(value["start"], value["end"], value["end_fraction"])


def stored_arguments(algorithm: type[ShapedPolicyAlgorithm]) -> Document:
    """Return the names and defaults of an algorithm's arguments that the format stores."""
    defaults = {}
    for name, parameter in constructor_parameters(algorithm).items():
        if name not in _NOT_STORED:
            defaults[name] = parameter.default
    return defaults


def encode_arguments(model: ShapedPolicyAlgorithm, custom: Document) -> Document:
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


def decode_arguments(document: object, algorithm: type[ShapedPolicyAlgorithm], custom: Document) -> Document:
    """Convert JSON to the attributes of a model that :func:`encode_arguments` described.

    An argument that the JSON lacks has its default, because the algorithm may have got it later. Types and ranges are left to
    the algorithm, which checks its arguments before it is set up, and to the policy. What the caller supplies is not checked.

    :raises SafeFormatError: if an argument is unknown, or has to be supplied by the caller; or if one that is used before the
        algorithm checks it has another type
    """
    defaults = stored_arguments(algorithm) | {"policy_kwargs": {}}
    if not isinstance(document, dict):
        raise rejected("arguments", document, "objects")

    stored = defaults | document
    examples: Document = dict.fromkeys(defaults)
    # MaskableANO has no use_sde.
    for name in _UNCHECKED:
        if name in defaults:
            examples[name] = defaults[name]
    require_like(stored, examples, "arguments")

    attributes = {}
    for name in defaults:
        attributes[_ATTRIBUTES.get(name, name)] = decode(stored[name], name, custom)
    _require_cheap(attributes["policy_kwargs"])
    return attributes


def require_numbers(values: object, taker: type, name: str) -> None:
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
        # Such as betas of Adam, a pair
        examples = _as_tuple(parameter.default)
        takes_numbers = {int, float} >= set(map(type, examples))
        if not takes_numbers or key not in values:
            continue

        for number in _as_tuple(values[key]):
            # Booleans are integers in Python.
            if type(number) not in (int, float) or not math.isfinite(number):
                raise rejected(f"{name}.{key}", values[key], "finite numbers")


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if isinstance(value, tuple | list):
        return tuple(value)
    return (value,)


def _require_cheap(policy_kwargs: Document) -> None:
    """Reject what takes memory or minutes even where a policy is built without memory."""
    layers = policy_kwargs.get("n_lstm_layers", 1)
    if type(layers) is not int or layers > _MAX_ITEMS:
        raise rejected("policy_kwargs.n_lstm_layers", layers, f"integers up to {_MAX_ITEMS}")

    # Each of them may be missing.
    options = policy_kwargs.get("lstm_kwargs") or {}
    examples = {}
    for name, example in _LSTM.items():
        if name in options:
            examples[name] = example
    require_like(options, examples, "policy_kwargs.lstm_kwargs")


def decode_policy(document: object, custom: Document) -> type[BasePolicy]:
    """Return the policy class that :func:`encode` described; the names of SB3's stand alone.

    :raises SafeFormatError: if the name is not SB3's, or the caller has to supply the class
    """
    policy = decode(document, "policy", custom)
    if isinstance(policy, str) and policy in CLASSES["policy"]:
        return CLASSES["policy"][policy]
    # A class that the caller supplies
    if not (isinstance(policy, type) and issubclass(policy, BasePolicy)):
        raise rejected("policy", policy, ", ".join(CLASSES["policy"]))
    return policy


def readable(encoded: object) -> Any:
    """Replace the tags in what :func:`encode` returned by what the zoo's files have for them.

    Schedules become the zoo's text, or their numbers by name; classes become their names, and tuples lists.
    """
    return json.loads(json.dumps(encoded), object_hook=_without_tag)


def _without_tag(value: Document) -> Any:
    tag = _tag(value)
    if tag is None:
        return value
    if tag == "$float":
        return float(value[tag])
    if tag != "$schedule":
        return value[tag]

    # The zoo has a word for a line to 0 only.
    schedule = _decode_schedule(value, "schedule")
    if (schedule.end, schedule.end_fraction) == (0.0, 1.0) and schedule.start > 0.0:
        return f"lin_{schedule.start}"
    return {"start": schedule.start, "end": schedule.end, "end_fraction": schedule.end_fraction}
