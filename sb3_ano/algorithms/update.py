"""One minibatch: its loss and its gradient step, for which the host reads one flag (was it finite)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

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


def _not_finite(policy: ActorCriticPolicy, terms: LossTerms, most: int = 3) -> list[str]:
    """What to name in the report: loss terms, or else the gradients that they made, at most ``most`` of them."""
    losses = [name for name in ("policy_loss", "value_loss", "entropy_loss") if not getattr(terms, name).isfinite()]
    if losses:
        return losses
    if not terms.loss.isfinite():
        return ["the weighted sum of the losses (vf_coef, ent_coef)"]
    gradients = [
        f"gradient of {name}"
        for name, parameter in policy.named_parameters()
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all())
    ]
    if len(gradients) > most:
        return [*gradients[:most], f"{len(gradients) - most} more gradients"]
    return gradients or ["norm of the gradient (overflow)"]
