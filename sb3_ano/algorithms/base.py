"""The algorithm that ANO, SPO and PAPO share: constructor, update, log and files."""

import io
import math
import pathlib
from typing import Any, ClassVar, Literal, Self

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.distributions import MultiCategoricalDistribution
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy, BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, explained_variance
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano._arguments import constructor_parameters
from sb3_ano._system import warn_user
from sb3_ano.algorithms import arguments, schedules
from sb3_ano.algorithms.finite import FiniteCheck, statistics_of
from sb3_ano.algorithms.loading import SavedModel, read_saved_model
from sb3_ano.envs import DirectVecEnv, make_env
from sb3_ano.fast.collect import FastCollection
from sb3_ano.fast.policy import is_recurrent_class
from sb3_ano.fast.rules import Options, first_reason
from sb3_ano.fast.step import ClipRange, Numbers, RolloutSamples, UpdateStatistics, approximate_kl
from sb3_ano.policies import AsymmetricPolicy
from sb3_ano.shaping import MIN_RADIUS, ShapingPair, is_known, surrogate_of_pair

# Updates in a row, far from desired_kl with the radius at a bound, after which it counts as out of reach.
_UPDATES_OFF_TARGET = 2


class ShapedPolicyAlgorithm(arguments.NamedArguments, FastCollection):
    """Train a policy on-policy with a pluggable surrogate: a subclass sets the shapes, or overrides :meth:`policy_loss`.

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
    :param rollout_buffer_class: class of the rollout buffer; None picks SB3's for the observations
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

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        **PPO.policy_aliases,
        "AsymmetricPolicy": AsymmetricPolicy,
    }
    #: Base class of the policies that are allowed.
    policy_base: ClassVar[type[BasePolicy]] = ActorCriticPolicy
    #: Shapes of the surrogate.
    _shape: ShapingPair
    #: Limit of an epoch's mean KL, beyond which the epoch is the last one of its update; None for no limit.
    max_epoch_kl: float | None = None
    # Whether the surrogate reads the one-step TD errors of the samples, which cost a pass over the rollout.
    _reads_td_errors: ClassVar[bool] = False

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
        # Saved, so that load can tell whose file it is.
        self.algorithm = type(self).__name__

        # SB3 would make the environment without this package's hints about packages that are missing.
        if isinstance(env, str):
            env = make_env(env, verbose)

        # The network is built below, because the arguments have to be checked first.
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

    @staticmethod
    def _wrap_env(env: GymEnv | str, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        """Wrap an environment, or make and wrap one of an id, as SB3 does, in :class:`~sb3_ano.envs.DirectVecEnv`."""
        if isinstance(env, str):
            env = make_env(env, verbose)
        if isinstance(env, gym.Env | VecEnv):
            arguments.require_env(env)

        # Like SB3's DummyVecEnv, without its copies of each step.
        if isinstance(env, gym.Env):
            single = env
            if monitor_wrapper and not is_wrapped(env, Monitor):
                single = Monitor(env)
            env = DirectVecEnv([lambda: single])
            if verbose >= 1:
                print("Wrapping the env in a DirectVecEnv.")
        elif verbose >= 1 and hasattr(env, "backend"):
            print(f"The environments run on backend {env.backend!r}.")

        # By name, because super() knows no instance in a static method. It transposes images, and checks the environment.
        return OnPolicyAlgorithm._wrap_env(env, verbose, monitor_wrapper)

    def __repr__(self) -> str:
        radii = (f"{name}={radius.value_schedule}" for name, radius in self._radii().items())
        return f"{type(self).__name__}({', '.join(radii)})"

    def _get_policy_from_name(self, policy_name: str) -> Any:
        # _require_policy rejects other names, with a message that lists what is allowed.
        return self.policy_aliases.get(policy_name, policy_name)

    def _require_policy(self) -> None:
        kind: Any = self.policy_class
        is_allowed = not isinstance(kind, str)
        if isinstance(kind, type):
            # LSTM policies are subclasses of SB3's.
            has_lstm = self.policy_base is ActorCriticPolicy and is_recurrent_class(kind)
            is_allowed = issubclass(kind, self.policy_base) and not has_lstm
        if not is_allowed:
            raise ValueError(
                f"policy={getattr(kind, '__name__', kind)!r} is not a policy of {type(self).__name__}; allowed are "
                f"{', '.join(self.policy_aliases)} and subclasses of {self.policy_base.__name__}. RecurrentANO has LSTM "
                "policies, MaskableANO masks"
            )

    def _setup_model(self) -> None:
        if not hasattr(self, "observation_space"):
            raise TypeError("env=None is not allowed; allowed are a registered id, a Gymnasium environment, and a VecEnv")

        # Here and not in the constructor, because load sets attributes before it calls this method.
        self._check_arguments()
        self._require_policy()
        learning_rate = schedules.as_schedule(self.learning_rate, "learning_rate")
        if isinstance(self.learning_rate, str):
            # SB3 takes numbers and functions only.
            self.learning_rate = learning_rate
        arguments.require_batches(self)

        # load calls this for an object that may have trained already.
        self.engine.forget()
        super()._setup_model()

        distribution = self.policy.action_dist
        if isinstance(distribution, MultiCategoricalDistribution):
            # The compiler takes no NumPy integers.
            distribution.action_dims = [int(size) for size in distribution.action_dims]

        if self.precision == "bfloat16":
            reason = first_reason(self, self.engine_options(), "policy")
            if reason is not None:
                warn_user(f"precision='bfloat16' has no effect, because {reason}")

    def engine_options(self) -> Options:
        return Options(self.torch_compile, self.precision)

    def _check_arguments(self) -> None:
        """Check the arguments, which are attributes that a user or SB3's ``load`` may have changed; convert the radii.

        :raises ValueError: if one is out of range
        :raises TypeError: if one is of the wrong type
        """
        arguments.require_arguments(self)
        # SB3's load, and the RL Zoo, set numbers and functions.
        self.clip_range = schedules.as_schedule(self.clip_range, "clip_range")
        self.clip_range_vf = schedules.as_optional_schedule(self.clip_range_vf, "clip_range_vf")
        self.clip_range_high = schedules.as_optional_schedule(self.clip_range_high, "clip_range_high")
        self.desired_kl = schedules.as_optional_schedule(self.desired_kl, "desired_kl")

    def _radii(self) -> dict[str, FloatSchedule]:
        """Return the schedules of the radii that are set, by argument."""
        radii = {"clip_range": self.clip_range}
        if self.clip_range_high is not None:
            radii["clip_range_high"] = self.clip_range_high
        if self.clip_range_vf is not None:
            radii["clip_range_vf"] = schedules.as_schedule(self.clip_range_vf, "clip_range_vf")
        if self.desired_kl is not None:
            radii["desired_kl"] = self.desired_kl
        return radii

    def _require_adaptable(self) -> None:
        """Check ``desired_kl`` and the radii that it adapts."""
        if self.desired_kl is None:
            return

        radii = self._radii()
        target = radii["desired_kl"]
        schedules.require_positive(target, "desired_kl")
        if isinstance(target.value_schedule, ConstantSchedule):
            # A schedule is checked when it is read.
            schedules.require_target(target.value_schedule.val)
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

        # The warning is said once per training, and a training is a call of learn.
        self._reset_target_check()
        name = tb_log_name or type(self).__name__
        return super().learn(
            total_timesteps,
            callback,
            log_interval,
            name,
            reset_num_timesteps,
            progress_bar,
        )

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        env: VecEnv = self.env  # type: ignore[assignment]
        # Before SB3 resets the environments, to be put back if there is NaN: VecNormalize learns from the first observations.
        before = statistics_of(env)
        prepared = super()._setup_learn(total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar)

        # Looks at the first observations, and raises.
        FiniteCheck(self, env, before)
        return prepared

    def _update_current_progress_remaining(self, num_timesteps: int, total_timesteps: int) -> None:
        # The last rollout may overshoot; a negative progress would make linear learning rates climb the loss.
        self._current_progress_remaining = max(0.0, 1.0 - num_timesteps / total_timesteps)

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: BaseCallback,
        rollout_buffer: RolloutBuffer,
        n_rollout_steps: int,
        use_masking: bool = False,
    ) -> bool:
        """Fill the buffer; see SB3.

        :param use_masking: whether to ask the environments for masks of actions
        :return: False if a callback ended the training
        :raises ValueError: if an environment returns NaN or Inf, or a changed attribute is out of range
        """
        # A user or a callback may have changed them.
        self._check_arguments()
        self._require_adaptable()

        has_rollout = super().collect_rollouts(
            env,
            callback,
            rollout_buffer,
            n_rollout_steps,
            use_masking,
        )

        # A callback that may have changed the policy may have changed arguments, too, which the update is about to read.
        if self.engine.must_decide_again:
            self._check_arguments()
            self._require_adaptable()
        return has_rollout

    def _rollout_check(self, env: VecEnv) -> FiniteCheck:
        return FiniteCheck(self, env)

    def policy_loss(
        self,
        log_ratio: torch.Tensor,
        advantages: torch.Tensor,
        clip_range: ClipRange,
        samples: RolloutSamples,
    ) -> torch.Tensor:
        """Compute minus the mean surrogate of Definition 3.2 of the paper, a scalar to be minimized.

        :param log_ratio: log-probability of the actions minus that in the rollout, ``(batch,)``
        :param advantages: advantages, normalized if ``normalize_advantage``, ``(batch,)``
        :param clip_range: radii of this update
        :param samples: minibatch of the rollout buffer
        """
        objective = surrogate_of_pair(
            log_ratio,
            advantages,
            self._shape,
            clip_range.low,
            clip_range.high,
            samples.old_log_prob,
        )
        return -objective.mean()

    def _has_known_loss(self) -> bool:
        """Tell whether the surrogate is this package's code, with a shape of this package."""
        is_own = "policy_loss" not in vars(self) and type(self).policy_loss is ShapedPolicyAlgorithm.policy_loss
        return is_own and all(map(is_known, self._shape))

    def _loss_constants(self) -> tuple[float, ...]:
        """Return the numbers that :meth:`policy_loss` reads in addition to its arguments."""
        return ()

    def train(self) -> None:
        """Update the policy on the current rollout (the optimization epochs of Algorithm 1 of the paper)."""
        # Dropout and batch normalization act now, and not in the rollout.
        self.policy.set_training_mode(True)
        # Schedules are read once: learning rate and radii are constant during an update.
        self._update_learning_rate(self.policy.optimizer)
        numbers = self._numbers_of_update()

        # The engine makes the steps: gather, loss, gradient, clip by norm, Adam. See sb3_ano.fast.
        update = self.engine.prepare_update(
            self,
            self.policy_loss,
            numbers,
            is_known_loss=self._has_known_loss,
            loss_constants=self._loss_constants(),
            with_td_errors=self._reads_td_errors,
        )
        statistics = update.statistics
        is_last_epoch = False
        with update:
            for epoch in range(self.n_epochs):
                for samples, indices in update.minibatches():
                    result = update.step(samples, indices)

                    # A minibatch too far from the rollout's policy made no step, and ends the update. Without a limit, the
                    # result is not read, because reading waits for the device.
                    if self.target_kl is not None and bool(result.stop):
                        is_last_epoch = True
                        if self.verbose >= 1:
                            kl = approximate_kl(result.log_ratio).item()
                            print(f"Early stopping in epoch {epoch}: the KL of a minibatch reached {kl:.2f}")
                        break

                # SB3 counts epochs under this name.
                self._n_updates += 1
                # PAPO's limit, which the last step of an epoch may have exceeded.
                if self.max_epoch_kl is not None and statistics.epoch_kl() > self.max_epoch_kl:
                    is_last_epoch = True
                if is_last_epoch:
                    break

        # Minibatches whose loss or gradient was NaN or Inf changed nothing.
        if statistics.table()["skipped"].any():
            self._report_skipped(statistics)

        # The log: SB3's names, and those of docs/algorithms.md.
        # approx_kl is SB3's, of the last epoch; kl_mean is that of the whole update, which desired_kl is compared with.
        logger = self.logger
        summary = statistics.summary()
        for name, value in summary.items():
            logger.record(f"train/{name}", value)

        # Of the values before the update, as in SB3.
        buffer = self.rollout_buffer
        variance = explained_variance(buffer.values.flatten(), buffer.returns.flatten())
        logger.record("train/explained_variance", variance)
        if hasattr(self.policy, "log_std"):
            logger.record("train/std", self.policy.log_std.exp().mean().item())
        logger.record("train/skipped_minibatches", self.n_skipped_minibatches)
        logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        logger.record("train/clip_range", numbers.clip_range)
        if self.clip_range_high is not None:
            logger.record("train/clip_range_high", numbers.clip_range_high)
        if self.clip_range_vf is not None:
            logger.record("train/clip_range_vf", numbers.clip_range_vf)

        # Last, because it sets the radii of the next update.
        if self.desired_kl is not None:
            self._adapt_radius(numbers.clip_range, summary["kl_mean"], self._read(self.desired_kl, "desired_kl"))

    def _numbers_of_update(self) -> Numbers:
        """Read the schedules once for this update; schedules end at 0 or slightly below."""
        # Not its schedule: a call would change one that counts its calls.
        rate = self.policy.optimizer.param_groups[0]["lr"]
        if not math.isfinite(rate):
            progress = self._current_progress_remaining
            raise ValueError(
                f"learning_rate is {rate} at progress_remaining={progress:g}; a schedule must return finite numbers"
            )

        # Shapes are functions in units of the radius, which may be small, but not 0.
        clip_range = max(self._read(self.clip_range, "clip_range"), MIN_RADIUS)
        clip_range_high = clip_range
        if self.clip_range_high is not None:
            clip_range_high = max(self._read(self.clip_range_high, "clip_range_high"), MIN_RADIUS)
        clip_range_vf = 0.0
        if self.clip_range_vf is not None:
            clip_range_vf = max(self._read(self.clip_range_vf, "clip_range_vf"), 0.0)

        if self._adapted_from not in (0.0, clip_range):
            # The factor was adapted to another radius.
            self.radius_factor = 1.0
        self._adapted_from = clip_range
        factor = 1.0
        if self.desired_kl is not None:
            schedules.require_target(self._read(self.desired_kl, "desired_kl"))
            factor = self.radius_factor

        # SB3's factor of 1.5.
        max_kl = math.inf
        if self.target_kl is not None:
            max_kl = 1.5 * self.target_kl

        return Numbers(
            clip_range=clip_range * factor,
            clip_range_high=clip_range_high * factor,
            clip_range_vf=clip_range_vf,
            ent_coef=self.ent_coef,
            vf_coef=self.vf_coef,
            max_grad_norm=self.max_grad_norm,
            max_kl=max_kl,
        )

    def _read(self, schedule: Schedule, name: str) -> float:
        """Read a schedule at the current progress.

        :raises ValueError: if it is not finite
        """
        progress = self._current_progress_remaining
        value = float(schedule(progress))
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value} at progress_remaining={progress:g}; a schedule must return finite numbers")
        return value

    def _adapt_radius(self, radius: float, kl: float, target: float) -> None:
        """Adapt the radii of the next update to ``desired_kl``.

        :param radius: radius below 1 of the update that has just ended
        :param kl: mean KL divergence of that update from the rollout's policy
        :param target: KL divergence that an update should have
        """
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

        # One update may be an outlier.
        self._updates_off_target += 1
        if self._updates_off_target == _UPDATES_OFF_TARGET:
            self._updates_off_target = None
            advice = "lower learning_rate or n_epochs"
            other = "raise"
            if is_low:
                advice = "raise learning_rate or n_epochs"
                other = "lower"
            warn_user(
                f"desired_kl={target:g} is out of reach after {self.num_timesteps} steps: the radius is at its bound of "
                f"{radius:.3g}, and the KL divergence of an update is {kl:.2g}; {advice}, or {other} desired_kl"
            )

    def _report_skipped(self, statistics: UpdateStatistics) -> None:
        """Count the skipped minibatches of this update, warn of the first one ever, and raise if none was left."""
        skipped = np.flatnonzero(statistics.table()["skipped"]).tolist()
        term = statistics.non_finite_term(skipped[-1])

        # Without one step, training on would go on like this for ever.
        if len(skipped) == len(statistics):
            observations = self.rollout_buffer.observations
            parts = [observations]
            if isinstance(observations, dict):
                parts = list(observations.values())
            # float64, because the absolute value of the smallest integer of a type is not in it.
            largest = max(float(np.abs(part.astype(np.float64)).max()) for part in parts)
            reward = float(np.abs(self.rollout_buffer.rewards).max())
            raise FloatingPointError(
                f"all {len(skipped)} minibatches of the update after {self.num_timesteps} steps were skipped, because of NaN "
                f"or Inf in {term}. The largest observation of the rollout is {largest:.3g}, the largest reward {reward:.3g}. "
                "Look at the scale of rewards and observations, or lower learning_rate"
            )

        if self.n_skipped_minibatches == 0:
            warn_user(
                f"a minibatch was skipped after {self.num_timesteps} steps, because of NaN or Inf in {term}. Parameters and "
                "optimizer are as before it; train/skipped_minibatches counts further ones"
            )
        self.n_skipped_minibatches += len(skipped)

    def _excluded_save_params(self) -> list[str]:
        # They belong to one call of learn.
        return [*super()._excluded_save_params(), "_updates_off_target", "_largest_rate"]

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
        # Before SB3 loads it, because afterwards nothing shows what the file lacked.
        saved = read_saved_model(path)
        saved.require_algorithm(cls.__name__)

        # Other attributes of the file may be replaced, too. PAPO's files have desired_kl, which PAPO does not take.
        others = saved.attributes.keys() - constructor_parameters(ShapedPolicyAlgorithm).keys()
        settings = [name for name in kwargs if name not in others]
        arguments.require_known(f"{cls.__name__}.load", settings, constructor_parameters(cls))

        kwargs |= cls._restored_arguments(saved, {**(custom_objects or {}), **kwargs})
        kwargs.pop("shaping", None)  # _restored_arguments has it
        # _wrap_env takes ids, too.
        return super().load(
            path,
            env,  # type: ignore[arg-type]
            device,
            custom_objects,
            print_system_info,
            force_reset,
            **kwargs,
        )

    @classmethod
    def _restored_arguments(cls, saved: SavedModel, replacements: dict[str, Any]) -> dict[str, Any]:
        """Return arguments of the constructor that SB3's format does not bring back by itself.

        :param saved: attributes of the file
        :param replacements: attributes that the caller sets instead of the saved ones
        """
        return {}
