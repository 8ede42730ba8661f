"""Measure what VecNormalize adds to a step, SB3's class and this package's: ``python benchmarks/vec_normalize.py``.

The environments return the same random numbers at each step (17 observations, float64), so that only the wrapper is timed.
"""

import time
from typing import Any

import numpy as np
import pandas as pd
from gymnasium import spaces
from stable_baselines3.common import vec_env
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_ano.envs import DirectVecEnv, VecNormalize, make_env

STEPS, REPETITIONS, SIZE = 2000, 5, 17


class Replay(DirectVecEnv):
    """Return the same transitions again and again, at almost no cost."""

    def __init__(self, n_envs: int) -> None:
        DummyVecEnv.__init__(self, [lambda: make_env("Pendulum-v1") for _ in range(n_envs)])
        self.observation_space = spaces.Box(-np.inf, np.inf, (SIZE,), np.float64)
        rng = np.random.default_rng(0)
        self.observations = rng.normal(3.0, 7.0, size=(n_envs, SIZE))
        self.rewards = rng.normal(size=n_envs).astype(np.float32)
        self.dones, self.infos = np.zeros(n_envs, bool), [{} for _ in range(n_envs)]

    def reset(self) -> Any:
        return self.observations.copy()

    def step_async(self, actions: np.ndarray) -> None:
        pass

    def step_wait(self) -> Any:
        return self.observations.copy(), self.rewards.copy(), self.dones.copy(), self.infos


def microseconds(env: Any) -> float:
    """Return the time of a step."""
    start = time.perf_counter()
    for _ in range(STEPS):
        env.step(None)
    return 1e6 * (time.perf_counter() - start) / STEPS


def main() -> None:
    """Time both classes and the bare environments in turn, and print medians of the differences."""
    rows = []
    for n_envs in (1, 8, 128):
        bare = Replay(n_envs)
        wrapped = {"SB3": vec_env.VecNormalize(Replay(n_envs)), "sb3_ano": VecNormalize(Replay(n_envs))}
        added: dict[str, list[float]] = {name: [] for name in wrapped}
        for env in wrapped.values():
            env.reset()
        for _ in range(REPETITIONS):
            base = microseconds(bare)
            for name, env in wrapped.items():
                added[name].append(microseconds(env) - base)
        rows.append({"environments": n_envs, **{f"{name}, us": round(float(np.median(t)), 1) for name, t in added.items()}})
    print(pd.DataFrame(rows).to_string(index=False))


if __name__ == "__main__":
    main()
