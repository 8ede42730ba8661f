"""``ANO(shaping="ppo")`` against SB3's PPO, an independent implementation of the same algorithm."""

import functools
from collections.abc import Callable

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm

from sb3_ano import ANO
from tests.algorithms.comparison import ACCELERATED_PPO, PPO_OF_ANO, relative_difference, with_some_seed
from tests.tiny_envs import BOX_ACTIONS, BOX_OBSERVATIONS, DICT_OBSERVATIONS, IMAGE_OBSERVATIONS, tiny_vec_env

# Enough samples, epochs and learning rate for the clip to act: a radius of 0.201 differs from one of 0.2 only on samples
# whose ratio comes to lie between the two. (More of it, and a sample that rounding moves across the edge of the region, where
# PPO's gradient jumps, would be amplified by the dynamics of Pendulum.)
SETTINGS = {"n_steps": 256, "batch_size": 64, "n_epochs": 10, "learning_rate": 1e-3, "seed": 3, "device": "cpu"}

CASES: dict[str, tuple[str, Callable, dict]] = {
    "CartPole": ("MlpPolicy", lambda: gym.make("CartPole-v1"), {}),
    "Pendulum": ("MlpPolicy", lambda: gym.make("Pendulum-v1"), {"learning_rate": 1e-3}),
    "gSDE": ("MlpPolicy", lambda: gym.make("Pendulum-v1"), {"use_sde": True, "sde_sample_freq": 4, "learning_rate": 1e-3}),
    "MultiDiscrete": ("MlpPolicy", functools.partial(tiny_vec_env, BOX_OBSERVATIONS, spaces.MultiDiscrete([3, 2])), {}),
    "MultiBinary": ("MlpPolicy", functools.partial(tiny_vec_env, BOX_OBSERVATIONS, spaces.MultiBinary(3)), {}),
    "Dict": ("MultiInputPolicy", functools.partial(tiny_vec_env, DICT_OBSERVATIONS, spaces.Discrete(3)), {}),
    "image": (
        "CnnPolicy",
        functools.partial(tiny_vec_env, IMAGE_OBSERVATIONS, BOX_ACTIONS),
        {"n_steps": 64, "n_epochs": 6, "policy_kwargs": {"features_extractor_kwargs": {"features_dim": 32}}},
    ),
}
OPTIONS = {
    "plain": {},
    "clip_range_vf": {"clip_range_vf": 1.0},
    "target_kl": {"target_kl": 0.005},
    "batches that do not divide": {"batch_size": 96, "normalize_advantage": False, "ent_coef": 0.01},
}


def make(cls: Callable[..., BaseAlgorithm], case: str, **options) -> BaseAlgorithm:
    policy, env, settings = CASES[case]
    return cls(policy, env(), **{**SETTINGS, **settings, **options})


def after_three_rollouts(cls: Callable[..., BaseAlgorithm], case: str, **options) -> BaseAlgorithm:
    model = make(cls, case, **options)
    return model.learn(3 * model.n_steps * model.n_envs)


@functools.cache
def ppo_after_three_rollouts(case: str, options: str, seed: int) -> BaseAlgorithm:
    return after_three_rollouts(PPO, case, seed=seed, **OPTIONS[options])


def tolerance(case: str) -> float:
    """Largest ``|d theta| / |theta|`` after three rollouts that counts as rounding."""
    return 1e-5 if case == "image" else 1e-6


# The fast tests have all options with two cases, and all cases with two options.
PAIRS = []
for one_case in CASES:
    for one_option in OPTIONS:
        is_fast = one_case in ("CartPole", "Pendulum") or one_option in ("plain", "target_kl")
        PAIRS.append(pytest.param(one_case, one_option, marks=[] if is_fast else pytest.mark.slow))


@pytest.mark.filterwarnings("ignore:batch_size=96 does not divide")
@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")
@pytest.mark.parametrize(("case", "options"), PAIRS)
def test_parameters_and_actions_are_those_of_ppo_after_three_rollouts(case, options):
    with_some_seed(lambda seed: compare_after_three_rollouts(case, options, seed))


def compare_after_three_rollouts(case: str, options: str, seed: int) -> None:
    expected = ppo_after_three_rollouts(case, options, seed)
    options_of_case = {"torch_compile": False, "seed": seed, **OPTIONS[options]}
    with_shape = after_three_rollouts(PPO_OF_ANO, case, **options_of_case)
    accelerated = after_three_rollouts(ACCELERATED_PPO, case, **options_of_case)
    assert accelerated.logger.name_to_value.keys() == expected.logger.name_to_value.keys()

    for found in (with_shape, accelerated):
        assert relative_difference(expected, found) <= tolerance(case)
        expected_actions = expected.rollout_buffer.actions
        actions = found.rollout_buffer.actions
        if isinstance(found.action_space, spaces.Box):
            np.testing.assert_allclose(actions, expected_actions, rtol=1e-3, atol=1e-4)
        else:
            np.testing.assert_array_equal(actions, expected_actions)
        for name in ("approx_kl", "clip_fraction", "policy_gradient_loss", "value_loss", "entropy_loss", "loss"):
            logged, expected_log = (model.logger.name_to_value[f"train/{name}"] for model in (found, expected))
            assert logged == pytest.approx(expected_log, rel=1e-3, abs=1e-5), name


# Not with target_kl, which ends an update before the clip acts on many samples.
@pytest.mark.parametrize("options", ["plain", pytest.param("clip_range_vf", marks=pytest.mark.slow)])
@pytest.mark.parametrize("different", [{"clip_range": 0.201}, {"shaping": "spo"}], ids=["0.201", "spo"])
@pytest.mark.parametrize("case", CASES)
def test_that_test_tells_another_radius_and_another_shape_apart(case, different, options):
    def differs(seed: int) -> None:
        found = after_three_rollouts(ANO, case, seed=seed, **{"shaping": "ppo", **OPTIONS[options], **different})
        assert relative_difference(ppo_after_three_rollouts(case, options, seed), found) > 10 * tolerance(case)

    with_some_seed(differs)


def loss_and_gradient_of_a_moved_policy(model: BaseAlgorithm, scale: float = 0.1) -> tuple[float, torch.Tensor]:
    """One minibatch of the size of the rollout, after the policy was moved so far that the clip acts."""
    train = model.train

    def move_and_train() -> None:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.policy.parameters():
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
        train()

    model.train = move_and_train
    model.learn(model.n_steps * model.n_envs)
    assert model.logger.name_to_value["train/clip_fraction"] > 0.01
    # After a single step, Adam's first moment is a tenth of the gradient.
    states = [model.policy.optimizer.state[parameter] for parameter in model.policy.parameters()]
    assert {state["step"].item() for state in states} == {1.0}
    gradient = torch.cat([10.0 * state["exp_avg"].flatten() for state in states])
    return model.logger.name_to_value["train/loss"], gradient


@pytest.mark.parametrize("options", [{}, {"clip_range_vf": 0.1}], ids=["plain", "clip_range_vf"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_of_a_minibatch_are_those_of_ppo(case, options):
    once = {"n_steps": 64, "n_epochs": 1, "batch_size": 64 if case in ("CartPole", "Pendulum", "gSDE") else 128}
    # No clipping by norm: a scaled gradient would hide a difference in its length.
    once |= {"max_grad_norm": 1e9, "clip_range": 0.05, **options}
    model = make(ANO, case, shaping="ppo", **once)
    loss, gradient = loss_and_gradient_of_a_moved_policy(model)
    expected_loss, expected_gradient = loss_and_gradient_of_a_moved_policy(make(PPO, case, **once))

    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert (gradient - expected_gradient).norm() <= 1e-6 * expected_gradient.norm()
    assert model.logger.name_to_value["train/grad_norm"] == pytest.approx(gradient.norm().item(), rel=1e-5)
