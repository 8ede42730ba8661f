"""The algorithm that ANO, SPO and PAPO share: constructor, update, log and files."""

import contextlib
import io
import math
import pathlib
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self, cast

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.distributions import MultiCategoricalDistribution
from stable_baselines3.common.policies import ActorCriticPolicy, BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, explained_variance

from sb3_ano._arguments import constructor_parameters
from sb3_ano._compat import tracing
from sb3_ano.algorithms import arguments, schedules
from sb3_ano.algorithms.buffers import DictFlatRolloutBuffer, FlatRolloutBuffer, RolloutSamples, is_stock
from sb3_ano.algorithms.compiled import pays
from sb3_ano.algorithms.diagnostics import UpdateStatistics
from sb3_ano.algorithms.loading import SavedModel, read_saved_model
from sb3_ano.algorithms.policy_evaluation import customization
from sb3_ano.algorithms.rollout import RolloutMixin
from sb3_ano.algorithms.update import ClipRange, Updater, UpdateSettings, approximate_kl
from sb3_ano.envs import make_env
from sb3_ano.shaping import MIN_RADIUS

# Updates in a row, far from desired_kl with the radius at a bound, after which it counts as out of reach.
_UPDATES_OFF_TARGET = 2


class ShapedPolicyAlgorithm(arguments.NamedArguments, RolloutMixin):
    """Train a policy on-policy with a pluggable surrogate; a subclass supplies :meth:`policy_loss`.

    The arguments up to ``_init_setup_model`` are those of SB3's PPO, in its order and meaning; the others are keyword-only.

    :param policy: policy class, or ``"MlpPolicy"``, ``"CnnPolicy"``, ``"MultiInputPolicy"``
    :param env: environment, or its registered id
    :param learning_rate: learning rate, or a schedule of the remaining progress
    :param n_steps: steps per environment and rollout
    :param batch_size: samples in a minibatch
    :param n_epochs: passes over a rollout
    :param gamma: discount factor
    :param gae_lambda: bias-variance trade-off of the generalized advantage estimator
    :param clip_range: radius of the trust region, eps in the paper: a number, or a schedule, read at each update
    :param clip_range_vf: radius of the clip of the value function, or None for no clip; depends on the reward scale
    :param normalize_advantage: whether to normalize the advantages of each minibatch
    :param ent_coef: weight of the entropy bonus
    :param vf_coef: weight of the value loss
    :param max_grad_norm: norm to which a longer gradient is scaled down
    :param use_sde: whether to explore with gSDE instead of action noise
    :param sde_sample_freq: steps between new gSDE noise matrices, -1 for one per rollout
    :param rollout_buffer_class: class of the rollout buffer; None picks
        :class:`~sb3_ano.algorithms.buffers.FlatRolloutBuffer`, or the one for Dict observations
    :param rollout_buffer_kwargs: arguments of the rollout buffer
    :param target_kl: KL divergence at which an update stops: a minibatch exceeds 1.5 times this; None for no limit
    :param stats_window_size: episodes over which rollout statistics are averaged
    :param tensorboard_log: directory of the TensorBoard log, or None
    :param policy_kwargs: arguments of the policy
    :param verbose: 0 silent, 1 information, 2 debugging
    :param seed: seed of the random generators
    :param device: ``"auto"``, ``"cpu"``, ``"cuda"``, ...
    :param _init_setup_model: whether to build the network when the instance is created
    :param clip_range_high: radius above 1, acting on positive advantages, while ``clip_range`` acts below 1; None takes
        ``clip_range`` for both. Takes ``"lin_0.28"`` too, because the RL Zoo parses schedules for ``clip_range`` only
    :param desired_kl: KL divergence per update that the radii are adapted to, or None for radii that follow ``clip_range``
        alone; a number, a schedule or ``"lin_0.01"``. ``clip_range`` and ``clip_range_high``, numbers, are then the first
        radii. After each update both radii are multiplied by ``(desired_kl / kl) ** 0.25``, at least 0.8 and at most 1.25,
        where ``kl`` is the mean over all minibatches of the update (``train/kl_mean``), and ``clip_range`` is kept between
        0.05 and 4 from the second update on. The geometric mean of ``kl`` over updates approaches ``desired_kl``. Late in a
        decaying learning rate, the rate limits the step and ANO's radius grows to its bound. Numbers above 0 and below 1; a
        target that is out of reach is warned about once per training
    :param torch_compile: whether to compile the update with ``torch.compile``; ``"auto"`` does it if the run is long enough
        to pay for that, with SB3's defaults from about 170,000 steps. Compiled or not, parameters are the same to rounding
    :param precision: ``"float32"``, or ``"bfloat16"`` for the layers of features extractor and networks; the heads, the
        distribution and the loss are computed in float32
    :param check_finite: whether to raise if an environment returns NaN or Inf; False leaves them to the policy
    :raises ValueError: if an argument is out of range, the environment id is unknown, or a space is not supported
    :raises TypeError: if an argument is of the wrong type
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = PPO.policy_aliases
    #: Base class of the policies that are allowed.
    policy_base: ClassVar[type[BasePolicy]] = ActorCriticPolicy
    #: Rollout buffers for plain observations and for Dict.
    _default_buffers: ClassVar[tuple[type[RolloutBuffer], type[RolloutBuffer]]] = FlatRolloutBuffer, DictFlatRolloutBuffer

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
        desired_kl: float | str | Schedule | None = None,
        torch_compile: bool | Literal["auto"] = "auto",
        precision: Literal["float32", "bfloat16"] = "float32",
        check_finite: bool = True,
    ) -> None:
        self.batch_size = batch_size
        self.n_epochs = n_epochs
        self.normalize_advantage = normalize_advantage
        self.target_kl = target_kl

        self.clip_range = schedules.as_schedule(clip_range, "clip_range")
        self.clip_range_vf = schedules.as_optional_schedule(clip_range_vf, "clip_range_vf")
        self.clip_range_high = schedules.as_optional_schedule(clip_range_high, "clip_range_high")
        self.desired_kl = schedules.as_optional_schedule(desired_kl, "desired_kl")

        self.torch_compile = torch_compile
        self.precision = precision
        self.check_finite = check_finite
        #: Factor by which ``desired_kl`` has changed the radii since the first update.
        self.radius_factor = 1.0
        # The value of clip_range that it belongs to; 0: none yet.
        self._adapted_from = 0.0
        self._reset_target_check()
        self.n_skipped_minibatches = 0
        self.algorithm = type(self).__name__

        if isinstance(env, str):
            env = make_env(env, verbose)

        super().__init__(
            policy,
            env,
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

        self._check_arguments()
        for name, schedule in self._radii().items():
            schedules.require_positive(schedule, name)
        self._require_adaptable()

        if _init_setup_model:
            self._setup_model()

    def __repr__(self) -> str:
        radii = (f"{name}={radius.value_schedule}" for name, radius in self._radii().items())
        return f"{type(self).__name__}({', '.join(radii)})"

    def _get_policy_from_name(self, policy_name: str) -> Any:
        return self.policy_aliases.get(policy_name, policy_name)  # _require_policy rejects other names

    def _require_policy(self) -> None:
        kind: Any = self.policy_class
        # LSTM policies are subclasses of SB3's; by their module, because sb3-contrib need not be imported.
        modules = {part.__module__ for part in getattr(kind, "__mro__", ())} if self.policy_base is ActorCriticPolicy else ()
        is_recurrent = "sb3_contrib.common.recurrent.policies" in modules
        if isinstance(kind, str) or (isinstance(kind, type) and (is_recurrent or not issubclass(kind, self.policy_base))):
            raise ValueError(
                f"policy={getattr(kind, '__name__', kind)!r} is not a policy of {type(self).__name__}; allowed are "
                f"{', '.join(self.policy_aliases)} and subclasses of {self.policy_base.__name__}. RecurrentANO has LSTM "
                "policies, MaskableANO masks"
            )

    def _setup_model(self) -> None:
        if not hasattr(self, "observation_space"):
            raise TypeError("env=None is not allowed; allowed are a registered id, a Gymnasium environment, and a VecEnv")
        self._check_arguments()
        self._require_policy()
        learning_rate = schedules.as_schedule(self.learning_rate, "learning_rate")
        if isinstance(self.learning_rate, str):
            self.learning_rate = learning_rate
        arguments.require_batches(self)
        if self.rollout_buffer_class is None:
            self.rollout_buffer_class = self._default_buffers[isinstance(self.observation_space, spaces.Dict)]
        self._updater: Updater | None = None
        super()._setup_model()
        distribution = self.policy.action_dist
        if isinstance(distribution, MultiCategoricalDistribution):
            # The compiler takes no NumPy integers.
            distribution.action_dims = [int(size) for size in distribution.action_dims]
        reason = customization(self.policy) if self.precision == "bfloat16" else None
        if reason is not None:
            warnings.warn(f"precision='bfloat16' has no effect, because {reason}", stacklevel=3)

    def _check_arguments(self) -> None:
        """Check the arguments, which are attributes that a user or SB3's ``load`` may have changed; convert the radii.

        :raises ValueError: if one is out of range
        :raises TypeError: if one is of the wrong type
        """
        arguments.require_arguments(self)
        for name, radius in self._radii().items():
            setattr(self, name, schedules.as_schedule(radius, name))

    def _radii(self) -> dict[str, FloatSchedule]:
        """Return the schedules of the radii that are set, by argument."""
        optional = {name: getattr(self, name) for name in ("clip_range_high", "clip_range_vf", "desired_kl")}
        return {"clip_range": self.clip_range, **{name: radius for name, radius in optional.items() if radius is not None}}

    def _require_adaptable(self) -> None:
        """Check ``desired_kl`` and the radii that it adapts."""
        radii = self._radii()
        if self.desired_kl is not None:
            schedules.require_positive(radii["desired_kl"], "desired_kl")
            if isinstance(radii["desired_kl"].value_schedule, ConstantSchedule):
                schedules.require_target(radii["desired_kl"].value_schedule.val)
            for name in radii.keys() & {"clip_range", "clip_range_high"}:
                schedules.require_constant(radii[name], name)

    def learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str | None = None,
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> Self:
        """Train; see SB3. TensorBoard runs are named after the algorithm unless ``tb_log_name`` is given.

        :raises ValueError: if a changed attribute is out of range, or there is no environment
        :raises TypeError: if a changed attribute is of the wrong type
        """
        if self.env is None:
            raise ValueError("there is no environment to train in; pass env= to load, or call set_env first")
        self._reset_target_check()
        name = tb_log_name or type(self).__name__
        return super().learn(total_timesteps, callback, log_interval, name, reset_num_timesteps, progress_bar)

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

    def train(self) -> None:
        """Update the policy on the current rollout (the optimization epochs of Algorithm 1 of the paper)."""
        self._check_arguments()
        self._require_adaptable()
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        rate = self.policy.optimizer.param_groups[0]["lr"]  # calling the schedule again would change one that counts
        schedules.read(lambda _: rate, self._current_progress_remaining, "learning_rate")
        updater = self._get_updater()
        statistics = UpdateStatistics(updater.clip_range)
        buffer, stopped = self.rollout_buffer, False
        stock = is_stock(buffer, "get", "_get_samples")
        rollout = cast(FlatRolloutBuffer, buffer).tensors(updater.channels_last) if stock else None
        try:
            with tracing() if updater.compiled else contextlib.nullcontext():
                for epoch in range(self.n_epochs):
                    statistics.start_epoch()
                    updater.start_epoch()
                    for samples, indices in self._minibatches(rollout):
                        result = updater(samples, indices)
                        statistics.add(result)
                        stopped = self.target_kl is not None and bool(result.stop)
                        if stopped:
                            if self.verbose >= 1:
                                kl = approximate_kl(result.log_ratio).item()
                                print(f"Early stopping in epoch {epoch}: the KL of a minibatch reached {kl:.2f}")
                            break
                    self._n_updates += 1
                    if stopped or self._is_last_epoch(statistics):
                        break
        finally:
            updater.end_update()
        self._report_skipped(statistics)
        summary = statistics.summary()
        self._log_update(updater, summary)
        self._adapt_radius(updater.clip_range.low.item(), summary["kl_mean"])

    def _minibatches(self, rollout: RolloutSamples | None) -> Iterator[tuple[RolloutSamples, torch.Tensor | None]]:
        """Iterate once over the rollout, in random order.

        :param rollout: the whole rollout, to yield with the indices of each minibatch; or None, to yield the minibatches of a
            buffer that takes samples in its own way, and None
        """
        if rollout is None:
            yield from ((samples, None) for samples in self.rollout_buffer.get(self.batch_size))  # type: ignore[misc]
        else:
            order = torch.from_numpy(np.random.permutation(len(rollout.advantages))).to(self.device)
            yield from ((rollout, indices) for indices in order.split(int(self.batch_size)))

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
                print("Compiling the update, which takes about 10 s the first time")
        progress = self._current_progress_remaining
        radii = {name: schedules.read(radius, progress, name) for name, radius in self._radii().items()}
        schedules.require_target(radii.get("desired_kl", 0.0))
        low = max(radii["clip_range"], MIN_RADIUS)
        high = max(radii.get("clip_range_high", low), MIN_RADIUS)
        coefficients = {
            "clip_range_vf": max(radii.get("clip_range_vf", 0.0), 0.0),
            "ent_coef": self.ent_coef,
            "vf_coef": self.vf_coef,
            "max_grad_norm": self.max_grad_norm,
            "max_kl": math.inf if self.target_kl is None else 1.5 * self.target_kl,
        }
        if self._adapted_from not in (0.0, low):  # the factor was adapted to another radius
            self.radius_factor = 1.0
        self._adapted_from = low
        factor = 1.0 if self.desired_kl is None else self.radius_factor
        self._updater.start_update((low * factor, high * factor), coefficients)
        return self._updater

    def _compiles(self) -> bool:
        """Decide whether to compile the update; ``"auto"`` does it if the run is long enough to pay for it."""
        if self.torch_compile != "auto":
            return bool(self.torch_compile)
        minibatches = (self._total_timesteps - self._num_timesteps_at_start) * self.n_epochs / self.batch_size
        return pays(minibatches, self.batch_size * sum(parameter.numel() for parameter in self.policy.parameters()))

    def _adapt_radius(self, radius: float, kl: float) -> None:
        """Adapt the radii of the next update to ``desired_kl``.

        :param radius: radius below 1 of the update that has just ended
        :param kl: mean KL divergence of that update from the rollout's policy
        """
        if self.desired_kl is not None:
            target = schedules.read(self.desired_kl, self._current_progress_remaining, "desired_kl")
            self.radius_factor *= schedules.adapted_radius(radius, kl, target) / radius
            self._check_target(radius, kl, target)

    def _reset_target_check(self) -> None:
        # Updates in a row that were far from desired_kl with the radius at its bound; None after the warning of a training.
        self._updates_off_target: int | None = 0
        self._largest_rate = 0.0

    def _check_target(self, radius: float, kl: float, target: float) -> None:
        """Warn once per training if the radius is at a bound and the KL divergence is still far from its target."""
        if self._updates_off_target is None:
            return
        lowest, highest = schedules.RADIUS_BOUNDS
        is_low = radius >= 0.999 * highest and kl < 0.5 * target
        is_high = radius <= 1.001 * lowest and kl > 2.0 * target
        # A learning rate that falls to 0 ends each training below the target.
        rate = self.policy.optimizer.param_groups[0]["lr"]
        self._largest_rate = max(self._largest_rate, rate)
        if not (is_low or is_high) or rate < 0.5 * self._largest_rate:
            self._updates_off_target = 0
            return

        self._updates_off_target += 1
        if self._updates_off_target == _UPDATES_OFF_TARGET:
            self._updates_off_target = None
            advice = "raise learning_rate or n_epochs" if is_low else "lower learning_rate or n_epochs"
            other = "lower" if is_low else "raise"
            warnings.warn(
                f"desired_kl={target:g} is out of reach after {self.num_timesteps} steps: the radius is at its bound of "
                f"{radius:.3g}, and the KL divergence of an update is {kl:.2g}; {advice}, or {other} desired_kl",
                stacklevel=3,
            )

    def _report_skipped(self, statistics: UpdateStatistics) -> None:
        """Count the skipped minibatches of this update, warn of the first one ever, and raise if none was left."""
        skipped = statistics.skipped()
        if not skipped:
            return
        term = statistics.non_finite_term(skipped[-1])
        if len(skipped) == len(statistics):
            observations = self.rollout_buffer.observations
            parts = observations.values() if isinstance(observations, dict) else [observations]
            largest = max(float(np.abs(part.astype(np.float64)).max()) for part in parts)
            reward = float(np.abs(self.rollout_buffer.rewards).max())
            raise FloatingPointError(
                f"all {len(skipped)} minibatches of the update after {self.num_timesteps} steps were skipped, because of NaN "
                f"or Inf in {term}. The largest observation of the rollout is {largest:.3g}, the largest reward {reward:.3g}. "
                "Look at the scale of rewards and observations, or lower learning_rate"
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

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_updater": None}

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_updater", "_updates_off_target", "_largest_rate"]

    @classmethod
    def load(
        cls,
        path: str | pathlib.Path | io.BufferedIOBase,
        env: GymEnv | str | None = None,
        device: torch.device | str = "auto",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        **kwargs: Any,
    ) -> Self:
        """Load a model that :meth:`save` wrote; see SB3 for the arguments. ``env`` may be a registered id, too.

        :raises ValueError: if the file is damaged, was saved by another algorithm, or an argument is out of range
        :raises TypeError: if an argument is unknown or of the wrong type
        """
        saved = read_saved_model(path)
        saved.require_algorithm(cls.__name__)

        # Other attributes of the file may be replaced, too. PAPO's files have desired_kl, which PAPO does not take.
        others = saved.attributes.keys() - constructor_parameters(ShapedPolicyAlgorithm).keys()
        settings = [name for name in kwargs if name not in others]
        arguments.require_known(f"{cls.__name__}.load", settings, constructor_parameters(cls))

        kwargs |= cls._restored_arguments(saved, {**(custom_objects or {}), **kwargs})
        # _wrap_env takes ids, too.
        return super().load(path, env, device, custom_objects, print_system_info, force_reset, **kwargs)  # type: ignore[arg-type]

    @classmethod
    def _restored_arguments(cls, saved: SavedModel, replacements: dict[str, Any]) -> dict[str, Any]:
        """Return arguments of the constructor that SB3's format does not bring back by itself.

        :param saved: attributes of the file
        :param replacements: attributes that the caller sets instead of the saved ones
        """
        return {}
