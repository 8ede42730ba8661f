"""Files that are there as a whole, and the shell of all command lines: exit statuses, and errors in one line."""

import os
import stat
from unittest import mock

import pytest

from sb3_ano import _io, cli


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch, call):
    path = tmp_path / "new" / "file.txt"
    _io.write_file(path, "first")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644

    monkeypatch.setattr(os, call, mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        _io.write_file(path, b"second")
    assert path.read_text() == "first"
    assert [file.name for file in path.parent.iterdir()] == ["file.txt"]


def test_a_directory_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "report"
    for text in ("first", "second"):
        with _io.replace_directory(path) as new:
            (new / text).touch()
    assert os.listdir(path) == ["second"]
    # An error of the writer; and a new directory that cannot take the place of the old one, which is put back.
    for fail in (lambda new: os.rmdir(new / "third"), os.rmdir):
        with pytest.raises(FileNotFoundError), _io.replace_directory(path) as new:
            fail(new)
        assert (os.listdir(path), os.listdir(tmp_path)) == (["second"], ["report"])


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ValueError("n=0 is not\n  allowed"), 2, "error: n=0 is not allowed"),
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


def test_the_traceback_is_shown_on_request(monkeypatch, capsys):
    monkeypatch.setenv("SB3_ANO_TRACEBACK", "1")
    assert cli.run(mock.Mock(side_effect=ValueError("wrong"))) == 2
    shown = capsys.readouterr().err.splitlines()
    assert (shown[0], shown[-1]) == ("Traceback (most recent call last):", "ValueError: wrong")


@pytest.mark.parametrize(("command", "message"), [("bench rum", "'sb3-ano bench --"), ("trian", "did you mean 'train'?")])
def test_an_unknown_command_is_one_line_of_its_group(command, message, capsys):
    assert cli.main(command.split()) == 2
    assert message in capsys.readouterr().err
