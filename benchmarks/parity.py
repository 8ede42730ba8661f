"""Test whether the fast path learns as well as SB3's PPO: the same tasks, seeds and hyperparameters, compared in pairs.

    python benchmarks/parity.py --out parity     # HalfCheetah-v4 and Hopper-v4, 300,000 steps, 8 seeds; it resumes

``parity.csv`` has mean returns, and differences to SB3's PPO with 95 % intervals (Student's t, paired by seed).
"""

import argparse
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from sb3_ano._io import write_file
from sb3_ano._system import cores
from sb3_ano.bench.plan import make_plan
from sb3_ano.bench.pool import Pool
from sb3_ano.bench.results import Results, ResultsWriter
from sb3_ano.bench.runner import check_runs, execute
from sb3_ano.bench.suites import Suite

VARIANTS = ["ppo", "ano:shaping=ppo,torch_compile=true", "ano:precision=bfloat16,shaping=ppo,torch_compile=true"]
#: SB3's defaults, on 8 environments.
HYPERPARAMETERS = {
    "n_envs": 8,
    "n_steps": 256,
    "batch_size": 64,
    "learning_rate": 3e-4,
    "vf_coef": 0.5,
    "policy_kwargs": None,
    "normalize": False,
}


def returns(path: Path, names: Collection[str]) -> pd.DataFrame:
    """Return a row per run: the mean return over the last tenth of the training, and of the last evaluation.

    :param path: directory of the results
    :param names: names of the runs to read; others may have another length
    """
    rows = []
    for run in Results(path).runs(names):
        document, episodes = run.document, run.episodes()
        late = episodes[episodes["timesteps"] > 0.9 * document["total_timesteps"]]
        row = {name: document[name] for name in ("env_id", "algorithm", "seed")}
        rows.append({**row, "training": late["r"].mean(), "evaluation": run.evaluations()["mean"].iloc[-1]})
    return pd.DataFrame(rows)


def compare(rows: pd.DataFrame, reference: str = "ppo") -> pd.DataFrame:
    """Compare all algorithms with a reference, seed by seed.

    :param rows: columns ``env_id``, ``algorithm``, ``seed``, ``training``, ``evaluation``
    :param reference: label of the reference
    :return: mean, difference and its interval, also in percent of the reference's mean
    """
    compared = []
    for measure in ("training", "evaluation"):
        for env_id, table in rows.pivot(index=["env_id", "seed"], columns="algorithm", values=measure).groupby("env_id"):
            for algorithm in table.columns:
                pairs = table[[algorithm]].assign(reference=table[reference]).dropna()
                row: dict[str, Any] = {"env": env_id, "measure": measure, "algorithm": algorithm, "seeds": len(pairs)}
                row["mean"] = pairs[algorithm].mean()
                if algorithm != reference and len(pairs) > 1:
                    test = stats.ttest_rel(pairs[algorithm], pairs["reference"])
                    ends = test.confidence_interval(0.95)
                    numbers = np.array([row["mean"] - pairs["reference"].mean(), ends.low, ends.high])
                    percents = 100.0 * numbers / abs(pairs["reference"].mean())
                    for name, value in zip(("difference", "low", "high"), numbers, strict=True):
                        row[name] = value
                    row |= dict(zip(("percent", "percent low", "percent high"), percents, strict=True))
                compared.append(row)
    return pd.DataFrame(compared)


def main() -> int:
    """Train what is missing, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", default=["HalfCheetah-v4", "Hopper-v4"], help="tasks")
    parser.add_argument("--algos", nargs="+", default=VARIANTS, help="algorithms; the first is the reference")
    parser.add_argument("--seeds", type=int, default=8, help="number of seeds")
    parser.add_argument("--steps", type=int, default=300_000, help="environment steps of a training")
    parser.add_argument("--jobs", type=int, default=cores(), help="trainings at a time, each with one thread")
    parser.add_argument("--out", type=Path, default=Path("parity"), help="directory of the results")
    options = parser.parse_args()
    evaluation = {"points": 1, "episodes": 20}
    content = {"tasks": options.envs, "hyperparameters": HYPERPARAMETERS, "evaluation": evaluation}
    suite = Suite.model_validate({"name": "parity", **content})
    runs = make_plan(suite, options.algos, range(options.seeds), total_timesteps=options.steps)
    check_runs(runs)
    with ResultsWriter(options.out) as results:
        finished = {run.path.name for run in results.runs({run.name for run in runs})}
        missing = [run for run in runs if run.name not in finished]
        failures = execute(missing, Pool(options.jobs, 1, results.held), results, {"models": False})
    for name, error in failures.items():
        print(f"failed: {name}: {error}", file=sys.stderr)
    table = compare(returns(options.out, {run.name for run in runs}), options.algos[0])
    write_file(options.out / "parity.csv", table.to_csv(index=False))
    print(table.round(1).to_string(index=False))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
