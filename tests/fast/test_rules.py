"""Each row of the table of rules: a model that triggers it, the reason that is given, and equality with SB3's own training."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib import MaskablePPO, RecurrentPPO
from sb3_contrib.common.maskable.distributions import MaskableCategoricalDistribution
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import FlattenExtractor
from torch import nn

from sb3_ano import ANO, accelerate, explain
from sb3_ano.fast.rules import RULES, Options, apply_rules, decide
from tests.algorithms.comparison import relative_difference, traced_only, with_some_seed
from tests.algorithms.custom_policies import Overriding, Unused
from tests.tiny_envs import BOX_OBSERVATIONS, DICT_OBSERVATIONS, IMAGE_OBSERVATIONS, masked_vec_env, tiny_vec_env

SETTINGS = {"n_steps": 32, "batch_size": 32, "n_epochs": 2, "device": "cpu"}
Change = Callable[[Any], Any]


def ppo(policy: Any = "MlpPolicy", change: Change = lambda model: None, env: Any = "Pendulum-v1", **options: Any) -> Any:
    """Return a function of a seed that makes a model, and changes it."""

    def make(seed: int) -> PPO:
        model = PPO(policy, env() if callable(env) else gym.make(env), **{**SETTINGS, **options}, seed=seed)
        change(model)
        return model

    return make


class CustomBuffer(RolloutBuffer):
    def add(self, *args: Any) -> None:
        super().add(*args)


class Parameter(nn.Parameter):
    """A parameter of a custom type."""


class Masked(MaskableCategoricalDistribution):
    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        return super().log_prob(actions)


def masked(seed: int) -> MaskablePPO:
    model = MaskablePPO("MlpPolicy", masked_vec_env(BOX_OBSERVATIONS, spaces.Discrete(4)), **SETTINGS, seed=seed)
    model.policy.action_dist = Masked(4)
    return model


def recurrent(seed: int) -> RecurrentPPO:
    options = {**SETTINGS, "policy_kwargs": {"lstm_hidden_size": 8, "net_arch": [8]}}
    return RecurrentPPO("MlpLstmPolicy", gym.make("Pendulum-v1"), **options, seed=seed)


def custom_parameter(model: Any) -> None:
    model.policy.action_net.bias = Parameter(model.policy.action_net.bias.data)
    model.policy.optimizer = type(model.policy.optimizer)(model.policy.parameters(), lr=3e-4, eps=1e-5)


def train_longer(model: Any) -> None:
    for parameter in model.policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.policy.action_net.weight.grad = None
    model.policy.optimizer.step()


def tie(model: Any) -> None:
    policy = model.policy
    policy.mlp_extractor.value_net[0].weight = policy.mlp_extractor.policy_net[0].weight
    policy.optimizer = type(policy.optimizer)(policy.parameters(), lr=3e-4, eps=1e-5)


def freeze_with_gradient(model: Any) -> None:
    bias = model.policy.action_net.bias
    bias.grad = torch.full_like(bias, 0.1)
    bias.requires_grad_(False)


def hook(model: Any) -> None:
    model.policy.value_net.register_forward_hook(lambda module, inputs, output: output + 0.1)


def replace(model: Any) -> None:
    forward = model.policy.action_net.forward
    model.policy.action_net.forward = lambda x: 0.5 * forward(x)


def other_head(model: Any) -> None:
    torch.manual_seed(0)
    model.policy.value_net = nn.Linear(64, 1)


def optimizer(**options: Any) -> dict[str, Any]:
    return {"policy_kwargs": options}


# Part and name of the rule: a model of SB3, and the reason.
EXAMPLES: dict[tuple[str, str], tuple[Callable[[int], Any], str]] = {
    ("policy", "overridden method"): (ppo(Overriding), "overrides evaluate_actions"),
    ("policy", "replaced method"): (ppo(change=replace), "policy.action_net.forward was replaced"),
    ("policy", "hooks of modules"): (ppo(change=hook), "policy.value_net has hooks"),
    ("policy", "masked distribution"): (masked, "its distribution is not sb3-contrib's"),
    ("acting", "policy"): (ppo(Overriding), "overrides evaluate_actions"),
    ("acting", "LSTM"): (recurrent, "it has an LSTM"),
    ("acting", "precision"): (ppo(change=custom_parameter), "policy.action_net.bias is not a float32 parameter"),
    ("acting", "images"): (
        ppo("CnnPolicy", env=lambda: tiny_vec_env(IMAGE_OBSERVATIONS, spaces.Discrete(3)), n_epochs=1),
        "observations have images",
    ),
    ("acting", "features extractor"): (
        ppo(policy_kwargs={"features_extractor_class": Unused}),
        "Unused is not a plain extractor of features",
    ),
    ("acting", "network"): (ppo(policy_kwargs={"activation_fn": nn.GELU}), "the activation is GELU, not Tanh or ReLU"),
    ("acting", "distribution"): (ppo(use_sde=True), "it explores by gSDE"),
    ("acting", "wide layers"): (
        ppo(policy_kwargs={"net_arch": [520, 520]}),
        "PyTorch multiplies 1 observations by 270400 weights faster",
    ),
    ("rollout", "LSTM"): (recurrent, "it has an LSTM"),
    ("rollout", "buffer"): (ppo(rollout_buffer_class=CustomBuffer), "CustomBuffer overrides add"),
    ("optimizer", "class"): (ppo(**optimizer(optimizer_class=torch.optim.RMSprop)), "its optimizer is not a plain Adam"),
    ("optimizer", "options of Adam"): (
        ppo(**optimizer(optimizer_kwargs={"amsgrad": True, "eps": 1e-5})),
        "its optimizer is not a plain Adam: amsgrad=True",
    ),
    ("optimizer", "hooks of the optimizer"): (
        ppo(change=lambda model: model.policy.optimizer.register_step_post_hook(lambda *_: None)),
        "its optimizer has hooks",
    ),
    ("optimizer", "hooks of parameters"): (
        ppo(change=lambda model: model.policy.value_net.weight.register_hook(lambda gradient: 2.0 * gradient)),
        "policy.value_net.weight has hooks",
    ),
    ("optimizer", "parameters of the optimizer"): (
        ppo(change=other_head),
        "its optimizer has other parameters than the policy",
    ),
    ("optimizer", "types of parameters"): (ppo(change=custom_parameter), "its parameters are not float32 on one device"),
    ("optimizer", "frozen parameter"): (ppo(change=freeze_with_gradient), "the frozen policy.action_net.bias has a gradient"),
    ("compilation", "LSTM"): (recurrent, "LSTM policies are not compiled"),
    ("compilation", "policy"): (ppo(Overriding), "overrides evaluate_actions"),
    ("compilation", "optimizer"): (ppo(change=other_head), "its optimizer has other parameters than the policy"),
    ("compilation", "uneven steps"): (ppo(change=train_longer), "some of its parameters were trained longer than others"),
    ("compilation", "tied parameters"): (ppo(change=tie), "several of its layers share parameters"),
}
# They need a GPU or environments on a device, as in test_device.py, or say what the user asked for.
WITHOUT_EXAMPLE = {("acting", "device"), ("compilation", "not wanted"), ("compilation", "short run")}
WITHOUT_EXAMPLE |= {("device", name) for name in ("device", "LSTM", "noise", "policy", "rollout")}


def test_every_rule_has_an_example():
    rows = {(rule.part, rule.name) for rule in RULES}
    assert len(rows) == len(RULES)
    assert rows == EXAMPLES.keys() | WITHOUT_EXAMPLE


@pytest.mark.parametrize("torch_compile", ["auto", True, False])
def test_who_leaves_the_fast_path_is_told_once_at_the_line_that_trains(torch_compile):
    make, reason = EXAMPLES["policy", "overridden method"]
    model = accelerate(make(0), torch_compile=torch_compile)
    assert reason in explain(model).update.reason
    if torch_compile:
        assert reason in explain(model).compilation.reason
    with pytest.warns(UserWarning, match=f"this training leaves the fast path: .*{reason}") as warned:
        model.learn(1)
    # Not again: warnings are errors.
    model.learn(1)
    assert len(warned) == 1
    assert warned[0].filename == __file__


@pytest.mark.parametrize(("part", "name"), EXAMPLES)
@pytest.mark.filterwarnings("ignore:this training leaves the fast path")
def test_each_rule_gives_its_reason_and_trains_as_sb3(part, name):
    make, reason = EXAMPLES[part, name]
    compiled = part == "compilation"

    def compare(seed: int) -> None:
        expected = make(seed)
        expected.learn(2 * expected.n_steps * expected.n_envs)
        model = accelerate(make(seed), torch_compile=compiled)
        rule, found = apply_rules(model, Options(torch_compile=compiled))[part]
        assert rule.name == name
        assert reason in found
        explanation = explain(model)
        paths = {"acting": explanation.acting, "rollout": explanation.rollout, "optimizer": explanation.update}
        assert reason in str(paths.get(part, explanation.update if part == "policy" else explanation.compilation))
        with traced_only():
            model.learn(2 * model.n_steps * model.n_envs)
        assert relative_difference(expected, model) <= 2e-6

    with_some_seed(compare)


def test_a_reason_that_the_user_cannot_change_is_not_said(recwarn):
    model = accelerate(ppo(use_sde=True)(0), torch_compile=False)
    assert "gSDE" in explain(model).acting.reason
    model.learn(64)
    assert not [str(warning.message) for warning in recwarn]


def empty_subclass(kind: type) -> type:
    return type(f"Mine{kind.__name__}", (kind,), {"__module__": "a_module_of_a_user"})


@pytest.mark.parametrize("make", [lambda **options: ANO(**options), lambda **options: accelerate(PPO(**options))])
def test_empty_subclasses_in_a_users_module_change_no_decision(make):
    plain = make(policy="MlpPolicy", env="CartPole-v1", **SETTINGS)
    options = {
        "features_extractor_class": empty_subclass(FlattenExtractor),
        "optimizer_class": empty_subclass(torch.optim.Adam),
    }
    mine = make(
        policy=empty_subclass(ActorCriticPolicy),
        env="CartPole-v1",
        **SETTINGS,
        policy_kwargs=options,
        rollout_buffer_class=empty_subclass(RolloutBuffer),
    )
    assert explain(mine) == explain(plain)
    assert explain(plain).acting.path == "NumPy"


def test_the_explanation_is_text_with_a_line_per_part():
    lines = str(explain(accelerate(ppo()(0)))).splitlines()
    assert lines[:2] == ["acting: NumPy", "rollout: the arrays of SB3's buffer"]
    assert lines[2].startswith("device: arrays on the CPU, because the environments are not a TensorVecEnv")
    assert lines[3] == "update: layers of SB3, and a fused step of Adam"
    assert lines[4].startswith("compilation: compiled in trainings from ")


def test_a_model_that_is_not_accelerated_says_so():
    assert "accelerate(model) does that" in str(explain(ppo()(0)))
    with pytest.raises(TypeError, match="int is no on-policy algorithm"):
        explain(3)


def test_values_of_the_buffer_are_finite_numbers():
    model = accelerate(ppo()(0)).learn(32)
    assert np.isfinite(model.rollout_buffer.returns).all()


@pytest.mark.parametrize("kind", ["MlpPolicy", "MultiInputPolicy", "CnnPolicy"])
def test_policies_of_sb3_contrib_are_library_code(kind):
    spaces_of_kind = {"MlpPolicy": BOX_OBSERVATIONS, "MultiInputPolicy": DICT_OBSERVATIONS, "CnnPolicy": IMAGE_OBSERVATIONS}
    model = MaskablePPO(kind, masked_vec_env(spaces_of_kind[kind], spaces.Discrete(4)), **SETTINGS)
    assert decide(model, Options()).library_code
