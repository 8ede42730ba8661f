"""The paper's Table 1 for any shape, measured numerically."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, overload

import torch

from sb3_ano.shaping._forms import Shape, Shaping, ShapingPair
from sb3_ano.shaping._shapes import BUILT_IN, OneShape, ShapingLike, TwoShapes, as_pair, evaluate, name_of, resolve

#: Grid on which a shape is examined: float64, ``-GRID_LIMIT ... GRID_LIMIT`` in steps of ``GRID_STEP``.
GRID_LIMIT = 64.0
GRID_STEP = 2.0**-10
#: Deviations at which the tails are read; a slope that still grows between the last two has no limit.
TAIL = (1e3, 1e4, 1e5, 1e6)
#: Radius at which shapes of a ratio are examined.
EPS = 0.2

# The points without the tails
_INNER = slice(len(TAIL), -len(TAIL))
# Steps in which a shape is looked at before a training.
_COARSE_STEP = 0.125

_TOLERANCE = 1e-9

#: Where a shape acts: one sign of the advantage, for which ratios are above 0, or both, for which all deviations occur.
Side = Literal["A >= 0", "A < 0"] | None


@dataclass(frozen=True)
class ShapeProperties:
    """The properties of a shape ``h`` in Table 1 of the paper.

    They are measured in float64 on ``x = -64 ... 64`` in steps of ``2^-10`` and, for the tails, at ``|x| = 1e3 ... 1e6``.
    A shape for one sign of the advantage is measured where ratios can lie: ``x >= -1/eps`` where ``A >= 0`` and
    ``x <= 1/eps`` where ``A < 0``, with ``eps = 0.2``. There, the tail towards a ratio of 0 is read at ratios of
    ``1e-3 ... 1e-6``. The value of a weight is the integral of its slope.

    :param name: name of the shape
    :param at_zero: ``h(0)``, 0 for an anchored shape (Definition 3.2)
    :param slope_at_zero: ``h'(0)``, which must be above 0 for an update to follow the advantages
    :param not_finite: ``x`` nearest to 0 where value or slope is NaN or Inf, value and slope; None if all are finite
    :param violation: ``(x, h(x))`` where ``h(x) <= x`` fails most (Definition 3.2), on the grid if possible; None if it holds
    :param kinks: points where ``h`` is not differentiable (Principle 1)
    :param argmax: smallest and largest maximizer, within 1e-9 of the supremum; infinite if outside the grid (Principle 2)
    :param sup_slope: supremum of ``|h'|`` (Principle 3)
    :param slope_left: limit of ``h'`` for ``x -> -inf``, the right tail of ``g``, or for a ratio of 0 where ``A >= 0``
    :param slope_right: limit of ``h'`` for ``x -> +inf``, or for a ratio of 0 where ``A < 0``
    :param inflections: number of changes of convexity (Principle 4)
    :param redescending: whether the slope is negative beyond the maximum and returns to 0 (Principle A)
    """

    name: str
    at_zero: float
    slope_at_zero: float
    not_finite: tuple[float, float, float] | None
    violation: tuple[float, float] | None
    kinks: tuple[float, ...]
    argmax: tuple[float, float]
    sup_slope: float
    slope_left: float
    slope_right: float
    inflections: int
    redescending: bool

    @property
    def verdicts(self) -> dict[str, bool]:
        """Tell which properties the shape has: those of Definition 3.2 and the principles of the paper."""
        return {
            "anchored": abs(self.at_zero) <= _TOLERANCE,
            "enclosed": self.violation is None,
            "smooth": not self.kinks,
            "bounded argmax": all(map(math.isfinite, self.argmax)),
            "bounded slope": math.isfinite(self.sup_slope),
            "vanishing tail": self.slope_right == 0.0,
            "redescending": self.redescending,
        }

    def require_trainable(self) -> None:
        """Check that the shape can train a policy, which it can without Definition 3.2, too.

        :raises ValueError: if value or slope is NaN or Inf, or the slope at 0 is not positive
        """
        _require_trainable(self.name, self.not_finite, self.slope_at_zero)

    def __str__(self) -> str:
        return property_table([self])


class PairProperties(NamedTuple):
    """The properties of two shapes for the signs of the advantage, which print as one table.

    :param f: those of ``h_f``, where ``A >= 0``
    :param g: those of ``h_g``, where ``A < 0``
    """

    f: ShapeProperties
    g: ShapeProperties

    def __str__(self) -> str:
        return property_table(self)


@overload
def check(shaping: OneShape) -> ShapeProperties: ...
@overload
def check(shaping: TwoShapes) -> PairProperties: ...
@overload
def check(shaping: ShapingLike) -> ShapeProperties | PairProperties: ...
def check(shaping: ShapingLike) -> ShapeProperties | PairProperties:
    """Measure the properties of Table 1.

    :param shaping: anything that :func:`~sb3_ano.shaping.resolve` accepts
    :return: properties, which print as the table; for a pair, those of both shapes
    :raises ValueError: if value or slope is NaN or Inf where ratios can lie, or the slope at 0 is not positive
    """
    shape = resolve(shaping)
    if isinstance(shape, ShapingPair):
        pair = PairProperties(measure(shape.f, "A >= 0"), measure(shape.g, "A < 0"))
        for properties in pair:
            properties.require_trainable()
        return pair

    # One shape acts on both signs, so that all deviations occur.
    measured = measure(shape)
    measured.require_trainable()
    return measured


def require_trainable(shaping: ShapingLike) -> list[str]:
    """Check in one evaluation per shape that it can train a policy; :func:`check` looks more closely.

    The shapes of the paper are known to, and are not evaluated.

    :param shaping: anything that :func:`~sb3_ano.shaping.resolve` accepts
    :return: messages that say which guarantee of Definition 3.2 is lost
    :raises ValueError: if value or slope is NaN or Inf where ratios can lie, the slope at 0 is not positive, or the shape is
        not anchored
    :raises TypeError: if it cannot be called with a tensor
    """
    pair = as_pair(shaping)
    parts: list[tuple[Shaping, Side]] = [(pair.f, "A >= 0"), (pair.g, "A < 0")]
    if pair.f is pair.g:
        parts = [(pair.f, None)]

    lost = []
    for shape, side in parts:
        if any(shape is known for known in BUILT_IN):
            continue

        # What cannot be trained
        name = _name(shape, side)
        x = _points(_COARSE_STEP, side)
        value, slope = _integrated(shape, x)
        _require_trainable(name, _not_finite(x, value, slope), slope[x == 0.0].item())

        # A constant would not change the gradient, but is likely a mistake.
        at_zero = value[x == 0.0].item()
        if abs(at_zero) > _TOLERANCE:
            raise ValueError(
                f"shaping={name!r} violates anchoring: h(0) = {at_zero:g}, allowed is 0. A shape is a function h(x) "
                "of the deviation in radii; wrap a function f(ratio, eps) with f(1) = 1 by from_ratio"
            )

        # Training goes on without a lower bound, as it does in many published objectives.
        violation = _violation(x, value)
        if violation is not None:
            lost.append(
                f"shaping={name!r} violates enclosure: h({violation[0]:.12g}) = {violation[1]:.12g}, Definition 3.2 has "
                "h(x) <= x: the objective is not a lower bound of r A there"
            )

    return lost


def _name(shape: Shaping, side: Side) -> str:
    name = str(name_of(shape))
    if side is not None:
        name += f", {side}"
    return name


def _require_trainable(name: str, not_finite: tuple[float, float, float] | None, slope_at_zero: float) -> None:
    if not_finite is not None:
        x, value, slope = not_finite
        at = f"x = {x:.12g}: h(x) = {value:g} with slope {slope:g}"
        raise ValueError(f"shaping={name!r} is not finite at {at}; clamp x")

    # Also of NaN
    if not slope_at_zero > 0.0:
        raise ValueError(
            f"shaping={name!r} has the slope {slope_at_zero:g} at x = 0, allowed are slopes above 0: "
            "otherwise updates do not follow the advantages"
        )


def _points(step: float, side: Side) -> torch.Tensor:
    """Return the grid in steps of ``step``, with the tails on both sides, where ratios of this side can lie."""
    grid = torch.arange(-GRID_LIMIT, GRID_LIMIT + step, step, dtype=torch.float64, device="cpu")
    tail = torch.tensor(TAIL, dtype=torch.float64, device="cpu")
    if side is None:
        return torch.cat([-tail.flip(0), grid, tail])

    # Towards a ratio of 0
    edge = (1.0 / tail - 1.0) / EPS
    grid = grid[grid > edge[0]]
    points = torch.cat([edge.flip(0), grid, tail])
    if side == "A >= 0":
        return points
    return -points.flip(0)


def measure(shape: Shaping, side: Side = None) -> ShapeProperties:
    """Return the properties of one shape, whether or not it can train a policy.

    :param shape: function ``h(x)``, or :class:`Shape`
    :param side: ``"A >= 0"`` or ``"A < 0"`` for a shape that acts there only
    """
    x = _points(GRID_STEP, side)
    value, slope = _integrated(shape, x)
    argmax = _argmax(x, value)

    # The tails
    slope_left = _limit(slope[: len(TAIL)].flip(0))
    slope_right = _limit(slope[-len(TAIL) :])
    sup_slope = slope.abs().max().item()
    if math.isinf(slope_left) or math.isinf(slope_right):
        sup_slope = math.inf

    # After the maximum, the slope is negative, and it comes back to 0.
    falls = bool((slope[x > argmax[1]] < -_TOLERANCE).any())

    return ShapeProperties(
        name=_name(shape, side),
        at_zero=value[x == 0.0].item(),
        # Plus 0, so that it is no -0.0
        slope_at_zero=slope[x == 0.0].item() + 0.0,
        not_finite=_not_finite(x, value, slope),
        violation=_violation(x, value),
        kinks=_kinks(shape, x[_INNER]),
        argmax=argmax,
        sup_slope=sup_slope,
        slope_left=slope_left,
        slope_right=slope_right,
        inflections=_inflections(slope[_INNER]),
        redescending=falls and slope_right == 0.0,
    )


def _integrated(shape: Shaping, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and slopes at ascending points; the value of a weight is the integral of its slope."""
    value, slope = _value_and_slope(shape, x)

    # Trapezoids make up no violation of enclosure where h' is at most 1 on the right, and at least 1 on the left.
    if isinstance(shape, Shape) and shape.form == "weight":
        area = torch.cumulative_trapezoid(slope, x)
        value = torch.cat([area.new_zeros(1), area])
        value = value - value[x == 0.0]

    return value, slope


def _value_and_slope(shape: Shaping, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        # Plus 0 x, so that a detached value has a slope, too
        value = evaluate(shape, x, EPS) + 0.0 * x
        (slope,) = torch.autograd.grad(value.sum(), x)
    return value.detach(), slope


def _not_finite(x: torch.Tensor, value: torch.Tensor, slope: torch.Tensor) -> tuple[float, float, float] | None:
    """Return the point nearest to 0 at which value or slope is NaN or Inf, with both."""
    is_broken = ~(value.isfinite() & slope.isfinite())
    if not is_broken.any():
        return None

    distances = torch.where(is_broken, x.abs(), math.inf)
    nearest = distances.argmin()
    return x[nearest].item(), value[nearest].item(), slope[nearest].item()


def _violation(x: torch.Tensor, value: torch.Tensor) -> tuple[float, float] | None:
    excess = value - x
    # Relative to x, because values far out are rounded more.
    above = excess > _TOLERANCE * (1.0 + x.abs())
    excess = torch.where(above, excess, -math.inf)

    # On the grid if possible
    for part in (_INNER, slice(None)):
        if above[part].any():
            worst = excess[part].argmax()
            return x[part][worst].item(), value[part][worst].item()

    return None


def _limit(slopes: torch.Tensor) -> float:
    """Return the limit of the slope along :data:`TAIL`: infinite if it keeps growing, 0 if it vanishes."""
    before = slopes[-2].item()
    last = slopes[-1].item()

    # The distances differ by a factor of 10, over which a slope with a limit hardly changes.
    if not math.isfinite(last) or abs(last) > 1.01 * abs(before) + _TOLERANCE:
        return math.copysign(math.inf, last)

    # It may approach 0 slowly.
    if abs(last) <= 1e-4 and abs(last) <= abs(before):
        return 0.0
    return last


def _argmax(x: torch.Tensor, value: torch.Tensor) -> tuple[float, float]:
    """Return the smallest and largest maximizer; those in the tails count as infinite."""
    # PyTorch's maximum of NaN and a number is NaN.
    value = value.nan_to_num(nan=-math.inf)
    places = x.sign() * math.inf
    places[_INNER] = x[_INNER]

    # Within rounding of the supremum
    maximizers = places[value >= value.max() - _TOLERANCE]
    return maximizers[0].item(), maximizers[-1].item()


def _kinks(shape: Shaping, grid: torch.Tensor, candidates: int = 64) -> tuple[float, ...]:
    """Return the points where value or slope jumps.

    Halving an interval shrinks the change of a smooth function, but not a jump.
    """
    found: set[float] = set()

    # Not at round numbers, where kinks usually are: at a tie, autograd can return the mean of both slopes, half a jump.
    grid = grid[:-1] + 0.382 * GRID_STEP
    for kind in (0, 1):
        change = _value_and_slope(shape, grid)[kind].nan_to_num().diff().abs()

        # A jump exceeds the change in the neighboring intervals, however steep the function is elsewhere.
        neighbors = torch.maximum(change.roll(1), change.roll(-1))
        start = (change - neighbors).topk(candidates).indices
        low = grid[start]
        high = grid[start + 1]

        # Bisection, until only a jump is left
        for _ in range(36):
            middle = 0.5 * (low + high)
            at_low = _value_and_slope(shape, low)[kind].nan_to_num()
            at_middle = _value_and_slope(shape, middle)[kind].nan_to_num()
            at_high = _value_and_slope(shape, high)[kind].nan_to_num()

            is_left = (at_middle - at_low).abs() >= (at_high - at_middle).abs()
            low = torch.where(is_left, low, middle)
            high = torch.where(is_left, middle, high)

        # Relative to the values, whose rounding would be a jump otherwise
        before = _value_and_slope(shape, low)[kind].nan_to_num()
        after = _value_and_slope(shape, high)[kind].nan_to_num()
        scale = 1.0 + torch.maximum(before.abs(), after.abs())
        jumps = (after - before).abs() > 1e-6 * scale

        # A kink of value and slope is one.
        for point in low[jumps].tolist():
            found.add(round(point, 6) + 0.0)

    return tuple(sorted(found))


def _inflections(slope: torch.Tensor) -> int:
    """Count the sign changes of the curvature, from the increments of the slope; straight pieces have no sign."""
    curvature = slope.diff()
    # Rounding, whose sign is random
    noise = 1e-12 * (1.0 + slope.abs().max())
    signs = curvature[curvature.abs() > noise].sign()
    return int((signs.diff() != 0).sum().item())


def property_table(properties: Sequence[ShapeProperties]) -> str:
    """Return the paper's Table 1 as text, with a column for each of ``properties``."""
    rows = [["Property", *(shape.name for shape in properties)]]
    for label, describe in _ROWS:
        rows.append([label, *map(describe, properties)])

    # Columns of the width of their longest cell
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])

    lines = []
    for row in rows:
        line = "  ".join(map(str.ljust, row, widths))
        lines.append(line.rstrip())
    return "\n".join(lines)


_number = "{:+.4g}".format


def _describe_argmax(properties: ShapeProperties) -> str:
    first, last = map(_number, properties.argmax)
    kind = "unbounded"
    if all(map(math.isfinite, properties.argmax)):
        kind = "bounded"

    # Both are infinite where the shape rises without end.
    if first != last:
        return f"{first} to {last} ({kind})"
    if kind == "bounded":
        return f"x = {first} (bounded)"
    return f"none, rises to {last}"


def _describe_right(properties: ShapeProperties) -> str:
    if properties.redescending:
        return "0 (redescending)"
    if properties.slope_right == 0.0:
        return "0 (vanishing)"
    return _number(properties.slope_right)


def _describe_violation(properties: ShapeProperties) -> str:
    if properties.violation is None:
        return "yes"
    return f"no, at x = {_number(properties.violation[0])}"


def _describe_kinks(properties: ShapeProperties) -> str:
    if not properties.kinks:
        return "smooth"
    return "kinks at " + ", ".join(map(_number, properties.kinks))


_ROWS = (
    ("Anchoring, h(0) = 0", lambda p: "yes" if abs(p.at_zero) <= _TOLERANCE else "no"),
    ("Slope at 0", lambda p: _number(p.slope_at_zero)),
    ("Enclosure, h(x) <= x", _describe_violation),
    ("Smoothness (Principle 1)", _describe_kinks),
    ("Argmax (Principle 2)", _describe_argmax),
    ("sup |h'| (Principle 3)", lambda p: f"{p.sup_slope:.4g}" if math.isfinite(p.sup_slope) else "unbounded"),
    ("Slope for x -> -inf", lambda p: _number(p.slope_left)),
    ("Slope for x -> +inf (Principle A)", _describe_right),
    ("Inflections (Principle 4)", lambda p: str(p.inflections)),
)
