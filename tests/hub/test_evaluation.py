"""The evaluation behind a model card."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecNormalize

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
    assert task_of(cartpole) == Task("CartPole-v1", {})
    assert task_of(pendulum) == Task("Pendulum-v1", {})
    with pytest.warns(UserWarning, match="env is not what the model was trained in: it has g=9.0"):
        task = task_of(pendulum, gym.make("Pendulum-v1", g=9.0, render_mode="rgb_array"))
    assert task == Task("Pendulum-v1", {"g": 9.0})


def flipped(env: gym.Env) -> gym.Env:
    return gym.wrappers.TransformObservation(env, lambda observation: observation[::-1].copy(), env.observation_space)


def subprocess_env():
    return flipped(gym.make("CartPole-v1"))


def pendulums(n_envs: int = 1, **options):
    return make_vec_env("Pendulum-v1", n_envs, backend="gymnasium", **options)


FLIPPED = f"TransformObservation(func='{__name__}:flipped.<locals>.<lambda>')"


@pytest.mark.parametrize(
    ("make", "additions"),
    [
        (lambda: make_vec_env("CartPole-v1", 2, wrapper_class=flipped), [FLIPPED]),
        (lambda: flipped(gym.make("CartPole-v1")), [FLIPPED]),
        (lambda: SubprocVecEnv([subprocess_env], start_method="fork"), ["TransformObservation"]),
        (lambda: gym.make("Pendulum-v1", max_episode_steps=50), ["max_episode_steps=50"]),
        (lambda: gym.wrappers.TimeLimit(gym.make("Pendulum-v1"), 50), ["max_episode_steps=50"]),
        (lambda: gym.make("CartPole-v1").unwrapped, ["max_episode_steps=None"]),
        (lambda: VecFrameStack(pendulums(2), 2), ["VecFrameStack(n_stack=2)"]),
        (lambda: VecNormalize(VecFrameStack(pendulums(2), 2)), ["VecFrameStack(n_stack=2)"]),
        (lambda: VecFrameStack(VecNormalize(pendulums(2)), 2), ["VecFrameStack(n_stack=2)", "VecNormalize"]),
    ],
)
def test_an_environment_that_its_id_does_not_make_has_to_be_given(make, additions):
    """users U1, U2: the score of another task was published, or an AssertionError came from inside SB3."""
    env = make()
    model = ANO("MlpPolicy", env, **SMALL)
    env_id = "CartPole-v1" if model.observation_space.shape == (4,) else "Pendulum-v1"
    for by_id in (None, env_id):
        with pytest.raises(ValueError, match=f"'{env_id}' is not what the model was trained in.* pass it as env=") as error:
            task_of(model, by_id)
        assert f"has {', '.join(additions)}:" in str(error.value)
    for given in (env, model.get_env()):
        task = task_of(model, given)
        assert task == Task(env_id, {}, additions=tuple(additions))
        assert evaluated(model, given, task, n_episodes=1).lengths
    model.get_env().close()


def test_the_score_is_that_of_the_environment_that_was_given(cartpole):
    """users U1: 9.10 on the card of an agent that scores 500 in its own environment."""
    env = make_vec_env("CartPole-v1", 1, wrapper_class=flipped)
    policy_sees = {}
    model = ANO("MlpPolicy", env, **SMALL)
    predict = model.predict
    model.predict = lambda observation, *rest, **options: (
        policy_sees.setdefault("first", observation.copy()),
        predict(observation, *rest, **options),
    )[1]
    evaluated(model, env, task_of(model, env), n_episodes=1, seed=3)
    np.testing.assert_array_equal(policy_sees["first"][0], gym.make("CartPole-v1").reset(seed=3)[0][::-1])


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        (lambda: pendulums(2, env_kwargs={"max_episode_steps": 50, "g": 2.0}), {"max_episode_steps": 50, "g": 2.0}),
        (lambda: gym.make("Pendulum-v1", g=2.0, render_mode="rgb_array"), {"g": 2.0}),
        (lambda: gym.wrappers.RecordEpisodeStatistics(gym.make("Pendulum-v1")), {}),
        (lambda: VecNormalize(pendulums(2), norm_obs=False), {}),
    ],
)
def test_an_environment_that_its_id_and_settings_make_need_not_be_given(env, settings):
    model = ANO("MlpPolicy", env(), **SMALL)
    task = task_of(model)
    assert task == Task("Pendulum-v1", settings)
    lengths = evaluated(model, None, task, n_episodes=1).lengths
    assert lengths == [settings.get("max_episode_steps", 200)]


def test_a_time_limit_can_be_given_as_a_setting():
    model = ANO("MlpPolicy", gym.make("Pendulum-v1", max_episode_steps=50), **SMALL)
    task = task_of(model, env_kwargs={"max_episode_steps": 50})
    assert evaluated(model, None, task, n_episodes=1).lengths == [50]


def test_statistics_are_used_where_the_training_had_them():
    """users U2: VecNormalize and VecFrameStack in either order."""
    inside, outside = (
        lambda **options: VecFrameStack(VecNormalize(pendulums(), **options), 2),
        lambda **options: VecNormalize(VecFrameStack(pendulums(), 2), **options),
    )
    for make, other in ((inside, outside), (outside, inside)):
        model = ANO("MlpPolicy", make(clip_obs=0.5), **SMALL).learn(64)
        task = task_of(model, model.get_env())
        expected = evaluated(model, model.get_env(), task, n_episodes=1, seed=5).returns
        assert evaluated(model, make(), task, n_episodes=1, seed=5).returns == expected
        with pytest.raises(ValueError, match="has no VecNormalize in the place where the model's environment has it"):
            evaluated(model, other(), task, n_episodes=1)
    with pytest.raises(ValueError, match="below VecFrameStack"):
        evaluated(ANO("MlpPolicy", inside(), **SMALL), VecFrameStack(pendulums(), 2), task)
    stacked = VecFrameStack(pendulums(), 2)
    assert evaluated(ANO("MlpPolicy", outside(), **SMALL), stacked, task, n_episodes=1).lengths == [200]


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
    env = make_vec_env(env_id, 2, backend=backend)
    model = ANO(
        "CnnPolicy",
        VecNormalize(env, norm_obs=False),
        policy_kwargs={"features_extractor_kwargs": {"features_dim": 8}},
        **SMALL,
    )
    task = task_of(model)
    assert task == Task(env_id, {})
    with evaluation_env(model, None, task) as venv:
        assert (venv.num_envs, venv.observation_space) == (1, model.observation_space)
    env.close()


@needs_envpool
def test_settings_that_only_envpool_has_need_an_environment():
    env = make_vec_env("HalfCheetah-v4", 2, backend="envpool", env_kwargs={"frame_skip": 3})
    model = ANO("MlpPolicy", env, **SMALL)
    with pytest.raises(ValueError, match="'HalfCheetah-v4' is not what the model was trained in.* pass it as env="):
        task_of(model)
    task = task_of(model, env)
    assert (task.env_id, task.env_kwargs, len(task.additions)) == ("HalfCheetah-v4", {"frame_skip": 3}, 1)
    with pytest.warns(UserWarning, match="not what the model was trained in"):
        task_of(model, gym.make("HalfCheetah-v4"))
    env.close()


@needs_atari
def test_other_rules_of_a_game_are_another_task():
    model = ANO("CnnPolicy", make_vec_env("Pong-v5", 1, backend="gymnasium", env_kwargs={"episodic_life": False}), **SMALL)
    assert task_of(model) == Task("Pong-v5", {"episodic_life": False})
    with pytest.raises(ValueError, match="has repeat_action_probability=0.0"):
        task_of(model, "ALE/Pong-v5")
    with pytest.raises(ValueError, match="has no EpisodicLifeEnv"):
        task_of(model, env_kwargs={})


@needs_envpool
def test_a_model_of_envpool_is_evaluated_in_gymnasium(cartpole):
    model = ANO("MlpPolicy", make_vec_env("Hopper-v4", 2, backend="envpool"), **SMALL)
    task = task_of(model)
    with evaluation_env(model, None, task) as venv:
        assert (task.env_id, venv.num_envs, venv.render_mode) == ("Hopper-v4", 1, "rgb_array")


def test_environments_that_are_not_the_agents_are_refused(cartpole, pendulum):
    nameless = DummyVecEnv([lambda: TinyEnv(BOX_OBSERVATIONS, spaces.Discrete(2))])
    with pytest.raises(ValueError, match="no registered id"):
        task_of(cartpole, nameless)
    model = ANO.__new__(ANO)
    model.env = None
    with pytest.raises(ValueError, match="pass the id"):
        task_of(model)
    with pytest.raises(ValueError, match="'Pendulum-v1' is not what the model was trained in"):
        evaluated(cartpole, None, Task("Pendulum-v1", {}))
    with pytest.raises(ValueError, match="env is normalized and the model's is not"):
        evaluated(cartpole, VecNormalize(make_vec_env("CartPole-v1", 1, backend="gymnasium")), Task("CartPole-v1", {}))
    with pytest.raises(ValueError, match="n_eval_episodes=0"):
        evaluated(cartpole, None, Task("CartPole-v1", {}), n_episodes=0)
