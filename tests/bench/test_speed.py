"""How contenders are measured, with processes that only pretend to train."""

import json
import subprocess
import sys
from typing import ClassVar

import pytest

from sb3_ano.bench import speed
from sb3_ano.bench.cases import ANO_COLD, ANO_COMPILED, ANO_WARM, ENV_ANO, SB3, SBX, Case
from sb3_ano.bench.cli import main
from sb3_ano.bench.processes import Threads, WorkerError
from sb3_ano.bench.progress import Reporter
from sb3_ano.bench.speed import CaseFile, Interpreters, Settings, measure_case, thread_candidates

CASE = Case("tiny", "A tiny task", "CartPole-v1", "CartPole-v1", (SB3, SBX, ANO_COMPILED, ENV_ANO), n_envs=4)
WHOLE = Case("whole", "A whole run", "CartPole-v1", "CartPole-v1", (SB3, ANO_COLD, ANO_WARM), total_steps=1000)
#: Seconds of an iteration of 100 steps, by library and threads of the network
SECONDS = {"sb3": {1: 1.0, 2: 1.5}, "ano": {1: 0.5, 2: 0.25}, "sbx": {1: 1.0, 2: 1.0}}


class FakeWorker:
    """Keeps a diary of what all workers were asked for."""

    diary: ClassVar[list] = []
    failing: ClassVar[set] = set()

    def __init__(self, spec, python, environment=None):
        self.name = spec["contender"]["name"]
        self.seconds = SECONDS[spec["contender"]["library"]][spec["threads"]["torch"]]
        self.environment = environment
        self.description = {"rss_bytes": 1, "versions": {"torch": "2"}}
        self.open = True
        self.diary.append((self.name, "start", environment))

    def ask(self, do, iterations=1, parts=True, steps=100):
        if self.name in self.failing:
            raise WorkerError("ValueError: no such thing")
        self.diary.append((self.name, do, iterations))
        if do == "build":
            return {"device": "cpu", "steps_per_iteration": 100}
        if do == "whole":
            return {"seconds": self.seconds * steps / 100, "steps": steps, "rss_bytes": 5}
        reply = {"seconds": self.seconds * iterations, "steps": 100 * iterations, "rss_bytes": 7, "children_rss_bytes": 0}
        return reply | ({"env": 0.0, "forward": 0.0, "update": 0.0, "collect": 0.0} if do == "profile" else {})

    def close(self):
        self.open = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@pytest.fixture(autouse=True)
def worker(monkeypatch):
    monkeypatch.setattr(speed, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "diary", [])
    monkeypatch.setattr(FakeWorker, "failing", set())
    monkeypatch.setattr(speed, "cores", lambda: 2)
    return FakeWorker


def measure(folder, case=CASE, settings=None, names=None, redo=None):
    settings = settings or Settings(pairs=3, block_seconds=2.0)
    contenders = [contender for contender in case.contenders if names is None or contender.name in names]
    file = CaseFile(folder, case, settings, "the command", redo)
    failures = measure_case(case, contenders, settings, file, Interpreters(), Reporter())
    return json.loads(file.path.read_text()), failures


def test_threads_that_are_tried():
    by_id = Case("", "", "", "", (SB3,))
    assert thread_candidates(by_id, SB3, None) == [Threads(1, 1), Threads(2, 1)]
    assert thread_candidates(CASE, SB3, None) == [Threads(1, 1), Threads(2, 1)]
    every = [Threads(1, 1), Threads(1, 2), Threads(2, 1), Threads(2, 2)]
    assert thread_candidates(CASE, ANO_COMPILED, None) == every
    assert thread_candidates(CASE, ENV_ANO, None) == [Threads(1, 1), Threads(1, 2)]
    assert thread_candidates(CASE, ANO_COMPILED, 3) == [Threads(3, 3)]


def test_every_contender_has_its_best_threads(tmp_path):
    content, failures = measure(tmp_path)
    assert failures == []
    assert content["reference"]["threads"] == {"torch": 1, "envs": 1}
    ours = content["contenders"]["ano-compiled"]
    assert ours["threads"]["torch"] == 2
    assert [round(tried["steps_per_second"]) for tried in ours["calibration"]] == [200, 200, 400, 400]
    assert ours["memory"] == {"after_imports_bytes": 1, "peak_bytes": 7, "largest_child_bytes": 0, "iterations": 2}


def test_blocks_alternate_and_have_the_length_asked_for(tmp_path, worker):
    content, _ = measure(tmp_path, names={"ano-compiled"})
    pairs = content["contenders"]["ano-compiled"]["pairs"]
    assert [pair["first"] for pair in pairs] == ["reference", "contender", "reference"]
    assert all(pair["reference"]["seconds"] == pair["contender"]["seconds"] == 2.0 for pair in pairs)
    runs = [name for name, do, iterations in worker.diary if (do, iterations) in {("run", 2), ("run", 8)}]
    assert runs[-6:] == ["sb3", "ano-compiled", "ano-compiled", "sb3", "sb3", "ano-compiled"]
    assert [row["ratio"] for row in content["summary"]] == [None, [4.0, 4.0, 4.0]]
    assert content["summary"][1]["not_slower"]


def test_the_environment_alone_has_no_partner(tmp_path):
    content, _ = measure(tmp_path, names={"env-ano"})
    assert [pair["reference"] for pair in content["contenders"]["env-ano"]["pairs"]] == [None] * 3
    assert "profile" not in content["contenders"]["env-ano"]


def test_a_library_that_is_not_there_is_skipped_with_a_line(tmp_path):
    content, failures = measure(tmp_path, names={"sbx"})
    assert failures == []
    assert content["contenders"]["sbx"]["status"] == "skipped"
    assert "--sbx-python" in content["contenders"]["sbx"]["message"]


def test_a_finished_case_is_not_measured_again(tmp_path, worker):
    first, _ = measure(tmp_path, names={"ano-compiled", "env-ano"})
    worker.diary.clear()
    assert measure(tmp_path, names={"ano-compiled", "env-ano"})[0] == first
    assert worker.diary == []
    measure(tmp_path, names={"ano-compiled"}, redo={"ano-compiled"})
    assert {name for name, *_ in worker.diary} == {"sb3", "ano-compiled"}


def test_what_is_finished_survives_a_failure(tmp_path, worker, monkeypatch):
    monkeypatch.setattr(worker, "failing", {"ano-compiled"})
    content, failures = measure(tmp_path, names={"ano-compiled", "env-ano"})
    assert failures == ["tiny: ano-compiled: ValueError: no such thing"]
    assert content["contenders"]["ano-compiled"]["status"] == "failed"
    monkeypatch.setattr(worker, "failing", set())
    worker.diary.clear()
    content, failures = measure(tmp_path, names={"ano-compiled", "env-ano"})
    assert failures == []
    assert content["contenders"]["ano-compiled"]["status"] == "finished"
    assert "env-ano" not in {name for name, *_ in worker.diary}


def test_an_interrupt_keeps_the_pairs_so_far(tmp_path, worker, monkeypatch):
    pair = speed._pair

    def interrupted(reference, contender, number):
        if number == 2:
            raise KeyboardInterrupt
        return pair(reference, contender, number)

    monkeypatch.setattr(speed, "_pair", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, names={"ano-compiled"})
    record = json.loads((tmp_path / "tiny.json").read_text())["contenders"]["ano-compiled"]
    assert (record["status"], len(record["pairs"])) == ("unfinished", 2)


def test_a_reference_that_fails_is_a_line(tmp_path, worker, monkeypatch):
    monkeypatch.setattr(worker, "failing", {"sb3"})
    file = CaseFile(tmp_path, CASE, Settings(), "", None)
    failures = measure_case(CASE, CASE.contenders, Settings(), file, Interpreters(), Reporter())
    assert failures == ["tiny: sb3: ValueError: no such thing"]


def test_other_settings_are_refused_unless_forced(tmp_path):
    measure(tmp_path, names={"ano-compiled"})
    with pytest.raises(ValueError, match="tiny.json was measured with other settings; --force measures again"):
        CaseFile(tmp_path, CASE, Settings(pairs=9), "")
    assert CaseFile(tmp_path, CASE, Settings(pairs=9), "", redo=["ano-compiled"]).content["contenders"] == {}


def test_whole_runs_have_caches_of_their_own(tmp_path, worker):
    content, failures = measure(tmp_path, WHOLE, Settings(pairs=2, threads=1))
    assert failures == []
    assert all(pair["contender"]["process_seconds"] > 0.0 for pair in content["contenders"]["ano-cold"]["pairs"])
    folders = {name: [] for name in ("sb3", "ano-cold", "ano-warm")}
    for name, do, environment in worker.diary:
        if do == "start":
            folders[name].append(environment.get("TORCHINDUCTOR_CACHE_DIR"))
    assert set(folders["sb3"]) == {None}
    assert len(set(folders["ano-cold"])) == 2
    # One run more, which fills the folder and is not counted.
    assert len(folders["ano-warm"]) == 3
    assert len(set(folders["ano-warm"])) == 1
    assert content["summary"][1]["ratio"] == [2.0, 2.0, 2.0]
    assert content["reference"]["memory"] == {"peak_bytes": 5}


def test_a_quick_whole_run_is_short(tmp_path):
    content, _ = measure(tmp_path, WHOLE, Settings(pairs=1, threads=1, quick=True))
    assert content["contenders"]["ano-cold"]["pairs"][0]["contender"]["steps"] == 1000
    long = Case("long", "", "", "", WHOLE.contenders, total_steps=100_000)
    content, _ = measure(tmp_path, long, Settings(pairs=1, threads=1, quick=True))
    assert content["contenders"]["ano-cold"]["pairs"][0]["contender"]["steps"] == 4096


def test_the_command_writes_tables_and_pictures(tmp_path, capsys):
    arguments = ["speed", "--cases", "defaults", "cartpole", "--contenders", "ano-compiled", "ano-auto", "--pairs", "2"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert "| ano-compiled | 2 + 1 |" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"defaults.json", "cartpole.json", "speed.md", "speed.png"}
    assert json.loads((tmp_path / "defaults.json").read_text())["commands"][0].startswith(
        "python -m sb3_ano.bench speed --cases"
    )


@pytest.mark.slow
def test_a_quick_measurement_with_real_processes(tmp_path):
    command = [sys.executable, "-m", "sb3_ano.bench", "speed", "--quick", "--cases", "cartpole", "--out", str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "these numbers mean nothing" in finished.stdout
    content = json.loads((tmp_path / "cartpole.json").read_text())
    assert content["contenders"]["ano-auto"]["status"] == "finished"
    assert (tmp_path / "speed.png").exists()
