"""The key ``backend`` in the zoo's hyperparameters."""

from argparse import Namespace

import pytest
import rl_zoo3.train
import rl_zoo3.utils

from sb3_ano.envs import register_atari
from sb3_ano.zoo.backends import take_backend
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
    # Review users Z23: the README's speeds are those of train.
    register_atari(env_id)
    options = {"eval_freq": -1, "verbose": 0, "vec_env_type": processes, "hyperparams": changes}
    manager = rl_zoo3.train.ExperimentManager(Namespace(), "ano", env_id, str(tmp_path), **options)
    manager.continues = True
    _, manager.env_wrapper, *_ = manager._preprocess_hyperparams(manager.read_hyperparameters()[0])
    assert ("override_existing" in manager.monitor_kwargs) == (processes == "subproc"), "a pool would reject it"
    env = manager.create_envs(manager.n_envs, no_log=True)
    assert type(env.unwrapped).__name__ == kind
    assert env.reset().shape == shape
    env.close()


WRAPPED = [
    ({"frame_stack": 2}, {"frame_stack": 2}, {}),
    ({"env_wrapper": ATARI_WRAPPER}, {"frame_stack": 1}, {}),
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
    for shows in (False, True):
        settings = {"hyperparams": {"backend": "envpool"}, "env_kwargs": {"render_mode": "rgb_array"}}
        env = rl_zoo3.utils.create_test_env(env_id, 2, should_render=shows, **settings)
        env.close()
        made[type(env.unwrapped).__name__] = env.num_envs, env.observation_space, env.action_space
    assert list(made) == ["EnvPoolVecEnv", "DirectVecEnv"]
    assert made["EnvPoolVecEnv"] == made["DirectVecEnv"]
