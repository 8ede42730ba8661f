"""The step on vectors against ``torch.optim.Adam``, and the format of its state."""

import copy

import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.torch_layers import FlattenExtractor
from torch.optim import Adam

from sb3_ano import ANO
from sb3_ano.algorithms.flat_adam import FlatAdam
from sb3_ano.algorithms.update import _has_tied_parameters
from tests.common import SMALL, parameters


def a_policy(**optimizer_kwargs):
    return ANO("MlpPolicy", "CartPole-v1", **SMALL, policy_kwargs={"optimizer_kwargs": optimizer_kwargs}).policy


def gradients(policy, steps: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(p.shape, generator=generator) * 0.1 for p in policy.parameters()] for _ in range(steps)]


def own_steps(policy, all_gradients) -> None:
    """Steps by the optimizer's own ``step``, which is torch's."""
    for tensors in all_gradients:
        for parameter, gradient in zip(policy.parameters(), tensors, strict=True):
            parameter.grad = gradient.clone()
        policy.optimizer.step()


def flat_steps(policy, all_gradients, apply: float = 1.0) -> None:
    vectors = policy.optimizer.flatten()
    for tensors in all_gradients:
        vectors.step(vectors.flattened(tensors), torch.tensor(apply, dtype=torch.float64))


def assert_same_training_state(policy, other, tolerance: float = 1e-6) -> None:
    for mine, theirs in zip(policy.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
        state, expected = policy.optimizer.state[mine], other.optimizer.state[theirs]
        assert state.keys() == expected.keys()
        for name in state:
            torch.testing.assert_close(state[name], expected[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("settings", [{}, {"eps": 1e-8, "betas": (0.8, 0.99)}])
def test_steps_on_vectors_and_own_steps_take_turns(settings):
    policy, other = a_policy(**settings), a_policy(**settings)
    other.optimizer = Adam(other.parameters(), lr=3e-4, **settings)
    parts = [gradients(policy, steps) for steps in (40, 5, 5)]
    flat_steps(policy, parts[0])
    own_steps(policy, parts[1])
    flat_steps(policy, parts[2])
    own_steps(other, [*parts[0], *parts[1], *parts[2]])
    assert_same_training_state(policy, other)


def test_a_step_that_is_not_applied_changes_nothing():
    policy = a_policy()
    flat_steps(policy, gradients(policy, 3))
    twin = copy.deepcopy(policy)
    flat_steps(policy, [[torch.full_like(p, float("nan")) for p in policy.parameters()]], apply=0.0)
    assert_same_training_state(policy, twin, tolerance=0.0)


def freeze_one_after_the_other(policy) -> None:
    policy.action_net.weight.requires_grad_(False)
    policy.optimizer.flatten()
    policy.action_net.weight.requires_grad_(True)
    policy.value_net.weight.requires_grad_(False)


@pytest.mark.parametrize(
    "change",
    [
        freeze_one_after_the_other,
        lambda policy: policy.optimizer.load_state_dict(copy.deepcopy(policy.optimizer.state_dict())),
        lambda policy: setattr(policy.action_net.weight, "data", policy.action_net.weight.data.clone()),
        lambda policy: policy.optimizer.state[policy.action_net.weight].update(exp_avg=torch.ones(2, 64)),
        lambda policy: policy.optimizer.state.clear(),
        lambda policy: policy.action_net.weight.requires_grad_(False),
    ],
    ids=["frozen in turn", "load_state_dict", "data", "state", "cleared", "frozen"],
)
def test_what_is_assigned_behind_its_back_is_taken_over(change):
    policies = a_policy(), a_policy()
    for policy in policies:
        flat_steps(policy, gradients(policy, 3))
        change(policy)
    flat, other = policies
    trained = [[g for g, p in zip(gs, flat.parameters(), strict=True) if p.requires_grad] for gs in gradients(flat, 2)]
    flat_steps(flat, trained)
    for tensors in trained:
        for parameter, gradient in zip((p for p in other.parameters() if p.requires_grad), tensors, strict=True):
            parameter.grad = gradient
        other.optimizer.step()
    assert_same_training_state(flat, other)


def test_parameters_and_moments_are_views_of_vectors_that_stay_in_place():
    policy = a_policy()
    before = copy.deepcopy(policy.state_dict())
    vectors = policy.optimizer.flatten()
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.state_dict().items())
    vectors.parameters.fill_(3.0)
    vectors.first.fill_(4.0)
    assert all(bool((parameter == 3.0).all()) for parameter in policy.parameters())
    assert all(bool((state["exp_avg"] == 4.0).all()) for state in policy.optimizer.state.values())
    policy.optimizer.load_state_dict(policy.optimizer.state_dict())
    places = vectors.parameters.data_ptr(), vectors.first.data_ptr()
    vectors = policy.optimizer.flatten()
    assert (vectors.parameters.data_ptr(), vectors.first.data_ptr()) == places


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, FlatAdam),
        ({"optimizer_kwargs": {"fused": True}}, FlatAdam),
        ({"optimizer_kwargs": {"weight_decay": 0.1}}, Adam),
        ({"optimizer_kwargs": {"amsgrad": True}}, Adam),
        ({"optimizer_kwargs": {"maximize": True}}, Adam),
        ({"optimizer_class": torch.optim.AdamW}, torch.optim.AdamW),
        ({"optimizer_class": torch.optim.SGD}, torch.optim.SGD),
    ],
    ids=str,
)
def test_only_a_plain_adam_is_replaced_when_the_policy_is_built(options, kind):
    policy = ANO("MlpPolicy", "CartPole-v1", **SMALL, policy_kwargs=options).policy
    assert type(policy.optimizer) is kind
    assert (FlatAdam.obstacle(policy.optimizer, policy) is None) is (kind is FlatAdam)


def late(policy) -> None:
    policy.action_net.weight.requires_grad_(False)
    flat_steps(policy, [[torch.ones_like(p) for p in policy.parameters() if p.requires_grad]] * 3)
    policy.action_net.weight.requires_grad_(True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda policy: policy.optimizer.register_step_post_hook(lambda *_: None), "has hooks"),
        (lambda policy: policy.value_net.weight.register_hook(lambda _: None), "policy.value_net.weight has hooks"),
        (lambda policy: setattr(policy.optimizer, "step", lambda: None), "policy.optimizer.step was replaced"),
        (lambda policy: policy.optimizer.param_groups[0].update(weight_decay=0.5), "weight_decay=0.5"),
        (lambda policy: setattr(policy, "value_net", torch.nn.Linear(64, 1)), "other parameters than the policy"),
        (lambda policy: policy.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]}), "several groups"),
        (lambda policy: policy.double(), "not float32"),
        (late, "trained longer than others"),
    ],
)
def test_what_a_step_on_vectors_would_not_respect_is_named(change, reason):
    policy = a_policy()
    change(policy)
    assert reason in FlatAdam.obstacle(policy.optimizer, policy)


def test_saved_files_are_those_of_torchs_adam_in_both_directions(tmp_path):
    model = ANO("MlpPolicy", "CartPole-v1", **SMALL, shaping="ppo").learn(64)
    ppo = PPO("MlpPolicy", "CartPole-v1", **SMALL).learn(64)
    states = [each.get_parameters()["policy.optimizer"] for each in (model, ppo)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert [state.keys() for state in states[0]["state"].values()] == [state.keys() for state in states[1]["state"].values()]
    model.save(tmp_path / "model")
    # SB3's own loaders read the file: that of PPO, and set_parameters of another algorithm.
    as_ppo = PPO.load(tmp_path / "model", env=ppo.get_env())
    assert type(as_ppo.policy.optimizer) is Adam
    loaded = ANO.load(tmp_path / "model", env=model.get_env())
    for each in (as_ppo, loaded):
        each.set_random_seed(1)
        each.learn(64)
    torch.testing.assert_close(parameters(loaded), parameters(as_ppo), rtol=1e-5, atol=1e-7)
    ppo.save(tmp_path / "ppo")
    model.set_parameters(tmp_path / "ppo")
    assert torch.equal(parameters(model), parameters(ppo))
    model.learn(64)


def test_layers_that_share_a_parameter_are_noticed():
    policy = a_policy()
    assert not _has_tied_parameters(policy)
    policy.mlp_extractor.value_net[0].weight = policy.mlp_extractor.policy_net[0].weight
    assert _has_tied_parameters(policy)


class Versioned(FlattenExtractor):
    """Stores its scale; a file without a version is one of a former class, which stored the logarithm."""

    _version = 2

    def __init__(self, space) -> None:
        super().__init__(space)
        self.scale = torch.nn.Parameter(torch.full((self.features_dim,), 2.0))

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return super().forward(observations) * self.scale

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}scale"] = state_dict[f"{prefix}scale"].exp()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def test_versions_of_modules_are_saved(tmp_path):  # review core 12
    made = ANO("MlpPolicy", "CartPole-v1", **SMALL, policy_kwargs={"features_extractor_class": Versioned})
    made.save(tmp_path / "model.zip")
    loaded = ANO.load(tmp_path / "model.zip")
    assert torch.equal(loaded.policy.features_extractor.scale, made.policy.features_extractor.scale)
