"""The comparison of learning: numbers worked by hand, and what a kill leaves."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sb3_ano.bench.parity import (
    CONTENDERS,
    Run,
    RunPool,
    Settings,
    all_runs,
    finished,
    learning_curves,
    markdown,
    summarise,
)
from sb3_ano.bench.parity_run import final_return
from sb3_ano.bench.progress import Reporter

SB3, FAST, _ = CONTENDERS


def result(run, final, evaluation=0.0, timesteps=(500, 1000), returns=(1.0, 2.0)):
    return {
        "spec": run.specification(),
        "final_return": final,
        "evaluation_return": evaluation,
        "episodes": {"timesteps": list(timesteps), "returns": list(returns)},
        "steps": 1000,
        "train_seconds": 4.0,
        "date": "2026-01-02T00:00:00",
        "machine": {"cpu": "a processor", "cores": 2},
        "versions": {"torch": "2"},
    }


@pytest.fixture
def results():
    """The table of tests/bench/test_paired.py, with a fifth seed that only SB3 has."""
    finals = {SB3: [10.0, 12.0, 14.0, 16.0, 99.0], FAST: [11.0, 12.0, 16.0, 17.0]}
    runs = {}
    for contender, values in finals.items():
        for seed, value in enumerate(values):
            run = Run("Hopper-v4", contender, seed, Settings())
            runs[run] = result(run, value, evaluation=2 * value)
    return runs


def test_the_final_return_is_that_of_the_last_tenth():
    assert final_return([100, 900, 901, 1000], [1.0, 5.0, 7.0, 9.0], 1000) == 8.0
    with pytest.raises(ValueError, match="no episode ended in the last tenth of 1000 steps; train for longer"):
        final_return([100, 900], [1.0, 5.0], 1000)


def test_runs_are_ordered_seed_by_seed():
    runs = all_runs(["A-v1", "B-v1"], CONTENDERS[:2], 2, Settings())
    names = [run.name for run in runs]
    assert names[:4] == ["A-v1_sb3_0", "A-v1_fast-float32_0", "B-v1_sb3_0", "B-v1_fast-float32_0"]
    assert len(set(names)) == 8


def test_the_summary_is_that_worked_by_hand(results):
    summary = summarise(results)
    rows = {(row["contender"], row["measure"]): row for row in summary["comparisons"]}
    assert rows["sb3", "final_return"]["mean"] == pytest.approx(30.2)
    assert rows["sb3", "final_return"]["against_sb3"] is None
    found = rows["fast-float32", "final_return"]["against_sb3"]
    assert (found["n"], found["mean"], found["reference_mean"], found["difference"]) == (4, 14.0, 13.0, 1.0)
    assert found["t_interval"] == pytest.approx((-0.29923, 2.29923), abs=1e-5)
    assert found["within"]
    assert rows["fast-float32", "evaluation_return"]["against_sb3"]["difference"] == 2.0
    assert summary["speed"][0]["steps_per_second"] == 250.0
    text = markdown(summary)
    line = "| Hopper-v4 | fast-float32 | 4 | 14.0 | +1.0 (-0.3 to +2.3) |"
    assert line in text
    assert "+7.7 % (-2.3 to +17.7) | yes | yes |" in text


def test_one_seed_has_no_interval(results):
    one = {run: content for run, content in results.items() if run.seed == 0}
    assert all(row["against_sb3"] is None for row in summarise(one)["comparisons"])
    assert "| Hopper-v4 | fast-float32 | 1 | 11.0 |  |  |  |  |  |" in markdown(summarise(one))


def test_learning_curves_are_means_over_seeds_with_bands():
    runs = {}
    for seed, last in enumerate([2.0, 4.0]):
        run = Run("A-v1", SB3, seed, Settings())
        runs[run] = result(run, 0.0, timesteps=[20, 500, 1000], returns=[0.0, 1.0, last])
    steps, mean, low, high = learning_curves(runs)["A-v1"]["sb3"]
    assert steps[[0, -1]].tolist() == [20.0, 1000.0]
    assert mean[[0, 24, -1]] == pytest.approx([0.0, 1.0, 3.0])
    assert np.all(np.diff(mean) > 0.0)
    # Two values 1 apart from their mean: Student's t at 0.975 with 1 degree of freedom is 12.7062.
    assert high[-1] - mean[-1] == pytest.approx(12.7062, abs=1e-4)
    assert low[24] == high[24] == 1.0


def test_results_of_other_settings_are_refused(tmp_path):
    run = Run("A-v1", SB3, 0, Settings())
    run.file(tmp_path).parent.mkdir()
    run.file(tmp_path).write_text(json.dumps(result(run, 1.0)))
    assert set(finished([run], tmp_path)) == {run}
    with pytest.raises(ValueError, match="A-v1_sb3_0.json was made with other settings; --force runs again"):
        finished([Run("A-v1", SB3, 0, Settings(steps=5))], tmp_path)


def test_a_run_that_fails_is_a_line(tmp_path):
    run = Run("NoSuchTask-v1", SB3, 0, Settings(steps=2048))
    (line,) = RunPool(tmp_path, Reporter()).execute([run], 1)
    assert line.startswith("NoSuchTask-v1_sb3_0: ")
    assert "NoSuchTask" in line
    assert finished([run], tmp_path) == {}


def processes_under(folder) -> list[int]:
    """Runs whose result would go into ``folder``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            command = (process / "cmdline").read_text()
            if "parity_run" in command and str(folder) in command:
                found.append(int(process.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")
def test_a_kill_loses_nothing_that_was_finished(tmp_path):
    command = [sys.executable, "-m", "sb3_ano.bench", "parity", "--envs", "CartPole-v1", "--seeds", "2", "--jobs", "1"]
    command += ["--contenders", "sb3", "fast-float32", "--steps", "4096", "--eval-episodes", "5", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (list(tmp_path.glob("runs/*.json")) and processes_under(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = {path: (path.stat().st_mtime_ns, json.loads(path.read_text())) for path in tmp_path.glob("runs/*.json")}
    assert 1 <= len(kept) < 4
    while processes_under(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_under(tmp_path)

    finished = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"})
    assert finished.returncode == 0, finished.stderr
    assert f"{len(kept)} of 4 runs are there" in finished.stderr
    assert all(path.stat().st_mtime_ns == written for path, (written, _) in kept.items())
    names = {path.stem for path in tmp_path.glob("runs/*.json")}
    assert names == {f"CartPole-v1_{name}_{seed}" for name in ("sb3", "fast-float32") for seed in (0, 1)}
    summary = json.loads((tmp_path / "summary.json").read_text())
    found = {row["contender"]: row for row in summary["comparisons"] if row["measure"] == "final_return"}
    assert found["fast-float32"]["against_sb3"]["n"] == 2
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "summary.json", "summary.md", "learning_curves.png"}

    run = json.loads((tmp_path / "runs" / "CartPole-v1_sb3_0.json").read_text())
    assert run["steps"] == 4096
    assert len(run["evaluation"]) == 5
    assert run["final_return"] == pytest.approx(final_return(*run["episodes"].values(), 4096))
