"""The ways to name a shape, and the surrogate objective of Definition 3.2."""

import copy
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias, cast, overload

import torch

from sb3_ano.shaping._forms import (
    RadiusFunction,
    Shape,
    Shaping,
    ShapingPair,
)
from sb3_ano.shaping._objectives import OBJECTIVES
from sb3_ano.shaping._surrogate import ano, identity, ppo, spo, surrogate_of_pair

ShapingLike: TypeAlias = str | Shaping | Sequence[str | Shaping]
#: What type checkers know to be one shape, not a pair: a name of :data:`SHAPINGS`, or a function.
OneShape: TypeAlias = (
    Literal["ano", "spo", "ppo", "identity", "tanh", "pspo", "leaky_ppo", "ppo_rb", "dppo", "trgppo"] | Shaping
)
TwoShapes: TypeAlias = (
    Literal["dual_clip", "two_sided_clip", "sapo", "cispo", "tis", "icepop", "topr", "reinforce", "aspo", "gppo"]
    | tuple[str | Shaping, str | Shaping]
)

#: The shapes of the published objectives by name.
SHAPINGS: dict[str, Shaping | ShapingPair] = {name: objective.shape for name, objective in OBJECTIVES.items()}
#: The shapes that meet Definition 3.2, which need no look.
BUILT_IN = (ano, spo, ppo, identity)


@overload
def resolve(shaping: OneShape) -> Shaping: ...
@overload
def resolve(shaping: TwoShapes) -> ShapingPair: ...
@overload
def resolve(shaping: ShapingLike) -> Shaping | ShapingPair: ...
def resolve(shaping: ShapingLike) -> Shaping | ShapingPair:
    """Return the function that a shape is named by.

    :param shaping: a key of :data:`SHAPINGS`, ``"module:function"``, a callable ``h(x)``, a :class:`Shape`, or two of those
        for independent ``f`` and ``g``; of a name that stands for two, the one of that place is taken
    :return: the callable, or a :class:`ShapingPair` if two were given
    :raises ValueError: if a name is unknown or cannot be imported
    :raises TypeError: if ``shaping``, or what it names, is none of the above
    """
    found: object = shaping
    if isinstance(shaping, str):
        found = _named(shaping)
    if callable(found):
        return found

    # A pair is complete; other sequences have names or functions.
    if isinstance(found, ShapingPair) and callable(found.f) and callable(found.g):
        return found
    if isinstance(found, Sequence) and len(found) == 2:
        f, g = found
        if (isinstance(f, str) or callable(f)) and (isinstance(g, str) or callable(g)):
            return ShapingPair(as_pair(f).f, as_pair(g).g)

    raise TypeError(
        f"shaping={shaping!r} is not a shape; allowed are one of {sorted(SHAPINGS)}, 'module:function', "
        "a callable h(x), or a pair of those"
    )


def _named(name: str) -> object:
    if name in SHAPINGS:
        return SHAPINGS[name]

    # "module:function"
    if ":" not in name:
        raise ValueError(f"shaping={name!r} is unknown; allowed are {sorted(SHAPINGS)} and 'module:function'")
    if name.startswith("__main__:"):
        raise ValueError(
            f"shaping={name!r} belongs to a main script and cannot be found again by its name; "
            "pass the function itself as shaping=, or move it to a module"
        )

    try:
        return pkgutil.resolve_name(name)
    except Exception as error:  # importing runs the module, which may fail in any way
        raise ValueError(
            f"shaping={name!r} cannot be imported ({type(error).__name__}: {error}); "
            "pass the function itself as shaping=, or put its directory on PYTHONPATH"
        ) from error


def as_pair(shaping: ShapingLike) -> ShapingPair:
    """Resolve ``shaping`` to a pair; a single shape stands for both signs of the advantage."""
    shape = resolve(shaping)
    if isinstance(shape, ShapingPair):
        return shape
    return ShapingPair(shape, shape)


# The names of those objects, and of the parts of pairs.
_NAMES: dict[int, str] = {}
for _name, _shape in SHAPINGS.items():
    for _part in (_shape, *as_pair(_shape)):
        _NAMES[id(_part)] = _name


def name_of(shaping: ShapingLike) -> str | list[str]:
    """Return the name under which a shape is stored: a key of :data:`SHAPINGS`, ``"module:function"``, or two of those.

    :func:`is_importable` tells whether the name leads back to the shape.
    """
    if isinstance(shaping, str):
        return shaping
    if is_known(shaping):
        return _NAMES[id(shaping)]
    if isinstance(shaping, Sequence):
        return [cast(str, name_of(part)) for part in shaping]
    if isinstance(shaping, Shape):
        return f"{shaping.form}({name_of(shaping.function)})"

    # A function, or an object that can be called
    if hasattr(shaping, "__qualname__"):
        module = str(getattr(shaping, "__module__", None))
        name = shaping.__name__
        # PyTorch qualifies its functions with a class that their module does not have.
        if getattr(sys.modules.get(module), name, None) is not shaping:
            name = shaping.__qualname__
        return f"{module}:{name}"
    return f"{type(shaping).__module__}:<{type(shaping).__qualname__}>"


def is_known(shaping: object) -> bool:
    """Tell whether an object is a shape of a published objective, or one of its two."""
    return id(shaping) in _NAMES


# Deviations at which a shape is sampled, on both sides of its peak and in both tails, and a radius at which all ratios of
# both signs are above 0.
_FINGERPRINT_AT = (-20.0, -3.0, -1.0, -0.5, 0.5, 1.0, 1.5, 3.0, 20.0)
_FINGERPRINT_EPS = 0.04


def fingerprint(shaping: ShapingLike) -> list[list[float]]:
    """Return the values of ``h_f`` and ``h_g`` at a few deviations, which identify a shape under any name."""
    pair = as_pair(shaping)
    f = _values(pair.f)
    if pair.g is pair.f:
        return [f, [*f]]
    return [f, _values(pair.g)]


def _values(shape: Shaping) -> list[float]:
    x = torch.tensor(_FINGERPRINT_AT, dtype=torch.float64, device="cpu")
    return evaluate(shape, x, _FINGERPRINT_EPS).tolist()


def is_importable(shaping: ShapingLike) -> bool:
    """Tell whether the name of every shape in ``shaping`` leads back to that very shape."""
    names = name_of(shaping)
    shapes = as_pair(shaping)
    try:
        found = as_pair(names)
    except (ValueError, TypeError):
        return False
    return found.f is shapes.f and found.g is shapes.g


def with_radius(shaping: ShapingLike, radius: RadiusFunction) -> ShapingPair:
    """Give a shape a radius that depends on the sample, as DPPO and TRGPPO have it.

    :param shaping: anything that :func:`resolve` accepts
    :param radius: function ``radius(old_log_prob, advantages, eps_low, eps_high)``, elementwise, with the radii that the
        trainer has at the time; results are kept between :data:`MIN_RADIUS` and 4.9e8
    """
    f, g = as_pair(shaping)

    # The same object for both signs is evaluated once.
    wrapped = _with_radius(f, radius)
    if g is f:
        return ShapingPair(wrapped, wrapped)
    return ShapingPair(wrapped, _with_radius(g, radius))


def _with_radius(shape: Shaping, radius: RadiusFunction) -> Shape:
    if isinstance(shape, Shape):
        return replace(shape, radius=radius)
    return Shape(shape, radius=radius)


def evaluate(shape: Shaping, x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``h(x)``, or ``h(x, eps)``.

    :raises TypeError: if ``shape`` cannot be called with a tensor
    :raises ValueError: if it is not elementwise
    """
    try:
        # Its parameters may be of another type than x. The user's module keeps its own.
        if isinstance(shape, torch.nn.Module):
            shape = copy.deepcopy(shape).to(x.dtype)

        if isinstance(shape, Shape):
            value = shape(x, eps)
        else:
            value = shape(x)
    except Exception as error:
        # Whatever a user's function raises
        raise TypeError(
            f"shaping={name_of(shape)!r} cannot be called as h(x) with a tensor ({type(error).__name__}: {error}); "
            "wrap a function of (ratio, eps) by from_ratio"
        ) from error

    # A function may return anything.
    found: object = type(value).__name__
    if isinstance(value, torch.Tensor):
        found = tuple(value.shape)
    if found != tuple(x.shape):
        raise ValueError(f"shaping={name_of(shape)!r} is not elementwise: it made {found} of a tensor of {tuple(x.shape)}")
    return value


def surrogate(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    shaping: ShapingLike,
    *,
    eps_low: float | torch.Tensor,
    eps_high: float | torch.Tensor,
    old_log_prob: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the generalized surrogate objective of Definition 3.2, elementwise and to be maximized.

    It is computed in float32, or in float64 if an input is float64, also under autocast. Value and gradient are finite for
    every finite log-ratio: it saturates at :data:`MAX_LOG_RATIO`, beyond which the gradient is zero. Radii below
    :data:`MIN_RADIUS` are raised to it, because schedules end at 0 or slightly below.

    :param log_ratio: log-probability of the action minus its log-probability when it was sampled, ``(batch,)`` or any shape
    :param advantages: advantage estimates, of the shape of ``log_ratio``, with any of its lengths replaced by 1, or 0-d
    :param shaping: anything that :func:`resolve` accepts
    :param eps_low: radius below 1, used where ``A < 0``; a number or a tensor of a shape like that of ``advantages``
    :param eps_high: radius above 1, used where ``A >= 0``
    :param old_log_prob: log-probability of the action when it was sampled, of the shape of ``log_ratio``, for shapes whose
        radius depends on it
    :return: objective, of the shape of ``log_ratio``
    :raises ValueError: if the shapes do not match, a radius is NaN or Inf, or ``old_log_prob`` is missing
    """
    # Already resolved by the trainer, which calls this for each minibatch.
    if isinstance(shaping, ShapingPair):
        shape = shaping
    else:
        shape = as_pair(shaping)

    for part in shape:
        if isinstance(part, Shape) and part.reads_old_log_prob and old_log_prob is None:
            raise ValueError(f"old_log_prob=None is not allowed with shaping={name_of(part)!r}, whose radius depends on it")
    return surrogate_of_pair(log_ratio, advantages, shape, eps_low, eps_high, old_log_prob)


def ratio_form(
    shaping: ShapingLike, *, eps_low: float = 0.2, eps_high: float = 0.2
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """Return the paper's ``f`` and ``g`` as functions of the ratio, for plots and theory.

    :param shaping: anything that :func:`resolve` accepts
    :param eps_low: radius of ``g``
    :param eps_high: radius of ``f``
    :return: ``f(r) = 1 + eps_high h_f((r - 1) / eps_high)`` and ``g(r) = 1 - eps_low h_g((1 - r) / eps_low)``
    :raises ValueError: if a radius is not above 0
    """
    # NaN is not above 0, either.
    for name, eps in (("eps_low", eps_low), ("eps_high", eps_high)):
        if not eps > 0:
            raise ValueError(f"{name}={eps} is not a radius; allowed are numbers above 0")

    shape = as_pair(shaping)

    def f(ratio: torch.Tensor) -> torch.Tensor:
        x = (ratio - 1.0) / eps_high
        return 1.0 + eps_high * evaluate(shape.f, x, eps_high)

    def g(ratio: torch.Tensor) -> torch.Tensor:
        x = (1.0 - ratio) / eps_low
        return 1.0 - eps_low * evaluate(shape.g, x, eps_low)

    return f, g
