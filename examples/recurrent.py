"""Train a policy with memory: ``python examples/recurrent.py OUT.png``."""

from typing import Any

import gymnasium as gym
import numpy as np
from common import Returns, plot

from sb3_ano import ANO, RecurrentANO
from sb3_ano.envs import make_vec_env


class Recall(gym.Env):
    """See one of two signs, wait for four steps, and say which sign it was."""

    observation_space = gym.spaces.Box(0.0, 1.0, (3,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.sign, self.time = int(self.np_random.integers(2)), 0
        return np.eye(3, dtype=np.float32)[self.sign], {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.time += 1
        is_over = self.time == 5
        reward = float(action == self.sign) if is_over else 0.0
        return np.eye(3, dtype=np.float32)[2], reward, is_over, False, {}


if __name__ == "__main__":
    settings: dict[str, Any] = {"n_steps": 64, "batch_size": 128, "n_epochs": 5, "learning_rate": 3e-3, "seed": 0}
    lstm = {"lstm_hidden_size": 16, "net_arch": [16]}
    curves = {}
    for model in (
        RecurrentANO("MlpLstmPolicy", make_vec_env(Recall, n_envs=8), policy_kwargs=lstm, **settings),
        ANO("MlpPolicy", make_vec_env(Recall, n_envs=8), **settings),
    ):
        returns = Returns()
        model.learn(20_000, callback=returns)
        curves[type(model).__name__] = returns.points
    plot(curves, "Which sign was it?", "share of right answers")
