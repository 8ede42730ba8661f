"""Trainings of the zoo that are killed with SIGKILL, and resume as if they had not been."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stable_baselines3.common.monitor import load_results

from sb3_ano import ANO
from sb3_ano._io import write_json
from sb3_ano.checkpoints.files import checkpoint_files, read_checkpoint
from tests.common import parameters
from tests.envs.backends import needs_envpool
from tests.zoo.conftest import Finished, rejected

#: Steps between checkpoints, and per rollout: what a kill may cost at most.
EVERY, ROLLOUT = 300, 256
COMMON = "--eval-freq 900 --eval-episodes 1 --seed 5 --device cpu --verbose 1"
WHICH = "--algo ano --env CartPole-v1"
SMALL = "n_steps:64 batch_size:64"
TASKS = {
    "CartPole-v1": f"-n 2560 -params n_envs:4 n_epochs:4 {SMALL}",
    "HalfCheetah-v5": "-n 2560 -params n_envs:1 n_steps:256 batch_size:64 n_epochs:4 normalize:True",
}
Run = Callable[[str, Path, float | str | None], Finished]


def command_for(env_id: str) -> str:
    return f"train --algo ano --env {env_id} {COMMON} --checkpoint-freq {EVERY} {TASKS[env_id]}"


def final_state(directory: Path, env_id: str) -> dict[str, Any]:
    """Return the results of a finished training."""
    (run,) = (path.parent for path in directory.glob(f"logs/ano/*/{env_id}.zip"))
    model = ANO.load(run / f"{env_id}.zip")
    with np.load(run / "evaluations.npz") as evaluations:
        return {
            "parameters": parameters(model).numpy(),
            "optimizer": model.policy.optimizer.state_dict()["state"][0]["exp_avg_sq"].numpy(),
            "steps": model.num_timesteps,
            "evaluations": dict(evaluations),
            "best": parameters(ANO.load(run / "best_model.zip")).numpy(),
            # Several environments end their episodes in an order that their wall-clock times round off.
            "episodes": sorted(map(tuple, load_results(str(run))[["r", "l"]].to_numpy())),
            "statistics": (run / env_id / "vecnormalize.pkl").exists(),
        }


def kill_until_finished(run_until: Run, directory: Path, env_id: str, moments: list[float]) -> int:
    """Start a training, kill and resume it until it has finished; returns how often it was killed."""
    command, newest = command_for(env_id), None
    for killed, moment in enumerate([*moments, None]):
        result = run_until(command, directory, moment)
        if newest is not None and "resumes from" in result.output:
            assert f"resumes from {newest.path.relative_to(directory)} after {newest.num_timesteps} steps" in result.output
        if result.status == 0:
            return killed
        assert result.status == -signal.SIGKILL, result.output
        command = f"{command_for(env_id)} --resume"
        files = [path for checkpoints in directory.glob("logs/ano/*/checkpoints") for path in checkpoint_files(checkpoints)]
        newest = max(map(read_checkpoint, files), key=lambda checkpoint: checkpoint.num_timesteps, default=None)
        lines = [line for file in directory.glob("logs/ano/*/*.monitor.csv") for line in file.read_text().splitlines()[2:]]
        ended = sum(int(line.split(",")[1]) for line in lines if re.fullmatch(r"[^,]+,[^,]+,[^,]+", line))
        if not any(json.loads(path.read_text())["finished"] for path in directory.glob("logs/ano/*/*/run.json")):
            assert ended - (newest.num_timesteps if newest else 0) <= EVERY + ROLLOUT, "steps that are lost"
    raise AssertionError(result.output)


@pytest.mark.parametrize("kills", [1, pytest.param(25, marks=pytest.mark.slow)])  # at random moments, also after the end
@pytest.mark.parametrize("env_id", ["CartPole-v1", pytest.param("HalfCheetah-v5", marks=pytest.mark.slow)])
def test_a_killed_training_resumes_as_if_it_had_not_been(env_id, kills, run_until, tmp_path):
    generator = np.random.default_rng(2026)
    whole = run_until(command_for(env_id), tmp_path / "whole", None)
    assert whole.status == 0, whole.output
    expected, done = final_state(tmp_path / "whole", env_id), 0
    while done < kills:
        shares = (0.5, 0.9) if kills == 1 else generator.uniform(0.0, 1.1, kills - done)
        directory = tmp_path / f"killed_{done}_{whole.seconds}"
        done += kill_until_finished(run_until, directory, env_id, [float(share) * whole.seconds for share in shares])
        np.testing.assert_equal(final_state(directory, env_id), expected)
        whole = whole._replace(seconds=0.9 * whole.seconds)  # if it ended before it was killed
    again = run_until(f"{command_for(env_id)} --resume", directory, None)
    assert (again.status, "has finished: there is nothing to resume" in again.output) == (0, True)


@pytest.mark.parametrize("algo", ["ano", "ppo"])
def test_a_run_with_a_uuid_resumes(algo, run_until, tmp_path):  # users Z2
    command = f"train --algo {algo} -n 768 --eval-freq -1 --checkpoint-freq 128 -uuid"
    command += " -params n_envs:1 n_steps:128 batch_size:64 n_epochs:1"
    killed = run_until(command, tmp_path, f"logs/{algo}/*/checkpoints/checkpoint_256_steps.zip")
    resumed = run_until(f"train --algo {algo} --resume", tmp_path, None)
    assert (killed.status, resumed.status) == (-signal.SIGKILL, 0), resumed.output
    assert "TrainingCheckpoints: resumes from" in resumed.output
    (run,) = tmp_path.glob(f"logs/{algo}/*")
    assert re.fullmatch(r"CartPole-v1_1_[0-9a-f-]{36}", run.name)
    assert json.loads((run / "CartPole-v1" / "run.json").read_text())["finished"]


@pytest.mark.parametrize(
    ("vec_env", "params"),
    [
        pytest.param("EnvPoolVecEnv", "-params backend:\\'envpool\\'", marks=needs_envpool),
        pytest.param("SubprocVecEnv", "--vec-env subproc -params monitor_kwargs:{}", marks=pytest.mark.slow),
    ],
)
def test_environments_without_a_state_resume_with_their_files_and_new_episodes(vec_env, params, run_until, tmp_path):
    command = f"train {WHICH} {COMMON} -n 1536 --checkpoint-freq 256 {params} n_envs:4 {SMALL}"
    killed = run_until(command, tmp_path, "logs/ano/*/checkpoints/checkpoint_768_steps.zip")
    before = {file: file.read_text().splitlines()[:4] for file in tmp_path.glob("logs/ano/*/*.monitor.csv")}
    resumed = run_until(f"{command} --resume", tmp_path, None)
    assert (killed.status, resumed.status) == (-signal.SIGKILL, 0), resumed.output
    assert resumed.output.count(f"the state of {vec_env} cannot be stored: new episodes start") == 1
    assert {file: file.read_text().splitlines()[:4] for file in before} == before
    lengths = load_results(str(next(iter(before)).parent))["l"]
    if len(before) == 1:  # with processes, files keep the episodes that are repeated
        assert 1536 - 4 * 256 < lengths.sum() <= 1536  # less the episodes that were broken off, and those that did not end


def written_run(name: str, *arguments: str, finished: bool = False) -> Path:
    record = {"arguments": [*WHICH.split(), *arguments], "seed": 7, "checkpoint_freq": None, "finished": finished}
    write_json(Path("logs/ano", name, "CartPole-v1", "run.json"), record)
    return Path("logs/ano", name)


@pytest.fixture
def planned(zoo, monkeypatch) -> Callable[[str], Any]:
    """Run ``train --resume`` up to where it makes the manager; returns its arguments, the zoo's and ours, and the output."""
    made: list[Any] = []

    def stop(args, *rest, **own):
        made[:] = args, own
        raise SystemExit(0)

    monkeypatch.setattr("sb3_ano.zoo.commands.make_manager", stop)
    return lambda options: (zoo(f"train {WHICH} --resume {options}").output, *made)


def test_the_run_that_was_started_last_resumes_with_its_own_options(planned):
    for number in (1, 2, 10):
        written_run(f"CartPole-v1_{number}", "-n", str(1000 * number), "-params", "n_steps:8")
    _, args, own = planned("-P --verbose 0")
    assert own["resumed"] == Path("logs/ano/CartPole-v1_10")
    assert (args.n_timesteps, args.seed, args.hyperparams) == (10_000, 7, {"n_steps": 8})
    assert (args.progress, args.verbose, args.log_folder) == (True, 0, "logs")
    assert not {"resume", "checkpoint_freq"} & set(vars(args))
    for same in ("-n 10000", "--n-timesteps=10000", "--seed 7"):
        assert "resumed" in planned(same)[2]


@pytest.mark.parametrize("reason", ["holds no run of CartPole-v1", "interrupted"])
def test_without_a_run_a_new_one_starts_with_the_reason(reason, planned):
    if reason == "interrupted":
        Path("logs/ano/CartPole-v1_2").mkdir(parents=True)
    output, args, own = planned("-n 5 --checkpoint-freq 9")
    assert reason in output
    assert ("resumed" in own, own["record"]["checkpoint_freq"], args.n_timesteps) == (False, 9, 5)


@pytest.mark.parametrize("finished", [False, True])  # users Z5
@pytest.mark.parametrize("other", ["-n 2000", "--seed 8", "-params n_envs:2", "-n 1000 -i x.zip"])
def test_a_run_does_not_swallow_other_options(other, finished, zoo):
    written_run("CartPole-v1_1", "-n", "1000", finished=finished)
    errors = rejected(f"train {WHICH} --resume {other}")
    assert "is not what logs/ano/CartPole-v1_1 was started with" in errors
    assert "start a new run with -i" in errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--algo sac --resume", "--resume needs an on-policy algorithm; sac is none"),
        ("--algo ano --resume -optimize", "a search continues with its --storage and --study-name"),
        ("--algo ano --resume", "run.json is not a JSON file"),
    ],
)
def test_impossible_options_are_rejected(options, message, zoo):
    (written_run("CartPole-v1_1") / "CartPole-v1" / "run.json").write_text('{"arguments": [')
    assert message in rejected(f"train {options}")


@pytest.mark.parametrize("freq", [-1, 0])
def test_checkpoints_can_be_left_out(freq, zoo):
    zoo(f"train --algo ano -n 32 --eval-freq -1 --checkpoint-freq {freq} -params n_steps:32 n_envs:1 batch_size:32")
    assert Path("logs/ano/CartPole-v1_1/CartPole-v1.zip").is_file()
    assert not [path for path in Path("logs").rglob("*") if path.name in ("run.json", "checkpoints")]
