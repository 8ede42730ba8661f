"""Every command of the table in docs/zoo.md, for every algorithm, with nothing installed but what this package declares."""

import os
import re
import subprocess
import tomllib
import venv
from ctypes.util import find_library
from importlib.metadata import Distribution, distribution

import pytest
from matplotlib.image import imread
from packaging.requirements import Requirement

from sb3_ano._registry import ALGORITHMS
from sb3_ano.zoo.cli import COMMANDS
from tests.hub.hub_server import running_hub
from tests.zoo.conftest import ROOT

# What makes a training short, and the same for all algorithms.
COMMON = "-n 512 --eval-freq 128 --eval-episodes 2 -params batch_size:64"
SHORT = dict.fromkeys(("CartPole-v1", "Hopper-v4"), f"{COMMON} n_envs:2 n_steps:64")
SHORT["BreakoutNoFrameskip-v4"] = f"{COMMON} n_envs:1 n_steps:256"  # an episode of which takes most of the training
# The zoo has no settings for TRPO on Atari.
ATARI_WRAPPER = "stable_baselines3.common.atari_wrappers.AtariWrapper"
TRPO_ON_ATARI = f"atari: {{env_wrapper: [{ATARI_WRAPPER}], frame_stack: 4, policy: CnnPolicy, n_timesteps: 1000}}"


def table() -> list[tuple[str, str]]:
    """Commands and what is there afterwards."""
    return re.findall(r"^\| `(.+)` \| (.+) \|$", (ROOT / "docs" / "zoo.md").read_text().partition("## Fixes")[0], re.MULTILINE)


def test_the_documentation_has_every_command():
    commands = [command.split()[0] for command, _ in table()]
    assert commands == [*COMMANDS, "load_from_hub"], "of which the last one is for our algorithms only"


def declared(*extras: str) -> list[Distribution]:
    """The distributions that ``pip install 'sb3-ano[EXTRAS]'`` brings, dependencies of dependencies too.

    :raises PackageNotFoundError: if one is not installed in the test environment
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]
    waiting, found = [Requirement(line) for line in lines], {}
    while waiting:
        requirement = waiting.pop()
        for extra in {"", *requirement.extras} - {extra for name, extra in found if name == requirement.name}:
            found[requirement.name, extra] = distribution(requirement.name)
            needed = [Requirement(line) for line in distribution(requirement.name).requires or []]
            waiting += [line for line in needed if line.marker is None or line.marker.evaluate({"extra": extra})]
    return list(found.values())


@pytest.fixture(scope="session")
def clean_python(tmp_path_factory):
    """An interpreter in an environment with links to the files of these distributions, and to this package's source."""
    directory = tmp_path_factory.mktemp("clean")
    venv.create(directory, symlinks=True)
    (site,) = directory.glob("lib/python*/site-packages")
    for installed in declared("zoo", "hub", "mujoco", "atari"):
        for top in {file.parts[0] for file in installed.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(installed.locate_file(top))
    (site / "sb3_ano.pth").write_text(f"{ROOT}\n")
    return directory / "bin" / "python"


@pytest.mark.slow
@pytest.mark.parametrize("env", SHORT)
@pytest.mark.parametrize("algo", [*(algo for algo in ALGORITHMS if "mask" not in algo), "ppo", "trpo"])
def test_every_command_works_for_every_algorithm(algo, env, clean_python, tmp_path):
    if env == "Hopper-v4" and "CI" not in os.environ and find_library("EGL") is None:
        pytest.skip("MuJoCo does not render here; it needs EGL's library (Debian: libegl1)")
    (tmp_path / "trpo.yml").write_text(TRPO_ON_ATARI)
    short = f"--seed 1 {SHORT[env]} {'-conf trpo.yml' if (algo, env) == ('trpo', 'BreakoutNoFrameskip-v4') else ''}"
    # No display and no ffmpeg, whatever machine this is.
    hidden = {"DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL", "SDL_VIDEODRIVER"}
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    variables |= {"PATH": str(tmp_path / "no_programs"), "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hf")}
    with running_hub() as hub:
        options = {"cwd": tmp_path, "env": variables | hub.variables, "capture_output": True, "text": True, "timeout": 600}
        for command, promise in table() if algo in ALGORITHMS else table()[:-1]:
            line, promised = (text.replace("ALGO", algo).replace("ENV", env) for text in (command, promise))
            line = f"{line} {short}" if line.startswith("train") else line
            done = subprocess.run([clean_python, ROOT / "zoo_runner.py", *line.split()], **options)
            said = f"{line}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
            assert done.returncode == 0, said
            if "printed" in promised:
                assert "Loading logs/" in done.stdout
            elif promised.startswith("`"):
                assert min([file.stat().st_size for file in tmp_path.glob(promised.strip("`"))], default=0) > 0, said
    assert imread(tmp_path / "curves.png").std() > 0.01, "the plot is empty"
    (row,) = re.findall(rf"^\|{algo}.*$", (tmp_path / "benchmarks" / "benchmark.md").read_text(), re.MULTILINE)
    assert "|0k" in row.replace(" ", ""), "the steps of the training"  # users Z6
    pushed = hub.repositories[f"me/{algo}-{env}"].files
    assert {f"{algo}-{env}.zip", "config.yml", "README.md", "replay.mp4"} <= set(pushed)
    assert len(pushed["replay.mp4"]) > 1000
