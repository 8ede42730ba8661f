"""The evaluation behind a model card: in the environment that the agent was trained in, or in none."""

import json
import re

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TransformReward
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecNormalize

from sb3_ano import ANO
from sb3_ano.envs import make_vec_env
from tests.envs.backends import needs_atari, needs_envpool
from tests.hub.agents import Reversed, trained
from tests.tiny_envs import BOX_OBSERVATIONS, TinyEnv


@pytest.fixture
def evaluated(pack):
    """A function that evaluates an agent as a package does."""

    def evaluate(model, env=None, n_episodes=1, **options):
        folder = pack(model, env, n_eval_episodes=n_episodes, **options)
        return json.loads((folder / "results.json").read_text()) | {"card": (folder / "README.md").read_text()}

    return evaluate


def pendulums(n_envs: int = 1, backend: str = "gymnasium", **options):
    return make_vec_env("Pendulum-v1", n_envs, backend=backend, **options)


def inside(n_envs: int = 1, **options):
    return VecFrameStack(VecNormalize(pendulums(n_envs), **options), 2)


def outside(n_envs: int = 1, **options):
    return VecNormalize(VecFrameStack(pendulums(n_envs), 2), **options)


def returns_by_hand(model, env, n_episodes, seed) -> list[float]:
    """gymnasium's loop, with observations normalized by the formula of VecNormalize."""
    statistics = model.get_vec_normalize_env()
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
def test_returns_are_those_of_gymnasiums_loop(agent, env_id, evaluated, request):
    model = request.getfixturevalue(agent)
    results = evaluated(model, n_episodes=3, seed=7)
    returns = results["episode_returns"]
    assert returns == pytest.approx(returns_by_hand(model, gym.make(env_id), 3, seed=7), abs=1e-3)
    assert (results["mean_reward"], results["std_reward"]) == pytest.approx((np.mean(returns), np.std(returns)))


def test_given_environments_are_normalized_with_the_agents_statistics_and_left_as_they_were(pendulum, evaluated):
    env, fresh = pendulum.get_env(), VecNormalize(pendulums(seed=7))
    before = (env.obs_rms.mean.tolist(), env.obs_rms.count, True, True)
    expected = evaluated(pendulum, n_episodes=2, seed=5)["episode_returns"]
    for given in (pendulums(), fresh):
        assert evaluated(pendulum, given, 2, seed=5)["episode_returns"] == pytest.approx(expected)
    evaluated(pendulum, env)
    assert (env.obs_rms.mean.tolist(), env.obs_rms.count, env.training, env.norm_reward) == before
    assert (fresh.training, fresh.norm_reward, fresh.obs_rms.count) == (True, True, pytest.approx(1e-4))


def test_settings_are_published_unless_they_are_the_defaults_of_the_id(pendulum, evaluated):
    assert evaluated(trained(env=gym.make("FrozenLake-v1"), steps=0), name="lake")["env_kwargs"] == {}
    results = evaluated(pendulum, gym.make("Pendulum-v1", g=9.0, render_mode="rgb_array"))
    assert (results["env_id"], results["env_kwargs"]) == ("Pendulum-v1", {"g": 9.0})
    settings = {"max_episode_steps": 50}  # which the environment does not know
    results = evaluated(trained(env=gym.make("Pendulum-v1", **settings), steps=0), env_kwargs=settings)
    assert (results["env_kwargs"], results["episode_lengths"]) == (settings, [50])


FORKED = {"vec_env_cls": SubprocVecEnv, "vec_env_kwargs": {"start_method": "fork"}}
KNOWN, UNKNOWN = {"max_episode_steps": 50, "g": 2.0}, {"version": 0}
TRAINED_IN = [
    (lambda: make_vec_env("CartPole-v1", 2, wrapper_class=Reversed), {}, "Reversed"),
    (lambda: make_vec_env("CartPole-v1", 2, **FORKED), {}, "settings that cannot be read"),
    (lambda: TransformReward(gym.make("Pendulum-v1"), abs), {}, "TransformReward{'func': .*abs>}"),
    (lambda: gym.make("Pendulum-v1", max_episode_steps=50), {}, "max_episode_steps=50"),
    (lambda: gym.make("CartPole-v1").unwrapped, {}, "max_episode_steps=None"),
    (lambda: outside(2), {}, "VecFrameStack"),
    (lambda: inside(2), {}, "VecFrameStack, VecNormalize"),
    (lambda: pendulums(2, env_kwargs=KNOWN), KNOWN, ""),
    (lambda: pendulums(2, backend="envpool"), {}, ""),
    (lambda: pendulums(2, backend="envpool", env_kwargs=UNKNOWN), UNKNOWN, "what its id does not make .TypeError:.*"),
]


@needs_envpool
@pytest.mark.filterwarnings("ignore:.*precision lowered")
@pytest.mark.parametrize(("make", "settings", "additions"), TRAINED_IN)
def test_an_environment_that_its_id_and_settings_do_not_make_has_to_be_given(make, settings, additions, evaluated):
    """users U1, U2: the score of another task was published, or an AssertionError came from inside SB3."""
    model = trained(env=make(), steps=0)
    env_id = "CartPole-v1" if model.observation_space.shape == (4,) else "Pendulum-v1"
    if additions:
        with pytest.raises(ValueError, match=f"'{env_id}' is not what the .* trained in.* has {additions}:.* as env="):
            evaluated(model)
        results = evaluated(model, model.get_env())
    else:
        results = evaluated(model)
        assert results["episode_lengths"] == [settings.get("max_episode_steps", 200)]
        assert f"'{env_id}', backend='gymnasium', seed=0, env_kwargs={settings})" in results["card"]
    assert (results["env_id"], results["env_kwargs"]) == (env_id, settings)
    listed = f"The agent's environment is `{env_id}` with `{additions.replace(', ', '`, `')}`. Neither"
    assert bool(re.search(listed, results["card"])) == bool(additions)
    model.get_env().close()


def test_the_score_is_that_of_the_environment_that_was_given(evaluated):
    """users U1: 9.10 on the card of an agent that scores 500 in its own environment. Wrapped rewards do not count."""
    model = trained(env=make_vec_env("CartPole-v1", 1, wrapper_class=Reversed), steps=1024)
    returns = evaluated(model, model.get_env(), 5, seed=3)["episode_returns"]
    assert returns == returns_by_hand(model, Reversed(gym.make("CartPole-v1")), 5, seed=3)
    assert returns != returns_by_hand(model, gym.make("CartPole-v1"), 5, seed=3)
    env = DummyVecEnv([lambda: TransformReward(Monitor(Reversed(gym.make("CartPole-v1"))), lambda reward: -5 * reward)])
    assert evaluated(model, env, 5, seed=3)["episode_returns"] == returns


def test_statistics_are_used_where_the_training_had_them(evaluated):
    """users U2: VecNormalize and VecFrameStack in either order."""
    stacked = VecFrameStack(pendulums(), 2)
    for make, other in ((inside, stacked), (inside, outside()), (outside, inside())):
        model = trained(env=make(clip_obs=0.5))
        expected = evaluated(model, model.get_env(), seed=5)["episode_returns"]
        assert evaluated(model, make(), seed=5)["episode_returns"] == expected
        with pytest.raises(ValueError, match="observations of env"):
            evaluated(model, other)
    assert evaluated(model, stacked, seed=5)["episode_returns"] == expected


GAMES = [("PongNoFrameskip-v4", "gymnasium"), ("Pong-v5", "ale")]
GAMES += [(env_id, "envpool") for env_id in ("PongNoFrameskip-v4", "Pong-v5", "ALE/Pong-v5")]


@needs_atari
@needs_envpool
@pytest.mark.parametrize(("env_id", "backend"), GAMES)
def test_an_atari_game_keeps_the_id_that_it_was_trained_with(env_id, backend, pack, capsys):
    """users U3: no agent of EnvPool could be packaged under two of the three ids. Other rules are another task."""
    env = VecNormalize(make_vec_env(env_id, 2, backend=backend, env_kwargs={"episodic_life": False}), norm_obs=False)
    model = trained(env=env, policy="CnnPolicy", steps=0)
    with pytest.raises(ValueError, match="n_eval_episodes=0"):
        pack(model, verbose=1, n_eval_episodes=0)
    with pytest.raises(ValueError, match="has no EpisodicLifeEnv|has task=.*'episodic_life': False"):
        pack(model, env_kwargs={})
    assert f" agent for {env_id} over" in capsys.readouterr().out
    env.close()


def test_environments_that_are_not_the_agents_are_rejected(cartpole, pack, tmp_path):
    cartpole.save(tmp_path / "model")
    nameless = DummyVecEnv([lambda: TinyEnv(BOX_OBSERVATIONS, spaces.Discrete(2))])
    for model, env, message in (
        (cartpole, nameless, "env_id=None is not allowed.* register it with gymnasium"),
        (ANO.load(tmp_path / "model"), None, "pass the environment as env="),
        (cartpole, gym.make("Pendulum-v1"), "Observation spaces do not match"),
        (cartpole, VecNormalize(make_vec_env("CartPole-v1", backend="gymnasium")), "trained without"),
    ):
        with pytest.raises(ValueError, match=message):
            pack(model, env)
