"""Random configurations of a training, and the comparison of ``ANO(shaping="ppo")`` with SB3's PPO in one of them."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import strategies as st
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import ActorCriticCnnPolicy, ActorCriticPolicy, MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, CombinedExtractor, FlattenExtractor, NatureCNN
from stable_baselines3.common.utils import FloatSchedule, LinearSchedule
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecMonitor, VecNormalize
from torch import nn

from sb3_ano import ANO
from tests.common import parameters
from tests.tiny_envs import DICT_OBSERVATIONS, IMAGE_OBSERVATIONS, tiny_vec_env

Configuration = dict[str, Any]

OBSERVATIONS = {
    "vector": spaces.Box(-1.0, 1.0, (4,), np.float32),
    "float64": spaces.Box(-1.0, 1.0, (3,), np.float64),
    "matrix": spaces.Box(-1.0, 1.0, (3, 2), np.float32),
    "grid": spaces.Box(-1.0, 1.0, (2, 3, 4), np.float32),
    "image": IMAGE_OBSERVATIONS,
    "channels first": spaces.Box(0, 255, (1, 36, 36), np.uint8),
    "index": spaces.Discrete(5),
    "indices": spaces.MultiDiscrete([2, 4]),
    "bits": spaces.MultiBinary(4),
    "dict": DICT_OBSERVATIONS,
    "dict with image": spaces.Dict({"image": IMAGE_OBSERVATIONS, "place": spaces.Box(-1.0, 1.0, (4,), np.float32)}),
}
ACTIONS = {
    "vector": spaces.Box(-1.0, 1.0, (2,), np.float32),
    "bounds": spaces.Box(np.array([-2.0, 0.0, -0.1], np.float32), np.array([1.0, 0.5, 3.0], np.float32)),
    "index": spaces.Discrete(3),
    "indices": spaces.MultiDiscrete([3, 2]),
    "bits": spaces.MultiBinary(3),
}
GSDE = {
    "none": None,
    "plain": {},
    "small": {"full_std": False},
    "expln": {"use_expln": True},
    "squashed": {"squash_output": True},
    "squashed, saturated": {"squash_output": True, "log_std_init": 1.0},
}
NETS = {"default": None, "none": [], "one": [8], "two": [8, 8], "uneven": {"pi": [8], "vf": [6, 4]}, "wide": [320]}
ACTIVATIONS = {kind.__name__: kind for kind in (nn.Tanh, nn.ReLU, nn.ELU, nn.GELU, nn.SiLU, nn.LeakyReLU, nn.Softplus)}
OPTIMIZERS = {
    "default": {},
    "betas": {"optimizer_kwargs": {"betas": (0.8, 0.99), "eps": 1e-4}},
    "weight decay": {"optimizer_kwargs": {"weight_decay": 0.1, "eps": 1e-5}},
    "amsgrad": {"optimizer_kwargs": {"amsgrad": True, "eps": 1e-5}},
    "maximize": {"optimizer_kwargs": {"maximize": True, "eps": 1e-5}},
    "fused": {"optimizer_kwargs": {"fused": True, "eps": 1e-5}},
    "AdamW": {"optimizer_class": torch.optim.AdamW, "optimizer_kwargs": {"eps": 1e-5}},
    "RMSprop": {"optimizer_class": torch.optim.RMSprop, "optimizer_kwargs": {"eps": 1e-5}},
    "SGD": {"optimizer_class": torch.optim.SGD, "optimizer_kwargs": {"momentum": 0.9, "nesterov": True}},
}


class Viewing(BaseFeaturesExtractor):
    """Asks its input to be contiguous, as most extractors that users write do."""

    def __init__(self, space: spaces.Space) -> None:
        super().__init__(space, features_dim=6)
        self.linear = nn.Linear(int(np.prod(space.shape)), 6)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(observations.view(len(observations), -1)))


class Striding(Viewing):
    """Reads its input in the order of memory."""

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        size = observations[0].numel()
        rows = observations.as_strided((len(observations), size), (size, 1))
        return torch.tanh(self.linear(rows * torch.linspace(-1.0, 1.0, size)))


class Normalizing(FlattenExtractor):
    """Layers that differ between collecting and training, and random numbers."""

    def __init__(self, space: spaces.Space) -> None:
        super().__init__(space)
        self.layers = nn.Sequential(nn.BatchNorm1d(self.features_dim), nn.Dropout(0.2))

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.layers(super().forward(observations))


class Counting(FlattenExtractor):
    """Changes with every call."""

    calls = 0

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(observations) * (1.0 + 0.1 * (self.calls % 5))


class Unused(FlattenExtractor):
    """A layer without a gradient, for now."""

    uses = False

    def __init__(self, space: spaces.Space) -> None:
        super().__init__(space)
        self.layer = nn.Linear(self.features_dim, self.features_dim)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        features = super().forward(observations)
        return features + self.layer(features) if self.uses else features


class Alternating(Unused):
    """Uses its layer, which then has a gradient, in every other minibatch."""

    calls = 0

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        self.uses = self.calls % 2 == 1
        return super().forward(observations)


class Reversing(FlattenExtractor):
    """A hook on the gradient of features."""

    def __init__(self, space: spaces.Space) -> None:
        super().__init__(space)
        self.layer = nn.Linear(self.features_dim, self.features_dim)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        features = self.layer(super().forward(observations))
        if features.requires_grad:
            features.register_hook(lambda gradient: -0.5 * gradient)
        return features


EXTRACTORS = {
    "default": None,
    **{kind.__name__: kind for kind in (Viewing, Striding, Normalizing, Counting, Unused, Reversing)},
}


class Residual(nn.Sequential):
    """Layers that NumPy could run, in a module that does something else with them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        latent = super().forward(x)
        return 2.0 * latent + x.mean(dim=1, keepdim=True)


class Scaled(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.scale = layers, nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.layers(x)


class WithResidualNets(ActorCriticPolicy):
    def _build_mlp_extractor(self) -> None:
        super()._build_mlp_extractor()
        self.mlp_extractor.policy_net = Residual(*self.mlp_extractor.policy_net)
        self.mlp_extractor.value_net = Residual(*self.mlp_extractor.value_net)


class WithScaledNets(ActorCriticPolicy):
    def _build_mlp_extractor(self) -> None:
        super()._build_mlp_extractor()
        self.mlp_extractor.policy_net = Scaled(self.mlp_extractor.policy_net)


class Overriding(ActorCriticPolicy):
    def predict_values(self, obs: Any) -> torch.Tensor:
        return super().predict_values(obs) + 1.0

    def evaluate_actions(self, obs: Any, actions: torch.Tensor) -> tuple:
        values, log_prob, _ = super().evaluate_actions(obs, actions)
        return 2.0 * values, log_prob, None


POLICIES = {"default": None, **{kind.__name__: kind for kind in (WithResidualNets, WithScaledNets, Overriding)}}


def overriding(name: str, function: Callable) -> type[ActorCriticPolicy]:
    """A policy class whose method ``name`` is ``function(method, *arguments)``."""
    original = getattr(ActorCriticPolicy, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(functools.partial(original, self), *args, **kwargs)

    return type(name, (ActorCriticPolicy,), {name: method})


def first_parameter(model: Any) -> nn.Parameter:
    return next(iter(model.policy.mlp_extractor.parameters()), model.policy.action_net.weight)


def replaced(owner: Any, name: str, function: Callable) -> None:
    setattr(owner, name, functools.partial(function, getattr(owner, name)))


def clip_weights(optimizer: Any, *_: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.3, 0.3)


def new_log_std(model: Any) -> None:
    if hasattr(model.policy, "log_std"):
        shape = (1,) if model.policy.log_std.dim() == 1 else model.policy.log_std.shape
        model.policy.log_std = nn.Parameter(torch.full(shape, -0.5))
        optimizer = model.policy.optimizer
        model.policy.optimizer = type(optimizer)(model.policy.parameters(), lr=1e-3)
        model.policy.optimizer.param_groups[0]["eps"] = 1e-5


def wrapped_step(model: Any) -> None:
    optimizer = model.policy.optimizer
    step = optimizer.step

    def half_a_step() -> Any:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        return step()

    optimizer.step = half_a_step


def reverse_gradient(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(-2.0)


# What users do to a model.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda model: None,
    "forward hook": lambda model: model.policy.mlp_extractor.register_forward_hook(
        lambda module, inputs, outputs: tuple(1.5 * latent for latent in outputs)
    ),
    "hook before forward": lambda model: model.policy.action_net.register_forward_pre_hook(
        lambda module, inputs: (0.5 * inputs[0],)
    ),
    "hook on a net": lambda model: model.policy.mlp_extractor.value_net.register_forward_hook(
        lambda module, inputs, output: output + 0.1
    ),
    "backward hook": lambda model: model.policy.value_net.register_full_backward_hook(
        lambda module, gradients, _: tuple(g if g is None else 3.0 * g for g in gradients)
    ),
    "forward of an instance": lambda model: replaced(model.policy.action_net, "forward", lambda f, x: 0.5 * f(x)),
    "forward_actor of an instance": lambda model: replaced(
        model.policy.mlp_extractor, "forward_actor", lambda f, x: 0.5 * f(x)
    ),
    "evaluate_actions of an instance": lambda model: replaced(
        model.policy, "evaluate_actions", lambda f, *arguments: (lambda v, p, e: (2.0 * v, p, e))(*f(*arguments))
    ),
    "predict_values of an instance": lambda model: replaced(model.policy, "predict_values", lambda f, x: f(x) + 0.5),
    "log_prob of the distribution": lambda model: replaced(model.policy.action_dist, "log_prob", lambda f, x: 0.5 * f(x)),
    "other net": lambda model: setattr(model.policy.mlp_extractor, "value_net", Scaled(model.policy.mlp_extractor.value_net)),
    "gradient hook": lambda model: first_parameter(model).register_hook(torch.zeros_like),
    "accumulated gradient hook": lambda model: first_parameter(model).register_post_accumulate_grad_hook(reverse_gradient),
    "optimizer hook": lambda model: model.policy.optimizer.register_step_post_hook(clip_weights),
    "optimizer.step": wrapped_step,
    "weight_decay": lambda model: model.policy.optimizer.param_groups[0].update(weight_decay=0.5),
    "maximize": lambda model: model.policy.optimizer.param_groups[0].update(maximize=True),
    "betas": lambda model: model.policy.optimizer.param_groups[0].update(betas=(0.5, 0.9)),
    "new optimizer": lambda model: setattr(
        model.policy, "optimizer", torch.optim.Adam(model.policy.parameters(), lr=1e-3, eps=1e-5)
    ),
    "frozen actor": lambda model: [
        part.requires_grad_(False) for part in (model.policy.mlp_extractor.policy_net, model.policy.action_net)
    ],
    "frozen critic": lambda model: model.policy.mlp_extractor.value_net.requires_grad_(False),
    "log_std": new_log_std,
    "used": lambda model: setattr(model.policy.features_extractor, "uses", True),
    "data": lambda model: first_parameter(model).data.mul_(0.5),
    "parameters": lambda model: nn.utils.vector_to_parameters(0.9 * parameters(model), model.policy.parameters()),
    "ent_coef": lambda model: setattr(model, "ent_coef", 0.1),
}


class Callback(BaseCallback):
    """Sees the steps, and changes or draws something at some of them."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.change = change

    def _on_step(self) -> bool:
        if self.n_calls == 5:
            self.change(self.model)
        return True


CALLBACKS: dict[str, Callable[[Any], Any] | None] = {
    "none": None,
    "passive": CHANGES["nothing"],
    "draws": lambda model: torch.rand(3),
    "data": CHANGES["data"],
    "parameters": CHANGES["parameters"],
    "forward hook": CHANGES["forward hook"],
    "forward of an instance": CHANGES["forward of an instance"],
    "other net": CHANGES["other net"],
}


def assign(**attributes: Any) -> Callable[[Any], None]:
    """A change that assigns attributes, ``rollout_buffer__gamma`` for ``rollout_buffer.gamma``."""

    def change(model: Any) -> None:
        for path, value in attributes.items():
            owner, _, name = path.rpartition("__")
            setattr(getattr(model, owner) if owner else model, name, value)

    return change


def assign_n_steps(model: Any, n_steps: int) -> None:
    model.n_steps = n_steps
    if isinstance(model, PPO):
        model.rollout_buffer.buffer_size = n_steps  # without it, SB3's buffer asserts that it is full


def flip(model: Any) -> None:
    """Let parameters that were not trained join, and others leave."""
    for parameter in model.policy.parameters():
        parameter.requires_grad_(not parameter.requires_grad)


def adam_state(model: Any) -> dict[str, torch.Tensor]:
    return model.policy.optimizer.state[model.policy.action_net.weight]


# Attributes that are changed after construction (review core 7).
ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "batch_size": assign(batch_size=16),
    "n_epochs": assign(n_epochs=1),
    "ent_coef": assign(ent_coef=0.5),
    "vf_coef": assign(vf_coef=0.05),
    "max_grad_norm": assign(max_grad_norm=0.01),
    "target_kl": assign(target_kl=1e-5),
    "normalize_advantage": assign(normalize_advantage=False),
    "clip_range": assign(clip_range=FloatSchedule(0.02)),
    "clip_range_vf": assign(clip_range_vf=FloatSchedule(0.05)),
    "lr_schedule": assign(lr_schedule=LinearSchedule(1e-3, 0.0, 1.0)),
    "gamma": assign(gamma=0.5),
    "gamma of the buffer": assign(rollout_buffer__gamma=0.5),
    "gae_lambda of the buffer": assign(rollout_buffer__gae_lambda=0.5),
    "optimizer": lambda model: setattr(model.policy, "optimizer", torch.optim.SGD(model.policy.parameters(), lr=1e-2)),
    "set_parameters": lambda model: model.set_parameters(
        {"policy": {name: 0.5 * value for name, value in model.policy.state_dict().items()}}, exact_match=False
    ),
    # SB3 reads these when a model is made, and not again.
    "gae_lambda": assign(gae_lambda=0.5),
    "learning_rate": assign(learning_rate=1e-5),
    "seed": assign(seed=7),
}
# Values of an axis that random configurations do not have.
MORE: dict[str, dict[str, Any]] = {
    "policy": {
        "forward": overriding("forward", lambda f, *x: (lambda actions, v, p: (actions, v + 1.0, p))(*f(*x))),
        "extract_features": overriding("extract_features", lambda f, *x, **options: 2.0 * f(*x, **options)),
        "_get_action_dist_from_latent": overriding("_get_action_dist_from_latent", lambda f, latent: f(0.5 * latent)),
        "obs_to_tensor": overriding("obs_to_tensor", lambda f, x: f(2.0 * x)),
        "unscale_action": overriding("unscale_action", lambda f, action: f(0.5 * action)),
    },
    "extractor": {"Alternating": Alternating},
    "before": {
        "two activations": lambda model: model.policy.mlp_extractor.policy_net.append(nn.ReLU()),
        "different activations": lambda model: model.policy.mlp_extractor.value_net.__setitem__(1, nn.ReLU()),
        "two layers": lambda model: model.policy.mlp_extractor.value_net.append(nn.Linear(64, 64)),
        "no bias": lambda model: setattr(model.policy, "action_net", nn.Linear(64, 2, bias=False)),
    },
    "between": {
        **ATTRIBUTES,
        "shorter rollouts": lambda model: assign_n_steps(model, 4),
        "longer rollouts": lambda model: assign_n_steps(model, 12),
        "saved optimizer": lambda model: model.policy.optimizer.load_state_dict(model.policy.optimizer.state_dict()),
        "moments": lambda model: adam_state(model).update(exp_avg=torch.ones(2, 64)),
        "no moments": lambda model: model.policy.optimizer.state.clear(),
        "thawed": lambda model: model.policy.requires_grad_(True),
        "flipped": flip,
    },
    "callback": ATTRIBUTES,
}
WRAPPERS: dict[str, Callable[[VecEnv], VecEnv]] = {
    "none": lambda env: env,
    "VecNormalize": VecNormalize,
    "VecNormalize, rewards": lambda env: VecNormalize(env, norm_obs=False),
    "VecFrameStack": lambda env: VecFrameStack(env, 2),
    "both": lambda env: VecNormalize(VecFrameStack(env, 2)),
    "VecMonitor": VecMonitor,
}
OPTIONS: dict[str, dict] = {
    "default": {},
    "clip_range_vf": {"clip_range_vf": 0.05},
    "schedules": {"learning_rate": LinearSchedule(2e-2, 1e-3, 1.0), "clip_range": LinearSchedule(0.3, 0.1, 1.0)},
    "weights": {"ent_coef": 0.05, "vf_coef": 0.2, "max_grad_norm": 0.05},
    "no normalization": {"normalize_advantage": False, "max_grad_norm": float("inf")},
    "target_kl": {"target_kl": 0.01},
    "discount": {"gamma": 0.7, "gae_lambda": 1.0},
}

CONFIGURATIONS = st.fixed_dictionaries(
    {
        "observations": st.sampled_from([*OBSERVATIONS, "vector", "vector", "vector", "matrix"]),
        "actions": st.sampled_from([*ACTIONS, "vector"]),
        "gsde": st.sampled_from([*GSDE, "none", "none", "none"]),
        "sde_sample_freq": st.sampled_from([-1, 4]),
        "policy": st.sampled_from(["default", "default", *POLICIES]),
        "net": st.sampled_from([*NETS]),
        "activation": st.sampled_from([*ACTIVATIONS, "Tanh", "ReLU"]),
        "extractor": st.sampled_from(["default", "default", "default", *EXTRACTORS]),
        "share": st.booleans(),
        "optimizer": st.sampled_from(["default", "default", "default", *OPTIMIZERS]),
        "wrapper": st.sampled_from([*WRAPPERS]),
        "options": st.sampled_from([*OPTIONS]),
        "before": st.sampled_from(["nothing", "nothing", *CHANGES]),
        "between": st.sampled_from(["nothing", "nothing", *CHANGES]),
        "callback": st.sampled_from(["none", "none", *CALLBACKS]),
        "n_envs": st.sampled_from([1, 2, 9]),
        "batch_size": st.sampled_from([8, 12, 64]),
        "seed": st.integers(0, 99),
    }
)


# What is compiled, so that little is left to the update as it is.
COMPILED = CONFIGURATIONS.flatmap(
    lambda config: st.fixed_dictionaries(
        {
            **{name: st.just(value) for name, value in config.items()},
            "policy": st.sampled_from(["default", "default", "WithResidualNets", "WithScaledNets"]),
            "extractor": st.sampled_from(["default", "default", "Viewing", "Striding", "Normalizing", "Reversing"]),
            "optimizer": st.sampled_from(["default", "betas", "fused"]),
            "before": st.sampled_from(["nothing", "frozen critic", "frozen actor"]),
            "between": st.sampled_from(
                ["nothing", "betas", "data", "parameters", "ent_coef", "new optimizer", "gradient hook"]
            ),
        }
    )
)

PLAIN: Configuration = {
    **{"observations": "vector", "actions": "vector", "gsde": "none", "sde_sample_freq": -1, "policy": "default"},
    **{"net": "default", "activation": "Tanh", "extractor": "default", "share": True, "optimizer": "default"},
    **{"wrapper": "none", "options": "default", "before": "nothing", "between": "nothing", "callback": "none"},
    **{"n_envs": 2, "batch_size": 8, "seed": 0},
}
AXES: dict[str, dict[str, Any]] = {
    **{"observations": OBSERVATIONS, "actions": ACTIONS, "gsde": GSDE, "policy": POLICIES, "net": NETS},
    **{"activation": ACTIVATIONS, "extractor": EXTRACTORS, "optimizer": OPTIMIZERS, "wrapper": WRAPPERS, "options": OPTIONS},
    **{"before": CHANGES, "between": CHANGES, "callback": CALLBACKS},
}


def chosen(config: Configuration, axis: str) -> Any:
    return {**AXES[axis], **MORE.get(axis, {})}[config[axis]]


def made(cls: type, config: Configuration, **options: Any) -> Any:
    """A model; what SB3 has no use for in a combination is left out, the same for both classes."""
    observations, actions = OBSERVATIONS[config["observations"]], ACTIONS[config["actions"]]
    env = tiny_vec_env(observations, actions, config["n_envs"])
    if config["observations"] == "vector" or config["wrapper"] in ("none", "VecMonitor"):
        env = WRAPPERS[config["wrapper"]](env)

    kwargs: dict[str, Any] = {
        "net_arch": NETS[config["net"]],
        "activation_fn": ACTIVATIONS[config["activation"]],
        "share_features_extractor": config["share"],
        **{name: dict(value) if isinstance(value, dict) else value for name, value in OPTIMIZERS[config["optimizer"]].items()},
    }
    gsde = GSDE[config["gsde"]] if isinstance(actions, spaces.Box) else None
    kwargs |= gsde or {}
    policy, kwargs["features_extractor_class"] = ActorCriticPolicy, FlattenExtractor
    if isinstance(observations, spaces.Dict):
        policy, kwargs["features_extractor_class"] = MultiInputActorCriticPolicy, CombinedExtractor
        kwargs["features_extractor_kwargs"] = {"cnn_output_dim": 8}
    elif config["observations"] != "image" and chosen(config, "extractor") and isinstance(observations, spaces.Box):
        kwargs["features_extractor_class"] = chosen(config, "extractor")
    elif config["observations"] in ("image", "channels first"):
        policy, kwargs["features_extractor_class"] = ActorCriticCnnPolicy, NatureCNN
        kwargs["features_extractor_kwargs"] = {"features_dim": 8}
    kwargs |= config.get("kwargs", {})
    policy = chosen(config, "policy") or policy
    return cls(
        policy,
        env,
        use_sde=gsde is not None,
        policy_kwargs=kwargs,
        **{
            "n_steps": 8 if config["n_envs"] > 1 else 24,
            "n_epochs": 2,
            "learning_rate": 1e-2,
            "batch_size": config["batch_size"],
            "sde_sample_freq": config["sde_sample_freq"],
            "seed": config["seed"],
            "device": "cpu",
            **OPTIONS[config["options"]],
            **options,
        },
    )


class Trained:
    """A training of two updates: the rollouts, how far the updates moved the parameters, and where these ended."""

    def __init__(self, cls: type, config: Configuration, **options: Any) -> None:
        self.rollouts: list[dict[str, np.ndarray]] = []
        self.model = model = made(cls, config, **options)
        self.moved = 0.0
        chosen(config, "before")(model)
        train = model.train

        def record_and_train() -> None:
            buffer = model.rollout_buffer
            self.rollouts.append({name: getattr(buffer, name).copy() for name in COMPARED})
            before = all_parameters(model)
            train()
            self.moved += (all_parameters(model) - before).norm().item()

        model.train = record_and_train
        change = chosen(config, "callback")
        steps = model.n_steps * model.n_envs
        model.learn(steps, callback=None if change is None else Callback(change))
        chosen(config, "between")(model)
        model.learn(steps, reset_num_timesteps=False)
        self.after = all_parameters(model)


def all_parameters(model: Any) -> torch.Tensor:
    # Not parameters_to_vector, which needs views.
    return torch.cat([parameter.detach().flatten() for parameter in model.policy.parameters()])


COMPARED = ("actions", "values", "log_probs", "rewards", "advantages")


def assert_equals_sb3(config: Configuration, **options: Any) -> Trained | None:
    """Train both, and compare the rollouts and the parameters; where SB3 raises, ANO has to raise.

    :param config: one of :data:`CONFIGURATIONS`
    :param options: further arguments of ANO
    :return: the training by SB3, or None if it raised
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = Trained(PPO, config)
        except Exception as error:
            with pytest.raises(type(error)):
                Trained(ANO, config, shaping="ppo", **options)
            return None
        found = Trained(ANO, config, **{"shaping": "ppo", **options})
    for rollout, (mine, theirs) in enumerate(zip(found.rollouts, expected.rollouts, strict=True)):
        for name in COMPARED:
            tolerance = 1e-4 * max(1.0, np.abs(theirs[name]).max())
            np.testing.assert_allclose(mine[name], theirs[name], atol=tolerance, err_msg=f"{name} of rollout {rollout}")
    difference = (found.after - expected.after).norm()
    assert difference <= 1e-4 * expected.moved + 1e-7 * expected.after.norm()
    assert found.model._n_updates == expected.model._n_updates
    assert found.model.num_timesteps == expected.model.num_timesteps
    return expected


@contextlib.contextmanager
def traced_only() -> Iterator[list[dict[str, Any]]]:
    """Trace as the compiler would, without a graph break, but run what was traced without compiling it.

    Yields a list, to which each graph adds the options that were given for it.
    """
    graphs: list[dict[str, Any]] = []
    compile_it = torch.compile

    def trace(function: Any, fullgraph: bool, dynamic: bool, options: dict[str, Any]) -> Any:
        assert fullgraph

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(options)
            return graph.forward

        return compile_it(function, fullgraph=fullgraph, dynamic=dynamic, backend=backend)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch, "compile", trace)
        yield graphs


def relative_difference(one: Any, other: Any) -> float:
    """Distance of the parameters of two models, relative to those of the first."""
    return ((parameters(one) - parameters(other)).norm() / parameters(one).norm()).item()
