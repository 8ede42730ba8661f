"""Train ANO and SB3's PPO on a MuJoCo task through the RL Zoo, evaluate both, and draw their learning curves in one figure.

Both use the hyperparameters that hyperparams/ano.yml has for the task; it takes about a minute on two cores.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from matplotlib.figure import Figure
from rl_zoo3.utils import get_latest_run_id
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ano import ANO
from sb3_ano.envs import make_vec_env
from sb3_ano.zoo.curves import read_returns

ENV = "InvertedDoublePendulum-v5"
ROOT = Path(__file__).resolve().parents[1]
ALGORITHMS: dict[str, type[BaseAlgorithm]] = {"ano": ANO, "ppo": PPO}
COLORS = {"ano": "#c2255c", "ppo": "#495057"}


def train(algo: str, directory: Path, seed: int, threads: int, steps: int | None) -> Path:
    """Run ``zoo_runner.py train`` and return the directory of the run."""
    command = ["zoo_runner.py", "train", "--algo", algo, "--env", ENV, "--conf-file", "hyperparams/ano.yml"]
    command += ["--seed", str(seed), "--num-threads", str(threads), "--eval-freq", "-1", "-f", str(directory)]
    command += ["--verbose", "0", "--progress", *([] if steps is None else ["-n", str(steps)])]
    print("$ python " + shlex.join(command), flush=True)
    subprocess.run([sys.executable, *command], check=True, cwd=ROOT)
    return directory / algo / f"{ENV}_{get_latest_run_id(str(directory / algo), ENV)}"


def evaluate(algo: str, run: Path, episodes: int, seed: int) -> tuple[float, float]:
    """Mean and standard deviation of the returns of the trained agent, acting deterministically."""
    env = VecNormalize.load(str(run / ENV / "vecnormalize.pkl"), make_vec_env(ENV, seed=seed))
    env.training = env.norm_reward = False
    model = ALGORITHMS[algo].load(run / f"{ENV}.zip", device="cpu")
    mean, deviation = evaluate_policy(model, env, n_eval_episodes=episodes)
    env.close()
    return float(mean), float(deviation)  # type: ignore[arg-type]


def plot(runs: dict[str, Path], output: Path, title: str) -> None:
    """Draw the returns of the training episodes, with a moving mean over 50 of them."""
    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for algo, run in runs.items():
        returns = read_returns(run)
        steps = returns["timesteps"] / 1e3
        axes.scatter(steps, returns["episode_return"], s=4, color=COLORS[algo], alpha=0.15, linewidths=0)
        smooth = returns["episode_return"].rolling(50, min_periods=1).mean()
        axes.plot(steps, smooth, color=COLORS[algo], linewidth=2, label=f"{algo.upper()}, mean of 50 episodes")
    axes.set(title=title, xlabel="environment steps (thousands)", ylabel="return of training episodes")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(output, dpi=150)


def main() -> None:
    """Train, evaluate, plot, and say where everything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="environment steps (default: those of hyperparams/ano.yml)")
    parser.add_argument("--seed", type=int, default=0, help="seed (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=ROOT / "demo", help="where the results go (default: demo/)")
    arguments = parser.parse_args()

    start = time.monotonic()
    folder = arguments.folder.resolve()
    runs = {algo: train(algo, folder, arguments.seed, arguments.threads, arguments.steps) for algo in ALGORITHMS}
    for algo, run in runs.items():
        mean, deviation = evaluate(algo, run, episodes=10, seed=arguments.seed + 1000)
        print(
            f"{algo.upper()}: return {mean:.0f} +/- {deviation:.0f} over 10 deterministic episodes ({run / ENV}.zip)",
            flush=True,
        )
    figure = folder / "learning_curves.png"
    plot(runs, figure, f"{ENV}, seed {arguments.seed}")
    print(f"Figure: {figure}")
    enjoy = [
        "zoo_runner.py",
        "enjoy",
        "--algo",
        "ano",
        "--env",
        ENV,
        "-f",
        os.path.relpath(folder),
        "--no-render",
        "-n",
        "5000",
    ]
    print(f"Watch the agent: {os.path.relpath(sys.executable)} {shlex.join(enjoy)}")
    print(f"Done in {time.monotonic() - start:.0f} s.")


if __name__ == "__main__":
    main()
