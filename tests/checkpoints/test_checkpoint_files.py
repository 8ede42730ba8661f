"""Checkpoint files survive whatever happens to the process that writes them."""

import io
import os
import signal
import sys
import zipfile
from pathlib import Path
from unittest import mock

import pytest

from sb3_ano import _io
from sb3_ano.checkpoints import files
from sb3_ano.checkpoints.files import (
    Checkpoint,
    checkpoint_files,
    newest_checkpoint,
    read_checkpoint,
    remove_checkpoints,
    write_checkpoint,
)


def write(directory: Path, steps: int, keep: int = 3, state: bytes = b"state") -> Path:
    model = io.BytesIO()
    with zipfile.ZipFile(model, "w") as archive:
        archive.writestr("policy.pth", b"parameters")
    return write_checkpoint(directory, steps, model.getvalue(), state, {"about": steps}, keep)


def content_of(path: Path) -> tuple[Checkpoint, bytes]:
    checkpoint = read_checkpoint(path)
    with zipfile.ZipFile(path) as archive:
        return checkpoint, archive.read("policy.pth")


def steps_in(directory: Path) -> list[int]:
    return [read_checkpoint(path).num_timesteps for path in checkpoint_files(directory)]


def write_and_die(directory: Path, steps: int, after: int) -> bool:
    """Write in a child process that is killed before the n-th line of the writing modules; False if it finished."""
    child = os.fork()
    if child == 0:
        lines = iter(range(after))

        def trace(frame, event, argument):
            if frame.f_code.co_filename not in (files.__file__, _io.__file__):
                return None
            if event == "line" and next(lines, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        write(directory, steps, keep=2)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.slow
def test_a_process_killed_at_any_line_leaves_the_old_checkpoints_or_also_the_new_one(tmp_path):
    seen = set()
    for after in range(1000):
        directory = tmp_path / str(after)
        directory.mkdir()
        write(directory, 100, keep=2)
        write(directory, 200, keep=2)
        killed = write_and_die(directory, 300, after)
        steps = steps_in(directory)  # each of them is whole
        assert newest_checkpoint(directory).num_timesteps == steps[0]
        seen.add(tuple(steps))
        write(directory, 400, keep=2)  # removes what the killed process left behind
        assert sorted(directory.iterdir()) == sorted(checkpoint_files(directory))
        if not killed:
            break
    assert after > 25
    assert seen == {(200, 100), (300, 200, 100), (300, 200)}


def test_what_is_named_like_a_checkpoint_and_is_none_is_skipped_and_kept(tmp_path, capsys):
    write(tmp_path, 100)
    (tmp_path / ".checkpoint_of_mine").mkdir()
    (tmp_path / ".checkpoint_notes").write_text("mine")
    (tmp_path / "checkpoint_900_steps.zip").mkdir()
    (tmp_path / "checkpoint_800_steps.zip").symlink_to("nowhere")
    os.mkfifo(tmp_path / "checkpoint_700_steps.zip")
    others = set(tmp_path.iterdir()) - {tmp_path / "checkpoint_100_steps.zip"}

    assert newest_checkpoint(tmp_path).num_timesteps == 100
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith("skipped: ") for line in lines] == [True] * 3

    write(tmp_path, 200, keep=1)
    assert newest_checkpoint(tmp_path).num_timesteps == 200
    assert set(tmp_path.iterdir()) == others | {tmp_path / "checkpoint_200_steps.zip"}
    remove_checkpoints(tmp_path)
    assert set(tmp_path.iterdir()) == others


def test_a_checkpoint_that_cannot_be_read_now_is_not_skipped(tmp_path, monkeypatch):
    write(tmp_path, 100)
    monkeypatch.setattr(files, "read_file", mock.Mock(side_effect=OSError(5, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):  # or the newest would count as damaged, and be removed
        newest_checkpoint(tmp_path)


def test_a_damaged_file_is_rejected_or_as_it_was(tmp_path):
    path = write(tmp_path, 100, state=os.urandom(3000))
    content, sound, rejected = path.read_bytes(), content_of(path), 0
    damaged = [content[:length] for length in [*range(0, len(content), 37), len(content) - 1]]
    damaged += [content[:at] + bytes([content[at] ^ 0x41]) + content[at + 1 :] for at in range(0, len(content), 5)]
    for variant in damaged:
        path.write_bytes(variant)
        try:
            assert content_of(path) == sound
        except ValueError as error:
            rejected += "checkpoint_100_steps.zip is not a checkpoint, or is damaged or truncated" in str(error)
    assert rejected > 0.8 * len(damaged)


def test_the_newest_checkpoints_are_kept_and_found(tmp_path, monkeypatch, capsys):
    (tmp_path / "checkpoint_of_mine.zip").write_bytes(b"not ours")
    for steps in (9_000, 10_000, 11_000):
        write(tmp_path, steps, keep=2)
    newest = newest_checkpoint(tmp_path).path
    assert content_of(newest) == (Checkpoint(newest, 11_000, {"about": 11_000}, b"state"), b"parameters")
    assert steps_in(tmp_path) == [11_000, 10_000]
    assert (tmp_path / "checkpoint_of_mine.zip").exists()
    monkeypatch.setattr(files, "FORMAT", 99)
    assert newest_checkpoint(tmp_path) is None
    assert "its format is 1, and this version of sb3_ano reads format 99" in capsys.readouterr().out
