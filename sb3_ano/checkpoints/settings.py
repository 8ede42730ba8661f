"""The settings of a training, as plain JSON, so that it does not go on with others unnoticed."""

import inspect
import json
from collections.abc import Iterator
from typing import Any

from stable_baselines3.common.base_class import BaseAlgorithm

# They may differ without making another training.
_FREE = {"self", "env", "policy", "device", "tensorboard_log", "verbose", "_init_setup_model"}


def settings_of(model: BaseAlgorithm) -> dict[str, Any]:
    """The arguments that a model was made with, as far as they can be compared.

    Schedules are described by three of their values, functions and classes by their names.
    """
    names = set(inspect.signature(type(model).__init__).parameters) - _FREE
    settings = {name: _described(vars(model)[name]) for name in sorted(names) if name in vars(model)}
    return json.loads(json.dumps(settings))


def differing(there: dict[str, Any], here: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Name and both values of each setting that is not the same."""
    for name in sorted({*there, *here}):
        if there.get(name) != here.get(name):
            yield name, there.get(name), here.get(name)


def _described(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(key): _described(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_described(part) for part in value]
    if callable(value) and not isinstance(value, type):
        try:  # a schedule of the remaining progress
            return [float(value(progress)) for progress in (1.0, 0.5, 0.0)]
        except Exception:
            pass
    return getattr(value, "__qualname__", type(value).__qualname__)
