"""Studies on disk, the processes that share them, and the budget of trials."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState
from sqlalchemy.exc import IntegrityError, OperationalError

from sb3_ano.zoo.tuning import studies, workers
from sb3_ano.zoo.tuning.search import Search
from sb3_ano.zoo.tuning.seeding import SeededByTrial, trial_seed
from sb3_ano.zoo.tuning.studies import load_study, open_storage, open_study, trial_number
from sb3_ano.zoo.tuning.workers import SURPLUS, Worker

PURPOSE = {"algo": "ano", "env": "CartPole-v1"}


@pytest.fixture(params=["journal", "sqlite"])
def storage(request, tmp_path):
    return f"{tmp_path}/a/study.log" if request.param == "journal" else f"sqlite:///{tmp_path}/study.db"


@pytest.fixture
def journal(tmp_path):
    return f"{tmp_path}/study.log"


def study_in(storage, name="s", seed=0):
    def create(seed):
        return optuna.samplers.RandomSampler(seed)

    return open_study(storage, name, PURPOSE, sampler=SeededByTrial(create, seed))


def parabola(trial):
    return -((trial.suggest_float("x", -1, 1) - 0.3) ** 2)


def states(storage):
    return [trial.state for trial in load_study(storage, "s").trials]


def test_a_study_goes_on_with_all_that_was_stored(storage):
    Search(study_in(storage), parabola, n_trials=3).run()
    before = load_study(storage, "s").trials
    Search(study_in(storage), parabola, n_trials=2).run()
    after = load_study(storage, "s").trials
    assert after[:3] == before
    assert [trial.number for trial in after] == [0, 1, 2, 3, 4]
    assert {trial.state for trial in after} == {TrialState.COMPLETE}


@pytest.mark.slow
def test_the_same_seed_gives_the_same_search_in_one_go_or_in_three(tmp_path):
    drawn = []
    for name, parts in (("one", [4]), ("three", [1, 2, 1]), ("other", [4])):
        for n_trials in parts:
            Search(study_in(f"{tmp_path}/{name}.log", seed=1 if name == "other" else 0), parabola, n_trials).run()
        drawn.append([trial.params["x"] for trial in load_study(f"{tmp_path}/{name}.log", "s").trials])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 4
    assert not set(drawn[0]) & set(drawn[2])


def test_every_trial_has_a_seed_of_its_own():
    seeds = {trial_seed(seed, number) for seed in (0, 1, 2**32 - 1) for number in range(100)}
    assert len(seeds) == 300
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_the_total_is_right_however_many_processes_begin_at_once(storage):
    study_in(storage)
    barrier = threading.Barrier(4)

    def work(_):
        search = Search(study_in(storage), parabola, n_trials=100, max_total_trials=6)
        barrier.wait(60)
        search.run()

    with ThreadPoolExecutor(4) as executor:
        list(executor.map(work, range(4)))
    trials = load_study(storage, "s").trials
    finished = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    assert len(finished) == 6
    assert len({trial.params["x"] for trial in finished}) == 6
    assert all(trial.state == TrialState.FAIL and trial.user_attrs[SURPLUS] for trial in trials if trial not in finished)


def test_jobs_share_the_budget(journal):
    begun = []

    def objective(trial):
        begun.append(threading.get_ident())
        time.sleep(0.05)
        return parabola(trial)

    Search(study_in(journal), objective, n_trials=7).run(n_jobs=3)
    assert states(journal) == [TrialState.COMPLETE] * 7
    assert len(set(begun)) == 3


def test_a_total_that_is_reached_begins_no_trial(journal):
    Search(study_in(journal), parabola, n_trials=3).run()
    Search(study_in(journal), parabola, n_trials=3, max_total_trials=3).run()
    assert len(states(journal)) == 3


def test_pruned_and_failed_trials_are_told_apart(journal, capsys):
    def objective(trial):
        parabola(trial)
        if trial.number == 0:
            trial.report(3.0, 1)
            raise optuna.TrialPruned
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        Search(study_in(journal), objective, n_trials=5).run()
    assert states(journal) == [TrialState.PRUNED, TrialState.FAIL]
    assert "trial 0 (1 of 5): pruned at 3.00 in evaluation 1" in capsys.readouterr().out


def killed_in_its_first_trial(journal: str) -> None:
    """Start a process on the study, and kill it as soon as its trial runs."""
    code = (
        "import sys, time, optuna\n"
        "from sb3_ano.zoo.tuning.search import Search\n"
        "from sb3_ano.zoo.tuning.studies import load_study\n"
        "def objective(trial):\n"
        "    trial.suggest_float('x', -1, 1); print('running', flush=True); time.sleep(600)\n"
        "Search(load_study(sys.argv[1], 's'), objective, n_trials=1).run()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, journal], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGKILL)


def test_the_trial_of_a_killed_process_neither_counts_nor_stays_open(journal, capsys):
    study_in(journal)
    killed_in_its_first_trial(journal)
    assert states(journal) == [TrialState.RUNNING]
    Search(study_in(journal), parabola, n_trials=1, max_total_trials=2).run()
    assert states(journal) == [TrialState.FAIL, TrialState.COMPLETE, TrialState.COMPLETE]
    assert "given up, because their processes died: trial 0" in capsys.readouterr().out


def test_the_trial_of_another_machine_is_left_alone_until_it_is_silent_for_long(journal, monkeypatch):
    monkeypatch.setattr(workers, "_host", lambda: "another machine")
    with Worker(study_in(journal)) as other:
        running = other._study.ask()
        other.sign(running)
    monkeypatch.undo()
    here = Worker(study_in(journal))
    assert here.give_up_dead_trials() == []
    monkeypatch.setattr(workers, "GRACE_SECONDS", 0.0)
    assert here.give_up_dead_trials() == [0]
    assert states(journal) == [TrialState.FAIL]


def test_the_trial_of_a_living_process_here_is_left_alone(journal, monkeypatch):
    monkeypatch.setattr(workers, "GRACE_SECONDS", 0.0)
    with Worker(study_in(journal)) as one, Worker(study_in(journal)) as other:
        one.sign(one._study.ask())
        assert other.give_up_dead_trials() == []
    assert Worker(study_in(journal)).give_up_dead_trials() == [0]


def test_a_process_gives_signs_of_life(journal, monkeypatch):
    monkeypatch.setattr(workers, "BEAT_SECONDS", 0.01)

    def seen():
        (worker,) = [value for name, value in load_study(journal, "s").user_attrs.items() if name.startswith("worker")]
        assert worker["pid"] == os.getpid()
        return worker["seen"]

    with Worker(study_in(journal)):
        first = seen()
        deadline = time.monotonic() + 10
        while seen() == first and time.monotonic() < deadline:
            time.sleep(0.02)
        assert seen() > first


@pytest.mark.parametrize("when", ["in the middle", "at the end"])
def test_a_search_survives_that_another_process_gave_its_trial_up(when, journal):
    def objective(trial):
        value = parabola(trial) if when == "at the end" else None
        if trial.number == 0:
            load_study(journal, "s").tell(0, state=TrialState.FAIL)
        return parabola(trial) if value is None else value

    Search(study_in(journal), objective, n_trials=2).run()
    assert states(journal) == [TrialState.FAIL, TrialState.COMPLETE]


def test_a_line_that_was_torn_is_cut_off(journal):
    Search(study_in(journal), parabola, n_trials=2).run()
    with Path(journal).open("ab") as file:
        file.write(b'{"op_code": 4, "worker')
    Search(study_in(journal), parabola, n_trials=1).run()
    assert states(journal) == [TrialState.COMPLETE] * 3


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study_in("a/study.log")
    patient = studies.JournalFileSymlinkLock
    monkeypatch.setattr(studies, "JournalFileSymlinkLock", lambda path: patient(path, grace_period=3))
    study = study_in("a/study.log")
    # As Optuna makes it, by a process that never releases it.
    patient(str(tmp_path / "a" / "study.log")).acquire()
    begun = time.monotonic()
    study.set_user_attr("written", True)
    assert 2.5 < time.monotonic() - begun < 30
    assert load_study("a/study.log", "s").user_attrs["written"]


def test_a_study_for_another_purpose_is_refused(journal):
    study_in(journal)
    with pytest.raises(ValueError, match="study 's' is about algo='ano', and cannot go on with algo='spo'; give another"):
        open_study(journal, "s", PURPOSE | {"algo": "spo"})


def test_a_database_that_another_process_makes_at_the_same_moment_is_opened(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/study.db"
    failures = [IntegrityError("INSERT", {}, Exception("UNIQUE")), OperationalError("", {}, Exception("x already exists"))]

    def collide(*args):
        if failures:
            raise failures.pop()
        return optuna.storages.RDBStorage(*args)

    monkeypatch.setattr(studies, "RDBStorage", collide)
    assert open_storage(url, create=True).url == url
    assert not failures


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        ("study.db", "storage='study.db' is not allowed; allowed are a journal file, FILE.log, and the URL of a database"),
        ("sqlite:////nowhere/at/all.db", "cannot be opened: .*unable to open database file"),
        ("nonsense://a", "storage='nonsense://a' cannot be opened"),
    ],
)
def test_what_is_no_storage_is_one_line(storage, message):
    with pytest.raises(ValueError, match=message) as error:
        open_storage(storage, create=True)
    assert "\n" not in str(error.value)


def test_a_study_or_trial_that_is_not_there_is_named(journal):
    with pytest.raises(FileNotFoundError, match=r"study.log' does not exist"):
        load_study(journal, "s")
    assert not Path(journal).exists()
    study = study_in(journal)
    with pytest.raises(ValueError, match="study_name='t' is not in .*; studies there: s"):
        load_study(journal, "t")
    with pytest.raises(ValueError, match="trial_id='best': no trial of study 's' is complete"):
        trial_number(study, "best")
    Search(study, parabola, n_trials=3).run()
    study.tell(study.ask(), state=TrialState.FAIL)
    values = [trial.value for trial in study.trials[:3]]
    assert trial_number(study, "best") == values.index(max(values))
    assert trial_number(study, "0") == 0
    for trial_id in ("3", "-1", "last"):
        with pytest.raises(ValueError, match=f"trial_id='{trial_id}' is not in study 's'; allowed are 'best' and 0, 1, 2"):
            trial_number(study, trial_id)
