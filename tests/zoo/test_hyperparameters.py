"""The hyperparameter files, and invalid hyperparameters."""

import inspect
import re
from pathlib import Path

import gymnasium as gym
import pytest
import rl_zoo3
import yaml
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from torch import nn  # for the policy arguments, which the zoo evaluates

from sb3_ano._registry import ALGORITHMS, zoo_name
from sb3_ano.zoo.hyperparameters import hyperparameter_file, read_hyperparameters

MUJOCO = [f"{task}-v{n}" for task in ("HalfCheetah", "Ant", "Hopper", "Walker2d", "Humanoid") for n in (4, 5)]
# With the task whose settings the zoo has.
ZOOS = {"Swimmer": "Swimmer-v4", "Reacher": "Reacher-v2", "Pusher": "Reacher-v2", "HumanoidStandup": "HumanoidStandup-v2"}
OTHER_MUJOCO = {f"{task}-v{n}": zoos for task, zoos in ZOOS.items() for n in (4, 5)}
PENDULUMS = [f"Inverted{kind}Pendulum-v{n}" for kind in ("", "Double") for n in (4, 5)]
# CartPole is tuned; the zoo's minibatch of MountainCarContinuous is larger than the rollout.
TUNED = {"CartPole-v1": {"n_timesteps": 6e4, "learning_rate": "lin_0.002"}, "MountainCarContinuous-v0": {"batch_size": 8}}
ANTS = ["Ant-v4", "Ant-v5"]
LUNAR_LANDERS = ["LunarLander-v3", "LunarLanderContinuous-v3"]
OTHERS = ["Swimmer-v4", "Swimmer-v5", "BipedalWalker-v3", "BipedalWalkerHardcore-v3"]
TUNED |= {name: {"desired_kl": 0.01} for name in LUNAR_LANDERS + OTHERS}
BULLETS = [f"{task}BulletEnv-v0" for task in ("HalfCheetah", "Ant", "Walker2D", "Hopper", "Reacher")]
TUNED |= {name: {"desired_kl": 0.06} for name in BULLETS}
TUNED["AntBulletEnv-v0"] = {"batch_size": 256, "learning_rate": 6e-5, "desired_kl": 0.05}
TUNED["PendulumNoVel-v1"] = {"clip_range": 0.4}
TUNED["MiniGrid"] = {"normalize": False, "ent_coef": 0.01}
TARGETS = {"HalfCheetah": 0.03, "Ant": 0.02, "Humanoid": 0.05}
TUNED_MUJOCO = {name: {"learning_rate": "lin_1e-3", "desired_kl": TARGETS.get(name[:-3], 0.01)} for name in MUJOCO}
# Tasks of minigrid and pybullet_envs_gymnasium; the zoo also has settings for Minitaur, which no package registers.
ELSEWHERE = re.compile(r"MiniGrid-|(?!Minitaur)\w+BulletEnv-")


def read(algo: str) -> dict:
    return yaml.safe_load(hyperparameter_file(algo).read_text())


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_key_is_known_and_every_value_is_valid(algo):
    algorithm = ALGORITHMS[algo].algorithm
    assert (zoo_name(algorithm.__name__), zoo_name("Other")) == (algo, "other")
    assert {"default", "atari"} <= read(algo).keys(), "the zoo takes no defaults for Atari"
    for name, settings in read(algo).items():
        assert settings["policy"] in algorithm.policy_aliases
        assert read_hyperparameters(settings, algorithm, name, ("policy", "n_timesteps")) == settings
        with pytest.raises(ValueError, match=f"{name}: the key 'missing' is missing"):
            read_hyperparameters(settings, algorithm, name, ["missing"])
        assert settings["backend"] == "auto", "every entry takes the fast environments"
        assert isinstance(settings.get("clip_range", 0.2), float), "radii are constant"
        assert "clip_range_vf" not in settings
        signature = inspect.signature(algorithm.__init__).parameters
        arguments = {key: value for key, value in settings.items() if key in signature}
        arguments["policy_kwargs"] = eval(arguments.get("policy_kwargs", "None"), {"dict": dict, "nn": nn})
        arguments["learning_rate"] = float(str(arguments.get("learning_rate", 3e-4)).removeprefix("lin_"))
        arguments["n_steps"] = settings.get("n_steps", 2048) * settings.get("n_envs", 1)
        if arguments["policy"] == "MlpPolicy":
            algorithm(env="Pendulum-v1" if arguments.get("use_sde") else "CartPole-v1", **arguments)


def test_the_files_differ_only_where_they_are_tuned():
    ano, spo, papo = map(read, ("ano", "spo", "papo"))
    assert ano == spo
    ants = [papo.pop(name) for name in ANTS]
    assert ants == 2 * [{"backend": "auto", "normalize": True, "n_timesteps": 1e6, "policy": "MlpPolicy"}]  # the zoo's for PPO
    papo |= dict.fromkeys(ANTS, papo["Hopper-v4"])
    for name in MUJOCO:
        assert ano.pop(name) == {**papo.pop(name), **TUNED_MUJOCO[name]}
    rewards = {"normalize": "{'norm_obs': False, 'norm_reward': True}"}
    assert papo.pop("Pendulum-v1") == {**ano.pop("Pendulum-v1"), **rewards}
    for name in LUNAR_LANDERS:
        assert {**papo.pop(name), "desired_kl": 0.01} == {**ano.pop(name), **rewards}
    for name in OTHERS:
        assert {**papo.pop(name), "desired_kl": 0.01} == ano.pop(name)
    for name in BULLETS:
        assert {**papo.pop(name), **TUNED[name]} == {**ano.pop(name), "max_epoch_kl": 0.1}
    assert papo == ano


def test_every_environment_exists():
    names = set(read("ano")) - {"default", "atari"}
    elsewhere = set(filter(ELSEWHERE.match, names))
    assert names - elsewhere <= set(gym.registry)
    assert {*MUJOCO, *OTHER_MUJOCO, *PENDULUMS} <= names  # users Z16
    pytest.importorskip("minigrid")
    pytest.importorskip("pybullet_envs_gymnasium")
    assert elsewhere <= set(gym.registry)


@pytest.mark.parametrize(("algo", "zoos"), [("ano", "ppo"), ("ano_lstm", "ppo_lstm")])
def test_the_zoos_settings_of_ppo_are_the_starting_point(algo, zoos):  # users Z16
    defaults, ours = {"max_grad_norm": 0.5, "vf_coef": 0.5, "clip_range": 0.2}, read(algo)
    theirs = yaml.safe_load((Path(rl_zoo3.__file__).parent / "hyperparams" / f"{zoos}.yml").read_text())
    names = {*ours, *(name for name in theirs if algo == "ano" and ELSEWHERE.match(name))}
    assert set(ours["default"]) <= {"backend", "n_timesteps", "policy", "n_envs"}, "SB3's defaults"
    for name in names.difference(["default"], MUJOCO, PENDULUMS, ["atari"] if algo == "ano" else []):
        found, expected = ({**defaults, **settings} for settings in (ours[name], theirs[OTHER_MUJOCO.get(name, name)]))
        clip_range = float(str(expected["clip_range"]).removeprefix("lin_"))
        expected |= {"clip_range": clip_range, "backend": "auto"}
        expected |= TUNED.get("MiniGrid" if name.startswith("MiniGrid-") else name, {})
        for hyperparameters in (found, expected):
            hyperparameters["policy_kwargs"] = eval(hyperparameters.get("policy_kwargs", "None"), {"dict": dict, "nn": nn})
        assert found == expected


@pytest.mark.parametrize("algo", ["ano", "papo"])
def test_half_cheetah_has_the_zoos_network_discount_and_coefficients(algo):
    theirs = yaml.safe_load((Path(rl_zoo3.__file__).parent / "hyperparams" / "ppo.yml").read_text())["HalfCheetah-v4"]
    for ours in (read(algo)["HalfCheetah-v4"], read(algo)["HalfCheetah-v5"]):
        numbers = ("n_timesteps", "gamma", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm")
        assert [ours[name] for name in numbers] == pytest.approx([theirs[name] for name in numbers], rel=1e-2)
        policies = (eval(settings["policy_kwargs"], {"dict": dict, "nn": nn}) for settings in (ours, theirs))
        assert next(policies) == next(policies)


def test_mujoco_and_atari_have_the_settings_of_the_paper_s_code():
    ours, keys = read("papo"), ("n_timesteps", "n_envs", "n_steps", "n_epochs", "batch_size", "learning_rate")
    for settings in (ours[name] for name in MUJOCO if "HalfCheetah" not in name and name not in ANTS):
        assert [settings[key] for key in (*keys, "vf_coef", "normalize")] == [1e7, 128, 32, 10, 1024, "lin_3e-4", 0.25, True]
        policy = eval(settings["policy_kwargs"], {"dict": dict, "nn": nn})
        assert policy["net_arch"] == {"pi": [256, 256], "vf": [256, 256]}
        assert (policy["activation_fn"], policy["optimizer_kwargs"]) == (nn.Tanh, {"eps": 1e-5})
    atari = [ours["atari"][key] for key in (*keys, "vf_coef", "ent_coef")]
    assert atari == [6e6, 16, 128, 4, 512, "lin_2.5e-4", 0.25, 0.01]
    for settings in map(ours.get, PENDULUMS):
        assert [settings[key] for key in (*keys, "normalize")] == [1e5, 8, 128, 10, 8 * 128 / 8, "lin_1e-3", True]
        assert eval(settings["policy_kwargs"]) == {"net_arch": {"pi": [64, 64], "vf": [64, 64]}}


CLASSIC = [("CartPole-v1", 60_000, 100, 475), ("Pendulum-v1", 100_000, 20, -250)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("algo", ["ano", "spo"])
@pytest.mark.parametrize(("env_id", "steps", "episodes", "least"), CLASSIC)
def test_classic_control_is_learned(env_id, steps, episodes, least, algo, seed, zoo):
    zoo(f"train --algo {algo} --env {env_id} -n {steps} --seed {seed} --eval-freq -1 --verbose 0")
    model = ALGORITHMS[algo].algorithm.load(Path("logs", algo, f"{env_id}_1", f"{env_id}.zip"))
    mean, _ = evaluate_policy(model, make_vec_env(env_id, seed=1000 + seed), n_eval_episodes=episodes, deterministic=True)
    assert mean >= least
