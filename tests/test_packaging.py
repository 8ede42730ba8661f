"""The wheel, and the extras that it declares."""

import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text().splitlines()


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


def test_the_wheel_has_the_data_of_the_package_its_command_and_nothing_of_the_tests(wheel):
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    data = {str(path.relative_to(ROOT)) for path in (ROOT / "sb3_ano").rglob("*.*") if path.suffix not in (".py", ".pyc")}
    assert data | {"sb3_ano/py.typed", *(f"sb3_ano/hyperparams/{algo}.yml" for algo in ("ano", "spo", "papo"))} <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"sb3_ano"}
    assert "sb3-ano = sb3_ano.cli:main" in archive.read("sb3_ano-0.1.0.dist-info/entry_points.txt").decode()
    # users U5: model cards install the package from there.
    repository = f"\nProject-URL: Repository, {PROJECT['urls']['Repository']}\n"
    assert repository in archive.read("sb3_ano-0.1.0.dist-info/METADATA").decode()
    assert wheel.stat().st_size < 1_000_000


def test_the_unpacked_wheel_finds_its_own_hyperparameters(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = "import sys; sys.path.insert(0, sys.argv[1])\n"
    code += "from sb3_ano.zoo.hyperparameters import hyperparameter_file as find; print(find('ano'))"
    found = run(sys.executable, "-c", code, tmp_path / "site", cwd=tmp_path).strip()
    assert found == str(tmp_path / "site" / "sb3_ano" / "hyperparams" / "ano.yml")


def test_make_takes_the_directory_and_the_python_of_its_environment(tmp_path):
    targets = ("lint", "types", "docs", "build", "test")
    commands = run("make", "-n", *targets, f"VENV={tmp_path}/venv", "PYTHON=python3.99", cwd=ROOT)
    assert f"\npython3.99 -m venv {tmp_path}/venv\n" in commands
    assert ".venv" not in commands
    tools = ("ruff check", "mypy", "sphinx-build", "python -m build", "python -m pytest")
    assert [tool for tool in tools if f"\n{tmp_path}/venv/bin/{tool}" not in commands] == []


def test_all_is_all_extras_and_each_is_documented():
    extras = {**PROJECT["optional-dependencies"]}
    page = (ROOT / "docs" / "getting_started.md").read_text()
    documented = "".join(re.findall(r"^\| (`.+`) \|", page, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", documented)) == set(extras)
    assert extras.pop("all") == [f"sb3-ano[{','.join(extras)}]"]


def test_every_version_of_the_constraints_is_the_installed_one():
    installed = {canonicalize_name(distribution.name): distribution.version.split("+")[0] for distribution in distributions()}
    pinned = dict(line.split("==") for line in CONSTRAINTS if "==" in line)
    compared = pinned.keys() & installed.keys()  # the others belong to extras that the tests do not install
    assert len(compared) > 10
    assert {name: installed[name] for name in compared} == {name: pinned[name] for name in compared}


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "-q"]
    run(*install, next(line for line in CONSTRAINTS if line.startswith("torch==")), cwd=tmp_path)
    run(*install, "-c", ROOT / "constraints.txt", f"sb3-ano[zoo,mujoco] @ file://{wheel}", cwd=tmp_path)
    options = "--algo ano --env Hopper-v5 -n 128 --eval-freq -1 -params n_envs:2 n_steps:32 batch_size:32"
    output = run(python, "-m", "sb3_ano.zoo", "train", *options.split(), cwd=tmp_path)
    assert f"{tmp_path}/venv/lib" in output, "hyperparameters come from the wheel"
    assert (tmp_path / "logs" / "ano" / "Hopper-v5_1" / "Hopper-v5.zip").is_file()
