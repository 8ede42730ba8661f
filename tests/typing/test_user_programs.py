"""What mypy says about programs of users: nothing about a right one, and something about each mistake of a wrong one."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from sb3_ano.shaping import SHAPINGS, ShapingPair
from sb3_ano.shaping._shapes import OneShape, TwoShapes
from tests.common import ROOT

PROGRAMS = Path(__file__).parent
# Packages that the signatures do not need. Reading them takes mypy minutes.
SKIPPED = (
    *(
        "ale_py",
        "cv2",
        "datasets",
        "envpool",
        "huggingface_hub",
        "imageio",
        "IPython",
        "jinja2",
        "matplotlib",
        "openai",
        "optree",
    ),
    *("optuna", "pandas", "peft", "PIL", "pyarrow", "pydantic", "pygame", "ray", "rich", "rl_zoo3", "rliable", "safetensors"),
    *("scipy", "sqlalchemy", "sympy", "tensorboard", "tokenizers", "tqdm", "transformers", "trl", "yaml", "torch._decomp"),
    *("torch._dynamo", "torch._export", "torch._functorch", "torch._higher_order_ops", "torch._inductor", "torch._library"),
    *("torch._prims", "torch._prims_common", "torch._refs", "torch._subclasses", "torch.ao", "torch.compiler"),
    *("torch.distributed", "torch.export", "torch.fx", "torch.jit", "torch.onnx", "torch.package", "torch.profiler"),
    *("torch.testing", "torch.utils.tensorboard"),
)
# As for an installed package, whose own errors mypy does not report.
CONFIGURATION = f"""
[mypy]
strict = true
follow_imports = silent
[mypy-sb3_ano.*]
ignore_errors = true
[mypy-{",".join(f"{package}.*" for package in SKIPPED)}]
ignore_missing_imports = true
follow_imports = skip
follow_imports_for_stubs = true
"""


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """The lines with errors, by file, and the report."""
    directory = tmp_path_factory.mktemp("mypy")
    configuration = directory / "mypy.ini"
    configuration.write_text(CONFIGURATION)

    options = ["--config-file", configuration, "--cache-dir", directory / "cache"]
    command = [sys.executable, "-m", "mypy", *options, PROGRAMS / "right.py", PROGRAMS / "wrong.py"]
    checked = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(ROOT)}, timeout=550)
    assert checked.returncode == 1, checked.stdout + checked.stderr  # there are errors, and mypy itself did not fail

    lines = {"right.py": set(), "wrong.py": set()}
    for name, line in re.findall(r"(\w+\.py):(\d+): error:", checked.stdout):
        lines[name].add(int(line))
    return lines, checked.stdout


def test_a_right_program_has_no_errors(errors):
    lines, report = errors
    assert not lines["right.py"], report


def test_each_mistake_of_a_wrong_program_is_an_error_and_nothing_else_is(errors):
    lines, report = errors
    program = (PROGRAMS / "wrong.py").read_text().splitlines()
    mistakes = {number for number, line in enumerate(program, start=1) if line.endswith("  # wrong")}
    assert len(mistakes) >= 50
    assert lines["wrong.py"] == mistakes, report


def test_the_right_program_uses_every_public_name():
    program = (PROGRAMS / "right.py").read_text()
    used = set(re.findall(r"\w+", program))
    listed = set(re.findall(r"\.\. py:data:: [\w.]+\.(\w+)|\.\. auto\w+:: [\w.]+\.(\w+)", (ROOT / "docs/api.md").read_text()))
    names = {name for pair in listed for name in pair if name}
    assert len(names) > 50
    assert names <= used


def test_type_checkers_know_the_names_of_the_shapes():
    single = {name for name, shape in SHAPINGS.items() if not isinstance(shape, ShapingPair)}
    for kind, names in ((OneShape, single), (TwoShapes, SHAPINGS.keys() - single)):
        known, _other = get_args(kind)
        assert set(get_args(known)) == names
