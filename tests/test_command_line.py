"""The shell of all command lines: exit statuses, and errors in one line."""

from unittest import mock

import pytest

from sb3_ano import cli


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ValueError("n=0 is not\n  allowed"), 2, "error: n=0 is not allowed"),
        (KeyError("name"), 2, "error: 'name' (SB3_ANO_TRACEBACK=1 shows where it comes from)"),
        (OSError(), 2, "error: OSError()"),
        (RuntimeError("\x1b[2Jfoo"), 2, "error: ?[2Jfoo (SB3_ANO_TRACEBACK=1 shows where it comes from)"),
        (SystemExit("no such file"), 2, "error: no such file"),
        (SystemExit(3), 3, ""),
        (SystemExit(), 0, ""),
        (KeyboardInterrupt(), 130, "run it again"),
    ],
)
def test_an_error_is_one_line_and_an_exit_status(error, status, message, capsys):
    assert cli.run(mock.Mock(side_effect=error), interrupted="run it again") == status
    assert capsys.readouterr().err.strip() == message


def test_the_traceback_is_shown_on_request(monkeypatch):
    monkeypatch.setenv("SB3_ANO_TRACEBACK", "1")
    with pytest.raises(ValueError, match="wrong"):
        cli.run(mock.Mock(side_effect=ValueError("wrong")))


def test_groups_have_their_own_commands(capsys):
    assert cli.main(["bench", "--help"]) == 0
    assert "usage: sb3-ano bench" in capsys.readouterr().out
    assert cli.main(["bench", "rum"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert cli.main(["trian"]) == 2
    assert "unknown command 'trian', did you mean 'train'?" in capsys.readouterr().err


def test_names_are_checked_with_a_suggestion():
    message = r"unknown option 'lr', did you mean 'learning_rate'\? \(allowed are gamma, learning_rate\)"
    with pytest.raises(ValueError, match=message):
        cli.check_names("option", ["gamma", "lr"], ["learning_rate", "gamma"])
