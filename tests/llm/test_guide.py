"""The fenced examples of the guides: they run in the given order, in an empty directory, on a CPU and without a network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from trl.scripts import reward, sft

from sb3_ano.llm.training import ALGORITHMS, Options, PolicyConfig, _TrlParser
from tests.llm.tiny import ROOT, environment

#: Why a block is not run; a comment before it says so.
REASONS = {"needs a GPU for days", "needs several GPUs", "needs a paid endpoint"}
# Its commands have a test of their own.
EXAMPLE = re.compile(r"^## Example: reward hacking$.*?(?=^## )", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


def blocks(name: str) -> list[dict[str, str]]:
    text = EXAMPLE.sub("", (ROOT / "docs" / name).read_text())
    found = [match.groupdict() for match in BLOCK.finditer(text)]
    assert len(found) == text.count("```") / 2  # no block is overlooked
    return [block for block in found if block["language"] in ("python", "bash")]


def bash(code: str, folder: Path) -> str:
    """Run commands; those of this environment come first."""
    variables = environment() | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", code]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"{code}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "outputs"), [("llm.md", ["comparison/report.md", "ano/final", "lora/final"]), ("win_rates.md", [])]
)
def test_the_examples_run_as_they_stand(name, outputs, tmp_path):
    for block in blocks(name):
        if block["reason"] is None:
            code = block["code"] if block["language"] == "bash" else f"python - <<'END_OF_BLOCK'\n{block['code']}END_OF_BLOCK"
            bash(code, tmp_path)
    for output in outputs:
        assert (tmp_path / output).exists(), output


def test_only_what_needs_hardware_or_money_is_not_run():
    reasons = [block["reason"] for name in ("llm.md", "win_rates.md") for block in blocks(name)]
    assert {reason for reason in reasons if reason} == REASONS
    assert reasons.count(None) >= 7


def test_the_options_of_commands_that_are_not_run_exist(tmp_path):
    """With commands that print their arguments instead, and the parsers of the installed TRL and of this package."""
    fake = 'trl() { printf "%s " trl "$@"; echo; }; sb3-ano() { printf "%s " ours "${@:3}"; echo; }\n'
    fake += 'accelerate() { printf "%s " ours "${@#*sb3_ano.llm}" | sed "s/.* train/ours/"; echo; }\n'
    code = fake + "".join(block["code"] for block in blocks("llm.md") if block["reason"])
    lines = [line.split() for line in bash(code, tmp_path).splitlines()]
    assert len(lines) == 8
    for program, *arguments in lines:
        if program == "trl":
            parser = {"sft": sft, "reward": reward}[arguments.pop(0)].make_parser()
        else:
            algo = arguments[arguments.index("--algo") + 1]
            parser = _TrlParser((Options, PolicyConfig, ALGORITHMS[algo][0].config_class), allow_abbrev=False)
        assert parser.parse_known_args(arguments)[1] == []
