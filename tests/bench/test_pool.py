"""Execution of a plan: attempts, failures, a full disk; with backends that fail as told."""

import errno
import json
from concurrent.futures import Future

import pytest

from sb3_ano.bench.experiments.plan import Run
from sb3_ano.bench.experiments.pool import RunProgress, execute
from sb3_ano.bench.experiments.process import RunError
from sb3_ano.bench.progress import Reporter
from sb3_ano.bench.store import ResultsFolder, Store
from tests.bench.test_store import write_run


class ScriptedBackend:
    """Each run ends as the next of its outcomes says: None is success, an error is raised."""

    def __init__(self, results, outcomes, as_files=False):
        self._results, self._outcomes, self._as_files = results, outcomes, as_files
        self.submitted: list[str] = []
        self.closed = False

    def submit(self, run):
        self.submitted.append(run.run_id)
        future: Future = Future()
        outcome = self._outcomes.get(run.run_id, [None]).pop(0)
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
            return future
        folder = self._results.begin(run.run_id)
        write_run(folder, run.run_id, **run.specification())
        if outcome == "damage":
            (folder / "model.zip").write_bytes(b"")
        files = {file.name: file.read_bytes() for file in folder.iterdir()} if self._as_files else None
        future.set_result(files)
        return future

    def close(self):
        self.closed = True


class Lines(Reporter):
    """Keeps what a terminal would show."""

    def __init__(self):
        super().__init__()
        self.lines: list[str] = []
        self.units = 0.0

    def note(self, text):
        self.lines.append(text)

    def advance(self, units=1.0):
        self.units += units


def runs(number: int) -> list[Run]:
    return [Run("s", "A-v0", "ano", {}, seed, 100) for seed in range(number)]


def carry_out(plan, results, outcomes, **options):
    lines = Lines()
    backend = ScriptedBackend(results, {plan[index].run_id: list(these) for index, these in outcomes.items()}, **options)
    try:
        failures = execute(plan, backend, results, RunProgress(lines, {run.run_id: 10.0 for run in plan}, len(plan), 0))
    finally:
        assert backend.closed
    return failures, backend, lines


@pytest.mark.parametrize("as_files", [False, True], ids=["in place", "sent"])
def test_a_run_that_fails_once_is_run_again_and_counted(as_files, tmp_path):
    plan = runs(3)
    with ResultsFolder(tmp_path) as results:
        failures, backend, lines = carry_out(plan, results, {1: [RunError("lost"), None]}, as_files=as_files)
        assert failures == {}
        assert results.finished({run.run_id: run.specification() for run in plan}) == {run.run_id for run in plan}
    assert sorted(backend.submitted) == sorted([run.run_id for run in plan] + [plan[1].run_id])
    assert lines.lines == [f"{plan[1].run_id}: lost; it is run again"]
    assert lines.units == pytest.approx(30.0)
    assert sorted(Store(tmp_path).runs()["attempts"]) == [1, 1, 2]
    assert Store(tmp_path).failures() == []
    assert not (tmp_path / "unfinished").exists()


def test_a_run_that_fails_twice_is_listed_and_the_others_are_kept(tmp_path):
    plan = runs(3)
    broken = [RunError("first", details="a traceback"), RunError("second")]
    with ResultsFolder(tmp_path) as results:
        failures, _, lines = carry_out(plan, results, {0: broken})
        assert {run_id: str(error) for run_id, error in failures.items()} == {plan[0].run_id: "second"}
        assert lines.lines[-1] == f"{plan[0].run_id}: second"
        assert len(Store(tmp_path).runs()) == 2
        (failure,) = Store(tmp_path).failures()
        assert (failure["run_id"], failure["attempts"], failure["errors"]) == (plan[0].run_id, 2, ["a traceback", "second"])
        # Tried again later, it is no failure any more.
        assert carry_out(plan[:1], results, {})[0] == {}
        assert Store(tmp_path).failures() == []


def test_files_that_do_not_arrive_whole_are_a_failed_attempt(tmp_path):
    plan = runs(1)
    with ResultsFolder(tmp_path) as results:
        failures, _, lines = carry_out(plan, results, {0: ["damage", None]})
        assert failures == {}
    assert "the checksum of model.zip does not match" in lines.lines[0]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_without_space_everything_stops_and_what_is_finished_is_kept(number, tmp_path):
    plan = runs(4)
    with ResultsFolder(tmp_path) as results:
        with pytest.raises(OSError, match=f"{tmp_path} cannot be written: no space; its 3 finished runs are kept"):
            carry_out(plan, results, {2: [RunError("no space", number=number)]})
        assert len(results.finished({run.run_id: run.specification() for run in plan})) == 3
        assert carry_out(plan[2:3], results, {})[0] == {}


def test_an_error_survives_being_sent():
    import pickle

    error = pickle.loads(pickle.dumps(RunError("one line", "many\nlines", errno.ENOSPC)))
    assert (str(error), error.details, error.out_of_space) == ("one line", "many\nlines", True)


def test_progress_is_the_share_of_the_steps_of_the_runs_expected_time(tmp_path):
    lines = Lines()
    first, second = runs(2)
    progress = RunProgress(lines, {first.run_id: 100.0, second.run_id: 10.0}, 2, 0)
    progress.reached(first, 25)
    assert lines.units == pytest.approx(25.0)
    progress.reached(second, 200)  # the last rollout goes beyond
    assert lines.units == pytest.approx(35.0)
    progress.fail(first, "lost", again=True)
    assert lines.units == pytest.approx(10.0)
    progress.reached(first, 50)
    progress.finish(first)
    progress.finish(second)
    assert lines.units == pytest.approx(110.0)
    assert json.dumps(lines.lines) == json.dumps([f"{first.run_id}: lost; it is run again"])
