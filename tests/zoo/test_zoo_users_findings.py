"""What users of the command line stumbled over."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from sb3_ano.zoo import cli

# The zoo leaves environments to the end of the process.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
Command = Callable[..., tuple[int, str, str]]
SHORT = ["-n", "512", "--eval-episodes", "1", "--seed", "1", "--verbose", "0"]
ANO = ["--algo", "ano", "--env", "CartPole-v1"]


def run(*arguments: str) -> int:
    """Run a command in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRUST_REMOTE_CODE", raising=False)
        return cli.main(arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """A folder in which PPO was trained without a word about which, and ANO in two tasks of different length."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("zoo")
        patch.chdir(folder)
        assert run("train", *SHORT, "--eval-freq", "-1") == 0
        small = ["-params", "n_envs:1", "n_steps:64", "batch_size:64", "n_epochs:1"]
        assert run("train", *ANO, *SHORT, "--eval-freq", "128", *small) == 0
        pendulum = ["--algo", "ano", "--env", "Pendulum-v1", "-n", "256", *SHORT[2:]]
        assert run("train", *pendulum, "--eval-freq", "128", "--eval-episodes", "2", *small) == 0
        yield folder


@pytest.fixture
def command(folder, monkeypatch, capfd) -> Command:
    """Runs a command in the folder: its exit status, output and errors."""
    monkeypatch.chdir(folder)

    def run_command(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        status = run(*arguments)
        return status, *capfd.readouterr()

    return run_command


def test_enjoy_finds_what_train_left_without_options(command):  # users Z3
    status, output, _ = command("enjoy", "--no-render", "-n", "60")
    assert status == 0
    assert "Loading logs/ppo/CartPole-v1_1/CartPole-v1.zip" in output


@pytest.mark.parametrize("wrong", [["--sampler", "bogus"], ["--pruner", "bogus"], ["-params", "nsteps:3"]])
def test_a_refused_search_leaves_no_folder(wrong, command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert command("train", *ANO, "-optimize", "--n-trials", "1", "-n", "500", *wrong)[0] == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("more", [["-n", "90000"], ["-n", "512", "-i", "x.zip"]])
def test_a_finished_run_does_not_swallow_options(more, command):  # users Z5
    status, _, errors = command("train", *ANO, "--resume", *more)
    assert status == 2
    assert "is not what logs/ano/CartPole-v1_1 was started with" in errors
    assert "start a new run with -i" in errors


def test_the_settings_say_the_steps_of_the_training(folder):  # users Z6
    for run_folder, steps in (("ppo/CartPole-v1_1/CartPole-v1", 512), ("ano/Pendulum-v1_1/Pendulum-v1", 256)):
        settings = dict(yaml.unsafe_load((folder / "logs" / run_folder / "config.yml").read_text()))
        assert settings["n_timesteps"] == steps


@pytest.mark.slow
def test_the_benchmark_says_the_steps_of_the_training(tmp_path, monkeypatch, capfd):  # users Z6
    monkeypatch.chdir(tmp_path)
    assert run("train", *ANO, "-n", "2000", *SHORT[2:], "--eval-freq", "-1") == 0
    assert run("benchmark", "--log-dir", "logs", "--benchmark-dir", "benchmarks", "--no-hub", "-n", "300") == 0
    (row,) = re.findall(r"^\|ano.*$", (tmp_path / "benchmarks" / "benchmark.md").read_text(), re.MULTILINE)
    assert "|2k" in row.replace(" ", "")


def test_an_unknown_device_is_one_line(command, monkeypatch, tmp_path):  # users Z7
    monkeypatch.chdir(tmp_path)
    status, _, errors = command("train", *ANO, *SHORT, "--device", "bogus")
    assert status == 2
    assert re.fullmatch(r"error: .*bogus.*\n", errors)
    assert list(tmp_path.glob("logs/*/*")) == []


@pytest.mark.parametrize(("env_id", "reason"), [("CartPole-v1", "-w "), ("NoSuch", "NoSuch")])
def test_a_plot_of_nothing_says_why(env_id, reason, command):
    status, _, errors = command("plot_train", "-a", "ano", "-e", env_id, "-f", "logs", "--figure", "curves.png")
    assert status == 2
    assert reason in errors


def test_tasks_of_different_length_are_explained(command):
    envs = ["-e", "CartPole-v1", "Pendulum-v1"]
    assert command("all_plots", "-a", "ano", *envs, "-f", "logs", "-o", "results", "--figure", "evaluations.png")[0] == 0
    status, output, _ = command("plot_from_file", "-i", "results.pkl", "--figure", "results.png")
    assert status == 0
    assert "the numbers of evaluations differ: 4 of CartPole-v1, 2 of Pendulum-v1" in output
    status, _, errors = command("plot_from_file", "-i", "results.pkl", "--figure", "results.png", "-r", "-iqm")
    assert status == 2
    assert "--iqm needs equal numbers" in errors


def test_help_can_be_typed_and_names_the_defaults(command):  # users Z14 and Z15
    status, output, _ = command("train", "--help")
    assert status == 0
    assert output.startswith("usage: python -m sb3_ano.zoo train ")
    said = " ".join(output.split())
    assert "RL Algorithm (default: ppo)" in said
    assert "environment ID (default: CartPole-v1)" in said


def test_help_of_plots_can_be_typed(command):
    assert command("plot_train", "--help")[1].startswith("usage: python -m sb3_ano.zoo plot_train ")


@pytest.mark.parametrize("env_id", ["Pusher-v5", "Reacher-v5", "HumanoidStandup-v5"])
def test_every_mujoco_task_has_settings(env_id, command, monkeypatch, tmp_path):
    pytest.importorskip("mujoco")
    monkeypatch.chdir(tmp_path)
    few = ["-n", "16", "--eval-freq", "-1", "--device", "cpu", "-params", "n_envs:1", "n_steps:16", "batch_size:16"]
    status, output, _ = command("train", "--algo", "ano", "--env", env_id, *few)
    assert status == 0
    assert "Using 'default' hyperparameters" not in output


def test_an_unknown_key_of_ppo_gets_a_suggestion(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    status, _, errors = command("train", *SHORT, "-params", "nsteps:8")
    assert status == 2
    assert "did you mean 'n_steps'?" in errors


def test_a_suggestion_is_not_buried_in_a_list(command):  # users Z22
    status, _, errors = command("train", *ANO, *SHORT, "-params", "nsteps:8")
    assert status == 2
    assert "did you mean 'n_steps'?" in errors
    assert "gae_lambda" not in errors


@pytest.mark.xfail(strict=True, reason="users Z22: none in a table of one trial")
def test_a_table_of_one_trial_is_spelled_as_one_of_many(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    few = ["--n-trials", "1", "--n-evaluations", "1", "-n", "256", "--sampler", "random", "--no-optim-plots"]
    status, output, _ = command("train", *ANO, "-optimize", *few, "--seed", "3")  # whose trust region is symmetric
    assert status == 0
    assert re.search(r"clip_range_high +none", output)


@pytest.mark.slow
def test_help_ends_where_its_reader_ends(folder):  # users Z22
    reader = "import sys; sys.stdin.readline()"
    shown = subprocess.run(
        ["bash", "-c", '"$0" -m sb3_ano.zoo train --help | "$0" -c "$1"', sys.executable, reader],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert shown.stderr == ""
