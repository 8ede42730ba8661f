"""ANO on Ray RLlib: a learner with this package's surrogate, and agents back to Stable-Baselines3.

``ANOConfig`` stands where RLlib's ``PPOConfig`` would; :func:`to_sb3` brings what was trained with it home.
"""

import itertools
import math
import os
from dataclasses import asdict, dataclass, field
from typing import Any

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
from sb3_ano.shaping import MIN_RADIUS, ShapingLike, ShapingPair, as_pair, is_importable, name_of, require_trainable, surrogate

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

# RLlib's name of a column.
_ADVANTAGES = "advantages"
_DEFAULT_CONNECTORS = (
    *("AddObservationsFromEpisodesToBatch", "AddTimeDimToBatchAndZeroPad", "AddStatesFromEpisodesToBatch"),
    *("BatchIndividualItems", "NumpyToTensor", "GetActions", "TensorToNumpy", "UnBatchToIndividualItems"),
    *("RemoveSingleTsTimeRankFromBatch", "NormalizeAndClipActions", "ListifyDataForVectorEnv"),
)
#: RLlib's names of settings by the names in :class:`~sb3_ano.ANO`.
SETTINGS = {name: name for name in ("clip_range_high", "desired_kl", "gamma")} | {
    **{"learning_rate": "lr", "clip_range": "clip_param", "n_epochs": "num_epochs", "gae_lambda": "lambda_"},
    **{"ent_coef": "entropy_coeff", "vf_coef": "vf_loss_coeff", "max_grad_norm": "grad_clip"},
}


class ANOConfig(PPOConfig):
    """Configure ANO on RLlib: the settings of its ``PPOConfig``, with a shaping function instead of the clip.

    ``clip_param`` is the radius of the trust region, a number or a schedule ``[[0, 0.2], [1_000_000, 0.05]]`` of environment
    steps. RLlib's penalty of the KL divergence is off unless ``use_kl_loss=True`` turns it on: two trust regions would
    work against each other. Everything else is RLlib's, its defaults included.
    """

    def __init__(self, algo_class: Any = None) -> None:
        super().__init__(algo_class or ANOAlgorithm)
        self.use_kl_loss = False
        self.shaping: ShapingLike = "ano"
        self.clip_range_high: Any = None
        self.desired_kl: Any = None

    def training(
        self, *, shaping: Any = NotProvided, clip_range_high: Any = NotProvided, desired_kl: Any = NotProvided, **options: Any
    ) -> "ANOConfig":
        """Set the settings of the training.

        :param shaping: shape as for :class:`~sb3_ano.ANO`; functions travel to the learners by their names, so every
            node needs their modules
        :param clip_range_high: radius above 1, for positive advantages; None takes ``clip_param`` for both
        :param desired_kl: KL divergence per update that the radii are adapted to, as in :class:`~sb3_ano.ANO`, or None
        :param options: settings of RLlib's ``PPOConfig.training``
        """
        super().training(**options)
        own = {"shaping": shaping, "clip_range_high": clip_range_high, "desired_kl": desired_kl}
        self.__dict__.update({name: value for name, value in own.items() if value is not NotProvided})
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
        require_trainable(self.shaping)
        if not is_importable(self.shaping):
            raise ValueError(f"shaping={name_of(self.shaping)!r} cannot be imported by its name, as the learners do")
        for name in ("clip_param", "clip_range_high", "desired_kl"):
            if name == "clip_param" or getattr(self, name) is not None:
                _check_schedule(getattr(self, name), name)
        for name in ("clip_param", "clip_range_high"):
            if self.desired_kl is not None and isinstance(getattr(self, name), list | tuple):
                raise ValueError(f"{name} is a schedule, which desired_kl would work against; allowed is a number")


def _check_schedule(value: Any, name: str) -> None:
    """Check a number or a schedule of RLlib's."""
    Scheduler.validate(fixed_value_or_schedule=value, setting_name=name, description=name)
    numbers = [point[1] for point in value] if isinstance(value, list | tuple) else [value]
    if not all(isinstance(each, int | float) and 0 <= each < math.inf for each in numbers) or numbers[0] == 0:
        raise ValueError(f"{name}={value!r} is not allowed; allowed are positive numbers and schedules of them")


class ANOAlgorithm(PPO):
    """RLlib's PPO with :class:`ANOConfig`, which Ray Tune merges its settings into."""

    @classmethod
    def get_default_config(cls) -> ANOConfig:
        """Return the default settings."""
        return ANOConfig()


@dataclass
class _TrustRegion:
    """The shape and the radii of a module, and what its minibatches showed since the last update.

    RLlib's loss reads ``clip_param`` as a number: that of ``config``, whose value does not matter at a ratio of 1.
    """

    config: Any
    shape: ShapingPair
    low: Scheduler
    high: Scheduler
    desired_kl: Scheduler
    factor: float = 1.0
    # Mean KL divergence, fraction of the gradient that PPO would discard, and largest ratio of each minibatch
    seen: list[torch.Tensor] = field(default_factory=list)

    def radii(self) -> tuple[float, float]:
        low, high = (max(float(radius.get_current_value()), MIN_RADIUS) * self.factor for radius in (self.low, self.high))
        return low, high

    def observe(self, log_ratio: torch.Tensor, advantages: torch.Tensor, gradient: torch.Tensor) -> None:
        ratio, (low, high) = log_ratio.exp(), self.radii()
        clipped = torch.where(advantages >= 0, ratio > 1 + high, ratio < 1 - low)
        discarded = (gradient * clipped).sum() / gradient.sum().clamp(min=1e-30)
        self.seen.append(torch.stack([(ratio - 1 - log_ratio).mean(), discarded, ratio.max()]))


class ANOLearner(PPOTorchLearner):
    """Update modules with RLlib's PPO loss, whose surrogate is replaced by that of Definition 3.2."""

    def build(self) -> None:
        """Build the learner, see RLlib."""
        self._regions: dict[str, _TrustRegion] = {}
        super().build()

    def _region(self, module_id: str) -> _TrustRegion:
        if module_id not in self._regions:
            config: Any = self.config.get_config_for_module(module_id).copy(copy_frozen=False)
            high = config.clip_param if config.clip_range_high is None else config.clip_range_high
            schedules = [Scheduler(value, device=self._device) for value in (config.clip_param, high, config.desired_kl)]
            config.clip_param = 1.0
            self._regions[module_id] = _TrustRegion(config, as_pair(config.shaping), *schedules)
        return self._regions[module_id]

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: dict[str, Any], fwd_out: dict[str, Any]) -> Any:
        """Compute the loss of a minibatch, a scalar; see RLlib."""
        region = self._region(module_id)
        kind = self.module[module_id].unwrapped().get_train_action_dist_cls()
        log_prob = kind.from_logits(fwd_out[Columns.ACTION_DIST_INPUTS]).logp(batch[Columns.ACTIONS])
        # With a ratio of 1 and advantages of 0, RLlib's loss is the sum of all its other terms, whatever the ratio really is.
        neutral = {Columns.ACTION_LOGP: log_prob.detach(), _ADVANTAGES: torch.zeros_like(batch[_ADVANTAGES])}
        batch_of_others = {"batch": {**batch, **neutral}, "fwd_out": fwd_out}
        others = super().compute_loss_for_module(module_id=module_id, config=region.config, **batch_of_others)
        log_ratio, advantages = log_prob - batch[Columns.ACTION_LOGP], batch[_ADVANTAGES]
        if Columns.LOSS_MASK in batch:
            log_ratio, advantages = log_ratio[batch[Columns.LOSS_MASK]], advantages[batch[Columns.LOSS_MASK]]
        low, high = region.radii()
        objective = surrogate(log_ratio, advantages, region.shape, eps_low=low, eps_high=high)
        if log_ratio.requires_grad:  # a frozen module has no gradient
            (gradient,) = torch.autograd.grad(objective.sum(), log_ratio, retain_graph=True)
            region.observe(log_ratio.detach(), advantages, gradient.abs())
        self.metrics.log_value((module_id, POLICY_LOSS_KEY), -objective.mean().detach(), window=1)
        return others - objective.mean()

    def before_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        """Read the schedules at the current step, see RLlib."""
        super().before_gradient_based_update(timesteps=timesteps)
        for module_id in self.module.keys():  # noqa: SIM118 (it is no mapping)
            region = self._region(module_id)
            for schedule in (region.low, region.high, region.desired_kl):
                schedule.update(timesteps.get(NUM_ENV_STEPS_SAMPLED_LIFETIME, 0))

    def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        """Log the diagnostics of the update, and adapt the radii; see RLlib."""
        super().after_gradient_based_update(timesteps=timesteps)
        for module_id, region in self._regions.items():
            if not region.seen:
                continue
            rows, low, target = torch.stack(region.seen), region.radii()[0], region.desired_kl.get_current_value()
            region.seen, means = [], rows.mean(0)
            if torch.distributed.is_initialized():  # over all learners, whose radii must stay equal
                torch.distributed.all_reduce(means)
                means /= torch.distributed.get_world_size()
            kl, discarded, _ = means.tolist()
            for name, value in {"kl_mean": kl, "ppo_discarded_gradient": discarded, "clip_range": low}.items():
                self.metrics.log_value((module_id, name), value, window=1)
            self.metrics.log_value((module_id, "ratio_max"), float(rows[:, 2].max()), reduce="max", window=1)
            if target is not None:
                region.factor *= adapted_radius(low, kl, float(target)) / low

    def get_state(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Return the state of a checkpoint, see RLlib."""
        factors = {module_id: region.factor for module_id, region in self._regions.items()}
        return {**super().get_state(*args, **options), "radius_factors": factors}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint, see RLlib."""
        super().set_state(state)
        for module_id, factor in state.get("radius_factors", {}).items():
            self._region(module_id).factor = factor


def to_sb3(source: Any, env: GymEnv | str | None = None, device: torch.device | str = "auto") -> ANO:
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
        try:
            return to_sb3(algorithm, env, device)
        finally:
            algorithm.stop()
    networks, config = _Networks(source), source.config
    venv = ANO._wrap_env(_environment(source) if env is None else env)
    if _filter(source) is not None and unwrap_vec_normalize(venv) is None:
        venv = VecNormalize(venv)
    rollout = config.total_train_batch_size
    settings = {name: _first(getattr(config, other, None)) for name, other in SETTINGS.items()}
    settings["max_grad_norm"] = settings["max_grad_norm"] or math.inf
    model = ANO(
        "MlpPolicy",
        venv,
        n_steps=max(rollout // venv.num_envs, 2),
        batch_size=(config.minibatch_size or rollout // (config.num_learners or 1)) * (config.num_learners or 1),
        **settings,
        shaping=getattr(config, "shaping", "ppo"),
        policy_kwargs={"net_arch": networks.net_arch, "activation_fn": networks.activation},
        device=device,
    )
    copy_to_sb3(source, model)
    return model


def _first(value: Any) -> Any:
    """Return a number, or the first one of a schedule of RLlib."""
    return value[0][1] if isinstance(value, list | tuple) else value


def trained_steps(algorithm: Any) -> int:
    """Return the number of environment steps that an algorithm of RLlib has made."""
    return int(algorithm.metrics.peek((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), default=0))


def copy_to_rllib(model: ANO, algorithm: Any) -> None:
    """Copy the networks of a model to an algorithm of RLlib with the same layers.

    :param model: model, such as one that was initialized as SB3 does
    :param algorithm: algorithm of RLlib, which clips its actions and does not normalize them
    """
    group = algorithm.learner_group
    parameters, names = model.policy.state_dict(), _Networks(algorithm).names
    group.set_weights({DEFAULT_MODULE_ID: {name: parameters[place].cpu().numpy() for place, name in names.items()}})
    algorithm.env_runner_group.sync_weights(from_worker_or_learner_group=group, inference_only=True)


def copy_to_sb3(source: Any, model: ANO) -> None:
    """Copy the networks of an agent of RLlib, the statistics of its observations, and its number of steps.

    :param source: algorithm of RLlib
    :param model: model with the same layers
    :raises ValueError: if a part of the agent cannot be converted; the message names it
    """
    model.policy.load_state_dict(_Networks(source).as_sb3())
    model.num_timesteps = trained_steps(source)
    statistics, venv = _filter(source), model.get_vec_normalize_env()
    if statistics is not None and venv is not None:
        rms: Any = venv.obs_rms
        stats = RunningStat.from_state(statistics.get_state()[None]["running_stats"][0])
        # RLlib adds 1e-8 to the standard deviation, VecNormalize epsilon to the variance.
        rms.mean = stats.mean if statistics.de_mean_to_zero else np.zeros_like(stats.mean)
        rms.var = (stats.std.astype(float) + 1e-8) ** 2 if statistics.de_std_to_one else np.ones_like(stats.mean)
        rms.count = stats.n
        venv.epsilon, venv.clip_obs, venv.training, venv.norm_reward = 0.0, statistics.clip_by_value or math.inf, False, False


class _Networks:
    """The layers of RLlib's default module, and their places in SB3's MlpPolicy.

    :param algorithm: algorithm of RLlib
    :raises ValueError: if SB3's MlpPolicy has no place for a part
    """

    def __init__(self, algorithm: Any) -> None:
        config = self._config = algorithm.config
        if config.is_multi_agent or config.rl_module_spec.module_class is not DefaultPPOTorchRLModule:
            raise ValueError(f"RLlib's module {config.rl_module_spec} cannot be converted; allowed is its default")
        self._actions = algorithm.spaces[INPUT_ENV_SINGLE_SPACES][1]
        weights = algorithm.learner_group.get_weights([DEFAULT_MODULE_ID])[DEFAULT_MODULE_ID]
        self._tensors = {name: torch.as_tensor(value) for name, value in weights.items() if not name.endswith("_const")}
        #: Names in RLlib by the names in SB3.
        self.names: dict[str, str] = {"log_std": "pi.log_std"} if isinstance(self._actions, spaces.Box) else {}
        # RLlib keeps only what the user has set.
        self._model = asdict(DefaultModelConfig()) | config.model_config
        shared = self._model["vf_share_layers"]
        #: Sizes of the hidden layers.
        self.net_arch = {
            "pi": self._place("policy_net", "action_net", "encoder." if shared else "actor_encoder.", "pi.net."),
            "vf": self._place("value_net", "value_net", "encoder." if shared else "critic_encoder.", "vf.net."),
        }
        for name in {*self._tensors} ^ {*self.names.values()}:
            hint = "; train with free_log_std=True" if name == "pi.log_std" else ""
            raise ValueError(f"SB3's MlpPolicy has no place for RLlib's module, which differs in {name}{hint}")
        used = {self._model["fcnet_activation"]}
        used |= {self._model["head_fcnet_activation"]} if self._model["head_fcnet_hiddens"] else set()
        if len(used) > 1:
            raise ValueError(f"RLlib's module has the activations {', '.join(sorted(used))}; SB3's MlpPolicy has one")
        self.activation = get_activation_fn(used.pop(), framework="torch") or torch.nn.Identity

    def _place(self, network: str, head: str, encoder: str, last: str) -> list[int]:
        """Place the layers of actor or critic, and return the sizes of the hidden ones."""
        prefixes = (f"encoder.{encoder}net.mlp.", f"{last}mlp.")
        weights = [name for name in self._tensors if name.startswith(prefixes) and self._tensors[name].ndim == 2]
        for index, name in enumerate(weights):
            place = head if index == len(weights) - 1 else f"mlp_extractor.{network}.{2 * index}"
            self.names |= {f"{place}.{part}": f"{name.removesuffix('.weight')}.{part}" for part in ("weight", "bias")}
        return [len(self._tensors[name]) for name in weights[:-1]]

    def as_sb3(self) -> dict[str, torch.Tensor]:
        """Return the state of SB3's policy, with actions in the units of the environment."""
        state = {place: self._tensors[name].clone() for place, name in self.names.items()}
        if not isinstance(self._actions, spaces.Box):
            return state
        limit = self._model["log_std_clip_param"]
        state["log_std"].clamp_(-limit, limit)
        if self._config.normalize_actions and self._actions.is_bounded():
            # RLlib maps actions from [-1, 1] to the bounds, which the last layer can do, too.
            low, high = (torch.as_tensor(bound, dtype=torch.float32) for bound in (self._actions.low, self._actions.high))
            half = (high - low) / 2
            state["action_net.weight"] *= half.unsqueeze(1)
            state["action_net.bias"] = half * state["action_net.bias"] + low + half
            state["log_std"] += half.log()
        return state


def _environment(algorithm: Any) -> Any:
    """Make the environment if it has an id, or else one that has its spaces only."""
    config = algorithm.config
    if isinstance(config.env, str) and config.env in gym.registry:
        return gym.make(config.env, **config.env_config)
    env: gym.Env = gym.Env()
    env.observation_space, env.action_space = algorithm.spaces[INPUT_ENV_SINGLE_SPACES]
    return env


def _filter(algorithm: Any) -> MeanStdFilter | None:
    """Return the connector that normalizes observations, if there is one; the others must be RLlib's defaults."""
    runner, found = algorithm.env_runner, None
    pipelines = [algorithm.env_to_module_connector, algorithm.module_to_env_connector]
    if runner is not None:
        pipelines = [runner._env_to_module, runner._module_to_env]
    for connector in itertools.chain(*(pipeline.connectors for pipeline in pipelines)):
        if type(connector) is MeanStdFilter:
            found = connector
        elif type(connector).__name__ not in _DEFAULT_CONNECTORS:
            raise ValueError(f"RLlib's connector {type(connector).__name__} has no counterpart in SB3, only MeanStdFilter")
    return found
