"""Suites: those of the package against the zoo and the libraries of environments, those of users, and what is refused."""

import gymnasium as gym
import pytest
import yaml

from sb3_ano.bench.experiments.algorithms import NAMES, algorithm
from sb3_ano.bench.experiments.suites import Evaluation, load_suite, read_suite, suite_names
from sb3_ano.zoo.hyperparameters import hyperparameter_file

USERS = """
total_timesteps: 1e5
evaluation: {points: 4}
imports: [my_tasks]
hyperparameters: {n_envs: 4, learning_rate: lin_3e-4, n_epochs: 5, vf_coef: 0.25}
algorithms:
  trpo: {delta: 0.02}
tasks:
  Mine-v0:
    total_timesteps: 2000
    hyperparameters: {n_envs: 2, learning_rate: 1e-3}
    algorithms:
      papo: {omega: 0.01}
      trpo: {n_critic_updates: 3}
    env_kwargs: {size: 3}
  Mine-v1:
"""


@pytest.fixture
def users_suite(tmp_path):
    file = tmp_path / "mine.yml"
    file.write_text(USERS)
    return read_suite(file)


def test_the_package_has_the_suites_of_the_paper():
    assert suite_names() == ["atari", "classic", "mujoco"]
    six = ["HalfCheetah", "Ant", "Hopper", "Walker2d", "Humanoid", "Swimmer"]
    assert [task.env_id for task in load_suite("mujoco").tasks] == [f"{name}-v4" for name in six]
    assert [task.env_id for task in load_suite("mujoco-v5").tasks] == [f"{name}-v5" for name in six]
    assert load_suite("mujoco", "v5") == load_suite("mujoco-v5")
    assert all(task.env_id in gym.registry for name in ("mujoco", "classic") for task in load_suite(name).tasks)


def test_the_atari_suite_has_forty_games_without_sticky_actions():
    registry = pytest.importorskip("envpool.registration").registry
    games = [task.env_id for task in load_suite("atari").tasks]
    assert len(set(games)) == 40
    assert all(registry.specs[game][0] == "envpool.atari" for game in games)


@pytest.mark.parametrize(("suite", "key"), [("mujoco", "HalfCheetah-v4"), ("atari", "atari")])
@pytest.mark.parametrize("name", ["ano", "spo", "papo"])
def test_suites_and_the_zoo_files_train_alike(suite, key, name):
    zoo = yaml.safe_load(hyperparameter_file(name).read_text())[key]
    zoo = {
        hyperparameter: value for hyperparameter, value in zoo.items() if hyperparameter not in ("env_wrapper", "frame_stack")
    }
    steps = zoo.pop("n_timesteps")
    if "policy_kwargs" in zoo:
        zoo["policy_kwargs"] = {
            "activation_fn": "tanh",
            "net_arch": {"pi": [256, 256], "vf": [256, 256]},
            "optimizer_kwargs": {"eps": 1e-5},
        }
        text = "dict(activation_fn=nn.Tanh, net_arch=dict(pi=[256, 256], vf=[256, 256]), optimizer_kwargs=dict(eps=1e-5))"
        assert yaml.safe_load(hyperparameter_file(name).read_text())[key]["policy_kwargs"] == text
    for task in load_suite(suite).tasks:
        own = task.resolve(algorithm(name))
        if name == "papo":
            assert own.pop("omega") == 0.005
        assert own == zoo
        assert task.total_timesteps == steps


def test_every_suite_says_something_for_every_algorithm():
    for suite in map(load_suite, suite_names()):
        for task in suite.tasks:
            for name in NAMES:
                hyperparameters = task.resolve(algorithm(name))
                assert set(hyperparameters) <= algorithm(name).hyperparameters
                assert {"policy", "n_envs", "n_steps", "learning_rate"} <= set(hyperparameters)


def test_a_users_suite_is_resolved_as_worked_by_hand(users_suite):
    mine, other = users_suite.tasks
    assert users_suite.name == "mine"
    assert users_suite.evaluation == Evaluation(points=4, episodes=10)
    assert users_suite.imports == ("my_tasks",)
    assert (mine.total_timesteps, other.total_timesteps) == (2000, 100_000)
    assert mine.env_kwargs == {"size": 3}
    shared = {"policy": "MlpPolicy", "vf_coef": 0.25, "n_epochs": 5}
    assert mine.resolve(algorithm("ppo")) == {**shared, "n_envs": 2, "learning_rate": 0.001}
    assert mine.resolve(algorithm("papo")) == {**shared, "n_envs": 2, "learning_rate": 0.001, "omega": 0.01}
    # TRPO has neither epochs nor a weight of the value loss.
    trpo = {"policy": "MlpPolicy", "target_kl": 0.02}
    assert mine.resolve(algorithm("trpo")) == {**trpo, "n_envs": 2, "learning_rate": 0.001, "n_critic_updates": 3}
    assert other.resolve(algorithm("trpo")) == {**trpo, "n_envs": 4, "learning_rate": "lin_3e-4"}


def test_papo_takes_omega_for_both_of_its_weights():
    assert algorithm("papo").arguments({"omega": 0.01, "n_envs": 4}) == {"omega1": 0.01, "omega2": 0.01}
    assert algorithm("ano:shaping=spo").arguments({"policy": "MlpPolicy"}) == {"shaping": "spo"}


def test_tasks_are_chosen_with_or_without_their_version():
    suite = load_suite("mujoco").with_tasks(["Walker2d", "Hopper-v4"])
    assert [task.env_id for task in suite.tasks] == ["Hopper-v4", "Walker2d-v4"]
    with pytest.raises(ValueError, match="suite 'mujoco' has no task 'Hoper', did you mean 'Hopper'?"):
        load_suite("mujoco").with_tasks(["Hoper"])


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("pppo", "unknown algorithm 'pppo', did you mean 'ppo'?"),
        ("spo:shaping=ano", "unknown algorithm 'spo:shaping=ano'"),
        ("ano:shaping=", "unknown algorithm 'ano:shaping='"),
        ("ano:shaping=ann", "ann"),
    ],
)
def test_labels_that_are_none(label, message):
    with pytest.raises(ValueError, match=message):
        algorithm(label)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("total_timesteps: 1e5", "total_timestep: 1e5", "unknown key: 'total_timestep', did you mean 'total_timesteps'?"),
        ("total_timesteps: 1e5", "", "the key 'total_timesteps' is missing"),
        ("total_timesteps: 2000", "total_timesteps: 2.5", "total_timesteps=2.5 is not allowed; allowed are whole numbers"),
        ("n_epochs: 5", "n_epoch: 5", "unknown hyperparameter: 'n_epoch', did you mean 'n_epochs'?"),
        ("papo: {omega", "papo: {omga", "unknown hyperparameter of papo: 'omga', did you mean 'omega'?"),
        ("papo: {omega", "pppo: {omega", "unknown algorithm: 'pppo'"),
        ("n_envs: 2", "n_envs: 0", "n_envs=0 is not allowed; allowed are whole numbers from 1"),
        ("points: 4", "points: 0", "evaluation: points=0 is not allowed"),
        ("points: 4", "point: 4", "unknown key of evaluation: 'point', did you mean 'points'?"),
        ("env_kwargs: {size: 3}", "env_kwargs: 3", "env_kwargs of Mine-v0 holds 3, not a mapping"),
        ("env_kwargs", "env_kwarg", "unknown key of Mine-v0: 'env_kwarg', did you mean 'env_kwargs'?"),
        ("imports: [my_tasks]", "imports: my_tasks", "imports holds 'my_tasks', not a list of names"),
        ("imports: [my_tasks]", "backend: envpol", "backend='envpol' is not allowed; allowed are auto"),
        ("imports: [my_tasks]", "steps_per_second: {pop: 3}", "unknown algorithm in steps_per_second: 'pop'"),
        ("imports: [my_tasks]", "steps_per_second: {ppo: 0}", "steps_per_second: ppo=0 is not allowed; allowed are numbers"),
        ("n_envs: 2", "normalize: 1", "normalize=1 is not allowed; allowed are true, false and a mapping"),
        (USERS[USERS.index("tasks:") :], "tasks: []", "tasks is empty"),
        (USERS, "- a\n- b", "the file holds .*, not a mapping"),
        (USERS, "{", "is not valid YAML"),
    ],
)
def test_a_suite_that_is_wrong_is_named_in_one_line(old, new, message, tmp_path):
    assert old in USERS
    file = tmp_path / "mine.yml"
    file.write_text(USERS.replace(old, new))
    with pytest.raises(ValueError, match=message) as error:
        load_suite(str(file))
    assert str(error.value).startswith(str(file))


def test_suites_that_are_not_there(tmp_path):
    with pytest.raises(
        ValueError, match=r"unknown suite 'mujocco', did you mean 'mujoco'\? \(suites are atari, classic, mujoco"
    ):
        load_suite("mujocco")
    with pytest.raises(ValueError, match="version='5' is not allowed; allowed are v and a number, such as v5"):
        load_suite("mujoco", "5")
    with pytest.raises(FileNotFoundError, match="mine.yml"):
        load_suite(str(tmp_path / "mine.yml"))
