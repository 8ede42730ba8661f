"""``make_vec_env`` takes what SB3's takes, and makes the same environments (review users U8)."""

import inspect
import pickle

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control import PendulumEnv
from stable_baselines3.common import env_util
from stable_baselines3.common.monitor import load_results
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from sb3_ano.envs import DirectVecEnv, make_vec_env
from tests.envs.backends import RandomPolicy, needs_envpool


def pendulum(g: float = 10.0) -> gym.Env:
    return gym.make("Pendulum-v1", g=g, max_episode_steps=20)


def trajectory(env: VecEnv, n_steps: int = 30) -> np.ndarray:
    """Observations of the reset and of steps with random actions; closes the environments."""
    policy = RandomPolicy(env)
    observations = np.stack([env.reset(), *(env.step(policy.actions())[0] for _ in range(n_steps))])
    env.close()
    return observations


def test_the_arguments_are_sb3s_in_its_order_and_then_keywords():
    ours, sb3s = (inspect.signature(function).parameters for function in (make_vec_env, env_util.make_vec_env))
    assert list(ours)[: len(sb3s)] == list(sb3s)
    assert [ours[name].default for name in sb3s] == [parameter.default for parameter in sb3s.values()]
    assert {name: ours[name].kind.name for name in list(ours)[len(sb3s) :]} == {
        "backend": "KEYWORD_ONLY",
        "num_threads": "KEYWORD_ONLY",
    }


@pytest.mark.parametrize("env_id", ["Pendulum-v1", PendulumEnv, pendulum], ids=["id", "class", "function"])
@pytest.mark.parametrize(
    "arguments",
    [
        (3, 7),
        (3, 7, 5),
        (2, 7, 0, None, gym.wrappers.TimeLimit, {"g": 5.0}, None, None, None, {"max_episode_steps": 7}),
        (2, 7, 0, None, None, {"g": 5.0}, DummyVecEnv),
    ],
    ids=["seed", "start_index", "wrapper", "vec_env_cls"],
)
def test_one_seed_gives_sb3s_environments(env_id, arguments):
    ours, sb3s = make_vec_env(env_id, *arguments), env_util.make_vec_env(env_id, *arguments)
    assert type(ours) is (DummyVecEnv if DummyVecEnv in arguments else DirectVecEnv)
    np.testing.assert_array_equal(
        np.stack([space.sample() for space in ours.get_attr("action_space")]),
        np.stack([space.sample() for space in sb3s.get_attr("action_space")]),
    )
    np.testing.assert_array_equal(trajectory(ours), trajectory(sb3s))


def test_environments_in_processes_are_sb3s():
    arguments = {"n_envs": 2, "seed": 3, "vec_env_cls": SubprocVecEnv, "vec_env_kwargs": {"start_method": "forkserver"}}
    env = make_vec_env("Pendulum-v1", **arguments)
    assert type(env) is SubprocVecEnv
    assert env.backend == "gymnasium"
    np.testing.assert_array_equal(trajectory(env), trajectory(env_util.make_vec_env("Pendulum-v1", 2, 3)))


def test_what_makes_an_environment_in_another_process_can_be_sent_there():
    functions = []

    def remember(env_fns: list) -> VecEnv:
        functions.extend(env_fns)
        return DirectVecEnv(env_fns)

    make_vec_env("ALE/Pong-v5", 1, vec_env_cls=remember).close()
    assert callable(pickle.loads(cloudpickle.dumps(functions[0])))


def test_monitor_files_are_numbered_from_the_start_index(tmp_path):
    make_vec_env("Pendulum-v1", 2, 0, 3, tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3.monitor.csv", "4.monitor.csv"]
    assert len(load_results(str(tmp_path))) == 0


def test_a_backend_in_the_place_of_the_seed_is_explained():
    with pytest.raises(
        ValueError, match="seed='envpool' is not allowed.*the backend is a keyword argument: backend='envpool'"
    ):
        make_vec_env("Hopper-v5", 2, "envpool")
    with pytest.raises(ValueError, match=r"seed=0.5 is not allowed; allowed are integers and None$"):
        make_vec_env("Hopper-v5", 2, 0.5)


@needs_envpool
def test_what_only_gymnasium_takes_is_refused_by_a_pool():
    with pytest.raises(ValueError, match="vec_env_cls is not allowed with backend 'envpool'; backend 'gymnasium' takes it"):
        make_vec_env("Hopper-v5", backend="envpool", vec_env_cls=SubprocVecEnv)
    with pytest.raises(ValueError, match="start_index is not allowed with backend 'envpool'"):
        make_vec_env("Hopper-v5", backend="envpool", start_index=1)
    with pytest.raises(ValueError, match="env_id=<function pendulum.*is not allowed with backend 'envpool', which takes ids"):
        make_vec_env(pendulum, backend="envpool")


def test_an_unknown_id_is_not_looked_for_in_processes():
    with pytest.raises(ValueError, match="env_id='Pendulm-v1' is unknown to backend 'gymnasium', did you mean 'Pendulum-v1'"):
        make_vec_env("Pendulm-v1", vec_env_cls=SubprocVecEnv)
