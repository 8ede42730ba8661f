"""Step environments in one process, in several, and in threads: ``python examples/vectorized.py OUT.png``."""

import time

import numpy as np
from common import COLORS, save
from matplotlib.figure import Figure
from stable_baselines3.common.env_util import make_vec_env as sb3_make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from sb3_ano.envs import make_vec_env

ENV, NUMBER = "Swimmer-v5", 16


def steps_per_second(env: VecEnv, seconds: float = 3.0) -> float:
    """Step all environments with random actions for some seconds."""
    env.seed(0)
    env.reset()
    actions = np.random.default_rng(0).uniform(-1, 1, (64, NUMBER, *env.action_space.shape)).astype(np.float32)  # type: ignore[misc]
    start, steps = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        env.step(actions[steps % 64])
        steps += 1
    rate = NUMBER * steps / (time.perf_counter() - start)
    env.close()
    return rate


if __name__ == "__main__":
    rates = {
        "SB3, DummyVecEnv": steps_per_second(sb3_make_vec_env(ENV, NUMBER, vec_env_cls=DummyVecEnv)),
        "SubprocVecEnv": steps_per_second(make_vec_env(ENV, NUMBER, vec_env_cls=SubprocVecEnv)),
        "gymnasium, DirectVecEnv": steps_per_second(make_vec_env(ENV, NUMBER, backend="gymnasium")),
        "EnvPool": steps_per_second(make_vec_env(ENV, NUMBER, backend="envpool")),
    }
    figure = Figure(figsize=(6.4, 2.6), layout="constrained")
    axes = figure.add_subplot(title=f"{NUMBER} x {ENV}, random actions", xlabel="steps per second")
    axes.barh(list(rates), list(rates.values()), color=COLORS[1])
    axes.spines[["top", "right"]].set_visible(False)
    save(figure)
