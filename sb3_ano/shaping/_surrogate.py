"""The shapes of the paper, and the surrogate objective of Definition 3.2 for shapes that are functions already."""

import math
from typing import cast

import torch
import torch.nn.functional as F

from sb3_ano.shaping._forms import MAX_LOG_RATIO, MAX_RADIUS, MIN_RADIUS, Shape, Shaping, ShapingPair

_LN2 = math.log(2.0)
_ANO_SCALE = 45.0 / (32.0 * _LN2)
_ANO_ANCHOR = math.log(5.0) + 4.0 / 3.0 - 4.0  # so that h(0) = 0


def ano(x: torch.Tensor, /) -> torch.Tensor:
    """Compute ANO's redescending shape (Eq. f_ANO): ``45 / (32 ln 2) (phi(-1) - phi(x - 1))``, with its peak at ``x = 1``.

    ``phi(z) = softplus(-2 z ln 2) + 4 sigmoid(z ln 2)``. The sigmoid is written as ``4 - 4 sigmoid(-z ln 2)``, because
    the gradient of ``sigmoid`` loses all digits where its value rounds to 1, which is on the right tail, where it matters.
    """
    # -z ln 2
    v = (1.0 - x) * _LN2

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


def surrogate_of_pair(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    shape: ShapingPair,
    eps_low: float | torch.Tensor,
    eps_high: float | torch.Tensor,
    old_log_prob: torch.Tensor | None,
) -> torch.Tensor:
    """Compute what :func:`~sb3_ano.shaping.surrogate` does, which also takes names; trainers call this for each minibatch."""
    # Under autocast, the inputs may have 16 bits, in which a ratio near 1 has two or three digits.
    dtype = torch.promote_types(log_ratio.dtype, advantages.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    _require_shape("advantages", advantages, log_ratio)
    log_ratio = log_ratio.to(dtype)
    advantages = advantages.to(dtype)

    # The radius of each sample
    low = _radius(eps_low, "eps_low", log_ratio)
    high = _radius(eps_high, "eps_high", log_ratio)
    if old_log_prob is not None:
        _require_shape("old_log_prob", old_log_prob, log_ratio)
    radii = (low, high)
    high = _own_radius(shape.f, radii, 1, old_log_prob, advantages)
    low = _own_radius(shape.g, radii, 0, old_log_prob, advantages)

    rewarded = advantages >= 0
    log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
    reads_ratio = isinstance(shape.f, Shape) and shape.f.form == "ratio"
    if shape.f is shape.g and not reads_ratio:
        # sign(A) eps: both x = (r - 1) / signed_eps and |A| eps = A signed_eps need nothing else.
        signed_eps = torch.where(rewarded, high, -low)
        x = torch.expm1(log_ratio) / signed_eps
        return advantages + advantages * signed_eps * shape.f(x)

    # Each shape gets a ratio of 1 instead of the other's samples, so that its NaN or Inf cannot reach the other's gradient.
    above = _excess(shape.f, torch.where(rewarded, log_ratio, 0.0), high, is_g=False)
    below = _excess(shape.g, torch.where(rewarded, 0.0, log_ratio), low, is_g=True)
    return advantages + advantages * torch.where(rewarded, above, below)


def _excess(shape: Shaping, log_ratio: torch.Tensor, eps: torch.Tensor, is_g: bool) -> torch.Tensor:
    """Return ``f(r) - 1``, or ``g(r) - 1``."""
    if not isinstance(shape, Shape) or shape.form == "deviation":
        signed_eps = eps
        if is_g:
            signed_eps = -eps
        x = torch.expm1(log_ratio) / signed_eps
        return signed_eps * shape(x)

    # Weights may divide by the ratio.
    ratio = log_ratio.clamp(min=-MAX_LOG_RATIO).exp()
    if shape.form == "weight" or shape.reflected == is_g:
        return shape.excess(ratio, eps)

    # The paper's reflection
    return -shape.excess(2.0 - ratio, eps)


def _own_radius(
    shape: Shaping,
    radii: tuple[torch.Tensor, torch.Tensor],
    place: int,
    old_log_prob: torch.Tensor | None,
    advantages: torch.Tensor,
) -> torch.Tensor:
    """Return the radius that the samples of one sign have: that of its place in ``radii``, unless the shape has its own."""
    if not isinstance(shape, Shape) or shape.radius is None:
        return radii[place]

    # Old probabilities may be 0.
    radius = shape.radius(cast(torch.Tensor, old_log_prob), advantages, *radii)
    return radius.to(advantages.dtype).clamp(MIN_RADIUS, MAX_RADIUS)


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
    # A schedule that ends at 0 would divide by it.
    return eps.to(like.dtype).clamp(min=MIN_RADIUS)
