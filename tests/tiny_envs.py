"""Small seeded environments. (SB3's own FakeImageEnv differs from itself between two runs with one seed.)"""

import itertools
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv

BOX_OBSERVATIONS = spaces.Box(-1.0, 1.0, (4,), np.float32)
IMAGE_OBSERVATIONS = spaces.Box(0, 255, (36, 36, 1), np.uint8)
DICT_OBSERVATIONS = spaces.Dict({"place": BOX_OBSERVATIONS, "kind": spaces.Discrete(3)})
BOX_ACTIONS = spaces.Box(-1.0, 1.0, (2,), np.float32)


class TinyEnv(gym.Env):
    """Observations drawn from their space, a reward that depends on both observation and action, 15 steps."""

    length = 15

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        self.observation_space = observation_space
        self.action_space = action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._steps = 0
        self._observation = self.observation_space.sample()
        return self._observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        scale = np.mean(spaces.flatten(self.observation_space, self._observation)) / 100.0
        reward = float(np.sum(action) * scale)
        self._steps += 1
        self._observation = self.observation_space.sample()
        return self._observation, reward, False, self._steps >= self.length, {}


def tiny_vec_env(observation_space: spaces.Space, action_space: spaces.Space, n_envs: int = 2) -> VecEnv:
    """Seeded when the model is; spaces are copied, so that two models never share a generator."""
    return make_vec_env(lambda: TinyEnv(deepcopy(observation_space), deepcopy(action_space)), n_envs)


def vec_env_with_bad_number(index, what, number, at, observation_space=BOX_OBSERVATIONS, wrap=lambda env: env) -> VecEnv:
    """Four environments, of which the one at ``index`` goes wrong at step ``at``; 0 is its reset."""
    env = wrap(tiny_vec_env(observation_space, spaces.Discrete(2), 4))
    reset, step, steps = env.reset, env.step_wait, itertools.count()

    def spoiled(observations: Any, rewards: Any, dones: Any, infos: Any) -> tuple:
        if next(steps) == at:
            if what == "reward":
                rewards[index] = number
            elif dones[index]:
                infos[index]["terminal_observation"][1] = number
            else:
                (observations["place"] if isinstance(observations, dict) else observations)[index, 1] = number
        return observations, rewards, dones, infos

    env.reset = lambda: spoiled(reset(), None, np.zeros(4), None)[0]
    env.step_wait = lambda: spoiled(*step())
    return env


def n_choices(space: spaces.Space) -> int:
    return spaces.flatdim(space) * (2 if isinstance(space, spaces.MultiBinary) else 1)


class MaskedEnv(TinyEnv):
    """About half of the actions are allowed, among them the last of each dimension; some episodes terminate."""

    def action_masks(self) -> np.ndarray:
        masks = self.np_random.random(n_choices(self.action_space)) < 0.5
        pairs = [2] * spaces.flatdim(self.action_space) if isinstance(self.action_space, spaces.MultiBinary) else [masks.size]
        masks[np.cumsum(getattr(self.action_space, "nvec", pairs)) - 1] = True
        return masks

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        observation, reward, _, truncated, info = super().step(action)
        terminated = not truncated and bool(self.np_random.random() < 0.05)
        return observation, 10.0 * reward, terminated, truncated, info


def masked_vec_env(observations: spaces.Space, actions: spaces.Space, n_envs: int = 2, kind: type = MaskedEnv) -> VecEnv:
    return make_vec_env(lambda: kind(deepcopy(observations), deepcopy(actions)), n_envs)


class TwoAllowed(TinyEnv):
    """Two actions of four are allowed at each step, and any other is an error."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012  # gymnasium's way

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(BOX_OBSERVATIONS, spaces.Discrete(4))
        self.render_mode = render_mode

    def action_masks(self) -> np.ndarray:
        return (np.arange(4) - self._steps) % 4 < 2

    def step(self, action):
        assert (action - self._steps) % 4 < 2
        return super().step(action)

    def render(self) -> np.ndarray:
        return np.zeros((16, 16, 3), dtype=np.uint8)


class Filed(TinyEnv):
    """An environment that is made from a file."""

    def __init__(self, file: str, render_mode: str | None = None) -> None:
        super().__init__(BOX_OBSERVATIONS, spaces.Discrete(2))
        self.file = file


class Shortened(gym.Wrapper):
    """End episodes early, where a monitor below cannot see it."""

    def __init__(self, env, steps):
        super().__init__(env)
        self.steps = steps
        self.count = 0

    def reset(self, **options):
        self.count = 0
        return self.env.reset(**options)

    def step(self, action):
        self.count += 1
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated or self.count >= self.steps, info


class Locked(TinyEnv):
    """Is opened with a password, as an environment that connects to a server."""

    def __init__(self, password: str) -> None:
        super().__init__(BOX_OBSERVATIONS, spaces.Discrete(4))
        self.password = password
