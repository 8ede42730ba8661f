"""The algorithms that experiments compare, by name and options, and the spelling of their settings."""

import ast
import functools
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from sb3_contrib import TRPO, RecurrentPPO
from stable_baselines3 import PPO
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import LinearSchedule
from torch import nn

from sb3_ano._arguments import NOT_HYPERPARAMETERS, constructor_parameters
from sb3_ano._registry import ALGORITHMS
from sb3_ano.cli import check_names

#: Hyperparameters, options or settings by name.
Settings: TypeAlias = Mapping[str, Any]
#: Classes by name, in the order of tables and figures.
CLASSES: dict[str, type[OnPolicyAlgorithm]] = {
    "ppo": PPO,
    "ppo_lstm": RecurrentPPO,
    "trpo": TRPO,
}
CLASSES |= {name: entry.algorithm for name, entry in ALGORITHMS.items()}
#: Option that trains with this package's engine; its own algorithms always do.
ACCELERATE = "accelerate"
_ACCELERATED = ("ppo", "ppo_lstm")
# Hyperparameters of the environments, which every algorithm has.
_OF_ENVIRONMENTS = {"n_envs", "normalize", "env_wrapper", "frame_stack"}
# PAPO's omega is both of its weights: the paper searches one, its official code has two.
_OMEGA, _OMEGAS = "omega", ("omega1", "omega2")
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
        if not self.options:
            return self.name
        options = [f"{name}={value}" for name, value in self.options]
        return f"{self.name}:{','.join(options)}"

    @property
    def hyperparameters(self) -> set[str]:
        """Return the names of all hyperparameters, including those of environments and policy."""
        # What each run sets itself is no hyperparameter.
        names = _parameters(self.name).keys() - NOT_HYPERPARAMETERS | _OF_ENVIRONMENTS
        if self.name == "papo":
            names.add(_OMEGA)
        if self.name in _ACCELERATED:
            names.add(ACCELERATE)
        return names

    def default(self, name: str) -> Any:
        """Return the constructor's default of a hyperparameter, or None if it has none.

        :param name: name of the hyperparameter
        """
        # No constructor has it.
        if name == ACCELERATE:
            return False
        if self.name not in CLASSES:
            # Results can come from a program that knows more algorithms.
            return None

        # Both weights have the same default.
        if name == _OMEGA:
            name = _OMEGAS[0]
        parameter = _parameters(self.name).get(name)
        if parameter is None or parameter.default is parameter.empty:
            return None
        return parameter.default

    def constructor_arguments(self, hyperparameters: Settings) -> dict[str, Any]:
        """Return the arguments of the constructor, with schedules and classes instead of their names.

        :param hyperparameters: all hyperparameters of a run
        """
        arguments: dict[str, Any] = {}
        for name, value in hyperparameters.items():
            if name in _OF_ENVIRONMENTS or name == ACCELERATE:
                continue

            # The zoo's files have texts for what is no plain value.
            if isinstance(value, str):
                start = number(value)
                if start is not None and is_linear(value):
                    value = LinearSchedule(start, 0.0, 1.0)
                elif start is not None:
                    # YAML reads 3e-4 as a text.
                    value = start
                elif name == "policy_kwargs":
                    value = evaluated(value)

            if name == _OMEGA:
                # The constructor has both weights.
                arguments |= dict.fromkeys(_OMEGAS, value)
            else:
                arguments[name] = value

        return arguments


# Plans of thousands of runs ask for the same signatures.
@functools.cache
def _parameters(name: str) -> Mapping[str, inspect.Parameter]:
    return constructor_parameters(CLASSES[name])


def title(label: str) -> str:
    """Return the name of an algorithm for readers: ``"ANO (shaping=spo)"`` for ``"ano:shaping=spo"``.

    :param label: label of the algorithm
    """
    # Labels in results can be of other programs, and have any name.
    name, _, options = label.partition(":")
    if name in CLASSES:
        name = name.upper()
    if not options:
        return name
    return f"{name} ({options.replace(',', ', ')})"


def parse_algorithm(label: str) -> Algorithm:
    """Parse ``NAME`` or ``NAME:OPTION=VALUE,OPTION=VALUE``.

    :param label: text such as ``"ano:shaping=spo,desired_kl=0.01"``
    :raises ValueError: for an unknown algorithm or option
    """
    name, _, rest = label.partition(":")
    check_names("algorithm", [name], CLASSES)
    algorithm = Algorithm(name)

    options = {}
    for text in filter(None, rest.split(",")):
        key, _, value = text.partition("=")
        # A name alone, or an empty value.
        if not value:
            raise ValueError(f"option {text!r} of {label!r} is not allowed; allowed is OPTION=VALUE")
        check_names(f"option of {name}", [key], algorithm.hyperparameters)
        options[key] = parse_value(value)

    return Algorithm(name, tuple(sorted(options.items())))


def parse_value(text: str) -> Any:
    """Parse a number, a Boolean or None, as Python or YAML writes them; return any other text unchanged.

    :param text: value from the command line
    """
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def number(value: object) -> float | None:
    """Return the number in a hyperparameter, 3e-4 for ``"lin_3e-4"``, or None if it is no number.

    :param value: value of the hyperparameter
    """
    # float(True) is 1.0.
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        value = value.removeprefix(_LINEAR)
    found: Any = value
    try:
        converted = float(found)
    except (TypeError, ValueError, OverflowError):
        return None

    # NaN equals no other number, itself included.
    if math.isnan(converted):
        return None
    return converted


def is_linear(value: object) -> bool:
    """Tell whether a hyperparameter is a linear schedule such as ``"lin_3e-4"``.

    :param value: value of the hyperparameter
    """
    return isinstance(value, str) and value.startswith(_LINEAR)


def replaced(value: object, new: object) -> object:
    """Return a new value with the schedule of the old one: ``"lin_0.001"`` if 1e-3 replaces ``"lin_3e-4"``.

    :param value: old value
    :param new: new value
    """
    start = number(new)
    if is_linear(value) and start is not None:
        return f"{_LINEAR}{start!r}"
    return new


def canonical(value: object) -> Any:
    """Return one spelling for equal values: 1.0 is 1, and ``"lin_3e-4"`` is ``"lin_0.0003"``.

    :param value: value of a hyperparameter, or settings that contain some
    """
    if isinstance(value, Mapping):
        return {str(key): canonical(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(part) for part in value]
    if isinstance(value, str):
        start = number(value)
        if start is None:
            return value
        return replaced(value, start)
    # YAML and the command line write whole numbers in both ways.
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def evaluated(text: str) -> Any:
    """Evaluate an expression of the zoo's files, such as ``"dict(activation_fn=nn.Tanh)"``, as the zoo does.

    :param text: expression with ``dict`` and ``nn`` as the only names
    :raises ValueError: if it cannot be evaluated
    """
    try:
        return eval(text, {"__builtins__": {}, "dict": dict, "nn": nn})
    except Exception as error:
        raise ValueError(f"{text!r} cannot be evaluated: {error}") from error
