"""Killed at any moment, on one machine or several: the results end up as if nothing had happened."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from sb3_ano.bench.pool import Pool, WorkerError
from sb3_ano.bench.results import Results
from tests.bench.common import assert_same_run, small_run

pytestmark = pytest.mark.slow
KILLS = 8
# Entries of run.json that may differ between two equal runs.
CIRCUMSTANCES = {"started", "finished", "seconds", "resumed_at", "sha256", "commit"}


def start(out, *more: str) -> subprocess.Popen[str]:
    plan = ["--suite", "classic", "--envs", "CartPole", "--algos", "ppo", "ano", "--seeds", "2", "--steps", "4096"]
    command = [sys.executable, "-m", "sb3_ano.bench", "run", *plan, "--jobs", "2", "--out", str(out), *more]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(process) -> tuple[int, str]:
    """Return exit status and standard error of the command."""
    _, error = process.communicate(timeout=600)
    return process.returncode, error


def assert_completed(out, reference) -> None:
    """Run the command once more, and compare runs, rows and parameters; only times may differ."""
    assert finish(start(out))[0] == 0
    assert not trainings(str(out))
    assert sorted(path.name for path in out.iterdir() if path.name[0] != "." and any(path.iterdir())) == ["runs"]
    results, expected = Results(out), Results(reference)
    assert results.names() == expected.names()
    for ours, theirs in zip(results.runs(), expected.runs(), strict=True):
        assert not {key for key in theirs.document if ours.document[key] != theirs.document[key]} - CIRCUMSTANCES
        assert_same_run(ours, theirs)


def trainings(of: str) -> dict[psutil.Process, str]:
    """Return the processes that train below a directory, and the names of their runs."""
    lines = {process: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
    requests = {process: line[-1] for process, line in lines.items() if "sb3_ano.bench.pool" in line and of in line[-1]}
    return {process: Path(json.loads(request)["directory"]).name for process, request in requests.items()}


def wait_for_trainings(below, process) -> dict[psutil.Process, str]:
    while not (running := trainings(str(below))):
        assert process.poll() is None
        time.sleep(0.05)
    return running


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The results of an uninterrupted plan, and the seconds that it took."""
    out = tmp_path_factory.mktemp("uninterrupted") / "out"
    begin = time.monotonic()
    assert finish(start(out))[0] == 0
    return out, time.monotonic() - begin


def test_killed_at_random_moments(uninterrupted, tmp_path):
    reference, seconds = uninterrupted
    out, random, kills_of_trainings = tmp_path / "out", np.random.default_rng(0), 0
    for _ in range(KILLS):
        process = start(out)
        time.sleep(float(random.uniform(0.1, 0.8 * seconds)))
        kills_of_trainings += bool(trainings(str(out)))
        process.kill()
        process.communicate()
        if (out / "runs").is_dir() and len(Results(out).names()) == 4:  # remove one, so that there is something to interrupt
            shutil.rmtree(next((out / "runs").iterdir()))
    assert kills_of_trainings >= KILLS // 4
    assert_completed(out, reference)


def test_a_killed_worker_a_second_command_and_an_interrupt(uninterrupted, tmp_path):
    out = tmp_path / "out"
    process = start(out)
    victim, name = next(iter(wait_for_trainings(out, process).items()))
    victim.kill()
    assert finish(start(out)) == (2, f"error: {out} is in use: another process writes to it now\n")
    status, error = finish(process)
    assert status == 1
    assert f"failed: {name}: its process was killed by SIGKILL" in error
    assert len(Results(out).names()) == 3
    process = start(out)
    wait_for_trainings(out, process)
    process.send_signal(signal.SIGINT)
    status, error = finish(process)
    assert (status, error.splitlines()[-1]) == (130, "interrupted; the same command resumes from here")
    assert_completed(out, uninterrupted[0])


@pytest.mark.filterwarnings("default")  # Ray's own
def test_a_cluster_of_two_nodes_loses_one(uninterrupted, tmp_path, monkeypatch):
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    out, of_node = tmp_path / "out", tmp_path / "node"
    of_node.mkdir()
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        with monkeypatch.context() as changed:
            changed.setenv("TMPDIR", str(of_node))  # where the node makes the directories of its runs
            lost = cluster.add_node(num_cpus=1)
        process = start(out, "--backend", "ray", "--address", cluster.address)
        wait_for_trainings(of_node, process)
        cluster.remove_node(lost, allow_graceful=False)
        assert finish(process)[0] == 0
    finally:
        cluster.shutdown()
    assert len(Results(out).names()) == 4
    assert_completed(out, uninterrupted[0])


@pytest.mark.filterwarnings("default")
def test_errors_of_trainings_come_back_from_ray():
    ray_backend = pytest.importorskip("sb3_ano.bench.ray_backend", exc_type=ImportError)
    with pytest.raises(OSError, match="--address 127.0.0.1:1: no Ray cluster was found"):
        ray_backend.RayPool("127.0.0.1:1", 1, 1)
    with contextlib.closing(ray_backend.RayPool(None, 1, 1)) as pool:
        runs = (dataclasses.asdict(small_run("ano", env)) for env in ("CartPole-v9", "CartPole-v1"))
        target = "sb3_ano.bench.training:train_request"
        bad, good = (pool.submit(target, {"run": run, "models": False}) for run in runs)
        error = WorkerError.of(bad.exception(timeout=300))
        assert str(error).startswith("ValueError: env_id='CartPole-v9' is unknown")
        assert "Traceback" in error.details
        assert set(good.result(timeout=300)) == {"monitor.csv", "progress.csv", "evaluations.npz", "run.json"}


def wait(request):
    """Write which process this is, and wait."""
    Path(request["file"]).write_text(f"{os.getpid()} ")
    time.sleep(600)


@pytest.mark.parametrize("waiting", ["call(*work)", "Pool(1).submit(*work).result()"])
def test_a_process_ends_with_its_parent(waiting, tmp_path):
    file = tmp_path / "pid"
    work = f"work = 'tests.bench.test_run_kills:wait', {{'file': '{file}'}}"
    parent = subprocess.Popen([sys.executable, "-c", f"from sb3_ano.bench.pool import Pool, call; {work}; {waiting}"])
    while not file.exists() or not file.read_text().endswith(" "):
        time.sleep(0.05)
    child = psutil.Process(int(file.read_text()))
    parent.kill()
    parent.communicate()
    child.wait(timeout=20)  # or an error


def hold(request):
    """Call C code that holds Python's lock for half a minute."""
    Path(request["file"]).touch()
    re.match("(a+)+$", 30 * "a" + "b")


def test_a_pool_that_is_closed_kills_processes_that_cannot_notice_it(tmp_path):
    pool = Pool(1)
    held = pool.submit("tests.bench.test_run_kills:hold", {"file": str(tmp_path / "file")})
    while not (tmp_path / "file").exists():
        assert not held.done()
        time.sleep(0.05)
    pool.close()
    assert str(held.exception()) == "its process was killed by SIGKILL"
