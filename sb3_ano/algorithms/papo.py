"""Proximal Absolute Policy Optimization, and the rollout buffers that give it one-step errors."""

from typing import Any, Literal, NamedTuple, cast

import torch
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import GymEnv, Schedule, TensorDict

from sb3_ano.algorithms.base import ShapedPolicyAlgorithm
from sb3_ano.algorithms.buffers import DictFlatRolloutBuffer, FlatRolloutBuffer, RolloutSamples
from sb3_ano.algorithms.statistics import UpdateStatistics
from sb3_ano.algorithms.update import TrustRegion, approximate_kl
from sb3_ano.shaping import MAX_LOG_RATIO, ppo, surrogate


class TDRolloutSamples(NamedTuple):
    """Samples with the fields of SB3's, and the one-step TD errors, ``(batch,)``."""

    observations: torch.Tensor | TensorDict
    actions: torch.Tensor
    old_values: torch.Tensor
    old_log_prob: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    td_errors: torch.Tensor


class _TDErrors(FlatRolloutBuffer):
    """Hands out the one-step TD errors that the advantages are made of."""

    def tensors(self) -> TDRolloutSamples:  # type: ignore[override]
        return TDRolloutSamples(**super().tensors()._asdict(), td_errors=self._on_device("td_errors"))


class TDRolloutBuffer(_TDErrors):
    """A rollout buffer with one-step TD errors."""


class DictTDRolloutBuffer(_TDErrors, DictFlatRolloutBuffer):  # type: ignore[misc]
    """A rollout buffer for Dict observations with one-step TD errors."""


class PAPO(ShapedPolicyAlgorithm):
    """Proximal Absolute Policy Optimization (Zhao et al. 2024), in the form that the ANO paper's experiments ran.

    A mean-and-variance surrogate on top of PPO's clip; ``docs/deviations.md`` compares it with the original. The
    arguments are those of :class:`~sb3_ano.algorithms.base.ShapedPolicyAlgorithm`, that is, of SB3's PPO, and

    A custom ``rollout_buffer_class`` must derive from :class:`TDRolloutBuffer`, or :class:`DictTDRolloutBuffer` for Dict
    observations.

    :param k: weight of the two variance terms, from the probability factor of the lower bound
    :param omega1: scale of both variance terms, for the infinity norm of the mean
    :param omega2: weight of the linear part of the mean variance, for the maximum of the KL
    :param max_epoch_kl: an epoch whose mean KL exceeds this is the last one of its update; None for no limit
    """

    _buffers = (TDRolloutBuffer, DictTDRolloutBuffer)

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
    ):
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
            _init_setup_model=False,
            clip_range_high=clip_range_high,
            torch_compile=torch_compile,
            precision=precision,
            check_finite=check_finite,
        )
        self.k = k
        self.omega1 = omega1
        self.omega2 = omega2
        self.max_epoch_kl = max_epoch_kl
        if _init_setup_model:
            self._setup_model()

    def _setup_model(self) -> None:
        super()._setup_model()
        needed = self._default_buffer()
        if not isinstance(self.rollout_buffer, needed):
            raise ValueError(
                f"rollout_buffer_class={self.rollout_buffer_class!r} gives PAPO no td_errors of these observations; "
                f"allowed are {needed.__name__} and its subclasses"
            )

    def policy_loss(
        self, log_ratio: torch.Tensor, advantages: torch.Tensor, region: TrustRegion, samples: RolloutSamples
    ) -> torch.Tensor:
        """``-(J - k (MV + VM))`` of the minibatch; see ``docs/algorithms.md`` for the terms."""
        td_errors = cast(TDRolloutSamples, samples).td_errors
        values = samples.old_values
        ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
        clipped = ratio.clamp(1.0 - region.eps_low, 1.0 + region.eps_high)

        mean = surrogate(log_ratio, advantages, ppo, eps_low=region.eps_low, eps_high=region.eps_high).mean()

        def variance_of(r: torch.Tensor) -> torch.Tensor:
            return (r - 1.0) * td_errors.square() + 2.0 * self.omega2 * r * td_errors

        mean_variance = self.omega1 * torch.minimum(variance_of(ratio), variance_of(clipped)).mean()

        scale = self.omega1 * (1.0 - self.gamma**2) / self.k
        second_moment = scale * (advantages.square() + 2.0 * advantages.abs() * values).mean()
        bias = 4.0 * self.gamma * approximate_kl(log_ratio.detach()) * advantages.max() / (1.0 - self.gamma) ** 2
        squared_mean = torch.where(
            mean.detach() + values.mean() - bias < 0.0, torch.zeros_like(mean), mean.square() + 2.0 * values.mean() * mean
        )
        variance_mean = second_moment - squared_mean
        return -(mean - self.k * (mean_variance + variance_mean))

    def _is_last_epoch(self, statistics: UpdateStatistics) -> bool:
        return self.max_epoch_kl is not None and statistics.epoch_kl() > self.max_epoch_kl
