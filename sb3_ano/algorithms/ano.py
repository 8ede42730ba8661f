"""Anchored Neighborhood Optimization."""

from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import GymEnv, Schedule

from sb3_ano._system import warn_user
from sb3_ano.algorithms.base import ShapedPolicyAlgorithm
from sb3_ano.algorithms.loading import SavedModel
from sb3_ano.shaping import Shape, ShapingLike, as_pair, fingerprint, is_importable, name_of, require_trainable


class ANO(ShapedPolicyAlgorithm):
    """Anchored Neighborhood Optimization: PPO with a smooth, redescending surrogate instead of the clip.

    Paper: "ANO: A Principled Approach to Robust Policy Optimization", Section 4 and Algorithm 1. The objective is
    ``A + |A| eps h(x)`` with ``x = sign(A) (r - 1) / eps``; ``sb3_ano.shaping.ano`` is ``h``, and ``sb3_ano/reference.py``
    has the algorithm on one page.

    The arguments are those of :class:`~sb3_ano.algorithms.base.ShapedPolicyAlgorithm`, and the following.

    :param shaping: the shaping function: a published objective by name, such as ``"ano"``, ``"ppo"`` or ``"cispo"``, see
        ``sb3_ano.shaping.OBJECTIVES``; ``"module:function"``, a callable ``h(x)``, a :class:`~sb3_ano.shaping.Shape`,
        or a pair of those for independent ``f`` and ``g``; see :mod:`sb3_ano.shaping`
    :raises ValueError: if the shape is unknown, violates ``h(0) = 0``, has no positive slope at 0, or returns NaN or Inf where
        ratios can lie; one that violates ``h(x) <= x`` is warned about
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
        desired_kl: float | str | Schedule | None = None,
        torch_compile: bool | Literal["auto"] = "auto",
        precision: Literal["float32", "bfloat16"] = "float32",
        check_finite: bool = True,
    ) -> None:
        # Resolved by _setup_model, because SB3's load sets this attribute in between.
        self._shaping = shaping

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
            desired_kl=desired_kl,
            torch_compile=torch_compile,
            precision=precision,
            check_finite=check_finite,
        )

    @property
    def shaping(self) -> ShapingLike:
        """Shape as given; a new one takes effect at the next update.

        A saved model contains ``shaping_name``, because a function may be lost with its module.
        """
        return self._shaping

    @shaping.setter
    def shaping(self, shaping: ShapingLike) -> None:
        shape = as_pair(shaping)
        for lost in require_trainable(shape):
            warn_user(lost)
        self._shaping = shaping
        self._shape = shape
        #: ``"ano"``, ``"module:function"``, or two of those for a pair
        self.shaping_name = name_of(shaping)
        #: Values of the shape, by which it is recognized when the model is loaded
        self.shaping_fingerprint = fingerprint(shape)
        # Compiled code holds the former shape.
        self.engine.forget()
        if not is_importable(shaping):
            warn_user(
                f"shaping={self.shaping_name!r} cannot be imported by its name: the model is saved as usual, but loads "
                "only with shaping= given. A function at the top level of a module, or 'module:name', has no such limit"
            )

    def _setup_model(self) -> None:
        self.shaping = self._shaping
        super()._setup_model()
        reads_probability = any(isinstance(part, Shape) and part.reads_old_log_prob for part in self._shape)
        if reads_probability and isinstance(self.action_space, spaces.Box):
            warn_user(
                f"the radius of shaping={self.shaping_name!r} depends on the probabilities of actions; those of "
                f"{self.action_space} have densities instead, which it was not made for"
            )

    def __repr__(self) -> str:
        return super().__repr__().replace("(", f"(shaping={name_of(self.shaping)!r}, ", 1)

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_shaping", "_shape"]

    @classmethod
    def _restored_arguments(cls, saved: SavedModel, replacements: dict[str, Any]) -> dict[str, Any]:
        missing = {"shaping_name", "shaping_fingerprint"} - set(saved.attributes)
        if missing:
            raise ValueError(f"{saved.path} lacks {min(missing)}; save the model again without exclude={sorted(missing)}")
        name = saved.attributes["shaping_name"]
        shaping = replacements.get("shaping", name)
        try:
            values = fingerprint(shaping)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{saved.path} was trained with shaping={name!r}, which cannot be used: {error}") from error
        if not np.allclose(values, saved.attributes["shaping_fingerprint"], rtol=1e-6, atol=1e-9):
            if "shaping" not in replacements:
                raise ValueError(
                    f"{saved.path} was trained with shaping={name!r}, but the function of that name is another one now; "
                    "pass the one to continue with as shaping="
                )
            warn_user(f"{saved.path} was trained with shaping={name!r}; the given shaping= is another function")
        return {"_shaping": shaping}
