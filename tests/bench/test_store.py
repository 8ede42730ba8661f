"""The results folder: whole runs or none, one writer, nothing lost, nothing mixed."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest

from sb3_ano.bench.experiments.tables import SCHEMAS, TableStream, read_stream, stream_file
from sb3_ano.bench.store import ResultsFolder, Store, checksum, open_store

SPECIFICATION = {"env_id": "A-v0", "algorithm": "ano", "settings": {"clip_range": 0.2}, "seed": 0, "total_timesteps": 100}


def write_tables(folder, episodes: int = 3) -> None:
    for name, schema in SCHEMAS.items():
        with TableStream(folder, name) as table:
            for row in range(episodes):
                table.add(dict.fromkeys(schema.names, row))
            table.finish()


def write_run(folder, run_id: str, episodes: int = 3, **changes) -> None:
    """A run as a worker leaves it."""
    write_tables(folder, episodes)
    (folder / "model.zip").write_bytes(b"model of " + run_id.encode())
    sums = {file.name: checksum(file) for file in folder.iterdir()}
    content = {"run_id": run_id, "suite": "s", **SPECIFICATION, **changes, "wall_seconds": 1.0, "checksum": sums}
    (folder / "run.json").write_text(json.dumps(content))


def publish(results: ResultsFolder, run_id: str, episodes: int = 3, **changes) -> None:
    write_run(results.begin(run_id), run_id, episodes, **changes)
    results.publish(run_id, 1)


def test_runs_and_tables_are_what_was_written(tmp_path):
    with ResultsFolder(tmp_path / "out") as results:
        publish(results, "b", 2, seed=1, settings={"clip_range": 0.1, "learning_rate": 0.001})
        publish(results, "a", 3)
        publish(results, "c", 0, algorithm="trpo", settings={"target_kl": 0.01})
    store = open_store(tmp_path / "out")
    runs = store.runs()
    assert list(runs["run_id"]) == ["b", "a", "c"]  # by algorithm, then settings
    assert runs["clip_range"].tolist()[:2] == [0.1, 0.2]
    assert np.isnan(runs["clip_range"][2])
    assert runs["settings"][0] == {"clip_range": 0.1, "learning_rate": 0.001}
    assert set(runs["attempts"]) == {1}
    episodes = store.table("episodes")
    expected = [
        pd.read_parquet(tmp_path / "out" / "runs" / name / "episodes.parquet").assign(run_id=name) for name in ("a", "b")
    ]
    pd.testing.assert_frame_equal(episodes, pd.concat(expected, ignore_index=True)[episodes.columns], check_dtype=False)
    assert list(episodes.columns) == ["run_id", *SCHEMAS["episodes"].names]
    assert store.table("evaluations", ["b"])["run_id"].tolist() == ["b", "b"]
    assert store.table("diagnostics", ["b", "a"])["run_id"].tolist() == ["b"] * 2 + ["a"] * 3
    assert store.table("episodes", []).empty
    with pytest.raises(ValueError, match="name='episode' is not a table; allowed are episodes, evaluations, diagnostics"):
        store.table("episode")
    with pytest.raises(ValueError, match="has no run 'd'"):
        store.table("episodes", ["a", "d"])


def test_an_empty_store_has_no_runs(tmp_path):
    ResultsFolder(tmp_path).close()
    assert open_store(tmp_path).runs().empty
    assert open_store(tmp_path).table("episodes").empty
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder of results"):
        open_store(tmp_path / "nowhere")


def test_a_run_is_finished_once_it_is_published(tmp_path):
    with ResultsFolder(tmp_path) as results:
        assert results.finished({"a": SPECIFICATION}) == set()
        write_run(results.begin("a"), "a")
        results.record_failure("a", ["an error"])
        assert results.finished({"a": SPECIFICATION}) == set()
        assert Store(tmp_path).runs().empty
        assert [failure["errors"] for failure in Store(tmp_path).failures()] == [["an error"]]
        results.publish("a", 2)
        assert results.finished({"a": SPECIFICATION, "b": SPECIFICATION}) == {"a"}
        assert Store(tmp_path).documents()[0]["attempts"] == 2
        assert Store(tmp_path).failures() == []
    assert {file.name for file in tmp_path.iterdir()} == {".lock", "results.json", "runs", "failed"}


def test_a_run_that_is_not_whole_is_not_published(tmp_path):
    with ResultsFolder(tmp_path) as results:
        folder = results.begin("a")
        write_run(folder, "a")
        (folder / "model.zip").write_bytes(b"half a mod")
        with pytest.raises(ValueError, match="unfinished/a is damaged: the checksum of model.zip does not match"):
            results.publish("a", 1)
        assert Store(tmp_path).runs().empty


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: (run / "episodes.parquet").write_bytes(b"PAR1"), "the checksum of episodes.parquet does not match"),
        (lambda run: (run / "model.zip").unlink(), "model.zip is missing"),
        (lambda run: (run / "run.json").unlink(), "run.json is missing or not whole"),
        (lambda run: (run / "run.json").write_text("{}"), "run.json is missing or not whole"),
        (lambda run: (run / "run.json").write_text("{"), "run.json is not a file of results"),
    ],
)
def test_a_damaged_run_is_named(damage, message, tmp_path):
    with ResultsFolder(tmp_path) as results:
        publish(results, "a")
        damage(tmp_path / "runs" / "a")
        with pytest.raises(ValueError, match=message):
            results.finished({"a": SPECIFICATION})


def test_a_damaged_table_is_named_when_it_is_read(tmp_path):
    with ResultsFolder(tmp_path) as results:
        publish(results, "a")
    (tmp_path / "runs" / "a" / "episodes.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="has a damaged episodes table"):
        open_store(tmp_path).table("episodes")


def test_results_of_other_settings_are_not_taken_for_those_asked_for(tmp_path):
    with ResultsFolder(tmp_path) as results:
        publish(results, "a")
        with pytest.raises(ValueError, match="made with other settings: total_timesteps was 100 and is 200 now; --out takes"):
            results.finished({"a": {**SPECIFICATION, "total_timesteps": 200}})


@pytest.mark.parametrize("content", ['{"format": 2}', "{}"])
def test_results_of_another_version_are_refused_and_left_alone(content, tmp_path):
    (tmp_path / "results.json").write_text(content)
    (tmp_path / "runs").mkdir()
    for open_it in (ResultsFolder, open_store):
        with pytest.raises(
            ValueError, match=r"has results of format (2|None); this version of sb3_ano reads and writes format 1"
        ):
            open_it(tmp_path)
    assert (tmp_path / "results.json").read_text() == content
    assert {file.name for file in tmp_path.iterdir()} == {"results.json", "runs"}


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    for open_it in (ResultsFolder, open_store):
        with pytest.raises(ValueError, match="holds other files and no results; take an empty or a new folder"):
            open_it(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_process_killed_at_its_start_leaves_a_folder_that_can_be_taken(tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / ".results.json.x3").touch()
    with ResultsFolder(tmp_path):
        assert json.loads((tmp_path / "results.json").read_text())["format"] == 1


@pytest.mark.skipif(os.name != "posix", reason="locks are POSIX's")
def test_one_process_writes_at_a_time_and_its_children_count(tmp_path):
    with ResultsFolder(tmp_path) as results:
        publish(results, "a")
        with pytest.raises(BlockingIOError, match="is in use: another process writes its results there now"):
            ResultsFolder(tmp_path, patience=0.0)
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[results.lock])
    with pytest.raises(BlockingIOError):
        ResultsFolder(tmp_path, patience=0.0)
    assert len(open_store(tmp_path).runs()) == 1  # reading needs no lock
    child.kill()
    child.communicate()
    ResultsFolder(tmp_path).close()


def test_what_was_flushed_survives_and_the_rest_does_not(tmp_path):
    table = TableStream(tmp_path, "episodes")
    for row in range(5):
        table.add({"timesteps": row, "wall_seconds": 0.5, "episode_return": float(row), "episode_length": 1})
        if row == 2:
            table.flush()
    table._file.close()
    assert read_stream(stream_file(tmp_path, "episodes"))["episode_return"].to_pylist() == [0.0, 1.0, 2.0]
    whole = stream_file(tmp_path, "episodes").read_bytes()
    stream_file(tmp_path, "episodes").write_bytes(whole[:-7])
    assert read_stream(stream_file(tmp_path, "episodes")).num_rows == 0


def test_values_that_are_missing_are_nan(tmp_path):
    with TableStream(tmp_path, "diagnostics") as table:
        table.add({"timesteps": 5, "wall_seconds": 1.0, "approx_kl": 0.25})
        table.finish()
    row = pd.read_parquet(tmp_path / "diagnostics.parquet").iloc[0]
    assert (row["timesteps"], row["approx_kl"]) == (5, 0.25)
    assert np.isnan(row["entropy_loss"])
    assert not stream_file(tmp_path, "diagnostics").exists()


def publish_forever(path) -> None:
    with ResultsFolder(path) as results:
        number = len(Store(path).run_ids())
        while True:
            publish(results, f"run{number:04}", 50)
            number += 1


def test_killed_while_it_publishes_the_store_has_whole_runs_only(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    ends = np.random.default_rng(0).uniform(0.0, 0.2, 2)
    for end in ends:
        before = len(Store(tmp_path).run_ids()) if (tmp_path / "results.json").exists() else 0
        process = spawn.Process(target=publish_forever, args=[tmp_path])
        process.start()
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("runs/*"))) < before + 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(end)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        with ResultsFolder(tmp_path) as results:
            names = Store(tmp_path).run_ids()
            assert len(names) >= before + 2
            assert results.finished(dict.fromkeys(names, SPECIFICATION)) == set(names)
        assert len(Store(tmp_path).table("episodes")) == 50 * len(names)
