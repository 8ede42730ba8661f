"""Export results of the package's first format (Parquet) to the CSV tables of ``python -m sb3_ano.bench export``.

    python benchmarks/export_runs.py RESULTS [RESULTS ...] --out docs/results/step_size

It needs pyarrow. Results of the present format are exported by ``python -m sb3_ano.bench export RESULTS --out DIRECTORY``.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import pandas as pd

from sb3_ano.bench.exchange import KEY, merge_csv


def rows_of(run: Path) -> tuple[dict[str, Any], list[dict[Any, Any]]]:
    """Read a run.

    :param run: directory of the run
    :return: its row, and one row per evaluation
    """
    document = json.loads((run / "run.json").read_text())
    evaluations, episodes, updates = (
        pd.read_parquet(run / f"{name}.parquet") for name in ("evaluations", "episodes", "diagnostics")
    )
    settings = document["hyperparameters"]
    key = {
        "env": document["env_id"],
        "algorithm": document["algorithm"],
        "clip_range": document["settings"].get("clip_range"),
        "desired_kl": settings.get("desired_kl"),
        "learning_rate": document["settings"]["learning_rate"],
        "n_epochs": settings["n_epochs"],
        "steps": document["total_timesteps"],
        "seed": document["seed"],
    }
    curve = evaluations.groupby("timesteps")["episode_return"].mean()
    scores = {
        "training_return": episodes["episode_return"].tail(100).mean(),
        "evaluation_return": curve.iloc[-1],
        "last_evaluations": curve.tail(3).mean(),
        "kl_mean": updates["approx_kl"].mean(),
        "ratio_max": updates["ratio_max"].median(),
        "outside": updates["clip_fraction"].mean(),
        "discarded": updates["ppo_discarded_gradient"].mean(),
        "radius": updates["clip_range"].mean(),
        "seconds": round(document["wall_seconds"]),
        "date": document["finished"][:10],
        "commit": (document["commit"] or "")[:12],
    }
    points = curve.rename("evaluation_return").reset_index().to_dict("records")
    return key | scores, [key | point for point in points]


def main() -> None:
    """Export all given directories."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="directories of results of the first format")
    parser.add_argument("--out", type=Path, required=True, help="directory of runs.csv and curves.csv")
    options = parser.parse_args()
    for path in options.results:
        rows = [rows_of(run) for run in sorted((path / "runs").iterdir())]
        if rows:
            total = merge_csv(pd.DataFrame([row for row, _ in rows]), options.out / "runs.csv", KEY)
            points = pd.DataFrame([point for _, own in rows for point in own])
            merge_csv(points, options.out / "curves.csv", [*KEY, "timesteps"])
            print(f"{path}: {len(rows)} runs; {options.out}/runs.csv has {total}")


if __name__ == "__main__":
    main()
