"""Measure RLlib's throughput with ANO by the number of environment runners, next to ANO in one process.

    python benchmarks/cluster.py --out docs/results/cluster       # leave the machine alone meanwhile

``slow`` is CartPole with 5 ms of sleep per step, ``HalfCheetah-v5`` is fast. Every training has rollouts of 2048 steps,
minibatches of 64, 10 epochs, and networks of 64-64. ``throughput.csv`` has a row per measurement, ``throughput.png`` the
curves of the model that is fitted to them: the time per step is ``env / runners + update / learners + rest``.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pandas as pd
import ray
from matplotlib.figure import Figure
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.tune import register_env
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import SubprocVecEnv

from sb3_ano import ANO
from sb3_ano._io import write_figure, write_file
from sb3_ano._system import machine, versions
from sb3_ano.bench.looks import looks
from sb3_ano.rllib import ANOConfig

ROLLOUT, SLEEP = 2048, 0.005
RUNNERS = (1, 2, 4)


class Slow(gym.Wrapper):
    """CartPole that sleeps as long as a slow simulator would compute."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))

    def step(self, action: Any) -> Any:
        time.sleep(SLEEP)
        return super().step(action)


ENVS = {"slow": Slow, "HalfCheetah-v5": lambda: gym.make("HalfCheetah-v5")}


def on_rllib(env: str, runners: int, iterations: int) -> dict[str, float]:
    """Train with RLlib, and return seconds per step: of all, of sampling, and of the update."""
    register_env("benchmark", lambda _: ENVS[env]())
    config = ANOConfig().environment("benchmark").env_runners(num_env_runners=runners)
    networks = DefaultModelConfig(fcnet_hiddens=[64, 64], free_log_std=env != "slow", vf_share_layers=False)
    config.rl_module(model_config=networks)
    config.training(train_batch_size_per_learner=ROLLOUT, minibatch_size=64, num_epochs=10).debugging(log_level="ERROR")
    algorithm = config.build_algo()
    algorithm.train()
    results = []
    for _ in range(iterations):
        start = time.perf_counter()
        timers = algorithm.train()["timers"]
        results.append((time.perf_counter() - start, timers["env_runner_sampling_timer"], timers["learner_update_timer"]))
    algorithm.stop()
    total, sampling, update = np.median(results, axis=0) / ROLLOUT
    return {"seconds": total, "sampling": sampling, "update": update}


def in_one_process(env: str, processes: int, iterations: int) -> dict[str, float]:
    """Train with Stable-Baselines3, slow environments in processes of their own, and return seconds per step."""
    envs = make_vec_env(ENVS[env], processes, vec_env_cls=SubprocVecEnv if processes > 1 else None)
    model = ANO("MlpPolicy", envs, n_steps=ROLLOUT // processes, torch_compile=True)
    model.learn(ROLLOUT)
    start = time.perf_counter()
    model.learn(iterations * ROLLOUT, reset_num_timesteps=False)
    seconds = (time.perf_counter() - start) / (iterations * ROLLOUT)
    envs.close()
    return {"seconds": seconds, "sampling": np.nan, "update": np.nan}


def fit(rows: pd.DataFrame) -> np.ndarray:
    """Fit seconds per step to ``env / runners + rest`` by least squares; the update is measured, and belongs to the rest."""
    features = np.stack([1.0 / rows["runners"], np.ones(len(rows))], axis=1)
    return np.linalg.lstsq(features, rows["seconds"].to_numpy(), rcond=None)[0]


def draw(table: pd.DataFrame, path: Path) -> None:
    """Draw measurements and model, extrapolated to 64 runners with 1, 2 and 4 learners."""
    styles = looks(["RLlib"])
    ours = styles["ano"][0]
    theirs = styles["RLlib"][0]
    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    counts = np.geomspace(1, 64, 50)
    for axes, (env, rows) in zip(figure.subplots(1, 2), table.groupby("env", sort=False), strict=True):
        cluster, alone = (rows[rows["program"] == name] for name in ("rllib", "sb3"))
        per_env, rest = fit(cluster)
        update = cluster["update"].median()
        for learners, line in ((1, "-"), (2, "--"), (4, ":")):
            seconds = per_env / counts + update / learners + (rest - update)
            axes.plot(counts, 1.0 / seconds, line, color=theirs, label=f"RLlib, model, {learners} learner(s)")
        axes.plot(cluster["runners"], 1.0 / cluster["seconds"], "o", color=theirs, label="RLlib, measured")
        axes.plot(alone["runners"], 1.0 / alone["seconds"], "s", color=ours, label="ANO on SB3, measured")
        axes.set(xscale="log", yscale="log", xlabel="Environment runners (processes)", ylabel="Steps per second", title=env)
        axes.grid(alpha=0.25)
    figure.axes[0].legend(frameon=False, fontsize=8)
    write_figure(path, figure, dpi=130)


def main() -> None:
    """Measure, fit, and write the table and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("cluster"), help="directory to write")
    parser.add_argument("--iterations", type=int, default=5, help="measured iterations of 2048 steps")
    options = parser.parse_args()
    rows = []
    for env in ENVS:
        for number in RUNNERS:
            ray.init(num_cpus=max(RUNNERS) + 1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
            for program, measure in (("rllib", on_rllib), ("sb3", in_one_process)):
                rows.append({"env": env, "program": program, "runners": number, **measure(env, number, options.iterations)})
                print(rows[-1], flush=True)
            ray.shutdown()
    table = pd.DataFrame(rows)
    write_file(options.out / "throughput.csv", table.to_csv(index=False, float_format="%.6g"))
    draw(table, options.out / "throughput.png")
    print(f"{machine()}; {versions()}")


if __name__ == "__main__":
    main()
