"""Parameters and Adam moments as vectors, against ``torch.optim.Adam``."""

import copy

import pytest
import torch
from stable_baselines3.common.torch_layers import FlattenExtractor

from sb3_ano import ANO
from sb3_ano.algorithms.flat_adam import FlatAdam, FlatParameters, has_tied_parameters

SMALL = {"n_steps": 32, "batch_size": 32, "n_epochs": 1, "seed": 0}


def a_policy(**optimizer_kwargs):
    made = ANO("MlpPolicy", "CartPole-v1", **SMALL, policy_kwargs={"optimizer_kwargs": optimizer_kwargs})
    return made.policy


def shared(policy) -> FlatParameters:
    parameters = FlatParameters(policy)
    parameters.share()
    return parameters


def gradients(policy, steps: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(p.shape, generator=generator) * 0.1 for p in policy.parameters()] for _ in range(steps)]


def torch_steps(policy, all_gradients) -> None:
    for each in all_gradients:
        for parameter, gradient in zip(policy.parameters(), each, strict=True):
            parameter.grad = gradient.clone()
        policy.optimizer.step()


def flat_steps(policy, all_gradients, go: float = 1.0) -> FlatAdam:
    parameters = shared(policy)
    adam = FlatAdam(policy.optimizer, parameters)
    adam.begin()
    for each in all_gradients:
        adam.step(parameters.flattened(each), torch.tensor(go, dtype=torch.float64))
    adam.publish()
    return adam


def assert_same_training_state(one, other, tolerance: float = 1e-6) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
        state, expected = one.optimizer.state[mine], other.optimizer.state[theirs]
        assert state.keys() == expected.keys()
        for name in state:
            torch.testing.assert_close(state[name], expected[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("settings", [{}, {"eps": 1e-8, "betas": (0.8, 0.99)}])
def test_fifty_steps_are_those_of_torchs_adam(settings):
    one, other = a_policy(**settings), a_policy(**settings)
    all_gradients = gradients(one, 50)
    flat_steps(one, all_gradients)
    torch_steps(other, all_gradients)
    assert_same_training_state(one, other)


def test_either_goes_on_where_the_other_stopped():
    one, other = a_policy(), a_policy()
    first, second, third = (gradients(one, 5) for _ in range(3))
    flat_steps(one, first)
    torch_steps(one, second)
    flat_steps(one, third)
    torch_steps(other, [*first, *second, *third])
    assert_same_training_state(one, other)


def test_a_step_that_is_not_to_go_changes_nothing():
    policy = a_policy()
    flat_steps(policy, gradients(policy, 3))
    before = copy.deepcopy((policy.state_dict(), policy.optimizer.state_dict()["state"]))
    bad = [[torch.full_like(p, float("nan")) for p in policy.parameters()]]
    flat_steps(policy, bad, go=0.0)
    after = (policy.state_dict(), policy.optimizer.state_dict()["state"])
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert all(torch.equal(before[1][i][name], after[1][i][name]) for i in before[1] for name in before[1][i])


def test_parameters_keep_their_values_and_share_the_vector():
    policy = a_policy()
    before = copy.deepcopy(policy.state_dict())
    parameters = shared(policy)
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.state_dict().items())
    assert parameters.are_shared()
    with torch.no_grad():
        parameters.vector.fill_(3.0)
    assert all(bool((parameter == 3.0).all()) for parameter in policy.parameters())
    for view, parameter in zip(parameters.views(parameters.vector), policy.parameters(), strict=True):
        assert view.shape == parameter.shape


def test_frozen_parameters_are_left_alone():
    policy = a_policy()
    policy.action_net.weight.requires_grad_(False)
    assert "action_net.weight" not in FlatParameters(policy).names


def test_a_change_behind_its_back_is_noticed():
    policy = a_policy()
    parameters = shared(policy)
    adam = FlatAdam(policy.optimizer, parameters)
    assert adam.is_current()
    policy.optimizer.load_state_dict(copy.deepcopy(policy.optimizer.state_dict()))
    adam.begin()
    adam.step(parameters.flattened(gradients(policy, 1)[0]), torch.tensor(1.0, dtype=torch.float64))
    adam.publish()
    assert adam.is_current()
    policy.optimizer.load_state_dict(copy.deepcopy(policy.optimizer.state_dict()))
    assert not adam.is_current()
    policy.action_net.weight.data = policy.action_net.weight.data.clone()
    assert parameters.are_those_of(policy)
    assert not parameters.are_shared()


@pytest.mark.parametrize(
    ("settings", "supported"),
    [({}, True), ({"weight_decay": 0.1}, False), ({"amsgrad": True}, False), ({"maximize": True}, False)],
)
def test_only_a_plain_adam_is_replaced(settings, supported):
    policy = a_policy(**settings)
    assert (FlatAdam.obstacle(policy.optimizer, FlatParameters(policy)) is None) is supported


def test_layers_that_share_a_parameter_are_noticed():
    policy = a_policy()
    assert not has_tied_parameters(policy)
    policy.mlp_extractor.value_net[0].weight = policy.mlp_extractor.policy_net[0].weight
    assert has_tied_parameters(policy)


def test_an_optimizer_with_hooks_makes_its_own_steps():
    policy = a_policy()
    policy.optimizer.register_step_post_hook(lambda *_: None)
    assert FlatAdam.obstacle(policy.optimizer, FlatParameters(policy)) is not None


def test_parameters_that_join_late_are_left_to_torch():
    policy = a_policy()
    policy.action_net.weight.requires_grad_(False)
    flat_steps(policy, [[torch.ones_like(p) for p in policy.parameters() if p.requires_grad]] * 3)
    policy.action_net.weight.requires_grad_(True)
    assert FlatAdam.obstacle(policy.optimizer, FlatParameters(policy)) is not None


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
