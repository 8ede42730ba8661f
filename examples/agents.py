"""Train one policy for all agents of a task of PettingZoo, without and with masks: ``python examples/agents.py OUT.png``.

It needs ``pip install mpe2``. Three agents have to cover three landmarks, and lose reward for collisions.
"""

from typing import Any

import numpy as np
from common import Returns, plot
from mpe2 import simple_spread_v3
from pettingzoo.utils.wrappers import BaseParallelWrapper
from sb3_contrib.common.maskable.evaluation import evaluate_policy

from sb3_ano import ANO, MaskableANO
from sb3_ano.envs import AgentReturns, from_parallel_env


class StayInside(BaseParallelWrapper):
    """Mask the moves that lead out of the square with the landmarks: left, right, down and up after the action to stay."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        observations, _ = super().reset(seed=seed, options=options)
        return observations, self.masks(observations)

    def step(self, actions: dict[str, Any]) -> tuple[dict, dict, dict, dict, dict]:
        observations, rewards, terminated, truncated, _ = super().step(actions)
        return observations, rewards, terminated, truncated, self.masks(observations)

    def masks(self, observations: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
        infos = {}
        for agent, observation in observations.items():
            # After the velocity.
            x, y = observation[2:4]
            infos[agent] = {"action_mask": np.array([True, x > -1.0, x < 1.0, y > -1.0, y < 1.0])}
        return infos


if __name__ == "__main__":
    curves = {}
    algorithm: Any
    for algorithm in (ANO, MaskableANO):
        env = from_parallel_env(StayInside(simple_spread_v3.parallel_env(local_ratio=0.5, max_cycles=25)))
        model = algorithm("MlpPolicy", env, n_steps=200, batch_size=200, learning_rate=2e-3, gamma=0.9, seed=0)
        returns = Returns()
        model.learn(45_000, callback=returns)
        curves[algorithm.__name__] = returns.points

        evaluated = AgentReturns()
        evaluate_policy(model, env, n_eval_episodes=60, callback=evaluated, use_masking=algorithm is MaskableANO)
        for agent, values in evaluated.returns.items():
            print(f"{algorithm.__name__}, {agent}: {np.mean(values):.1f}")
    plot(curves, "PettingZoo's simple_spread, one policy for three agents", "return of the last 100 episodes")
