"""Observations and rewards that are not numbers."""

import math

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_ano import ANO
from tests.tiny_envs import BOX_OBSERVATIONS, DICT_OBSERVATIONS, TinyEnv, tiny_vec_env, vec_env_with_bad_number


def train(env, policy: str = "MlpPolicy") -> ANO:
    return ANO(policy, env, n_steps=32, batch_size=32, n_epochs=1, seed=0).learn(3 * 32 * env.num_envs)


@pytest.mark.parametrize("what", ["reward", "observation"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [3, 40])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # in VecNormalize, on its way to the guard
def test_the_environment_and_the_step_are_named(what, number, at, normalize):
    env = vec_env_with_bad_number(2, what, number, at)
    if normalize:
        env = VecNormalize(env)
    with pytest.raises(ValueError, match=f"environment 2 returned {number} in its {what} at step {at} "):
        train(env)


def test_the_key_of_a_dict_observation_is_named():
    env = vec_env_with_bad_number(1, "observation", math.nan, 7, observation_space=DICT_OBSERVATIONS)
    with pytest.raises(ValueError, match="environment 1 returned nan in its observation 'place' at step 7 "):
        train(env, "MultiInputPolicy")


def test_a_terminal_observation_is_looked_at():
    env = vec_env_with_bad_number(3, "observation", math.nan, TinyEnv.length)
    with pytest.raises(ValueError, match=f"environment 3 returned nan in its terminal observation at step {TinyEnv.length} "):
        train(env)


class BadReset(TinyEnv):
    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        return np.full_like(observation, math.nan), info


def test_the_first_observation_is_looked_at():
    env = DummyVecEnv(
        [lambda: TinyEnv(BOX_OBSERVATIONS, spaces.Discrete(2)), lambda: BadReset(BOX_OBSERVATIONS, spaces.Discrete(2))]
    )
    with pytest.raises(ValueError, match="environment 1 returned nan in its observation at step 0 "):
        train(env)


def test_the_guard_follows_a_change_of_environment():
    model = train(tiny_vec_env(BOX_OBSERVATIONS, spaces.Discrete(2), n_envs=4))
    model.set_env(vec_env_with_bad_number(0, "reward", math.nan, 5))
    with pytest.raises(ValueError, match="environment 0 returned nan in its reward"):
        model.learn(128)
