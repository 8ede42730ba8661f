"""Directories of results, and the execution of plans: complete runs or none, each damage in one line."""

import errno
import io
import json
import os
from concurrent.futures import Future
from pathlib import Path

import pytest
from rich.console import Console

from sb3_ano.bench.plan import Run
from sb3_ano.bench.pool import Pool, WorkerError
from sb3_ano.bench.results import Results, ResultsWriter
from sb3_ano.bench.runner import check_runs, execute
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
        (lambda run: ((run / "run.json").unlink(), os.mkfifo(run / "run.json")), "is not a regular file"),
        (lambda run: ((run / "run.json").unlink(), (run / "run.json").symlink_to("/dev/zero")), "is not a regular file"),
        ({"seed": "0"}, "run.json has seed='0', not a value of type int"),
        ({"env_id": 5}, "run.json has env_id=5, not a value of type str"),
        ({"hyperparameters": []}, "run.json has hyperparameters=[], not a value of type dict"),
        ({"format": 1}, "format 1; this version of sb3_ano reads format 2"),
        ({"sha256": {"../../secret": "0"}}, "'../../secret' is not a file of a run"),
    ],
)
def test_a_damaged_run_is_named(results, damage, message):
    path = Results(results).runs()[0].path
    if callable(damage):
        damage(path)
    else:
        (path / "run.json").write_text(json.dumps(json.loads((path / "run.json").read_text()) | damage))
    with pytest.raises(ValueError, match="1 damaged runs; remove their directories to run them again") as error:
        Results(results).runs()
    assert message in str(error.value)
    assert path.name in str(error.value)


def test_all_damaged_runs_are_named_at_once_and_so_are_runs_that_are_there_twice(results):
    first, second, third = (run.path for run in Results(results).runs())
    for run in (first, second):
        (run / "evaluations.npz").unlink()
    os.rename(third, third.with_name("copy"))
    write_results(results, RUNS[2:])
    for names, count, damaged in ((None, 3, (first, second, third)), ([first.name, second.name], 2, (first, second))):
        with pytest.raises(ValueError, match=f"{count} damaged runs") as error:
            Results(results).runs(names)
        assert all(run.name in str(error.value) for run in damaged)


@pytest.mark.parametrize(
    ("opened", "file", "message"),
    [
        (ResultsWriter, "thesis.tex", "holds other files and no results"),
        (Results, "results.json", "holds results of an earlier format"),
        (Results, ".hidden", "holds no results; 'sb3-ano bench run --out"),
    ],
)
def test_directories_without_results_are_rejected(opened, file, message, tmp_path):
    (tmp_path / file).touch()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        opened(tmp_path)


def test_one_process_writes_at_a_time(results, monkeypatch):
    monkeypatch.setattr("sb3_ano._io.DirectoryLock.__init__.__defaults__", (0.0,))
    with ResultsWriter(results), pytest.raises(BlockingIOError, match="is in use: another process writes to it now"):
        ResultsWriter(results)
    with ResultsWriter(results):
        pass


class Trainings:
    """A pool whose trainings end as the outcomes of their seed say, attempt by attempt."""

    def __init__(self, outcomes):
        self.outcomes, self.submitted, self.closed = outcomes, [], False

    def submit(self, target, request, report):
        run, directory = Run(**request["run"]), Path(request["directory"])
        self.submitted.append((run.seed, (directory / "checkpoint").exists()))
        future, outcome = Future(), self.outcomes[run.seed].pop(0)
        (directory / "checkpoint").touch()
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
            return future
        (directory / "checkpoint").unlink()
        (directory / "monitor.csv").write_text('#{"t_start": 0}\nr,l,t,timesteps\n')
        report(run.total_timesteps)
        if outcome == "whole":
            write_run(run, directory, {})
        future.set_result(None)
        return future

    def close(self):
        self.closed = True


def test_failed_runs_are_tried_twice_and_recorded(tmp_path):
    runs = [small_run("ano", seed=seed) for seed in range(5)]
    crash, killed = WorkerError("ValueError: no", "Traceback\nValueError: no"), WorkerError("killed", killed=True)
    lost = RuntimeError("The node died\nand left a long story")  # as Ray says it
    # A run that was killed resumes; one that failed, or whose files are damaged, restarts.
    outcomes = {0: [killed, "whole"], 1: ["whole"], 2: [crash, crash], 3: ["damaged", "whole"], 4: [lost, "whole"]}
    executor, console = Trainings(outcomes), Console(file=io.StringIO(), width=200)
    with ResultsWriter(tmp_path) as results:
        failures = execute(runs, executor, results, {}, console)
    assert executor.closed
    assert executor.submitted[:5] == [(seed, False) for seed in range(5)]
    assert set(executor.submitted[5:]) == {(0, True), (2, False), (3, False), (4, False)}
    assert "RuntimeError: The node died; it is run again" in console.file.getvalue()
    (failed,) = Results(tmp_path).failures()
    assert list(failures) == [failed["name"]] == [runs[2].name]
    assert failed["errors"] == ["Traceback\nValueError: no"] * 2
    attempts = {run.document["seed"]: run.document["attempts"] for run in Results(tmp_path).runs()}
    assert attempts == {0: 2, 1: 1, 3: 2, 4: 2}


def test_a_full_disk_stops_everything_with_one_line(tmp_path):
    full = WorkerError("OSError: [Errno 28] No space left on device", number=errno.ENOSPC)
    executor = Trainings({0: ["whole"], 1: [full], 2: ["whole"]})
    with ResultsWriter(tmp_path) as results:
        with pytest.raises(OSError, match="cannot be written: .*No space left on device; finished runs are kept"):
            execute([small_run("ano", seed=seed) for seed in range(3)], executor, results, {})
        assert executor.closed


def test_a_training_in_a_separate_process(tmp_path):
    run = small_run("ano", steps=128)
    with ResultsWriter(tmp_path) as results:
        assert execute([run], Pool(1, 1, results.held), results, {"models": False}) == {}
        (made,) = results.runs([run.name, "another"])
    assert (made.path.name, made.document["attempts"]) == (run.name, 1)
    assert not (tmp_path / "unfinished").exists()
    assert not (made.path / "model.zip").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"env_id": "Pendulum-v7"}, "Pendulum-v7 cannot be made: .*did you mean 'Pendulum-v1'"),
        ({"imports": ["no_such_module"]}, "Pendulum-v1 cannot be made: No module named 'no_such_module'"),
        ({"hyperparameters": {"clip_range": "wide"}}, "ano cannot be trained on Pendulum-v1: .*wide"),
        ({"hyperparameters": {"clip_range": -0.1}}, "clip_range=-0.1 is not allowed"),
        ({"hyperparameters": {"policy_kwargs": "dict(activation_fn=nn.Tahn)"}}, "nn.Tahn.* cannot be evaluated"),
        ({"hyperparameters": {"policy_kwargs": "__import__('os')"}}, "cannot be evaluated"),
        ({"grid": ["shaping=anno"]}, "ano cannot be trained on Pendulum-v1: .*anno"),
    ],
)
def test_what_cannot_be_made_is_named_before_anything_is_trained(settings, message):
    run, good = small_run("ano", **settings), small_run("ano")
    check_runs([good])
    for runs in ([good, run], [run, good]):
        with pytest.raises(ValueError, match=message):
            check_runs(runs)
    if "cannot be made" in message:  # a cluster may have what this machine lacks
        check_runs([run], need_envs=False)
