"""Results of runs that never were, with returns that a test can reckon with."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from sb3_ano.bench.experiments.tables import SCHEMAS, table_file

POINTS, EVALUATION_EPISODES = 20, 3


def write_results(folder: Path, runs: Sequence[Mapping[str, Any]], episodes: int = 200) -> Path:
    """Write finished runs.

    :param folder: of the results; it is made
    :param runs: for each run, ``env_id``, ``algorithm``, ``seed`` and ``final``, its mean return at the end; where not
        the default: ``start``, its mean return at the start, ``settings``, ``suite`` and ``total_timesteps``
    :param episodes: of each training
    :return: the folder
    """
    (folder / "runs").mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps({"format": 1, "created": "2026-01-01T00:00:00+00:00"}))
    for number, run in enumerate(runs):
        _write_run(folder / "runs", dict(run), episodes, np.random.default_rng(number))
    return folder


def _write_run(folder: Path, run: dict[str, Any], episodes: int, rng: np.random.Generator) -> None:
    settings = run.get("settings", {"learning_rate": 3e-4, "clip_range": 0.2})
    joined = ",".join(f"{name}={value}" for name, value in sorted(settings.items()))
    label = run["algorithm"].replace(":", "-")
    run_id = f"{run['env_id'].replace('/', '-')}__{label}__{joined}__seed{run['seed']}"
    length, seconds = run.get("total_timesteps", 100_000), 50.0
    (folder / run_id).mkdir()
    document = {
        "run_id": run_id,
        "suite": run.get("suite", "mujoco"),
        "env_id": run["env_id"],
        "algorithm": run["algorithm"],
        "settings": settings,
        "seed": run["seed"],
        "total_timesteps": length,
        "hyperparameters": {**settings, "n_envs": 8},
        "evaluation": {"points": POINTS, "episodes": EVALUATION_EPISODES},
        "started": "2026-01-01T00:00:00+00:00",
        "finished": "2026-01-01T00:01:00+00:00",
        "wall_seconds": seconds,
        "commit": "0123456789abcdef",
        "versions": {"python": "3.11.2", "torch": "2.13.0"},
        "hardware": {"cpu": "a processor", "cores": 2},
        "checksum": {},
    }
    (folder / run_id / "run.json").write_text(json.dumps(document))
    for name, columns in _tables(run, length, seconds, episodes, rng).items():
        size = len(columns["timesteps"])
        filled = {column: columns.get(column, np.full(size, np.nan)) for column in SCHEMAS[name].names}
        parquet.write_table(pa.table(filled, schema=SCHEMAS[name]), table_file(folder / run_id, name))


def _tables(
    run: Mapping[str, Any], length: int, seconds: float, episodes: int, rng: np.random.Generator
) -> dict[str, dict[str, np.ndarray]]:
    """Returns rise in a straight line; those of one evaluation have exactly the mean of that line."""
    start, final = run.get("start", 0.0), run["final"]
    ends = np.ceil(length * np.arange(1, episodes + 1) / episodes)
    noise = 0.1 * abs(final - start) * rng.standard_normal(episodes)
    at = np.repeat(np.arange(1, POINTS + 1) / POINTS, EVALUATION_EPISODES)
    spread = 0.05 * abs(final - start) * np.tile([-1.0, 0.0, 1.0], POINTS)
    updates = np.arange(1, 41) / 40

    def when(steps: np.ndarray) -> dict[str, np.ndarray]:
        return {"timesteps": steps.astype(np.int64), "wall_seconds": seconds * steps / length}

    lengths = {"episode_length": np.full(episodes, 100)}
    return {
        "episodes": {**when(ends), "episode_return": start + (final - start) * ends / length + noise, **lengths},
        "evaluations": {
            **when(length * at),
            "episode": np.tile(np.arange(EVALUATION_EPISODES), POINTS),
            "episode_return": start + (final - start) * at + spread,
            "episode_length": np.full(len(at), 100),
        },
        "diagnostics": {
            **when(length * updates),
            "approx_kl": 0.01 * np.exp(0.1 * rng.standard_normal(40)),
            "ratio_max": 1.5 + rng.random(40),
            "clip_fraction": 0.1 * rng.random(40),
            "entropy_loss": -3.0 + updates,
        },
    }
