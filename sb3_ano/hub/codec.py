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
from typing import Any

import numpy as np
import torch
from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, NatureCNN
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule

from sb3_ano._arguments import constructor_parameters
from sb3_ano.algorithms import ShapedPolicyAlgorithm, contrib
from sb3_ano.algorithms.buffers import DictFlatRolloutBuffer, FlatRolloutBuffer
from sb3_ano.algorithms.contrib_buffers import DictMaskedRolloutBuffer, MaskedRolloutBuffer
from sb3_ano.algorithms.papo import DictTDRolloutBuffer, TDRolloutBuffer
from sb3_ano.hub.documents import SafeFormatError, rejected, require_like, shown
from sb3_ano.shaping import SHAPINGS

# fmt: off
_ACTIVATIONS = (
    "CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "LogSigmoid", "Mish",
    "PReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink",
)
# fmt: on
_OPTIMIZERS = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_BUFFERS = (
    *(RolloutBuffer, DictRolloutBuffer, FlatRolloutBuffer, DictFlatRolloutBuffer, TDRolloutBuffer, DictTDRolloutBuffer),
    *(MaskedRolloutBuffer, DictMaskedRolloutBuffer, MaskableRolloutBuffer, MaskableDictRolloutBuffer),
)
_WITH_POLICIES = (contrib.MaskableANO, contrib.RecurrentANO, contrib.RecurrentMaskableANO)


def _by_name(*classes: type) -> dict[str, type]:
    return {f"{cls.__module__}.{cls.__qualname__}": cls for cls in classes}


#: The allow-list: the classes that a file may name, by the argument that takes them. A file may also name the algorithms of
#: ``sb3_ano._registry``, the shapes of :data:`~sb3_ano.shaping.SHAPINGS`, and the spaces of ``spaces.py``, and nothing else.
CLASSES: dict[str, dict[str, type]] = {
    "policy": ShapedPolicyAlgorithm.policy_aliases
    | _by_name(*(policy for algorithm in _WITH_POLICIES for policy in algorithm.policy_aliases.values())),
    "activation_fn": {f"torch.nn.{name}": getattr(torch.nn, name) for name in _ACTIVATIONS},
    "optimizer_class": {f"torch.optim.{name}": getattr(torch.optim, name) for name in _OPTIMIZERS} | _by_name(RMSpropTFLike),
    "features_extractor_class": _by_name(FlattenExtractor, NatureCNN, CombinedExtractor),
    "rollout_buffer_class": _by_name(*_BUFFERS),
}
#: Arguments that may be schedules of the remaining progress.
SCHEDULES = ("learning_rate", "clip_range", "clip_range_high", "clip_range_vf", "desired_kl")
# The RL Zoo's schedule, by name, because this module does without the zoo.
_ZOO_LINEAR = ("rl_zoo3.utils", "SimpleLinearSchedule")
# tensorboard_log is a path on the author's machine, to which training would write. The shape has its own entry.
_NOT_STORED = {"policy", "env", "device", "tensorboard_log", "_init_setup_model", "shaping"}
# Arguments that are used before the algorithm checks its arguments, or that it does not check.
_UNCHECKED = ("n_steps", "use_sde")
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
    return all(name in SHAPINGS for name in ([shaping_name] if isinstance(shaping_name, str) else shaping_name))


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
    if isinstance(value, dict) and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(item, f"{name}.{key}", custom) for key, item in value.items()}
    while isinstance(value, FloatSchedule):
        value = value.value_schedule
    if name in SCHEDULES and (schedule := _encode_schedule(value)) is not None:
        return schedule
    for known, cls in _allowed_classes(name).items():
        if value is cls:
            return {"$class": known}
    custom[name] = value
    return {"$custom": dotted_name(value)}


def _allowed_classes(name: str) -> dict[str, type]:
    return CLASSES.get(name.rpartition(".")[2], {})


def _encode_schedule(schedule: Any) -> Any:
    """Convert a constant or linear schedule to JSON; None for any other."""
    kind = type(schedule)  # a subclass may compute something else
    if (kind.__module__, kind.__qualname__) == _ZOO_LINEAR:
        schedule, kind = LinearSchedule(schedule.initial_value, 0.0, 1.0), LinearSchedule
    if kind is LinearSchedule:
        return {"$schedule": "linear", **{end: float(getattr(schedule, end)) for end in ("start", "end", "end_fraction")}}
    return float(schedule.val) if kind is ConstantSchedule else None


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
    tag = next((key for key in value if key.startswith("$")), None)
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


def _decode_schedule(value: dict[str, Any], name: str) -> LinearSchedule:
    require_like(value, {"$schedule": None, "start": 1.0, "end": 0.0, "end_fraction": 1.0}, name)
    if not value["end_fraction"] > 0.0:
        raise rejected(f"{name}.end_fraction", value["end_fraction"], "numbers above 0")
    if value["start"] < 0.0:
        raise rejected(f"{name}.start", value["start"], "numbers from 0")
    return LinearSchedule(value["start"], value["end"], value["end_fraction"])


def stored_arguments(algorithm: type[ShapedPolicyAlgorithm]) -> dict[str, Any]:
    """Return the names and defaults of an algorithm's arguments that the format stores."""
    parameters = constructor_parameters(algorithm)
    return {name: parameter.default for name, parameter in parameters.items() if name not in _NOT_STORED}


def encode_arguments(model: ShapedPolicyAlgorithm, custom: dict[str, Any]) -> dict[str, Any]:
    """Convert the constructor arguments of a model to JSON.

    :param model: algorithm that keeps its arguments as attributes
    :param custom: dictionary that collects, by dotted name, what only the caller of ``load_safe`` can supply
    """
    names = stored_arguments(type(model))
    return {name: encode(getattr(model, _ATTRIBUTES.get(name, name)), name, custom) for name in names}


def decode_arguments(document: Any, algorithm: type[ShapedPolicyAlgorithm], custom: dict[str, Any]) -> dict[str, Any]:
    """Convert JSON to the attributes of a model that :func:`encode_arguments` described.

    An argument that the JSON lacks has its default, because the algorithm may have got it later. Types and ranges are left to
    the algorithm, which checks its arguments before it is set up, and to the policy. What the caller supplies is not checked.

    :raises SafeFormatError: if an argument is unknown, or has to be supplied by the caller; or if one that is used before the
        algorithm checks it has another type
    """
    defaults = stored_arguments(algorithm) | {"policy_kwargs": {}}
    stored = defaults | document if isinstance(document, dict) else document
    require_like(stored, {name: defaults[name] if name in _UNCHECKED else None for name in defaults}, "arguments")
    supplied = set(custom)
    attributes = {_ATTRIBUTES.get(name, name): decode(stored[name], name, custom) for name in defaults}
    _require_cheap(attributes["policy_kwargs"])
    if "verbose" not in supplied and not isinstance(attributes["verbose"], int):
        raise rejected("verbose", attributes["verbose"], "integers")
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
    layers, options = policy_kwargs.get("n_lstm_layers", 1), policy_kwargs.get("lstm_kwargs") or {}
    if type(layers) is not int or layers > _MAX_ITEMS:
        raise rejected("policy_kwargs.n_lstm_layers", layers, f"integers up to {_MAX_ITEMS}")
    require_like(options, {key: example for key, example in _LSTM.items() if key in options}, "policy_kwargs.lstm_kwargs")


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

    def without_tag(value: dict[str, Any]) -> Any:
        if "$schedule" in value:
            schedule = _decode_schedule(value, "schedule")
            if (schedule.end, schedule.end_fraction) == (0.0, 1.0) and schedule.start > 0.0:
                return f"lin_{schedule.start}"
            return {"start": schedule.start, "end": schedule.end, "end_fraction": schedule.end_fraction}
        tag = next((key for key in value if key.startswith("$")), None)
        if tag is None:
            return value
        return float(value[tag]) if tag == "$float" else value[tag]

    return json.loads(json.dumps(encoded), object_hook=without_tag)
