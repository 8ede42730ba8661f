"""The shaped objective for tokens and sequences, and what is reported of their ratios; imports PyTorch only."""

from typing import NamedTuple

import torch

from sb3_ano.shaping import MAX_LOG_RATIO, ShapingLike, surrogate

#: What acts on negative advantages: the paper's ``g``, or what the official RLHF trainers evaluate in its place.
DUALS = ("paper", "official_rlhf")


def shaped_objective(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    shaping: ShapingLike,
    *,
    eps_low: float,
    eps_high: float,
    dual: str = "paper",
) -> torch.Tensor:
    """The objective of Definition 3.2, elementwise and to be maximised.

    The official RLHF trainers negate the radius of negative advantages and also reflect the ratio, which undo each other:
    they evaluate ``f(r) A`` for both signs. Beyond the radius, where ANO's ``f`` falls, that raises the ratio of a token
    that should become rarer. ``dual="official_rlhf"`` is this objective, for comparison only.

    :param log_ratio: log-probability minus the one at generation, ``(batch, tokens)``, or ``(batch, 1)`` for sequences
    :param advantages: broadcastable with ``log_ratio``
    :param shaping: anything that :func:`sb3_ano.shaping.resolve` takes
    :param eps_low: radius where ``A < 0``
    :param eps_high: radius where ``A >= 0``
    :param dual: one of :data:`DUALS`
    :return: the objective, in the broadcast shape of the inputs
    """
    if dual == "paper":
        return surrogate(log_ratio, advantages, shaping, eps_low=eps_low, eps_high=eps_high)
    sign = torch.where(advantages >= 0, 1.0, -1.0)
    rewarded, punished = (
        surrogate(log_ratio, advantages.abs(), shaping, eps_low=eps, eps_high=eps) for eps in (eps_high, eps_low)
    )
    return sign * torch.where(advantages >= 0, rewarded, punished)


class RatioSums(NamedTuple):
    """Sums over tokens (or sequences), which add up over processes, and a maximum.

    :param sums: number, ratio, below ``1 - eps_low``, above ``1 + eps_high``, and ``(r - 1) - log r``, ``(5,)``
    :param maximum: the largest ratio, ``(1,)``
    """

    sums: torch.Tensor
    maximum: torch.Tensor

    @torch.no_grad()
    @staticmethod
    def of(log_ratio: torch.Tensor, mask: torch.Tensor, *, eps_low: float, eps_high: float) -> "RatioSums":
        """Look at the elements of ``log_ratio`` that ``mask`` marks, both ``(batch, tokens)``."""
        mask = mask.bool()
        log_ratio = torch.where(mask, log_ratio.float(), 0.0).clamp(max=MAX_LOG_RATIO)
        deviation = torch.expm1(log_ratio)
        each = (mask, deviation + 1.0, deviation < -eps_low, deviation > eps_high, deviation - log_ratio)
        sums = torch.stack([torch.where(mask, values.float(), 0.0).sum() for values in each])
        return RatioSums(sums, torch.where(mask, deviation + 1.0, 0.0).max().reshape(1))

    def metrics(self) -> dict[str, float]:
        """Mean and largest ratio, the fractions outside the region on either side, and the approximate KL divergence."""
        count, *totals = self.sums.tolist()
        names = ("ratio/mean", "ratio/outside_low", "ratio/outside_high", "approx_kl")
        means = {name: total / max(count, 1.0) for name, total in zip(names, totals, strict=True)}
        return {**means, "ratio/max": self.maximum.max().item()}
