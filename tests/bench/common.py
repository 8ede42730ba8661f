"""Small plans, and results of runs that never were, whose numbers a test can reckon with."""

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from sb3_ano.bench.algorithms import CLASSES
from sb3_ano.bench.plan import Run, make_plan, parse_grid
from sb3_ano.bench.results import RunFiles
from sb3_ano.bench.suites import Suite
from sb3_ano.bench.training import write_run
from tests.common import parameters

#: Hyperparameters under which a rollout and its update take a moment.
SMALL = {"n_envs": 2, "n_steps": 64, "batch_size": 32, "n_epochs": 2, "learning_rate": "lin_1e-3"}


def small_suite(env_id: str = "Pendulum-v1", steps: int = 512, points: int = 1, deterministic=None, **settings) -> Suite:
    """A suite of one task."""
    hyperparameters = SMALL | {"use_sde": False, "sde_sample_freq": -1} | settings.pop("hyperparameters", {})
    settings["evaluation"] = {"points": points, "episodes": 3, "deterministic": deterministic}
    return Suite(name="small", tasks=[env_id], total_timesteps=steps, hyperparameters=hyperparameters, **settings)


def small_run(label: str, env_id: str = "Pendulum-v1", seed: int = 0, grid=(), **settings) -> Run:
    """A run of a suite of one task."""
    return make_plan(small_suite(env_id, **settings), [label], [seed], parse_grid(grid))[-1]


def runs(tasks=("HalfCheetah-v4", "Hopper-v4"), algorithms=("ppo", "ano"), seeds=(0, 1, 2), final=1000.0, **others):
    """Return runs for :func:`write_results` whose returns grow with the seed, and are a little higher for ANO."""
    return [
        {"env_id": task, "algorithm": name, "seed": seed, "final": final + 10.0 * seed + 5.0 * (name == "ano"), **others}
        for task, name, seed in itertools.product(tasks, algorithms, seeds)
    ]


def assert_same_run(ours: RunFiles, theirs: RunFiles) -> None:
    """Compare rows and parameters of two runs; only times may differ."""
    for table, clock in (("evaluations", []), ("episodes", ["t"]), ("updates", ["time/seconds"])):
        pair = (getattr(part, table)().drop(columns=clock) for part in (ours, theirs))
        pd.testing.assert_frame_equal(*pair, check_like=True)
    kind = CLASSES[theirs.document["algorithm"]]
    assert torch.equal(*(parameters(kind.load(part.path / "model.zip")) for part in (ours, theirs)))


def write_results(directory: Path, runs, episodes: int = 200) -> Path:
    """Write finished runs whose returns grow from 0 to ``final``.

    :param directory: directory of the results
    :param runs: ``env_id``, ``algorithm``, ``seed`` and ``final`` of each; where not the default, ``changed``, ``suite``,
        ``hyperparameters`` of the suite, ``steps``, ``evaluated`` (episodes), ``curve`` (steps and returns), ``updates``
        (columns of progress.csv) and ``details``
    :param episodes: number of training episodes
    """
    for run in runs:
        steps, changed, final = run.get("steps", 100_000), run.get("changed", {}), run["final"]
        hyperparameters = {"policy": "MlpPolicy", "n_envs": 8, "learning_rate": "lin_0.0003", "clip_range": 0.2}
        hyperparameters |= run.get("hyperparameters", {}) | changed
        hyperparameters.pop("total_timesteps", None)
        key = (run.get("suite", "mujoco"), run["env_id"], run["algorithm"], run["seed"], steps)
        evaluation = {"points": 20, "episodes": run.get("evaluated", 3), "deterministic": True}
        made = Run(*key, hyperparameters, evaluation, changed=changed)
        write_run_files(directory, made, final, episodes, run.get("curve"), run.get("details", {}), run.get("updates"))
    return directory


def write_run_files(
    directory: Path, made: Run, final: float, episodes: int = 200, curve=None, details=None, updates=None
) -> None:
    """Write a finished run, see :func:`write_results`."""
    path, steps = directory / "runs" / made.name, made.total_timesteps
    path.mkdir(parents=True)
    ends, done = (np.arange(1, number + 1) * steps // number for number in (20, episodes))
    at, returns = curve or (ends, final * ends / steps)
    results = np.asarray(returns, float)[:, None] + np.array([-1.0, 0.0, 1.0])  # episodes whose mean is the return
    np.savez(path / "evaluations.npz", timesteps=np.asarray(at), results=results, ep_lengths=np.full(results.shape, 7))
    monitor = pd.DataFrame({"r": final * done / steps, "l": 7, "t": done / 1000.0, "timesteps": done})
    (path / "monitor.csv").write_text('#{"t_start": 0.0}\n' + monitor.to_csv(index=False))
    columns = {"time/total_timesteps": ends, "time/seconds": ends / 1000.0, "train/entropy_loss": -2.0}
    columns |= {"update/ratio_max_after": 1.5, "update/outside_after": 0.1, "update/kl_after": 1e-3 + 1e-6 * final}
    pd.DataFrame(updates or columns).to_csv(path / "progress.csv", index=False)
    circumstances = {
        "seconds": steps / 1000.0,
        "timesteps": steps,
        "finished": "2026-01-01T00:00:00+00:00",
        "commit": "0" * 40,
    }
    circumstances |= {"backend_used": "gymnasium", "versions": {"torch": "2.13.0"}, "machine": {"cpu": "a processor"}}
    write_run(made, path, circumstances | (details or {}))
