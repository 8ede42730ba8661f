"""The command line of the benchmarks: one line for bad input, and status 2."""

import subprocess
import sys

import pytest

from sb3_ano.bench.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sped"], "unknown command 'sped', did you mean 'speed'? (commands are speed, parity, run, report)"),
        (["speed", "--pairs", "0"], "argument --pairs: '0' is not allowed; allowed are whole numbers from 1"),
        (["speed", "--pairs", "two"], "argument --pairs: 'two' is not allowed; allowed are whole numbers from 1"),
        (["speed", "--block-seconds", "-1"], "argument --block-seconds: '-1' is not allowed; allowed are numbers above 0"),
        (["speed", "--block-seconds", "nan"], "argument --block-seconds: 'nan' is not allowed; allowed are numbers above 0"),
        (["speed", "--cases", "vec9"], "unknown case 'vec9', did you mean 'vec8'?"),
        (["speed", "--contenders", "ano-compile"], "unknown contender 'ano-compile', did you mean 'ano-compiled'?"),
        (["speed", "--sbx-python", "/nowhere/python"], "--sbx-python /nowhere/python cannot be run: No such file"),
        (["speed", "--pears", "2"], "unrecognized arguments: --pears 2"),
        (["parity", "--envs", "HalfCheeta-v4"], "unknown environment 'HalfCheeta-v4'"),
        (["parity", "--contenders", "fast-float"], "unknown contender 'fast-float', did you mean 'fast-float32'?"),
        (["parity", "--jobs", "0"], "argument --jobs: '0' is not allowed"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, capsys, tmp_path):
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [[], ["--help"], ["speed", "--help"], ["parity", "--help"]], ids=" ".join)
def test_help(arguments, capsys):
    assert main(arguments) == 0
    assert "usage: python -m sb3_ano.bench" in capsys.readouterr().out


def test_results_of_other_settings_are_not_mixed(tmp_path, capsys):
    (tmp_path / "cartpole.json").write_text('{"settings": {"pairs": 3}, "case": {}}')
    assert main(["speed", "--cases", "cartpole", "--out", str(tmp_path)]) == 2
    assert "cartpole.json was measured with other settings; --force measures again" in capsys.readouterr().err


def test_help_needs_neither_pytorch_nor_matplotlib():
    code = "import sys; sys.modules['torch'] = None; sys.modules['matplotlib'] = None\n"
    code += "import types; package = types.ModuleType('sb3_ano'); package.__path__ = [sys.argv.pop()]\n"
    code += "sys.modules['sb3_ano'] = package\nfrom sb3_ano.bench.cli import main; sys.exit(main(['speed', '--help']))"
    import sb3_ano

    finished = subprocess.run([sys.executable, "-c", code, *sb3_ano.__path__], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
