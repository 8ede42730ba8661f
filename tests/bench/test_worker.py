"""The process of one contender."""

import json
import subprocess
import sys
import time

import pytest

from sb3_ano.bench import worker
from sb3_ano.bench.cases import ANO_EAGER, ENV_ANO, ENV_SB3, SB3, SB3_FAST_ENVS, Case, Contender
from sb3_ano.bench.processes import Threads, Worker, WorkerError, find_sbx, specification
from sb3_ano.bench.speed_report import shares

SMALL = {"n_steps": 16, "batch_size": 16, "n_epochs": 1}
BY_ID = Case("by-id", "", "CartPole-v1", "CartPole-v1", (SB3,), settings=SMALL)
VECTOR = Case("vector", "", "CartPole-v1", "CartPole-v1", (SB3,), n_envs=2, settings=SMALL)


def session(case, contender):
    return worker.Session(specification(case, contender, Threads(), "cpu"))


def test_a_stopwatch_counts_nested_calls_once():
    watch = worker.Stopwatch()
    inner = watch.wrap(lambda: time.sleep(0.02))
    outer = watch.wrap(lambda: (inner(), inner()))
    outer()
    assert 0.04 <= watch.seconds < 0.08


@pytest.mark.parametrize("contender", [SB3, SB3_FAST_ENVS, ANO_EAGER], ids=lambda contender: contender.name)
@pytest.mark.parametrize(("case", "rollout"), [(BY_ID, 16), (VECTOR, 32)], ids=["by id", "vector"])
def test_iterations_are_trained_and_timed(case, rollout, contender):
    trained = session(case, contender)
    assert trained.build() == {"device": "cpu", "steps_per_iteration": rollout}
    assert trained.run(3)["steps"] == 3 * rollout
    before = set(vars(trained._model)), set(vars(trained._model.policy)), set(vars(trained._model.env))
    profile = trained.profile(2)
    assert profile["steps"] == 2 * rollout
    assert 0.0 < profile["env"] + profile["forward"] < profile["collect"]
    assert min(profile["env"], profile["forward"], profile["update"]) > 0.0
    assert all(share > 0.0 for share in shares(profile).values())
    assert sum(shares(profile).values()) == pytest.approx(1.0)
    # Nothing of the stopwatches is left behind.
    assert before == (set(vars(trained._model)), set(vars(trained._model.policy)), set(vars(trained._model.env)))
    assert trained.run(1)["steps"] == rollout
    assert trained._model.num_timesteps == 6 * rollout


@pytest.mark.parametrize("contender", [ENV_SB3, ENV_ANO], ids=lambda contender: contender.name)
def test_the_environment_alone_learns_nothing(contender):
    alone = session(VECTOR, contender)
    alone.build()
    assert alone.run(2)["steps"] == 64
    assert alone._model.num_timesteps == 0


def test_a_whole_run_counts_its_construction():
    reply = session(BY_ID, SB3).whole(40)
    assert reply["steps"] == 48
    assert 0.0 < reply["construction_seconds"] < reply["seconds"]
    assert reply["rss_bytes"] > 1e7


def test_a_process_answers_line_by_line_whatever_libraries_print():
    verbose = Contender("verbose", "sb3", "sb3", {"verbose": 2})
    with Worker(specification(BY_ID, verbose, Threads(), "cpu"), sys.executable) as process:
        assert process.description["versions"]["stable-baselines3"]
        assert process.ask("build")["steps_per_iteration"] == 16
        assert process.ask("run", iterations=1)["steps"] == 16
        with pytest.raises(WorkerError, match="AttributeError: 'Session' object has no attribute 'sing'"):
            process.ask("sing")


def test_what_cannot_be_imported_is_one_line():
    unknown = Contender("sbx", "sbx", "sb3")
    code = "import sys; sys.modules['sbx'] = None; sys.argv = ['worker']; from sb3_ano.bench.worker import main; main()"
    line = json.dumps(specification(BY_ID, unknown, Threads(), "cpu"))
    answer = subprocess.run([sys.executable, "-c", code], input=line + "\n", capture_output=True, text=True, check=True).stdout
    assert json.loads(answer)["error"].startswith("ModuleNotFoundError: import of sbx halted")


def test_a_process_that_ends_says_how():
    case = Case("none", "", "CartPole-v1", "CartPole-v1", (SB3,))
    with Worker(specification(case, SB3, Threads(), "cpu"), sys.executable) as process:
        process._process.kill()
        with pytest.raises(WorkerError, match="the process ended with status -9"):
            process.ask("build")


def test_the_interpreter_of_sbx_is_checked(tmp_path):
    with pytest.raises(ValueError, match="--sbx-python .*nowhere cannot be run: No such file or directory"):
        find_sbx(str(tmp_path / "nowhere"))
    without = tmp_path / "python"
    without.write_text("#!/bin/sh\nexit 1\n")
    without.chmod(0o755)
    with pytest.raises(ValueError, match="has no sbx; install it there with: pip install sbx-rl"):
        find_sbx(str(without))
