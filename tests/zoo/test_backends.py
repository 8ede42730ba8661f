"""The key ``backend`` in the zoo's hyperparameters."""

import textwrap
from argparse import Namespace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import rl_zoo3.train
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.envs.registration import EnvSpec
from stable_baselines3.common.atari_wrappers import AtariWrapper

from sb3_ano.envs import register_atari
from sb3_ano.envs.vec_env import register_envpool
from sb3_ano.zoo.backends import make_agents_envs, take_backend
from tests.envs.backends import needs_all

pytestmark = needs_all
ATARI_WRAPPER = "stable_baselines3.common.atari_wrappers.AtariWrapper"


SHIPPED = [
    ("HalfCheetah-v4", {}, "dummy", "EnvPoolVecEnv", (128, 17)),
    ("PongNoFrameskip-v4", {"n_envs": 2}, "dummy", "EnvPoolVecEnv", (2, 4, 84, 84)),
    ("Breakout-v4", {"n_envs": 1}, "dummy", "DirectVecEnv", (1, 4, 84, 84)),  # names no protocol: the zoo's wrappers
    ("CartPole-v1", {}, "dummy", "DirectVecEnv", (8, 4)),
    ("CartPole-v1", {"n_envs": 2}, "subproc", "SubprocVecEnv", (2, 4)),
]


@pytest.mark.parametrize(("env_id", "changes", "processes", "kind", "shape"), SHIPPED)
def test_the_shipped_files_take_the_fast_environments(env_id, changes, processes, kind, shape, tmp_path):
    # The README's speeds are those of train.
    register_atari(env_id)
    options = {"eval_freq": -1, "verbose": 0, "vec_env_type": processes, "hyperparams": changes}
    manager = rl_zoo3.train.ExperimentManager(Namespace(), "ano", env_id, str(tmp_path), **options)
    manager.continues = True
    _, manager.env_wrapper, *_ = manager._preprocess_hyperparams(manager.read_hyperparameters()[0])
    env = manager.create_envs(manager.n_envs, no_log=True)
    assert type(env.unwrapped).__name__ == kind
    assert env.reset().shape == shape
    env.close()


def test_ids_that_only_envpool_has_take_the_entry_of_their_family(tmp_path, monkeypatch):
    for env_id, keys in (("CartpoleSwingup-v1", ["position", "velocity"]), ("MiniGrid-DoorKey-6x6-v0", ["mission"])):
        register_envpool(env_id)
        monkeypatch.setitem(gym.registry, env_id, gym.registry.pop(env_id))  # removed at the end
        options = {"eval_freq": -1, "verbose": 0, "hyperparams": {"n_envs": 2}}
        manager = rl_zoo3.train.ExperimentManager(Namespace(), "ano", env_id, str(tmp_path), **options)
        hyperparameters, _ = manager.read_hyperparameters()
        assert hyperparameters["policy"] == "MultiInputPolicy"
        manager._preprocess_hyperparams(hyperparameters)
        env = manager.create_envs(manager.n_envs, no_log=True)
        assert (env.unwrapped.backend, list(env.obs_rms)) == ("envpool", keys)
        env.close()


def test_evaluations_have_the_settings_of_the_training(tmp_path):
    """A file and -params can set them, too. The zoo looks for them in --env-kwargs only."""
    options = {"eval_freq": -1, "verbose": 0, "hyperparams": {"env_kwargs": {"g": 2.0}}}
    manager = rl_zoo3.train.ExperimentManager(Namespace(), "ano", "Pendulum-v1", str(tmp_path), **options)
    manager._preprocess_hyperparams(manager.read_hyperparameters()[0])
    for evaluates in (False, True):
        assert manager.create_envs(1, eval_env=evaluates, no_log=True).get_attr("g") == [2.0]


class Parking(CartPoleEnv):
    def step(self, action):
        *result, info = super().step(action)
        return *result, {**info, "is_success": True}


def test_goals_that_were_reached_are_in_the_monitor_file(tmp_path, monkeypatch):
    monkeypatch.setitem(gym.registry, "parking-v0", EnvSpec("parking-v0", Parking))
    (tmp_path / "file.yml").write_text("parking-v0: {policy: MlpPolicy, n_timesteps: 64, backend: auto}")
    options = {"eval_freq": -1, "verbose": 0, "config": str(tmp_path / "file.yml")}
    manager = rl_zoo3.train.ExperimentManager(Namespace(), "ano", "parking-v0", str(tmp_path), **options)
    manager._preprocess_hyperparams(manager.read_hyperparameters()[0])
    manager.save_path = str(tmp_path)
    manager.create_envs(1).close()
    assert (tmp_path / "0.monitor.csv").read_text().splitlines()[1] == "r,l,t,is_success"


WRAPPED = [
    ({"frame_stack": 2}, {"frame_stack": 2}, {}),
    ({"env_wrapper": ATARI_WRAPPER}, {"frame_stack": 1}, {}),
    ({"env_wrapper": AtariWrapper}, {"frame_stack": 1}, {}),  # as in a configuration in Python
    ({"env_wrapper": [{ATARI_WRAPPER: {"terminal_on_life_loss": False}}]}, {"frame_stack": 1, "episodic_life": False}, {}),
    ({"env_wrapper": [{ATARI_WRAPPER: {"noop_max": 5}}], "frame_stack": 4}, {"frame_stack": 4, "noop_max": 5}, {}),
    ({"env_wrapper": ["a.Wrapper"], "frame_stack": 4}, {}, {"env_wrapper": ["a.Wrapper"], "frame_stack": 4}),
]


@pytest.mark.parametrize(("hyperparams", "env_kwargs", "rest"), WRAPPED)
def test_sb3s_atari_wrapper_in_a_file_becomes_the_protocol_of_the_backend(hyperparams, env_kwargs, rest):
    register_atari("ALE/Pong-v5")
    assert take_backend(dict(hyperparams), "PongNoFrameskip-v4") is None, "a file without the key is left alone"
    hyperparams = dict(hyperparams, backend="envpool", n_steps=8)
    assert take_backend(hyperparams, "PongNoFrameskip-v4").env_kwargs == env_kwargs
    assert hyperparams == {"n_steps": 8, **rest}


@pytest.mark.parametrize("env_id", ["HalfCheetah-v4", "PongNoFrameskip-v4"])
def test_an_agent_is_shown_with_gymnasium_in_the_same_spaces(env_id):
    register_atari(env_id)
    made = {}
    for env_kwargs in ({}, {"render_mode": "rgb_array"}):
        env = make_agents_envs(env_id, 2, {"backend": "envpool"}, env_kwargs=env_kwargs)
        env.close()
        made[type(env.unwrapped).__name__] = env.num_envs, env.observation_space, env.action_space
    assert list(made) == ["EnvPoolVecEnv", "DirectVecEnv"]
    assert made["EnvPoolVecEnv"] == made["DirectVecEnv"]


@pytest.mark.parametrize("algo", ["ano", "ppo"])
@pytest.mark.parametrize("backend", ["backend: auto", ""], ids=["backend", "the zoo's own"])
def test_evaluations_end_if_a_wrapper_outside_of_monitor_ends_the_episodes(zoo, tmp_path, algo, backend):
    settings = f"""
    Pendulum-v1:
      {backend}
      env_wrapper: [tests.tiny_envs.Shortened: {{steps: 7}}]
      n_timesteps: 64
      n_steps: 32
      batch_size: 32
      policy: MlpPolicy
    """
    Path("short.yml").write_text(textwrap.dedent(settings))
    command = f"train --algo {algo} --env Pendulum-v1 --conf-file short.yml --eval-freq 32 --eval-episodes 3 --n-eval-envs 2"
    with pytest.warns(UserWarning, match="a wrapper outside of Monitor ends episodes"):
        zoo(f"{command} -f logs --seed 0")
    evaluations = np.load(tmp_path / "logs" / algo / "Pendulum-v1_1" / "evaluations.npz")
    np.testing.assert_array_equal(evaluations["ep_lengths"], np.full((2, 3), 7))
    assert (evaluations["results"] < 0).all()
