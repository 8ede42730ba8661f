"""Directories of results, and the execution of plans: complete runs or none, each damage in one line."""

import errno
import json
import os
from concurrent.futures import Future

import numpy as np
import pytest

from sb3_ano.bench.pool import WorkerError
from sb3_ano.bench.results import Results, ResultsWriter, read_run
from sb3_ano.bench.runner import LocalBackend, check_runs, execute
from sb3_ano.bench.training import write_run
from tests.bench.common import small_run, write_results

RUNS = [{"env_id": "Hopper-v4", "algorithm": "ano", "seed": seed, "final": 100.0 * seed} for seed in (0, 1, 2)]


@pytest.fixture
def results(tmp_path):
    return write_results(tmp_path / "results", RUNS)


def damage_flip(run):
    content = bytearray((run / "monitor.csv").read_bytes())
    content[40] ^= 1
    (run / "monitor.csv").write_bytes(content)


def damage_fifo(run):
    (run / "run.json").unlink()
    os.mkfifo(run / "run.json")


def damage_device(run):
    (run / "run.json").unlink()
    (run / "run.json").symlink_to("/dev/zero")


def edit(run, **changes):
    document = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(document | changes))


# Review bench B12 and safety H8, its table of unclear errors included.
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_flip, "the checksum of monitor.csv does not match"),
        (lambda run: (run / "progress.csv").unlink(), "'progress.csv' is missing"),
        (lambda run: (run / "run.json").unlink(), "run.json is missing"),
        (lambda run: (run / "run.json").write_text(""), "is not a JSON file"),
        (lambda run: (run / "run.json").write_text("[1]"), "holds list, not a JSON object"),
        (lambda run: (run / "run.json").write_text("[" * 100_000), "is not a JSON file"),
        (lambda run: (run / "run.json").write_text('{"a": "' + "x" * 5_000_000 + '"}'), "is larger than 4000000 bytes"),
        (damage_fifo, "is not a regular file"),
        (damage_device, "is not a regular file"),
        (lambda run: edit(run, seed="0"), "run.json has seed='0', not a value of type int"),
        (lambda run: edit(run, env_id=5), "run.json has env_id=5, not a value of type str"),
        (lambda run: edit(run, hyperparameters=[]), "run.json has hyperparameters=[], not a value of type dict"),
        (lambda run: edit(run, evaluation=[]), "run.json has evaluation=[], not a value of type dict"),
        (lambda run: edit(run, format=1), "format 1; this version of sb3_ano reads format 2"),
        (lambda run: edit(run, sha256={"../../secret": "0"}), "'../../secret' is not a file of a run"),
    ],
)
def test_a_damaged_run_is_named(results, damage, message):
    first = Results(results).runs()[0]
    damage(first.path)
    with pytest.raises(ValueError, match="1 damaged runs; remove their directories to run them again") as error:
        Results(results).runs()
    assert message in str(error.value)
    assert first.path.name in str(error.value)


def test_all_damaged_runs_are_named_at_once_and_so_are_runs_that_are_there_twice(results):
    first, second, third = (run.path for run in Results(results).runs())
    for run in (first, second):
        (run / "evaluations.npz").unlink()
    os.rename(third, third.with_name("copy"))
    write_results(results, RUNS[2:])
    with pytest.raises(ValueError, match="3 damaged runs") as error:
        Results(results).runs()
    assert all(run.name in str(error.value) for run in (first, second, third))
    with ResultsWriter(results) as writer, pytest.raises(ValueError, match="2 damaged runs"):
        writer.finished([first.name, second.name])


def test_one_process_writes_at_a_time_and_other_directories_are_rejected(results, tmp_path, monkeypatch):
    monkeypatch.setattr("sb3_ano._io.DirectoryLock.__init__.__defaults__", (0.0,))
    with ResultsWriter(results), pytest.raises(BlockingIOError, match="is in use: another process writes to it now"):
        ResultsWriter(results)
    with ResultsWriter(results):
        pass
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "results.json").write_text('{"format": 1}')
    with pytest.raises(ValueError, match="holds other files and no results"):
        ResultsWriter(tmp_path / "other")
    with pytest.raises(ValueError, match="holds results of an earlier format"):
        Results(tmp_path / "old")
    with pytest.raises(FileNotFoundError, match="holds no results; 'python -m sb3_ano.bench run --out"):
        Results(tmp_path / "none")


def test_rows_of_a_run(results):
    run = Results(results).runs()[1]
    assert run.evaluations()["mean"].iloc[-1] == pytest.approx(100.0 * run.document["seed"])
    assert run.evaluations()["episodes"].unique().tolist() == [3]
    assert run.evaluations()["std"].iloc[0] == pytest.approx(np.std([-1, 0, 1]))
    assert list(run.episodes()) == ["r", "l", "t", "timesteps"]
    assert run.has("progress.csv")
    assert not run.has("model.zip")


class Trainings:
    """A backend whose trainings end as the outcomes of their seed say, attempt by attempt."""

    def __init__(self, results, outcomes):
        self.results, self.outcomes, self.submitted, self.closed = results, outcomes, [], False

    def submit(self, run, resume, report):
        self.submitted.append((run.seed, resume))
        future, outcome = Future(), self.outcomes[run.seed].pop(0)
        if isinstance(outcome, WorkerError):
            future.set_exception(outcome)
            return future
        directory = self.results.begin(run.name)
        (directory / "monitor.csv").write_text('#{"t_start": 0}\nr,l,t,timesteps\n')
        report(run.total_timesteps)
        if outcome == "whole":
            write_run(run, directory, {})
        future.set_result(None)
        return future

    def close(self):
        self.closed = True


def test_failed_runs_are_tried_twice_and_recorded(tmp_path):
    runs = [small_run("ano", seed=seed) for seed in range(4)]
    crash, killed = WorkerError("ValueError: no", "Traceback\nValueError: no"), WorkerError("killed", killed=True)
    with ResultsWriter(tmp_path) as results:
        # A run that was killed resumes; one that failed, or whose files are damaged, restarts.
        backend = Trainings(results, {0: [killed, "whole"], 1: ["whole"], 2: [crash, crash], 3: ["damaged", "whole"]})
        failures = execute(runs, backend, results)
    assert backend.closed
    assert backend.submitted[:4] == [(0, True), (1, True), (2, True), (3, True)]
    assert set(backend.submitted[4:]) == {(0, True), (2, False), (3, False)}
    (failed,) = Results(tmp_path).failures()
    assert list(failures) == [failed["name"]] == [runs[2].name]
    assert failed["errors"] == ["Traceback\nValueError: no"] * 2
    attempts = {run.document["seed"]: run.document["attempts"] for run in Results(tmp_path).runs()}
    assert attempts == {0: 2, 1: 1, 3: 2}


def test_a_full_disk_stops_everything_with_one_line(tmp_path):
    runs = [small_run("ano", seed=seed) for seed in range(3)]
    full = WorkerError("OSError: [Errno 28] No space left on device", number=errno.ENOSPC)
    with ResultsWriter(tmp_path) as results:
        backend = Trainings(results, {0: ["whole"], 1: [full], 2: ["whole"]})
        with pytest.raises(OSError, match="cannot be written: .*No space left on device; finished runs are kept"):
            execute(runs, backend, results)
        assert backend.closed


def test_a_training_in_a_process_of_its_own(tmp_path):
    run = small_run("ano", steps=128)
    with ResultsWriter(tmp_path) as results:
        backend = LocalBackend(results, 1, 1, {"models": False})
        assert execute([run], backend, results) == {}
        assert results.finished([run.name, "another"]) == {run.name}
    assert read_run(tmp_path / "runs" / run.name).document["attempts"] == 1
    assert not (tmp_path / "unfinished").exists()
    assert not (tmp_path / "runs" / run.name / "model.zip").exists()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (small_run("ano", "Pendulum-v7"), "Pendulum-v7 cannot be made: .*did you mean 'Pendulum-v1'"),
        (small_run("ano", imports=["no_such_module"]), "Pendulum-v1 cannot be made: No module named 'no_such_module'"),
        (small_run("ano", hyperparameters={"clip_range": "wide"}), "ano cannot be trained on Pendulum-v1: .*wide"),
        (small_run("ano:shaping=anno"), "ano:shaping=anno cannot be trained on Pendulum-v1: .*anno"),
    ],
)
def test_what_cannot_be_made_is_named_before_anything_is_trained(run, message):
    check_runs([small_run("ano")])
    with pytest.raises(ValueError, match=message):
        check_runs([small_run("ano"), run])
    if "cannot be made" in message:  # a cluster may have what this machine lacks
        check_runs([run], need_envs=False)
