"""The scripts in benchmarks/: parity by hand, and speed on the smallest case."""

import importlib
import re
import shutil
import subprocess
import sys

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

from sb3_ano.bench.scores import ReferenceScores
from sb3_ano.bench.statistics import interquartile_mean
from tests.bench.common import write_run_files
from tests.common import ROOT

BENCHMARKS, DOCS = ROOT / "benchmarks", ROOT / "docs"


def run_script(name, *options, cwd=None):
    subprocess.run([sys.executable, BENCHMARKS / f"{name}.py", *options], check=True, capture_output=True, cwd=cwd)


def test_differences_are_paired_by_seed(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    rows = [("ppo", seed, value) for seed, value in enumerate([100.0, 200.0, 300.0])]
    rows += [("ano", seed, value) for seed, value in enumerate([112.0, 210.0, 308.0, 999.0])]
    runs = pd.DataFrame(rows, columns=["algorithm", "seed", "training"]).assign(env_id="A", evaluation=1.0)
    table = importlib.import_module("parity").compare(runs).set_index(["measure", "algorithm"])
    row = table.loc["training", "ano"]
    assert (row["seeds"], row["difference"], row["percent"]) == (3, pytest.approx(10.0), pytest.approx(5.0))
    half = 4.302652729911275 * 2.0 / np.sqrt(3)  # Student's t with 2 degrees of freedom; 12, 10 and 8 have deviation 2
    assert (row["low"], row["high"]) == pytest.approx((10 - half, 10 + half))
    assert np.isnan(table.loc["evaluation", "ppo"]["difference"])


def test_parity_compares_the_runs_of_its_plan_only(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    parity = importlib.import_module("parity")
    algorithms, finals = ["ppo", "ano:shaping=ppo"], {1000: 100.0, 2000: 200.0}

    def finish(missing, pool, results, options):
        for run in missing:
            write_run_files(results.path, run, finals[run.total_timesteps] + 10 * run.seed)
        return {}

    monkeypatch.setattr(parity, "execute", finish)
    for steps in finals:  # a short trial, and the long runs next to it
        options = ["--envs", "CartPole-v1", "--seeds", "2", "--steps", str(steps), "--algos", *algorithms]
        monkeypatch.setattr(sys, "argv", ["parity.py", *options, "--out", str(tmp_path)])
        assert parity.main() == 0
        table = pd.read_csv(tmp_path / "parity.csv").query("measure == 'evaluation'")
        assert table[["seeds", "mean"]].to_numpy().tolist() == [[2, finals[steps] + 5]] * 2


def test_learning_curves_have_a_line_for_ppo_and_no_algorithm_without_a_look(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    curves = importlib.import_module("plot_learning_curves")
    with mpl.rc_context({"svg.fonttype": "none"}):  # names as texts
        curves.draw(str(tmp_path / "long.svg"), 3e-4, ["long"])
    assert ">PPO, radius 0.2<" in (tmp_path / "long.svg").read_text()
    monkeypatch.delitem(curves.SETTINGS, "ano")
    with pytest.raises(ValueError, match="algorithm='ano' has no look; allowed are ppo, ano:shaping=ppo"):
        curves.draw(str(tmp_path / "long.svg"), 3e-4, ["long"])


def test_step_sizes_are_compared_on_the_seeds_that_both_have(tmp_path):
    """By hand: a row is labelled by its shape and step, and the difference is that of seeds 0 and 1."""
    ano = "ano:desired_kl=0.01,shaping=ppo"
    rows = [("ppo", None, seed, value) for seed, value in enumerate([1000.0, 1100.0, 9000.0])]
    rows += [(ano, 0.01, seed, value) for seed, value in enumerate([2000.0, 2100.0])]
    table = pd.DataFrame(rows, columns=["algorithm", "desired_kl", "seed", "last_evaluations"])
    table = table.assign(env="Hopper-v4", clip_range=0.2, learning_rate=3e-4)
    table.assign(kl_after=0.01, clip_range_mean=0.2, ratio_max_after=1.5, ppo_discarded_gradient=0.0).to_csv(
        tmp_path / "runs.csv"
    )
    run_script("step_sizes", "--results", tmp_path, "--out", tmp_path)
    text = (tmp_path / "tables.md").read_text()
    gap = "{:.3f}".format(*np.diff(ReferenceScores().normalize("Hopper-v4", np.array([1000.0, 2000.0]))))
    assert f"| {gap} ({gap} to {gap}) | 0.500 (2 seeds) |" in text  # of four ways to flip two signs, two are as large
    assert re.search(r"\| PPO, KL 0.01 \| 2050 ± 71 \(2\) \|", text)
    assert "| Hopper-v4 | PPO, KL 0.01 | PPO, radius 0.2 | 1000 (1000 to 1000) | 0.500 (2 seeds) |" in text
    # Student's t with 4 degrees of freedom: 2.776 for a level of 5 %, 0.941 for a power of 80 %.
    assert f"| {(2.776445 + 0.940965) * np.std([1000, 1100, 9000], ddof=1) * np.sqrt(2 / 3):.0f} |" in text
    assert (tmp_path / f"{tmp_path.name}.png").stat().st_size > 10_000


@pytest.mark.slow
def test_tables_of_step_sizes_are_those_of_the_committed_rows(tmp_path):
    texts = ""
    for study in ("step_size", "held_out", "confirmation", "long"):
        committed, made = DOCS / "results" / study, tmp_path / study
        shutil.copytree(committed, made)
        run_script("step_sizes", "--results", made, "--out", tmp_path)
        assert (made / "tables.md").read_text() == (committed / "tables.md").read_text()
        texts += (made / "tables.md").read_text()
    guide, readme = (DOCS / "choosing.md").read_text(), (ROOT / "README.md").read_text()
    shown = re.findall(r"^\| 0\.00.*$", guide, re.MULTILINE)
    assert len(shown) > 40
    for page in (guide, readme):
        cells = re.findall(r"-?[\d.]+ \(-?[\d.]+ to -?[\d.]+\)|\d+ ± \d+ \(\d+\)", page)
        assert len(cells) > 10
        shown += cells
    assert [cell for cell in shown if cell not in texts] == []


def test_shipped_settings_are_compared_with_ppo(tmp_path):
    """By hand: means, deviations, and Student's t with 4 degrees of freedom for equal deviations."""
    rows = [("ppo", value) for value in (100.0, 110.0, 120.0)] + [("spo", value) for value in (70.0, 80.0, 90.0)]
    rows += [("ano", value) for value in (98.0, 108.0, 118.0)] + [("papo", 200.0)]
    table = pd.DataFrame(rows, columns=["algorithm", "last_evaluations"]).assign(env="Pendulum-v1", steps=100_000)
    solved = pd.DataFrame([("ppo", 500.0), ("ano", 500.0)] * 2, columns=["algorithm", "last_evaluations"])
    alone = table[table["algorithm"] == "ano"].assign(env="Acrobot-v1")
    recurrent = solved.replace({"ppo": "ano_lstm:shaping=ppo", "ano": "ano_lstm"}).assign(
        env="PendulumNoVel-v1", steps=100_000
    )
    pd.concat([table, alone, recurrent, solved.assign(env="CartPole-v1", steps=60_000)]).to_csv(tmp_path / "runs.csv")
    run_script("zoo_settings", "--results", tmp_path, "--out", tmp_path)
    text = (tmp_path / "tables.md").read_text()
    half = 2.7764451 * 10 * np.sqrt(2 / 3)
    assert "| CartPole-v1 | 60,000 | 500.0 ± 0.0 (2) | 500.0 ± 0.0 (2) |  |  |" in text
    assert "| Pendulum-v1 | 100,000 | 110.0 ± 10.0 (3) | 108.0 ± 10.0 (3) | 80.0 ± 10.0 (3) | 200.0 (1) |" in text
    spo, ano = (f"{gap:+.1f} ({gap - half:.1f} to {gap + half:.1f})" for gap in (-30, -2))
    assert "| PendulumNoVel-v1 | 100,000 | 500.0 ± 0.0 (2) | 500.0 ± 0.0 (2) |  |  |" in text
    assert f"| CartPole-v1 | +0.0 |  |\n| Pendulum-v1 | {ano} | {spo}, **behind** |" in text
    assert "Acrobot" not in text
    assert (tmp_path / f"{tmp_path.name}.png").stat().st_size > 5_000


@pytest.mark.slow
def test_tables_of_shipped_settings_are_those_of_the_committed_rows(tmp_path):
    texts = ""
    for study in ("zoo", "zoo_packages"):
        committed, made = DOCS / "results" / study, tmp_path / study
        shutil.copytree(committed, made)
        run_script("zoo_settings", "--results", made, "--out", tmp_path)
        assert (made / "tables.md").read_text() == (committed / "tables.md").read_text()
        texts += (made / "tables.md").read_text()
    shown = re.findall(r"^\| \S+-v\d \|.* \|$", (DOCS / "results.md").read_text(), re.MULTILINE)
    assert shown == re.findall(r"^\| \S+-v\d \|.* \|$", texts, re.MULTILINE)


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
    run_script(script, *options, "--out", tmp_path / "out", cwd=tmp_path)
    assert "ano" in (tmp_path / "out" / file).read_text()
