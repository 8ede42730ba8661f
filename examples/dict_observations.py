"""Train on observations that are a dictionary: ``python examples/dict_observations.py OUT.png``."""

from typing import Any

import gymnasium as gym
import numpy as np
from common import Returns, plot

from sb3_ano import ANO
from sb3_ano.envs import make_vec_env


class Reach(gym.Env):
    """Walk on a plane to a goal. One of two keyboards is connected: on the second, every direction is reversed."""

    observation_space = gym.spaces.Dict(
        {"position": gym.spaces.Box(-1, 1, (2,)), "goal": gym.spaces.Box(-1, 1, (2,)), "keyboard": gym.spaces.Discrete(2)}
    )
    action_space = gym.spaces.Discrete(4)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.position, self.goal = self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32)
        self.keyboard = int(self.np_random.integers(2))
        return self.observe(), {}

    def observe(self) -> dict[str, Any]:
        return {"position": self.position.copy(), "goal": self.goal, "keyboard": self.keyboard}

    def step(self, action: int) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        direction = np.array([(0.1, 0), (-0.1, 0), (0, 0.1), (0, -0.1)][action], np.float32)
        self.position = np.clip(self.position + (-direction if self.keyboard else direction), -1, 1)
        distance = float(np.linalg.norm(self.position - self.goal))
        return self.observe(), -distance, distance < 0.1, False, {}


if __name__ == "__main__":
    env = make_vec_env(lambda: gym.wrappers.TimeLimit(Reach(), 50), n_envs=8)
    model = ANO("MultiInputPolicy", env, n_steps=128, batch_size=256, learning_rate=2e-3, gamma=0.95, seed=0)
    returns = Returns()
    model.learn(80_000, callback=returns)
    plot({"ANO": returns.points}, "Dict observations: position, goal, keyboard", "return of the last 100 episodes")
