"""Checkpoint files survive whatever happens to the process that writes them."""

import errno
import io
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

from sb3_ano.checkpoints import files
from sb3_ano.checkpoints.files import FolderLock, checkpoint_files, newest_checkpoint, read_checkpoint, write_checkpoint


def model_file(content: bytes = b"parameters") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("policy.pth", content)
    return file.getvalue()


def write(folder: Path, steps: int, keep: int = 3, state: bytes = b"state") -> Path:
    return write_checkpoint(folder, steps, model_file(), state, {"about": steps}, keep)


def steps_in(folder: Path) -> list[int]:
    return [read_checkpoint(path).num_timesteps for path in checkpoint_files(folder)]


def write_and_die(folder: Path, steps: int, after: int) -> bool:
    """Write in a child process that is killed before it executes the n-th line of the module; False if it got through."""
    child = os.fork()
    if child == 0:
        lines = iter(range(after))

        def trace(frame, event, argument):
            if frame.f_code.co_filename != files.__file__:
                return None
            if event == "line" and next(lines, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        write(folder, steps, keep=2)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def test_a_process_killed_at_any_line_leaves_the_checkpoints_of_before_or_the_new_one_too(tmp_path):
    seen = set()
    for after in range(1000):
        folder = tmp_path / str(after)
        folder.mkdir()
        write(folder, 100, keep=2)
        write(folder, 200, keep=2)
        killed = write_and_die(folder, 300, after)
        found = steps_in(folder)  # each of them is whole
        assert found in ([200, 100], [300, 200, 100], [300, 200])
        assert newest_checkpoint(folder).num_timesteps == found[0]
        seen.add(tuple(found))
        write(folder, 400, keep=2)  # what the dead left behind is in nobody's way
        assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in checkpoint_files(folder))
        if not killed:
            break
    assert after > 15
    assert seen == {(200, 100), (300, 200, 100), (300, 200)}


def test_a_file_that_was_cut_off_anywhere_is_refused(tmp_path):
    path = write(tmp_path, 100, state=os.urandom(3000))
    content = path.read_bytes()
    for length in [*range(0, len(content), 37), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="checkpoint_100_steps.zip is no checkpoint, or is damaged or cut off"):
            read_checkpoint(path)


def test_a_changed_byte_is_noticed_or_does_not_matter(tmp_path):
    path = write(tmp_path, 100, state=os.urandom(3000))
    content, sound = path.read_bytes(), read_checkpoint(path)
    refused = 0
    for position in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[position] ^= 0x41
        path.write_bytes(damaged)
        try:
            assert read_checkpoint(path) == sound
        except ValueError:
            refused += 1
    assert refused > len(content) / 3 * 0.8


def test_the_newest_whole_checkpoint_counts_and_one_line_tells_of_each_that_is_skipped(tmp_path):
    for steps in (9_000, 10_000, 11_000):
        write(tmp_path, steps)
    newest, second, oldest = checkpoint_files(tmp_path)
    newest.write_bytes(newest.read_bytes()[:-10])
    lines: list[str] = []
    assert newest_checkpoint(tmp_path, lines.append).path == second
    assert len(lines) == 1
    assert "checkpoint_11000_steps.zip" in lines[0]
    second.write_bytes(b"")
    oldest.unlink()
    assert newest_checkpoint(tmp_path, lines.append) is None


def test_a_checkpoint_holds_what_was_written(tmp_path):
    checkpoint = read_checkpoint(write(tmp_path, 7, state=b"what a training is"))
    assert (checkpoint.num_timesteps, checkpoint.details, checkpoint.state) == (7, {"about": 7}, b"what a training is")
    with zipfile.ZipFile(checkpoint.path) as archive:
        assert archive.read("policy.pth") == b"parameters"


def test_the_last_ones_stay_and_other_files_too(tmp_path):
    (tmp_path / "checkpoint_of_mine.zip").write_bytes(b"not ours")
    for steps in (5, 50, 500, 5000):
        write(tmp_path, steps, keep=2)
    assert steps_in(tmp_path) == [5000, 500]
    assert (tmp_path / "checkpoint_of_mine.zip").exists()


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_costs_no_checkpoint_and_leaves_no_half_one(tmp_path, monkeypatch, call):
    write(tmp_path, 100, keep=1)

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(files.os, call, full)
        with pytest.raises(OSError, match="No space left"):
            write(tmp_path, 200, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_100_steps.zip"]
    assert steps_in(tmp_path) == [100]


def test_a_checkpoint_of_another_format_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(files, "FORMAT", 99)
        path = write(tmp_path, 1)
    with pytest.raises(ValueError, match="format 99; this version of sb3_ano reads format 1"):
        read_checkpoint(path)


def test_one_process_writes_into_a_folder_and_its_death_frees_it(tmp_path):
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from pathlib import Path\nfrom sb3_ano.checkpoints.files import FolderLock\n"
            "lock = FolderLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(BlockingIOError, match="is in use"):
            FolderLock(tmp_path)
    finally:
        holder.kill()
        holder.communicate()
    FolderLock(tmp_path)  # and this process may ask twice
    FolderLock(tmp_path).release()


def test_a_writer_of_large_files_killed_at_random_moments_leaves_whole_ones(tmp_path):
    moments = np.random.default_rng(0).uniform(0.0, 0.05, 20)
    write(tmp_path, 1, keep=3)
    for number, moment in enumerate(moments):
        child = os.fork()
        if child == 0:
            for step in range(1000):
                write(tmp_path, 2 + 1000 * number + step, keep=3, state=bytes(3_000_000))
            os._exit(0)
        time.sleep(moment)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert len(steps_in(tmp_path)) >= 1
    write(tmp_path, 10**6, keep=3)
    assert len(checkpoint_files(tmp_path)) == 3  # the last to write cleans up after the dead
