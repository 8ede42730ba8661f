"""The algorithm on one page equals ANO, whose code it does not share."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from sb3_ano import ANO, reference, shaping
from sb3_ano.reference import ReferenceANO
from tests.common import SMALL, needs_compiler, parameters

OBSERVATIONS = {
    "box": spaces.Box(-1.0, 1.0, (3,)),
    "discrete": spaces.Discrete(5),
    "multi_binary": spaces.MultiBinary(4),
    "dict": spaces.Dict({"a": spaces.Box(-1.0, 1.0, (3,)), "b": spaces.Discrete(3)}),
}
ACTIONS = {
    "box": spaces.Box(-1.0, 1.0, (2,)),
    "discrete": spaces.Discrete(3),
    "multi_discrete": spaces.MultiDiscrete([2, 3]),
    "multi_binary": spaces.MultiBinary(3),
}
OPTIONS = {
    "entropy": {"ent_coef": 0.01, "vf_coef": 0.3, "max_grad_norm": 0.1},
    "raw_advantages": {"normalize_advantage": False},
    "sde": {"use_sde": True, "sde_sample_freq": 4},
    "schedules": {"clip_range": lambda progress: 0.1 + 0.2 * progress, "learning_rate": lambda progress: 1e-3 * progress},
    "last_minibatch_smaller": {"batch_size": 24},
}


class Walk(gym.Env):
    """Give seeded random observations, and rewards that depend on the action."""

    def __init__(self, observation_space, action_space):
        self.observation_space = observation_space
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        reward = float(np.sum(action)) * self.np_random.normal()
        return self.observation_space.sample(), reward, bool(self.np_random.random() < 0.1), False, {}


def trained(kind, observation_space, action_space, **options):
    torch.manual_seed(0)
    policy = "MultiInputPolicy" if isinstance(observation_space, spaces.Dict) else "MlpPolicy"
    settings = {**SMALL, "learning_rate": 3e-3, **options}
    return parameters(kind(policy, Walk(observation_space, action_space), **settings).learn(128))


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_ano_equals_it_on_every_space(observation, action):
    spaces_of_both = OBSERVATIONS[observation], ACTIONS[action]
    expected = trained(ReferenceANO, *spaces_of_both)
    torch.testing.assert_close(trained(ANO, *spaces_of_both, torch_compile=False), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size", "ignore:batch_size=24 does not divide")
def test_ano_equals_it_with_every_option_that_it_knows(option):
    spaces_of_both = OBSERVATIONS["box"], ACTIONS["box"]
    expected = trained(ReferenceANO, *spaces_of_both, **OPTIONS[option])
    actual = trained(ANO, *spaces_of_both, torch_compile=False, **OPTIONS[option])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("action", ACTIONS)
def test_compiled_ano_equals_it(action):
    spaces_of_both = OBSERVATIONS["box"], ACTIONS[action]
    expected = trained(ReferenceANO, *spaces_of_both)
    torch.testing.assert_close(trained(ANO, *spaces_of_both, torch_compile=True), expected, rtol=1e-5, atol=1e-5)


def test_another_shape_is_an_attribute_of_a_subclass():
    class ReferenceSPO(ReferenceANO):
        shape = staticmethod(lambda x: x - x.square() / 2)

    spaces_of_both = OBSERVATIONS["box"], ACTIONS["box"]
    actual = trained(ANO, *spaces_of_both, shaping="spo", torch_compile=False)
    torch.testing.assert_close(actual, trained(ReferenceSPO, *spaces_of_both), rtol=1e-5, atol=1e-5)


def test_its_shape_is_that_of_the_package():
    x = torch.linspace(-5.0, 5.0, 101, dtype=torch.float64)
    torch.testing.assert_close(reference.shape(x), shaping.SHAPINGS["ano"](x))
