"""PPO of SB3, and MaskablePPO and RecurrentPPO of sb3-contrib, with the engine.

An accelerated model is the same object with another class, which has its own ``collect_rollouts`` and ``train``, and inherits
everything else. Methods assigned to the instance would end up in its files, and a new object would leave callbacks and
variables with the old one.
"""

import functools
import math
from typing import Any, Literal, TypeVar

import torch
from sb3_contrib import ppo_mask, ppo_recurrent
from stable_baselines3 import ppo
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import explained_variance
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from sb3_ano.envs import DirectVecEnv
from sb3_ano.fast.collect import FastCollection
from sb3_ano.fast.engine import Accelerated
from sb3_ano.fast.rules import Options, solid_class
from sb3_ano.fast.step import ClipRange, Numbers
from sb3_ano.shaping import MIN_RADIUS, surrogate
from sb3_ano.shaping import ppo as clip

Algorithm = TypeVar("Algorithm", bound=BaseAlgorithm)


def clipped_loss(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    clip_range: ClipRange,
    samples: Any,
) -> torch.Tensor:
    """Compute minus the mean of PPO's clipped surrogate, a scalar to be minimized.

    :param log_ratio: log-probability of the actions minus that in the rollout, ``(batch,)``
    :param advantages: advantages, ``(batch,)``
    :param clip_range: radii
    :param samples: minibatch
    """
    return -surrogate(
        log_ratio,
        advantages,
        clip,
        eps_low=clip_range.low,
        eps_high=clip_range.high,
    ).mean()


class AcceleratedPPO(FastCollection):
    """Train PPO with the engine. The numbers are those of the original to rounding; names in the log are the same."""

    n_epochs: int
    # Schedules, which PPO makes of numbers when it builds its networks. To type checkers they may be numbers still.
    clip_range: Any
    clip_range_vf: Any
    target_kl: float | None
    # Not in __init__: the constructors are those of the originals.
    _options = Options()

    def engine_options(self) -> Options:
        return self._options

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_options"]

    def train(self) -> None:
        """Update the policy on the current rollout."""
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)

        # As in SB3, schedules are read once per update.
        progress = self._current_progress_remaining
        clip_range = self.clip_range(progress)
        clip_range_vf = 0.0  # not read without a clip of the values
        if self.clip_range_vf is not None:
            clip_range_vf = self.clip_range_vf(progress)
        max_kl = math.inf
        if self.target_kl is not None:
            max_kl = 1.5 * self.target_kl
        numbers = Numbers(
            # The surrogate is written in units of the radius, which may not be 0.
            clip_range=max(clip_range, MIN_RADIUS),
            clip_range_high=max(clip_range, MIN_RADIUS),
            clip_range_vf=clip_range_vf,
            ent_coef=self.ent_coef,
            vf_coef=self.vf_coef,
            max_grad_norm=self.max_grad_norm,
            max_kl=max_kl,
        )

        # SB3 does not skip minibatches that are NaN or Inf.
        update = self.engine.prepare_update(self, clipped_loss, numbers, skips_non_finite=False)
        is_stopped = False
        with update:
            for epoch in range(self.n_epochs):
                for samples, indices in update.minibatches():
                    result = update.step(samples, indices)
                    # Not read without a limit, because reading waits for the device.
                    if self.target_kl is not None and bool(result.stop):
                        is_stopped = True
                        break

                self._n_updates += 1
                if is_stopped:
                    if self.verbose >= 1:
                        kl = update.statistics.table()["kl"][-1]
                        print(f"Early stopping at step {epoch} due to reaching max kl: {kl:.2f}")
                    break

        # SB3's log: its names, its means.
        summary = update.statistics.summary(with_skipped=True)
        for name in ("entropy_loss", "policy_gradient_loss", "value_loss", "approx_kl", "clip_fraction", "loss"):
            self.logger.record(f"train/{name}", summary[name])
        buffer = self.rollout_buffer
        variance = explained_variance(buffer.values.flatten(), buffer.returns.flatten())
        self.logger.record("train/explained_variance", variance)
        if hasattr(self.policy, "log_std"):
            self.logger.record("train/std", torch.exp(self.policy.log_std).mean().item())
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("train/clip_range", clip_range)
        if self.clip_range_vf is not None:
            self.logger.record("train/clip_range_vf", clip_range_vf)


class PPO(AcceleratedPPO, ppo.PPO):
    """SB3's PPO, accelerated; the arguments are the same. :func:`~sb3_ano.accelerate` changes the settings of the engine."""


class MaskablePPO(AcceleratedPPO, ppo_mask.MaskablePPO):
    """sb3-contrib's MaskablePPO, accelerated; the arguments are the same."""

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: BaseCallback,
        rollout_buffer: RolloutBuffer,
        n_rollout_steps: int,
        use_masking: bool = True,
    ) -> bool:
        return super().collect_rollouts(
            env,
            callback,
            rollout_buffer,
            n_rollout_steps,
            use_masking,
        )


class RecurrentPPO(AcceleratedPPO, ppo_recurrent.RecurrentPPO):
    """sb3-contrib's RecurrentPPO, accelerated; the arguments are the same."""


#: Algorithms that can be accelerated, and their accelerated classes.
ACCELERATED: dict[type[OnPolicyAlgorithm], type[AcceleratedPPO]] = {
    ppo.PPO: PPO,
    ppo_mask.MaskablePPO: MaskablePPO,
    ppo_recurrent.RecurrentPPO: RecurrentPPO,
}


def accelerate(
    model: Algorithm,
    *,
    torch_compile: bool | Literal["auto"] = "auto",
    precision: Literal["float32", "bfloat16"] = "float32",
) -> Algorithm:
    """Let a model train with the same numbers, to rounding, in less time.

    The model itself is changed and returned. It stays an instance of its class, and saves the files of its class, which load
    without this package.

    :param model: SB3's PPO, sb3-contrib's MaskablePPO or RecurrentPPO, or a subclass; new, or loaded. The algorithms of this
        package are accelerated anyway, and get the settings
    :param torch_compile: whether to compile the update; ``"auto"`` does it if the run is long enough to pay for that
    :param precision: ``"float32"``, or ``"bfloat16"`` for the layers of features extractor and networks
    :return: the same model
    :raises TypeError: if the model is of another class, or overrides ``train`` or ``collect_rollouts``
    :raises ValueError: if a setting is unknown
    """
    if torch_compile not in (True, False, "auto"):
        raise ValueError(f"torch_compile={torch_compile!r} is not allowed; allowed are 'auto', True and False")
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"precision={precision!r} is not allowed; allowed are 'float32' and 'bfloat16'")

    # Type checkers do not follow an object that changes its class.
    found: Any = model
    if isinstance(model, Accelerated) and not isinstance(model, AcceleratedPPO):
        found.torch_compile = torch_compile
        found.precision = precision
        return model

    if not isinstance(found, AcceleratedPPO):
        # The object stays the same, so that callbacks and variables that hold it are accelerated, too.
        found.__class__ = accelerated_class(type(model))
        _accelerate_env(found.env)
    found._options = Options(torch_compile, precision)
    found.engine.forget()
    return model


@functools.cache
def accelerated_class(kind: type[BaseAlgorithm]) -> type[AcceleratedPPO]:
    """Return the accelerated class of an algorithm.

    :raises TypeError: if there is none
    """
    original = solid_class(kind)
    if original in ACCELERATED and kind is original:
        return ACCELERATED[original]

    # No algorithm is a subclass of another one, so that the order does not matter.
    for base, accelerated in ACCELERATED.items():
        if not (isinstance(kind, type) and issubclass(kind, base)):
            continue
        for method in ("train", "collect_rollouts"):
            if getattr(kind, method) is not getattr(base, method):
                raise TypeError(
                    f"{kind.__name__} overrides {method}, which the engine stands in for; it cannot be accelerated"
                )
        return type(kind.__name__, (AcceleratedPPO, kind), _methods_of(accelerated))

    allowed = ", ".join(base.__name__ for base in ACCELERATED)
    raise TypeError(f"{kind.__name__} cannot be accelerated; allowed are {allowed}, their subclasses, and ANO, SPO and PAPO")


def _methods_of(accelerated: type[AcceleratedPPO]) -> dict[str, Any]:
    # The class derives from AcceleratedPPO and the user's class; what MaskablePPO overrides in addition is copied.
    methods: dict[str, Any] = {"__module__": accelerated.__module__}
    if "collect_rollouts" in vars(accelerated):
        methods["collect_rollouts"] = accelerated.collect_rollouts
    return methods


def _accelerate_env(env: VecEnv | None) -> None:
    """Let SB3's DummyVecEnv step without deep copies of what its environments return."""
    while env is not None and hasattr(env, "venv"):
        env = env.venv
    # The same object, because the user may hold it. The faster class has the same attributes.
    if type(env) is DummyVecEnv:
        env.__class__ = DirectVecEnv
