"""Killed at any moment, on one machine or several: the results end up as if nothing had happened."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from stable_baselines3 import PPO

from sb3_ano import ANO
from sb3_ano.bench.pool import WorkerError
from sb3_ano.bench.results import Results

pytestmark = pytest.mark.slow
KILLS = 8


def command(out, *more: str) -> list[str]:
    plan = ["--suite", "classic", "--envs", "CartPole", "--algos", "ppo", "ano", "--seeds", "2", "--steps", "4096"]
    return [sys.executable, "-m", "sb3_ano.bench", "run", *plan, "--jobs", "2", "--out", str(out), *more]


def run(out, *more: str) -> None:
    finished = subprocess.run(command(out, *more), capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


# What a run tells of its circumstances.
CIRCUMSTANCES = {"started", "finished", "seconds", "attempts", "resumed_at", "sha256", "commit"}


def assert_same_results(out, reference) -> None:
    """The same runs, rows and parameters; only times may differ."""
    found, expected = Results(out), Results(reference)
    assert found.names() == expected.names()
    for ours, theirs in zip(found.runs(), expected.runs(), strict=True):
        assert not {key for key in theirs.document if ours.document[key] != theirs.document[key]} - CIRCUMSTANCES
        pd.testing.assert_frame_equal(ours.evaluations(), theirs.evaluations())
        pd.testing.assert_frame_equal(ours.episodes().drop(columns="t"), theirs.episodes().drop(columns="t"))
        pd.testing.assert_frame_equal(
            *(part.updates().drop(columns="time/seconds") for part in (ours, theirs)), check_like=True
        )
        kind = ANO if theirs.document["algorithm"] == "ano" else PPO
        first, second = (kind.load(part.path / "model.zip").policy.state_dict() for part in (ours, theirs))
        assert all(torch.equal(first[name], second[name]) for name in first | second)


def trainings(of: str) -> dict[psutil.Process, str]:
    """Processes that train below a directory, and the names of their runs."""
    lines = {process: line_of(process) for process in psutil.process_iter()}
    return {
        process: Path(json.loads(line[-1])["directory"]).name
        for process, line in lines.items()
        if "sb3_ano.bench.pool" in line and of in line[-1]
    }


def line_of(process: psutil.Process) -> list[str]:
    """The command line of a process, which may just have ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def start(out, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command(out, *more), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def wait_for_trainings(out, process) -> dict[psutil.Process, str]:
    """The trainings of a command, as soon as there are some."""
    while not (found := trainings(str(out))):
        assert process.poll() is None
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The results of a plan that nothing has happened to, and the seconds that it took."""
    out = tmp_path_factory.mktemp("uninterrupted") / "out"
    start = time.monotonic()
    run(out)
    return out, time.monotonic() - start


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
        else:  # everything is there: take a run away, so that there is something to interrupt
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


def test_a_worker_that_is_killed_is_replaced_and_a_second_command_is_refused(uninterrupted, tmp_path):
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
    assert attempts[name] == 2
    assert sum(attempts.values()) == len(attempts) + 1
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
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    out = tmp_path / "out"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        lost = cluster.add_node(num_cpus=1)
        options = ["--backend", "ray", "--address", cluster.address]
        process = start(out, *options)
        node = psutil.Process(lost.all_processes["raylet"][0].process.pid)
        while not any("sb3_ano.bench.pool" in part for child in node.children(recursive=True) for part in line_of(child)):
            assert process.poll() is None
            time.sleep(0.1)
        cluster.remove_node(lost, allow_graceful=False)
        _, error = process.communicate(timeout=600)
        assert process.returncode == 0, error
    finally:
        cluster.shutdown()
    assert_same_results(out, uninterrupted[0])
    assert not (out / "failed").exists()


@pytest.mark.filterwarnings("default")
def test_errors_of_trainings_come_back_from_ray(tmp_path):
    pytest.importorskip("ray")
    from sb3_ano.bench.ray_backend import RayPool
    from tests.bench.common import small_run

    pool = RayPool(None, 1, 1)
    try:
        requests = [
            {"run": dataclasses.asdict(small_run("ano", env)), "models": False} for env in ("CartPole-v9", "CartPole-v1")
        ]
        bad, good = (pool.submit("sb3_ano.bench.training:train_request", request, print) for request in requests)
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
        ("ray://head:10001", "--address ray://head:10001 is not allowed; allowed are auto, and HOST:PORT of a cluster's head"),
        ("head", "--address head is not allowed; allowed are auto, and HOST:PORT of a cluster's head"),
    ],
)
def test_no_cluster_at_the_address(address, message, tmp_path):
    pytest.importorskip("ray")
    from sb3_ano.bench.ray_backend import RayPool

    with pytest.raises((OSError, ValueError)) as error:
        RayPool(address, 1, 1)
    assert str(error.value).startswith(message)
