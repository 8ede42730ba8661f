"""Ray on one machine: files, progress and errors come back."""

import time

import pytest

from sb3_ano.bench.experiments.plan import Run, make_plan
from sb3_ano.bench.experiments.process import RunError
from sb3_ano.bench.experiments.suites import Evaluation, Suite, Task
from sb3_ano.bench.store import ResultsFolder

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # Ray's own warnings
pytest.importorskip("ray")


def run_of(env_id: str) -> Run:
    task = Task(env_id, 512, {"n_envs": 2, "n_steps": 64, "batch_size": 64, "n_epochs": 1})
    return make_plan(Suite("small", (task,), evaluation=Evaluation(1, 1)), ["ano"], 1)[0]


def test_files_progress_and_errors_come_back(tmp_path):
    from sb3_ano.bench.experiments.ray_backend import RayBackend

    reported: list[tuple[str, int]] = []
    backend = RayBackend(None, 1, 1, "cpu", lambda run, done: reported.append((run.run_id, done)))
    try:
        good, bad = run_of("CartPole-v1"), run_of("CartPole-v9")
        waiting = {run.env_id: backend.submit(run) for run in (bad, good)}
        with pytest.raises(RunError, match="ValueError: env_id='CartPole-v9' is unknown") as error:
            waiting[bad.env_id].result(timeout=300)
        assert "Traceback" in error.value.details
        files = waiting[good.env_id].result(timeout=300)
        deadline = time.monotonic() + 30
        while len(reported) < 4 and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        backend.close()
    assert reported == [(good.run_id, done) for done in (128, 256, 384, 512)]
    with ResultsFolder(tmp_path) as results:
        results.receive(good.run_id, files)
        results.publish(good.run_id, 1)
        assert results.finished({good.run_id: good.specification()}) == {good.run_id}


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "--address 127.0.0.1:1: no Ray cluster was found: [Errno 111] Connection refused"),
        ("auto", "--address auto: no Ray cluster was found: "),
        ("ray://head:10001", "--address ray://head:10001 is not allowed; allowed are auto, and HOST:PORT of a cluster's head"),
        ("head", "--address head is not allowed; allowed are auto, and HOST:PORT of a cluster's head"),
    ],
)
def test_no_cluster_at_the_address(address, message, capsys, tmp_path):
    from sb3_ano.bench.cli import main

    arguments = ["--suite", "classic", "--algos", "ano", "--backend", "ray", "--out", str(tmp_path / "out")]
    assert main(["run", *arguments, "--address", address]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {message}")
