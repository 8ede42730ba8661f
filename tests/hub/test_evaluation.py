"""The evaluation behind a model card."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_ano import ANO
from sb3_ano.envs import make_vec_env
from sb3_ano.hub.evaluation import Task, evaluate, evaluation_env, task_of
from tests.common import SMALL
from tests.envs.backends import needs_atari, needs_envpool
from tests.tiny_envs import BOX_OBSERVATIONS, TinyEnv


def evaluated(model, env, task, **options):
    with evaluation_env(model, env, task, options.get("seed", 0)) as venv:
        return evaluate(model, venv, **options)


def returns_by_hand(model, env_id, n_episodes, seed) -> list[float]:
    """gymnasium's loop, with observations normalised by the formula of VecNormalize."""
    statistics = model.get_vec_normalize_env()
    env = gym.make(env_id)
    observation, _ = env.reset(seed=seed)
    returns, total = [], 0.0
    while len(returns) < n_episodes:
        if statistics is not None:
            rms = statistics.obs_rms
            scaled = (observation - rms.mean) / np.sqrt(rms.var + statistics.epsilon)
            observation = np.clip(scaled, -statistics.clip_obs, statistics.clip_obs).astype(np.float32)
        observation, reward, terminated, truncated, _ = env.step(model.predict(observation, deterministic=True)[0])
        total += float(reward)
        if terminated or truncated:
            returns.append(total)
            observation, total = env.reset()[0], 0.0
    return returns


@pytest.mark.parametrize(("agent", "env_id"), [("cartpole", "CartPole-v1"), ("pendulum", "Pendulum-v1")])
def test_returns_are_those_of_gymnasiums_loop(agent, env_id, request):
    model = request.getfixturevalue(agent)
    evaluation = evaluated(model, None, Task(env_id, {}), n_episodes=3, seed=7)
    assert evaluation.returns == pytest.approx(returns_by_hand(model, env_id, 3, seed=7), abs=1e-3)
    assert evaluation.mean == pytest.approx(np.mean(evaluation.returns))
    assert evaluation.std == pytest.approx(np.std(evaluation.returns))


def test_the_environments_of_training_are_left_as_they_were(pendulum):
    env = pendulum.get_env()
    before = (env.obs_rms.mean.copy(), env.obs_rms.count, env.training, env.norm_reward)
    own = VecNormalize(make_vec_env("Pendulum-v1", 1, backend="gymnasium", seed=7))
    for given in (None, env, own):
        evaluated(pendulum, given, Task("Pendulum-v1", {}), n_episodes=2)
    after = (env.obs_rms.mean, env.obs_rms.count, env.training, env.norm_reward)
    np.testing.assert_array_equal(before[0], after[0])
    assert before[1:] == after[1:] == (after[1], True, True)
    assert own.training
    assert own.norm_reward
    assert own.obs_rms.count == pytest.approx(1e-4), "statistics were updated"


def test_an_environment_of_ones_own_is_normalised_with_the_agents_statistics(pendulum):
    expected = evaluated(pendulum, None, Task("Pendulum-v1", {}), n_episodes=2, seed=5).returns
    plain = make_vec_env("Pendulum-v1", 1, backend="gymnasium")
    for given in (gym.make("Pendulum-v1"), plain, VecNormalize(make_vec_env("Pendulum-v1", 1, backend="gymnasium"))):
        assert evaluated(pendulum, given, Task("Pendulum-v1", {}), n_episodes=2, seed=5).returns == pytest.approx(expected)


def test_wrapped_rewards_do_not_count(cartpole):
    env = DummyVecEnv([lambda: gym.wrappers.TransformReward(Monitor(gym.make("CartPole-v1")), lambda reward: -5 * reward)])
    evaluation = evaluated(cartpole, env, Task("CartPole-v1", {}), n_episodes=2)
    assert evaluation.returns == evaluation.lengths


def test_the_task_is_named_by_the_models_environment(cartpole, pendulum):
    assert task_of(None, cartpole, None) == Task("CartPole-v1", {})
    assert task_of(None, pendulum, {"g": 9.0}) == Task("Pendulum-v1", {"g": 9.0})
    assert task_of(gym.make("Pendulum-v1", g=9.0, render_mode="rgb_array"), pendulum, None) == Task("Pendulum-v1", {"g": 9.0})


@needs_atari
@pytest.mark.parametrize("env_id", ["PongNoFrameskip-v4", "ALE/Pong-v5"])
def test_an_atari_game_keeps_its_id_with_or_without_sticky_actions(env_id):
    env = make_vec_env(env_id, 1, backend="gymnasium")
    model = ANO("CnnPolicy", env, policy_kwargs={"features_extractor_kwargs": {"features_dim": 8}}, **SMALL)
    task = task_of(None, model, None)
    assert task == Task(env_id, {})
    assert task.make().observation_space == model.observation_space


@needs_envpool
def test_a_model_of_envpool_is_evaluated_in_gymnasium(cartpole):
    model = ANO("MlpPolicy", make_vec_env("Hopper-v4", 2, backend="envpool"), **SMALL)
    task = task_of(None, model, None)
    with evaluation_env(model, None, task) as venv:
        assert (task.env_id, venv.num_envs, venv.render_mode) == ("Hopper-v4", 1, "rgb_array")


def test_environments_that_are_not_the_agents_are_refused(cartpole, pendulum):
    nameless = DummyVecEnv([lambda: TinyEnv(BOX_OBSERVATIONS, spaces.Discrete(2))])
    with pytest.raises(ValueError, match="no registered id"):
        task_of(nameless, cartpole, None)
    model = ANO.__new__(ANO)
    model.env = None
    with pytest.raises(ValueError, match="pass the id"):
        task_of(None, model, None)
    with pytest.raises(ValueError, match="'Pendulum-v1' is not what the model was trained in"):
        evaluated(cartpole, None, Task("Pendulum-v1", {}))
    with pytest.raises(ValueError, match="env is normalised and the model's is not"):
        evaluated(cartpole, VecNormalize(make_vec_env("CartPole-v1", 1, backend="gymnasium")), Task("CartPole-v1", {}))
    with pytest.raises(ValueError, match="n_eval_episodes=0"):
        evaluated(cartpole, None, Task("CartPole-v1", {}), n_episodes=0)
