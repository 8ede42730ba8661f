"""``.ci/install-torch``: which PyTorch is asked for on which machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / ".ci" / "install-torch"
INDEX = "https://download.pytorch.org/whl/cpu"
PYTHON = """#!/bin/sh
case "$*" in
    *urlopen*) exit $UNREACHABLE ;;
    *install*+cpu*) echo "$*"; exit $NO_CPU_BUILD ;;
    *) echo "$*" ;;
esac
"""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a shell script")


@pytest.mark.parametrize(
    ("system", "gpu", "index_reachable", "cpu_build", "expected"),
    [
        ("Linux", False, True, True, [f"--extra-index-url {INDEX} torch==V+cpu"]),
        ("Linux", False, False, True, ["install torch==V+cpu"]),  # pip's own index or files have it
        ("Linux", False, False, False, ["install torch==V+cpu", "install torch==V"]),
        ("Linux", True, True, True, ["install torch==V"]),
        ("Darwin", False, True, True, ["install torch==V"]),
    ],
)
def test_a_cpu_build_is_installed_where_there_is_no_gpu(system, gpu, index_reachable, cpu_build, expected, tmp_path):
    scripts = {"uname": f"#!/bin/sh\necho {system}\n", "nvidia-smi": f"#!/bin/sh\nexit {int(not gpu)}\n", "python": PYTHON}
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    faults = {"UNREACHABLE": str(int(not index_reachable)), "NO_CPU_BUILD": str(int(not cpu_build))}
    variables = {**os.environ, **faults, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    output = subprocess.check_output([SCRIPT, tmp_path / "python"], env=variables, text=True, timeout=60)
    version = (SCRIPT.parents[1] / "constraints.txt").read_text().split("torch==")[1].split()[0]
    expected = [end.replace("V", version) for end in expected]
    calls = [line for line in output.splitlines() if line.startswith("-m pip")]
    assert [call[-len(end) :] for call, end in zip(calls, expected, strict=True)] == expected
    assert "downloads about" in output
