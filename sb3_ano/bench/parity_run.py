"""One training run of the comparison, in a process of its own, which ends with its parent.

``python -m sb3_ano.bench.parity_run SPECIFICATION`` trains, evaluates and writes one file; after each rollout it prints the
number of steps that are done.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common import env_util
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from sb3_ano.algorithms import ANO
from sb3_ano.bench.files import machine, now, write_json
from sb3_ano.bench.worker import versions
from sb3_ano.envs import make_vec_env

_EVALUATION_ENVS = 5
_EVALUATION_SEED = 10_000


class EpisodeRecorder(BaseCallback):
    """Keeps when each training episode ended, in steps of all environments, and its return; prints progress."""

    def __init__(self) -> None:
        super().__init__()
        self.timesteps: list[int] = []
        self.returns: list[float] = []

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            episode = info.get("episode")
            if episode is not None:
                self.timesteps.append(self.num_timesteps)
                self.returns.append(float(episode["r"]))
        return True

    def _on_rollout_end(self) -> None:
        print(self.num_timesteps, flush=True)


def final_return(timesteps: list[int], returns: list[float], steps: int) -> float:
    """Mean return of the episodes that ended in the last tenth of a training.

    :param timesteps: at which each episode ended
    :param returns: of the episodes
    :param steps: of the whole training
    :raises ValueError: if none ended there
    """
    last = [value for when, value in zip(timesteps, returns, strict=True) if when > 0.9 * steps]
    if not last:
        raise ValueError(f"no episode ended in the last tenth of {steps} steps; train for longer")
    return float(np.mean(last))


def make_model(spec: dict[str, Any]) -> OnPolicyAlgorithm:
    """The model of a run.

    :param spec: ``env_id``, ``seed``, ``contender`` (``library``, ``options``), ``settings`` (``n_envs``, ``n_steps``)
    """
    env_id, seed, contender, settings = spec["env_id"], spec["seed"], spec["contender"], spec["settings"]
    n_envs, n_steps = settings["n_envs"], settings["n_steps"]
    if contender["library"] == "sb3":
        sb3_env = env_util.make_vec_env(env_id, n_envs, seed=seed)
        return PPO("MlpPolicy", sb3_env, n_steps=n_steps, seed=seed, device="cpu")
    env = make_vec_env(env_id, n_envs, backend="auto", seed=seed, num_threads=1)
    return ANO("MlpPolicy", env, n_steps=n_steps, seed=seed, device="cpu", **contender["options"])


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Train and evaluate.

    :param spec: as in :func:`make_model`; ``settings`` also has ``steps`` and ``eval_episodes``
    :return: the content of the run's file
    """
    settings = spec["settings"]
    recorder = EpisodeRecorder()
    start = time.perf_counter()
    model = make_model(spec).learn(settings["steps"], callback=recorder)
    trained = time.perf_counter()
    final = final_return(recorder.timesteps, recorder.returns, model.num_timesteps)
    env = env_util.make_vec_env(spec["env_id"], _EVALUATION_ENVS, seed=_EVALUATION_SEED + spec["seed"])
    evaluated, _ = evaluate_policy(
        model, env, n_eval_episodes=settings["eval_episodes"], deterministic=True, return_episode_rewards=True
    )
    evaluation = [float(value) for value in np.asarray(evaluated)]
    return {
        "spec": spec,
        "final_return": final,
        "evaluation_return": float(np.mean(evaluation)),
        "evaluation": evaluation,
        "episodes": {"timesteps": recorder.timesteps, "returns": recorder.returns},
        "steps": model.num_timesteps,
        "train_seconds": trained - start,
        "evaluate_seconds": time.perf_counter() - trained,
        "date": now(),
        "machine": machine(),
        "versions": versions(),
    }


def _exit_with_parent() -> None:
    """Wait for the end of standard input, which the parent holds open as long as it lives."""
    while os.read(0, 1):
        pass
    os._exit(3)


def main() -> int:
    """Run what the argument specifies."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    request = json.loads(sys.argv[1])
    write_json(Path(request["output"]), run(request["spec"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
