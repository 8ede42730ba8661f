"""What a shape can be: ``h(x)``, ``f(ratio, eps)`` or a weight ``w(ratio, eps)``, each with a radius of its own or without."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, overload

import torch

#: The log-ratio saturates here, at r = 4.9e8; beyond it the gradient is zero.
MAX_LOG_RATIO = 20.0
#: Smallest radius; schedules end at 0 or slightly below, where the deviation x would not be defined.
MIN_RADIUS = 1e-6
#: Largest radius of a function of old probabilities, which may be 0: no ratio exceeds it.
MAX_RADIUS = math.exp(MAX_LOG_RATIO)

#: An elementwise shape ``h``: takes and returns a floating-point tensor of any shape, with ``h(0) = 0``.
Shaping: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
#: ``f(ratio, eps)`` or ``w(ratio, eps)``, elementwise; ``eps`` is a tensor, 0-d or of the shape of ``ratio``.
RatioFunction: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
#: ``radius(old_log_prob, advantages, eps_low, eps_high)``, a tensor of the shape of ``old_log_prob``.
RadiusFunction: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class ShapingPair(NamedTuple):
    """Independent shapes for the two signs of the advantage (Definition 3.2 before symmetry).

    :param f: ``h_f``, where ``A >= 0``
    :param g: ``h_g``, where ``A < 0``
    """

    f: Shaping
    g: Shaping


@dataclass(frozen=True)
class Shape:
    """A shape that is more than a function of the deviation: a function ``h(x, eps)``.

    :param function: ``h(x)``, ``f(ratio, eps)`` or ``w(ratio, eps)``
    :param form: which of them: ``"deviation"``, ``"ratio"`` or ``"weight"``
    :param reflected: whether ``function`` is the paper's ``g``, or a weight where ``A < 0``
    :param radius: radius of each sample instead of ``eps_low`` and ``eps_high``, or None
    """

    function: Callable[..., torch.Tensor]
    form: Literal["deviation", "ratio", "weight"] = "deviation"
    reflected: bool = False
    radius: RadiusFunction | None = None

    @property
    def reads_old_log_prob(self) -> bool:
        """Whether its radius depends on the sample."""
        return self.radius not in (None, upper_radius)

    def __call__(self, x: torch.Tensor, /, eps: float = 1.0) -> torch.Tensor:
        if self.form == "deviation":
            return self.function(x)

        # x = (r - 1) / eps for f, and (1 - r) / eps for g
        sign = 1.0
        if self.reflected:
            sign = -1.0
        ratio = 1.0 + sign * eps * x

        # Functions of the ratio may call a tensor's methods on the radius.
        radius = torch.as_tensor(eps, dtype=x.dtype, device=x.device)
        return sign * self.excess(ratio, radius) / eps

    def excess(self, ratio: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
        """Return ``f(ratio) - 1``; for a weight, ``w log(ratio)`` with a constant ``w``, so that it is the gradient."""
        value = self.function(ratio, eps)

        # The stop-gradient of the papers
        if self.form == "weight":
            return value.detach() * ratio.log()
        return value - 1.0


@overload
def from_ratio(f: RatioFunction, g: None = None) -> Shape: ...
@overload
def from_ratio(f: RatioFunction, g: RatioFunction) -> ShapingPair: ...
def from_ratio(f: RatioFunction, g: RatioFunction | None = None) -> Shape | ShapingPair:
    """Wrap the paper's ``f(ratio, eps)``, and a ``g(ratio, eps)`` that is not the reflection of ``f``, as shapes.

    The constants of ``f`` need not scale with the radius: the shape is ``h(x, eps) = (f(1 + eps x, eps) - 1) / eps``.

    :param f: elementwise function of the ratio and the radius, with ``f(1) = 1``, where ``A >= 0``
    :param g: the same where ``A < 0``; None takes the reflection ``2 - f(2 - ratio)``
    :return: a shape, or a :class:`ShapingPair` if ``g`` is given
    """
    # One function serves both signs by its reflection.
    if g is None:
        return Shape(f, "ratio")

    return ShapingPair(Shape(f, "ratio"), Shape(g, "ratio", reflected=True))


def from_weight(w: RatioFunction, g: RatioFunction | None = None) -> ShapingPair:
    """Wrap a weight of ``A grad log pi``, as losses with a stop-gradient have it: the shape with ``h'(x) = w(r) / r``.

    The objective is ``A (1 + w log r)``, in which ``w`` is a constant. Its gradient by ``log r`` is ``A w``; its value is
    ``A`` at ``r = 1``, and finite wherever ``w`` is. The gradient is zero where ``log r`` is outside of -20 to 20.

    :param w: elementwise weight of the ratio and the radius, such as ``lambda ratio, eps: torch.minimum(ratio, 1 + eps)``
    :param g: the weight where ``A < 0``; None takes ``w`` there, too
    """
    if g is None:
        g = w
    return ShapingPair(Shape(w, "weight"), Shape(g, "weight", reflected=True))


def upper_radius(
    old_log_prob: torch.Tensor, advantages: torch.Tensor, eps_low: torch.Tensor, eps_high: torch.Tensor
) -> torch.Tensor:
    """Return ``eps_high`` for both signs of the advantage."""
    return eps_high
