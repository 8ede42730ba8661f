"""Test the example of reward hacking (task, curves, report, a run without a network), and the benchmark of the trainers."""

import importlib
import json
import subprocess
import sys

import pandas as pd
import pytest

from tests.common import ROOT, python
from tests.llm.tiny import EXAMPLES, llm_task, tokenizer

# tests.llm.tiny has put their directory on the path.
example, report = map(importlib.import_module, ("reward_hacking", "llm_report"))
PROMPT = "SUBREDDIT: r/harbour\nTITLE: anna ben\nPOST: anna sold boat . ben likes rain . carl lost keys .\nTL;DR:"


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (" carl lost keys . anna sold boat .", 1.0),
        ("", 0.0),
        (" anna sold boat . anna sold boat .", 0.25),  # repeats
        (" anna sold boat . ben likes rain .", 0.25),  # tells what is no news
        (" anna sold keys .", -0.5),  # invents
        (" boat boat .", -0.5),  # is no sentence
        (" anna sold boat . carl lost keys . ben likes rain . ben likes rain .", 0.5),
    ],
)
def test_the_rule(completion, score):
    ids = tokenizer()(completion)["input_ids"]
    ended = [*ids, tokenizer().eos_token_id]
    assert llm_task.gold([PROMPT] * 2, [completion] * 2, [ended, ids]) == [score, score - 0.5]


def test_the_data_leave_something_to_learn():
    rows = llm_task.make_posts(2000, seed=0)
    assert 0.2 < sum(llm_task.gold_score(row["prompt"], row["completion"]) for row in rows) / len(rows) < 0.6
    pairs = llm_task.make_comparisons(1000, seed=0, mistakes=0.1)
    scores = [[llm_task.gold_score(pair["prompt"], pair[side]) for side in ("chosen", "rejected")] for pair in pairs]
    assert 0.07 < sum(chosen < rejected for chosen, rejected in scores) / len(pairs) < 0.13
    for row in rows.select(range(50)):
        text = row["prompt"] + row["completion"]
        ids = tokenizer()(text)["input_ids"]
        assert tokenizer().decode(ids) == text
        # A completion is the same tokens alone as behind its prompt, or log-probabilities would be of others.
        assert ids == tokenizer()(row["prompt"])["input_ids"] + tokenizer()(row["completion"])["input_ids"]


def test_a_curve_has_one_value_per_generation():
    """Rewards are logged with the first of the updates with the same completions, everything else with all of them."""
    update = dict.fromkeys(example.CURVES, 1.0) | {"loss": 0.1}
    later = {"loss": 0.1, "entropy": 1.0, "ratio/outside_low": 0.0, "ratio/outside_high": 0.0}
    history = [{**update, "kl": 0.1}, {**later, "kl": 0.3}, {**update, "rewards/gold/mean": 0.7, "kl": 0.5}]
    curves = example.curves([*history, {**later, "kl": 0.9, "ratio/outside_low": 0.5}, {"train_runtime": 1.0}], 2)
    expected = {"completions": [64, 128], "gold": [1.0, 0.7], "kl": [0.2, 0.7], "outside_low": [0.5, 0.75]}
    assert curves | expected == curves


@pytest.mark.parametrize("exponent", [-0.6, -1.0, -1.4])
def test_the_search_finds_the_beta_of_a_divergence(monkeypatch, tmp_path, exponent):
    trained = []

    def train_policy(out, plan, variant, beta, seed):
        assert seed == example.SEARCH_SEED
        trained.append(beta)
        return {"kl": [9.9] * 18 + [3.0 * (beta / 0.05) ** exponent] * 2}

    monkeypatch.setattr(example, "train_policy", train_policy)
    beta = example.match_beta(tmp_path, example.PLAN, "grpo", 0.7)
    assert 3.0 * (beta / 0.05) ** exponent == pytest.approx(0.7, rel=0.04)  # beta has two digits
    assert 2 <= len(trained) <= example.PLAN["trials"]
    assert trained[0] == example.PLAN["beta"]


def test_the_report_has_means_over_seeds_and_win_rates(tmp_path):
    """The mean of the last tenth, over seeds, the best tenth of the gold reward, and both halves of the matrix."""
    dash = "\N{EN DASH}"  # a spread of 0.00 of one seed
    rising = [0.1 * i for i in range(20)]  # ends with 1.8, 1.9

    def run(values: list[float]) -> dict:
        return {
            "completions": [*range(64, 1344, 64)],
            **dict.fromkeys(example.CURVES.values(), values),
            "seconds": 60.0,
        }

    def table(gano_over_sft: float) -> pd.DataFrame:
        rows = [("ano", "gano", 0.25), ("ano", "sft", 0.5), ("gano", "sft", gano_over_sft)]
        return pd.DataFrame(rows, columns=["policy", "opponent", "win_rate"])

    def write(values: list[list[float]], tables: list[pd.DataFrame]) -> tuple[str, dict]:
        runs = {name: [run(curve) for curve in values] for name in ("ano", "gano")}
        return report.write_section(tmp_path, "equal", "Equal beta", {"ano": 0.05, "gano": 0.1}, runs, tables)

    single, _ = write([rising], [table(0.9)])
    assert f"| gano | 0.1 | 0.00 ± {dash} | 1.85 ± {dash} | 1.85 ± {dash} |" in single
    assert f"| gano | 75 ± {dash} |  | 90 ± {dash} |" in single
    both, numbers = write([rising, rising[::-1]], [table(0.9), table(0.7)])  # the second begins with 1.9, 1.8
    assert "| gano | 0.1 | 0.95 ± 1.34 | 1.85 ± 0.00 | 0.95 ± 1.27 |" in both
    assert "| 95.00 ± 0.00 | 95.00 ± 0.00 | 60.00 ± 0.00 |" in both  # percent of the whole training; seconds
    assert "| gano | 75 ± 0 |  | 80 ± 127 |" in both  # 12.706 * 14.14 / sqrt(2)
    assert "| sft | 50 ± 0 | 20 ± 127 |  |" in both
    assert json.loads(json.dumps(numbers))["win_rates"]["seeds"][1][1] == [75.0, None, 70.0]
    assert all((tmp_path / f"{name}_equal.png").stat().st_size > 10_000 for name in ("curves", "matrix"))


@pytest.mark.slow
def test_the_example_resumes_without_a_network(tmp_path):
    """In a network namespace without interfaces, if that is allowed."""
    isolated = ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode != 0:
        isolated = []
    out = tmp_path / "out"
    command = [*isolated, sys.executable, str(EXAMPLES / "reward_hacking.py"), "--seeds", "1", "--out", str(out)]

    def run(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=500)

    first = run("--quick", "--algos", "gano", "--settings", "equal")
    assert first.returncode == 0, first.stderr
    kept = (out / "runs/gano_0.05_0.json").stat().st_mtime_ns
    second = run("--quick")
    assert second.returncode == 0, second.stderr
    assert (out / "runs/gano_0.05_0.json").stat().st_mtime_ns == kept
    numbers = json.loads((out / "report.json").read_text())
    for setting in ("equal", "matched"):
        assert list(numbers[setting]["summary"]) == ["ppo", "spo", "ano", "grpo", "gano"]
        assert numbers[setting]["win_rates"]["policies"][-1] == "sft"
        assert (out / f"curves_{setting}.png").stat().st_size > 10_000
    assert numbers["matched"]["betas"]["gano"] == 0.05
    assert "--quick" in (out / "report.md").read_text()
    assert "holds results of other settings" in run().stderr


@pytest.mark.slow
def test_the_benchmark_of_the_overhead_runs():
    shown = python(ROOT / "benchmarks" / "llm_overhead.py", "--pairs", "1", "--updates", "1").stdout
    assert "processor time of an update: " in shown
    assert "peak memory: " in shown
