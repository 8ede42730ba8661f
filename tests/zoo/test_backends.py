"""The key ``backend`` in the zoo's hyperparameters."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import rl_zoo3.utils
import yaml
from gymnasium.envs.registration import EnvSpec
from rl_zoo3.exp_manager import ExperimentManager
from stable_baselines3.common.monitor import load_results
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv

from sb3_ano.envs import make_vec_env, register_atari
from sb3_ano.zoo import register
from sb3_ano.zoo.backends import _backend_in
from sb3_ano.zoo.hyperparameters import hyperparameter_file
from tests.envs.backends import needs_atari, needs_envpool
from tests.tiny_envs import BOX_ACTIONS, IMAGE_OBSERVATIONS, TinyEnv

CHEETAH = {
    "policy": "MlpPolicy",
    "n_timesteps": 512,
    "n_steps": 128,
    "batch_size": 128,
    "n_epochs": 1,
    "n_envs": 2,
    "normalize": True,
    "frame_stack": 2,
    "backend": "envpool",
}
ATARI_WRAPPER = "stable_baselines3.common.atari_wrappers.AtariWrapper"
BREAKOUT = {
    "policy": "CnnPolicy",
    "n_timesteps": 512,
    "n_steps": 128,
    "batch_size": 256,
    "n_epochs": 1,
    "n_envs": 4,
    "frame_stack": 4,
    "env_wrapper": [ATARI_WRAPPER],
    "policy_kwargs": "dict(features_extractor_kwargs=dict(features_dim=16))",
}


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "sb3_ano.zoo", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def write(folder: Path, env_id: str, settings: dict) -> str:
    (folder / "own.yml").write_text(yaml.safe_dump({env_id: settings}))
    return "own.yml"


def built_by_the_zoo(env_id: str, algo: str, folder: Path, **settings) -> VecEnv:
    """The environments that ``train`` makes with the shipped hyperparameters."""
    register()
    register_atari(env_id)
    file = str(hyperparameter_file(algo))
    manager = ExperimentManager(Namespace(), algo, env_id, str(folder), config=file, eval_freq=-1, verbose=0, **settings)
    _, manager.env_wrapper, *_ = manager._preprocess_hyperparams(manager.read_hyperparameters()[0])
    return manager.create_envs(manager.n_envs, no_log=True)


@needs_envpool
@needs_atari
@pytest.mark.parametrize(
    ("env_id", "changes", "kind", "shape"),
    [
        ("HalfCheetah-v4", {}, "EnvPoolVecEnv", (128, 17)),
        ("PongNoFrameskip-v4", {"n_envs": 2}, "EnvPoolVecEnv", (2, 4, 84, 84)),
        ("Breakout-v4", {"n_envs": 1}, "DirectVecEnv", (1, 4, 84, 84)),  # names no protocol: the zoo's wrappers
        ("CartPole-v1", {}, "DirectVecEnv", (8, 4)),
        ("Reacher-v5", {}, "DirectVecEnv", (1, 10)),  # the entry 'default'
    ],
)
def test_the_shipped_files_take_the_fast_environments(env_id, changes, kind, shape, tmp_path):
    # Review users Z23: the README's speeds are those of train.
    env = built_by_the_zoo(env_id, "ano", tmp_path, hyperparams=changes)
    assert type(env.unwrapped).__name__ == kind
    assert env.observation_space.shape == shape[1:]
    assert env.reset().shape == shape
    env.close()


def test_the_shipped_files_allow_processes(tmp_path):
    env = built_by_the_zoo("CartPole-v1", "ano", tmp_path, vec_env_type="subproc", hyperparams={"n_envs": 2})
    assert type(env) is SubprocVecEnv
    env.close()


@needs_envpool
def test_a_pool_and_processes_exclude_each_other(tmp_path):
    with pytest.raises(ValueError, match="vec_env_cls is not allowed with backend 'envpool'; backend 'gymnasium' takes it"):
        built_by_the_zoo("Hopper-v4", "ano", tmp_path, vec_env_type="subproc", hyperparams={"backend": "envpool"})


@needs_envpool
def test_mujoco_is_trained_and_enjoyed_with_envpool(tmp_path):
    file = write(tmp_path, "HalfCheetah-v4", CHEETAH)
    options = ["--algo", "ano", "--env", "HalfCheetah-v4"]
    few = ["-n", "2048", "--eval-freq", "1024", "--eval-episodes", "1", "--seed", "1"]
    trained = run("train", *options, "-conf", file, *few, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert "Stacking 2 frames" in trained.stdout
    folder = tmp_path / "logs" / "ano" / "HalfCheetah-v4_1"
    assert load_results(str(folder))["l"].tolist() == [1000, 1000]
    assert dict(yaml.unsafe_load((folder / "HalfCheetah-v4" / "config.yml").read_text()))["backend"] == "envpool"
    evaluations = np.load(folder / "evaluations.npz")
    assert (evaluations["ep_lengths"] == 1000).all()

    enjoyed = run("enjoy", *options, "-f", "logs", "--no-render", "-n", "1000", cwd=tmp_path)
    assert enjoyed.returncode == 0, enjoyed.stderr
    assert "Episode Length 1000" in enjoyed.stdout


@needs_envpool
def test_the_zoos_training_curves_read_a_batchs_monitor_file(tmp_path):
    folder = tmp_path / "logs" / "ano" / "Hopper-v5_1"
    env = make_vec_env("Hopper-v5", 8, backend="envpool", monitor_dir=folder)
    env.reset()
    for _ in range(200):
        env.step(np.zeros((8, 3)))
    env.close()
    # The zoo's plots import seaborn, which it does not declare, for its style only; and their package imports more.
    script = Path(rl_zoo3.__file__).parent / "plots" / "plot_train.py"
    arguments = ["-a", "ano", "-e", "Hopper-v5", "-f", "logs", "-w", "5"]
    code = (
        "import runpy, sys, unittest.mock, matplotlib; sys.modules['seaborn'] = unittest.mock.MagicMock()\n"
        "matplotlib.use('agg'); import matplotlib.pyplot as plt\n"
        "plt.show = lambda: plt.savefig('curve.png')\n"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0])['plot_train']()"
    )
    command = [sys.executable, "-c", code, str(script), *arguments]
    drawn = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / "curve.png").is_file()


@pytest.mark.slow
@needs_atari
@needs_envpool
@pytest.mark.parametrize("backend", ["envpool", "ale", "gymnasium", "auto"])
def test_atari_is_trained_and_enjoyed_with_every_backend(backend, tmp_path):
    file = write(tmp_path, "BreakoutNoFrameskip-v4", BREAKOUT | {"backend": backend})
    options = ["--algo", "ano", "--env", "BreakoutNoFrameskip-v4"]
    few = ["-n", "1024", "--eval-freq", "1024", "--eval-episodes", "1", "--seed", "1"]
    trained = run("train", *options, "-conf", file, *few, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert "Stacking" not in trained.stdout, "the backend stacks"
    results = load_results(str(tmp_path / "logs" / "ano" / "BreakoutNoFrameskip-v4_1"))
    assert len(results) >= 2
    assert results["l"].between(80, 2000).all(), "whole games, in the learner's steps"

    enjoyed = run("enjoy", *options, "-f", "logs", "--no-render", "-n", "400", cwd=tmp_path)
    assert enjoyed.returncode == 0, enjoyed.stderr
    assert "Atari Episode Score" in enjoyed.stdout


@pytest.mark.slow
def test_the_zoos_own_algorithms_know_the_key_too(tmp_path):
    settings = {"policy": "MlpPolicy", "n_timesteps": 64, "n_steps": 32, "batch_size": 32, "n_envs": 2, "backend": "gymnasium"}
    file = write(tmp_path, "CartPole-v1", settings)
    trained = run("train", "--algo", "ppo", "--env", "CartPole-v1", "-conf", file, "--eval-freq", "-1", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    enjoyed = run("enjoy", "--algo", "ppo", "--env", "CartPole-v1", "-f", "logs", "--no-render", "-n", "50", cwd=tmp_path)
    assert enjoyed.returncode == 0, enjoyed.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "envpol"}, "backend='envpol' is not allowed; allowed are auto, gymnasium, envpool, ale"),
        ({"env_wrapper": "gymnasium.wrappers.ClipAction"}, "wrapper_class is not allowed with backend 'envpool'"),
        ({"backend": "ale"}, "env_id='HalfCheetah-v4' is unknown to backend 'ale'"),
    ],
    ids=str,
)
@needs_envpool
@needs_atari
def test_what_a_backend_cannot_do_is_one_clear_line(changes, message, tmp_path):
    file = write(tmp_path, "HalfCheetah-v4", CHEETAH | changes)
    finished = run("train", "--algo", "ano", "--env", "HalfCheetah-v4", "-conf", file, cwd=tmp_path)
    assert finished.returncode == 2
    lines = [line for line in finished.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert message in lines[0]


@needs_atari
@pytest.mark.parametrize(
    ("hyperparams", "env_kwargs"),
    [
        ({}, {}),
        ({"frame_stack": 2}, {"frame_stack": 2}),
        ({"env_wrapper": ATARI_WRAPPER}, {"frame_stack": 1}),
        ({"env_wrapper": [ATARI_WRAPPER], "frame_stack": 4}, {"frame_stack": 4}),
        (
            {"env_wrapper": [{ATARI_WRAPPER: {"terminal_on_life_loss": False, "noop_max": 5}}], "frame_stack": 4},
            {"frame_stack": 4, "episodic_life": False, "noop_max": 5},
        ),
    ],
    ids=str,
)
def test_sb3s_atari_wrapper_in_a_file_becomes_the_backends_protocol(hyperparams, env_kwargs):
    register_atari("ALE/Pong-v5")
    hyperparams = dict(hyperparams, backend="envpool", n_steps=8)
    assert _backend_in(hyperparams, "PongNoFrameskip-v4").env_kwargs == env_kwargs
    assert hyperparams == {"n_steps": 8}


def test_files_without_the_key_are_left_alone():
    hyperparams = {"env_wrapper": [ATARI_WRAPPER], "frame_stack": 4}
    assert _backend_in(hyperparams, "PongNoFrameskip-v4") is None
    assert hyperparams == {"env_wrapper": [ATARI_WRAPPER], "frame_stack": 4}


@needs_envpool
@needs_atari
@pytest.mark.parametrize("env_id", ["HalfCheetah-v4", "PongNoFrameskip-v4"])
def test_an_agent_is_shown_with_gymnasium_in_the_same_spaces(env_id):
    register()
    register_atari(env_id)
    made = []
    for should_render in (False, True):
        env = rl_zoo3.utils.create_test_env(
            env_id, should_render=should_render, hyperparams={"backend": "envpool"}, env_kwargs={"render_mode": "rgb_array"}
        )
        made.append(env)
    assert type(made[0].unwrapped).__name__ == "EnvPoolVecEnv"
    assert type(made[1].unwrapped).__name__ == "DirectVecEnv"
    assert made[0].observation_space == made[1].observation_space
    assert made[0].action_space == made[1].action_space
    for env in made:
        env.close()


@needs_envpool
def test_what_gymnasium_would_show_differently_is_not_shown(monkeypatch):
    register()
    other = EnvSpec(
        "Pendulum-v1", entry_point=lambda **kwargs: TinyEnv(IMAGE_OBSERVATIONS, BOX_ACTIONS), disable_env_checker=True
    )
    monkeypatch.setitem(gym.registry, "Pendulum-v1", other)
    with pytest.raises(ValueError, match="Pendulum-v1 cannot be shown: gymnasium's observations .* use --no-render"):
        rl_zoo3.utils.create_test_env("Pendulum-v1", hyperparams={"backend": "envpool"})


def test_enjoy_may_run_several_environments_of_a_backend():
    import rl_zoo3.utils

    env = rl_zoo3.utils.create_test_env("CartPole-v1", n_envs=2, should_render=False, hyperparams={"backend": "gymnasium"})
    assert env.num_envs == 2
    env.close()


def test_an_unknown_argument_of_the_atari_wrapper_is_named():
    import rl_zoo3.utils

    wrapper = {"stable_baselines3.common.atari_wrappers.AtariWrapper": {"bad": 1}}
    with pytest.raises(ValueError, match="AtariWrapper has no argument bad; allowed are"):
        rl_zoo3.utils.create_test_env(
            "PongNoFrameskip-v4", should_render=False, hyperparams={"backend": "gymnasium", "env_wrapper": wrapper}
        )
