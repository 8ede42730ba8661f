"""Train ANO and SB3's PPO on a MuJoCo task through the RL Zoo, evaluate both, and draw their learning curves in one figure.

Both have the hyperparameters of hyperparams/ano.yml. They train at the same time, on one core each, for about a minute.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rl_zoo3.utils import get_latest_run_id
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ano import ANO
from sb3_ano.bench.looks import looks
from sb3_ano.envs import make_vec_env

ENV = "InvertedDoublePendulum-v5"
ROOT = Path(__file__).resolve().parents[1]
ALGORITHMS: dict[str, type[BaseAlgorithm]] = {"ano": ANO, "ppo": PPO}
COLORS = {name: looks()[name][0] for name in ALGORITHMS}


def train(directory: Path, seed: int, threads: int) -> dict[str, Path]:
    """Run ``zoo_runner.py train`` once per algorithm, at the same time, and return the directories of the runs."""
    processes = []
    for algo in ALGORITHMS:
        command = ["zoo_runner.py", "train", "--algo", algo, "--env", ENV, "--conf-file", "hyperparams/ano.yml"]
        command += ["--seed", str(seed), "--num-threads", str(threads), "--eval-freq", "10000", "-f", str(directory)]
        print("$ python " + shlex.join(command), flush=True)
        processes.append(subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.DEVNULL))
    if [process.wait() for process in processes] != [0] * len(processes):
        sys.exit("error: the training failed")
    return {algo: directory / algo / f"{ENV}_{get_latest_run_id(str(directory / algo), ENV)}" for algo in ALGORITHMS}


def evaluate(algo: str, run: Path, episodes: int, seed: int) -> tuple[float, float]:
    """Mean and standard deviation of the returns of the trained agent, acting deterministically."""
    env = VecNormalize.load(str(run / ENV / "vecnormalize.pkl"), make_vec_env(ENV, seed=seed))
    env.training = env.norm_reward = False
    model = ALGORITHMS[algo].load(run / f"{ENV}.zip", device="cpu")
    mean, deviation = evaluate_policy(model, env, n_eval_episodes=episodes)
    env.close()
    return float(mean), float(deviation)  # type: ignore[arg-type]


def plot(runs: dict[str, Path], output: Path, title: str) -> None:
    """Draw the evaluations during the training: the mean return, and each episode as a point."""
    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for algo, run in runs.items():
        evaluations = np.load(run / "evaluations.npz")
        steps, returns = evaluations["timesteps"] / 1e3, evaluations["results"]
        label = f"{algo.upper()}, mean of {returns.shape[1]} episodes"
        axes.plot(steps, returns.mean(axis=1), color=COLORS[algo], marker="o", label=label)
        axes.plot(steps, returns, ".", color=COLORS[algo], alpha=0.3)
    axes.set(title=title, xlabel="environment steps (thousands)", ylabel="return, acting deterministically", xlim=(0, None))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center right")
    figure.savefig(output, dpi=150)


def main() -> None:
    """Train, evaluate, plot, and say where everything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch per algorithm (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=ROOT / "demo", help="where the results go (default: demo/)")
    arguments = parser.parse_args()

    start = time.monotonic()
    folder = arguments.folder.resolve()
    runs = train(folder, arguments.seed, arguments.threads)
    for algo, run in runs.items():
        mean, deviation = evaluate(algo, run, episodes=10, seed=arguments.seed + 1000)
        print(f"{algo.upper()}: return {mean:.0f} +/- {deviation:.0f} over 10 deterministic episodes", flush=True)
    plot(runs, folder / "learning_curves.png", f"{ENV}, seed {arguments.seed}")
    print(f"Figure: {folder / 'learning_curves.png'}")
    options = ["--algo", "ano", "--env", ENV, "-f", os.path.relpath(folder), "--no-render", "-n", "5000"]
    print(f"The agent acts again with: {os.path.relpath(sys.executable)} zoo_runner.py enjoy {shlex.join(options)}")
    print(f"Done in {time.monotonic() - start:.0f} s.")


if __name__ == "__main__":
    main()
