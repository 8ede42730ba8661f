"""``.ci/install-torch``: which PyTorch is asked for on which machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / ".ci" / "install-torch"
INDEX = "https://download.pytorch.org/whl/cpu"
PYTHON = """#!/bin/sh
case "$*" in
    *urlopen*) exit ${UNREACHABLE:-0} ;;
    *install*+cpu*) echo "$*"; exit ${NO_CPU_BUILD:-0} ;;
    *) echo "$*" ;;
esac
"""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a shell script")


@pytest.mark.parametrize(
    ("system", "gpu", "faults", "expected"),
    [
        ("Linux", False, {}, [f"--extra-index-url {INDEX} V+cpu"]),
        ("Linux", False, {"UNREACHABLE": "1"}, ["V+cpu"]),  # pip's own index or files have it
        ("Linux", False, {"UNREACHABLE": "1", "NO_CPU_BUILD": "1"}, ["V+cpu", "V"]),
        ("Linux", True, {}, ["V"]),
        ("Darwin", False, {}, ["V"]),
    ],
)
def test_a_cpu_build_is_installed_where_there_is_no_gpu(system, gpu, faults, expected, tmp_path):
    scripts = {"uname": f"#!/bin/sh\necho {system}\n", "nvidia-smi": f"#!/bin/sh\nexit {int(not gpu)}\n", "python": PYTHON}
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    variables = {**os.environ, **faults, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    output = subprocess.check_output([SCRIPT, tmp_path / "python"], env=variables, text=True, timeout=60)
    (pinned,) = re.findall("^torch==.*", (SCRIPT.parents[1] / "constraints.txt").read_text(), re.MULTILINE)
    calls = [line.partition(" install ")[2] for line in output.splitlines() if line.startswith("-m pip")]
    assert calls == [arguments.replace("V", pinned) for arguments in expected]
    assert "downloads about" in output
