"""Random configurations of a training, by axis: what a user may put into SB3."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from hypothesis import strategies as st
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.utils import FloatSchedule, LinearSchedule
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecMonitor, VecNormalize
from torch import nn

from tests.algorithms.custom_policies import (
    Alternating,
    Counting,
    Normalizing,
    Overriding,
    Reversing,
    Scaled,
    Striding,
    Unused,
    Viewing,
    WithResidualNets,
    overriding,
)
from tests.common import parameters
from tests.tiny_envs import DICT_OBSERVATIONS, IMAGE_OBSERVATIONS

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


EXTRACTORS = {
    "default": None,
    **{kind.__name__: kind for kind in (Viewing, Striding, Normalizing, Counting, Unused, Reversing)},
}


POLICIES = {"default": None, **{kind.__name__: kind for kind in (WithResidualNets, Overriding)}}


def first_parameter(model: Any) -> nn.Parameter:
    return next(iter(model.policy.mlp_extractor.parameters()), model.policy.action_net.weight)


def replaced(owner: Any, name: str, function: Callable) -> None:
    setattr(owner, name, functools.partial(function, getattr(owner, name)))


def new_log_std(model: Any) -> None:
    if hasattr(model.policy, "log_std"):
        shape = (1,) if model.policy.log_std.dim() == 1 else model.policy.log_std.shape
        model.policy.log_std = nn.Parameter(torch.full(shape, -0.5))
        optimizer = model.policy.optimizer
        model.policy.optimizer = type(optimizer)(model.policy.parameters(), lr=1e-3)
        model.policy.optimizer.param_groups[0]["eps"] = 1e-5


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
    "optimizer hook": lambda model: model.policy.optimizer.register_step_post_hook(
        lambda optimizer, *_: [weight.data.clamp_(-0.3, 0.3) for weight in optimizer.param_groups[0]["params"]]
    ),
    "optimizer.step": lambda model: replaced(model.policy.optimizer, "step", lambda f: [f(), f()]),
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
    """Change a model, or draw something, at the fifth step, and before and after each rollout."""

    def __init__(self, change: Any = bool, before: Any = bool, after: Any = bool) -> None:
        super().__init__()
        self.change, self.before, self.after = change, before, after

    def _on_step(self) -> bool:
        if self.n_calls == 5:
            self.change(self.model)
        return True

    def _on_rollout_start(self) -> None:
        self.before(self.model)

    def _on_rollout_end(self) -> None:
        self.after(self.model)


CALLBACKS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "passive": {},
    "draws": {"change": lambda model: torch.rand(3)},
    **{key: {"change": CHANGES[key]} for key in ("data", "parameters", "forward hook", "forward of an instance", "other net")},
}


def assign(**attributes: Any) -> Callable[[Any], None]:
    """A change that assigns attributes, ``rollout_buffer__gamma`` for ``rollout_buffer.gamma``."""

    def change(model: Any) -> None:
        for path, value in attributes.items():
            owner, _, name = path.rpartition("__")
            setattr(getattr(model, owner) if owner else model, name, value)

    return change


def with_integer_rewards(env: VecEnv) -> VecEnv:
    """Return integers, as SubprocVecEnv makes of Python's."""
    step = env.step_wait
    env.step_wait = lambda: (lambda o, rewards, *rest: (o, np.ceil(1000.0 * rewards).astype(np.int64), *rest))(*step())
    return env


def replace_arrays(model: Any) -> None:
    model.rollout_buffer.advantages = -model.rollout_buffer.advantages
    model.rollout_buffer.returns = model.rollout_buffer.returns + 5.0


def assign_n_steps(model: Any, n_steps: int) -> None:
    model.n_steps = n_steps
    if isinstance(model, PPO):
        model.rollout_buffer.buffer_size = n_steps  # without it, SB3's buffer asserts that it is full


def flip(model: Any) -> None:
    """Let parameters that were not trained join, and others leave."""
    for parameter in model.policy.parameters():
        parameter.requires_grad_(not parameter.requires_grad)


# Attributes that are changed after construction.
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
        "predict_values": overriding("predict_values", lambda f, x: f(x) + 1.0),
        "extract_features": overriding("extract_features", lambda f, *x, **options: 2.0 * f(*x, **options)),
        "_get_action_dist_from_latent": overriding("_get_action_dist_from_latent", lambda f, latent: f(0.5 * latent)),
        "obs_to_tensor": overriding("obs_to_tensor", lambda f, x: f(2.0 * x)),
        "unscale_action": overriding("unscale_action", lambda f, action: f(0.5 * action)),
    },
    "extractor": {"Alternating": Alternating},
    "wrapper": {"integers": with_integer_rewards},
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
        "moments": lambda model: model.policy.optimizer.state[model.policy.action_net.bias].update(exp_avg=torch.ones(2)),
        "no moments": lambda model: model.policy.optimizer.state.clear(),
        "thawed": lambda model: model.policy.requires_grad_(True),
        "flipped": flip,
    },
    "callback": {
        **{name: {"change": change} for name, change in ATTRIBUTES.items()},
        "around": {"before": lambda model: model.policy.log_std.data.fill_(-3.0), "after": replace_arrays},
    },
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
            "policy": st.sampled_from(["default", "WithResidualNets"]),
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
