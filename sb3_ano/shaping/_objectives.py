"""The published objectives, as one table, and the functions that it is made of."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from sb3_ano.shaping._forms import Shape, Shaping, ShapingPair, from_ratio, from_weight, upper_radius
from sb3_ano.shaping._surrogate import ano, identity, ppo, spo

# Functions of the deviation


# Of PSPO: (1 - alpha) r + alpha is 1 + (1 - alpha) eps x.
def pspo(x: torch.Tensor, /) -> torch.Tensor:
    return 0.9 * x


# The slope beyond the edge is alpha of PPO's.
def leaky_ppo(x: torch.Tensor, /) -> torch.Tensor:
    return torch.where(x > 1.0, 1.0 + 0.01 * (x - 1.0), x)


# The rollback: beyond the edge, the slope is -alpha.
def ppo_rb(x: torch.Tensor, /) -> torch.Tensor:
    return torch.where(x > 1.0, 1.0 - 0.3 * (x - 1.0), x)


# tanh(x) = 2 sigmoid(2 x) - 1
def tanh(x: torch.Tensor, /) -> torch.Tensor:
    return 2.0 * _sigmoid(2.0 * x) - 1.0


def _sigmoid(v: torch.Tensor) -> torch.Tensor:
    # The gradient of sigmoid loses all digits where its value rounds to 1.
    return torch.where(v > 0.0, 1.0 - torch.sigmoid(-v), torch.sigmoid(v))


# Functions of the ratio and the radius: f, g, and weights of A grad log pi


# PPO's minimum of two products is min(r, 1 + eps) A for A >= 0, and max(r, 1 - eps) A for A < 0.
def _clip(ratio: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    return torch.minimum(ratio, 1.0 + eps)


def _floor(ratio: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    return torch.maximum(ratio, 1.0 - eps)


def _dual_clip(ratio: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    return _floor(ratio, eps).clamp(max=3.0)


def _two_sided_clip(ratio: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    return _floor(ratio, eps).clamp(max=4.0)


# Both are less 2 / tau - 1, so that they are 1 at a ratio of 1.
def _sapo_f(ratio: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    return 4.0 * _sigmoid(ratio - 1.0) - 1.0


def _sapo_g(ratio: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    tau = 1.05
    return 1.0 + 4.0 / tau * (_sigmoid(tau * (ratio - 1.0)) - 0.5)


def _one(ratio: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(ratio)


def _tis(ratio: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    return ratio.clamp(max=2.0)


def _topr(ratio: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    return ratio.clamp(max=1.0)


def _icepop(ratio: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    return torch.where((ratio >= 0.5) & (ratio <= 5.0), ratio, 0.0)


# Where A >= 0, the ratio is turned around: actions that have become less likely have the larger weight.
def _aspo_f(ratio: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    return torch.where(ratio <= 1.0 + eps, (1.0 / ratio).clamp(max=3.0), 0.0)


def _aspo_g(ratio: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    return torch.where(ratio >= 1.0 - eps, ratio.clamp(max=3.0), 0.0)


# Radii


def _total_variation(
    old_log_prob: torch.Tensor, advantages: torch.Tensor, eps_low: torch.Tensor, eps_high: torch.Tensor
) -> torch.Tensor:
    """Return the deviation of the ratio at which the probability has changed by ``eps``."""
    return torch.where(advantages >= 0, eps_high, eps_low) / old_log_prob.exp()


def _kl_divergence(
    old_log_prob: torch.Tensor, advantages: torch.Tensor, eps_low: torch.Tensor, eps_high: torch.Tensor
) -> torch.Tensor:
    """Return the deviation at which the KL divergence ``(1 - p) log((1 - p) / (1 - p r)) - p log r`` is ``delta``.

    ``p`` is the old probability, which TRGPPO's code limits to 0.01 to 0.99, too. That code makes ``delta`` of a clip range
    as ``log(1 + eps) + ((1 + eps)^-2 - 1) / 2``, for one dimension: 0.03 for 0.2.
    """
    rewarded = advantages >= 0

    # In float64, because a divergence of 0.03 is a small difference of large terms.
    log_edge = torch.where(rewarded, eps_high, eps_low).double().log1p()
    delta = log_edge + 0.5 * torch.expm1(-2.0 * log_edge)
    p = old_log_prob.double().exp().clamp(0.01, 0.99)

    # Newton's method for the logit of the new probability. The divergence is a convex function of it, so that the first
    # step leads beyond the solution, and the others come back to it.
    old_logit = p.logit()

    # The solution if the divergence were quadratic
    step = (2.0 * delta / (p * (1.0 - p))).sqrt()
    logit = old_logit + torch.where(rewarded, step, -step)

    for _ in range(8):
        divergence = p * (old_logit - logit) + F.softplus(logit) - F.softplus(old_logit)
        logit = logit - (divergence - delta) / (torch.sigmoid(logit) - p)

    return (torch.sigmoid(logit) / p - 1.0).abs()


@dataclass(frozen=True)
class Objective:
    """A published objective.

    :param shape: its shape, or two for the signs of the advantage
    :param formula: objective, or weight ``w`` of ``A grad log pi``, for ``A >= 0`` and ``A < 0``
    :param source: paper, and the equation or the code that the formula was compared with
    :param code: address of a reference implementation
    :param constants: constants that do not scale with the radius
    """

    shape: Shaping | ShapingPair
    formula: str
    source: str
    code: str
    constants: Mapping[str, float] = field(default_factory=dict)


_TRL = "https://github.com/huggingface/trl/blob/main/trl/trainer/grpo_trainer.py"
_VERL = "https://github.com/verl-project/verl/blob/main/verl/trainer/ppo/core_algos.py"
_SB3 = "https://github.com/DLR-RM/stable-baselines3/blob/master/stable_baselines3/ppo/ppo.py"

#: The published objectives by name.
OBJECTIVES: dict[str, Objective] = {
    # The paper's
    "ano": Objective(
        ano,
        "h(x) = 45 / (32 ln 2) (phi(-1) - phi(x - 1)), phi(z) = ln(1 + 2^(-2z)) + 4 / (1 + 2^(-z))",
        "Zhang et al. 2026, Eq. f_ANO",
        "https://github.com/sb3-ano/sb3-ano",
    ),
    "spo": Objective(
        spo,
        "r A - |A| (r - 1)^2 / (2 eps)",
        "arXiv:2401.16025; Zhang et al. 2026, Eq. f_SPO",
        "https://github.com/MyRepositories-hub/Simple-Policy-Optimization",
    ),
    "ppo": Objective(ppo, "min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)", "arXiv:1707.06347, Eq. 7", _SB3),
    "identity": Objective(identity, "r A", "arXiv:1707.06347, L^CPI", _SB3),
    # Functions of the ratio, whose constants do not scale with the radius
    "dual_clip": Objective(
        from_ratio(_clip, _dual_clip),
        "PPO's; for A < 0: max(PPO's, c A)",
        "arXiv:1912.09729, Eq. 5",
        _VERL,
        {"c": 3.0},
    ),
    "two_sided_clip": Objective(
        from_ratio(_clip, _two_sided_clip),
        "min(min(r, delta) A, clip(r, 1 - eps_low, 1 + eps_high) A)",
        "INTELLECT-2, arXiv:2505.07291, Section 4.1",
        _TRL,
        {"delta": 4.0},
    ),
    "sapo": Objective(
        from_ratio(_sapo_f, _sapo_g),
        "4 / tau sigmoid(tau (r - 1)) A, tau = tau_pos, for A < 0 tau_neg; less a constant",
        "arXiv:2511.20347; TRL, loss_type sapo",
        _TRL,
        {"tau_pos": 1.0, "tau_neg": 1.05},
    ),
    # Functions of the deviation
    "tanh": Objective(
        tanh,
        "A (1 + eps tanh((r - 1) / eps))",
        "SAPO's with tau = 2 / eps, arXiv:2511.20347",
        _TRL,
    ),
    "pspo": Objective(
        pspo,
        "((1 - alpha) r + alpha) A",
        "arXiv:2509.21282; TRL, pull request 4548",
        "https://github.com/huggingface/trl/pull/4548",
        {"alpha": 0.1},
    ),
    "leaky_ppo": Objective(
        leaky_ppo,
        "min(r A, clip(r, l, u) A), l, u = alpha r + (1 - alpha) (1 -+ eps)",
        "Leaky PPO, hal-04738745",
        "https://hal.science/hal-04738745v1",
        {"alpha": 0.01},
    ),
    "ppo_rb": Objective(
        ppo_rb,
        "r A inside; beyond the edge e = 1 + eps, for A < 0 1 - eps: (-alpha r + (1 + alpha) e) A",
        "Truly PPO, arXiv:1903.07940",
        "https://github.com/wangyuhuix/TrulyPPO/blob/master/baselines/ppo2_AdaClip/ppo2.py",
        {"alpha": 0.3},
    ),
    # PPO's, with a radius for each sample
    "dppo": Objective(
        Shape(ppo, radius=_total_variation),
        "r A; 0 where pi - pi_old > eps, for A < 0 < -eps",
        "DPPO-Binary-TV, arXiv:2602.04879, Eq. 11",
        _VERL,
    ),
    "trgppo": Objective(
        Shape(ppo, radius=_kl_divergence),
        "PPO's, clipped to the ratios at which KL(pi_old, pi) = delta",
        "arXiv:1901.10314",
        "https://github.com/wangyuhuix/TRGPPO",
    ),
    # Weights of A grad log pi
    "cispo": Objective(
        ShapingPair(Shape(_clip, "weight"), Shape(_clip, "weight", reflected=True, radius=upper_radius)),
        "w = min(r, 1 + eps_high)",
        "MiniMax-M1, arXiv:2506.13585, Eq. 4",
        _TRL,
    ),
    "tis": Objective(
        from_weight(_tis),
        "w = min(r, c)",
        "Yao et al. 2025, On the Rollout-Training Mismatch in Modern RL Systems",
        "https://github.com/allenai/open-instruct",
        {"c": 2.0},
    ),
    "icepop": Objective(
        from_weight(_icepop),
        "w = r where alpha <= r <= beta, else 0",
        "Ring-1T, arXiv:2510.18855; INTELLECT-3, arXiv:2512.16144, Eq. 1",
        "https://github.com/areal-project/AReaL",
        {"alpha": 0.5, "beta": 5.0},
    ),
    "topr": Objective(
        from_weight(_one, _topr),
        "w = 1; for A < 0: w = min(r, 1)",
        "arXiv:2503.14286",
        "https://arxiv.org/abs/2503.14286",
    ),
    "reinforce": Objective(from_weight(_one), "w = 1", "Williams 1992", _VERL),
    "aspo": Objective(
        from_weight(_aspo_f, _aspo_g),
        "w = min(1 / r, c), 0 where r > 1 + eps_high; for A < 0: w = min(r, c), 0 where r < 1 - eps_low",
        "arXiv:2510.06062; Archer2.0",
        "https://github.com/wizard-III/Archer2.0",
        {"c": 3.0},
    ),
    "gppo": Objective(
        from_weight(_clip, _floor),
        "w = min(r, 1 + eps_high); for A < 0: w = max(r, 1 - eps_low)",
        "Klear-Reasoner, arXiv:2508.07629",
        "https://github.com/Kwai-Klear/KlearReasoner",
    ),
}
