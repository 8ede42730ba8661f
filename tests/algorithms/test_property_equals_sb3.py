"""``ANO(shaping="ppo")`` against SB3's PPO on random configurations: what a user may put into SB3 acts as in SB3."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import ActorCriticCnnPolicy, ActorCriticPolicy, MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, CombinedExtractor, FlattenExtractor, NatureCNN
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecMonitor, VecNormalize
from torch import nn

from sb3_ano import ANO
from sb3_ano.algorithms import actor, policy_evaluation
from sb3_ano.algorithms.flat_adam import FlatAdam
from tests.algorithms.test_compile import traced_only
from tests.common import needs_compiler, parameters
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
    elif config["observations"] != "image" and EXTRACTORS[config["extractor"]] and isinstance(observations, spaces.Box):
        kwargs["features_extractor_class"] = EXTRACTORS[config["extractor"]]
    elif config["observations"] in ("image", "channels first"):
        policy, kwargs["features_extractor_class"] = ActorCriticCnnPolicy, NatureCNN
        kwargs["features_extractor_kwargs"] = {"features_dim": 8}
    policy = POLICIES[config["policy"]] or policy
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
        CHANGES[config["before"]](model)
        train = model.train

        def record_and_train() -> None:
            buffer = model.rollout_buffer
            self.rollouts.append({name: getattr(buffer, name).copy() for name in COMPARED})
            before = all_parameters(model)
            train()
            self.moved += (all_parameters(model) - before).norm().item()

        model.train = record_and_train
        change = CALLBACKS[config["callback"]]
        steps = model.n_steps * model.n_envs
        model.learn(steps, callback=None if change is None else Callback(change))
        CHANGES[config["between"]](model)
        model.learn(steps, reset_num_timesteps=False)
        self.after = all_parameters(model)


def all_parameters(model: Any) -> torch.Tensor:
    # Not parameters_to_vector, which needs views.
    return torch.cat([parameter.detach().flatten() for parameter in model.policy.parameters()])


COMPARED = ("actions", "values", "log_probs", "rewards", "advantages")


def assert_equals_sb3(config: Configuration, **options: Any) -> None:
    """Train both, and compare the rollouts and the parameters; where SB3 raises, ANO has to raise.

    :param config: one of :data:`CONFIGURATIONS`
    :param options: further arguments of ANO
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = Trained(PPO, config)
        except Exception as error:
            with pytest.raises(type(error)):
                Trained(ANO, config, shaping="ppo", **options)
            return
        found = Trained(ANO, config, **{"shaping": "ppo", **options})
    for rollout, (mine, theirs) in enumerate(zip(found.rollouts, expected.rollouts, strict=True)):
        for name in COMPARED:
            tolerance = 1e-4 * max(1.0, np.abs(theirs[name]).max())
            np.testing.assert_allclose(mine[name], theirs[name], atol=tolerance, err_msg=f"{name} of rollout {rollout}")
    difference = (found.after - expected.after).norm()
    assert difference <= 1e-4 * expected.moved + 1e-7 * expected.after.norm()


def run(examples: int, check: Callable[[Configuration], None], configurations: Any = CONFIGURATIONS) -> None:
    """Check the same sequence of configurations each time; Hypothesis prints one that fails."""
    reproducible = {"derandomize": True, "database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}
    # Shrinking takes minutes, and a configuration is easily read as it is.
    settings(max_examples=examples, phases=[Phase.generate], **reproducible)(given(configurations)(check))()


def eager(config: Configuration) -> None:
    assert_equals_sb3(config, torch_compile=False)


def traced(config: Configuration) -> None:
    with traced_only():
        assert_equals_sb3(config, torch_compile=True)


def compiled(config: Configuration) -> None:
    assert_equals_sb3(config, torch_compile=True)


def test_updates_and_rollouts_are_those_of_sb3():
    run(40, eager)


def test_traced_updates_are_those_of_sb3():
    run(4, traced, COMPILED)


@pytest.mark.slow
def test_many_updates_and_rollouts_are_those_of_sb3():
    run(300, eager)


@pytest.mark.slow
def test_many_traced_updates_are_those_of_sb3():
    run(100, traced, COMPILED)


@pytest.mark.slow
@needs_compiler
def test_compiled_updates_are_those_of_sb3():
    run(12, compiled, COMPILED)


def test_these_configurations_tell_radii_of_0_2_and_0_201_apart():
    with pytest.raises(AssertionError):
        run(40, lambda config: assert_equals_sb3(config, torch_compile=False, clip_range=0.201))


PLAIN: Configuration = {
    **{"observations": "vector", "actions": "vector", "gsde": "none", "sde_sample_freq": -1, "policy": "default"},
    **{"net": "default", "activation": "Tanh", "extractor": "default", "share": True, "optimizer": "default"},
    **{"wrapper": "none", "options": "default", "before": "nothing", "between": "nothing", "callback": "none"},
    **{"n_envs": 2, "batch_size": 8, "seed": 0},
}


@pytest.mark.parametrize(
    "config",
    [
        # review core 2
        {"observations": "grid", "extractor": "Viewing"},
        {"observations": "grid", "extractor": "Striding"},
        # review core 4
        {"policy": "WithResidualNets"},
        {"policy": "WithScaledNets"},
        {"before": "forward_actor of an instance"},
        {"before": "forward of an instance"},
        # review core 5
        {"before": "accumulated gradient hook"},
        # review core 6
        {"before": "optimizer.step"},
        {"between": "optimizer hook"},
        {"between": "weight_decay"},
        {"between": "maximize"},
        {"between": "evaluate_actions of an instance"},
        # review core 8
        {"callback": "data"},
        {"callback": "parameters"},
        {"callback": "other net"},
        # review core 12
        {"before": "log_std"},
        {"callback": "draws"},
        # found by these tests
        {"before": "frozen actor", "actions": "index"},
        {"between": "used", "extractor": "Unused"},
        {"observations": "vector", "extractor": "Counting"},
    ],
    ids=lambda config: "-".join(config.values()),
)
def test_what_once_differed_from_sb3_does_not(config):
    eager({**PLAIN, **config})


@pytest.mark.parametrize(
    "config",
    [{"before": "gradient hook"}, {"between": "gradient hook"}, {"extractor": "Counting"}],
    ids=["before", "between", "Counting"],
)
def test_what_once_differed_from_sb3_when_compiled_does_not(config):  # review core 5
    traced({**PLAIN, **config})


IGNORING_INSTANCES = policy_evaluation, "replaced_method", lambda *_: None
ANY_OPTIMIZER = FlatAdam, "obstacle", staticmethod(lambda optimizer, policy: None)
IGNORING_CALLBACKS = actor.Snapshot, "is_current", lambda self: True


@pytest.mark.parametrize(
    ("fault", "config"),
    [
        (IGNORING_INSTANCES, {"before": "forward of an instance"}),
        (IGNORING_INSTANCES, {"between": "predict_values of an instance"}),
        (ANY_OPTIMIZER, {"before": "optimizer hook"}),
        (ANY_OPTIMIZER, {"between": "weight_decay"}),
        (IGNORING_CALLBACKS, {"callback": "other net"}),
        (IGNORING_CALLBACKS, {"callback": "forward hook"}),
    ],
    ids=lambda part: part[1] if isinstance(part, tuple) else "-".join(*part.items()),
)
def test_a_fault_is_found(fault, config, monkeypatch):
    eager({**PLAIN, **config})
    monkeypatch.setattr(*fault)
    with pytest.raises(AssertionError):
        eager({**PLAIN, **config})
