"""Environments of tensors for tests: the examples', and one with Dict observations, masks, and both kinds of ends."""

import runpy
from types import SimpleNamespace

import numpy as np
import torch
from gymnasium import spaces

from sb3_ano.envs import TensorVecEnv
from sb3_ano.envs.tensor import TensorStep
from tests.common import ROOT

EXAMPLES = SimpleNamespace(**runpy.run_path(str(ROOT / "examples/tensor_envs.py"), run_name="tensor_envs"))
PLACE = spaces.Box(-1.0, 1.0, (4,), np.float32)


class DictEnv(TensorVecEnv):
    """A number counts the steps; environments end at different steps, every third one by termination."""

    def __init__(self, num_envs=4, device="cpu", has_final=True):
        space = spaces.Dict({"kind": spaces.Discrete(3), "place": PLACE})
        super().__init__(num_envs, space, spaces.Discrete(5), device)
        self.generator = torch.Generator(self.device)
        self.has_final = has_final

    def begin(self, seed):
        self.generator.manual_seed(0 if seed is None else seed)
        self.age = torch.zeros(self.num_envs, dtype=torch.long, device=self.device)
        self.episodes = torch.zeros_like(self.age)
        return self.observe(self.age)

    def observe(self, age):
        place = torch.rand(self.num_envs, 4, generator=self.generator, device=self.device)
        place[:, 0] = age / 20.0
        return {"kind": age % 3, "place": place}

    def advance(self, actions):
        self.age = self.age + 1
        rewards = actions.float() / 5.0 + 0.1 * self.age
        ended = self.age >= 5 + torch.arange(self.num_envs, device=self.device) % 4
        terminated = ended & (self.episodes % 3 == 2)
        final = self.observe(self.age) if self.has_final else None
        self.episodes = self.episodes + ended
        self.age = self.age.masked_fill(ended, 0)
        return TensorStep(self.observe(self.age), rewards, terminated, ended & ~terminated, final)


class MaskedEnv(DictEnv):
    """The same, in which the actions that are allowed depend on the step."""

    def action_masks(self):
        return (torch.arange(5, device=self.device) + self.age[:, None]) % 3 > 0


class Simulator:
    """The interface of Isaac Lab's and ManiSkill's environments, over a DictEnv."""

    def __init__(self, key="final_observation", **options):
        self.env, self.key = DictEnv(**options), key
        self.num_envs, self.device = self.env.num_envs, self.env.device
        self.single_observation_space = self.env.observation_space
        self.single_action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.closed = False

    def reset(self, seed=None, options=None):
        return self.env.begin(seed), {}

    def step(self, actions):
        step = self.env.advance(actions[:, 0].round())
        extras = {self.key: step.final_observations} if self.key else {}
        return step.observations, step.rewards, step.terminated, step.truncated, extras

    def close(self):
        self.closed = True
