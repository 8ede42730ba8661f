"""Trainings of the zoo that are killed with SIGKILL, and go on with --resume as if they had not been."""

import argparse
import csv
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stable_baselines3.common.monitor import load_results

from sb3_ano import ANO
from sb3_ano._io import write_json
from sb3_ano.checkpoints.files import checkpoint_files, read_checkpoint
from tests.common import parameters

ROOT = Path(__file__).resolve().parents[2]
#: Of a checkpoint, and of a rollout: what a kill may cost at most.
EVERY, ROLLOUT = 300, 256
COMMON = ["--eval-freq", "900", "--eval-episodes", "1", "--seed", "5", "--device", "cpu", "--verbose", "1"]
WHICH = ["--algo", "ano", "--env", "CartPole-v1"]
TASKS = {
    "CartPole-v1": ["-n", "2560", "-params", "n_envs:4", "n_steps:64", "batch_size:64", "n_epochs:4"],
    "HalfCheetah-v5": ["-n", "2560", "-params", "n_envs:1", "n_steps:256", "batch_size:64", "n_epochs:4", "normalize:True"],
}

Run = Callable[[list[str], Path, float | str | None], dict[str, Any]]


def arguments_for(env_id: str) -> list[str]:
    return ["train", "--algo", "ano", "--env", env_id, *COMMON, "--checkpoint-freq", str(EVERY), *TASKS[env_id]]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a command of the zoo in a folder, killed after some seconds, when there is a file like a pattern, or not at all."""
    driver = subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", str(Path(__file__).with_name("kill_driver.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    lines = iter(driver.stdout.readline, "")
    assert "ready\n" in lines

    def run_command(arguments: list[str], folder: Path, kill_after: float | str | None) -> dict[str, Any]:
        folder.mkdir(exist_ok=True)
        driver.stdin.write(json.dumps({"arguments": arguments, "folder": str(folder), "kill_after": kill_after}) + "\n")
        driver.stdin.flush()
        return json.loads(next(line for line in lines if line.startswith("{")))

    yield run_command
    driver.stdin.close()
    driver.stdout.close()
    assert driver.wait(10) == 0


def final_state(folder: Path, env_id: str) -> dict[str, Any]:
    """What a finished training leaves behind."""
    (run_folder,) = (path.parent for path in folder.glob(f"logs/ano/*/{env_id}.zip"))
    model = ANO.load(run_folder / f"{env_id}.zip")
    with np.load(run_folder / "evaluations.npz") as evaluations:
        return {
            "parameters": parameters(model).numpy(),
            "optimizer": model.policy.optimizer.state_dict()["state"][0]["exp_avg_sq"].numpy(),
            "steps": model.num_timesteps,
            "evaluations": dict(evaluations),
            "best": parameters(ANO.load(run_folder / "best_model.zip")).numpy(),
            "episodes": load_results(str(run_folder))[["r", "l"]].to_numpy(),
            "statistics": (run_folder / env_id / "vecnormalize.pkl").exists(),
        }


def require_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    np.testing.assert_equal({**found, "episodes": None}, {**expected, "episodes": None})
    # Several environments end their episodes in an order that their wall-clock times round off.
    assert sorted(map(tuple, found["episodes"])) == sorted(map(tuple, expected["episodes"]))


def steps_lost(folder: Path, checkpoint_steps: int) -> int:
    """At least so many steps of all environments, of episodes that had ended, come after the newest checkpoint."""
    ended = 0
    for file in folder.glob("logs/ano/*/*.monitor.csv"):
        rows = [row for row in csv.reader(file.read_text().splitlines()[2:]) if len(row) == 3 and row[2]]
        ended += sum(int(row[1]) for row in rows)
    return ended - checkpoint_steps


def kill_until_finished(run: Run, folder: Path, env_id: str, moments: list[float]) -> int:
    """Start a training, and kill it and go on with it until it has finished; returns how often it was killed."""
    command, newest = arguments_for(env_id), None
    for killed, moment in enumerate([*moments, None]):
        result = run(command, folder, moment)
        if newest is not None and "resumes from" in result["output"]:
            assert f"resumes from {newest.path.relative_to(folder)} after {newest.num_timesteps} steps" in result["output"]
        if result["status"] == 0:
            return killed
        assert result["status"] == -signal.SIGKILL, result["output"]
        command = [*arguments_for(env_id), "--resume"]
        found = [path for checkpoints in folder.glob("logs/ano/*/checkpoints") for path in checkpoint_files(checkpoints)]
        whole = map(read_checkpoint, found)
        newest = max(whole, key=lambda checkpoint: checkpoint.num_timesteps, default=None)
        records = [json.loads(path.read_text()) for path in folder.glob("logs/ano/*/*/run.json")]
        if not any(record["finished"] for record in records):
            assert steps_lost(folder, newest.num_timesteps if newest else 0) <= EVERY + ROLLOUT
    raise AssertionError(result["output"])


@pytest.mark.parametrize("env_id", ["CartPole-v1", pytest.param("HalfCheetah-v5", marks=pytest.mark.slow)])
def test_a_killed_training_goes_on_as_if_it_had_not_been(env_id, run, tmp_path):
    whole = run(arguments_for(env_id), tmp_path / "whole", None)
    assert whole["status"] == 0, whole["output"]
    moments = [share * whole["seconds"] for share in (0.5, 0.9)]
    assert kill_until_finished(run, tmp_path / "killed", env_id, moments) >= 1
    require_same(final_state(tmp_path / "killed", env_id), final_state(tmp_path / "whole", env_id))
    again = run([*arguments_for(env_id), "--resume"], tmp_path / "killed", None)
    assert again["status"] == 0
    assert "has finished: there is nothing to resume" in again["output"]


@pytest.mark.parametrize("algo", ["ano", "ppo"])
def test_a_run_with_a_uuid_goes_on(algo, run, tmp_path):  # users Z2
    command = ["train", "--algo", algo, "-n", "768", "--eval-freq", "-1", "--checkpoint-freq", "128", "-uuid"]
    command += ["-params", "n_envs:1", "n_steps:128", "batch_size:64", "n_epochs:1"]
    assert run(command, tmp_path, f"logs/{algo}/*/checkpoints/checkpoint_256_steps.zip")["status"] == -signal.SIGKILL
    resumed = run(["train", "--algo", algo, "--resume"], tmp_path, None)
    assert resumed["status"] == 0, resumed["output"]
    assert "TrainingCheckpoints: resumes from" in resumed["output"]
    (folder,) = tmp_path.glob(f"logs/{algo}/*")
    assert re.fullmatch(r"CartPole-v1_1_[0-9a-f-]{36}", folder.name)
    assert (folder / "CartPole-v1.zip").is_file()
    assert json.loads((folder / "CartPole-v1" / "run.json").read_text())["finished"]


def test_envpool_goes_on_with_its_files_and_new_episodes(run, tmp_path):
    pytest.importorskip("envpool")
    command = ["train", *WHICH, *COMMON, "-n", "1536", "--checkpoint-freq", "256"]
    command += ["-params", "n_envs:4", "n_steps:64", "batch_size:64", "normalize:True", "backend:'envpool'"]
    assert run(command, tmp_path, "logs/ano/*/checkpoints/checkpoint_768_steps.zip")["status"] == -signal.SIGKILL
    (monitor,) = tmp_path.glob("logs/ano/*/0.monitor.csv")
    before = monitor.read_text().splitlines()
    resumed = run([*command, "--resume"], tmp_path, None)
    assert resumed["status"] == 0, resumed["output"]
    assert resumed["output"].count("the state of EnvPoolVecEnv cannot be stored: new episodes start") == 1
    after = monitor.read_text().splitlines()
    assert after[:10] == before[:10]
    lengths = load_results(str(monitor.parent))["l"]
    assert 1536 - 4 * 256 < lengths.sum() <= 1536  # less the episodes that were broken off, and those that did not end
    assert len(after) == 2 + len(lengths)


@pytest.mark.slow
@pytest.mark.parametrize("env_id", TASKS)
def test_no_moment_is_wrong_for_a_kill(env_id, run, tmp_path):
    """25 kills for each task, which are 50: at random moments from the first one to after the end."""
    generator = np.random.default_rng(2026)
    whole = run(arguments_for(env_id), tmp_path / "whole", None)
    assert whole["status"] == 0, whole["output"]
    expected, kills, trainings = final_state(tmp_path / "whole", env_id), 0, 0
    while kills < 25:
        moments = (whole["seconds"] * generator.uniform(0.0, 1.1, 25 - kills)).tolist()
        folder = tmp_path / str(trainings)
        kills += kill_until_finished(run, folder, env_id, moments)
        trainings += 1
        require_same(final_state(folder, env_id), expected)
    print(f"{env_id}: {kills} kills in {trainings} trainings")


def written_run(name: str, *arguments: str, finished: bool = False) -> Path:
    run = Path("logs/ano") / name
    record = {"arguments": [*WHICH, *arguments], "seed": 7, "checkpoint_freq": None, "finished": finished}
    write_json(run / name.rsplit("_", 1)[0] / "run.json", record)
    return run


@pytest.fixture
def planned(zoo, monkeypatch) -> Callable[..., tuple[argparse.Namespace, dict[str, Any]]]:
    """Runs ``train --resume`` up to where it makes the manager, and returns the options of the zoo and the manager's own."""
    made: list[tuple[argparse.Namespace, dict[str, Any]]] = []

    def stop(args, *rest, **own):
        made.append((args, own))
        raise SystemExit(0)

    monkeypatch.setattr("sb3_ano.zoo.commands.Manager", stop)

    def plan(options: str = "") -> tuple[argparse.Namespace, dict[str, Any]]:
        zoo(f"train {' '.join(WHICH)} --resume {options}")
        return made.pop()

    return plan


def test_the_run_that_was_started_last_resumes_with_its_own_options(planned):
    for number in (1, 2, 10):
        written_run(f"CartPole-v1_{number}", "-n", str(1000 * number), "-params", "n_steps:8")
    args, own = planned("-P --verbose 0")
    assert own["resumed"] == Path("logs/ano/CartPole-v1_10")
    assert (args.n_timesteps, args.seed, args.hyperparams) == (10_000, 7, {"n_steps": 8})
    assert (args.progress, args.verbose, args.log_folder) == (True, 0, "logs")
    assert not {"resume", "checkpoint_freq"} & set(vars(args))


def test_without_a_run_a_new_one_starts(planned):
    args, own = planned("-n 5 --checkpoint-freq 9")
    assert ("resumed" in own, own["checkpoint_freq"], args.n_timesteps) == (False, 9, 5)


@pytest.mark.parametrize(
    ("directory", "message"), [("x", "holds no run of CartPole-v1"), ("logs/ano/CartPole-v1_2", "interrupted")]
)
def test_the_reason_for_a_new_run_is_printed(directory, message, zoo):
    Path(directory).mkdir(parents=True)
    assert (
        message
        in zoo(f"train {' '.join(WHICH)} -n 16 --eval-freq -1 --resume -params n_steps:2 n_envs:8 batch_size:16").output
    )


def test_a_finished_run_is_left_alone(zoo):
    written_run("CartPole-v1_1", finished=True)
    assert "has finished" in zoo(f"train {' '.join(WHICH)} --resume").output


@pytest.mark.parametrize(
    "same", ["-n 1000", "--n-timesteps 1000", "--n-timesteps=1000", "--seed 7", "-P", "--env CartPole-v1"]
)
def test_options_may_be_given_again(same, planned):
    written_run("CartPole-v1_1", "-n", "1000")
    assert "resumed" in planned(same)[1]


@pytest.mark.parametrize("other", ["-n 2000", "--seed 8", "-params n_envs:2", "-tb runs", "--eval-freq 10"])
def test_other_options_are_rejected(other, zoo):
    written_run("CartPole-v1_1", "-n", "1000")
    errors = zoo(f"train {' '.join(WHICH)} --resume {other}", status=2).errors
    assert "is not what logs/ano/CartPole-v1_1 was started with" in errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--algo sac --resume", "--resume is not possible with --algo sac; it is with a2c, ano,"),
        ("--algo ano --resume -optimize", "a search continues with its --storage and --study-name"),
        ("--algo ano --checkpoint-freq 0", "--checkpoint-freq=0 is not allowed"),
        ("--algo ano --checkpoint-freq -1 --resume", "--checkpoint-freq=-1 is not allowed together with --resume"),
    ],
)
def test_impossible_options_are_rejected(options, message, zoo):
    assert message in zoo(f"train {options}", status=2).errors


def test_a_damaged_record_is_named(zoo):
    (written_run("CartPole-v1_1") / "CartPole-v1" / "run.json").write_text('{"arguments": [')
    assert "run.json is damaged" in zoo(f"train {' '.join(WHICH)} --resume", status=2).errors


def test_checkpoints_can_be_left_out(zoo, tmp_path):
    zoo("train --algo ano -n 64 --eval-freq -1 --checkpoint-freq -1 -params n_steps:32 n_envs:1 batch_size:32")
    directory = tmp_path / "logs/ano/CartPole-v1_1"
    assert {path.name for path in directory.iterdir()} == {"0.monitor.csv", "CartPole-v1", "CartPole-v1.zip"}
    assert not (directory / "CartPole-v1" / "run.json").exists()
