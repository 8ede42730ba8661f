"""Observations and rewards that are not numbers."""

import math

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnvWrapper, VecNormalize

from sb3_ano import ANO
from tests.tiny_envs import BOX_OBSERVATIONS, DICT_OBSERVATIONS, TinyEnv, tiny_vec_env, vec_env_with_bad_number


def train(env, policy: str = "MlpPolicy") -> ANO:
    return ANO(policy, env, n_steps=32, batch_size=32, n_epochs=1, seed=0).learn(3 * 32 * env.num_envs)


@pytest.mark.parametrize("what", ["reward", "observation"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [3, 40])
@pytest.mark.parametrize("normalize", [False, True])
def test_the_environment_and_the_step_are_named(what, number, at, normalize):
    env = vec_env_with_bad_number(2, what, number, at)
    if normalize:
        env = VecNormalize(env)
    with pytest.raises(ValueError, match=f"environment 2 returned {number} in its {what} at step {at} of the training"):
        train(env)


def test_the_key_of_a_dict_observation_is_named():
    env = vec_env_with_bad_number(1, "observation", math.nan, 7, observation_space=DICT_OBSERVATIONS)
    with pytest.raises(ValueError, match="environment 1 returned nan in its observation 'place' at step 7 of the training"):
        train(env, "MultiInputPolicy")


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_terminal_observation_is_looked_at(number, normalize):
    env = vec_env_with_bad_number(3, "observation", number, TinyEnv.length)
    message = f"environment 3 returned {number} in its terminal observation at step {TinyEnv.length} of"
    with pytest.raises(ValueError, match=message):
        train(VecNormalize(env) if normalize else env)


class BadReset(TinyEnv):
    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        return np.full_like(observation, math.nan), info


@pytest.mark.parametrize("normalize", [False, True])
def test_the_first_observation_is_looked_at(normalize):
    space = BOX_OBSERVATIONS, spaces.Discrete(2)
    env = DummyVecEnv([lambda: TinyEnv(*space), lambda: TinyEnv(*space), lambda: BadReset(*space)])
    with pytest.raises(ValueError, match="environment 2 returned nan in its observation at step 0 of"):
        train(VecNormalize(env) if normalize else env)


@pytest.mark.parametrize("what", ["reward", "observation"])
def test_the_statistics_of_vecnormalize_stay_finite(what):
    env = VecNormalize(vec_env_with_bad_number(2, what, math.inf, 9))
    with pytest.raises(ValueError, match="environment 2"):
        train(env)
    assert np.isfinite(env.obs_rms.mean).all()
    assert np.isfinite(env.ret_rms.var)
    assert "step_wait" not in vars(env.venv)


def test_what_a_wrapper_makes_of_finite_numbers_is_looked_at_too():
    class Logarithm(VecEnvWrapper):
        def reset(self):
            return self.venv.reset()

        def step_wait(self):
            observations, rewards, dones, infos = self.venv.step_wait()
            rewards[1] = -math.inf
            return observations, rewards, dones, infos

    with pytest.raises(ValueError, match="environment 1 returned -inf in its reward at step 1 of"):
        train(Logarithm(tiny_vec_env(BOX_OBSERVATIONS, spaces.Discrete(2))))


def test_a_wrapper_that_overrides_step_is_called():
    class Seven(VecEnvWrapper):
        def reset(self):
            return self.venv.reset()

        def step_wait(self):
            return self.venv.step_wait()

        def step(self, actions):
            observations, rewards, dones, infos = super().step(actions)
            return observations, np.full_like(rewards, 7.0), dones, infos

    model = ANO("MlpPolicy", Seven(tiny_vec_env(BOX_OBSERVATIONS, spaces.Discrete(2))), n_steps=8, batch_size=16, gamma=0.0)
    model.learn(16)
    assert (model.rollout_buffer.rewards == 7.0).all()


def test_the_guard_follows_a_change_of_environment():
    model = train(tiny_vec_env(BOX_OBSERVATIONS, spaces.Discrete(2), n_envs=4))
    model.set_env(vec_env_with_bad_number(0, "reward", math.nan, 5))
    with pytest.raises(ValueError, match="environment 0 returned nan in its reward"):
        model.learn(128)


def test_evaluation_with_normalised_observations_works_during_training():
    def normalised(training: bool) -> VecNormalize:
        return VecNormalize(tiny_vec_env(BOX_OBSERVATIONS, spaces.Discrete(2)), training=training)

    evaluate = EvalCallback(normalised(False), eval_freq=8, n_eval_episodes=2, verbose=0, warn=False)
    model = ANO("MlpPolicy", normalised(True), n_steps=32, batch_size=32, n_epochs=1, seed=0)
    model.learn(128, callback=evaluate)
    assert np.isfinite(evaluate.last_mean_reward)
    np.testing.assert_allclose(evaluate.eval_env.obs_rms.mean, model.env.obs_rms.mean)
