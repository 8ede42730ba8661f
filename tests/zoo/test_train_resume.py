"""Trainings of the zoo that are killed with SIGKILL, and resume as if they had not been."""

import argparse
import json
import os
import re
import signal
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from stable_baselines3.common.monitor import load_results
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sb3_ano import ANO
from sb3_ano._io import write_json
from sb3_ano.zoo import manager
from tests.common import parameters
from tests.envs.backends import needs_envpool
from tests.zoo.conftest import rejected

COMMON = "--eval-freq 900 --eval-episodes 1 --seed 5 --device cpu --verbose 1"
WHICH = "--algo ano --env CartPole-v1"
SMALL = "n_envs:4 n_steps:64 batch_size:64"
CHEETAH = ("HalfCheetah-v5", "n_envs:1 n_steps:256 batch_size:64 normalize:True")
AT = "logs/*/*/checkpoints/checkpoint_{}_steps.zip"


def final_state(directory: Path, env_id: str) -> dict:
    """Return the results of a finished training."""
    (run,) = (path.parent for path in directory.glob(f"logs/ano/*/{env_id}.zip"))
    assert not (run / "checkpoints").exists()
    model = ANO.load(run / f"{env_id}.zip")
    return {
        "parameters": parameters(model).numpy(),
        "optimizer": model.policy.optimizer.state_dict()["state"][0]["exp_avg_sq"].numpy(),
        "evaluations": dict(np.load(run / "evaluations.npz")),
        "best": parameters(ANO.load(run / "best_model.zip")).numpy(),
        # Several environments end their episodes in an order that their wall-clock times round off.
        "episodes": sorted(map(tuple, load_results(str(run))[["r", "l"]].to_numpy())),
        "statistics": (run / env_id / "vecnormalize.pkl").exists(),
    }


# Fast tests of the same: tests/checkpoints.
@pytest.mark.slow
@pytest.mark.parametrize("when", ["checkpoints", "moments"])
@pytest.mark.parametrize(("env_id", "params"), [("CartPole-v1", SMALL), CHEETAH])  # rollouts have 256 steps
def test_a_killed_training_resumes_as_if_it_had_not_been(env_id, params, when, run_until, tmp_path):
    command = f"train --algo ano --env {env_id} {COMMON} -n 2560 --checkpoint-freq 300 -params n_epochs:4 {params}"
    whole = run_until(command, tmp_path / "whole", None)
    assert whole.status == 0, whole.output
    moments = np.random.default_rng(2026).uniform(0.0, 0.8 * whole.seconds, (6, 4))  # also before the start and after the end
    resumptions = ""
    # At moments of chance, a slow machine may never be killed between its first checkpoint and its end.
    all_kills = [[AT.format(1024), AT.format(2048)], *(moments.tolist() if when == "moments" else [])]
    for number, kills in enumerate(all_kills):
        directory = tmp_path / str(number)
        results = [run_until(command, directory, kills[0])]
        results += [run_until(f"{command} --resume", directory, kill) for kill in (*kills[1:], None, None)]
        assert {result.status for result in results[:-2]} <= {0, -signal.SIGKILL}
        assert [result.status for result in results[-2:]] == [0, 0], results[-2].output
        assert "has finished: there is nothing to resume" in results[-1].output
        np.testing.assert_equal(final_state(directory, env_id), final_state(tmp_path / "whole", env_id))
        resumptions += "".join(result.output for result in results)
    assert re.search(r"resumes from .*_(\d+)_steps.zip after \1 steps", resumptions)


RUNS = [
    pytest.param("ppo", "", "-params", marks=pytest.mark.slow),
    pytest.param("ano", "EnvPoolVecEnv", "-params backend:\\'envpool\\'", marks=[needs_envpool, pytest.mark.slow]),
    pytest.param("ano", "SubprocVecEnv", "--vec-env subproc -params monitor_kwargs:{}", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("algo", "vec_env", "params"), RUNS)
def test_a_run_with_a_uuid_resumes_in_its_files_and_with_new_episodes_if_need_be(algo, vec_env, params, run_until, tmp_path):
    """The run was not found."""
    command = f"train --algo {algo} {COMMON} -n 1536 --checkpoint-freq 256 -uuid --tensorboard-log tb {params} {SMALL}"
    killed = run_until(command, tmp_path, AT.format(768))
    before = {file: file.read_text().splitlines()[:4] for file in tmp_path.glob("logs/*/*/*.monitor.csv")}
    resumed = run_until(f"train --algo {algo} --resume", tmp_path, None)
    assert (killed.status, resumed.status) == (-signal.SIGKILL, 0), resumed.output
    assert "TrainingCheckpoints: resumes from" in resumed.output
    assert resumed.output.count(f"the state of {vec_env} cannot be stored: new episodes start") == bool(vec_env)
    (run,) = tmp_path.glob(f"logs/{algo}/*")
    assert re.fullmatch(r"CartPole-v1_1_[0-9a-f-]{36}", run.name)
    assert json.loads((run / "CartPole-v1" / "run.json").read_text())["finished"]
    assert {file: file.read_text().splitlines()[:4] for file in before} == before
    first, second = (EventAccumulator(str(path)).Reload() for path in sorted(tmp_path.glob(f"tb/*/{algo.upper()}_*")))
    assert first.Scalars("time/fps")[0].step == 256
    assert second.Scalars("time/fps")[0].step >= 1024
    if vec_env != "SubprocVecEnv":  # with processes, files keep the episodes that are repeated
        # Less the episodes that were broken off, and those that did not end
        assert 1536 - 4 * 256 < load_results(str(run))["l"].sum() <= 1536


def written_run(name: str, *arguments: str, finished: bool = False) -> Path:
    record = {"arguments": [*WHICH.split(), *arguments], "seed": 7, "checkpoint_freq": None, "finished": finished}
    write_json(Path("logs/ano", name, "CartPole-v1", "run.json"), record)
    return Path("logs/ano", name)


@pytest.fixture
def planned(zoo, monkeypatch):
    """Run ``train --resume`` up to where it makes the manager; returns the output and its arguments, the zoo's and ours."""
    stop = mock.Mock(side_effect=SystemExit(0))
    monkeypatch.setattr("sb3_ano.zoo.commands.make_manager", stop)
    return lambda options: (zoo(f"train {WHICH} --resume {options}").output, stop.call_args.args[0], stop.call_args.kwargs)


def test_the_run_that_was_started_last_resumes_with_its_own_options(planned):
    for number in (1, 2, 10):
        written_run(f"CartPole-v1_{number}", "-n", str(1000 * number), "-params", "n_steps:8")
    _, args, own = planned("-P --verbose 0")
    assert own["resumed"] == Path("logs/ano/CartPole-v1_10")
    assert (args.n_timesteps, args.seed, args.hyperparams) == (10_000, 7, {"n_steps": 8})
    assert (args.progress, args.verbose, args.log_folder) == (True, 0, "logs")
    for same, freq in {"-n 10000": None, "--n-timesteps=10000 --seed 7 --checkpoint-freq 9": 9}.items():
        own = planned(same)[2]
        assert ("resumed" in own, own["record"]["checkpoint_freq"]) == (True, freq)
    written_run("CartPole-v1_1_11", "-n", "5")  # of an environment CartPole-v1_1
    assert planned("-P")[2]["resumed"] == Path("logs/ano/CartPole-v1_10")
    Path("logs").rename("elsewhere")
    _, args, own = planned("-f elsewhere")
    assert (own["resumed"], args.log_folder) == (Path("elsewhere/ano/CartPole-v1_10"), "elsewhere")


def test_without_a_run_a_new_one_starts_with_the_reason(planned):
    for directory in ("logs", "logs/ano/CartPole-v1_2"):  # the second one was interrupted early
        Path(directory).mkdir(parents=True)
        output, args, own = planned("-n 5 --checkpoint-freq 9")
        assert "logs/ano holds no run of CartPole-v1, or the newest one has no checkpoints: a new run starts" in output
        assert ("resumed" in own, own["record"]["checkpoint_freq"], args.n_timesteps) == (False, 9, 5)
    assert all(planned(f"--checkpoint-freq {never}")[2]["record"] is None for never in (0, -1))


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("other", ["-n 2000", "--seed 8", "-params n_envs:2", "-n 1000 -i x.zip"])
def test_a_run_does_not_swallow_other_options(other, finished, zoo):
    written_run("CartPole-v1_1", "-n", "1000", finished=finished)
    errors = rejected(f"train {WHICH} --resume {other}")
    assert "is not what logs/ano/CartPole-v1_1 was started with" in errors
    assert "start a new run with -i" in errors


def test_of_runs_with_a_uuid_the_one_that_was_started_last_is_resumed(tmp_path):
    """All of them have the number 1; a run that ends later than the last one starts changes its directory later."""
    ids = ("00000000-0000-0000-0000-00000000000b", "00000000-0000-0000-0000-00000000000a")  # in the order of their starts
    runs = [tmp_path / "ano" / f"CartPole-v1_1_{uuid}" for uuid in ids]
    for time, run in enumerate(runs):
        write_json(run / "CartPole-v1" / "run.json", {})
        (run / "CartPole-v1" / "command.txt").touch()
        os.utime(run / "CartPole-v1" / "command.txt", (time, time))
        os.utime(run, (10 - time, 10 - time))
    which = {"algo": "ano", "env": "CartPole-v1", "log_folder": str(tmp_path), "optimize_hyperparameters": False}
    assert manager._newest_run(argparse.Namespace(**which)) == runs[1]
