"""The wheel, the extras that it declares, and ``.ci/install-torch``: which PyTorch is asked for on which machine."""

import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distributions

import pytest
from packaging.utils import canonicalize_name

from tests.common import PROJECT, ROOT

CONSTRAINTS = (ROOT / "constraints.txt").read_text().splitlines()
(TORCH,) = (line for line in CONSTRAINTS if line.startswith("torch=="))


def run(*command, cwd):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # which would put a source tree first
    return subprocess.check_output([str(part) for part in command], cwd=cwd, text=True, env=env)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", folder, ROOT, cwd=folder)
    return next(folder.glob("*.whl"))


def test_the_wheel_has_the_data_of_the_package_its_command_and_nothing_of_the_tests(wheel):
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    data = {str(path.relative_to(ROOT)) for path in (ROOT / "sb3_ano").rglob("*.*") if path.suffix not in (".py", ".pyc")}
    assert data | {"sb3_ano/py.typed", *(f"sb3_ano/hyperparams/{algo}.yml" for algo in ("ano", "papo"))} <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"sb3_ano"}
    assert "sb3-ano = sb3_ano.cli:main" in archive.read("sb3_ano-0.1.0.dist-info/entry_points.txt").decode()
    # Model cards install the package from there.
    repository = f"\nProject-URL: Repository, {PROJECT['urls']['Repository']}\n"
    assert repository in archive.read("sb3_ano-0.1.0.dist-info/METADATA").decode()
    assert wheel.stat().st_size < 1_000_000


def test_make_takes_the_directory_and_the_python_of_its_environment(tmp_path):
    targets = ["lint", "types", "docs", "build", "test"]
    commands = run("make", "-n", *targets, f"VENV={tmp_path}/venv", "PYTHON=python3.99", cwd=ROOT)
    assert f"\npython3.99 -m venv {tmp_path}/venv\n" in commands
    assert ".venv" not in commands
    tools = ("ruff check", "mypy", "sphinx-build", "python -m build", "python -m pytest")
    assert [tool for tool in tools if f"\n{tmp_path}/venv/bin/{tool}" not in commands] == []


def test_all_is_all_extras_and_each_is_documented():
    extras = {**PROJECT["optional-dependencies"]}
    documented = "".join(re.findall(r"^\| (`.+`) \|", (ROOT / "docs/getting_started.md").read_text(), re.MULTILINE))
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
    run(*install, TORCH, cwd=tmp_path)
    run(*install, "-c", ROOT / "constraints.txt", f"sb3-ano[zoo,mujoco] @ file://{wheel}", cwd=tmp_path)
    options = "--algo ano --env Hopper-v5 -n 128 --eval-freq -1 -params n_envs:2 n_steps:32 batch_size:32"
    output = run(python, "-m", "sb3_ano.zoo", "train", *options.split(), cwd=tmp_path)
    assert f"{tmp_path}/venv/lib" in output, "hyperparameters come from the wheel"
    assert (tmp_path / "logs" / "ano" / "Hopper-v5_1" / "Hopper-v5.zip").is_file()


INDEX = "https://download.pytorch.org/whl/cpu"
PYTHON = """#!/bin/sh
case "$*" in
    *urlopen*) exit ${UNREACHABLE:-0} ;;
    *install*+cpu*) echo "$*"; exit ${NO_CPU_BUILD:-0} ;;
    *) echo "$*" ;;
esac
"""


@pytest.mark.parametrize(
    ("system", "gpu", "version", "faults", "expected"),
    [
        ("Linux", False, [], {}, [f"--extra-index-url {INDEX} V+cpu"]),
        ("Linux", False, [], {"UNREACHABLE": "1"}, ["V+cpu"]),  # pip's own index or files have it
        ("Linux", False, [], {"UNREACHABLE": "1", "NO_CPU_BUILD": "1"}, ["V+cpu", "V"]),
        ("Linux", True, [], {}, ["V"]),
        ("Darwin", False, [], {}, ["V"]),
        ("Linux", False, ["pinned"], {}, [f"--extra-index-url {INDEX} V+cpu"]),
        ("Linux", False, ["newest"], {}, [f"--extra-index-url {INDEX} --upgrade torch"]),
        ("Linux", True, ["newest"], {}, ["--upgrade torch"]),
    ],
)
def test_a_cpu_build_is_installed_where_there_is_no_gpu(system, gpu, version, faults, expected, tmp_path):
    scripts = {"uname": f"#!/bin/sh\necho {system}\n", "nvidia-smi": f"#!/bin/sh\nexit {int(not gpu)}\n", "python": PYTHON}
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    variables = {**os.environ, **faults, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    output = subprocess.check_output(
        [ROOT / ".ci/install-torch", tmp_path / "python", *version], env=variables, text=True, timeout=60
    )
    calls = [line.partition(" install ")[2] for line in output.splitlines() if line.startswith("-m pip")]
    assert calls == [arguments.replace("V", TORCH) for arguments in expected]
    assert "downloads about" in output
