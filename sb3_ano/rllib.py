"""ANO on Ray RLlib: a learner with this package's surrogate, and agents back to Stable-Baselines3.

``ANOConfig`` stands where RLlib's ``PPOConfig`` would; :func:`to_sb3` brings what was trained with it home.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.vec_env import unwrap_vec_normalize

from sb3_ano.algorithms import ANO
from sb3_ano.algorithms.schedules import adapted_radius
from sb3_ano.envs import VecNormalize
from sb3_ano.extras import needs_extra
from sb3_ano.shaping import MIN_RADIUS, ShapingLike, as_pair, is_importable, name_of, require_trainable, surrogate

with needs_extra("rllib"):
    from ray.rllib.algorithms import Algorithm
    from ray.rllib.algorithms.ppo import PPO, PPOConfig
    from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
    from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
    from ray.rllib.connectors.env_to_module import MeanStdFilter
    from ray.rllib.core import DEFAULT_MODULE_ID
    from ray.rllib.core.columns import Columns
    from ray.rllib.core.learner.learner import POLICY_LOSS_KEY
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.env import INPUT_ENV_SINGLE_SPACES
    from ray.rllib.models.utils import get_activation_fn
    from ray.rllib.utils.filter import RunningStat
    from ray.rllib.utils.from_config import NotProvided
    from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME
    from ray.rllib.utils.schedules.scheduler import Scheduler

#: A number, or points ``[environment steps, number]`` of a piecewise linear schedule.
Schedule: TypeAlias = float | Sequence[Sequence[float]]

# RLlib's name of a column.
_ADVANTAGES = "advantages"
# Connectors that change neither observations nor actions, but for what to_sb3 does itself.
_DEFAULT_CONNECTORS = (
    "AddObservationsFromEpisodesToBatch",
    "AddTimeDimToBatchAndZeroPad",
    "AddStatesFromEpisodesToBatch",
    "BatchIndividualItems",
    "NumpyToTensor",
    "GetActions",
    "TensorToNumpy",
    "UnBatchToIndividualItems",
    "RemoveSingleTsTimeRankFromBatch",
    "NormalizeAndClipActions",
    "ListifyDataForVectorEnv",
)
# RLlib's names of settings by the names in ANO.
_SETTINGS = {
    "clip_range": "clip_param",
    "clip_range_high": "clip_range_high",
    "desired_kl": "desired_kl",
    "ent_coef": "entropy_coeff",
    "gae_lambda": "lambda_",
    "gamma": "gamma",
    "learning_rate": "lr",
    "max_grad_norm": "grad_clip",
    "n_epochs": "num_epochs",
    "vf_coef": "vf_loss_coeff",
}


class ANOConfig(PPOConfig):
    """Configure ANO on RLlib: the settings of its ``PPOConfig``, with a shaping function instead of the clip.

    ``clip_param`` is the radius of the trust region, a number or a schedule ``[[0, 0.2], [1_000_000, 0.05]]`` of environment
    steps. RLlib's penalty of the KL divergence is off unless ``use_kl_loss=True`` turns it on: two trust regions would
    work against each other. Everything else is RLlib's, its defaults included.
    """

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class or ANOAlgorithm)
        # RLlib's default is True.
        self.use_kl_loss = False
        self.shaping: ShapingLike = "ano"
        self.clip_range_high: Schedule | None = None
        self.desired_kl: Schedule | None = None

    def training(
        self,
        *,
        shaping: ShapingLike = NotProvided,
        clip_range_high: Schedule | None = NotProvided,
        desired_kl: Schedule | None = NotProvided,
        **options: object,
    ) -> "ANOConfig":
        """Set the settings of the training.

        :param shaping: shape as for :class:`~sb3_ano.ANO`; functions travel to the learners by their names, so every
            node needs their modules
        :param clip_range_high: radius above 1, for positive advantages; None takes ``clip_param`` for both
        :param desired_kl: KL divergence per update that the radii are adapted to, as in :class:`~sb3_ano.ANO`, or None
        :param options: settings of RLlib's ``PPOConfig.training``
        """
        super().training(**options)

        # None is a value of the last two.
        if shaping is not NotProvided:
            self.shaping = shaping
        if clip_range_high is not NotProvided:
            self.clip_range_high = clip_range_high
        if desired_kl is not NotProvided:
            self.desired_kl = desired_kl
        return self

    def get_default_learner_class(self) -> type:
        """Return the learner of ANO."""
        return ANOLearner

    def validate(self) -> None:
        """Check the settings; called when the algorithm is built.

        :raises ValueError: if a setting is not allowed
        """
        if not (self.enable_rl_module_and_learner and self.enable_env_runner_and_connector_v2):
            raise ValueError("RLlib's old API stack is not supported; leave api_stack() as it is")
        super().validate()

        # The shape
        require_trainable(self.shaping)
        if not is_importable(self.shaping):
            raise ValueError(f"shaping={name_of(self.shaping)!r} cannot be imported by its name, as the learners do")

        # The radii, and what adapts them
        _check_schedule(self.clip_param, "clip_param")
        if self.clip_range_high is not None:
            _check_schedule(self.clip_range_high, "clip_range_high")
        if self.desired_kl is None:
            return
        _check_schedule(self.desired_kl, "desired_kl")
        radii = {"clip_param": self.clip_param, "clip_range_high": self.clip_range_high}
        for name, radius in radii.items():
            if isinstance(radius, list | tuple):
                raise ValueError(f"{name} is a schedule, which desired_kl would work against; allowed is a number")


def _check_schedule(value: Any, name: str) -> None:
    """Check a number or a schedule of RLlib's."""
    Scheduler.validate(
        fixed_value_or_schedule=value,
        setting_name=name,
        description=name,
    )
    numbers = [value]
    if isinstance(value, list | tuple):
        numbers = [point[1] for point in value]

    # A schedule may end at 0, but not begin there.
    message = f"{name}={value!r} is not allowed; allowed are positive numbers and schedules of them"
    for number in numbers:
        if not isinstance(number, int | float) or not 0 <= number < math.inf:
            raise ValueError(message)
    if numbers[0] == 0:
        raise ValueError(message)


class ANOAlgorithm(PPO):
    """RLlib's PPO with :class:`ANOConfig`, which Ray Tune merges its settings into."""

    @classmethod
    def get_default_config(cls) -> ANOConfig:
        """Return the default settings."""
        return ANOConfig()


class _TrustRegion:
    """The shape and the radii of a module, and what its minibatches showed since the last update.

    :param config: settings of the module
    :param device: device of the schedules
    """

    def __init__(self, config: ANOConfig, device: torch.device) -> None:
        high = config.clip_param if config.clip_range_high is None else config.clip_range_high
        self.shape = as_pair(config.shaping)
        self.low = Scheduler(config.clip_param, device=device)
        self.high = Scheduler(high, device=device)
        self.desired_kl = Scheduler(config.desired_kl, device=device)
        #: Factor of both radii that desired_kl has led to.
        self.factor = 1.0
        #: Mean KL divergence and largest ratio of each minibatch.
        self.seen: list[torch.Tensor] = []

        # RLlib's loss reads the radius as a number, whose value does not matter at a ratio of 1.
        self.config = config.copy(copy_frozen=False)
        self.config.clip_param = 1.0

    def radius(self, schedule: Scheduler) -> float:
        """Return the radius of a schedule at the current step."""
        return max(float(schedule.get_current_value()), MIN_RADIUS) * self.factor


class ANOLearner(PPOTorchLearner):
    """Update modules with RLlib's PPO loss, whose surrogate is replaced by that of Definition 3.2."""

    def build(self) -> None:
        """Build the learner, see RLlib."""
        self._regions: dict[str, _TrustRegion] = {}
        super().build()

    def _region(self, module_id: str) -> _TrustRegion:
        # Modules can be added to an algorithm that runs.
        if module_id not in self._regions:
            config = self.config.get_config_for_module(module_id)
            self._regions[module_id] = _TrustRegion(config, self._device)
        return self._regions[module_id]

    def compute_loss_for_module(
        self,
        *,
        module_id: str,
        config: PPOConfig,
        batch: dict[str, Any],
        fwd_out: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """Compute the loss of a minibatch, a scalar; see RLlib."""
        region = self._region(module_id)
        kind = self.module[module_id].unwrapped().get_train_action_dist_cls()
        distribution = kind.from_logits(fwd_out[Columns.ACTION_DIST_INPUTS])
        log_prob = distribution.logp(batch[Columns.ACTIONS])

        # With a ratio of 1 and advantages of 0, RLlib's loss is the sum of all its other terms, whatever the ratio really is.
        neutral = dict(batch)
        neutral[Columns.ACTION_LOGP] = log_prob.detach()
        neutral[_ADVANTAGES] = torch.zeros_like(batch[_ADVANTAGES])
        others = super().compute_loss_for_module(
            module_id=module_id,
            config=region.config,
            batch=neutral,
            fwd_out=fwd_out,
        )

        old_log_prob = batch[Columns.ACTION_LOGP]
        log_ratio = log_prob - old_log_prob
        advantages = batch[_ADVANTAGES]
        # Sequences of recurrent modules are padded.
        if Columns.LOSS_MASK in batch:
            log_ratio = log_ratio[batch[Columns.LOSS_MASK]]
            advantages = advantages[batch[Columns.LOSS_MASK]]
            old_log_prob = old_log_prob[batch[Columns.LOSS_MASK]]
        objective = surrogate(
            log_ratio,
            advantages,
            region.shape,
            eps_low=region.radius(region.low),
            eps_high=region.radius(region.high),
            old_log_prob=old_log_prob,
        ).mean()

        # The means over an update are logged after it.
        ratio = log_ratio.detach().exp()
        kl = ratio - 1 - log_ratio.detach()
        region.seen.append(torch.stack([kl.mean(), ratio.max()]))
        self.metrics.log_value((module_id, POLICY_LOSS_KEY), -objective.detach(), window=1)
        return others - objective

    def before_gradient_based_update(self, *, timesteps: dict[str, int]) -> None:
        """Read the schedules at the current step, see RLlib."""
        super().before_gradient_based_update(timesteps=timesteps)
        # The key is absent before the first samples.
        step = timesteps.get(NUM_ENV_STEPS_SAMPLED_LIFETIME, 0)
        for module_id in self.module.keys():  # noqa: SIM118 (it is no mapping)
            region = self._region(module_id)
            region.low.update(step)
            region.high.update(step)
            region.desired_kl.update(step)

    def after_gradient_based_update(self, *, timesteps: dict[str, int]) -> None:
        """Log the diagnostics of the update, and adapt the radii; see RLlib."""
        super().after_gradient_based_update(timesteps=timesteps)
        for module_id, region in self._regions.items():
            # A module that was not updated
            if not region.seen:
                continue
            seen = torch.stack(region.seen)
            region.seen = []

            # Over all learners, whose radii must stay equal
            kl = seen[:, 0].mean()
            if torch.distributed.is_initialized():
                torch.distributed.all_reduce(kl)
                kl /= torch.distributed.get_world_size()

            low = region.radius(region.low)
            ratio_max = seen[:, 1].max().item()
            self.metrics.log_value((module_id, "kl_mean"), kl.item(), window=1)
            self.metrics.log_value((module_id, "clip_range"), low, window=1)
            self.metrics.log_value((module_id, "ratio_max"), ratio_max, reduce="max", window=1)

            # Both radii keep their proportion.
            desired_kl = region.desired_kl.get_current_value()
            if desired_kl is not None:
                region.factor *= adapted_radius(low, kl.item(), float(desired_kl)) / low

    def get_state(self, *arguments: object, **options: object) -> dict[str, Any]:
        """Return the state of a checkpoint, see RLlib."""
        state = super().get_state(*arguments, **options)
        factors = {module_id: region.factor for module_id, region in self._regions.items()}
        return {**state, "radius_factors": factors}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint, see RLlib."""
        super().set_state(state)
        for module_id, factor in state.get("radius_factors", {}).items():
            self._region(module_id).factor = factor


def to_sb3(
    source: Algorithm | str | os.PathLike[str],
    env: GymEnv | str | None = None,
    device: torch.device | str = "auto",
) -> ANO:
    """Convert an agent of RLlib to one of Stable-Baselines3, which acts and values as it did.

    RLlib's default networks of fully connected layers are converted; with ``vf_share_layers``, the shared layers become two
    copies. Continuous actions need ``free_log_std=True`` in RLlib's model configuration, because the standard deviations
    of SB3's MlpPolicy do not depend on the observation. A MeanStdFilter becomes a VecNormalize, whose statistics stay as they
    are until its ``training`` is set.

    :param source: algorithm of RLlib, trained with :class:`ANOConfig` or ``PPOConfig``; or path of its checkpoint, whose
        pickles can run any code of their author
    :param env: environments for the agent, or the id of one; None makes that of the algorithm if it has an id, and otherwise
        leaves the agent with an environment that cannot be stepped
    :param device: device of the agent
    :raises ValueError: if a part of the agent cannot be converted; the message names it
    """
    if isinstance(source, str | os.PathLike):
        algorithm = Algorithm.from_checkpoint(os.path.abspath(source))
        # Its environment runners are actors of Ray.
        try:
            return to_sb3(algorithm, env, device)
        finally:
            algorithm.stop()

    # Parts that cannot be converted come first.
    networks = _Networks(source)
    has_filter = _filter(source) is not None

    config = source.config
    venv = ANO._wrap_env(_environment(source) if env is None else env)
    if has_filter and unwrap_vec_normalize(venv) is None:
        venv = VecNormalize(venv)

    settings: dict[str, Any] = {}
    for name, rllib_name in _SETTINGS.items():
        # The first value of a schedule; PPOConfig lacks some settings.
        value = getattr(config, rllib_name, None)
        if isinstance(value, list | tuple):
            value = value[0][1]
        settings[name] = value
    settings["max_grad_norm"] = settings["max_grad_norm"] or math.inf

    # RLlib's minibatches are those of a learner.
    learners = config.num_learners or 1
    rollout = config.total_train_batch_size
    minibatch = config.minibatch_size or rollout // learners
    # SB3 requires two steps.
    model = ANO(
        "MlpPolicy",
        venv,
        n_steps=max(rollout // venv.num_envs, 2),
        batch_size=minibatch * learners,
        **settings,
        shaping=getattr(config, "shaping", "ppo"),
        policy_kwargs={
            "net_arch": networks.net_arch,
            "activation_fn": networks.activation,
        },
        device=device,
    )
    _copy_to_sb3(source, networks, model)
    return model


def _copy_to_sb3(source: Algorithm, networks: "_Networks", model: ANO) -> None:
    """Copy the networks of an agent of RLlib, the statistics of its observations, and its number of steps."""
    model.policy.load_state_dict(networks.as_sb3())
    steps = source.metrics.peek((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), default=0)
    model.num_timesteps = int(steps)

    statistics = _filter(source)
    venv = model.get_vec_normalize_env()
    if statistics is None or venv is None:
        return

    # There is one agent, whose id is None.
    state = statistics.get_state()[None]
    stats = RunningStat.from_state(state["running_stats"][0])
    rms: Any = venv.obs_rms
    rms.count = stats.n
    rms.mean = np.zeros_like(stats.mean)
    rms.var = np.ones_like(stats.mean)
    if statistics.de_mean_to_zero:
        rms.mean = stats.mean
    if statistics.de_std_to_one:
        # RLlib adds 1e-8 to the standard deviation, VecNormalize epsilon to the variance.
        rms.var = (stats.std.astype(float) + 1e-8) ** 2
    venv.epsilon = 0.0
    venv.clip_obs = statistics.clip_by_value or math.inf
    venv.training = False
    venv.norm_reward = False


class _Networks:
    """The layers of RLlib's default module, and their places in SB3's MlpPolicy.

    :param algorithm: algorithm of RLlib
    :raises ValueError: if SB3's MlpPolicy has no place for a part
    """

    def __init__(self, algorithm: Algorithm) -> None:
        self._config = algorithm.config
        if self._config.is_multi_agent or self._config.rl_module_spec.module_class is not DefaultPPOTorchRLModule:
            raise ValueError(f"RLlib's module {self._config.rl_module_spec} cannot be converted; allowed is its default")
        _, self._actions = algorithm.spaces[INPUT_ENV_SINGLE_SPACES]

        # RLlib keeps only what the user has set.
        self._model = asdict(DefaultModelConfig()) | self._config.model_config

        self._tensors: dict[str, torch.Tensor] = {}
        weights = algorithm.learner_group.get_weights([DEFAULT_MODULE_ID])
        for name, value in weights[DEFAULT_MODULE_ID].items():
            # Constants are no parameters.
            if not name.endswith("_const"):
                self._tensors[name] = torch.as_tensor(value)

        #: Names in RLlib by the names in SB3.
        self.names: dict[str, str] = {}
        if isinstance(self._actions, spaces.Box):
            self.names["log_std"] = "pi.log_std"

        # Shared layers get two places.
        actor, critic = "actor_encoder", "critic_encoder"
        if self._model["vf_share_layers"]:
            actor = critic = "encoder"
        #: Sizes of the hidden layers.
        self.net_arch = {
            "pi": self._place("policy_net", "action_net", f"encoder.{actor}.net.mlp.", "pi.net.mlp."),
            "vf": self._place("value_net", "value_net", f"encoder.{critic}.net.mlp.", "vf.net.mlp."),
        }

        # Parameters of one side that the other one lacks
        for name in set(self._tensors) ^ set(self.names.values()):
            hint = "; train with free_log_std=True" if name == "pi.log_std" else ""
            raise ValueError(f"SB3's MlpPolicy has no place for RLlib's module, which differs in {name}{hint}")

        # The activation of heads without layers does not matter.
        used = {self._model["fcnet_activation"]}
        if self._model["head_fcnet_hiddens"]:
            used.add(self._model["head_fcnet_activation"])
        if len(used) > 1:
            raise ValueError(f"RLlib's module has the activations {', '.join(sorted(used))}; SB3's MlpPolicy has one")
        self.activation = get_activation_fn(used.pop(), framework="torch") or torch.nn.Identity

    def _place(self, network: str, head: str, *prefixes: str) -> list[int]:
        """Place the layers of actor or critic, and return the sizes of the hidden ones."""
        layers = []
        for name, tensor in self._tensors.items():
            if name.startswith(prefixes) and tensor.ndim == 2:
                layers.append(name.removesuffix(".weight"))

        for index, layer in enumerate(layers):
            # SB3's hidden layers alternate with activations.
            place = head if index == len(layers) - 1 else f"mlp_extractor.{network}.{2 * index}"
            self.names[f"{place}.weight"] = f"{layer}.weight"
            self.names[f"{place}.bias"] = f"{layer}.bias"

        # The rows of a weight are the outputs of its layer.
        return [len(self._tensors[f"{layer}.weight"]) for layer in layers[:-1]]

    def as_sb3(self) -> dict[str, torch.Tensor]:
        """Return the state of SB3's policy, with actions in the units of the environment."""
        # Copies, which may be changed
        state = {}
        for place, name in self.names.items():
            state[place] = self._tensors[name].clone()
        if not isinstance(self._actions, spaces.Box):
            return state
        limit = self._model["log_std_clip_param"]
        state["log_std"].clamp_(-limit, limit)

        # RLlib maps actions from [-1, 1] to the bounds, which the last layer can do, too.
        if self._config.normalize_actions and self._actions.is_bounded():
            low = torch.as_tensor(self._actions.low, dtype=torch.float32)
            high = torch.as_tensor(self._actions.high, dtype=torch.float32)
            half = (high - low) / 2
            state["action_net.weight"] *= half.unsqueeze(1)
            state["action_net.bias"] = half * state["action_net.bias"] + low + half
            state["log_std"] += half.log()
        return state


def _environment(algorithm: Algorithm) -> gym.Env:
    """Make the environment if it has an id, or else one that has its spaces only."""
    config = algorithm.config
    if isinstance(config.env, str) and config.env in gym.registry:
        return gym.make(config.env, **config.env_config)
    # Enough for a policy, which needs the spaces only
    env: gym.Env = gym.Env()
    env.observation_space, env.action_space = algorithm.spaces[INPUT_ENV_SINGLE_SPACES]
    return env


def _filter(algorithm: Algorithm) -> MeanStdFilter | None:
    """Return the connector that normalizes observations, if there is one; the others must be RLlib's defaults."""
    pipelines = [algorithm.env_to_module_connector, algorithm.module_to_env_connector]
    # The environment runner of this process has connectors of its own, whose statistics are current.
    runner = algorithm.env_runner
    if runner is not None:
        pipelines = [runner._env_to_module, runner._module_to_env]

    found = None
    for pipeline in pipelines:
        for connector in pipeline.connectors:
            if type(connector) is MeanStdFilter:
                found = connector
            elif type(connector).__name__ not in _DEFAULT_CONNECTORS:
                name = type(connector).__name__
                raise ValueError(f"RLlib's connector {name} has no counterpart in SB3, only MeanStdFilter")
    return found
