"""DirectVecEnv equals SB3's DummyVecEnv, also if environments reuse what they return."""

from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_ano.envs import DirectVecEnv
from tests.tiny_envs import BOX_ACTIONS, BOX_OBSERVATIONS, DICT_OBSERVATIONS, IMAGE_OBSERVATIONS, TinyEnv

SPACES = {
    "box": BOX_OBSERVATIONS,
    "image": IMAGE_OBSERVATIONS,
    "discrete": spaces.Discrete(5),
    "multi-binary": spaces.MultiBinary(3),
    "dict": DICT_OBSERVATIONS,
    "tuple": spaces.Tuple([BOX_OBSERVATIONS, spaces.Discrete(3)]),
}


@pytest.mark.parametrize("observation_space", SPACES.values(), ids=SPACES)
@pytest.mark.parametrize("action_space", [BOX_ACTIONS, spaces.Discrete(2)], ids=["box", "discrete"])
def test_every_step_equals_dummy_vec_envs(observation_space, action_space):
    env_fns = [lambda: TinyEnv(deepcopy(observation_space), deepcopy(action_space))] * 3
    envs = DirectVecEnv(env_fns), DummyVecEnv(env_fns)
    for env in envs:
        env.seed(3)
    np.testing.assert_equal(*[env.reset() for env in envs])
    actions = deepcopy(action_space)
    actions.seed(0)
    for _ in range(40):
        action = np.stack([actions.sample() for _ in range(3)])
        ours, theirs = (env.step(action) for env in envs)
        np.testing.assert_equal(ours, theirs)
        assert [part.dtype for part in ours[1:3]] == [part.dtype for part in theirs[1:3]]
        assert envs[0].reset_infos == envs[1].reset_infos


class ThriftyEnv(gym.Env):
    """Returns the same array and the same dictionary at every step and reset."""

    observation_space = spaces.Box(0, 1000, (2,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.observation, self.info = np.zeros(2), {"inner": [0]}

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict]:
        self.observation[:] = 0
        return self.observation, self.info

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.observation += 1
        self.info["count"] = self.observation[0]
        over = self.observation[0] >= 5
        return self.observation, 1.0, over, over, self.info


def test_returned_values_stay_though_the_environment_reuses_them():
    env = DirectVecEnv([ThriftyEnv] * 2)
    env.reset()
    steps = [env.step(np.zeros(2, int)) for _ in range(7)]
    np.testing.assert_array_equal([step[0][0, 0] for step in steps], [1, 2, 3, 4, 0, 1, 2])
    assert [step[3][0]["count"] for step in steps] == [1, 2, 3, 4, 5, 1, 2]
    np.testing.assert_array_equal(steps[4][3][1]["terminal_observation"], [5, 5])
    # The environment keeps its dictionary, and nothing of the end of an episode comes back with it.
    assert "terminal_observation" not in steps[5][3][0]
    assert [bool(step[2][0]) for step in steps] == [False] * 4 + [True] + [False] * 2
    # Terminated and truncated counts as terminated.
    assert not any(step[3][0]["TimeLimit.truncated"] for step in steps)
