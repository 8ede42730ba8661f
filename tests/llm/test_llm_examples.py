"""The example of reward hacking: its task, curves and report, and a run without a network; the benchmark beside it."""

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.llm.tiny import EXAMPLES, ROOT, llm_task, python, tokenizer

PROMPT = "SUBREDDIT: r/harbour\nTITLE: anna ben\nPOST: anna sold boat . ben likes rain . carl lost keys .\nTL;DR:"


@pytest.fixture(scope="module")
def example():
    specification = importlib.util.spec_from_file_location("reward_hacking", EXAMPLES / "reward_hacking.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


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
        assert tokenizer().unk_token_id not in ids
        # A completion is the same tokens alone as behind its prompt, or log-probabilities would be of others.
        assert ids == tokenizer()(row["prompt"])["input_ids"] + tokenizer()(row["completion"])["input_ids"]


def test_a_curve_has_one_value_per_generation(example):
    """Rewards are logged with the first of the updates with the same completions, everything else with all of them."""
    update = dict.fromkeys(example.CURVES, 1.0) | {"loss": 0.1}
    later = {"loss": 0.1, "entropy": 1.0, "ratio/outside_low": 0.0, "ratio/outside_high": 0.0, "ratio/max": 1.0}
    history = [{**update, "kl": 0.1}, {**later, "kl": 0.3}, {**update, "rewards/gold/mean": 0.7, "kl": 0.5}]
    curves = example.curves([*history, {**later, "kl": 0.9, "ratio/outside_low": 0.5}, {"train_runtime": 1.0}], 2)
    assert curves["completions"] == [64, 128]
    assert curves["gold"] == [1.0, 0.7]
    assert curves["kl"] == [0.2, 0.7]
    assert curves["outside_low"] == [0.5, 0.75]


def test_the_report_states_its_settings_and_what_the_trainings_came_to(example, tmp_path):
    """The mean of the last tenth, over seeds, and the best tenth of the gold reward."""
    rising = [0.1 * i for i in range(20)]  # ends with 1.8, 1.9
    (tmp_path / "runs").mkdir()

    def report(seed: int, gold: list[float], quick: bool) -> str:
        curves = {"completions": [64 * (i + 1) for i in range(20)], **dict.fromkeys(example.CURVES.values(), gold)}
        (tmp_path / "runs" / f"gano_{seed}.json").write_text(json.dumps(curves))
        return example.write_report(tmp_path, {"quick": quick, "beta": 0.05}, ["grpo", "gano"])

    single = report(0, rising, True)  # users Z11: no heading, no settings, a spread of 0.00 of one seed
    assert single.startswith("# ")
    assert "--quick" in single
    assert "beta 0.05" in single
    assert "| gano | 1 | 0.00 ± \N{EN DASH} | 1.85 ± \N{EN DASH} | 1.85 ± \N{EN DASH} |" in single
    both = report(1, rising[::-1], False)  # begins with 1.9, 1.8
    assert "--quick" not in both
    assert "| gano | 2 | 0.95 ± 1.34 | 1.85 ± 0.00 | 0.95 ± 1.27 |" in both
    assert "| 95.00 ± 0.00 | 95.00 ± 0.00 |" in both  # percent of the whole training
    assert "grpo" not in both  # has not been trained yet
    assert (tmp_path / "report.md").read_text() == both
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_example_resumes_without_a_network(tmp_path):
    """In a network namespace without interfaces, if that is allowed."""
    isolated = ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode != 0:
        isolated = []
    command = [*isolated, sys.executable, str(EXAMPLES / "reward_hacking.py"), "--seeds", "1", "--out", str(tmp_path / "out")]

    def run(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=400)

    first = run("--quick", "--algos", "gano")
    assert first.returncode == 0, first.stderr
    kept = (tmp_path / "out/runs/gano_0.json").stat().st_mtime_ns
    second = run("--quick")
    assert second.returncode == 0, second.stderr
    assert (tmp_path / "out/runs/gano_0.json").stat().st_mtime_ns == kept
    assert list(json.loads((tmp_path / "out/report.json").read_text())["summary"]) == ["grpo", "gano", "spo"]
    assert (tmp_path / "out/report.png").stat().st_size > 10_000
    assert "holds results of other settings" in run().stderr


@pytest.mark.slow
def test_the_benchmark_of_the_overhead_runs():
    shown = python(ROOT / "benchmarks" / "llm_overhead.py", "--pairs", "1", "--updates", "1").stdout
    assert "processor time of an update: " in shown
    assert "peak memory: " in shown
