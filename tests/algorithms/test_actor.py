"""The policy as the collection uses it, against ``policy(observations)`` with the same random numbers."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback, StopTrainingOnMaxEpisodes
from torch import nn

from sb3_ano import ANO
from sb3_ano.algorithms.actor import NumpyActor, TorchActor, make_actor
from tests.algorithms.test_policy_evaluation import ACTIONS, POLICIES, Overriding, model, tensors
from tests.common import parameters
from tests.tiny_envs import BOX_ACTIONS, BOX_OBSERVATIONS

NETS = {
    "default": {},
    "ReLU": {"activation_fn": nn.ReLU},
    "different": {"net_arch": {"pi": [16], "vf": [32, 8]}},
    "wide": {"net_arch": [256, 256]},
    "none": {"net_arch": []},
}


def moved(made: ANO) -> ANO:
    """The model with parameters away from their symmetric beginning."""
    with torch.no_grad():
        for parameter in made.policy.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def assert_acts_like_the_policy(made: ANO, actor, n_envs: int, steps: int = 5) -> None:
    observations = [tensors(made.observation_space, n_envs) for _ in range(steps)]
    torch.manual_seed(7)
    with torch.no_grad():
        expected = [made.policy(observation) for observation in observations]
    torch.manual_seed(7)
    actor = actor()
    for observation, (actions, values, log_probs) in zip(observations, expected, strict=True):
        arrays = {k: v.numpy() for k, v in observation.items()} if isinstance(observation, dict) else observation.numpy()
        found = actor(arrays)
        for mine, theirs in zip(found, (actions, values, log_probs), strict=True):
            assert mine.shape == theirs.shape
            assert mine.dtype == theirs.numpy().dtype
        if isinstance(made.action_space, spaces.Box):
            np.testing.assert_allclose(found[0], actions.numpy(), rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(found[0], actions.numpy())
        np.testing.assert_allclose(found[1], values.numpy(), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found[2], log_probs.numpy(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(actor.values(arrays), values.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_envs", [1, 2, 40])
@pytest.mark.parametrize("net", NETS.values(), ids=NETS)
@pytest.mark.parametrize("actions", ACTIONS, ids=lambda space: type(space).__name__)
def test_the_numpy_actor_acts_like_the_policy(actions, net, n_envs):
    made = moved(model("MlpPolicy", BOX_OBSERVATIONS, actions, policy_kwargs=net))
    assert NumpyActor.supports(made.policy, n_envs) or net == NETS["wide"]
    assert_acts_like_the_policy(made, lambda: NumpyActor(made.policy, n_envs), n_envs)


@pytest.mark.parametrize("use_sde", [False, True])
@pytest.mark.parametrize(("policy", "observations"), POLICIES, ids=["Mlp", "Cnn", "MultiInput"])
def test_the_torch_actor_acts_like_the_policy(policy, observations, use_sde):
    made = model(policy, observations, BOX_ACTIONS, use_sde=use_sde)
    made.policy.reset_noise(3) if use_sde else None
    assert_acts_like_the_policy(made, lambda: TorchActor(made.policy, "float32"), 3)


def test_observations_of_any_type_and_rank_are_flattened_as_sb3_does():
    made = model("MlpPolicy", spaces.Box(-1.0, 1.0, (3, 2), np.float64), BOX_ACTIONS)
    assert_acts_like_the_policy(made, lambda: NumpyActor(made.policy, 2), 2)


@pytest.mark.parametrize(("n_envs", "size"), [(1, 6), (3, 5), (1, 1), (4, 4)])
def test_as_many_random_numbers_are_drawn_at_each_step_as_by_the_policy(n_envs, size):
    made = model("MlpPolicy", BOX_OBSERVATIONS, spaces.Box(-1.0, 1.0, (size,), np.float32))
    assert_acts_like_the_policy(made, lambda: NumpyActor(made.policy, n_envs), n_envs)
    state = torch.get_rng_state()
    torch.manual_seed(7)
    for _ in range(5):
        torch.normal(torch.zeros(n_envs, size), torch.ones(n_envs, size))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_numpy_actor_is_taken_where_it_can_be():
    made = model("MlpPolicy", BOX_OBSERVATIONS, BOX_ACTIONS)
    assert isinstance(make_actor(made, 2), NumpyActor)
    made.policy.mlp_extractor.register_forward_hook(lambda *_: None)
    assert isinstance(make_actor(made, 2), TorchActor)


@pytest.mark.parametrize(
    ("policy", "env", "options"),
    [
        ("MlpPolicy", "Pendulum-v1", {"use_sde": True}),
        ("MlpPolicy", "Pendulum-v1", {"precision": "bfloat16"}),
        ("MlpPolicy", "Pendulum-v1", {"policy_kwargs": {"activation_fn": nn.GELU}}),
        ("MlpPolicy", "Pendulum-v1", {"policy_kwargs": {"share_features_extractor": False}}),
        ("MlpPolicy", "Taxi-v4", {}),
        (Overriding, "Pendulum-v1", {}),
    ],
)
@pytest.mark.filterwarnings("ignore:precision='bfloat16'")
def test_other_policies_are_left_to_pytorch(policy, env, options):
    made = ANO(policy, gym.make(env), n_steps=16, batch_size=16, **options)
    assert isinstance(make_actor(made, 2), TorchActor)


@pytest.mark.parametrize(
    "edit",
    [
        lambda policy: policy.mlp_extractor.policy_net.append(nn.ReLU()),
        lambda policy: policy.mlp_extractor.value_net.append(nn.Linear(64, 64)),
        lambda policy: policy.mlp_extractor.value_net.__setitem__(1, nn.ReLU()),
        lambda policy: setattr(policy, "action_net", nn.Linear(64, 2, bias=False)),
        lambda policy: policy.double(),
    ],
    ids=["two activations", "two layers", "different activations", "no bias", "float64"],
)
def test_a_network_that_was_edited_is_left_to_pytorch(edit):
    made = model("MlpPolicy", BOX_OBSERVATIONS, BOX_ACTIONS)
    edit(made.policy)
    assert not NumpyActor.supports(made.policy, 2)


def test_many_observations_and_wide_layers_are_left_to_pytorch():
    made = model("MlpPolicy", BOX_OBSERVATIONS, BOX_ACTIONS)
    assert NumpyActor.supports(made.policy, 64)
    assert not NumpyActor.supports(made.policy, 65)


def test_a_hook_on_the_policy_is_called_at_every_step():
    calls = []
    made = model("MlpPolicy", BOX_OBSERVATIONS, BOX_ACTIONS)
    made.policy.register_forward_hook(lambda *_: calls.append(1))
    made.learn(64)
    assert len(calls) == 32


class NoOp(BaseCallback):
    """A custom callback, which could change the policy and does not."""

    def _on_step(self) -> bool:
        return True


@pytest.mark.parametrize(
    "callback",
    [
        NoOp,
        lambda: lambda *_: True,
        lambda: [NoOp()],
        partial(CheckpointCallback, 10**9, "unused"),
        partial(StopTrainingOnMaxEpisodes, 10**9),
    ],
    ids=["custom", "function", "list", "checkpoint", "stop"],
)
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_a_callback_that_changes_nothing_changes_no_bit(env_id, callback):
    def trained(callback) -> torch.Tensor:
        model = ANO("MlpPolicy", env_id, n_steps=64, batch_size=32, n_epochs=2, seed=1, device="cpu")
        return parameters(model.learn(128, callback=callback))

    assert torch.equal(trained(callback()), trained(None))
