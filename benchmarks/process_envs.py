"""Time a step of Python environments in processes: ``python benchmarks/process_envs.py [--rounds 5] [--steps 300]``.

``backend="process"`` and SB3's ``SubprocVecEnv`` alternate. Every environment computes for 0.2 ms per step. Times are in
milliseconds per step of all environments, as medians of the rounds.
"""

import argparse
import statistics
import time
from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv

from sb3_ano.envs import make_vec_env

OBSERVATIONS = {
    "1 kB": gym.spaces.Box(-1.0, 1.0, (256,), np.float32),
    "84 x 84 x 4": gym.spaces.Box(0, 255, (84, 84, 4), np.uint8),
}


class Busy(gym.Env):
    """Compute for a while in every step.

    :param observations: name of the observation space
    :param seconds: duration of a step
    """

    action_space = gym.spaces.Discrete(2)

    def __init__(self, observations: str, seconds: float) -> None:
        self.observation_space = OBSERVATIONS[observations]
        self.seconds = seconds

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        self.observation = np.zeros(self.observation_space.shape, self.observation_space.dtype)  # type: ignore[arg-type]
        return self.observation, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        # Of the processor: an environment that waits for one does not get ahead.
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass
        self.count += 1
        return self.observation, 1.0, False, self.count == 200, {}


def milliseconds(env: VecEnv, steps: int) -> float:
    """Return the time of a step."""
    actions = np.zeros(env.num_envs, dtype=np.int64)
    start = time.perf_counter()
    for _ in range(steps):
        env.step(actions)
    return 1000.0 * (time.perf_counter() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=2e-4)
    options = parser.parse_args()

    for name in OBSERVATIONS:
        for n_envs in (8, 2):
            settings: dict[str, Any] = {"env_kwargs": {"observations": name, "seconds": options.seconds}}
            envs = {
                "process": make_vec_env(Busy, n_envs, backend="process", **settings),
                "SubprocVecEnv": make_vec_env(Busy, n_envs, vec_env_cls=SubprocVecEnv, **settings),
            }
            times: dict[str, list[float]] = {kind: [] for kind in envs}
            for env in envs.values():
                env.reset()
                milliseconds(env, 50)
            for _ in range(options.rounds):
                for kind, env in envs.items():
                    times[kind].append(milliseconds(env, options.steps))
            for env in envs.values():
                env.close()

            medians = {kind: statistics.median(rounds) for kind, rounds in times.items()}
            shown = ", ".join(f"{kind} {median:.2f} ms" for kind, median in medians.items())
            print(
                f"{n_envs} environments, {name}: {shown}, ratio {medians['SubprocVecEnv'] / medians['process']:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
