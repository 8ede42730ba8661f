"""Train ANO on HalfCheetah through the RL Zoo, evaluate it, and draw its learning curve: about a minute on two cores.

The zoo's file for HalfCheetah has the settings of the paper's experiments, for ten million steps; the overrides below
are settings that show a rising curve early.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
from rl_zoo3.utils import get_latest_run_id
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ano import ANO
from sb3_ano.zoo.curves import plot_learning_curve

ENV = "HalfCheetah-v5"
ROOT = Path(__file__).resolve().parents[1]
OVERRIDES = ["n_envs:8", "n_steps:128", "batch_size:128", "learning_rate:7e-4", "policy_kwargs:dict(net_arch=[64,64])"]


def train(folder: Path, steps: int, seed: int) -> Path:
    """Run ``zoo_runner.py train`` and return the folder of the run."""
    command = [sys.executable, str(ROOT / "zoo_runner.py"), "train", "--algo", "ano", "--env", ENV]
    command += ["-n", str(steps), "--seed", str(seed), "-f", str(folder), "--eval-freq", "-1", "--num-threads", "1"]
    command += ["--verbose", "0", "--progress", "-params", *OVERRIDES]
    print("$ python zoo_runner.py " + shlex.join(command[2:]), flush=True)
    subprocess.run(command, check=True)
    return folder / "ano" / f"{ENV}_{get_latest_run_id(str(folder / 'ano'), ENV)}"


def evaluate(run: Path, episodes: int, seed: int) -> tuple[float, float]:
    """Mean and standard deviation of the returns of the trained agent, acting deterministically."""
    env = VecNormalize.load(str(run / ENV / "vecnormalize.pkl"), make_vec_env(ENV, seed=seed))
    env.training = env.norm_reward = False
    model = ANO.load(run / f"{ENV}.zip", env=env, device="cpu")
    mean, deviation = evaluate_policy(model, env, n_eval_episodes=episodes)
    env.close()
    return float(mean), float(deviation)  # type: ignore[arg-type]


def evaluate_random_actions(episodes: int, seed: int) -> float:
    """Mean return of uniformly random actions, the level from which learning starts."""
    env = gym.make(ENV)
    env.action_space.seed(seed)
    total = 0.0
    for episode in range(episodes):
        env.reset(seed=seed + episode)
        finished = False
        while not finished:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            total += float(reward)
            finished = terminated or truncated
    env.close()
    return total / episodes


def main() -> None:
    """Train, evaluate, plot, and say where everything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300_000, help="environment steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=ROOT / "demo", help="where the results go (default: demo/)")
    arguments = parser.parse_args()
    if arguments.steps < 10_000:
        parser.error("--steps must be 10000 or more: an episode has 1000 steps, in each of 8 environments")

    start = time.monotonic()
    run = train(arguments.folder, arguments.steps, arguments.seed)
    print("Evaluating 10 episodes ...", flush=True)
    mean, deviation = evaluate(run, episodes=10, seed=arguments.seed + 1000)
    random = evaluate_random_actions(episodes=10, seed=arguments.seed)
    picture = plot_learning_curve(run, arguments.folder / "learning_curve.png", f"ANO on {ENV}, seed {arguments.seed}")
    print(f"\nReturn of the trained agent: {mean:.0f} +/- {deviation:.0f} over 10 episodes (random actions: {random:.0f})")
    print(f"Agent:          {run / ENV}.zip")
    print(f"Normalisation:  {run / ENV / 'vecnormalize.pkl'}")
    print(f"Learning curve: {picture}")
    python = os.path.relpath(sys.executable)
    enjoy = ["zoo_runner.py", "enjoy", "--algo", "ano", "--env", ENV, "-f", os.path.relpath(arguments.folder), "--no-render"]
    print(
        f"Done in {time.monotonic() - start:.0f} s. The agent acts again with: {python} {shlex.join([*enjoy, '-n', '10000'])}"
    )


if __name__ == "__main__":
    main()
