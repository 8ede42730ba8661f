"""Files that are there as a whole, locks, and facts about the machine."""

import os
import platform
import stat
from importlib import metadata
from unittest import mock

import pytest

from sb3_ano import _io


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


def test_facts():
    assert _io.machine()["python"] == platform.python_version()
    assert _io.versions(["torch", "no-such-package"]) == {"torch": metadata.version("torch")}
    assert 1 <= _io.cores() <= (os.cpu_count() or 1)
    assert _io.now().endswith("+00:00")
