"""What ANO, SPO and PAPO share: SB3's on-policy loop with the policy loss as a hook."""

import contextlib
import copy
import inspect
import io
import math
import pathlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, Self, TypeAlias, cast

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.distributions import MultiCategoricalDistribution
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.policies import ActorCriticCnnPolicy, ActorCriticPolicy, BasePolicy, MultiInputActorCriticPolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule
from stable_baselines3.common.utils import FloatSchedule, explained_variance
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano._compat import tracing
from sb3_ano.algorithms import schedules, validation
from sb3_ano.algorithms.buffers import DictFlatRolloutBuffer, FlatRolloutBuffer, RolloutSamples
from sb3_ano.algorithms.policies import customization, has_native_bfloat16
from sb3_ano.algorithms.rollout import RolloutCollection
from sb3_ano.algorithms.saving import SavedModel, read_saved_model
from sb3_ano.algorithms.statistics import UpdateStatistics
from sb3_ano.algorithms.update import MinibatchStep, StepSettings, TrustRegion, approximate_kl
from sb3_ano.envs import DirectVecEnv, make_env
from sb3_ano.shaping import MIN_RADIUS

#: The rollout and the indices of a minibatch; or a minibatch and None.
_Minibatch: TypeAlias = tuple[RolloutSamples, torch.Tensor | None]

#: What a compilation costs, seconds: 10 to 20 on two cores with an empty cache.
COMPILE_SECONDS = 16.0
#: What a compiled minibatch saves, seconds: at least so much, and so much for each sample and parameter. Both are low guesses,
#: from networks of 64-64 and 256-256; convolutions save several times more.
SAVED_SECONDS, SAVED_SECONDS_PER_PRODUCT = 4e-4, 2e-11

#: Radii that ``desired_kl`` may reach.
RADIUS_BOUNDS = (0.05, 4.0)
# Factors of the radius from one update to the next.
_SLOWEST, _FASTEST = 0.8, 1.25


class ShapedPolicyAlgorithm(RolloutCollection):
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
    :param rollout_buffer_class: rollout buffer to use; None picks
        :class:`~sb3_ano.algorithms.buffers.FlatRolloutBuffer`, or the one for Dict observations
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
    :param torch_compile: whether to compile the update with ``torch.compile``; ``"auto"`` does it where the run is long enough
        to pay for that, with SB3's defaults from 260,000 steps. Compiled or not, parameters are the same to rounding
    :param precision: ``"bfloat16"`` computes the layers of features extractor and networks in it, and all that follows in
        float32
    :param desired_kl: KL divergence per update that the radii are adapted to, or None for radii that follow ``clip_range``
        alone; a number, a schedule or ``"lin_0.01"``. ``clip_range`` is then the radius of the first update. After each
        update both radii are multiplied by ``(desired_kl / kl) ** 0.25``, at least 0.8 and at most 1.25, where ``kl`` is
        the mean over all minibatches of the update (``train/kl_mean``), and the radius stays between 0.05 and 4. The
        geometric mean of ``kl`` over updates approaches ``desired_kl``. Late in a decaying learning rate, the rate limits
        the step and the radius grows to its bound
    :param check_finite: whether to raise if an environment returns NaN or Inf; False leaves them to a policy that handles them
    :raises ValueError: if an argument is out of range, the environment id is unknown, or a space is not supported
    :raises TypeError: if an argument is of the wrong type
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": ActorCriticPolicy,
        "CnnPolicy": ActorCriticCnnPolicy,
        "MultiInputPolicy": MultiInputActorCriticPolicy,
    }

    #: Default rollout buffers, the second one for Dict observations.
    _buffers: ClassVar[tuple[type[RolloutBuffer], type[RolloutBuffer]]] = (FlatRolloutBuffer, DictFlatRolloutBuffer)

    clip_range: FloatSchedule
    clip_range_high: FloatSchedule | None
    clip_range_vf: FloatSchedule | None
    desired_kl: FloatSchedule | None

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
        torch_compile: bool | Literal["auto"] = "auto",
        precision: Literal["float32", "bfloat16"] = "float32",
        desired_kl: float | str | Schedule | None = None,
        check_finite: bool = True,
    ):
        super().__init__(
            policy,
            make_env(env, verbose) if isinstance(env, str) else env,
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
        self.clip_range = schedules.as_schedule(clip_range, "clip_range")
        self.clip_range_high = None if clip_range_high is None else schedules.as_schedule(clip_range_high, "clip_range_high")
        self.clip_range_vf = None if clip_range_vf is None else schedules.as_schedule(clip_range_vf, "clip_range_vf")
        self.normalize_advantage = normalize_advantage
        self.target_kl = target_kl
        self.torch_compile = torch_compile
        self.precision = precision
        self.desired_kl = None if desired_kl is None else schedules.as_schedule(desired_kl, "desired_kl")
        #: What ``desired_kl`` has made of the radii: the current one is ``clip_range`` times this.
        self.radius_factor = 1.0
        self.check_finite = check_finite
        self.n_skipped_minibatches = 0
        for name, schedule in self._radii().items():
            schedules.require_positive(schedule, name)

        if _init_setup_model:
            self._setup_model()

    def __repr__(self) -> str:
        radii = (f"{name}={schedules.shown(radius)}" for name, radius in self._radii().items())
        return f"{type(self).__name__}({', '.join(radii)})"

    def _get_policy_from_name(self, policy_name: str) -> type[BasePolicy]:
        if policy_name not in self.policy_aliases:
            raise ValueError(
                f"policy={policy_name!r} is unknown; allowed are {', '.join(self.policy_aliases)} and policy classes. "
                "Recurrent and maskable policies, as in sb3-contrib, are not supported"
            )
        return self.policy_aliases[policy_name]

    @staticmethod
    def _wrap_env(env: GymEnv | str, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        """Wrap an environment or that of an id; see SB3, whose ``DummyVecEnv`` is :class:`~sb3_ano.envs.DirectVecEnv` here."""
        if isinstance(env, str):
            env = make_env(env, verbose)
        validation.require_env(env)
        if isinstance(env, gym.Env):
            single = env if is_wrapped(env, Monitor) or not monitor_wrapper else Monitor(env)
            env = DirectVecEnv([lambda: single])
            if verbose >= 1:
                print("Wrapping the env in a DirectVecEnv.")
        elif verbose >= 1 and hasattr(env, "backend"):
            print(f"The environments run on backend {env.backend!r}.")
        return RolloutCollection._wrap_env(env, verbose, monitor_wrapper)

    def _radii(self) -> dict[str, FloatSchedule]:
        """The radii that are set, by argument."""
        optional = {name: getattr(self, name) for name in ("clip_range_high", "clip_range_vf", "desired_kl")}
        return {"clip_range": self.clip_range, **{name: radius for name, radius in optional.items() if radius is not None}}

    def _check_arguments(self) -> None:
        """Check the arguments, which are attributes that a user or SB3's ``load`` may have changed.

        :raises ValueError: if one is out of range
        :raises TypeError: if one is of the wrong type
        """
        validation.require_arguments(self)
        for name, radius in self._radii().items():
            setattr(self, name, schedules.as_schedule(radius, name))

    def _setup_model(self) -> None:
        if not hasattr(self, "observation_space"):
            raise TypeError("env=None is not allowed; allowed are a registered id, a Gymnasium environment, and a VecEnv")
        self._check_arguments()
        learning_rate = schedules.as_schedule(self.learning_rate, "learning_rate")
        if isinstance(self.learning_rate, str):
            self.learning_rate = learning_rate
        validation.require_batches(self)
        if self.rollout_buffer_class is None:
            self.rollout_buffer_class = self._default_buffer()
        self._step: MinibatchStep | None = None
        super()._setup_model()
        self._prepare_policy()

    def _default_buffer(self) -> type[RolloutBuffer]:
        return self._buffers[isinstance(self.observation_space, spaces.Dict)]

    def _prepare_policy(self) -> None:
        distribution = self.policy.action_dist
        if isinstance(distribution, MultiCategoricalDistribution):
            # The compiler takes no NumPy integers.
            distribution.action_dims = [int(size) for size in distribution.action_dims]
        if self.precision == "float32":
            return
        custom = customization(self.policy)
        if custom is not None:
            warnings.warn(f"precision='bfloat16' has no effect, because {custom}", stacklevel=4)
        elif not has_native_bfloat16(self.device):
            warnings.warn(
                f"precision='bfloat16': {self.device} computes bfloat16 without instructions of its own, which is slower than "
                "float32",
                stacklevel=4,
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

    def _has_stock_loss(self) -> bool:
        """Whether ``policy_loss`` is this package's own code."""
        return type(self).policy_loss.__module__.startswith("sb3_ano.algorithms.") and "policy_loss" not in vars(self)

    def _is_last_epoch(self, statistics: UpdateStatistics) -> bool:
        """Whether the epoch that has just ended is to be the last one of this update."""
        return False

    def _update_current_progress_remaining(self, num_timesteps: int, total_timesteps: int) -> None:
        # The last rollout may overshoot; a negative progress would make linear learning rates climb the loss.
        self._current_progress_remaining = max(0.0, 1.0 - num_timesteps / total_timesteps)

    def train(self) -> None:
        """Update the policy on the current rollout (Algorithm 1 of the paper, lines 10 to 22)."""
        self._check_arguments()
        self.policy.set_training_mode(True)
        schedules.read(self.lr_schedule, self._current_progress_remaining, "learning_rate")  # before it reaches the optimizer
        self._update_learning_rate(self.policy.optimizer)
        step = self._ready_step()
        statistics = UpdateStatistics(step.region)
        minibatches = self._minibatches()
        try:
            with tracing() if step.compiled else contextlib.nullcontext():
                for epoch in range(self.n_epochs):
                    statistics.start_epoch()
                    step.start_epoch()
                    stopped = self._train_epoch(epoch, minibatches(), step, statistics)
                    self._n_updates += 1
                    if stopped or self._is_last_epoch(statistics):
                        break
        finally:  # an interrupted update leaves an optimizer that can be saved
            step.end()
        self._report_skipped(step, statistics)
        summary = statistics.summary()
        self._log_update(step, summary)
        self._adapt_radius(step.region.eps_low.item(), summary["kl_mean"])

    def _train_epoch(
        self, epoch: int, minibatches: Iterator[_Minibatch], step: MinibatchStep, statistics: UpdateStatistics
    ) -> bool:
        """One pass over the rollout; True if ``target_kl`` ended it."""
        for rollout, indices in minibatches:
            result = step(rollout, indices)
            statistics.add(result, indices)
            if self.target_kl is not None and bool(result.stop):
                if self.verbose >= 1:
                    kl = approximate_kl(result.log_ratio).item()
                    print(f"Early stopping in epoch {epoch}: the KL of a minibatch reached {kl:.2f}")
                return True
        return False

    def _minibatches(self) -> Callable[[], Iterator[_Minibatch]]:
        """A function that goes once through the rollout, in random order.

        It yields the rollout and the indices of each minibatch; or, of a buffer that takes samples in its own way, its
        minibatches and None.
        """
        buffer = self.rollout_buffer
        custom = not isinstance(buffer, FlatRolloutBuffer) or any(
            name in vars(buffer) or getattr(type(buffer), name) is not getattr(FlatRolloutBuffer, name)
            for name in ("get", "_get_samples")
        )
        if custom:
            return lambda: ((samples, None) for samples in buffer.get(self.batch_size))
        if not buffer.full:
            raise ValueError(
                f"the rollout buffer holds {buffer.pos} of {buffer.buffer_size} steps; collect a whole rollout first"
            )
        rollout = cast(FlatRolloutBuffer, buffer).tensors()

        def epoch() -> Iterator[_Minibatch]:
            order = torch.from_numpy(np.random.permutation(buffer.buffer_size * buffer.n_envs)).to(self.device)
            yield from ((rollout, indices) for indices in order.split(self.batch_size))

        return epoch

    def _ready_step(self) -> MinibatchStep:
        """The step for this update: the last one if it can go on, with the numbers of the current progress."""
        settings = StepSettings(
            clip_value=self.clip_range_vf is not None,
            normalize_advantage=self.normalize_advantage,
            discrete=isinstance(self.action_space, spaces.Discrete),
            precision=self.precision,
            stock_loss=self._has_stock_loss(),
        )
        compiled = self._compiles()
        if self._step is None or not self._step.serves(self.policy, self.policy_loss, settings, compiled):
            self._step = MinibatchStep(self.policy, self.policy_loss, settings, compiled)
            if self._step.compiled and self.verbose >= 1:
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
        self._step.begin((low * self.radius_factor, high * self.radius_factor), coefficients)
        return self._step

    def _adapt_radius(self, radius: float, kl: float) -> None:
        """Adapt the radii of the next update to ``desired_kl``; the paper's conclusion leaves such radii to future work.

        :param radius: radius below 1 of the update that has just ended
        :param kl: its mean KL divergence from the rollout's policy
        """
        if self.desired_kl is None:
            return
        target = schedules.read(self.desired_kl, self._current_progress_remaining, "desired_kl")
        growth = (max(target, 0.0) / kl) ** 0.25 if kl > 0.0 else math.inf
        adapted = radius * min(max(growth, _SLOWEST), _FASTEST)
        self.radius_factor *= min(max(adapted, RADIUS_BOUNDS[0]), RADIUS_BOUNDS[1]) / radius

    def _compiles(self) -> bool:
        """Whether the update is to be compiled: as asked for, or for "auto" where the run is long enough to pay for it."""
        if self.torch_compile != "auto":
            return bool(self.torch_compile)
        minibatches = (self._total_timesteps - self._num_timesteps_at_start) * self.n_epochs / self.batch_size
        products = self.batch_size * sum(parameter.numel() for parameter in self.policy.parameters())
        return minibatches * (SAVED_SECONDS + SAVED_SECONDS_PER_PRODUCT * products) >= COMPILE_SECONDS

    def _report_skipped(self, step: MinibatchStep, statistics: UpdateStatistics) -> None:
        """Count the minibatches of this update that were skipped, warn of the first one ever, and raise if none was left."""
        skipped = statistics.skipped()
        if not skipped:
            return
        result, indices = statistics.recorded(skipped[-1])
        rollout = None if indices is None else self.rollout_buffer.tensors()  # type: ignore[attr-defined]
        culprits = ", ".join(step.not_finite(result, rollout, indices))
        if len(skipped) == len(statistics):
            raise FloatingPointError(
                f"all {len(skipped)} minibatches of the update after {self.num_timesteps} steps were skipped, the last "
                f"because it is not finite in: {culprits}. Look at the scale of rewards and observations, or lower "
                "learning_rate"
            )
        if self.n_skipped_minibatches == 0:
            warnings.warn(
                f"a minibatch was skipped after {self.num_timesteps} steps, because it is not finite in: {culprits}. "
                "Parameters and optimizer are as before it; train/skipped_minibatches counts further ones",
                stacklevel=3,
            )
        self.n_skipped_minibatches += len(skipped)

    def _log_update(self, step: MinibatchStep, summary: dict[str, float]) -> None:
        for name, value in summary.items():
            self.logger.record(f"train/{name}", value)
        buffer = self.rollout_buffer
        self.logger.record("train/explained_variance", explained_variance(buffer.values.flatten(), buffer.returns.flatten()))
        if hasattr(self.policy, "log_std"):
            self.logger.record("train/std", self.policy.log_std.exp().mean().item())
        self.logger.record("train/skipped_minibatches", self.n_skipped_minibatches)
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("train/clip_range", step.region.eps_low.item())
        if self.clip_range_high is not None:
            self.logger.record("train/clip_range_high", step.region.eps_high.item())
        if self.clip_range_vf is not None:
            self.logger.record("train/clip_range_vf", step.coefficients.clip_range_vf.item())

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

        :raises ValueError: if ``total_timesteps`` or a changed attribute is out of range, or there is no environment
        :raises TypeError: if ``total_timesteps`` or a changed attribute is of the wrong type
        """
        validation.require_training(self, total_timesteps)
        return super().learn(
            total_timesteps=total_timesteps,
            callback=callback,
            log_interval=log_interval,
            tb_log_name=tb_log_name or type(self).__name__,
            reset_num_timesteps=reset_num_timesteps,
            progress_bar=progress_bar,
        )

    def get_parameters(self) -> dict[str, dict]:
        """Parameters of policy and optimizer; see SB3. Copies, because the originals are views of one vector."""
        # Layers that the policy names twice are stored once; what an optimizer keeps for each parameter stays apart.
        return {name: _unshared(state, {} if name == "policy" else None) for name, state in super().get_parameters().items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_step": None}

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_step"]

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
        unknown = set(kwargs) - set(saved.attributes) - set(inspect.signature(cls.__init__).parameters)
        if unknown:
            raise TypeError(
                f"{cls.__name__}.load got the unknown arguments {sorted(unknown)}; allowed are those of {cls.__name__}"
            )
        kwargs |= cls._restored_arguments(saved, {**(custom_objects or {}), **kwargs})
        # _wrap_env takes ids, too.
        return super().load(path, env, device, custom_objects, print_system_info, force_reset, **kwargs)  # type: ignore[arg-type]

    @classmethod
    def _restored_arguments(cls, saved: SavedModel, replacements: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the constructor that SB3's format does not bring back by itself.

        :param replacements: attributes that the caller sets in place of the saved ones
        """
        return {}


def _unshared(state: Any, copies: dict[tuple, torch.Tensor] | None) -> Any:
    """The same nested state with tensors that own their memory.

    :param copies: those made so far, by what they are copies of, to be used again for the same; None makes one for each
    """
    if isinstance(state, torch.Tensor):
        if copies is None:
            return state.detach().clone()
        place = (state.device, state.data_ptr(), state.dtype, state.shape, state.stride())
        if place not in copies:
            copies[place] = state.detach().clone()
        return copies[place]
    if isinstance(state, dict):
        unshared = copy.copy(state)  # with its attributes, such as the versions of the modules of a state dict
        unshared.update((key, _unshared(value, copies)) for key, value in state.items())
        return unshared
    if isinstance(state, list):
        return [_unshared(value, copies) for value in state]
    return state
