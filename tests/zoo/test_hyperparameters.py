"""The hyperparameter files, and invalid hyperparameters."""

import inspect
from pathlib import Path

import gymnasium as gym
import pytest
import yaml
from torch import nn  # for the policy arguments, which the zoo evaluates

from sb3_ano._registry import ALGORITHMS
from sb3_ano.zoo.hyperparameters import check_hyperparameters, hyperparameter_file

MUJOCO = ["HalfCheetah", "Ant", "Hopper", "Walker2d", "Humanoid", "Swimmer"]
EVERY = pytest.mark.parametrize("algo", ALGORITHMS)


def read(algo: str) -> dict:
    return yaml.safe_load(hyperparameter_file(algo).read_text())


@EVERY
def test_every_key_is_known_and_every_value_is_valid(algo):
    algorithm = ALGORITHMS[algo].algorithm
    for name, settings in read(algo).items():
        check_hyperparameters(settings, algorithm, name)
        assert settings["backend"] == "auto", "every entry takes the fast environments"
        assert isinstance(settings.get("clip_range", 0.2), float), "radii are constant"
        assert isinstance(settings.get("learning_rate", "lin_"), float | str)
        signature = inspect.signature(algorithm.__init__).parameters
        arguments = {key: value for key, value in settings.items() if key in signature}
        if isinstance(arguments.get("policy_kwargs"), str):
            arguments["policy_kwargs"] = eval(arguments["policy_kwargs"], {"dict": dict, "nn": nn})
        if isinstance(arguments.get("learning_rate"), str):
            arguments["learning_rate"] = float(arguments["learning_rate"].removeprefix("lin_"))
        env = "Pendulum-v1" if arguments.get("use_sde") else "CartPole-v1"
        if arguments["policy"] == "MlpPolicy":
            algorithm(env=env, **{**arguments, "n_steps": settings.get("n_steps", 2048) * settings.get("n_envs", 1)})


def test_the_files_differ_only_where_papo_needs_it():
    ano, spo, papo = map(read, ("ano", "spo", "papo"))
    assert ano == spo
    assert papo.pop("Pendulum-v1") == {**ano.pop("Pendulum-v1"), "max_epoch_kl": 0.1}
    assert papo == ano


def test_every_environment_exists():
    elsewhere = {name for name in read("ano") if "Bullet" in name or name.startswith("MiniGrid-")}
    for name in set(read("ano")) - {"default", "atari"} - elsewhere:
        assert gym.spec(name) is not None
    pytest.importorskip("minigrid")
    pytest.importorskip("pybullet_envs_gymnasium")
    assert elsewhere <= set(gym.registry)


def test_the_zoos_settings_of_ppo_are_the_starting_point():  # users Z16
    rl_zoo3 = pytest.importorskip("rl_zoo3")
    ppo = yaml.safe_load((Path(rl_zoo3.__file__).parent / "hyperparams" / "ppo.yml").read_text())
    ours = read("ano")
    for name, settings in ppo.items():
        if "Bullet" in name or name.startswith("MiniGrid-"):
            expected = {"max_grad_norm": 0.5, "vf_coef": 0.5, **settings}  # SB3's defaults
            expected["clip_range"] = float(str(settings["clip_range"]).removeprefix("lin_"))
            found = {"max_grad_norm": 0.5, "vf_coef": 0.5, **ours[name]}
            assert found.pop("backend") == "auto"
            for one in (found, expected):
                one["policy_kwargs"] = "".join(one.get("policy_kwargs", "").split())
            assert found == expected


@EVERY
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


@EVERY
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
        ("ano", {"n_envs": 0}, "n_envs=0 is not allowed; allowed are positive integers"),
        ("ano", {"n_envs": 1.5}, "n_envs=1.5 is not allowed"),
        ("ano", {"policy": ...}, "my.yml: the key 'policy' is missing"),
        ("ano", {"n_timesteps": ...}, "my.yml: the key 'n_timesteps' is missing"),
    ],
)
def test_bad_hyperparameters_are_named_with_what_is_allowed(algo, settings, message):
    whole = {"policy": "MlpPolicy", "n_timesteps": 1e5, **settings}
    whole = {key: value for key, value in whole.items() if value is not ...}
    with pytest.raises(ValueError, match=message):
        check_hyperparameters(whole, ALGORITHMS[algo].algorithm, "my.yml")


@pytest.mark.parametrize("content", ["CartPole-v1: {n_envs: 1", "- CartPole-v1", "CartPole-v1:"])
def test_a_file_that_is_not_in_the_zoos_format_is_named(content, zoo, tmp_path):
    (tmp_path / "my.yml").write_text(content)
    errors = zoo("train --algo ano --env CartPole-v1 -conf my.yml", status=2).errors
    assert errors.startswith("error: my.yml is no YAML mapping from environments to hyperparameters")
    assert errors.count("\n") == 1


def test_the_files_lie_at_the_top_of_the_source_tree():
    assert hyperparameter_file("ano") == Path(__file__).resolve().parents[2] / "hyperparams" / "ano.yml"
    with pytest.raises(FileNotFoundError, match="hyperparams/none.yml"):
        hyperparameter_file("none")
