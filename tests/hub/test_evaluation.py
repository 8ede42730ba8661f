"""The evaluation behind a model card."""

import tempfile
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecNormalize, unwrap_vec_normalize

from sb3_ano import ANO
from sb3_ano.envs import make_vec_env
from sb3_ano.hub import save_safe
from sb3_ano.hub.evaluation import Task, evaluate, loaded_agent, task_of
from tests.common import SMALL
from tests.envs.backends import needs_atari, needs_envpool
from tests.tiny_envs import BOX_OBSERVATIONS, TinyEnv

CARTPOLE, PENDULUM = Task("CartPole-v1", {}), Task("Pendulum-v1", {})


def evaluated(model, env, task, n_episodes=1, seed=0, look=lambda agent: None):
    with tempfile.TemporaryDirectory() as folder:
        save_safe(model, folder)
        with loaded_agent(model, Path(folder), env, task, seed) as agent:
            look(agent)
            return evaluate(agent, n_episodes, seed=seed)


def pendulums(n_envs: int = 1, **options):
    return make_vec_env("Pendulum-v1", n_envs, backend="gymnasium", **options)


def returns_by_hand(model, env_id, n_episodes, seed) -> list[float]:
    """gymnasium's loop, with observations normalized by the formula of VecNormalize."""
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


@pytest.mark.parametrize(("agent", "task"), [("cartpole", CARTPOLE), ("pendulum", PENDULUM)])
def test_returns_are_those_of_gymnasiums_loop(agent, task, request):
    model = request.getfixturevalue(agent)
    results = evaluated(model, None, task, 3, seed=7)
    returns = results["episode_returns"]
    assert returns == pytest.approx(returns_by_hand(model, task.env_id, 3, seed=7), abs=1e-3)
    assert results["mean_reward"] == pytest.approx(np.mean(returns))
    assert results["std_reward"] == pytest.approx(np.std(returns))
    assert (results["n_eval_episodes"], results["is_deterministic"], results["seed"]) == (3, True, 7)


def test_given_environments_are_normalized_with_the_agents_statistics_and_left_as_they_were(pendulum):
    env, own = pendulum.get_env(), VecNormalize(pendulums(seed=7))
    before = (env.obs_rms.mean.copy(), env.obs_rms.count, env.training, env.norm_reward)
    expected = evaluated(pendulum, None, PENDULUM, 2, seed=5)["episode_returns"]
    for given in (gym.make("Pendulum-v1"), pendulums(), own):
        assert evaluated(pendulum, given, PENDULUM, 2, seed=5)["episode_returns"] == pytest.approx(expected)
    evaluated(pendulum, env, PENDULUM)
    np.testing.assert_array_equal(before[0], env.obs_rms.mean)
    assert before[1:] == (env.obs_rms.count, env.training, env.norm_reward) == (env.obs_rms.count, True, True)
    assert (own.training, own.norm_reward, own.obs_rms.count) == (True, True, pytest.approx(1e-4))


def test_wrapped_rewards_do_not_count(cartpole):
    env = DummyVecEnv([lambda: gym.wrappers.TransformReward(Monitor(gym.make("CartPole-v1")), lambda reward: -5 * reward)])
    results = evaluated(cartpole, env, CARTPOLE, 2)
    assert results["episode_returns"] == results["episode_lengths"]


def test_the_task_is_named_by_the_models_environment(cartpole, pendulum):
    assert task_of(cartpole) == CARTPOLE
    assert task_of(pendulum) == PENDULUM
    # Settings at the defaults of the id are not published.
    assert task_of(ANO("MlpPolicy", gym.make("FrozenLake-v1"), **SMALL)) == Task("FrozenLake-v1", {})
    with pytest.warns(UserWarning, match="env is not what the model was trained in: it has g=9.0"):
        task = task_of(pendulum, gym.make("Pendulum-v1", g=9.0, render_mode="rgb_array"))
    assert task == Task("Pendulum-v1", {"g": 9.0})


def flipped(env: gym.Env) -> gym.Env:
    return gym.wrappers.TransformObservation(env, lambda observation: observation[::-1].copy(), env.observation_space)


def subprocess_env():
    return flipped(gym.make("CartPole-v1"))


@pytest.mark.parametrize(
    ("make", "additions"),
    [
        (lambda: make_vec_env("CartPole-v1", 2, wrapper_class=flipped), "TransformObservation{'func': .*flipped.*}"),
        (lambda: flipped(gym.make("CartPole-v1")), "TransformObservation{'func': .*flipped.*}"),
        (lambda: SubprocVecEnv([subprocess_env], start_method="fork"), "TransformObservation"),
        (lambda: gym.make("Pendulum-v1", max_episode_steps=50), "max_episode_steps=50"),
        (lambda: gym.wrappers.TimeLimit(gym.make("Pendulum-v1"), 50), "max_episode_steps=50"),
        (lambda: gym.make("CartPole-v1").unwrapped, "max_episode_steps=None"),
        (lambda: VecFrameStack(pendulums(2), 2), r"VecFrameStack\(n_stack=2\)"),
        (lambda: VecNormalize(VecFrameStack(pendulums(2), 2)), r"VecFrameStack\(n_stack=2\)"),
        (lambda: VecFrameStack(VecNormalize(pendulums(2)), 2), r"VecFrameStack\(n_stack=2\), VecNormalize"),
    ],
)
def test_an_environment_that_its_id_does_not_make_has_to_be_given(make, additions):
    """users U1, U2: the score of another task was published, or an AssertionError came from inside SB3."""
    env = make()
    model = ANO("MlpPolicy", env, **SMALL)
    env_id = "CartPole-v1" if model.observation_space.shape == (4,) else "Pendulum-v1"
    for by_id in (None, env_id):
        with pytest.raises(ValueError, match=f"'{env_id}' is not what the model was trained in.* has {additions}:.* as env="):
            task_of(model, by_id)
    for given in (env, model.get_env()):
        task = task_of(model, given)
        assert (task.env_id, task.env_kwargs, len(task.additions)) == (env_id, {}, additions.count(", Vec") + 1)
        assert evaluated(model, given, task)["episode_lengths"]
    model.get_env().close()


def test_the_score_is_that_of_the_environment_that_was_given():
    """users U1: 9.10 on the card of an agent that scores 500 in its own environment."""
    env, seen = make_vec_env("CartPole-v1", 1, wrapper_class=flipped), []

    def record(agent):
        predict = agent.predict
        agent.predict = lambda observation, **options: (seen.append(observation), predict(observation, **options))[1]

    model = ANO("MlpPolicy", env, **SMALL)
    evaluated(model, env, task_of(model, env), seed=3, look=record)
    np.testing.assert_array_equal(seen[0][0], gym.make("CartPole-v1").reset(seed=3)[0][::-1])


@pytest.mark.parametrize(
    ("env", "settings", "given"),
    [
        (lambda: pendulums(2, env_kwargs={"max_episode_steps": 50, "g": 2.0}), {"max_episode_steps": 50, "g": 2.0}, None),
        (lambda: gym.make("Pendulum-v1", g=2.0, render_mode="rgb_array"), {"g": 2.0}, None),
        (lambda: gym.wrappers.RecordEpisodeStatistics(gym.make("Pendulum-v1")), {}, None),
        (lambda: VecNormalize(pendulums(2), norm_obs=False), {}, None),
        (lambda: gym.make("Pendulum-v1", max_episode_steps=50), {"max_episode_steps": 50}, {"max_episode_steps": 50}),
    ],
)
def test_an_environment_that_its_id_and_settings_make_need_not_be_given(env, settings, given):
    model = ANO("MlpPolicy", env(), **SMALL)
    task = task_of(model, env_kwargs=given)
    assert task == Task("Pendulum-v1", settings)
    assert evaluated(model, None, task)["episode_lengths"] == [settings.get("max_episode_steps", 200)]


def test_statistics_are_used_where_the_training_had_them():
    """users U2: VecNormalize and VecFrameStack in either order."""
    inside, outside = (
        lambda **options: VecFrameStack(VecNormalize(pendulums(), **options), 2),
        lambda **options: VecNormalize(VecFrameStack(pendulums(), 2), **options),
    )
    stacked = VecFrameStack(pendulums(), 2)
    for make, others in ((inside, (outside(), stacked)), (outside, (inside(),))):
        model = ANO("MlpPolicy", make(clip_obs=0.5), **SMALL).learn(64)
        task = task_of(model, model.get_env())
        expected = evaluated(model, model.get_env(), task, seed=5)["episode_returns"]
        fresh = make()
        assert evaluated(model, fresh, task, seed=5)["episode_returns"] == expected
        assert unwrap_vec_normalize(fresh).obs_rms.count == pytest.approx(1e-4), "the environment was changed"
        for other in others:
            with pytest.raises(ValueError, match="'Pendulum-v1' is not what the model was trained in: .*observations of env"):
                evaluated(model, other, task)
    assert evaluated(model, stacked, task, seed=5)["episode_returns"] == expected


@needs_atari
@pytest.mark.parametrize(
    ("env_id", "backend"),
    [
        ("PongNoFrameskip-v4", "gymnasium"),
        ("Pong-v5", "gymnasium"),
        ("Pong-v5", "ale"),
        pytest.param("Pong-v5", "envpool", marks=needs_envpool),
        pytest.param("PongNoFrameskip-v4", "envpool", marks=needs_envpool),
        pytest.param("ALE/Pong-v5", "envpool", marks=needs_envpool),
    ],
)
def test_an_atari_game_keeps_the_id_that_it_was_trained_with(env_id, backend):
    """users U3: no agent of EnvPool could be packaged under two of the three ids."""
    env = VecNormalize(make_vec_env(env_id, 2, backend=backend), norm_obs=False)
    model = ANO("CnnPolicy", env, policy_kwargs={"features_extractor_kwargs": {"features_dim": 8}}, **SMALL)
    task = task_of(model)
    assert task == Task(env_id, {})
    assert task.make().observation_space == model.observation_space
    env.close()


@needs_envpool
def test_models_of_envpool_are_evaluated_in_gymnasium_if_it_has_the_task():
    env = make_vec_env("HalfCheetah-v4", 2, backend="envpool", env_kwargs={"frame_skip": 3})
    model = ANO("MlpPolicy", env, **SMALL)
    with pytest.raises(ValueError, match="'HalfCheetah-v4' is not what the model was trained in.* pass it as env="):
        task_of(model)
    task = task_of(model, env)
    assert (task.env_id, task.env_kwargs, len(task.additions)) == ("HalfCheetah-v4", {"frame_skip": 3}, 1)
    with pytest.warns(UserWarning, match="not what the model was trained in"):
        task_of(model, gym.make("HalfCheetah-v4"))
    env.close()
    made = task_of(ANO("MlpPolicy", make_vec_env("Hopper-v4", 2, backend="envpool"), **SMALL)).make()
    assert (made.backend, made.num_envs, made.render_mode) == ("gymnasium", 1, "rgb_array")


@needs_atari
def test_other_rules_of_a_game_are_another_task():
    model = ANO("CnnPolicy", make_vec_env("Pong-v5", 1, backend="gymnasium", env_kwargs={"episodic_life": False}), **SMALL)
    assert task_of(model) == Task("Pong-v5", {"episodic_life": False})
    with pytest.raises(ValueError, match="has repeat_action_probability=0.0"):
        task_of(model, "ALE/Pong-v5")
    with pytest.raises(ValueError, match="has no EpisodicLifeEnv"):
        task_of(model, env_kwargs={})


def test_environments_that_are_not_the_agents_are_rejected(cartpole):
    with pytest.raises(ValueError, match="no registered id"):
        task_of(cartpole, DummyVecEnv([lambda: TinyEnv(BOX_OBSERVATIONS, spaces.Discrete(2))]))
    model = ANO.__new__(ANO)
    model.env = None
    with pytest.raises(ValueError, match="pass the id"):
        task_of(model)
    with pytest.raises(ValueError, match="'Pendulum-v1' is not what the model was trained in: .*env does not fit"):
        evaluated(cartpole, None, PENDULUM)
    with pytest.raises(ValueError, match="is not what the model was trained in: .*trained without"):
        evaluated(cartpole, VecNormalize(make_vec_env("CartPole-v1", 1, backend="gymnasium")), CARTPOLE)
    with pytest.raises(ValueError, match="n_eval_episodes=0"):
        evaluated(cartpole, None, CARTPOLE, 0)
