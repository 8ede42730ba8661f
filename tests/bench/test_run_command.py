"""``python -m sb3_ano.bench run``: real trainings in processes of their own, and what can go wrong."""

import json
import os
import shutil
import subprocess
import sys

import pandas as pd
import pytest

from sb3_ano.bench.cli import main
from sb3_ano.bench.store import ResultsFolder, open_store

SUITE = """
total_timesteps: 512
evaluation: {points: 2, episodes: 2}
imports: [tasks_of_a_user]
hyperparameters: {n_envs: 2, n_steps: 64, batch_size: 64, n_epochs: 1}
tasks: [Good-v0, Bad-v0]
"""
TASKS = """
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

class Bad(CartPoleEnv):
    steps = 0
    def step(self, action):
        Bad.steps += 1
        if Bad.steps > 300:
            raise RuntimeError("the cart has come off the rails")
        return super().step(action)

gym.register("Good-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=50)
gym.register("Bad-v0", "tasks_of_a_user:Bad", max_episode_steps=50)
"""


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """A suite of a user's tasks, one of which breaks down."""
    (tmp_path / "tasks_of_a_user.py").write_text(TASKS)
    (tmp_path / "mine.yml").write_text(SUITE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield str(tmp_path / "mine.yml")
    sys.modules.pop("tasks_of_a_user", None)


def test_a_broken_environment_costs_its_own_run_only(suite, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["run", "--suite", suite, "--algos", "ano", "--seeds", "1", "--jobs", "2", "--out", str(out)]
    assert main([*command, "--plan"]) == 0
    assert not out.exists()
    assert "2 runs to go" in capsys.readouterr().out

    assert main(command) == 1
    error = capsys.readouterr().err
    assert "error: 1 of 2 runs failed; the others are kept, and the same command tries these again" in error
    bad = "Bad-v0__ano__clip_range=0.2,learning_rate=0.0003__seed0"
    assert f"failed: {bad}: RuntimeError: the cart has come off the rails" in error
    failure = json.loads((out / "failed" / f"{bad}.json").read_text())
    assert failure["attempts"] == 2
    assert 'raise RuntimeError("the cart has come off the rails")' in failure["errors"][0]
    assert (out / "unfinished" / bad / "episodes.arrows").exists()  # what there is of it
    store = open_store(out)
    assert store.run_ids() == [bad.replace("Bad", "Good")]
    kept = (out / "runs" / bad.replace("Bad", "Good") / "run.json").stat().st_mtime_ns

    (tmp_path / "tasks_of_a_user.py").write_text(TASKS.replace("> 300", "< 0"))
    assert main(command) == 0
    assert (out / "runs" / bad.replace("Bad", "Good") / "run.json").stat().st_mtime_ns == kept
    assert len(store.run_ids()) == 2
    assert store.failures() == []
    assert sorted(path.name for path in out.iterdir()) == [".lock", "failed", "results.json", "runs"]
    runs = store.runs()
    assert (runs["timesteps"] == 512).all()
    assert set(store.table("evaluations")["run_id"]) == set(runs["run_id"])
    assert main([*command, "--plan"]) == 0
    assert f"All 2 runs are in {out}." in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "mujocco"], "unknown suite 'mujocco', did you mean 'mujoco'?"),
        (["--suite", "classic", "--algos", "anno"], "unknown algorithm 'anno', did you mean 'ano'?"),
        (["--suite", "classic", "--envs", "CartPol"], "suite 'classic' has no task 'CartPol', did you mean 'CartPole'?"),
        (["--suite", "classic", "--seeds", "0"], "argument --seeds: '0' is not allowed; allowed are whole numbers from 1"),
        (["--suite", "classic", "--grid", "clip_range="], "grid 'clip_range=' is not allowed; allowed are NAME=VALUE"),
        (["--suite", "classic", "--address", "auto"], "--address auto is not allowed without --backend ray"),
        (["--suite", "classic", "--backend", "rai"], "argument --backend: invalid choice: 'rai'"),
        (
            ["--suite", "classic", "--algos", "ano", "--envs", "CartPole", "--grid", "clip_range=-1"],
            "CartPole-v1__ano__clip_range=-1,learning_rate=0.002__seed0 cannot be trained: clip_range=-1.0 is not a radius",
        ),
        (["--suite", "classic", "--version", "v9"], "CartPole-v9 cannot be made: env_id='CartPole-v9' is unknown"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(arguments, message, capsys, tmp_path):
    assert main(["run", *arguments, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_an_environment_that_cannot_be_made_is_named_before_anything_runs(suite, tmp_path, capsys):
    (tmp_path / "tasks_of_a_user.py").write_text(TASKS.replace("    steps = 0", "    steps = 1 / 0"))
    assert main(["run", "--suite", suite, "--out", str(tmp_path / "out")]) == 2
    assert "imports 'tasks_of_a_user', which cannot be imported: division by zero" in capsys.readouterr().err


def test_a_folder_that_another_process_writes_is_left_to_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ResultsFolder.__init__, "__defaults__", (0.0,))
    with ResultsFolder(tmp_path):
        assert main(["run", "--suite", "classic", "--algos", "ano", "--envs", "CartPole", "--out", str(tmp_path)]) == 2
    assert "is in use: another process writes its results there now" in capsys.readouterr().err


def test_ray_is_named_where_it_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "sb3_ano.bench.experiments.ray_backend", raising=False)
    assert main(["run", "--suite", "classic", "--backend", "ray", "--out", str(tmp_path / "out")]) == 2
    assert "error: ray is not installed; install it with: pip install 'sb3-ano[ray]'" in capsys.readouterr().err


def may_mount() -> bool:
    """Whether this process may mount a file system of its own."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="mounts a small file system, which takes user namespaces")
def test_a_full_disk_is_a_clear_error_and_loses_nothing(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    run = f"{sys.executable} -m sb3_ano.bench run --suite classic --envs CartPole --algos ano --seeds 1 --out {disk}/out"
    script = f"""
        mount -t tmpfs -o size=400k tmpfs {disk} || exit 90
        {run} --steps 512 || exit 91
        head -c 300k /dev/zero > {disk}/ballast
        {run} --steps 512 --grid learning_rate=1e-3
        status=$?
        cp -r {disk}/out {tmp_path}/copy
        rm {disk}/ballast
        {run} --steps 512 --grid learning_rate=1e-3 || exit 92
        cp -r {disk}/out {tmp_path}/after
        exit $status
    """
    finished = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert finished.returncode == 2, finished.stderr
    expected = f"error: {disk}/out cannot be written: OSError: [Errno 28]"
    (line,) = [line for line in finished.stderr.splitlines() if line.startswith("error")]
    assert line.startswith(expected)
    assert line.endswith("its 1 finished runs are kept, and the same command goes on from there")
    before, after = open_store(tmp_path / "copy"), open_store(tmp_path / "after")
    assert len(before.run_ids()) == 1
    assert len(after.run_ids()) == 2
    pd.testing.assert_frame_equal(before.table("episodes"), after.table("episodes", before.run_ids()))
