"""Export the runs of ``python -m sb3_ano.bench run`` to two compact CSV tables, which are committed in place of the runs.

    python benchmarks/export_runs.py RESULTS [RESULTS ...] --out docs/results/step_size

``runs.csv`` has one row per run: its settings, its scores, and how far its updates moved the policy. ``curves.csv`` has the
mean return of each evaluation. Rows that are in the tables already and are not among RESULTS are kept.
"""

import argparse
from pathlib import Path

import pandas as pd

from sb3_ano.bench.store import open_store

#: Columns that identify a run.
KEY = ["env", "algorithm", "clip_range", "desired_kl", "learning_rate", "n_epochs", "steps", "seed"]
# Training episodes and evaluations that a final score averages.
LAST_EPISODES, LAST_EVALUATIONS = 100, 3


def rows_of(path: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read a directory of results.

    :param path: directory that ``bench run --out`` wrote
    :return: one row per run, and one row per evaluation
    """
    store = open_store(path)
    evaluations, episodes, updates = (
        dict(iter(store.table(name).groupby("run_id"))) for name in ("evaluations", "episodes", "diagnostics")
    )
    runs, curves = [], []
    for run in store.documents():
        settings, name = run["hyperparameters"], run["run_id"]
        key = {
            "env": run["env_id"],
            "algorithm": run["algorithm"],
            "clip_range": run["settings"].get("clip_range"),
            "desired_kl": settings.get("desired_kl"),
            "learning_rate": run["settings"]["learning_rate"],
            "n_epochs": settings["n_epochs"],
            "steps": run["total_timesteps"],
            "seed": run["seed"],
        }
        curve = evaluations[name].groupby("timesteps")["episode_return"].mean()
        update = updates[name]
        scores = {
            "training_return": episodes[name]["episode_return"].tail(LAST_EPISODES).mean(),
            "evaluation_return": curve.iloc[-1],
            "last_evaluations": curve.tail(LAST_EVALUATIONS).mean(),
            "kl_mean": update["approx_kl"].mean(),
            "ratio_max": update["ratio_max"].median(),
            "outside": update["clip_fraction"].mean(),
            "discarded": update["ppo_discarded_gradient"].mean(),
            "radius": update["clip_range"].mean(),
            "seconds": round(run["wall_seconds"]),
            "date": run["finished"][:10],
            "commit": (run["commit"] or "")[:12],
        }
        runs.append(key | scores)
        curves += [key | {"timesteps": steps, "evaluation_return": value} for steps, value in curve.items()]
    return pd.DataFrame(runs), pd.DataFrame(curves)


def write(table: pd.DataFrame, file: Path, key: list[str]) -> int:
    """Merge rows into a CSV table.

    :param table: new rows, which replace old ones of the same key
    :param file: table to write
    :param key: columns that identify a row
    :return: number of rows in the file
    """
    rounded = {
        name: values.map("{:.5g}".format) for name, values in table.items() if values.dtype == float and name not in key
    }
    table = table.assign(**rounded)
    if file.exists():
        table = pd.concat([pd.read_csv(file, dtype=str), table.astype(object).where(table.notna(), None)])
    table = table.map(lambda value: None if value is None or value != value else f"{value}")
    for name in ("clip_range", "desired_kl", "learning_rate"):
        table[name] = table[name].map(lambda value: None if value is None else f"{float(value):g}")
    table = table.drop_duplicates(key, keep="last").sort_values(key, key=_sortable)
    file.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(file, index=False)
    return len(table)


def _sortable(column: pd.Series) -> pd.Series:
    return column if column.name in ("env", "algorithm") else pd.to_numeric(column)


def main() -> None:
    """Export all given directories."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="directories that 'bench run --out' wrote")
    parser.add_argument("--out", type=Path, required=True, help="directory of runs.csv and curves.csv")
    arguments = parser.parse_args()
    for path in arguments.results:
        runs, curves = rows_of(path)
        if runs.empty:
            continue
        total = write(runs, arguments.out / "runs.csv", KEY)
        write(curves, arguments.out / "curves.csv", [*KEY, "timesteps"])
        print(f"{path}: {len(runs)} runs; {arguments.out}/runs.csv has {total}")


if __name__ == "__main__":
    main()
