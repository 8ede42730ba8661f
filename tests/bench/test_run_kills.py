"""Killed at any moment, on one machine or several: the store ends up as if nothing had happened."""

import io
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest
import torch

from sb3_ano.bench.experiments.tables import SCHEMAS
from sb3_ano.bench.store import open_store

pytestmark = pytest.mark.slow
KILLS = 20
# What a run tells of its circumstances.
CIRCUMSTANCES = {"started", "finished", "wall_seconds", "process_seconds", "attempts", "checksum", "commit"}


def command(out, *more: str) -> list[str]:
    plan = ["--suite", "classic", "--envs", "CartPole", "--algos", "ppo", "ano", "--seeds", "3", "--steps", "4096"]
    return [sys.executable, "-m", "sb3_ano.bench", "run", *plan, "--jobs", "2", "--out", str(out), *more]


def run(out, *more: str) -> None:
    finished = subprocess.run(command(out, *more), capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def parameters(file) -> dict[str, torch.Tensor]:
    with zipfile.ZipFile(file) as archive:
        return torch.load(io.BytesIO(archive.read("policy.pth")), weights_only=True)


def assert_same_results(folder, reference) -> None:
    """The same runs, rows and parameters; only times may differ."""
    found, expected = open_store(folder), open_store(reference)
    assert found.run_ids() == expected.run_ids()
    for ours, theirs in zip(found.documents(), expected.documents(), strict=True):
        differing = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
        assert differing <= CIRCUMSTANCES
    for name in SCHEMAS:
        tables = [store.table(name).drop(columns="wall_seconds") for store in (found, expected)]
        pd.testing.assert_frame_equal(*tables)
        assert not tables[0].empty
    for run_id in found.run_ids():
        ours, theirs = (parameters(store.path / "runs" / run_id / "model.zip") for store in (found, expected))
        assert all(torch.equal(ours[key], theirs[key]) for key in ours | theirs)


def trainings(of: str) -> dict[psutil.Process, str]:
    """Processes that train, whose command line has a text in it, and the names of their runs."""
    found = {}
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
        except psutil.Error:
            continue
        if "sb3_ano.bench.experiments.worker" in line and of in line[-1]:
            found[process] = Path(json.loads(line[-1])["folder"]).name
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The store of a plan that nothing has happened to, and the seconds that it took."""
    out = tmp_path_factory.mktemp("uninterrupted") / "out"
    start = time.monotonic()
    run(out)
    return out, time.monotonic() - start


def test_killed_at_twenty_random_moments(uninterrupted, tmp_path):
    reference, seconds = uninterrupted
    out, random = tmp_path / "out", np.random.default_rng(0)
    kills, while_training = 0, 0
    while kills < KILLS:
        process = subprocess.Popen(command(out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(timeout=float(random.uniform(0.0, 0.6 * seconds)))
        except subprocess.TimeoutExpired:
            while_training += bool(trainings(str(out)))
            process.send_signal(signal.SIGKILL)
            kills += 1
            process.wait()
        else:  # everything is there: take a run away, so that there is something to interrupt
            finished = sorted((out / "runs").iterdir())
            one = finished[int(random.integers(len(finished)))]
            os.rename(one, tmp_path / f"removed{kills}-{time.monotonic_ns()}")
    run(out)
    assert while_training >= KILLS // 3
    assert not trainings(str(out))
    assert_same_results(out, reference)
    assert not (out / "unfinished").exists()


def test_an_interrupt_ends_the_trainings_and_the_same_command_goes_on(uninterrupted, tmp_path):
    reference, _ = uninterrupted
    out = tmp_path / "out"
    process = subprocess.Popen(command(out), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not trainings(str(out)) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert process.returncode == 130
    assert error.splitlines()[-1] == "interrupted; the same command goes on from here"
    assert not trainings(str(out))
    run(out)
    assert_same_results(out, reference)


def test_a_worker_that_is_killed_is_replaced(uninterrupted, tmp_path):
    reference, _ = uninterrupted
    out = tmp_path / "out"
    process = subprocess.Popen(command(out), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not (found := trainings(str(out))) and time.monotonic() < deadline:
        time.sleep(0.1)
    victim, name = next(iter(found.items()))
    victim.kill()
    _, error = process.communicate()
    assert process.returncode == 0
    assert "its process was killed by SIGKILL; it is run again" in " ".join(error.split())
    attempts = open_store(out).runs().set_index("run_id")["attempts"]
    assert attempts[name] == 2
    assert attempts.sum() == len(attempts) + 1
    assert_same_results(out, reference)


@pytest.mark.filterwarnings("default")  # Ray's own
def test_a_cluster_of_two_nodes_loses_one(uninterrupted, tmp_path):
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    reference, _ = uninterrupted
    out = tmp_path / "out"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        lost = cluster.add_node(num_cpus=1)
        process = subprocess.Popen(
            command(out, "--backend", "ray", "--address", cluster.address),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        node = psutil.Process(lost.all_processes["raylet"][0].process.pid)
        deadline = time.monotonic() + 300
        interrupted: list[str] = []
        while not interrupted and time.monotonic() < deadline and process.poll() is None:
            interrupted = run_ids_under(node)
            time.sleep(0.1)
        assert interrupted
        assert len(interrupted) == 1
        moment = pd.Timestamp.now("UTC").floor("s")
        cluster.remove_node(lost, allow_graceful=False)
        _, error = process.communicate(timeout=600)
        assert process.returncode == 0, error
    finally:
        cluster.shutdown()
    assert_same_results(out, reference)
    started = open_store(out).runs().set_index("run_id")["started"]
    assert pd.Timestamp(started[interrupted[0]]) >= moment
    assert not (out / "failed").exists()


def run_ids_under(node: psutil.Process) -> list[str]:
    """Names of the runs that a node of the cluster is training."""
    found = []
    for process in node.children(recursive=True):
        try:
            line = process.cmdline()
        except psutil.Error:
            continue
        if "sb3_ano.bench.experiments.worker" in line:
            specification = json.loads(line[-1])["specification"]
            settings = ",".join(f"{name}={value}" for name, value in specification["settings"].items())
            found.append(f"{specification['env_id']}__{specification['algorithm']}__{settings}__seed{specification['seed']}")
    return found
