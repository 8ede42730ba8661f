"""Every command of the zoo, for every algorithm, in an environment with nothing but what this package declares."""

import os
import subprocess
import sys

import pytest
from matplotlib.image import imread

from sb3_ano.zoo.cli import COMMANDS
from tests.zoo.clean_environment import ROOT, declared, make_environment
from tests.zoo.every_command import ALGORITHMS, ENVIRONMENTS, STEPS, run_all, steps_of, table
from tests.zoo.zoo_hub import running_zoo_hub

RENDER = "import gymnasium; env = gymnasium.make('Hopper-v4', render_mode='rgb_array'); env.reset(); env.render()"


@pytest.fixture(scope="session")
def clean_python(tmp_path_factory):
    return make_environment(tmp_path_factory.mktemp("clean"), declared("zoo", "hub", "mujoco", "atari"))


@pytest.fixture(scope="session")
def mujoco_renders():
    command = [sys.executable, "-W", "ignore", "-c", RENDER]
    return subprocess.run(command, env={**os.environ, "MUJOCO_GL": "egl"}, capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("env", ENVIRONMENTS)
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_command_works_for_every_algorithm(algo, env, clean_python, tmp_path, request):
    if env == "Hopper-v4" and not request.getfixturevalue("mujoco_renders") and "CI" not in os.environ:
        pytest.skip("MuJoCo does not render here; it needs EGL's library (Debian: libegl1)")
    with running_zoo_hub() as (hub, variables):
        variables["HF_HOME"] = str(tmp_path / "hf")
        done = list(run_all(clean_python, algo, env, tmp_path, variables, steps_of(algo)))
    assert [step.command.split()[0] for step, _ in done][: len(COMMANDS)] == list(COMMANDS)
    pushed = hub.repositories[f"me/{algo}-{env}"].files
    assert {f"{algo}-{env}.zip", "config.yml", "README.md", "replay.mp4"} <= set(pushed)
    assert len(pushed["replay.mp4"]) > 1000


@pytest.mark.slow
def test_an_agent_is_trained_shown_recorded_and_plotted_without_display_and_ffmpeg(tmp_path):
    steps = [step for step in STEPS if step.command.split()[0] in ("train", "enjoy", "record_training", "plot_train")]
    for step, _ in run_all(sys.executable, "ano", "CartPole-v1", tmp_path, {}, tuple(steps)):
        if step.leaves.endswith(".png"):
            assert imread(tmp_path / step.leaves).std() > 0.01, "the plot is empty"


def test_the_table_covers_every_command():
    assert [step.command.split()[0] for step in STEPS] == list(COMMANDS)


def test_the_documentation_has_the_table_of_what_is_run():
    assert table() in (ROOT / "docs" / "zoo.md").read_text()
