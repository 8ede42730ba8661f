"""What users of the command line stumbled over."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.zoo.conftest import run

# The zoo leaves environments to the end of the process.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SHORT = "-n 512 --eval-episodes 1 --seed 1 --verbose 0"
ANO = "--algo ano --env CartPole-v1"
SMALL = "-params n_envs:1 n_steps:64 batch_size:64 n_epochs:1"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Iterator[Path]:
    """A directory in which PPO was trained without a word about which, and ANO in two tasks of different length."""
    directory = tmp_path_factory.mktemp("zoo")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        run(f"train {SHORT} --eval-freq -1")
        run(f"train {ANO} {SHORT} --eval-freq 128 {SMALL}")
        run(f"train --algo ano --env Pendulum-v1 -n 256 --eval-episodes 2 --seed 1 --verbose 0 --eval-freq 128 {SMALL}")
    return directory


@pytest.fixture
def here(trained, monkeypatch) -> Path:
    """The directory of the trained agents as the current one."""
    monkeypatch.chdir(trained)
    return trained


def test_enjoy_finds_what_train_left_without_options(here):  # users Z3
    assert "Loading logs/ppo/CartPole-v1_1/CartPole-v1.zip" in run("enjoy --no-render -n 60").output


@pytest.mark.parametrize("wrong", ["--sampler bogus", "--pruner bogus", "-params nsteps:3"])
def test_a_rejected_search_leaves_no_directory(wrong, zoo, tmp_path):  # users Z4
    zoo(f"train {ANO} -optimize --n-trials 1 -n 500 {wrong}", status=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("more", ["-n 90000", "-n 512 -i x.zip"])
def test_a_finished_run_does_not_swallow_options(more, here):  # users Z5
    errors = run(f"train {ANO} --resume {more}", status=2).errors
    assert "is not what logs/ano/CartPole-v1_1 was started with" in errors
    assert "start a new run with -i" in errors


def test_the_settings_say_the_steps_of_the_training(here):  # users Z6
    for directory, steps in (("ppo/CartPole-v1_1/CartPole-v1", 512), ("ano/Pendulum-v1_1/Pendulum-v1", 256)):
        assert dict(yaml.unsafe_load((here / "logs" / directory / "config.yml").read_text()))["n_timesteps"] == steps


@pytest.mark.slow
def test_the_benchmark_says_the_steps_of_the_training(zoo, tmp_path):  # users Z6
    zoo(f"train {ANO} -n 2000 --seed 1 --verbose 0 --eval-freq -1")
    zoo("benchmark --log-dir logs --benchmark-dir benchmarks --no-hub -n 300")
    (row,) = re.findall(r"^\|ano.*$", (tmp_path / "benchmarks" / "benchmark.md").read_text(), re.MULTILINE)
    assert "|2k" in row.replace(" ", "")


def test_an_unknown_device_is_one_line(zoo, tmp_path):  # users Z7
    assert re.fullmatch(r"error: .*bogus.*\n", zoo(f"train {ANO} {SHORT} --device bogus", status=2).errors)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("env_id", "reason"),
    [("CartPole-v1", r"the longest has \d+; use -w \d+\n"), ("NoSuch", "there is no run of NoSuch in logs/ano")],
)
def test_a_plot_of_nothing_says_why(env_id, reason, here):  # users Z8
    assert re.search(reason, run(f"plot_train -a ano -e {env_id} -f logs --figure curves.png", status=2).errors)


def test_evaluations_that_are_missing_are_the_reason_for_an_empty_plot(here):  # users Z8
    errors = run("all_plots -a ppo -e CartPole-v1 -f logs --figure curves.png", status=2).errors
    assert "no run of CartPole-v1 has two evaluations; train with a smaller --eval-freq" in errors


def test_tasks_of_different_length_are_shown(here):  # users Z9
    run("all_plots -a ano -e CartPole-v1 Pendulum-v1 -f logs -o results --figure evaluations.png")
    shown = run("plot_from_file -i results.pkl --figure results.png").output
    assert "the numbers of evaluations differ: 4 of CartPole-v1, 2 of Pendulum-v1" in shown
    assert "--iqm needs equal numbers" in run("plot_from_file -i results.pkl --figure results.png -r -iqm", status=2).errors
    assert "differ" not in run("plot_from_file -i results.pkl --figure one.png --skip-envs Pendulum-v1").output


def test_help_names_the_defaults(zoo):  # users Z15
    said = " ".join(zoo("train --help").output.split())
    assert "RL Algorithm (default: ppo)" in said
    assert "environment ID (default: CartPole-v1)" in said


@pytest.mark.parametrize("env_id", ["Pusher-v5", "Reacher-v5", "HumanoidStandup-v5"])
def test_every_mujoco_task_has_settings(env_id, zoo):  # users Z16
    pytest.importorskip("mujoco")
    few = "-n 16 --eval-freq -1 --device cpu -params n_envs:1 n_steps:16 batch_size:16"
    assert "Using 'default' hyperparameters" not in zoo(f"train --algo ano --env {env_id} {few}").output


@pytest.mark.parametrize("algo", ["ppo", "ano"])
def test_an_unknown_key_gets_a_suggestion_and_no_list(algo, zoo):  # users Z22
    errors = zoo(f"train --algo {algo} {SHORT} -params nsteps:8", status=2).errors
    assert "did you mean 'n_steps'?" in errors
    assert "gae_lambda" not in errors


def test_a_table_of_one_trial_is_spelled_as_one_of_many(zoo):  # users Z22
    few = "--n-trials 1 --n-evaluations 1 -n 256 --sampler random --no-optim-plots"
    output = zoo(f"train {ANO} -optimize {few} --seed 3").output  # whose trust region is symmetric
    assert re.search(r"clip_range_high +none", output)


@pytest.mark.slow
def test_help_ends_where_its_reader_ends(tmp_path):  # users Z22
    reader = "import sys; sys.stdin.readline()"
    shown = subprocess.run(
        ["bash", "-c", '"$0" -m sb3_ano.zoo train --help | "$0" -c "$1"', sys.executable, reader],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert shown.stderr == ""
