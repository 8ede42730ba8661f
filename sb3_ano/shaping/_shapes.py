"""The shapes, the ways to name one, and the surrogate objective of Definition 3.2."""

import copy
import functools
import math
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, cast, overload

import torch
import torch.nn.functional as F

_LN2 = math.log(2.0)
_ANO_SCALE = 45.0 / (32.0 * _LN2)
_ANO_ANCHOR = math.log(5.0) + 4.0 / 3.0 - 4.0  # so that h(0) = 0

#: The log-ratio saturates here, at r = 4.9e8; beyond it the gradient is zero.
MAX_LOG_RATIO = 20.0
#: Smallest radius; schedules end at 0 or slightly below, where the deviation x would not be defined.
MIN_RADIUS = 1e-6

#: An elementwise shape ``h``: takes and returns a floating-point tensor of any shape, with ``h(0) = 0``.
Shaping: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class ShapingPair(NamedTuple):
    """Independent shapes for the two signs of the advantage (Definition 3.2 before symmetry).

    :param f: ``h_f``, where ``A >= 0``
    :param g: ``h_g``, where ``A < 0``
    """

    f: Shaping
    g: Shaping


RatioFunction: TypeAlias = Callable[[torch.Tensor, float], torch.Tensor]
ShapingLike: TypeAlias = str | Shaping | Sequence[str | Shaping]
#: What type checkers know to be one shape, not a pair: a name of :data:`SHAPINGS`, or a function.
OneShape: TypeAlias = Literal["ano", "spo", "ppo", "identity"] | Shaping
TwoShapes: TypeAlias = tuple[str | Shaping, str | Shaping]


def ano(x: torch.Tensor, /) -> torch.Tensor:
    """Compute ANO's redescending shape (Eq. f_ANO): ``45 / (32 ln 2) (phi(-1) - phi(x - 1))``, with its peak at ``x = 1``.

    ``phi(z) = softplus(-2 z ln 2) + 4 sigmoid(z ln 2)``. The sigmoid is written as ``4 - 4 sigmoid(-z ln 2)``, because
    the gradient of ``sigmoid`` loses all digits where its value rounds to 1, which is on the right tail, where it matters.
    """
    v = (1.0 - x) * _LN2  # -z ln 2
    # softplus switches to its argument above the threshold; the default of 20 is 2e-9 off there.
    return _ANO_SCALE * (_ANO_ANCHOR - F.softplus(2.0 * v, threshold=40.0) + 4.0 * torch.sigmoid(v))


def spo(x: torch.Tensor, /) -> torch.Tensor:
    """Compute SPO's quadratic penalty (Eq. f_SPO): ``x - x^2 / 2``."""
    return x - 0.5 * x.square()


def ppo(x: torch.Tensor, /) -> torch.Tensor:
    """Compute PPO's hard clip (Eq. f_PPO): ``min(x, 1)``."""
    return x.clamp(max=1.0)


def identity(x: torch.Tensor, /) -> torch.Tensor:
    """Return ``x``: the unshaped policy gradient, ``f(r) = r``."""
    return x


SHAPINGS: dict[str, Shaping] = {"ano": ano, "spo": spo, "ppo": ppo, "identity": identity}
#: The shapes of this package, whose properties are known.
BUILT_IN = tuple(SHAPINGS.values())


@overload
def resolve(shaping: OneShape) -> Shaping: ...
@overload
def resolve(shaping: TwoShapes) -> ShapingPair: ...
@overload
def resolve(shaping: ShapingLike) -> Shaping | ShapingPair: ...
def resolve(shaping: ShapingLike) -> Shaping | ShapingPair:
    """Return the function that a shape is named by.

    :param shaping: a key of :data:`SHAPINGS`, ``"module:function"``, a callable ``h(x)``, or two of those for
        independent ``f`` and ``g``
    :return: the callable, or a :class:`ShapingPair` if two were given
    :raises ValueError: if a name is unknown or cannot be imported
    :raises TypeError: if ``shaping``, or what it names, is none of the above
    """
    found = _named(shaping) if isinstance(shaping, str) else shaping
    if callable(found):
        return found
    if isinstance(found, Sequence) and len(found) == 2:
        f, g = (resolve(part) for part in found)
        if not isinstance(f, ShapingPair) and not isinstance(g, ShapingPair):
            return ShapingPair(f, g)
    raise TypeError(
        f"shaping={shaping!r} is not a shape; allowed are one of {sorted(SHAPINGS)}, 'module:function', "
        "a callable h(x), or a pair of those"
    )


def _named(name: str) -> object:
    if name in SHAPINGS:
        return SHAPINGS[name]
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
    return shape if isinstance(shape, ShapingPair) else ShapingPair(shape, shape)


def name_of(shaping: ShapingLike) -> str | list[str]:
    """Return the name under which a shape is stored: a key of :data:`SHAPINGS`, ``"module:function"``, or two of those.

    :func:`is_importable` tells whether the name leads back to the shape.
    """
    if isinstance(shaping, str):
        return shaping
    if isinstance(shaping, Sequence):
        return [cast(str, name_of(part)) for part in shaping]
    for name, shape in SHAPINGS.items():
        if shaping is shape:
            return name
    if isinstance(shaping, _RatioShape):
        return f"from_ratio({name_of(cast(Shaping, shaping.function))})"
    if hasattr(shaping, "__qualname__"):
        module, short = str(getattr(shaping, "__module__", None)), shaping.__name__
        # PyTorch qualifies its functions with a class that their module does not have.
        return f"{module}:{short if getattr(sys.modules.get(module), short, None) is shaping else shaping.__qualname__}"
    return f"{type(shaping).__module__}:<{type(shaping).__qualname__}>"


# Deviations at which a shape is sampled, on both sides of its peak and in both tails.
_FINGERPRINT_AT = (-20.0, -3.0, -1.0, -0.5, 0.5, 1.0, 1.5, 3.0, 20.0)


def fingerprint(shaping: ShapingLike) -> list[list[float]]:
    """Return the values of ``h_f`` and ``h_g`` at a few deviations, which identify a shape under any name."""
    pair = as_pair(shaping)
    f = _values(pair.f)
    return [f, [*f] if pair.g is pair.f else _values(pair.g)]


def _values(shape: Shaping) -> list[float]:
    if any(shape is known for known in BUILT_IN):
        return [*_values_of_built_in(shape)]
    return evaluate(shape, torch.tensor(_FINGERPRINT_AT, dtype=torch.float64, device="cpu")).tolist()


@functools.cache
def _values_of_built_in(shape: Shaping) -> tuple[float, ...]:
    return tuple(shape(torch.tensor(_FINGERPRINT_AT, dtype=torch.float64, device="cpu")).tolist())


def is_importable(shaping: ShapingLike) -> bool:
    """Tell whether the name of every shape in ``shaping`` leads back to that very shape."""
    names, shapes = name_of(shaping), as_pair(shaping)
    try:
        return all(found is shape for found, shape in zip(as_pair(names), shapes, strict=True))
    except (ValueError, TypeError):
        return False


@dataclass(frozen=True)
class _RatioShape:
    """The shape of a function ``f(ratio, eps)``, evaluated at ``eps = 1``; ``reflected`` for a ``g(ratio, eps)``."""

    function: RatioFunction
    reflected: bool = False

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        return self.at(x, 1.0)

    def at(self, x: torch.Tensor, eps: float) -> torch.Tensor:
        sign = -1.0 if self.reflected else 1.0
        return sign * (self.function(1.0 + sign * eps * x, eps) - 1.0) / eps


@overload
def from_ratio(f: RatioFunction, g: None = None) -> Shaping: ...
@overload
def from_ratio(f: RatioFunction, g: RatioFunction) -> ShapingPair: ...
def from_ratio(f: RatioFunction, g: RatioFunction | None = None) -> Shaping | ShapingPair:
    """Wrap the paper's ``f(ratio, eps)``, and a ``g(ratio, eps)`` that is not the reflection of ``f``, as shapes.

    :param f: elementwise function of the ratio and the radius; must scale with the radius, that is, have the
        form ``1 + eps h((ratio - 1) / eps)``
    :param g: the same for negative advantages; None takes the reflection ``2 - f(2 - ratio)``
    :return: a shape, or a :class:`ShapingPair` if ``g`` is given
    :raises ValueError: if a function does not scale with the radius
    """
    shapes = [_RatioShape(f)] if g is None else [_RatioShape(f), _RatioShape(g, reflected=True)]
    x = torch.linspace(-4.0, 4.0, 65, dtype=torch.float64, device="cpu")
    for name, shape in zip("fg", shapes, strict=False):
        expected, *others = (shape.at(x, eps) for eps in (1.0, 0.1, 0.3))
        error = torch.stack([(other - expected).abs() for other in others]).amax(dim=0)
        if not bool((error <= 1e-6 * (1.0 + expected.abs())).all()):
            worst = x[error.argmax()].item()  # also NaN
            raise ValueError(
                f"{name}(ratio, eps) is not of the form 1 + eps * h((ratio - 1) / eps): at x = {worst:g} different radii "
                "give different h; a shape for one fixed radius can be written as h(x) directly"
            )
    return shapes[0] if g is None else ShapingPair(*shapes)


def evaluate(shape: Shaping, x: torch.Tensor) -> torch.Tensor:
    """Return ``h(x)``.

    :raises TypeError: if ``shape`` cannot be called with a tensor
    :raises ValueError: if it is not elementwise
    """
    try:
        if isinstance(shape, torch.nn.Module):  # whose parameters may be of another type than x
            shape = copy.deepcopy(shape).to(x.dtype)
        value = shape(x)
    except Exception as error:  # whatever a user's function raises
        raise TypeError(
            f"shaping={name_of(shape)!r} cannot be called as h(x) with a tensor ({type(error).__name__}: {error}); "
            "wrap a function of (ratio, eps) by from_ratio"
        ) from error
    if not isinstance(value, torch.Tensor) or value.shape != x.shape:
        found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"shaping={name_of(shape)!r} is not elementwise: it made {found} of a tensor of {tuple(x.shape)}")
    return value


def surrogate(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    shaping: ShapingLike,
    *,
    eps_low: float | torch.Tensor,
    eps_high: float | torch.Tensor,
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
    :return: objective, of the shape of ``log_ratio``
    :raises ValueError: if the shapes do not match, or a radius is NaN or Inf
    """
    shape = shaping if isinstance(shaping, ShapingPair) else as_pair(shaping)
    dtype = torch.promote_types(torch.promote_types(log_ratio.dtype, advantages.dtype), torch.float32)
    _require_shape("advantages", advantages, log_ratio)
    log_ratio = log_ratio.to(dtype)
    advantages = advantages.to(dtype)
    low = _radius(eps_low, "eps_low", log_ratio)
    high = _radius(eps_high, "eps_high", log_ratio)

    rewarded = advantages >= 0
    # sign(A) eps: both x = (r - 1) / signed_eps and |A| eps = A signed_eps need nothing else.
    signed_eps = torch.where(rewarded, high, -low)
    deviation = torch.expm1(log_ratio.clamp(max=MAX_LOG_RATIO)) / signed_eps

    if shape.f is shape.g:
        h = shape.f(deviation)
    else:
        # Each shape gets zeros instead of the other's samples, so that its NaN or Inf cannot reach the other's gradient.
        h_f = shape.f(torch.where(rewarded, deviation, 0.0))
        h_g = shape.g(torch.where(rewarded, 0.0, deviation))
        h = torch.where(rewarded, h_f, h_g)

    return advantages + advantages * signed_eps * h


def _require_shape(name: str, tensor: torch.Tensor, log_ratio: torch.Tensor) -> None:
    if tensor.shape == log_ratio.shape or tensor.ndim == 0:
        return

    fits = tensor.ndim == log_ratio.ndim
    for length, full in zip(tensor.shape, log_ratio.shape, strict=False):
        fits = fits and length in (1, full)
    if not fits:
        # Broadcasting (batch, 1) with (batch,) gives (batch, batch), whose mean is wrong but looks plausible.
        raise ValueError(
            f"{name} has the shape {tuple(tensor.shape)} and log_ratio {tuple(log_ratio.shape)}; allowed are the same shape, "
            "lengths of 1, and ()"
        )


def _radius(eps: float | torch.Tensor, name: str, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(eps, torch.Tensor):
        if not math.isfinite(eps):
            raise ValueError(f"{name}={eps} is not a radius; allowed are finite numbers above 0")
        eps = torch.tensor(eps, dtype=like.dtype, device=like.device)
    _require_shape(name, eps, like)
    return eps.to(like.dtype).clamp(min=MIN_RADIUS)


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
    for name, eps in (("eps_low", eps_low), ("eps_high", eps_high)):
        if not eps > 0:
            raise ValueError(f"{name}={eps} is not a radius; allowed are numbers above 0")
    shape = as_pair(shaping)

    def f(ratio: torch.Tensor) -> torch.Tensor:
        return 1.0 + eps_high * shape.f((ratio - 1.0) / eps_high)

    def g(ratio: torch.Tensor) -> torch.Tensor:
        return 1.0 - eps_low * shape.g((1.0 - ratio) / eps_low)

    return f, g
