"""The hyperparameter files, and keys that are none."""

import inspect
from pathlib import Path

import gymnasium as gym
import pytest
import yaml
from torch import nn  # for the policy arguments, which the zoo evaluates

from sb3_ano.zoo.hyperparameters import check_file, check_hyperparameters, hyperparameter_file
from sb3_ano.zoo.registration import ALGORITHMS

MUJOCO = ["HalfCheetah", "Ant", "Hopper", "Walker2d", "Humanoid", "Swimmer"]


def read(algo: str) -> dict:
    return yaml.safe_load(hyperparameter_file(algo).read_text())


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_key_is_known_and_every_value_is_taken(algo):
    for name, settings in read(algo).items():
        check_hyperparameters(settings, ALGORITHMS[algo], name)
        signature = inspect.signature(ALGORITHMS[algo].__init__).parameters
        arguments = {key: value for key, value in settings.items() if key in signature}
        if isinstance(arguments.get("policy_kwargs"), str):
            arguments["policy_kwargs"] = eval(arguments["policy_kwargs"], {"dict": dict, "nn": nn})
        if isinstance(arguments.get("learning_rate"), str):
            arguments["learning_rate"] = float(arguments["learning_rate"].removeprefix("lin_"))
        env = "Pendulum-v1" if arguments.get("use_sde") else "CartPole-v1"
        if arguments["policy"] == "MlpPolicy":
            ALGORITHMS[algo](env=env, **{**arguments, "n_steps": settings.get("n_steps", 2048) * settings.get("n_envs", 1)})


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_environment_exists(algo):
    for name in set(read(algo)) - {"default", "atari"}:
        assert gym.spec(name) is not None


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_entry_takes_the_fast_environments(algo):
    assert {settings.get("backend") for settings in read(algo).values()} == {"auto"}


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_radii_are_constant(algo):
    for name, settings in read(algo).items():
        assert isinstance(settings.get("clip_range", 0.2), float), name


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("env_id", [f"{task}-{version}" for task in MUJOCO for version in ("v4", "v5")])
def test_mujoco_has_the_settings_of_the_experiments(algo, env_id):
    settings = read(algo)[env_id]
    assert (settings["n_envs"], settings["n_steps"], settings["n_epochs"]) == (128, 32, 10)
    assert settings["n_envs"] * settings["n_steps"] // settings["batch_size"] == 4
    assert settings["learning_rate"] == "lin_3e-4"
    assert settings["normalize"] is True
    assert settings["vf_coef"] == 0.25
    policy = eval(settings["policy_kwargs"], {"dict": dict, "nn": nn})
    assert policy["net_arch"] == {"pi": [256, 256], "vf": [256, 256]}
    assert policy["activation_fn"] is nn.Tanh
    assert policy["optimizer_kwargs"] == {"eps": 1e-5}


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_atari_has_the_settings_of_the_experiments(algo):
    settings = read(algo)["atari"]
    assert (settings["n_envs"], settings["n_steps"], settings["n_epochs"]) == (16, 128, 4)
    assert settings["n_envs"] * settings["n_steps"] // settings["batch_size"] == 4
    assert settings["learning_rate"] == "lin_2.5e-4"
    assert settings["ent_coef"] == 0.01


@pytest.mark.parametrize(
    ("algo", "settings", "message"),
    [
        ("ano", {"clip_rang": 0.2}, "my.yml: unknown key 'clip_rang' for ANO, did you mean 'clip_range'"),
        ("ano", {"xyzzy": 1}, "my.yml: unknown key 'xyzzy' for ANO; allowed are.*n_envs"),
        ("spo", {"shaping": "ano"}, "unknown key 'shaping' for SPO"),
        ("ano", {"shaping": abs}, "shaping=.* is not allowed; allowed are names"),
        ("ano", {"n_envs": 0}, "n_envs=0 is not allowed; allowed are whole numbers from 1"),
        ("ano", {"n_envs": 1.5}, "n_envs=1.5 is not allowed"),
    ],
)
def test_bad_hyperparameters_are_named_with_what_is_allowed(algo, settings, message):
    whole = {"policy": "MlpPolicy", "n_timesteps": 1e5, **settings}
    with pytest.raises(ValueError, match=message):
        check_hyperparameters(whole, ALGORITHMS[algo], "my.yml")


@pytest.mark.parametrize("key", ["policy", "n_timesteps"])
def test_a_missing_key_is_named(key):
    settings = {"policy": "MlpPolicy", "n_timesteps": 1e5}
    del settings[key]
    with pytest.raises(ValueError, match=f"my.yml: the key '{key}' is missing"):
        check_hyperparameters(settings, ALGORITHMS["ano"], "my.yml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("CartPole-v1: {n_envs: 1", "is not valid YAML"),
        ("- CartPole-v1", "holds no mapping from environments"),
        ("CartPole-v1:", "CartPole-v1 holds None, not a mapping"),
    ],
)
def test_a_file_that_is_not_in_the_zoos_format_is_named(content, message, tmp_path):
    (tmp_path / "my.yml").write_text(content)
    with pytest.raises(ValueError, match=f"my.yml.*{message}"):
        check_file(str(tmp_path / "my.yml"))


def test_an_installation_without_its_files_says_so():
    with pytest.raises(FileNotFoundError, match="hyperparams/none.yml"):
        hyperparameter_file("none")


def test_the_files_lie_at_the_top_of_the_source_tree():
    assert hyperparameter_file("ano") == Path(__file__).resolve().parents[2] / "hyperparams" / "ano.yml"
