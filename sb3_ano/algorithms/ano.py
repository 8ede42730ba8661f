"""Anchored Neighborhood Optimization."""

import math
import warnings
from typing import Any

import torch
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import GymEnv, Schedule

from sb3_ano.algorithms.base import ShapedPolicyAlgorithm
from sb3_ano.algorithms.saving import SavedModel
from sb3_ano.algorithms.update import RolloutSamples, TrustRegion
from sb3_ano.shaping import (
    Shaping,
    ShapingLike,
    ShapingPair,
    as_pair,
    is_importable,
    measure,
    name_of,
    surrogate,
)

# Deviations at which a shape is sampled when it is saved, to recognise it when it is loaded.
_FINGERPRINT_AT = (-20.0, -3.0, -1.0, -0.5, 0.5, 1.0, 1.5, 3.0, 20.0)


class ANO(ShapedPolicyAlgorithm):
    """Anchored Neighborhood Optimization: PPO with a smooth, redescending surrogate in place of the clip.

    Paper: "ANO: A Principled Approach to Robust Policy Optimization", Section 4 and Algorithm 1.
    The arguments are those of :class:`~sb3_ano.algorithms.base.ShapedPolicyAlgorithm`, that is, of SB3's PPO, and

    :param shaping: the shaping function: ``"ano"``, ``"spo"``, ``"ppo"``, ``"identity"``, ``"module:function"``, a
        callable ``h(x)``, or a pair of those for independent ``f`` and ``g``; see :mod:`sb3_ano.shaping`
    :raises ValueError: if the shape is unknown or violates ``h(0) = 0``; one that violates ``h(x) <= x`` is warned about
    """

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
        shaping: ShapingLike = "ano",
        clip_range_high: float | str | Schedule | None = None,
        torch_compile: bool = False,
    ):
        super().__init__(
            policy,
            env,
            learning_rate,
            n_steps,
            batch_size,
            n_epochs,
            gamma,
            gae_lambda,
            clip_range,
            clip_range_vf,
            normalize_advantage,
            ent_coef,
            vf_coef,
            max_grad_norm,
            use_sde,
            sde_sample_freq,
            rollout_buffer_class,
            rollout_buffer_kwargs,
            target_kl,
            stats_window_size,
            tensorboard_log,
            policy_kwargs,
            verbose,
            seed,
            device,
            _init_setup_model=False,
            clip_range_high=clip_range_high,
            torch_compile=torch_compile,
        )
        #: Name of the shape, or two names for a pair; the functions themselves are not part of a saved model.
        self.shaping: ShapingLike = shaping
        if _init_setup_model:
            self._setup_model()

    def _setup_model(self) -> None:
        self._shape = as_pair(self.shaping)
        for shape in dict.fromkeys(self._shape):
            _check_shape(shape)
        if not is_importable(self.shaping):
            warnings.warn(
                f"shaping={name_of(self.shaping)!r} cannot be imported by its name: the model is saved as usual, but loads "
                "only with shaping= given. A function at the top level of a module, or 'module:name', has no such limit",
                stacklevel=2,
            )
        self.shaping = name_of(self.shaping)
        self.shaping_fingerprint = _fingerprint(self._shape)
        super()._setup_model()

    def policy_loss(
        self, log_ratio: torch.Tensor, advantages: torch.Tensor, region: TrustRegion, samples: RolloutSamples
    ) -> torch.Tensor:
        """Minus the mean surrogate of Definition 3.2."""
        objective = surrogate(log_ratio, advantages, self._shape, eps_low=region.eps_low, eps_high=region.eps_high)
        return -objective.mean()

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_shape"]

    @classmethod
    def _verify_saved(cls, saved: SavedModel, replacements: dict[str, Any]) -> None:
        super()._verify_saved(saved, replacements)
        trained_with = saved.attributes.get("shaping", "ano")
        try:
            shape = as_pair(replacements.get("shaping", trained_with))
            recognised = _same(_fingerprint(shape), saved.attributes.get("shaping_fingerprint"))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{saved.path} was trained with shaping={trained_with!r}, which cannot be used: {error}"
            ) from error
        if recognised:
            return
        if "shaping" not in replacements:
            raise ValueError(
                f"{saved.path} was trained with shaping={trained_with!r}, but the function of that name is another one now; "
                "pass the one to go on with as shaping="
            )
        warnings.warn(
            f"{saved.path} was trained with shaping={trained_with!r}; shaping= goes on with another one", stacklevel=3
        )


def _check_shape(shape: Shaping) -> None:
    properties = measure(shape)
    if properties.anchoring_complaint is not None:
        raise ValueError(properties.anchoring_complaint)
    if properties.enclosure_complaint is not None:
        warnings.warn(f"{properties.enclosure_complaint}; the objective is no lower bound there", stacklevel=4)


def _fingerprint(pair: ShapingPair) -> list[list[float]]:
    x = torch.tensor(_FINGERPRINT_AT, dtype=torch.float64)
    return [shape(x).tolist() for shape in pair]


def _same(found: list[list[float]], expected: list[list[float]] | None) -> bool:
    if expected is None:
        return False
    return all(
        math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)
        for one, other in zip(found, expected, strict=True)
        for a, b in zip(one, other, strict=True)
    )
