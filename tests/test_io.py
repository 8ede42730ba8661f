"""Files that are there as a whole, locks, and the shell of all command lines: exit statuses, and errors in one line."""

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


def test_a_directory_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "report"
    for text in ("first", "second"):
        with _io.replace_directory(path) as new:
            (new / text).touch()
    assert [file.name for file in path.iterdir()] == ["second"]

    with pytest.raises(ValueError, match="None"), _io.replace_directory(path) as new:
        raise ValueError((new / "third").touch())
    assert [file.name for file in path.iterdir()] == ["second"]
    rename = os.replace
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(os, "replace", lambda old, new: (full if old.name == "new" else rename)(old, new))
    with pytest.raises(OSError, match="No space left"), _io.replace_directory(path):
        pass
    assert [file.name for file in path.iterdir()] == ["second"], "the old one is put back"
    assert [file.name for file in tmp_path.iterdir()] == ["report"]


def test_a_lock_is_held_by_one(tmp_path):
    with _io.DirectoryLock(tmp_path, patience=0.0), pytest.raises(BlockingIOError, match="is in use"):
        _io.DirectoryLock(tmp_path, patience=0.0)
    _io.DirectoryLock(tmp_path, patience=0.0).release()


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
