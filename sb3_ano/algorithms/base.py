"""The algorithm that ANO, SPO and PAPO share: constructor, environments, files. training.py and rollout.py have the loops."""

import inspect
import io
import pathlib
import warnings
from typing import Any, ClassVar, Literal, Self, Unpack

import gymnasium as gym
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.distributions import MultiCategoricalDistribution
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.policies import ActorCriticCnnPolicy, ActorCriticPolicy, BasePolicy, MultiInputActorCriticPolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule
from stable_baselines3.common.vec_env import VecEnv

from sb3_ano.algorithms import schedules, validation
from sb3_ano.algorithms.arguments import PPOArguments, bound_arguments, inherit_signature
from sb3_ano.algorithms.buffers import DictFlatRolloutBuffer, FlatRolloutBuffer
from sb3_ano.algorithms.flat_adam import FlatAdam
from sb3_ano.algorithms.loading import SavedModel, read_saved_model, unshared
from sb3_ano.algorithms.policy_evaluation import customization, has_native_bfloat16
from sb3_ano.algorithms.training import TrainingMixin
from sb3_ano.algorithms.update import Updater
from sb3_ano.envs import DirectVecEnv, make_env


class ShapedPolicyAlgorithm(TrainingMixin):
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
    :param torch_compile: whether to compile the update with ``torch.compile``; ``"auto"`` does it if the run is long enough
        to pay for that, with SB3's defaults from 260,000 steps. Compiled or not, parameters are the same to rounding
    :param precision: ``"float32"``, or ``"bfloat16"`` for the layers of features extractor and networks; the heads, the
        distribution and the loss are computed in float32
    :param desired_kl: KL divergence per update that the radii are adapted to, or None for radii that follow ``clip_range``
        alone; a number, a schedule or ``"lin_0.01"``. ``clip_range`` is then the radius of the first update. After each
        update both radii are multiplied by ``(desired_kl / kl) ** 0.25``, at least 0.8 and at most 1.25, where ``kl`` is
        the mean over all minibatches of the update (``train/kl_mean``), and the radius stays between 0.05 and 4. The
        geometric mean of ``kl`` over updates approaches ``desired_kl``. Late in a decaying learning rate, the rate limits
        the step and the radius grows to its bound
    :param check_finite: whether to raise if an environment returns NaN or Inf; False leaves them to the policy
    :raises ValueError: if an argument is out of range, the environment id is unknown, or a space is not supported
    :raises TypeError: if an argument is of the wrong type
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": ActorCriticPolicy,
        "CnnPolicy": ActorCriticCnnPolicy,
        "MultiInputPolicy": MultiInputActorCriticPolicy,
    }

    # The arguments are read from PPO's own signature, so that they stay PPO's, in its order and with its defaults.
    @inherit_signature(PPO)
    def __init__(
        self,
        policy: str | type[ActorCriticPolicy],
        env: GymEnv | str,
        *args: Any,
        clip_range_high: float | str | Schedule | None = None,
        torch_compile: bool | Literal["auto"] = "auto",
        precision: Literal["float32", "bfloat16"] = "float32",
        desired_kl: float | str | Schedule | None = None,
        check_finite: bool = True,
        **arguments: Unpack[PPOArguments],
    ):
        options = bound_arguments(PPO, self, policy, env, *args, **arguments)
        self.batch_size = options.pop("batch_size")
        self.n_epochs = options.pop("n_epochs")
        self.normalize_advantage = options.pop("normalize_advantage")
        self.target_kl = options.pop("target_kl")
        clip_range, clip_range_vf = options.pop("clip_range"), options.pop("clip_range_vf")
        init_setup_model = options.pop("_init_setup_model")
        if isinstance(env, str):
            options["env"] = make_env(env, options["verbose"])
        super().__init__(**options, _init_setup_model=False)
        self.algorithm = type(self).__name__
        self.clip_range = schedules.as_schedule(clip_range, "clip_range")
        self.clip_range_high = None if clip_range_high is None else schedules.as_schedule(clip_range_high, "clip_range_high")
        self.clip_range_vf = None if clip_range_vf is None else schedules.as_schedule(clip_range_vf, "clip_range_vf")
        self.desired_kl = None if desired_kl is None else schedules.as_schedule(desired_kl, "desired_kl")
        self.torch_compile = torch_compile
        self.precision = precision
        self.check_finite = check_finite
        #: Factor by which ``desired_kl`` has changed the radii since the first update.
        self.radius_factor = 1.0
        self.n_skipped_minibatches = 0
        for name, schedule in self._radii().items():
            schedules.require_positive(schedule, name)
        if init_setup_model:
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
        """Wrap an environment, or make and wrap one of an id, as SB3 does, in :class:`~sb3_ano.envs.DirectVecEnv`."""
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
        return TrainingMixin._wrap_env(env, verbose, monitor_wrapper)

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
        self._updater: Updater | None = None
        super()._setup_model()
        FlatAdam.install(self.policy)
        distribution = self.policy.action_dist
        if isinstance(distribution, MultiCategoricalDistribution):
            # The compiler takes no NumPy integers.
            distribution.action_dims = [int(size) for size in distribution.action_dims]
        self._warn_of_precision()

    def _default_buffer(self) -> type[RolloutBuffer]:
        return DictFlatRolloutBuffer if isinstance(self.observation_space, spaces.Dict) else FlatRolloutBuffer

    def _warn_of_precision(self) -> None:
        if self.precision == "float32":
            return
        custom = customization(self.policy)
        if custom is not None:
            warnings.warn(f"precision='bfloat16' has no effect, because {custom}", stacklevel=4)
        elif not has_native_bfloat16(self.device):
            warnings.warn(
                f"precision='bfloat16': {self.device} has no instructions for bfloat16, which makes it slower than float32",
                stacklevel=4,
            )

    def _update_current_progress_remaining(self, num_timesteps: int, total_timesteps: int) -> None:
        # The last rollout may overshoot; a negative progress would make linear learning rates climb the loss.
        self._current_progress_remaining = max(0.0, 1.0 - num_timesteps / total_timesteps)

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
        """Return copies of the parameters of policy and optimizer; the originals are views of one vector, see SB3."""
        # A layer that the policy names twice is stored once; what an optimizer keeps for each parameter stays apart.
        return {name: unshared(state, {} if name == "policy" else None) for name, state in super().get_parameters().items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_updater": None}

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_updater"]

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
        """Return arguments of the constructor that SB3's format does not bring back by itself.

        :param saved: attributes of the file
        :param replacements: attributes that the caller sets instead of the saved ones
        """
        return {}
