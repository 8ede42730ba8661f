"""The surrogate objective of Definition 3.2, and its f and g as functions of the ratio."""

import math
from collections.abc import Callable

import torch

from sb3_ano.shaping._shapes import ShapingLike, as_pair

#: The log-ratio saturates here, at r = 4.9e8; beyond it the gradient is zero.
MAX_LOG_RATIO = 20.0
#: Smallest radius; schedules end at 0 or slightly below, where the deviation x would not be defined.
MIN_RADIUS = 1e-6


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
    shape = as_pair(shaping)
    dtype = torch.promote_types(torch.promote_types(log_ratio.dtype, advantages.dtype), torch.float32)
    _require_shape("advantages", advantages, log_ratio)
    log_ratio, advantages = log_ratio.to(dtype), advantages.to(dtype)
    low, high = (_radius(eps, name, log_ratio) for eps, name in ((eps_low, "eps_low"), (eps_high, "eps_high")))

    rewarded = advantages >= 0
    # sign(A) eps: both x = (r - 1) / signed_eps and |A| eps = A signed_eps need nothing else.
    signed_eps = torch.where(rewarded, high, -low)
    deviation = torch.expm1(log_ratio.clamp(max=MAX_LOG_RATIO)) / signed_eps
    if shape.f is shape.g:
        h = shape.f(deviation)
    else:
        # Each shape gets zeros instead of the other's samples, so that its NaN or Inf cannot reach the other's gradient.
        h_f, h_g = shape.f(torch.where(rewarded, deviation, 0.0)), shape.g(torch.where(rewarded, 0.0, deviation))
        h = torch.where(rewarded, h_f, h_g)
    return advantages + advantages * signed_eps * h


def _require_shape(name: str, tensor: torch.Tensor, log_ratio: torch.Tensor) -> None:
    # Broadcasting (batch, 1) with (batch,) gives (batch, batch), whose mean is wrong but looks plausible.
    lengths = zip(tensor.shape, log_ratio.shape, strict=False)
    if tensor.ndim not in (0, log_ratio.ndim) or any(length not in (1, full) for length, full in lengths):
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
