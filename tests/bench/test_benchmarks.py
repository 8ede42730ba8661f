"""The scripts in benchmarks/: parity by hand, and speed on the smallest case."""

import subprocess
import sys
from importlib import util
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


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


def test_ratios_are_those_of_neighboring_blocks():
    blocks = pd.DataFrame(
        [
            {"case": "a", "of": "ano", "variant": variant, "pair": pair, "steps_per_second": speed}
            | {"peak_mb": 1.0, "env": 2.0, "update": 3.0, "first_quarter": 0.0, "last_quarter": 0.0}
            for pair, speeds in enumerate([(100, 200), (1000, 3000), (10, 40)])
            for variant, speed in zip(("sb3", "ano"), speeds, strict=True)
        ]
    )
    assert "| a | ano | 200 | **3.00** (2.50 to 3.50) | 1 | 2 / 3 | nan |" in load("speed").table(blocks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options", "file"),
    [
        ("speed", ["--cases", "cartpole", "--pairs", "1", "--threads", "1", "--quick"], "speed.md"),
        (
            "parity",
            ["--envs", "CartPole-v1", "--seeds", "2", "--steps", "2048", "--algos", "ppo", "ano:shaping=ppo"],
            "parity.csv",
        ),
    ],
)
def test_the_scripts_run(script, options, file, tmp_path):
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), *options, "--out", str(tmp_path / "out")]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    assert "ano" in (tmp_path / "out" / file).read_text()


def test_the_figure_compares_each_variant_with_what_its_blocks_alternate_with():
    blocks = pd.DataFrame(
        [
            {"case": case, "of": variant, "variant": name, "pair": pair, "steps_per_second": speed * (pair + 1)}
            for case, variant, reference, ratio in [
                ("paper", "ano", "sb3", 3.0),
                ("masks", "maskable-eager", "maskable-ppo", 2.0),
            ]
            for pair in range(3)
            for name, speed in [(reference, 100.0), (variant, 100.0 * ratio)]
        ]
    )
    (axes,) = load("figures").speed(blocks).axes
    assert [text.get_text() for text in axes.texts] == ["3.00", "2.00"]
