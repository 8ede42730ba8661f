"""What ANO, SPO and PAPO share: SB3's on-policy loop with the policy loss as a hook."""

import inspect
import io
import pathlib
import warnings
from typing import Any, ClassVar, Self

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticCnnPolicy, ActorCriticPolicy, BasePolicy, MultiInputActorCriticPolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule
from stable_baselines3.common.utils import FloatSchedule, explained_variance
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano.algorithms import schedules
from sb3_ano.algorithms.rollout import guarded
from sb3_ano.algorithms.saving import SavedModel, read_saved_model
from sb3_ano.algorithms.statistics import UpdateStatistics
from sb3_ano.algorithms.update import (
    LossSettings,
    LossTerms,
    RolloutSamples,
    TrustRegion,
    approximate_kl,
    gradient_step,
    minibatch_loss,
)
from sb3_ano.envs import make_env
from sb3_ano.shaping import MIN_RADIUS


class ShapedPolicyAlgorithm(OnPolicyAlgorithm):
    """On-policy training with a pluggable surrogate; a subclass supplies :meth:`policy_loss`.

    The arguments up to ``_init_setup_model`` are those of SB3's PPO, in its order and meaning.

    :param policy: the policy class, or ``"MlpPolicy"``, ``"CnnPolicy"``, ``"MultiInputPolicy"``
    :param env: the environment, or its registered id
    :param learning_rate: learning rate, or a schedule of the remaining progress
    :param n_steps: steps of each environment in a rollout
    :param batch_size: samples in a minibatch
    :param n_epochs: passes over a rollout
    :param gamma: discount factor
    :param gae_lambda: bias-variance trade-off of the generalised advantage estimator
    :param clip_range: radius of the trust region, eps in the paper: a number, or a schedule, read at each update
    :param clip_range_vf: radius of the clip of the value function, or None for no clip; depends on the reward scale
    :param normalize_advantage: whether to normalise the advantages of each minibatch
    :param ent_coef: weight of the entropy bonus
    :param vf_coef: weight of the value loss
    :param max_grad_norm: the gradient is scaled down to this norm
    :param use_sde: whether to explore with gSDE instead of action noise
    :param sde_sample_freq: steps between new gSDE noise matrices, -1 for one a rollout
    :param rollout_buffer_class: rollout buffer to use; None picks SB3's for the observation space
    :param rollout_buffer_kwargs: arguments of the rollout buffer
    :param target_kl: stop the update where a minibatch's KL exceeds 1.5 times this, or None
    :param stats_window_size: episodes over which rollout statistics are averaged
    :param tensorboard_log: folder of the TensorBoard log, or None
    :param policy_kwargs: arguments of the policy
    :param verbose: 0 silent, 1 information, 2 debugging
    :param seed: seed of the random generators
    :param device: ``"auto"``, ``"cpu"``, ``"cuda"``, ...
    :param _init_setup_model: whether to build the network when the instance is created
    :param clip_range_high: radius above 1, acting on positive advantages, while ``clip_range`` acts below 1; None takes
        ``clip_range`` for both. Takes ``"lin_0.28"`` too, because the RL Zoo parses schedules for ``clip_range`` only
    :param torch_compile: whether to compile the minibatch loss with ``torch.compile``
    :raises ValueError: if an argument is out of range, the environment id is unknown, or a space is not supported
    :raises TypeError: if an argument is of the wrong type
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": ActorCriticPolicy,
        "CnnPolicy": ActorCriticCnnPolicy,
        "MultiInputPolicy": MultiInputActorCriticPolicy,
    }
    supported_action_spaces: ClassVar[tuple[type[spaces.Space], ...]] = (
        spaces.Box,
        spaces.Discrete,
        spaces.MultiDiscrete,
        spaces.MultiBinary,
    )

    clip_range: FloatSchedule
    clip_range_high: FloatSchedule | None
    clip_range_vf: FloatSchedule | None

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
        clip_range_high: float | str | Schedule | None = None,
        torch_compile: bool = False,
    ):
        super().__init__(
            policy,
            self._checked_env(env, verbose),  # type: ignore[arg-type]  # SB3 takes None, too
            learning_rate=learning_rate,
            n_steps=n_steps,
            gamma=gamma,
            gae_lambda=gae_lambda,
            ent_coef=ent_coef,
            vf_coef=vf_coef,
            max_grad_norm=max_grad_norm,
            use_sde=use_sde,
            sde_sample_freq=sde_sample_freq,
            rollout_buffer_class=rollout_buffer_class,
            rollout_buffer_kwargs=rollout_buffer_kwargs,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            verbose=verbose,
            seed=seed,
            device=device,
            _init_setup_model=False,
        )
        self.algorithm = type(self).__name__
        self.batch_size = batch_size
        self.n_epochs = n_epochs
        self.clip_range = schedules.as_radius(clip_range, "clip_range")
        self.clip_range_high = None if clip_range_high is None else schedules.as_radius(clip_range_high, "clip_range_high")
        self.clip_range_vf = None if clip_range_vf is None else schedules.as_radius(clip_range_vf, "clip_range_vf")
        self.normalize_advantage = normalize_advantage
        self.target_kl = target_kl
        self.torch_compile = torch_compile
        self.n_skipped_minibatches = 0
        for name, schedule in self._radii().items():
            schedules.require_positive(schedule, name)

        if _init_setup_model:
            self._setup_model()

    @classmethod
    def _checked_env(cls, env: GymEnv | str | None, verbose: int) -> GymEnv | None:
        """Make an environment given by id, and complain of action spaces before SB3 asserts."""
        if isinstance(env, str):
            env = make_env(env, verbose)
        if env is None:
            return None
        space = env.action_space
        if not isinstance(space, cls.supported_action_spaces):
            allowed = ", ".join(allowed.__name__ for allowed in cls.supported_action_spaces)
            raise ValueError(f"env has the action space {space}, which {cls.__name__} does not support; allowed are {allowed}")
        if isinstance(space, spaces.Box) and not np.isfinite([space.low, space.high]).all():
            raise ValueError(f"env has the unbounded action space {space}; allowed are Box spaces with finite bounds")
        return env

    def _radii(self) -> dict[str, FloatSchedule]:
        """The radii that are set, by argument."""
        optional = {name: getattr(self, name) for name in ("clip_range_high", "clip_range_vf")}
        return {"clip_range": self.clip_range, **{name: radius for name, radius in optional.items() if radius is not None}}

    def _setup_model(self) -> None:
        # SB3's load writes its keyword arguments over the attributes, so they are looked at here and not in __init__.
        for name, radius in self._radii().items():
            setattr(self, name, schedules.as_radius(radius, name))
        schedules.as_schedule(self.learning_rate, "learning_rate")
        self._check_batches()
        if not self.max_grad_norm >= 0.0:
            raise ValueError(f"max_grad_norm={self.max_grad_norm!r} is not allowed; allowed are numbers from 0")
        if not isinstance(self.torch_compile, bool):
            raise ValueError(f"torch_compile={self.torch_compile!r} is not allowed; allowed are False and True")
        self._compiled_loss: Any = None
        super()._setup_model()

    def _check_batches(self) -> None:
        for name in ("n_steps", "batch_size", "n_epochs"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < 1:
                raise ValueError(f"{name}={value!r} is not allowed; allowed are whole numbers from 1")
        if self.normalize_advantage and self.batch_size == 1:
            raise ValueError("batch_size=1 leaves nothing to normalise; allowed are 2 and more, or normalize_advantage=False")
        if self.env is None:
            return
        size = self.n_steps * self.n_envs
        if self.normalize_advantage and size == 1:
            raise ValueError(
                f"n_steps={self.n_steps} with one environment leaves nothing to normalise; allowed are 2 and more"
            )
        if size % self.batch_size > 0:
            warnings.warn(
                f"batch_size={self.batch_size} does not divide the rollout of {size} samples (n_steps={self.n_steps} x "
                f"{self.n_envs} environments): each epoch ends with a minibatch of {size % self.batch_size}",
                stacklevel=2,
            )

    def policy_loss(
        self, log_ratio: torch.Tensor, advantages: torch.Tensor, region: TrustRegion, samples: RolloutSamples
    ) -> torch.Tensor:
        """The surrogate of a minibatch, a scalar to be minimised.

        :param log_ratio: log-probability of the actions minus that in the rollout, ``(batch,)``
        :param advantages: normalised if ``normalize_advantage``, ``(batch,)``
        :param region: radii of this update
        :param samples: the minibatch as the rollout buffer gave it
        """
        raise NotImplementedError

    def _is_last_epoch(self, statistics: UpdateStatistics) -> bool:
        """Whether the epoch that has just ended is to be the last one of this update."""
        return False

    def _update_current_progress_remaining(self, num_timesteps: int, total_timesteps: int) -> None:
        # The last rollout may overshoot; a negative progress would make linear learning rates climb the loss.
        self._current_progress_remaining = max(0.0, 1.0 - num_timesteps / total_timesteps)

    def collect_rollouts(
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int
    ) -> bool:
        """SB3's collection; raises ValueError where an environment returns NaN or infinity."""
        with guarded(env, self.num_timesteps // env.num_envs, self._last_obs) as guarded_env:
            return super().collect_rollouts(guarded_env, callback, rollout_buffer, n_rollout_steps)

    def train(self) -> None:
        """Update the policy on the current rollout (Algorithm 1 of the paper, lines 10 to 22)."""
        self.policy.set_training_mode(True)
        schedules.read(self.lr_schedule, self._current_progress_remaining, "learning_rate")  # before it reaches the optimizer
        self._update_learning_rate(self.policy.optimizer)
        settings = self._loss_settings()
        statistics = UpdateStatistics(settings.region)
        for epoch in range(self.n_epochs):
            statistics.start_epoch()
            stopped = self._train_epoch(epoch, settings, statistics)
            self._n_updates += 1
            if stopped or self._is_last_epoch(statistics):
                break
        self._log_update(settings, statistics)

    def _train_epoch(self, epoch: int, settings: LossSettings, statistics: UpdateStatistics) -> bool:
        """One pass over the rollout; True if ``target_kl`` ended it."""
        for samples in self.rollout_buffer.get(self.batch_size):
            probe = torch.zeros_like(samples.old_log_prob, requires_grad=True)
            terms = self._minibatch_terms(samples, settings, probe)
            if self.target_kl is not None:
                kl = approximate_kl(terms.log_ratio).item()
                if kl > 1.5 * self.target_kl:
                    statistics.add(terms, probe, grad_norm=None)
                    if self.verbose >= 1:
                        print(f"Early stopping in epoch {epoch}: the KL of a minibatch reached {kl:.2f}")
                    return True
            grad_norm, not_finite = gradient_step(self.policy, terms, self.max_grad_norm)
            if not_finite:
                self._report_skipped(not_finite)
                statistics.skip(not_finite)
            else:
                statistics.add(terms, probe, grad_norm)
        return False

    def _minibatch_terms(self, samples: RolloutSamples, settings: LossSettings, probe: torch.Tensor) -> LossTerms:
        if not self.torch_compile:
            return minibatch_loss(self.policy, self.policy_loss, samples, settings, probe)
        if self._compiled_loss is None:
            self._compiled_loss = torch.compile(minibatch_loss, dynamic=False)
        return self._compiled_loss(self.policy, self.policy_loss, samples, settings, probe)

    def _loss_settings(self) -> LossSettings:
        """Coefficients and radii at the current progress."""
        progress = self._current_progress_remaining
        values = {name: schedules.read(radius, progress, name) for name, radius in self._radii().items()}
        low = max(values["clip_range"], MIN_RADIUS)
        high = max(values.get("clip_range_high", low), MIN_RADIUS)
        vf = values.get("clip_range_vf")

        def scalar(value: float) -> torch.Tensor:
            return torch.tensor(value, dtype=torch.float32, device=self.device)

        return LossSettings(
            region=TrustRegion(scalar(low), scalar(high)),
            clip_range_vf=None if vf is None else scalar(max(vf, 0.0)),
            normalize_advantage=self.normalize_advantage,
            ent_coef=self.ent_coef,
            vf_coef=self.vf_coef,
            discrete=isinstance(self.action_space, spaces.Discrete),
        )

    def _report_skipped(self, not_finite: list[str]) -> None:
        if self.n_skipped_minibatches == 0:
            warnings.warn(
                f"a minibatch was skipped after {self.num_timesteps} steps, because it is not finite in: "
                f"{', '.join(not_finite)}. Parameters and optimizer are as before it; "
                "train/skipped_minibatches counts further ones",
                stacklevel=3,
            )
        self.n_skipped_minibatches += 1

    def _log_update(self, settings: LossSettings, statistics: UpdateStatistics) -> None:
        summary = statistics.summary()
        if statistics.skipped and not summary:
            raise FloatingPointError(
                f"all {statistics.skipped} minibatches of the update after {self.num_timesteps} steps were skipped, the last "
                f"because it is not finite in: {', '.join(statistics.not_finite)}. Look at the scale of rewards and "
                "observations, or lower learning_rate"
            )
        for name, value in summary.items():
            self.logger.record(f"train/{name}", value)
        buffer = self.rollout_buffer
        self.logger.record("train/explained_variance", explained_variance(buffer.values.flatten(), buffer.returns.flatten()))
        if hasattr(self.policy, "log_std"):
            self.logger.record("train/std", self.policy.log_std.exp().mean().item())
        self.logger.record("train/skipped_minibatches", self.n_skipped_minibatches)
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("train/clip_range", settings.region.eps_low.item())
        if self.clip_range_high is not None:
            self.logger.record("train/clip_range_high", settings.region.eps_high.item())
        if settings.clip_range_vf is not None:
            self.logger.record("train/clip_range_vf", settings.clip_range_vf.item())

    def learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str | None = None,
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> Self:
        """Train; see SB3. TensorBoard runs are named after the algorithm unless ``tb_log_name`` is given."""
        return super().learn(
            total_timesteps=total_timesteps,
            callback=callback,
            log_interval=log_interval,
            tb_log_name=tb_log_name or type(self).__name__,
            reset_num_timesteps=reset_num_timesteps,
            progress_bar=progress_bar,
        )

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_compiled_loss"]

    @classmethod
    def load(
        cls,
        path: str | pathlib.Path | io.BufferedIOBase,
        env: GymEnv | None = None,
        device: torch.device | str = "auto",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        **kwargs: Any,
    ) -> Self:
        """Load a model that :meth:`save` wrote; see SB3 for the arguments.

        :raises ValueError: if the file is damaged, was saved by another algorithm, or an argument is out of range
        :raises TypeError: if an argument is unknown or of the wrong type
        """
        saved = read_saved_model(path)
        saved.require_algorithm(cls.__name__)
        unknown = set(kwargs) - set(saved.attributes) - set(inspect.signature(cls.__init__).parameters)
        if unknown:
            raise TypeError(
                f"{cls.__name__}.load got the unknown arguments {sorted(unknown)}; allowed are those of {cls.__name__}"
            )
        restored = cls._restored_arguments(saved, {**(custom_objects or {}), **kwargs})
        return super().load(path, env, device, custom_objects, print_system_info, force_reset, **{**kwargs, **restored})

    @classmethod
    def _restored_arguments(cls, saved: SavedModel, replacements: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the constructor that SB3's format does not bring back by itself.

        :param replacements: attributes that the caller sets in place of the saved ones
        """
        return {}
