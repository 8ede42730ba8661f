"""Train on a rollout: epochs of minibatches, the numbers of an update, and its log."""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import TypeAlias, cast

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.utils import FloatSchedule, explained_variance

from sb3_ano._compat import tracing
from sb3_ano.algorithms import schedules, validation
from sb3_ano.algorithms.buffers import FlatRolloutBuffer, RolloutSamples
from sb3_ano.algorithms.diagnostics import UpdateStatistics
from sb3_ano.algorithms.rollout import RolloutMixin
from sb3_ano.algorithms.update import ClipRange, Updater, UpdateSettings, approximate_kl
from sb3_ano.shaping import MIN_RADIUS

#: The rollout and the indices of a minibatch; or a minibatch and None.
_Minibatch: TypeAlias = tuple[RolloutSamples, torch.Tensor | None]

#: Seconds that a compilation takes: 10 to 20 on two cores with an empty cache.
COMPILE_SECONDS = 16.0
#: Seconds that a compiled minibatch saves: a constant, and a part for each sample and parameter. Both are low guesses, from
#: networks of 64-64 and 256-256; convolutions save several times more.
SAVED_SECONDS, SAVED_SECONDS_PER_PRODUCT = 4e-4, 2e-11

#: Radii that ``desired_kl`` may reach.
RADIUS_BOUNDS = (0.05, 4.0)
# Factors of the radius from one update to the next.
_SLOWEST, _FASTEST = 0.8, 1.25


class TrainingMixin(RolloutMixin):
    """SB3's on-policy algorithm with ``train``, whose surrogate is a hook."""

    batch_size: int
    n_epochs: int
    normalize_advantage: bool
    target_kl: float | None
    precision: str
    torch_compile: bool | str
    clip_range: FloatSchedule
    clip_range_high: FloatSchedule | None
    clip_range_vf: FloatSchedule | None
    desired_kl: FloatSchedule | None
    radius_factor: float
    n_skipped_minibatches: int
    _updater: Updater | None

    def policy_loss(
        self, log_ratio: torch.Tensor, advantages: torch.Tensor, clip_range: ClipRange, samples: RolloutSamples
    ) -> torch.Tensor:
        """Compute the surrogate of a minibatch, a scalar to be minimized.

        :param log_ratio: log-probability of the actions minus that in the rollout, ``(batch,)``
        :param advantages: advantages, normalized if ``normalize_advantage``, ``(batch,)``
        :param clip_range: radii of this update
        :param samples: minibatch of the rollout buffer
        """
        raise NotImplementedError

    def _has_stock_loss(self) -> bool:
        """Tell whether ``policy_loss`` is this package's own code."""
        return type(self).policy_loss.__module__.startswith("sb3_ano.algorithms.") and "policy_loss" not in vars(self)

    def _is_last_epoch(self, statistics: UpdateStatistics) -> bool:
        """Tell whether the epoch that has just ended is the last one of this update."""
        return False

    def _check_arguments(self) -> None:
        """Check the arguments, which are attributes that a user or SB3's ``load`` may have changed.

        :raises ValueError: if one is out of range
        :raises TypeError: if one is of the wrong type
        """
        validation.require_arguments(self)
        for name, radius in self._radii().items():
            setattr(self, name, schedules.as_schedule(radius, name))

    def _radii(self) -> dict[str, FloatSchedule]:
        """Return the schedules of the radii that are set, by argument."""
        optional = {name: getattr(self, name) for name in ("clip_range_high", "clip_range_vf", "desired_kl")}
        return {"clip_range": self.clip_range, **{name: radius for name, radius in optional.items() if radius is not None}}

    def train(self) -> None:
        """Update the policy on the current rollout (Algorithm 1 of the paper, lines 10 to 22)."""
        self._check_arguments()
        self.policy.set_training_mode(True)
        schedules.read(self.lr_schedule, self._current_progress_remaining, "learning_rate")  # before it reaches the optimizer
        self._update_learning_rate(self.policy.optimizer)
        updater = self._get_updater()
        statistics = UpdateStatistics(updater.clip_range)
        minibatches = self._minibatches()
        with tracing() if updater.compiled else contextlib.nullcontext():
            for epoch in range(self.n_epochs):
                statistics.start_epoch()
                updater.start_epoch()
                stopped = self._train_epoch(epoch, minibatches(), updater, statistics)
                self._n_updates += 1
                if stopped or self._is_last_epoch(statistics):
                    break
        self._report_skipped(statistics)
        summary = statistics.summary()
        self._log_update(updater, summary)
        self._adapt_radius(updater.clip_range.low.item(), summary["kl_mean"])

    def _train_epoch(
        self, epoch: int, minibatches: Iterator[_Minibatch], updater: Updater, statistics: UpdateStatistics
    ) -> bool:
        """Make one pass over the rollout; return True if ``target_kl`` ended it."""
        for rollout, indices in minibatches:
            result = updater(rollout, indices)
            statistics.add(result)
            if self.target_kl is not None and bool(result.stop):
                if self.verbose >= 1:
                    kl = approximate_kl(result.log_ratio).item()
                    print(f"Early stopping in epoch {epoch}: the KL of a minibatch reached {kl:.2f}")
                return True
        return False

    def _minibatches(self) -> Callable[[], Iterator[_Minibatch]]:
        """Return a function that iterates once over the rollout, in random order.

        It yields the rollout and the indices of each minibatch. For a buffer that takes samples in its own way, it yields the
        buffer's minibatches and None.
        """
        buffer = self.rollout_buffer
        custom = not isinstance(buffer, FlatRolloutBuffer) or any(
            name in vars(buffer) or getattr(type(buffer), name) is not getattr(FlatRolloutBuffer, name)
            for name in ("get", "_get_samples")
        )
        if custom:
            return lambda: ((samples, None) for samples in buffer.get(self.batch_size))  # type: ignore[misc]
        if not buffer.full:
            raise ValueError(
                f"the rollout buffer holds {buffer.pos} of {buffer.buffer_size} steps; collect a whole rollout first"
            )
        rollout = cast(FlatRolloutBuffer, buffer).tensors()

        def epoch() -> Iterator[_Minibatch]:
            order = torch.from_numpy(np.random.permutation(buffer.buffer_size * buffer.n_envs)).to(self.device)
            yield from ((rollout, indices) for indices in order.split(self.batch_size))

        return epoch

    def _get_updater(self) -> Updater:
        """Return the updater of the last update if it is still compatible, or a new one, with the current numbers."""
        settings = UpdateSettings(
            policy_loss=self.policy_loss,
            clip_value=self.clip_range_vf is not None,
            normalize_advantage=self.normalize_advantage,
            discrete=isinstance(self.action_space, spaces.Discrete),
            precision=self.precision,
            stock_loss=self._has_stock_loss(),
            compiled=self._compiles(),
        )
        if self._updater is None or not self._updater.is_compatible(self.policy, settings):
            self._updater = Updater(self.policy, settings)
            if self._updater.compiled and self.verbose >= 1:
                print("Compiling the update, which takes about 15 s the first time")
        progress = self._current_progress_remaining
        radii = {name: schedules.read(radius, progress, name) for name, radius in self._radii().items()}
        low = max(radii["clip_range"], MIN_RADIUS)
        high = max(radii.get("clip_range_high", low), MIN_RADIUS)
        coefficients = {
            "clip_range_vf": max(radii.get("clip_range_vf", 0.0), 0.0),
            "ent_coef": self.ent_coef,
            "vf_coef": self.vf_coef,
            "max_grad_norm": self.max_grad_norm,
            "max_kl": math.inf if self.target_kl is None else 1.5 * self.target_kl,
        }
        self._updater.start_update((low * self.radius_factor, high * self.radius_factor), coefficients)
        return self._updater

    def _adapt_radius(self, radius: float, kl: float) -> None:
        """Adapt the radii of the next update to ``desired_kl``; the paper's conclusion leaves such radii to future work.

        :param radius: radius below 1 of the update that has just ended
        :param kl: mean KL divergence of that update from the rollout's policy
        """
        if self.desired_kl is None:
            return
        target = schedules.read(self.desired_kl, self._current_progress_remaining, "desired_kl")
        growth = (max(target, 0.0) / kl) ** 0.25 if kl > 0.0 else math.inf
        adapted = radius * min(max(growth, _SLOWEST), _FASTEST)
        self.radius_factor *= min(max(adapted, RADIUS_BOUNDS[0]), RADIUS_BOUNDS[1]) / radius

    def _compiles(self) -> bool:
        """Decide whether to compile the update; ``"auto"`` does it if the run is long enough to pay for it."""
        if self.torch_compile != "auto":
            return bool(self.torch_compile)
        minibatches = (self._total_timesteps - self._num_timesteps_at_start) * self.n_epochs / self.batch_size
        products = self.batch_size * sum(parameter.numel() for parameter in self.policy.parameters())
        return minibatches * (SAVED_SECONDS + SAVED_SECONDS_PER_PRODUCT * products) >= COMPILE_SECONDS

    def _report_skipped(self, statistics: UpdateStatistics) -> None:
        """Count the skipped minibatches of this update, warn of the first one ever, and raise if none was left."""
        skipped = statistics.skipped()
        if not skipped:
            return
        term = statistics.non_finite_term(skipped[-1])
        if len(skipped) == len(statistics):
            raise FloatingPointError(
                f"all {len(skipped)} minibatches of the update after {self.num_timesteps} steps were skipped, because of NaN "
                f"or Inf in {term}. Look at the scale of rewards and observations, or lower learning_rate"
            )
        if self.n_skipped_minibatches == 0:
            warnings.warn(
                f"a minibatch was skipped after {self.num_timesteps} steps, because of NaN or Inf in {term}. Parameters and "
                "optimizer are as before it; train/skipped_minibatches counts further ones",
                stacklevel=3,
            )
        self.n_skipped_minibatches += len(skipped)

    def _log_update(self, updater: Updater, summary: dict[str, float]) -> None:
        buffer, radii = self.rollout_buffer, updater.clip_range
        values = {**summary, "explained_variance": explained_variance(buffer.values.flatten(), buffer.returns.flatten())}
        if hasattr(self.policy, "log_std"):
            values["std"] = self.policy.log_std.exp().mean().item()
        values |= {"skipped_minibatches": self.n_skipped_minibatches, "clip_range": radii.low.item()}
        if self.clip_range_high is not None:
            values["clip_range_high"] = radii.high.item()
        if self.clip_range_vf is not None:
            values["clip_range_vf"] = updater.coefficients.clip_range_vf.item()
        for name, value in values.items():
            self.logger.record(f"train/{name}", value)
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
