"""The hyperparameter files, and invalid hyperparameters."""

import inspect
import math
import re
from importlib.util import find_spec
from pathlib import Path

import gymnasium as gym
import pytest
import rl_zoo3
import yaml
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from torch import nn  # for the policy arguments, which the zoo evaluates

from sb3_ano import ANO
from sb3_ano._registry import ALGORITHMS, zoo_name
from sb3_ano.zoo.hyperparameters import hyperparameter_file, read_hyperparameters
from tests.zoo.conftest import rejected

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
# Tasks and families that only EnvPool has.
ENVPOOLS = ["envpool.mujoco.dmc", "envpool.minigrid", "Go1JoystickFlatTerrain-v1", "Go1JoystickRoughTerrain-v1"]


def read(algo: str) -> dict:
    return yaml.safe_load(hyperparameter_file(algo).read_text())


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_key_is_known_and_every_value_is_valid(algo):
    algorithm = ALGORITHMS[algo].algorithm
    assert (zoo_name(algorithm.__name__), zoo_name("Other")) == (algo, "other")
    assert {"default", "atari"} <= read(algo).keys(), "the zoo takes no defaults for Atari"
    for name, settings in read(algo).items():
        assert settings["policy"] in algorithm.policy_aliases
        if find_spec("minigrid") is None and "FlatObsWrapper" in settings.get("env_wrapper", ""):
            del settings["env_wrapper"]
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
    ano, papo = map(read, ("ano", "papo"))
    assert hyperparameter_file("spo") == hyperparameter_file("ano")
    ants = [papo.pop(name) for name in ANTS]
    assert ants == 2 * [{"backend": "auto", "normalize": True, "n_timesteps": 1e6, "policy": "MlpPolicy"}]  # the zoo's for PPO
    papo |= dict.fromkeys(ANTS, papo["Hopper-v4"])
    for name in MUJOCO:
        assert ano.pop(name) == {**papo.pop(name), **TUNED_MUJOCO[name]}
    assert ano.pop("envpool.mujoco.dmc") == {
        **papo.pop("envpool.mujoco.dmc"),
        "learning_rate": "lin_1e-3",
        "desired_kl": 0.02,
    }
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
    assert names.issuperset(ENVPOOLS)
    names -= set(ENVPOOLS)
    if find_spec("envpool") is not None:
        from envpool.registration import registry

        known = {*registry.specs, *(module for module, *_ in registry.specs.values())}
        assert known.issuperset(ENVPOOLS)
    elsewhere = set(filter(ELSEWHERE.match, names))
    assert names - elsewhere <= set(gym.registry)
    assert {*MUJOCO, *OTHER_MUJOCO, *PENDULUMS} <= names
    pytest.importorskip("minigrid")
    pytest.importorskip("pybullet_envs_gymnasium")
    assert elsewhere <= set(gym.registry)


@pytest.mark.parametrize(("algo", "zoos"), [("ano", "ppo"), ("ano_lstm", "ppo_lstm")])
def test_the_zoos_settings_of_ppo_are_the_starting_point(algo, zoos):
    defaults, ours = {"max_grad_norm": 0.5, "vf_coef": 0.5, "clip_range": 0.2}, read(algo)
    theirs = yaml.safe_load((Path(rl_zoo3.__file__).parent / "hyperparams" / f"{zoos}.yml").read_text())
    names = {*ours, *(name for name in theirs if algo == "ano" and ELSEWHERE.match(name))}
    assert set(ours["default"]) <= {"backend", "n_timesteps", "policy", "n_envs"}, "SB3's defaults"
    for name in names.difference(["default"], ENVPOOLS, MUJOCO, PENDULUMS, ["atari"] if algo == "ano" else []):
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


NUMBERS = """\
CartPole-v1:
  policy: MlpPolicy
  n_timesteps: 1e3
  n_envs: 2.0
  n_steps: 3_2
  batch_size: "64"
  n_epochs: 1.0e0
  learning_rate: 3e-4
  gamma: "9.9e-1"
  ent_coef: 1E-3
  vf_coef: .5e+0
  clip_range: lin_1_0e-1
  max_grad_norm: .inf
  target_kl: null
  clip_range_vf: null
  frame_stack: null
  normalize: {clip_obs: 1e1, epsilon: 1e-8}
  policy_kwargs: {net_arch: [1e1, 8], optimizer_kwargs: {eps: 1e-5}}
  env_kwargs: {sutton_barto_reward: no}
"""


def test_numbers_are_read_as_people_write_them(zoo):
    Path("my.yml").write_text(NUMBERS)
    zoo("train --algo ano --env CartPole-v1 -conf my.yml --eval-freq -1 --seed 1 -params n_epochs:2.0 \"gae_lambda:'1e-1'\"")
    config = yaml.unsafe_load(Path("logs/ano/CartPole-v1_1/CartPole-v1/config.yml").read_text())
    expected = {
        "policy": "MlpPolicy", "n_timesteps": 1000, "n_envs": 2, "n_steps": 32, "batch_size": 64, "n_epochs": 2,
        "learning_rate": 0.0003, "gamma": 0.99, "gae_lambda": 0.1, "ent_coef": 0.001, "vf_coef": 0.5,
        "clip_range": "lin_10e-1", "max_grad_norm": math.inf, "target_kl": None,
        "normalize": {"clip_obs": 10, "epsilon": 1e-8, "gamma": 0.99},  # the zoo adds the discount factor
        "policy_kwargs": {"net_arch": [10, 8], "optimizer_kwargs": {"eps": 1e-5}},
        "env_kwargs": {"sutton_barto_reward": False},
    }  # fmt: skip
    assert config == expected
    integers = ("n_timesteps", "n_envs", "n_steps", "batch_size", "n_epochs")
    assert {type(config[name]) for name in integers} == {int}
    model = ANO.load("logs/ano/CartPole-v1_1/CartPole-v1.zip")
    assert (model.policy.net_arch, model.policy.optimizer.defaults["eps"]) == ([10, 8], 1e-5)


SMALL = "policy: MlpPolicy, n_timesteps: 64, n_steps: 32, batch_size: 32"
WRONG_VALUES = [
    ("n_timesteps: abc", "n_timesteps='abc' is not allowed; allowed are positive integers"),
    ("n_timesteps: 0.5", "n_timesteps=0.5 is not allowed"),
    ("n_timesteps: .nan", "n_timesteps=nan is not allowed"),
    ("n_envs: 0", "n_envs=0 is not allowed; allowed are positive integers"),
    ("n_envs: true", "n_envs=True is not allowed"),
    ("frame_stack: 0", "frame_stack=0 is not allowed"),
    ("n_steps: 32.5", "n_steps=32.5 is of type float; allowed are integers"),
    ("n_epochs: [1]", "n_epochs=[1] is of type list; allowed are integers"),
    ("batch_size:", "batch_size=None is of type NoneType; allowed are integers"),
    ("gamma: high", "gamma='high' is of type str; allowed are numbers"),
    ("gamma: true", "gamma=True is of type bool; allowed are numbers"),
    ("gamma:", "gamma has no value; allowed are numbers"),
    ("gamma: 1.5", "gamma=1.5 is not allowed"),
    ("learning_rate: lin-3e-4", "learning_rate='lin-3e-4' is of type str; allowed are a finite number"),
    ("clip_range: lin_abc", "clip_range='lin_abc' is not allowed; allowed are a finite number"),
    ("use_sde: 'yes'", "use_sde='yes' is of type str; allowed are true and false"),
    ("learning_rte: 0.1", "unknown key 'learning_rte' for ANO, did you mean 'learning_rate'?"),
    ("1: 2", "unknown key '1' for ANO; allowed are"),
    ("policy: MlpPolcy", "policy='MlpPolcy' is unknown, did you mean 'MlpPolicy'?"),
    ("policy: nowhere.Policy", "policy='nowhere.Policy' cannot be imported: No module named 'nowhere'"),
    ("policy: [a]", "policy=['a'] is of type list"),
    ("policy_kwargs: dict(net_arch=[64]", "policy_kwargs='dict(net_arch=[64]' cannot be evaluated: '(' was never closed"),
    ("policy_kwargs: dict(activation_fn=Tanh)", "name 'Tanh' is not defined; allowed is Python such as dict(net_arch"),
    ("policy_kwargs: [1]", "policy_kwargs=[1] is of type list; allowed is a dictionary"),
    ("normalize: {norm_ob: true}", "normalize has an unknown key 'norm_ob', did you mean 'norm_obs'?"),
    ("normalize: 'on please'", "normalize='on please' cannot be evaluated"),
    ("normalize: 3", "normalize=3 is of type int; allowed is true, false and a dictionary"),
    ("env_kwargs: [gravity]", "env_kwargs=['gravity'] is not allowed; allowed is a dictionary"),
    ("env_wrapper: TimeLimit", "env_wrapper='TimeLimit' is not allowed; allowed are names with their module"),
    ("env_wrapper: gymnasium.wrappers.Nothing", "cannot be imported: module 'gymnasium.wrappers' has no attribute 'Nothing'"),
    ("env_wrapper: [gymnasium.wrappers.ClipAction: 5]", "env_wrapper: the arguments 5 of gymnasium.wrappers.ClipAction"),
    ("env_wrapper: [{a.B: {}, c.D: {}}]", "a class has one entry with its arguments below it; check the indentation"),
    ("env_wrapper: [gymnasium.wrappers.TimeLimit: {max_episode_steps: 9}]", "use env_kwargs: {max_episode_steps: 9} instead"),
    ("callback: nowhere.Callback", "callback='nowhere.Callback' cannot be imported"),
]


# The zoo leaves the environments of a run that could not start to the end of the process.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("line", "message"), WRONG_VALUES)
def test_a_wrong_value_is_one_line_with_file_key_and_value(line, message, zoo):
    Path("my.yml").write_text(f"CartPole-v1:\n  <<: {{{SMALL}}}\n  {line}\n")
    errors = rejected("train --algo ano --env CartPole-v1 -conf my.yml")
    assert errors.startswith("error: my.yml: CartPole-v1: ")
    assert message in errors
    assert not Path("logs").exists()


WRONG_FILES = [
    ("my.yml", "", "my.yml is empty; allowed are entries ENVIRONMENT: {KEY: VALUE, ...}"),
    ("my.yml", "- a", "my.yml holds a list; allowed are entries"),
    ("my.yml", "CartPole-v1: {a: [1, 2}", "my.yml, line 1, column 23 is not YAML: "),
    (
        "my.yml",
        "CartPole-v1:\n\tpolicy: 1",
        "my.yml, line 2, column 1 is not YAML: found character '\\t' that cannot start any",
    ),
    (
        "my.yml",
        "CartPole-v1: !!python/name:os.getcwd",
        "my.yml, line 1, column 14 is not YAML: could not determine a constructor",
    ),
    ("my.yml", "CartPole-v1:", "my.yml: the entry 'CartPole-v1' is empty; allowed are lines KEY: VALUE"),
    ("my.yml", "CartPole-v1: 3", "my.yml: the entry 'CartPole-v1' is of type int"),
    ("my.yml", "CartPole-v0: {}", "my.yml has no entry 'CartPole-v1', did you mean 'CartPole-v0'? and no entry 'default'"),
    ("my.yml", "default: {policy: MlpPolicy}", "my.yml: default: the key 'n_timesteps' is missing"),
    (
        "my.py",
        "hyperparams = {'CartPole-v1': {'clip_range': abs}}",
        "my.py: CartPole-v1: clip_range is a function, which a run",
    ),
    ("my.py", "x = 1", "my.py has no variable 'hyperparams'"),
    ("my.py", "1 / 0", "my.py cannot be run: ZeroDivisionError: division by zero"),
    ("my.py", "import nowhere", "my.py cannot be run: No module named 'nowhere'"),
    ("my.py", "hyperparams = 3", "my.py holds a int; allowed are entries"),
    ("my.json", "{}", "--conf-file my.json is neither a file nor a module; allowed are files .yml and .py, and modules"),
]


@pytest.mark.parametrize(("name", "content", "message"), WRONG_FILES)
def test_a_wrong_file_is_one_line_that_names_it(name, content, message, zoo):
    Path(name).write_text(content)
    assert message in rejected(f"train --algo ano --env CartPole-v1 -conf {name}")


def test_a_missing_file_and_one_in_another_encoding_are_one_line(zoo):
    assert "no.yml cannot be read: No such file or directory" in rejected("train --algo ano -conf no.yml")
    Path("my.yml").write_bytes("# für".encode("latin-1"))
    assert "my.yml is not text in UTF-8" in rejected("train --algo ano -conf my.yml")


@pytest.mark.parametrize("algo", ["ppo", "sac", "trpo"])
def test_the_files_of_other_algorithms_are_checked_too(algo, zoo):
    Path("my.yml").write_text("CartPole-v1: {policy: MlpPolicy, n_timesteps: 1e2, gamma: high}")
    assert "my.yml: CartPole-v1: gamma='high' is of type str" in rejected(
        f"train --algo {algo} --env CartPole-v1 -conf my.yml"
    )


def test_the_zoos_own_files_are_read_as_the_zoo_does():
    for file in (Path(rl_zoo3.__file__).parent / "hyperparams").glob("*.yml"):
        entries = yaml.safe_load(file.read_text()) if file.stem in rl_zoo3.ALGOS else {}
        if file.stem == "ppo_lstm":
            entries.pop("default")  # its policy has no LSTM, so that the zoo trains nothing with it
        for name, settings in entries.items():
            plain = {
                key: value for key, value in settings.items() if key not in ("env_wrapper", "vec_env_wrapper", "callback")
            }
            assert read_hyperparameters(plain, rl_zoo3.ALGOS[file.stem], name) == plain
