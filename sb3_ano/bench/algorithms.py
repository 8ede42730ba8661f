"""The algorithms that experiments compare, by name and options."""

import ast
import functools
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sb3_contrib import TRPO
from stable_baselines3 import PPO
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import LinearSchedule
from torch import nn

from sb3_ano._arguments import NOT_HYPERPARAMETERS, constructor_parameters
from sb3_ano._registry import ALGORITHMS
from sb3_ano.cli import check_names

#: Classes by name, in the order of tables and figures.
CLASSES: dict[str, type[OnPolicyAlgorithm]] = {
    "ppo": PPO,
    "trpo": TRPO,
    **{name: entry.algorithm for name, entry in ALGORITHMS.items()},
}
#: Hyperparameters of environments and policy, which every algorithm has.
COMMON = frozenset({"policy", "n_envs", "normalize", "env_wrapper", "frame_stack"})
# PAPO's omega is both of its weights: the paper searches one, its official code has two.
_SHORTHANDS = {("papo", "omega"): ("omega1", "omega2")}
# Set by each run itself.
_LINEAR = "lin_"


@dataclass(frozen=True)
class Algorithm:
    """Describe one of the compared algorithms.

    :param name: key of :data:`CLASSES`
    :param options: constructor arguments given together with the name, sorted
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """Return the name with its options, as a user types it."""
        return self.name + (":" if self.options else "") + ",".join(f"{name}={value}" for name, value in self.options)

    @property
    def hyperparameters(self) -> set[str]:
        """Return the names of all hyperparameters, including those of environments and policy."""
        shorthands = {shorthand for algorithm, shorthand in _SHORTHANDS if algorithm == self.name}
        return (constructor_parameters(CLASSES[self.name]).keys() - NOT_HYPERPARAMETERS) | COMMON | shorthands

    def default(self, name: str) -> Any:
        """Return the constructor's default of a hyperparameter, or None if it has none.

        :param name: name of the hyperparameter
        """
        if self.name not in CLASSES:  # of an imported run
            return None
        name = _SHORTHANDS.get((self.name, name), (name,))[0]
        parameter = _parameters(self.name).get(name)
        return None if parameter is None or parameter.default is parameter.empty else parameter.default

    def constructor_arguments(self, hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the constructor, with schedules and classes instead of their names.

        :param hyperparameters: all hyperparameters of a run
        """
        values: dict[str, Any] = {}
        for name, value in hyperparameters.items():
            if name in COMMON - {"policy"}:
                continue
            start = number(value) if isinstance(value, str) else None
            if start is not None:
                value = LinearSchedule(start, 0.0, 1.0) if value.startswith(_LINEAR) else start
            elif name == "policy_kwargs" and isinstance(value, str):
                value = evaluated(value)
            values |= dict.fromkeys(_SHORTHANDS.get((self.name, name), (name,)), value)
        return values


@functools.cache
def _parameters(name: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a constructor, which plans of thousands of runs ask for."""
    return constructor_parameters(CLASSES[name])


def title(label: str) -> str:
    """Return the name of an algorithm for readers: ``"ANO (shaping=spo)"`` for ``"ano:shaping=spo"``.

    :param label: label of the algorithm, which an imported run may have chosen freely
    """
    name, _, options = label.partition(":")
    name = name.upper() if name in CLASSES else name
    return f"{name} ({options.replace(',', ', ')})" if options else name


def parse_algorithm(label: str) -> Algorithm:
    """Parse ``NAME`` or ``NAME:OPTION=VALUE,OPTION=VALUE``.

    :param label: text such as ``"ano:shaping=spo,desired_kl=0.01"``
    :raises ValueError: for an unknown algorithm or option
    """
    name, _, rest = label.partition(":")
    check_names("algorithm", [name], CLASSES)
    algorithm = Algorithm(name)
    options: dict[str, Any] = {}
    for text in filter(None, rest.split(",")):
        key, _, value = text.partition("=")
        if not value:
            raise ValueError(f"option {text!r} of {label!r} is not allowed; allowed is OPTION=VALUE")
        check_names(f"option of {name}", [key], algorithm.hyperparameters)
        options[key] = parse_value(value)
    return Algorithm(name, tuple(sorted(options.items())))


def parse_value(text: str) -> Any:
    """Parse a number, a Boolean or None, as Python or YAML writes them; return any other text unchanged.

    :param text: value from the command line
    """
    try:
        return ast.literal_eval({"true": "True", "false": "False", "none": "None", "null": "None"}.get(text.lower(), text))
    except (ValueError, SyntaxError):
        return text


def number(value: Any) -> float | None:
    """Return the number in a hyperparameter, 3e-4 for ``"lin_3e-4"``, or None if it is no number.

    :param value: value of the hyperparameter
    """
    if isinstance(value, bool):
        return None
    text = value.removeprefix(_LINEAR) if isinstance(value, str) else value
    try:
        converted = float(text)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isnan(converted) else converted


def replaced(value: Any, new: Any) -> Any:
    """Return a new value with the schedule of the old one: ``"lin_0.001"`` if 1e-3 replaces ``"lin_3e-4"``.

    :param value: old value
    :param new: new value
    """
    is_linear = isinstance(value, str) and value.startswith(_LINEAR) and number(new) is not None
    return f"{_LINEAR}{number(new)!r}" if is_linear else new


def evaluated(text: str) -> Any:
    """Evaluate an expression of the zoo's files, such as ``"dict(activation_fn=nn.Tanh)"``, as the zoo does.

    :param text: expression with ``dict`` and ``nn`` as the only names
    :raises ValueError: if it cannot be evaluated
    """
    try:
        return eval(text, {"__builtins__": {}, "dict": dict, "nn": nn})
    except Exception as error:
        raise ValueError(f"{text!r} cannot be evaluated: {error}") from error
