"""What users bring along: classes that only their own code can supply."""

import gymnasium as gym
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy

from tests.tiny_envs import TinyEnv


class OwnPolicy(ActorCriticPolicy):
    """A policy that others have to import."""


class RegisteredElsewhere(TinyEnv):
    """An environment of another package."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  # gymnasium's way

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(spaces.Box(-1.0, 1.0, (3,)), spaces.Discrete(2))
        self.render_mode = render_mode


class FirstTwo(gym.ObservationWrapper):
    """Hides all but two numbers of the observation."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.observation_space = spaces.Box(-1.0, 1.0, (2,))

    def observation(self, observation):
        return observation[:2]
