"""Killed at any moment, on one machine or several: the results end up as if nothing had happened."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from sb3_ano.bench.pool import WorkerError
from sb3_ano.bench.results import Results
from tests.bench.common import assert_same_run, small_run

pytestmark = pytest.mark.slow
KILLS = 8
# Entries of run.json that may differ between two equal runs.
CIRCUMSTANCES = {"started", "finished", "seconds", "attempts", "resumed_at", "sha256", "commit"}


def command(out, *more: str) -> list[str]:
    plan = ["--suite", "classic", "--envs", "CartPole", "--algos", "ppo", "ano", "--seeds", "2", "--steps", "4096"]
    return [sys.executable, "-m", "sb3_ano.bench", "run", *plan, "--jobs", "2", "--out", str(out), *more]


def start(out, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command(out, *more), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def run(out) -> None:
    finished = subprocess.run(command(out), capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def assert_same_results(out, reference) -> None:
    """Compare runs, rows and parameters; only times may differ."""
    results, expected = Results(out), Results(reference)
    assert results.names() == expected.names()
    for ours, theirs in zip(results.runs(), expected.runs(), strict=True):
        assert not {key for key in theirs.document if ours.document[key] != theirs.document[key]} - CIRCUMSTANCES
        assert_same_run(ours, theirs)


def trainings(of: str) -> dict[psutil.Process, str]:
    """Return the processes that train below a directory, and the names of their runs."""
    lines = {process: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
    return {
        process: Path(json.loads(line[-1])["directory"]).name
        for process, line in lines.items()
        if "sb3_ano.bench.pool" in line and of in line[-1]
    }


def wait_for_trainings(out, process) -> dict[psutil.Process, str]:
    while not (running := trainings(str(out))):
        assert process.poll() is None
        time.sleep(0.05)
    return running


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The results of an uninterrupted plan, and the seconds that it took."""
    out = tmp_path_factory.mktemp("uninterrupted") / "out"
    begin = time.monotonic()
    run(out)
    return out, time.monotonic() - begin


def test_killed_at_random_moments(uninterrupted, tmp_path):
    reference, seconds = uninterrupted
    out, random = tmp_path / "out", np.random.default_rng(0)
    kills, while_training = 0, 0
    while kills < KILLS:
        process = subprocess.Popen(command(out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(timeout=float(random.uniform(0.1, 0.8 * seconds)))
        except subprocess.TimeoutExpired:
            while_training += bool(trainings(str(out)))
            process.kill()
            kills += 1
            process.wait()
        else:  # all runs have finished: remove one, so that there is something to interrupt
            finished = sorted((out / "runs").iterdir())
            os.rename(finished[int(random.integers(len(finished)))], tmp_path / f"removed{kills}-{time.monotonic_ns()}")
    run(out)
    assert while_training >= KILLS // 4
    assert not trainings(str(out))
    assert_same_results(out, reference)
    assert not (out / "unfinished").exists()


def test_an_interrupt_ends_the_trainings_and_the_same_command_resumes(uninterrupted, tmp_path):
    out = tmp_path / "out"
    process = start(out)
    wait_for_trainings(out, process)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert process.returncode == 130
    assert error.splitlines()[-1] == "interrupted; the same command resumes from here"
    assert not trainings(str(out))
    run(out)
    assert_same_results(out, uninterrupted[0])


def test_a_worker_that_is_killed_is_replaced_and_a_second_command_is_rejected(uninterrupted, tmp_path):
    out = tmp_path / "out"
    process = start(out)
    victim, name = next(iter(wait_for_trainings(out, process).items()))
    victim.kill()
    second = subprocess.run(command(out), capture_output=True, text=True)
    assert second.returncode == 2
    assert second.stderr == f"error: {out} is in use: another process writes to it now\n"
    _, error = process.communicate()
    assert process.returncode == 0, error
    assert "its process was killed by SIGKILL; it is run again" in " ".join(error.split())
    attempts = {run.path.name: run.document["attempts"] for run in Results(out).runs()}
    assert attempts == dict.fromkeys(attempts, 1) | {name: 2}
    assert_same_results(out, uninterrupted[0])


def test_a_full_disk_is_one_line_and_finished_runs_are_kept(uninterrupted, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(out)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("needs a file system of its own")
    try:
        full = subprocess.run(command(out), capture_output=True, text=True)
        assert full.returncode == 2
        (line,) = [line for line in full.stderr.splitlines() if line.startswith("error: ")]
        assert "No space left on device" in line
        subprocess.run(["mount", "-o", "remount,size=40m", str(out)], check=True)
        run(out)
        assert_same_results(out, uninterrupted[0])
    finally:
        subprocess.run(["umount", str(out)], check=True)


@pytest.mark.filterwarnings("default")  # Ray's own
def test_a_cluster_of_two_nodes_loses_one(uninterrupted, tmp_path):
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    out = tmp_path / "out"
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        lost = cluster.add_node(num_cpus=1)
        process = start(out, "--backend", "ray", "--address", cluster.address)
        node, training = psutil.Process(lost.all_processes["raylet"][0].process.pid), False
        while not training:
            assert process.poll() is None
            time.sleep(0.1)
            with contextlib.suppress(psutil.Error):  # of a child that has just ended
                training = any("sb3_ano.bench.pool" in child.cmdline() for child in node.children(recursive=True))
        cluster.remove_node(lost, allow_graceful=False)
        _, error = process.communicate(timeout=600)
        assert process.returncode == 0, error
    finally:
        cluster.shutdown()
    assert_same_results(out, uninterrupted[0])
    assert not (out / "failed").exists()


@pytest.mark.filterwarnings("default")
def test_errors_of_trainings_come_back_from_ray():
    ray_backend = pytest.importorskip("sb3_ano.bench.ray_backend", exc_type=ImportError)
    pool = ray_backend.RayPool(None, 1, 1)
    try:
        runs = (dataclasses.asdict(small_run("ano", env)) for env in ("CartPole-v9", "CartPole-v1"))
        target = "sb3_ano.bench.training:train_request"
        bad, good = (pool.submit(target, {"run": run, "models": False}, print) for run in runs)
        error = WorkerError.of(bad.exception(timeout=300))
        assert str(error).startswith("ValueError: env_id='CartPole-v9' is unknown")
        assert "Traceback" in error.details
        assert set(good.result(timeout=300)) == {"monitor.csv", "progress.csv", "evaluations.npz", "run.json"}
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "--address 127.0.0.1:1: no Ray cluster was found: [Errno 111] Connection refused"),
        *((address, f"--address {address} is not allowed; allowed are auto, and HOST:PORT") for address in ("ray://h:1", "h")),
    ],
)
def test_no_cluster_at_the_address(address, message):
    ray_backend = pytest.importorskip("sb3_ano.bench.ray_backend", exc_type=ImportError)
    with pytest.raises((OSError, ValueError)) as error:
        ray_backend.RayPool(address, 1, 1)
    assert str(error.value).startswith(message)
