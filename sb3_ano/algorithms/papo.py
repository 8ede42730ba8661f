"""Proximal Absolute Policy Optimization."""

from typing import Any, Literal

import torch
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import GymEnv, Schedule

from sb3_ano.algorithms.base import ShapedPolicyAlgorithm
from sb3_ano.fast.rules import first_reason
from sb3_ano.fast.step import ClipRange, RolloutSamples, approximate_kl
from sb3_ano.shaping import MAX_LOG_RATIO, as_pair, ppo, surrogate


class PAPO(ShapedPolicyAlgorithm):
    """Proximal Absolute Policy Optimization (Zhao et al. 2024), in the form of the ANO paper's official code.

    A mean-and-variance surrogate on top of PPO's clip; ``docs/deviations.md`` compares it with the original. The
    arguments are those of :class:`~sb3_ano.algorithms.base.ShapedPolicyAlgorithm`, except ``desired_kl``, and the following.
    The rollout buffer must be SB3's, because the TD errors are computed from its arrays.

    :param k: weight of the two variance terms, from the probability factor of the lower bound
    :param omega1: scale of both variance terms, for the infinity norm of the mean
    :param omega2: weight of the linear part of the mean variance, for the maximum of the KL
    :param max_epoch_kl: limit of an epoch's mean KL, beyond which the epoch is the last one of its update; None for no limit
    """

    _shape = as_pair(ppo)
    _reads_td_errors = True

    def __init__(
        self,
        policy: str | type[ActorCriticPolicy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 3e-4,
        n_steps: int = 2048,
        batch_size: int = 64,
        n_epochs: int = 10,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        clip_range: float | Schedule = 0.2,
        clip_range_vf: float | Schedule | None = None,
        normalize_advantage: bool = True,
        ent_coef: float = 0.0,
        vf_coef: float = 0.5,
        max_grad_norm: float = 0.5,
        use_sde: bool = False,
        sde_sample_freq: int = -1,
        rollout_buffer_class: type[RolloutBuffer] | None = None,
        rollout_buffer_kwargs: dict[str, Any] | None = None,
        target_kl: float | None = None,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: torch.device | str = "auto",
        _init_setup_model: bool = True,
        *,
        k: float = 7.0,
        omega1: float = 0.005,
        omega2: float = 0.005,
        max_epoch_kl: float | None = 0.02,
        clip_range_high: float | str | Schedule | None = None,
        torch_compile: bool | Literal["auto"] = "auto",
        precision: Literal["float32", "bfloat16"] = "float32",
        check_finite: bool = True,
    ) -> None:
        # Before the base class checks its arguments.
        self.k = k
        self.omega1 = omega1
        self.omega2 = omega2
        self.max_epoch_kl = max_epoch_kl

        super().__init__(
            policy,
            env,
            learning_rate=learning_rate,
            n_steps=n_steps,
            batch_size=batch_size,
            n_epochs=n_epochs,
            gamma=gamma,
            gae_lambda=gae_lambda,
            clip_range=clip_range,
            clip_range_vf=clip_range_vf,
            normalize_advantage=normalize_advantage,
            ent_coef=ent_coef,
            vf_coef=vf_coef,
            max_grad_norm=max_grad_norm,
            use_sde=use_sde,
            sde_sample_freq=sde_sample_freq,
            rollout_buffer_class=rollout_buffer_class,
            rollout_buffer_kwargs=rollout_buffer_kwargs,
            target_kl=target_kl,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            verbose=verbose,
            seed=seed,
            device=device,
            _init_setup_model=_init_setup_model,
            clip_range_high=clip_range_high,
            torch_compile=torch_compile,
            precision=precision,
            check_finite=check_finite,
        )

    def _setup_model(self) -> None:
        super()._setup_model()
        # Custom buffers hand out minibatches of their own, in which there are no TD errors.
        if first_reason(self, self.engine_options(), "rollout") is not None:
            raise ValueError(f"rollout_buffer_class={self.rollout_buffer_class!r} gives PAPO no td_errors; leave it as it is")

    def _has_known_loss(self) -> bool:
        return "policy_loss" not in vars(self) and type(self).policy_loss is PAPO.policy_loss

    def _loss_constants(self) -> tuple[float, ...]:
        # They are constants of compiled code: a change compiles again.
        return (self.k, self.omega1, self.omega2, self.gamma)

    def policy_loss(
        self,
        log_ratio: torch.Tensor,
        advantages: torch.Tensor,
        clip_range: ClipRange,
        samples: RolloutSamples,
    ) -> torch.Tensor:
        """Compute ``-(J - k (MV + VM))`` of the minibatch; see ``docs/papo.md`` for the terms."""
        # _reads_td_errors asks for them.
        assert samples.td_errors is not None
        td_errors = samples.td_errors
        # Of the rollout: the critic gets no gradient from this loss.
        values = samples.old_values

        # J, the mean of PPO's objective. Bounded, because exp() of a large log-ratio is Inf, and Inf - Inf below is NaN.
        ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
        clipped = ratio.clamp(1.0 - clip_range.low, 1.0 + clip_range.high)

        mean = surrogate(
            log_ratio,
            advantages,
            ppo,
            eps_low=clip_range.low,
            eps_high=clip_range.high,
        ).mean()

        # MV, the mean of the variances of the clipped objective. The minimum is PPO's: the smaller of clipped and unclipped.
        def variance_of(r: torch.Tensor) -> torch.Tensor:
            return (r - 1.0) * td_errors.square() + 2.0 * self.omega2 * r * td_errors

        mean_variance = self.omega1 * torch.minimum(variance_of(ratio), variance_of(clipped)).mean()

        # VM, the variance of the means: a second moment minus the squared mean, where its lower bound is positive.
        scale = self.omega1 * (1.0 - self.gamma**2) / self.k
        second_moment = scale * (advantages.square() + 2.0 * advantages.abs() * values).mean()
        # Detached: the bias, and the decision about the bound, are numbers, and no part of what is optimized.
        kl = approximate_kl(log_ratio.detach())
        bias = 4.0 * self.gamma * kl * advantages.max() / (1.0 - self.gamma) ** 2
        is_negative = mean.detach() + values.mean() - bias < 0.0
        squared_mean = torch.where(is_negative, 0.0, mean.square() + 2.0 * values.mean() * mean)
        variance_mean = second_moment - squared_mean

        return -(mean - self.k * (mean_variance + variance_mean))
