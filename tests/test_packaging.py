"""The wheel, and the extras that it declares."""

import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = {"zoo", "mujoco", "atari", "envpool", "hub", "bench", "ray", "llm", "all"}


def run(*command: str | Path, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # which would put a source tree first
    finished = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, env=env)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_carries_the_hyperparameters_and_nothing_of_the_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"sb3_ano/hyperparams/{algo}.yml" for algo in ("ano", "spo", "papo")} <= set(names)
    assert "sb3_ano/py.typed" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"sb3_ano"}


def test_the_wheel_has_the_command_and_the_data_of_the_package(wheel):
    archive = zipfile.ZipFile(wheel)
    assert "sb3-ano = sb3_ano.cli:main" in archive.read("sb3_ano-0.1.0.dist-info/entry_points.txt").decode()
    data = {str(path.relative_to(ROOT)) for path in (ROOT / "sb3_ano").rglob("*.*") if path.suffix not in (".py", ".pyc")}
    assert data <= set(archive.namelist())
    assert wheel.stat().st_size < 1_000_000


def test_the_wheel_knows_where_its_repository_is(wheel):
    """users U5: model cards install the package from there."""
    url = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    assert f"\nProject-URL: Repository, {url}\n" in zipfile.ZipFile(wheel).read("sb3_ano-0.1.0.dist-info/METADATA").decode()


def test_the_unpacked_wheel_finds_its_own_hyperparameters(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = "import sys; sys.path.insert(0, sys.argv[1])\n"
    code += "from sb3_ano.zoo.hyperparameters import hyperparameter_file as find; print(find('ano'))"
    found = run(sys.executable, "-c", code, tmp_path / "site", cwd=tmp_path).strip()
    assert found == str(tmp_path / "site" / "sb3_ano" / "hyperparams" / "ano.yml")


def test_the_extras_are_those_of_the_documentation():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["optional-dependencies"]) == EXTRAS
    (everything,) = project["optional-dependencies"]["all"]
    assert set(everything.removeprefix("sb3-ano[").removesuffix("]").split(",")) == EXTRAS - {"all"}


def test_every_version_of_the_constraints_is_the_installed_one():
    from importlib.metadata import PackageNotFoundError, version

    checked = 0
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, _, pinned = line.partition("==")
        if pinned:
            try:
                assert version(name).split("+")[0] == pinned, name
                checked += 1
            except PackageNotFoundError:
                continue  # of an extra that the tests do not install
    assert checked > 10


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    run(python, "-m", "pip", "install", "-q", torch, cwd=tmp_path)
    run(
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "-c",
        ROOT / "constraints.txt",
        f"sb3-ano[zoo,mujoco] @ file://{wheel}",
        cwd=tmp_path,
    )
    options = [
        "--algo",
        "ano",
        "--env",
        "Hopper-v5",
        "-n",
        "128",
        "--eval-freq",
        "-1",
        "-params",
        "n_envs:2",
        "n_steps:32",
        "batch_size:32",
    ]
    output = run(python, "-m", "sb3_ano.zoo", "train", *options, cwd=tmp_path)
    assert f"{tmp_path}/venv/lib" in output, "hyperparameters come from the wheel"
    assert (tmp_path / "logs" / "ano" / "Hopper-v5_1" / "Hopper-v5.zip").is_file()
