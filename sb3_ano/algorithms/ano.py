"""Anchored Neighborhood Optimization."""

import warnings
from typing import Any, Literal

import numpy as np
import torch
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import GymEnv, Schedule

from sb3_ano.algorithms.base import ShapedPolicyAlgorithm
from sb3_ano.algorithms.buffers import RolloutSamples
from sb3_ano.algorithms.saving import SavedModel
from sb3_ano.algorithms.update import TrustRegion
from sb3_ano.shaping import (
    Shaping,
    ShapingLike,
    ano,
    as_pair,
    fingerprint,
    identity,
    is_importable,
    measure,
    name_of,
    ppo,
    spo,
    surrogate,
)


class ANO(ShapedPolicyAlgorithm):
    """Anchored Neighborhood Optimization: PPO with a smooth, redescending surrogate in place of the clip.

    Paper: "ANO: A Principled Approach to Robust Policy Optimization", Section 4 and Algorithm 1.
    The arguments are those of :class:`~sb3_ano.algorithms.base.ShapedPolicyAlgorithm`, that is, of SB3's PPO, and

    :param shaping: the shaping function: ``"ano"``, ``"spo"``, ``"ppo"``, ``"identity"``, ``"module:function"``, a
        callable ``h(x)``, or a pair of those for independent ``f`` and ``g``; see :mod:`sb3_ano.shaping`
    :raises ValueError: if the shape is unknown, violates ``h(0) = 0``, has no positive slope at 0, or returns NaN or Inf; one
        that violates ``h(x) <= x`` is warned about
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
        torch_compile: bool | Literal["auto"] = "auto",
        precision: Literal["float32", "bfloat16"] = "float32",
        desired_kl: float | str | Schedule | None = None,
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
            desired_kl=desired_kl,
            check_finite=check_finite,
        )
        # Resolved by _setup_model, where SB3's load has put its arguments in the same place.
        vars(self)["shaping"] = shaping
        if _init_setup_model:
            self._setup_model()

    @property
    def shaping(self) -> ShapingLike:
        """The shape as given; a new one takes effect at the next update.

        A saved model carries ``shaping_name``, because a function may be lost with its module.
        """
        return vars(self)["shaping"]

    @shaping.setter
    def shaping(self, shaping: ShapingLike) -> None:
        shape = as_pair(shaping)
        for part in dict.fromkeys(shape):
            _check_shape(part)
        vars(self)["shaping"] = shaping
        self._shape = shape
        #: ``"ano"``, ``"module:function"``, or two of those for a pair
        self.shaping_name = name_of(shaping)
        #: Values of the shape, by which it is recognized when the model is loaded
        self.shaping_fingerprint = fingerprint(shape)
        self._step = None  # compiled code may hold the shape before this one
        if not is_importable(shaping):
            warnings.warn(
                f"shaping={self.shaping_name!r} cannot be imported by its name: the model is saved as usual, but loads "
                "only with shaping= given. A function at the top level of a module, or 'module:name', has no such limit",
                stacklevel=3,
            )

    def _setup_model(self) -> None:
        self.shaping = vars(self)["shaping"]
        super()._setup_model()

    def __repr__(self) -> str:
        return super().__repr__().replace("(", f"(shaping={name_of(self.shaping)!r}, ", 1)

    def policy_loss(
        self, log_ratio: torch.Tensor, advantages: torch.Tensor, region: TrustRegion, samples: RolloutSamples
    ) -> torch.Tensor:
        """Minus the mean surrogate of Definition 3.2."""
        objective = surrogate(log_ratio, advantages, self._shape, eps_low=region.eps_low, eps_high=region.eps_high)
        return -objective.mean()

    def _has_stock_loss(self) -> bool:
        stock = (ano, spo, ppo, identity)
        return super()._has_stock_loss() and all(any(shape is known for known in stock) for shape in self._shape)

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "shaping", "_shape"]

    @classmethod
    def _restored_arguments(cls, saved: SavedModel, replacements: dict[str, Any]) -> dict[str, Any]:
        missing = {"shaping_name", "shaping_fingerprint"} - set(saved.attributes)
        if missing:
            raise ValueError(f"{saved.path} lacks {min(missing)}; save the model again without exclude={sorted(missing)}")
        name = saved.attributes["shaping_name"]
        shaping = replacements.get("shaping", name)
        try:
            found = fingerprint(shaping)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{saved.path} was trained with shaping={name!r}, which cannot be used: {error}") from error
        if not np.allclose(found, saved.attributes["shaping_fingerprint"], rtol=1e-6, atol=1e-9):
            if "shaping" not in replacements:
                raise ValueError(
                    f"{saved.path} was trained with shaping={name!r}, but the function of that name is another one now; "
                    "pass the one to go on with as shaping="
                )
            warnings.warn(f"{saved.path} was trained with shaping={name!r}; shaping= goes on with another one", stacklevel=3)
        return {"shaping": shaping}


def _check_shape(shape: Shaping) -> None:
    properties = measure(shape)
    if properties.complaint is not None:
        raise ValueError(properties.complaint)
    if properties.enclosure_complaint is not None:
        warnings.warn(f"{properties.enclosure_complaint}; the objective is no lower bound there", stacklevel=4)
