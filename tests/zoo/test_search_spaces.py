"""Search spaces: what is sampled, and the hyperparameters that it becomes."""

import math

import optuna
import pytest
from optuna.distributions import FloatDistribution
from rl_zoo3.hyperparams_opt import HYPERPARAMS_SAMPLER
from torch import nn

from sb3_ano._registry import ALGORITHMS
from sb3_ano.zoo.search import merge
from sb3_ano.zoo.search_spaces import convert_params


def sampled(algo, n_envs, count, seed=0, **additional_args):
    """Pairs of the sampler's hyperparameters and of the trial as the study stores it."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed), storage=optuna.storages.InMemoryStorage())
    for _ in range(count):
        trial = study.ask()
        hyperparameters = HYPERPARAMS_SAMPLER[algo](trial, 2, n_envs, additional_args)
        yield hyperparameters, study.tell(trial, 0.0)


def test_the_documented_space_is_searched():
    shared = {
        "learning_rate": (1e-5, 5e-3), "one_minus_gamma": (1e-4, 0.1), "one_minus_gae_lambda": (1e-3, 0.3),
        "ent_coef": (1e-8, 0.1), "max_grad_norm": (0.3, 2.0), "clip_range": (0.05, 2.0), "n_steps_pow": (5, 11),
        "lr_schedule": ("constant", "linear"), "n_epochs": (2, 5, 10, 20), "clip_range_high_factor": (None, 0.7, 1.4, 2.0),
        "net_arch": ("tiny", "small", "medium"), "activation_fn": ("tanh", "relu"), "n_minibatches_pow": (0, 5),
    }  # fmt: skip
    own = {"ano": {"shaping": ("ano", "spo", "ppo")}, "spo": {}}
    own["papo"] = {"k": (1.0, 20.0), "omega1": (5e-4, 0.05), "omega2": (5e-4, 0.05), "max_epoch_kl": (0.02, 0.05, 0.1, None)}
    for algo in ALGORITHMS:
        ((_, trial),) = sampled(algo, 8, count=1)
        spaces = trial.distributions.items()
        found = {name: getattr(space, "choices", None) or (space.low, space.high) for name, space in spaces}
        assert found == shared | own[algo.partition("_")[0]]
        assert all(space.log for _, space in spaces if isinstance(space, FloatDistribution))


def test_a_conversion_worked_by_hand():
    params = {
        "n_steps_pow": 6, "n_minibatches_pow": 3, "learning_rate": 0.001, "lr_schedule": "linear",
        "one_minus_gamma": 0.25, "one_minus_gae_lambda": 0.125, "clip_range": 0.25, "clip_range_high_factor": 2.0,
        "net_arch": "small", "activation_fn": "relu", "shaping": "spo", "n_epochs": 5,
    }  # fmt: skip
    assert convert_params(params, n_envs=6) == {
        "n_steps": 64, "batch_size": 48,  # 6 x 64 samples in 8 minibatches
        "learning_rate": "lin_0.001", "gamma": 0.75, "gae_lambda": 0.875, "clip_range": 0.25, "clip_range_high": 0.5,
        "policy_kwargs": {"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": nn.ReLU},
        "shaping": "spo", "n_epochs": 5,
    }  # fmt: skip
    symmetric = convert_params(params | {"clip_range_high_factor": None, "lr_schedule": "constant"}, n_envs=6)
    assert (symmetric["clip_range_high"], symmetric["learning_rate"]) == (None, 0.001)


@pytest.mark.parametrize("n_envs", [1, 6, 8, 100, 128])
def test_rollouts_and_minibatches_are_of_a_sensible_size(n_envs):
    rollouts = set()
    for n_timesteps in (1_000, 20_000, 10**7):
        for hyperparameters, _ in sampled("ano", n_envs, count=40, n_timesteps=n_timesteps):
            rollout = hyperparameters["n_steps"] * n_envs
            rollouts.add(rollout)
            assert rollout % hyperparameters["batch_size"] == 0
            assert 32 <= hyperparameters["batch_size"] <= rollout
            assert 256 <= rollout <= 16_384
            assert hyperparameters["n_steps"] >= 8
            assert math.log2(hyperparameters["n_steps"]).is_integer()
            assert 8 * rollout <= n_timesteps or rollout <= 1024, "a trial has eight rollouts, or they are the smallest"
    assert len(rollouts) >= 4


@pytest.mark.parametrize("name", ["n_steps", "batch_size", "learning_rate", "gamma", "clip_range", "shaping", "policy_kwargs"])
def test_what_is_fixed_is_not_searched(name):
    for hyperparameters, _ in sampled("ano", 4, count=20, fixed={name: 96}):
        assert hyperparameters.get(name, "not searched") == (96 if name == "n_steps" else "not searched")
        assert ("clip_range_high" in hyperparameters) == (name != "clip_range"), "it is a multiple of clip_range"
        assert name != "n_steps" or 96 * 4 % hyperparameters["batch_size"] == 0


@pytest.mark.parametrize("as_text", [str, eval])
def test_policy_kwargs_of_the_file_that_are_not_searched_stay(as_text):
    networks = {"net_arch": {"pi": [64], "vf": [64]}, "activation_fn": nn.ReLU}
    given = as_text("dict(log_std_init=-2, activation_fn=nn.GELU, optimizer_kwargs=dict(eps=1e-5))")
    result = merge({"gamma": 0.9, "policy_kwargs": given}, {"policy_kwargs": networks, "clip_range": 0.3})
    assert (result["gamma"], result["clip_range"]) == (0.9, 0.3)
    assert eval(result["policy_kwargs"]) == networks | {"log_std_init": -2, "optimizer_kwargs": {"eps": 1e-5}}
    assert eval(merge({}, {"policy_kwargs": networks})["policy_kwargs"]) == networks
    assert eval(merge({"policy_kwargs": given}, {})["policy_kwargs"])["log_std_init"] == -2
