"""Schedules of learning rate and radii in the safe format."""

import math
from typing import Any

from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule

from sb3_ano.hub.documents import SafeFormatError, fields, number, one_of, text

#: The arguments that may be schedules of the remaining progress.
SCHEDULES = ("learning_rate", "clip_range", "clip_range_high", "clip_range_vf", "desired_kl")
# The RL Zoo's schedule, by name, because this module does without the zoo.
_ZOO_LINEAR = ("rl_zoo3.utils", "SimpleLinearSchedule")


class UnknownSchedule:
    """Stands for a function that the safe format cannot hold: a policy can be built with it, and not be trained.

    :param argument: the argument whose schedule it was
    :param name: ``"module:function"``
    :param initial: its value where training starts
    """

    def __init__(self, argument: str, name: str, initial: float) -> None:
        self.argument, self.name, self.initial = argument, name, initial

    def __call__(self, progress_remaining: float) -> float:
        # SB3 builds a policy with the learning rate at 1; training asks after its first rollout.
        if progress_remaining == 1.0:
            return self.initial
        raise SafeFormatError(
            f"{self.argument} was the schedule {self.name}, which the safe format cannot hold; to go on training, load "
            f"with custom_objects={{{self.argument!r}: ...}}"
        )

    def __repr__(self) -> str:
        return f"UnknownSchedule({self.argument}={self.name}, initial={self.initial})"


def encode_schedule(schedule: Schedule) -> float | dict[str, Any] | None:
    """JSON of a schedule, or None if it is a function that has none."""
    while isinstance(schedule, FloatSchedule):
        schedule = schedule.value_schedule
    kind = type(schedule)
    if isinstance(schedule, ConstantSchedule) and kind is ConstantSchedule:
        return float(schedule.val)
    if isinstance(schedule, LinearSchedule) and kind is LinearSchedule:
        return _linear(schedule.start, schedule.end, schedule.end_fraction)
    if (kind.__module__, kind.__qualname__) == _ZOO_LINEAR:
        return _linear(schedule.initial_value, 0.0, 1.0)  # type: ignore[attr-defined]
    return None


def _linear(start: float, end: float, end_fraction: float) -> dict[str, Any]:
    return {"$schedule": "linear", "start": float(start), "end": float(end), "end_fraction": float(end_fraction)}


def decode_schedule(document: dict[str, Any], name: str) -> Schedule:
    """The schedule that :func:`encode_schedule` described.

    :raises SafeFormatError: if it is none
    """
    fields(document, name, ("$schedule", "start", "end", "end_fraction"))
    one_of("linear")(document["$schedule"], f"{name}.$schedule")
    start, end, fraction = (number()(document[key], f"{name}.{key}") for key in ("start", "end", "end_fraction"))
    if not fraction > 0.0:
        raise SafeFormatError(f"{name}.end_fraction={fraction} is not allowed; allowed are numbers above 0")
    return LinearSchedule(start, end, fraction)


def encode_unknown(schedule: Schedule, name: str) -> dict[str, Any]:
    """JSON of a function of which only the name and the first value can be kept."""
    while isinstance(schedule, FloatSchedule):
        schedule = schedule.value_schedule
    if isinstance(schedule, UnknownSchedule):
        return {"$custom": schedule.name, "initial": schedule.initial}
    initial = float(schedule(1.0))
    if not math.isfinite(initial):
        raise ValueError(f"{name} is {initial} at progress_remaining=1; a schedule must return finite numbers")
    return {"$custom": dotted_name(schedule), "initial": initial}


def decode_unknown(document: dict[str, Any], name: str) -> UnknownSchedule:
    """A stand-in for the function that :func:`encode_unknown` described."""
    fields(document, name, ("$custom", "initial"))
    return UnknownSchedule(
        name, text(document["$custom"], f"{name}.$custom"), number()(document["initial"], f"{name}.initial")
    )


def dotted_name(thing: Any) -> str:
    """``"module:name"`` of a class or function, or of the class of another object; for information only."""
    owner = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{owner.__module__}:{owner.__qualname__}"
