"""Evaluations end, count what SB3's evaluate_policy counts, and are not silent."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control import PendulumEnv
from stable_baselines3.common import evaluation as sb3s
from stable_baselines3.common.vec_env import SubprocVecEnv, VecMonitor

from sb3_ano.envs import evaluation, make_vec_env
from sb3_ano.envs.evaluation import evaluate_policy
from tests.envs.backends import RandomPolicy, needs_atari

OUTSIDE = "a wrapper outside of Monitor ends episodes"


class EndsEarly(gym.Wrapper):
    """Terminates every episode after a number of steps, and halves the rewards."""

    def __init__(self, env: gym.Env, length: int = 9) -> None:
        super().__init__(env)
        self.length = length

    def reset(self, **arguments):
        self.steps = 0
        return self.env.reset(**arguments)

    def step(self, action):
        observation, reward, _, _, info = self.env.step(action)
        self.steps += 1
        return observation, reward / 2, self.steps == self.length, False, info


def time_limit(env: gym.Env) -> gym.Env:
    return gym.wrappers.TimeLimit(env, 7)


@pytest.mark.parametrize("vec_env_cls", [None, SubprocVecEnv])
@pytest.mark.parametrize(("wrapper", "length"), [(time_limit, 7), (EndsEarly, 9)], ids=["truncated", "terminated"])
def test_episodes_that_end_outside_of_monitor_count(wrapper, length, vec_env_cls):
    processes = {"vec_env_cls": vec_env_cls, "vec_env_kwargs": {"start_method": "fork"} if vec_env_cls else None}
    env = make_vec_env("Pendulum-v1", 2, seed=0, wrapper_class=wrapper, **processes)
    with pytest.warns(UserWarning, match=OUTSIDE):
        returns, lengths = evaluate_policy(RandomPolicy(env), env, 5, return_episode_rewards=True)
    assert lengths == [length] * 5

    env.seed(0)
    observations = env.reset()
    policy = RandomPolicy(env)
    totals = np.zeros(2)
    for _ in range(length):
        actions, _ = policy.predict(observations)
        observations, rewards, _, _ = env.step(actions)
        totals += rewards
    assert returns[:2] == pytest.approx(totals.tolist(), rel=1e-5)
    env.close()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("wrap", [lambda env: env, VecMonitor], ids=["Monitor", "VecMonitor"])
def test_other_episodes_are_counted_as_by_sb3(env_id, wrap):
    results = []
    for evaluate in (evaluate_policy, sb3s.evaluate_policy):
        env = make_vec_env(lambda: gym.make(env_id), 3, seed=0) if wrap is not VecMonitor else bare(env_id)
        results.append(evaluate(RandomPolicy(env), wrap(env), n_eval_episodes=7, return_episode_rewards=True))
    assert results[0] == results[1]


def bare(env_id: str) -> sb3s.VecEnv:
    env = sb3s.DummyVecEnv([lambda: gym.make(env_id)] * 3)
    env.seed(0)
    return env


def test_a_single_environment_is_evaluated():
    env = gym.make("Pendulum-v1", max_episode_steps=7)
    policy = RandomPolicy(make_vec_env("Pendulum-v1"))
    with pytest.warns(UserWarning, match="not wrapped with a ``Monitor``"):  # SB3's
        assert evaluate_policy(policy, env, 3, return_episode_rewards=True)[1] == [7, 7, 7]


@needs_atari
def test_a_lost_life_is_no_end():
    env = make_vec_env("Breakout-v5", 1, seed=0, backend="gymnasium")
    _, lengths = evaluate_policy(RandomPolicy(env), env, 2, return_episode_rewards=True)
    assert min(lengths) > 80  # five lives
    env.close()


def test_an_evaluation_without_end_says_so_and_stops(monkeypatch, capsys):
    monkeypatch.setattr(evaluation, "_MOST_STEPS", 300)
    monkeypatch.setattr(evaluation, "_SECONDS_OF_SILENCE", 0.0)
    env = make_vec_env(PendulumEnv, 2)
    with pytest.raises(RuntimeError, match="environment 0 has not ended its episode within 300 steps; give it a time limit"):
        evaluate_policy(RandomPolicy(env), env, 2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("evaluation: 0 episodes in 1 steps; the present one of environment 0 has 1 steps")
    assert len(lines) > 100


def test_a_fast_evaluation_prints_nothing(capfd):
    env = make_vec_env("CartPole-v1", 2)
    evaluate_policy(RandomPolicy(env), env, 2)
    assert capfd.readouterr() == ("", "")
