"""The scripts in benchmarks/: parity by hand, and speed on the smallest case."""

import json
import re
import subprocess
import sys
from importlib import util
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sb3_ano.bench.scores import ReferenceScores
from sb3_ano.bench.statistics import interquartile_mean

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS, DOCS = ROOT / "benchmarks", ROOT / "docs"


def load(name: str):
    specification = util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_differences_are_paired_by_seed():
    rows = [
        {"env_id": "A", "algorithm": label, "seed": seed, "training": value, "evaluation": 2 * value}
        for label, values in (("ppo", [100.0, 200.0, 300.0]), ("ano", [112.0, 210.0, 308.0, 999.0]))
        for seed, value in enumerate(values)
    ]
    table = load("parity").compare(pd.DataFrame(rows)).set_index(["measure", "algorithm"])
    row = table.loc["training", "ano"]
    assert (row["seeds"], row["difference"], row["percent"]) == (3, pytest.approx(10.0), pytest.approx(5.0))
    half = 4.302652729911275 * 2.0 / np.sqrt(3)  # Student's t with 2 degrees of freedom; 12, 10 and 8 have deviation 2
    assert (row["low"], row["high"]) == pytest.approx((10 - half, 10 + half))
    assert np.isnan(table.loc["evaluation", "ppo"]["difference"])


def test_results_of_the_first_format_are_a_row_each_and_one_per_evaluation(tmp_path):
    pytest.importorskip("pyarrow")
    document = {"env_id": "A-v0", "algorithm": "ano", "settings": {"learning_rate": 3e-4}, "hyperparameters": {"n_epochs": 10}}
    document |= {"total_timesteps": 200, "seed": 1, "wall_seconds": 1.6, "finished": "2026-01-02T03:04", "commit": 20 * "ab"}
    (tmp_path / "run.json").write_text(json.dumps(document))
    names = ("approx_kl", "ratio_max", "clip_fraction", "ppo_discarded_gradient", "clip_range")
    tables = {"episodes": {"episode_return": [7.0, 8.0]}, "diagnostics": {key: [0.0, 1.0] for key in names}}
    tables["evaluations"] = {"timesteps": [100, 100, 200], "episode_return": [1.0, 3.0, 5.0]}
    for name, columns in tables.items():
        pd.DataFrame(columns).to_parquet(tmp_path / f"{name}.parquet")
    row, points = load("export_runs").rows_of(tmp_path)
    assert [(point["timesteps"], point["evaluation_return"]) for point in points] == [(100, 2.0), (200, 5.0)]
    expected = {"env": "A-v0", "seed": 1, "training_return": 7.5, "evaluation_return": 5.0, "last_evaluations": 3.5}
    assert row.items() >= {**expected, "kl_mean": 0.5, "seconds": 2, "date": "2026-01-02", "commit": 6 * "ab"}.items()


def test_the_scores_in_the_docs_come_from_the_rows_next_to_them():
    rows, curves = (pd.read_csv(DOCS / "results" / "mujoco" / f"{name}.csv") for name in ("runs", "curves"))
    assert (len(rows), len(curves)) == (54, 54 * 20)
    text = (DOCS / "results.md").read_text()
    for (algorithm, rate), runs in rows.groupby(["algorithm", "learning_rate"]):
        returns = runs.pivot(index="seed", columns="env", values="evaluation_return")
        scores = np.stack([ReferenceScores().normalize(env, returns[env].to_numpy()) for env in returns], axis=1)
        first, second = re.search(rf"^\| {algorithm.upper()} \| (\S+) \(.*?\) \| (\S+) \(", text, re.MULTILINE).groups()
        assert f"{interquartile_mean(scores):.3f}" == {3e-4: first, 1e-3: second}[rate]


SPEED = ["--cases", "cartpole", "--pairs", "1", "--threads", "1", "--quick"]
PARITY = ["--envs", "CartPole-v1", "--seeds", "2", "--steps", "2048", "--algos", "ppo", "ano:shaping=ppo"]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "options", "file"), [("speed", SPEED, "speed.md"), ("parity", PARITY, "parity.csv")])
def test_the_scripts_run(script, options, file, tmp_path):
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), *options, "--out", str(tmp_path / "out")]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    assert "ano" in (tmp_path / "out" / file).read_text()
