"""Convert radii and learning rates to schedules: numbers, callables of the remaining progress, or the zoo's ``lin_0.2``."""

import math
from numbers import Real

from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule

_ALLOWED = "allowed are a finite number above 0, a schedule such as LinearSchedule(0.2, 0.05, 1.0), and 'lin_0.2'"
_ALLOWED_RATES = _ALLOWED.replace("above", "from")
_ALLOWED_TARGETS = "allowed are a number above 0 and below 1, such as 0.02, a schedule of those, and 'lin_0.02'"


def _allowed(name: str) -> str:
    if name == "learning_rate":
        return _ALLOWED_RATES
    if name == "desired_kl":
        return _ALLOWED_TARGETS
    return _ALLOWED


def as_schedule(value: float | str | Schedule, name: str) -> FloatSchedule:
    """Convert a radius or learning rate to a schedule of the remaining progress, which runs from 1 to 0.

    :param value: number, callable, or ``"lin_x"``, linear from x to 0 as in the RL Zoo
    :param name: name of the argument, for messages
    :raises ValueError: if a number is negative, infinite or NaN, or there is none after ``lin_``
    :raises TypeError: if the value is of another type, or another string
    """
    # Attributes that were converted before are checked again.
    if isinstance(value, FloatSchedule):
        return value
    if callable(value):
        return FloatSchedule(value)

    # True and False are numbers in Python.
    is_linear = isinstance(value, str) and value.startswith("lin_")
    if not is_linear and (isinstance(value, bool) or not isinstance(value, Real)):
        raise TypeError(f"{name}={value!r} is of type {type(value).__name__}; {_allowed(name)}")

    try:
        if isinstance(value, str):
            number = float(value.removeprefix("lin_"))
        else:
            number = float(value)
    except ValueError:
        # Rejected below, with the name of the argument.
        number = math.nan

    # A line from 0 to 0 is no schedule. 0 itself is allowed here: the RL Zoo loads agents with it, see require_positive.
    if not 0.0 <= number < math.inf or (is_linear and number == 0.0):
        raise ValueError(f"{name}={value!r} is not allowed; {_allowed(name)}")
    if is_linear:
        return FloatSchedule(LinearSchedule(number, 0.0, 1.0))
    return FloatSchedule(number)


def as_optional_schedule(value: float | str | Schedule | None, name: str) -> FloatSchedule | None:
    """Do the same for an argument that may be None."""
    if value is None:
        return None
    return as_schedule(value, name)


def require_positive(schedule: FloatSchedule, name: str) -> None:
    """Reject a radius or target that is always 0, which would train nothing.

    Loading accepts it, because evaluation never reads it and the RL Zoo loads models with it.

    :raises ValueError: if the schedule is the constant 0
    """
    inner = schedule.value_schedule
    if isinstance(inner, ConstantSchedule) and inner.val <= 0.0:
        raise ValueError(f"{name}={inner.val} is not allowed in a training; {_allowed(name)}")


def require_constant(schedule: FloatSchedule, name: str) -> None:
    """Reject a schedule of the radius that ``desired_kl`` adapts: the factor would make up for it without limit.

    Loading accepts it, because the RL Zoo loads models with a function that returns 0.

    :raises ValueError: if the schedule is not a number
    """
    if not isinstance(schedule.value_schedule, ConstantSchedule):
        raise ValueError(f"{name} is a schedule, which desired_kl would work against; allowed is a number")


def require_target(value: float) -> None:
    """Check a value of ``desired_kl``.

    A divergence of 1 is that of two normal distributions whose means are 1.4 standard deviations apart, far beyond any radius.

    :raises ValueError: if it is 1 or more
    """
    if value >= 1.0:
        raise ValueError(f"desired_kl={value:g} is not allowed; {_ALLOWED_TARGETS}")


#: Radii that ``desired_kl`` may reach.
RADIUS_BOUNDS = (0.05, 4.0)
# Factors of the radius from one update to the next.
_SLOWEST = 0.8
_FASTEST = 1.25


def adapted_radius(radius: float, kl: float, desired_kl: float) -> float:
    """Return the radius of the next update; the paper's conclusion leaves such radii to future work.

    :param radius: radius of the last update
    :param kl: mean KL divergence of that update from the rollout's policy
    :param desired_kl: KL divergence that the next update should have
    """
    # The KL grows with about the square of the radius: an exponent of 0.5 would make up for the whole difference at once, and
    # 0.25 approaches the target in several updates.
    growth = math.inf
    if kl > 0.0:
        growth = (max(desired_kl, 0.0) / kl) ** 0.25
    growth = min(max(growth, _SLOWEST), _FASTEST)

    # Without bounds, a target out of reach would drive the radius on with each update.
    lowest, highest = RADIUS_BOUNDS
    return min(max(radius * growth, lowest), highest)
