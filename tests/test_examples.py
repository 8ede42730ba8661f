"""The fenced Python and shell blocks of README and docs run on a CPU, without a network, in an empty directory.

The blocks of a page run in their order, and its Python blocks share one interpreter, as in a notebook. A comment before a
block can say ``<!-- not run: REASON -->``, with one of REASONS, or ``<!-- shortened: OLD -> NEW | OLD -> NEW -->``: the test
runs NEW instead.
"""

import importlib
import json
import os
import pkgutil
import re
import runpy
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.common import ROOT, variables
from tests.hub.hub_server import running_hub

#: Why a block is not run.
REASONS = {"trains for hours", "sets up environments", "runs the tests", "measures the machine"}
NEEDS = ("a GPU for days", "several GPUs", "a paid endpoint", "several machines", "an account")
REASONS |= {f"needs {what}" for what in (*NEEDS, "a pushed agent", "a language model of 100 MB")}
# Its commands have a test of their own.
EXAMPLE = re.compile(r"^## Example: reward hacking$.*?(?=^## )", re.MULTILINE | re.DOTALL)
MARKER = r"(?:<!-- (?P<marker>not run|shortened): (?P<text>[^\n]+) -->\n)?"
BLOCK = re.compile(rf"^{MARKER}```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
#: Pages whose blocks take at most ten seconds.
FAST = {"docs/algorithms.md", "docs/coming_from_ppo.md", "docs/custom.md", "docs/report.md", "docs/shaping.md"}
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
# Runs the blocks of a page, [language, code] each; a block that begins with a prompt is a doctest.
SESSION = """
import doctest, json, subprocess, sys
blocks = json.load(sys.stdin)
for number, (language, code) in enumerate(blocks, start=1):
    print(f"block {number}:\\n{code}", file=sys.stderr, flush=True)
    if language == "bash":
        subprocess.run(["bash", "-euo", "pipefail", "-c", code], check=True, stdin=subprocess.DEVNULL)
    elif code.startswith(">>>"):
        test = doctest.DocTestParser().get_doctest(code, globals(), f"block {number}", None, None)
        assert doctest.DocTestRunner().run(test).failed == 0
    else:
        exec(compile(code, f"block {number}", "exec"), globals())
"""


def blocks(page: str) -> list[dict[str, str]]:
    """The blocks of a page that a reader can run, shortened."""
    text = EXAMPLE.sub("", (ROOT / page).read_text())
    found = [match.groupdict() for match in BLOCK.finditer(text)]
    assert len(found) == len(re.findall(r"^```\w+$", text, re.MULTILINE)), "no block is overlooked"
    found = [block for block in found if block["language"] in ("python", "bash")]
    for block in found:
        if block["marker"] == "shortened":
            for old, new in (change.split(" -> ") for change in block["text"].split(" | ")):
                assert old in block["code"]
                block["code"] = block["code"].replace(old, new)
    return found


#: Variables of a process with the commands of this environment.
COMMANDS = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "MPLBACKEND": "agg"}


@pytest.mark.parametrize("page", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in PAGES])
def test_the_blocks_of_the_page_run(page, tmp_path):
    found = [[block["language"], block["code"]] for block in blocks(page) if block["marker"] != "not run"]
    if not found:
        pytest.skip("nothing to run")
    for name in ("zoo_runner.py", "examples", "benchmarks", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    with running_hub() as hub:
        env = variables(HF_HOME=str(tmp_path / "hf"), **COMMANDS, **hub.variables)
        run = [sys.executable, "-c", SESSION]
        done = subprocess.run(run, cwd=tmp_path, env=env, input=json.dumps(found), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]


@pytest.mark.slow
def test_the_demo_trains_evaluates_and_plots(tmp_path, monkeypatch, capsys):
    demo, start = runpy.run_path(str(ROOT / "examples/demo.py")), subprocess.Popen
    few = ["-n", "600", "--eval-freq", "300"]
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: start([*command, *few], **options))
    monkeypatch.setattr(sys, "argv", ["demo.py", "--folder", str(tmp_path)])
    demo["main"]()
    assert re.search(r"^ANO: return \d+ .*\nPPO: return \d+ ", capsys.readouterr().out, re.MULTILINE)
    assert (tmp_path / "learning_curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first_agent", "step_size"])
def test_the_notebook_runs(name, tmp_path, monkeypatch):
    """In a kernel of its own; what its cells call ``shortened`` is replaced as in the blocks above."""
    notebook = nbformat.read(ROOT / f"examples/notebooks/{name}.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells), "outputs are stripped"
    for cell in cells:
        old, new = cell.metadata.get("shortened", " -> ").split(" -> ")
        assert old in cell.source
        cell.source = cell.source.replace(old, new) if old else cell.source
    for variable, value in variables(**COMMANDS | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}).items():
        monkeypatch.setenv(variable, value)
    NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)


def test_the_reasons_for_not_running_a_block_are_known():
    assert {block["text"] for page in PAGES for block in blocks(page) if block["marker"] == "not run"} == REASONS


def test_the_options_of_commands_that_are_not_run_exist(tmp_path):
    """With commands that print their arguments instead, and the parsers of the installed TRL and of this package."""
    pytest.importorskip("trl")
    from sb3_ano.llm.training import ALGORITHMS, Options, PolicyConfig, _TrlParser

    fake = 'trl() { printf "%s " trl "$@"; echo; }; sb3-ano() { printf "%s " ours "${@:3}"; echo; }\n'
    fake += 'accelerate() { printf "%s " ours "${@#*sb3_ano.llm}" | sed "s/.* train/ours/"; echo; }\n'
    code = fake
    for block in blocks("docs/llm.md"):
        # The other ones install packages.
        if block["marker"] == "not run" and "GPU" in block["text"]:
            code += block["code"]
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 8
    for program, *arguments in lines:
        if program == "trl":
            parser = importlib.import_module(f"trl.scripts.{arguments.pop(0)}").make_parser()
        else:
            algo = arguments[arguments.index("--algo") + 1]
            parser = _TrlParser((Options, PolicyConfig, ALGORITHMS[algo][0].config_class), allow_abbrev=False)
        assert parser.parse_known_args(arguments)[1] == []


TEXTS = "".join((ROOT / page).read_text() for page in PAGES)
DOCUMENTED = set(re.findall(r"^\.\. (?:auto|py:)\w+:: (sb3_ano\.[\w.]+)$", TEXTS, re.MULTILINE))
PACKAGES = ["", ".algorithms", ".bench.report", ".checkpoints", ".envs", ".hub", ".llm", ".shaping", ".zoo"]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_api_reference(package):
    names = set(importlib.import_module(f"sb3_ano{package}").__all__) - {"__version__"}
    assert {name for name in names if not {f"sb3_ano{package}.{name}", f"sb3_ano.{name}"} & DOCUMENTED} == set()


def test_every_documented_path_can_be_imported():
    pytest.importorskip("ray")
    pytest.importorskip("trl")
    assert len([pkgutil.resolve_name(path) for path in DOCUMENTED]) > 50
