"""Search spaces: what is sampled, what is stored, and what becomes of it."""

import inspect
import math

import optuna
import pytest
from rl_zoo3.exp_manager import ExperimentManager
from rl_zoo3.hyperparams_opt import HYPERPARAMS_CONVERTER, HYPERPARAMS_SAMPLER
from stable_baselines3.common.utils import FloatSchedule
from torch import nn

from sb3_ano import ANO, PAPO, SPO
from sb3_ano.zoo import register
from sb3_ano.zoo.tuning import register_tuning
from sb3_ano.zoo.tuning.spaces import convert_params
from sb3_ano.zoo.tuning.trials import merged

ALGORITHMS = {"ano": ANO, "spo": SPO, "papo": PAPO}
N_ENVS = [1, 6, 8, 100, 128]


@pytest.fixture(scope="module", autouse=True)
def registered():
    register()
    register_tuning()


def sampled(algo, n_envs, count, seed=0, **additional_args):
    """Pairs of the sampler's hyperparameters and of the trial as the study stores it."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed), storage=optuna.storages.InMemoryStorage())
    for _ in range(count):
        trial = study.ask()
        hyperparameters = HYPERPARAMS_SAMPLER[algo](trial, 2, n_envs, additional_args)
        yield hyperparameters, study.tell(trial, 0.0)


def same(one, other):
    if callable(one) and not isinstance(one, type):
        return all(one(progress) == other(progress) for progress in (1.0, 0.5, 0.1, 0.0))
    return one == other


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("n_envs", N_ENVS)
def test_what_is_stored_converts_to_what_was_sampled(algo, n_envs):
    for hyperparameters, trial in sampled(algo, n_envs, count=100):
        converted = HYPERPARAMS_CONVERTER[algo](trial.params)
        assert converted.pop("n_envs") == n_envs
        # Schedules such as lin_0.001 are the zoo's notation in files; it reads them before it makes a model.
        read = ExperimentManager._preprocess_schedules(converted)
        assert read.keys() == hyperparameters.keys()
        for name, value in hyperparameters.items():
            assert same(value, read[name]), name


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_sample_makes_a_model_with_these_hyperparameters(algo):
    for hyperparameters, _ in sampled(algo, 1, count=60, seed=1):
        model = ALGORITHMS[algo]("MlpPolicy", "CartPole-v1", device="cpu", torch_compile=False, **hyperparameters)
        assert model.n_steps % model.batch_size == 0
        for name in ("n_steps", "batch_size", "n_epochs", "gamma", "gae_lambda", "ent_coef", "max_grad_norm"):
            assert getattr(model, name) == hyperparameters[name]
        assert same(FloatSchedule(hyperparameters["learning_rate"]), model.lr_schedule)
        assert type(model.policy.mlp_extractor.policy_net[1]) is hyperparameters["policy_kwargs"]["activation_fn"]
        assert model.clip_range(1.0) == hyperparameters["clip_range"](1.0)
        assert (model.clip_range_high and model.clip_range_high(1.0)) == hyperparameters["clip_range_high"]


def test_only_ano_has_a_shaping_and_only_papo_has_weights_of_variances():
    shared = {
        "batch_size", "clip_range", "clip_range_high", "ent_coef", "gae_lambda", "gamma", "learning_rate", "max_grad_norm",
        "n_epochs", "n_steps", "policy_kwargs",
    }  # fmt: skip
    names = {algo: set(next(sampled(algo, 8, count=1))[0]) for algo in ALGORITHMS}
    assert names["spo"] == shared
    assert names["ano"] == shared | {"shaping"}
    assert names["papo"] == shared | {"k", "omega1", "omega2", "max_epoch_kl"}
    for algo, algorithm in ALGORITHMS.items():
        assert names[algo] <= set(inspect.signature(algorithm.__init__).parameters)


def test_all_choices_are_drawn():
    trials = [trial.params for _, trial in sampled("ano", 8, count=100)]
    assert {params["shaping"] for params in trials} == {"ano", "spo", "ppo"}
    assert {params["clip_range_high_factor"] for params in trials} == {None, 0.7, 1.4, 2.0}
    assert {params["lr_schedule"] for params in trials} == {"constant", "linear"}
    assert {params["net_arch"] for params in trials} == {"tiny", "small", "medium"}


def test_a_conversion_worked_by_hand():
    params = {
        "n_envs": 6,
        "n_steps_pow": 6,
        "n_minibatches_pow": 3,
        "learning_rate": 0.001,
        "lr_schedule": "linear",
        "one_minus_gamma": 0.25,
        "one_minus_gae_lambda": 0.125,
        "clip_range": 0.25,
        "clip_range_high_factor": 2.0,
        "net_arch": "small",
        "activation_fn": "relu",
        "shaping": "spo",
        "n_epochs": 5,
    }
    assert convert_params(params) == {
        "n_envs": 6,
        "n_steps": 64,
        "batch_size": 48,  # 6 x 64 samples in 8 minibatches
        "learning_rate": "lin_0.001",
        "gamma": 0.75,
        "gae_lambda": 0.875,
        "clip_range": 0.25,
        "clip_range_high": 0.5,
        "policy_kwargs": {"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": nn.ReLU},
        "shaping": "spo",
        "n_epochs": 5,
    }
    symmetric = convert_params(params | {"clip_range_high_factor": None, "lr_schedule": "constant"})
    assert symmetric["clip_range_high"] is None
    assert symmetric["learning_rate"] == 0.001


@pytest.mark.parametrize("n_envs", N_ENVS)
def test_minibatches_divide_the_rollout_and_rollouts_are_of_a_sensible_size(n_envs):
    rollouts = set()
    for hyperparameters, _ in sampled("spo", n_envs, count=100):
        rollout = hyperparameters["n_steps"] * n_envs
        rollouts.add(rollout)
        assert rollout % hyperparameters["batch_size"] == 0
        assert 32 <= hyperparameters["batch_size"] <= rollout
        assert 256 <= rollout <= 16_384
        assert hyperparameters["n_steps"] >= 8
        assert math.log2(hyperparameters["n_steps"]).is_integer()
    assert len(rollouts) >= 4


@pytest.mark.parametrize("n_timesteps", [1_000, 20_000, 10**7])
def test_a_trials_budget_holds_eight_rollouts_or_they_are_the_smallest(n_timesteps):
    for hyperparameters, _ in sampled("spo", 8, count=50, n_timesteps=n_timesteps):
        rollout = 8 * hyperparameters["n_steps"]
        assert 8 * rollout <= n_timesteps or rollout == 256


@pytest.mark.parametrize("name", ["n_steps", "batch_size", "learning_rate", "gamma", "clip_range", "shaping", "policy_kwargs"])
def test_what_is_fixed_is_not_searched(name):
    values = {"n_steps": 96, "batch_size": 96}
    drawn = [hyperparameters for hyperparameters, _ in sampled("ano", 4, count=20, fixed={name: values.get(name, 1)})]
    if name == "n_steps":
        assert {hyperparameters["n_steps"] for hyperparameters in drawn} == {96}
        assert all(96 * 4 % hyperparameters["batch_size"] == 0 for hyperparameters in drawn)
    else:
        assert not any(name in hyperparameters for hyperparameters in drawn)


def test_what_a_file_says_of_the_policy_beside_the_searched_stays():
    networks = {"net_arch": {"pi": [64], "vf": [64]}, "activation_fn": nn.ReLU}
    base = {"gamma": 0.9, "policy_kwargs": "dict(log_std_init=-2, activation_fn=nn.GELU, optimizer_kwargs=dict(eps=1e-5))"}
    result = merged(base, {"policy_kwargs": networks, "clip_range": 0.3})
    assert result["gamma"] == 0.9
    assert result["clip_range"] == 0.3
    assert eval(result["policy_kwargs"]) == networks | {"log_std_init": -2, "optimizer_kwargs": {"eps": 1e-5}}
    assert eval(merged({"policy_kwargs": {"log_std_init": -2}}, {"policy_kwargs": networks})["policy_kwargs"]) == (
        networks | {"log_std_init": -2}
    )
    assert eval(merged({}, {"policy_kwargs": networks})["policy_kwargs"]) == networks


def test_what_no_file_could_hold_is_named():
    with pytest.raises(ValueError, match="rollout_buffer_class=<class 'object'> cannot be stored with a trial"):
        merged({"rollout_buffer_class": object}, {})
    with pytest.raises(ValueError, match="in policy_kwargs cannot be stored with a trial; give policy_kwargs as text"):
        merged({"policy_kwargs": {"features_extractor_class": object}}, {"policy_kwargs": {"net_arch": [64]}})
