"""One minibatch: loss, diagnostics and gradient step.

Everything stays on the device but one flag a minibatch (was it finite) and, with ``target_kl``, the KL.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import DictRolloutBufferSamples, RolloutBufferSamples
from torch.nn import functional as F

RolloutSamples: TypeAlias = RolloutBufferSamples | DictRolloutBufferSamples


class TrustRegion(NamedTuple):
    """Radii of the current update, 0-d tensors; tensors, so that a schedule does not recompile a compiled loss.

    :param eps_low: radius below 1, acting where ``A < 0``
    :param eps_high: radius above 1, acting where ``A >= 0``
    """

    eps_low: torch.Tensor
    eps_high: torch.Tensor


#: ``policy_loss(log_ratio, advantages, region, samples)``, a scalar to be minimised.
PolicyLoss: TypeAlias = Callable[[torch.Tensor, torch.Tensor, TrustRegion, RolloutSamples], torch.Tensor]


@dataclass(frozen=True)
class LossSettings:
    """What a minibatch loss needs beside the data; constant during an update.

    :param region: radii of the surrogate
    :param clip_range_vf: radius of the value clip, 0-d tensor, or None
    :param normalize_advantage: whether to normalise the advantages of each minibatch
    :param ent_coef: weight of the entropy loss
    :param vf_coef: weight of the value loss
    :param discrete: whether actions are indices
    """

    region: TrustRegion
    clip_range_vf: torch.Tensor | None
    normalize_advantage: bool
    ent_coef: float
    vf_coef: float
    discrete: bool


class LossTerms(NamedTuple):
    """The scalar terms of a minibatch loss, and its samples' log-ratios and advantages, ``(batch,)``."""

    loss: torch.Tensor
    policy_loss: torch.Tensor
    value_loss: torch.Tensor
    entropy_loss: torch.Tensor
    log_ratio: torch.Tensor
    advantages: torch.Tensor


def minibatch_loss(
    policy: ActorCriticPolicy, policy_loss: PolicyLoss, samples: RolloutSamples, settings: LossSettings, probe: torch.Tensor
) -> LossTerms:
    """Loss of Algorithm 1 of the paper, with SB3's value clip and entropy estimate.

    :param policy: actor and critic
    :param policy_loss: the algorithm's surrogate
    :param samples: a minibatch of the rollout
    :param settings: coefficients and radii
    :param probe: zeros ``(batch,)`` added to the log-ratio; their gradient is the gradient of each sample's surrogate
    """
    actions = samples.actions.long().flatten() if settings.discrete else samples.actions
    values, log_prob, entropy = policy.evaluate_actions(samples.observations, actions)
    values = values.flatten()

    advantages = samples.advantages
    if settings.normalize_advantage and len(advantages) > 1:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

    log_ratio = log_prob - samples.old_log_prob + probe
    surrogate_loss = policy_loss(log_ratio, advantages, settings.region, samples)

    if settings.clip_range_vf is not None:
        change = (values - samples.old_values).clamp(-settings.clip_range_vf, settings.clip_range_vf)
        values = samples.old_values + change
    value_loss = F.mse_loss(samples.returns, values)

    # Without a closed form, -log_prob of the taken actions estimates the entropy.
    entropy_loss = log_prob.mean() if entropy is None else -entropy.mean()

    loss = surrogate_loss + settings.ent_coef * entropy_loss + settings.vf_coef * value_loss
    return LossTerms(loss, surrogate_loss, value_loss, entropy_loss, log_ratio.detach(), advantages)


def approximate_kl(log_ratio: torch.Tensor) -> torch.Tensor:
    """Schulman's estimate ``mean(r - 1 - log r)`` of the KL from the rollout's policy, a scalar."""
    return (log_ratio.exp() - 1.0 - log_ratio).mean()


def gradient_step(policy: ActorCriticPolicy, terms: LossTerms, max_grad_norm: float) -> tuple[torch.Tensor, list[str]]:
    """Backward, clip and step, unless loss or gradient is not finite: then parameters and optimizer stay as they are.

    :param policy: with its optimizer
    :param max_grad_norm: the gradient is scaled down to this norm
    :return: norm of the gradient before clipping, and the names of what was not finite (empty after a step)
    """
    policy.optimizer.zero_grad()
    terms.loss.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in policy.parameters() if parameter.grad is not None])
    if not bool(torch.isfinite(terms.loss.detach() + norm)):
        culprits = _not_finite(policy, terms)
        policy.optimizer.zero_grad()
        return norm, culprits
    torch.nn.utils.clip_grads_with_norm_(policy.parameters(), max_grad_norm, norm)
    policy.optimizer.step()
    return norm, []


def _not_finite(policy: ActorCriticPolicy, terms: LossTerms) -> list[str]:
    names = [name for name in ("policy_loss", "value_loss", "entropy_loss") if not getattr(terms, name).isfinite()]
    for name, parameter in policy.named_parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            names.append(f"gradient of {name}")
    return names or ["norm of the gradient (overflow)"]


@dataclass
class UpdateStatistics:
    """Diagnostics of one call of ``train``, kept on the device until :meth:`summary` reads them once."""

    region: TrustRegion
    skipped: int = 0
    not_finite: list[str] = field(default_factory=list)
    _rows: list[torch.Tensor] = field(default_factory=list)
    _epoch_starts: list[int] = field(default_factory=list)

    _COLUMNS = (
        "policy_gradient_loss",
        "value_loss",
        "entropy_loss",
        "loss",
        "approx_kl",
        "ratio_mean",
        "ratio_max",
        "fraction_above",
        "fraction_below",
        "clipped_gradient",
        "total_gradient",
        "grad_norm",
    )

    def start_epoch(self) -> None:
        """Mark the beginning of an epoch, because SB3's ``approx_kl`` is the mean of the last one."""
        self._epoch_starts.append(len(self._rows))

    def skip(self, not_finite: list[str]) -> None:
        """Count a minibatch that was skipped, and remember what was not finite in it."""
        self.skipped += 1
        self.not_finite = not_finite

    @torch.no_grad()
    def add(self, terms: LossTerms, kl: torch.Tensor, probe: torch.Tensor, grad_norm: torch.Tensor | None) -> None:
        """Record a minibatch; ``grad_norm`` is None where ``target_kl`` stopped the update before its gradient."""
        ratio = terms.log_ratio.exp()
        above, below = ratio > 1.0 + self.region.eps_high, ratio < 1.0 - self.region.eps_low
        clipped = torch.where(terms.advantages >= 0, above, below)
        gradient = torch.zeros_like(ratio) if probe.grad is None else probe.grad.abs()
        nothing = ratio.new_full((), float("nan"))
        row = [
            terms.policy_loss,
            terms.value_loss,
            terms.entropy_loss,
            terms.loss,
            kl,
            ratio.mean(),
            ratio.max(),
            above.float().mean(),
            below.float().mean(),
            gradient[clipped].sum(),
            gradient.sum(),
            nothing if grad_norm is None else grad_norm,
        ]
        self._rows.append(torch.stack([value.detach().float() for value in row]))

    def epoch_kl(self) -> float:
        """Mean KL of the minibatches of the current epoch."""
        column = self._COLUMNS.index("approx_kl")
        rows = self._rows[self._epoch_starts[-1] :]
        return torch.stack(rows)[:, column].mean().item() if rows else float("nan")

    def summary(self) -> dict[str, float]:
        """Means over the update, under SB3's names where it has one.

        ``approx_kl`` and ``loss`` mean what they mean in SB3 (the last epoch, the last minibatch); ``kl_mean`` and
        ``kl_max`` look at the whole update. ``ppo_discarded_gradient`` is the share of the surrogate's gradient, in
        absolute value over samples, that comes from samples whose gradient PPO's clip would have set to zero.
        """
        if not self._rows:
            return {}
        rows = torch.stack(self._rows).cpu().double().numpy()
        columns = dict(zip(self._COLUMNS, rows.T, strict=True))
        mean = {name: float(np.mean(column)) for name, column in columns.items()}
        last_epoch = columns["approx_kl"][self._epoch_starts[-1] :]
        steps = columns["grad_norm"][np.isfinite(columns["grad_norm"])]
        total = columns["total_gradient"].sum()
        return {
            **{name: mean[name] for name in ("entropy_loss", "policy_gradient_loss", "value_loss")},
            "approx_kl": float(np.mean(last_epoch)) if len(last_epoch) else mean["approx_kl"],
            "kl_mean": mean["approx_kl"],
            "kl_max": float(columns["approx_kl"].max()),
            "clip_fraction": mean["fraction_above"] + mean["fraction_below"],
            "fraction_above": mean["fraction_above"],
            "fraction_below": mean["fraction_below"],
            "ratio_mean": mean["ratio_mean"],
            "ratio_max": float(columns["ratio_max"].max()),
            "ppo_discarded_gradient": float(columns["clipped_gradient"].sum() / total) if total > 0 else 0.0,
            "grad_norm": float(np.mean(steps)) if len(steps) else 0.0,
            "loss": float(columns["loss"][-1]),
        }
