"""Use a shape as the policy loss of other trainers: ``python examples/other_trainers.py`` compares it with their own losses.

CleanRL's scripts have their loss in place, TRL's trainer is subclassed by ``sb3_ano.llm``, and verl and prime-rl take a
function. None of them is needed to import this file.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sb3_ano.shaping import surrogate


def cleanrl_loss(
    logratio: torch.Tensor, mb_advantages: torch.Tensor, clip_coef: float, shaping: str = "ano", old_logprob: Any = None
) -> torch.Tensor:
    """Return ``pg_loss`` of CleanRL's ``ppo.py`` and its relatives, a scalar.

    In the script, it takes the place of the three lines from ``pg_loss1`` to ``pg_loss``, with ``b_logprobs[mb_inds]`` as
    the last argument.
    """
    objective = surrogate(logratio, mb_advantages, shaping, eps_low=clip_coef, eps_high=clip_coef, old_log_prob=old_logprob)
    return -objective.mean()


def verl_loss(shaping: str) -> Callable[..., tuple[torch.Tensor, dict[str, Any]]]:
    """Return a policy loss for verl: ``register_policy_loss("cispo_shape")(verl_loss("cispo"))``, and set ``loss_mode`` to it.

    The function has the arguments of verl's ``PolicyLossFn``.
    """

    def policy_loss(
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
        high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
        log_ratio = log_prob - old_log_prob
        losses = -surrogate(log_ratio, advantages, shaping, eps_low=low, eps_high=high, old_log_prob=old_log_prob)
        if rollout_is_weights is not None:
            losses = losses * rollout_is_weights

        verl = importlib.import_module("verl.trainer.ppo.core_algos")
        options = config.global_batch_info
        loss = verl.agg_loss(loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **options)
        kl = (-log_ratio * response_mask).sum() / response_mask.sum().clamp(min=1)
        return loss, {"actor/ppo_kl": kl.detach().item()}

    return policy_loss


def prime_rl_loss(inputs: Any, shaping: str = "dppo", eps_low: float = 0.2, eps_high: float = 0.2) -> Any:
    """Return the loss of a sequence for prime-rl.

    In its configuration: ``[trainer.loss]``, ``type = "custom"``, ``import_path = "other_trainers.prime_rl_loss"`` and
    ``kwargs = {shaping = "dppo"}``.
    """
    prime_rl = importlib.import_module("prime_rl.trainer.rl.loss")
    loss, metrics = sequence_loss(
        inputs.trainer_logprobs, inputs.inference_logprobs, inputs.advantages, inputs.loss_mask, shaping, eps_low, eps_high
    )
    return prime_rl.LossOutputs(loss=loss, metrics=dict(metrics))


def sequence_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    shaping: str,
    eps_low: float,
    eps_high: float,
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Return the sum of the losses of the tokens of a sequence, and a metric of their ratios."""
    log_ratio = logprobs - old_logprobs
    objective = surrogate(log_ratio, advantages, shaping, eps_low=eps_low, eps_high=eps_high, old_log_prob=old_logprobs)
    mismatch = (torch.expm1(log_ratio) - log_ratio)[mask].sum() / mask.sum().clamp(min=1)
    return -(objective * mask).sum(), {"mismatch_kl": mismatch.detach()}


def main() -> None:
    """Compare gradients with the lines that these functions take the place of."""
    generator = torch.Generator().manual_seed(0)
    old = -3.0 * torch.rand(1000, generator=generator)
    advantages = torch.randn(1000, generator=generator)
    new = (old + 0.3 * torch.randn(1000, generator=generator)).clamp(max=0.0).requires_grad_()

    # CleanRL's lines, with PPO's clip
    ratio = (new - old).exp()
    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * torch.clamp(ratio, 1 - 0.2, 1 + 0.2)
    theirs = torch.max(pg_loss1, pg_loss2).mean()
    ours = cleanrl_loss(new - old, advantages, 0.2, "ppo")
    report("CleanRL", theirs, ours, new)

    # prime-rl's default loss without its square penalty
    mask = torch.ones(1000, dtype=torch.bool)
    change = new.exp() - old.exp()
    dropped = torch.where(advantages > 0, change > 0.2, change < -0.2)
    theirs = -(~dropped * advantages * (new - old).exp()).sum()
    ours, _ = sequence_loss(new, old, advantages, mask, "dppo", 0.2, 0.2)
    report("prime-rl", theirs, ours, new)


def report(trainer: str, theirs: torch.Tensor, ours: torch.Tensor, parameters: torch.Tensor) -> None:
    """Print the largest difference of two gradients, relative to the norm."""
    expected, found = (torch.autograd.grad(loss, parameters, retain_graph=True)[0] for loss in (theirs, ours))
    print(f"{trainer}: relative difference of the gradients {((expected - found).norm() / expected.norm()).item():.1e}")


if __name__ == "__main__":
    main()
