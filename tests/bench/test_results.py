"""Directories of results, and the execution of plans: complete runs or none, each damage in one line."""

import json
import os
import re
import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from unittest import mock

import pytest
import torch

from sb3_ano.bench import runner
from sb3_ano.bench.plan import Run
from sb3_ano.bench.pool import Pool, WorkerError, call
from sb3_ano.bench.results import Results, ResultsWriter
from sb3_ano.bench.runner import execute
from sb3_ano.bench.training import write_run
from tests.bench.common import runs, small_run, write_results

HEADER = '#{"t_start": 0.0}\nr,l,t,timesteps\n'


@pytest.fixture
def results(tmp_path):
    return write_results(tmp_path / "results", runs(["Hopper-v4"], ["ano"]))


DAMAGES = [
    (lambda run: os.truncate(run / "monitor.csv", 100), "the checksum of monitor.csv does not match"),
    (lambda run: (run / "progress.csv").unlink(), "'progress.csv' is missing"),
    (lambda run: (run / "run.json").unlink(), "No such file or directory"),
    (lambda run: (run / "run.json").write_text("[1]"), "holds list, not a JSON object"),
    (lambda run: (run / "run.json").write_text("[" * 100_000), "is not a JSON file"),
    (lambda run: (run / "run.json").write_text('{"a": "' + "x" * 5_000_000 + '"}'), "is larger than 4000000 bytes"),
    (lambda run: ((run / "run.json").unlink(), os.mkfifo(run / "run.json")), "is not a regular file"),
    (lambda run: ((run / "run.json").unlink(), (run / "run.json").symlink_to("/dev/zero")), "is not a regular file"),
    ({"seed": "0"}, "run.json has seed='0': Input should be a valid integer"),
    ({"format": 1}, "format 1; this version of sb3_ano reads format 2"),
    ({"sha256": {"../../secret": "0"}}, "'../../secret' is not a file of a run"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_damaged_run_is_named(results, damage, message):
    run = Results(results).runs()[0]
    if callable(damage):
        damage(run.path)
    else:
        (run.path / "run.json").write_text(json.dumps(run.document | damage))
    with pytest.raises(ValueError, match="1 damaged runs; remove their directories to run them again") as error:
        Results(results).runs()
    assert [part for part in (message, run.path.name) if part not in str(error.value)] == []


def test_all_damaged_runs_are_named_at_once_and_so_are_copies(results):
    first, second, third = (run.path for run in Results(results).runs())
    for run in (first, second):
        (run / "evaluations.npz").unlink()
    shutil.copytree(third, third.with_name("copy"))
    for names, damaged in ((None, [first.name, second.name, "copy"]), ([first.name, third.name, "other"], [first.name])):
        with pytest.raises(ValueError, match=f"{len(damaged)} damaged runs") as error:
            Results(results).runs(names)
        assert all(name in str(error.value) for name in damaged)


def trainings(*outcomes):
    """A pool whose trainings end as the outcomes of their seed say."""

    def train(target, request):
        run, directory = Run(**request["run"]), Path(request["directory"])
        if isinstance(outcome := outcomes[run.seed], Exception):
            raise outcome
        (directory / "monitor.csv").write_text(HEADER)
        write_run(run, directory, {})
        if outcome == "damaged":
            (directory / "monitor.csv").write_text("")
        if outcome == "remote":  # the files are on another machine, and Ray sends them
            return {file.name: (file.read_bytes(), file.unlink())[0] for file in [*directory.iterdir()]}
        return None

    return mock.Mock(submit=lambda *request: ThreadPoolExecutor(1).submit(train, *request))


SMALL_RUNS = [small_run("ano", seed=seed, steps=1000) for seed in range(5)]


def test_failed_runs_are_recorded_and_the_others_kept(tmp_path, capsys):
    crash = WorkerError("ValueError: no", "Traceback\nValueError: no")
    lost = OSError("The node died\nand left a long story")  # as Ray says it
    executor = trainings("whole", crash, "damaged", lost, "remote")
    with ResultsWriter(tmp_path) as results:
        failures = execute(SMALL_RUNS, executor, results, {})
        executor.close.assert_called()
        assert set(failures) == {run.name for run in SMALL_RUNS[1:4]}
        assert {run.document["seed"] for run in results.runs()} == {0, 4}
        failed = tmp_path / "failed" / f"{SMALL_RUNS[1].name}.json"
        assert json.loads(failed.read_text())["errors"] == ["Traceback\nValueError: no"]
        assert "OSError: The node died\n" in capsys.readouterr().err
        assert not execute(SMALL_RUNS[1:4], trainings(*["whole"] * 5), results, {})
        assert len(results.names()) == 5
    assert not failed.exists()


def test_a_directory_that_cannot_be_written_stops_everything(tmp_path):
    executor, (good, bad, *_) = trainings(*["whole"] * 5), SMALL_RUNS
    (tmp_path / "runs" / bad.name / "file").mkdir(parents=True)
    with ResultsWriter(tmp_path) as results:
        execute([good], trainings("whole"), results, {})
        with pytest.raises(OSError, match="cannot be written: .*; the same command resumes"):
            execute(SMALL_RUNS[1:], executor, results, {})
        executor.close.assert_called()
        assert [run.document["seed"] for run in results.runs({good.name})] == [0]


# With 10 million steps, half an hour passed without a sign.
def test_progress_is_that_of_the_episodes_of_running_and_resumed_trainings(tmp_path, capsys, monkeypatch):
    with ResultsWriter(tmp_path) as results:
        first, second = (results.begin(run.name) / "monitor.csv" for run in SMALL_RUNS[:2])
        first.write_text(HEADER + 20 * "1.0,10,0.1,10\r\n" + "-1.0,200,1.0,200\r\n")
        second.write_text(HEADER + "1.0,300,1.0,300\r\n")
        # A run that goes back to its checkpoint, a row that is being written, and a rollout that ends after the training.
        changes = [(second, ""), (second, "1.5,500,2.0,500\r\n1.5,9,2.0,5"), (first, "1.0,824,9.0,1024\r\n")]

        def look(futures, *settings):
            if changes:
                file, rows = changes.pop(0)
                file.write_text(HEADER + rows)
            else:
                next(iter(futures)).set_exception(WorkerError("no"))
            return wait(futures, 0.0)

        monkeypatch.setattr(runner, "wait", look)
        monkeypatch.setattr(runner, "_IN_FILE", 0.0)
        assert len(execute(SMALL_RUNS[:2], mock.Mock(**{"submit.side_effect": [Future(), Future()]}), results, {})) == 2
    err = capsys.readouterr().err
    assert not re.search(r"-\d", err)  # a negative rate, or time left
    shown = re.findall(r"(\d+)%[^\r]*?(\d) of 2 runs", err)
    assert list(dict.fromkeys(shown)) == [("10", "0"), ("35", "0"), ("75", "0"), ("75", "1"), ("100", "2")]


def add(request):
    """Print, and return a sum."""
    print("libraries print")
    return {"sum": request["a"] + request["b"], "threads": [torch.get_num_threads(), int(os.environ["OMP_NUM_THREADS"])]}


def fail(request):
    """Raise an error of two lines."""
    raise OSError(28, "No space left\non device")


def test_results_and_errors_of_processes_come_back():
    pool = Pool(2, threads=3)
    added, failed = (pool.submit(f"tests.bench.test_results:{name}", {"a": 2, "b": 3}) for name in ("add", "fail"))
    assert added.result() == {"sum": 5, "threads": [3, 3]}
    with pytest.raises(WorkerError, match=r"^OSError: \[Errno 28\] No space left on device$") as error:
        failed.result()
    assert "Traceback" in error.value.details
    pool.close()


def measure(request):
    """Return the length of a text."""
    return len(request["text"])


def test_a_request_can_be_longer_than_an_argument_of_a_process(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    request = {"text": "a" * 3_000_000}
    assert call("tests.bench.test_results:measure", request) == 3_000_000
    assert not list(tmp_path.iterdir())


def test_a_task_of_ray_has_processors_a_gpu_and_the_version_of_the_driver(monkeypatch):
    ray_backend = pytest.importorskip("sb3_ano.bench.ray_backend", exc_type=ImportError)
    ray = mock.MagicMock()
    monkeypatch.setattr(ray_backend, "ray", ray)
    pool = ray_backend.RayPool(None, 2, 3)
    for request in ({}, {"device": "cpu"}, {"device": "cuda:0"}):
        pool.submit("module:function", request)
    asked = [(call.kwargs["num_cpus"], call.kwargs["num_gpus"]) for call in ray.remote.call_args_list]
    assert asked == [(3, 0), (3, 0), (3, 1)]
    with pytest.raises(WorkerError, match="install the same version on all nodes"):
        ray_backend._call("module:function", {}, 1, {"sb3-ano": "0"})
