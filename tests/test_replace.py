"""Files and directories that are replaced: whatever interrupts the process, the old or the new content is there."""

import json
import os
import random
import signal
import stat
import sys
import threading
import time
from pathlib import Path

import pytest

from sb3_ano import _io

# Of files and lists of directories that an interrupt finds open.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")

KINDS = ("file", "directory", "directory without exchange", "files")


def put(kind: str, path: Path, text: str) -> None:
    """Replace the content of a path; a directory has files at two levels."""
    if kind == "file":
        _io.write_file(path, text)
        return
    replace = _io.replace_files if kind == "files" else _io.replace_directory
    with replace(path) as new:
        (new / "top").write_text(text)
        (new / "inner").mkdir()
        (new / "inner" / "deep").write_text(text)
        (new / f"only in {text}").touch()


def content(path: Path) -> str:
    """Return the one text that all files hold; a directory of several versions has none."""
    if path.is_file():
        return path.read_text()
    texts = {(path / name).read_text() for name in ("top", "inner/deep")}
    names = {name for name in os.listdir(path) if name.startswith("only")}
    assert len(texts) == 1, texts
    assert names == {f"only in {text}" for text in texts}
    return texts.pop()


def hidden(directory: Path) -> list[str]:
    return [str(path) for path in directory.rglob("*.sb3_ano")]


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # which protects from the loss of power only
    if request.param.endswith("without exchange"):
        monkeypatch.setattr(_io, "_exchange", lambda one, other: False)
    return request.param


@pytest.mark.parametrize("umask", [0o077, 0o027, 0o022, 0o002, 0o000])
def test_modes_are_those_that_python_gives(tmp_path, umask):
    earlier = os.umask(umask)
    try:
        os.mkdir(tmp_path / "expected")
        (tmp_path / "expected" / "file").write_text("")
        for kind in KINDS:
            put(kind, tmp_path / kind, "text")
        _io.DirectoryLock(tmp_path).release()
        with _io.replace_directory(tmp_path / "private files") as new:
            os.close(os.open(new / "file", os.O_CREAT | os.O_WRONLY, 0o600))  # as safetensors makes them
    finally:
        os.umask(earlier)
    expected = {path.is_dir(): path.stat().st_mode for path in (tmp_path / "expected", tmp_path / "expected" / "file")}
    for path in tmp_path.rglob("*"):
        assert path.stat().st_mode == expected[path.is_dir()], path


def test_an_old_file_or_directory_keeps_its_mode(tmp_path, kind):
    path = tmp_path / "target"
    put(kind, path, "old")
    for mode in (0o700, 0o770):
        path.chmod(mode)
        put(kind, path, "new")
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_links_are_written_through(tmp_path, kind):
    path, link = tmp_path / "elsewhere" / "target", tmp_path / "link"
    link.symlink_to(path)  # to nowhere at first
    for text in ("old", "new"):
        put(kind, link, text)
        assert link.is_symlink()
        assert content(path) == text
    assert os.listdir(path.parent) == ["target"]


def test_what_is_no_regular_file_is_written_to_and_not_replaced(tmp_path):
    _io.write_file(Path(os.devnull), "gone")
    assert Path(os.devnull).is_char_device()
    with pytest.raises(IsADirectoryError, match="a directory is in the place of the file"):
        _io.write_file(tmp_path, "text")
    (tmp_path / "file").touch()
    with (
        pytest.raises(NotADirectoryError, match="a file is in the place of the directory"),
        _io.replace_directory(tmp_path / "file"),
    ):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_write_protected_file_is_not_replaced(tmp_path):
    (tmp_path / "file").touch(0o400)
    with pytest.raises(PermissionError, match="write-protected"):
        _io.write_file(tmp_path / "file", "text")


def test_long_names_can_be_replaced(tmp_path, kind):
    for name in ("a" * 255, "\N{SNOWMAN}" * 85):
        for text in ("old", "new"):
            put(kind, tmp_path / name, text)
            assert content(tmp_path / name) == text


def test_the_current_directory_and_mount_points_are_rejected_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    for path in (Path(), Path(".."), tmp_path):
        with pytest.raises(OSError, match="the current directory cannot be replaced"), _io.replace_directory(path):
            pass
    with pytest.raises(OSError, match="a mount point cannot be replaced"), _io.replace_directory(Path("/proc")):
        pass


def test_others_files_are_kept_on_request(tmp_path):
    path, outside = tmp_path / "target", tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("outside")
    put("directory", path, "old")
    (path / "mine" / "deep").mkdir(parents=True)
    (path / "mine" / "deep" / "note").write_text("mine")
    (path / "link").symlink_to(outside)
    with _io.replace_directory(path, keep_others=True) as new:
        (new / "top").write_text("new")
    assert (path / "top").read_text() == "new"
    assert (path / "mine" / "deep" / "note").read_text() == "mine"
    assert (path / "link").is_symlink()
    assert (outside / "file").read_text() == "outside"


def test_files_that_no_earlier_call_wrote_are_never_replaced(tmp_path):
    path = tmp_path / "target"
    path.mkdir()
    (path / "top").write_text("mine")
    with pytest.raises(FileExistsError, match="not as this command wrote it"):
        put("files", path, "new")
    assert (path / "top").read_text() == "mine"
    assert os.listdir(path) == ["top"]


def test_a_directory_in_the_place_of_a_file_and_the_reverse_are_named_before_anything_is_written(tmp_path):
    path = tmp_path / "target"
    path.mkdir()
    (path / "inner").write_text("mine")
    with pytest.raises(FileExistsError, match="inner is a file, but must be a directory; move it away"):
        put("files", path, "new")
    assert os.listdir(path) == ["inner"]
    (path / "inner").unlink()
    (path / "top").mkdir()
    with pytest.raises(FileExistsError, match="not as this command wrote it"):
        put("files", path, "new")
    assert os.listdir(path) == ["top"]


@pytest.fixture
def half_published(tmp_path, monkeypatch):
    """A directory named by a relative path, in which a process was killed before it moved its files."""
    monkeypatch.chdir(tmp_path)
    path = Path("target")
    put("files", path, "old")
    ready = path / f".files.{'0' * 16}.sb3_ano" / "ready"
    (ready / "inner").mkdir(parents=True)
    names = ("top", "inner/deep", "only in new")
    for name in names:
        (ready / name).write_text("new" if name != "only in new" else "")
    manifest = {name: _io._checksum(ready / name) for name in names}
    (ready / _io._MANIFEST).write_text(json.dumps(manifest))
    return path


def test_the_next_call_moves_the_files_of_a_killed_process_also_to_a_relative_path(half_published):
    _io.remove_leftovers(half_published)
    assert content(half_published) == "new"
    assert not hidden(half_published)


def test_files_that_the_user_made_after_a_process_was_killed_are_never_replaced(half_published):
    (half_published / "top").write_text("mine")
    (half_published / "only in new").mkdir()
    (half_published / "inner" / "deep").unlink()
    (half_published / "inner").rmdir()
    (half_published / "inner").write_text("mine, too")
    _io.remove_leftovers(half_published)
    assert (half_published / "top").read_text() == "mine"
    assert (half_published / "inner").read_text() == "mine, too"
    assert (half_published / "only in new").is_dir()
    assert not hidden(half_published)


def test_names_that_are_no_text_are_written(tmp_path):
    name = os.fsdecode(b"caf\xe9")  # of an older file system
    _io.write_file(tmp_path / name, f"about {name}")
    assert (tmp_path / name).read_text() == "about caf\\udce9"
    with _io.replace_files(tmp_path / "target") as new:
        (new / name).write_text("text")
    assert (tmp_path / "target" / name).read_text() == "text"


def test_a_lock_whose_file_was_removed_keeps_nobody_out_and_lets_one_in(tmp_path):
    holder = _io.DirectoryLock(tmp_path)
    waiting: list[_io.DirectoryLock] = []
    thread = threading.Thread(target=lambda: waiting.append(_io.DirectoryLock(tmp_path)))
    thread.start()
    time.sleep(0.2)  # until it waits for the file that is removed now
    (tmp_path / ".lock").unlink()
    holder.release()
    thread.join()
    with pytest.raises(BlockingIOError, match="is in use"):
        _io.DirectoryLock(tmp_path, patience=0.0)
    waiting[0].release()


def test_json_is_strict(tmp_path):
    for number in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="run.json cannot be written, because JSON has no NaN and no Inf"):
            _io.write_json(tmp_path / "run.json", {"returns": [1.0, number]})
    assert not list(tmp_path.iterdir())


def test_a_strangers_directory_leads_to_no_file_outside_of_it(tmp_path):
    path, secret = tmp_path / "target", tmp_path / "secret"
    secret.write_text("mine")
    put("files", path, "old")
    checksum = _io._checksum(secret)
    (path / _io._MANIFEST).write_text(json.dumps({"../secret": checksum, str(secret): checksum, "up/secret": checksum}))
    (path / "up").symlink_to(tmp_path)
    ready = path / f".files.{'0' * 16}.sb3_ano" / "ready"
    (ready / "up").mkdir(parents=True)
    (ready / "up" / "secret").write_text("theirs")
    (ready / _io._MANIFEST).write_text("{}")
    _io.remove_leftovers(path)
    assert secret.read_text() == "mine"
    assert not hidden(path)


def test_running_writers_keep_their_files_and_all_threads_succeed(tmp_path, kind):
    path, errors = tmp_path / "target", []
    put(kind, path, "old")

    def write(name: int) -> None:
        try:
            for number in range(15):
                place = path if kind != "files" else tmp_path / f"of {name}"
                put(kind, place, f"{name} {number}")
                _io.remove_leftovers(tmp_path)
                _io.restore(path)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert content(path)
    assert not hidden(tmp_path)


def test_a_forked_child_does_not_protect_the_leftovers_of_a_killed_process(tmp_path):
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        with _io.replace_directory(tmp_path / "target"):
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            os.write(writing, str(child).encode())
            time.sleep(60)
    child = int(os.read(reading, 20))
    try:
        _io.remove_leftovers(tmp_path)
        assert len(hidden(tmp_path)) == 1, "of a process that lives"
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        _io.remove_leftovers(tmp_path)
        assert not hidden(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)


def test_without_locks_only_old_leftovers_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(_io, "fcntl", None)
    leftovers = [tmp_path / f".{name}.{'0' * 16}.sb3_ano" for name in ("file", "directory")]
    leftovers[0].touch()
    leftovers[1].mkdir()
    _io.write_file(tmp_path / "file", "text")
    put("directory", tmp_path / "directory", "text")
    assert len(hidden(tmp_path)) == 2
    for path in leftovers:
        os.utime(path, (0, 0))
    _io.write_file(tmp_path / "file", "text")
    assert not hidden(tmp_path)


def test_a_process_killed_while_it_removes_what_it_replaced_loses_nothing(tmp_path, kind):
    """Its directory then holds a part of the old, or of the written files."""
    path = tmp_path / "target"
    put(kind, path, "old")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_io.shutil, "rmtree", lambda directory, **options: [file.unlink() for file in directory.rglob("top")])
        put(kind, path, "new")
    _io.remove_leftovers(tmp_path)
    _io.remove_leftovers(path)
    assert content(path) == "new"
    assert not hidden(tmp_path)


class Interrupted:
    """Raise an error before the n-th bytecode instruction of the module in this thread, and again some instructions later.

    :param distances: number of instructions up to each error
    """

    def __init__(self, distances: list[int], error: type[BaseException]) -> None:
        self.distances, self.error = list(distances), error

    def __call__(self, frame, event, argument):
        # Python prints errors of a destructor, and continues.
        if frame.f_code.co_filename != _io.__file__ or "__del__" in (frame.f_code.co_name, frame.f_back.f_code.co_name):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode" and self.distances:
            self.distances[0] -= 1
            if self.distances[0] == 0:
                self.distances.pop(0)
                raise self.error
        return self


def is_sound_after(kind: str, here: Path, distances: list[int], error: type[BaseException], *, is_first: bool) -> bool:
    """Interrupt a replacement, and check what is there then and after the next call; return False if it ends before."""
    path = here / "target"
    if not is_first:
        put(kind, path, "old")

    interrupted = False

    def replace() -> None:
        nonlocal interrupted
        sys.settrace(Interrupted(distances, error))
        try:
            put(kind, path, "new")
        except error:
            interrupted = True
        finally:
            sys.settrace(None)

    # In a thread: an error that a tracer raises at the end of a handler leaves the handled one behind in the thread.
    thread = threading.Thread(target=replace)
    thread.start()
    thread.join()
    if not interrupted:
        assert content(path) == "new"
        return False

    # As whatever reads or writes there next does.
    _io.restore(path)
    if kind == "files":
        _io.remove_leftovers(path)
    if not is_first:
        assert content(path) in ("old", "new"), distances
    elif kind != "files" and path.exists():
        assert content(path) == "new", distances

    put(kind, path, "newer")
    assert content(path) == "newer"
    assert os.listdir(here) == ["target"], distances
    assert not hidden(here), distances
    return True


def interrupt_everywhere(kind: str, directory: Path, error: type[BaseException], step: int = 1) -> int:
    """Interrupt a replacement before every instruction, or one in ``step``; return the number of interruptions."""
    count = 0
    for is_first in (False, True):
        number = 1
        while is_sound_after(kind, directory / f"{number} {is_first}", [number], error, is_first=is_first):
            number += step
            count += 1
    return count


def test_an_interrupt_at_some_instructions_leaves_the_old_or_the_new_content(tmp_path, kind):
    assert interrupt_everywhere(kind, tmp_path, KeyboardInterrupt, step=59 if kind == "files" else 11) > 50


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_at_any_instruction_leaves_the_old_or_the_new_content(tmp_path, kind, error):
    count = interrupt_everywhere(kind, tmp_path, error, step=3 if kind == "files" else 1)
    print(f"{kind}: {count} interruptions by {error.__name__}")
    assert count > 600


@pytest.mark.slow
def test_a_second_interrupt_while_the_first_one_is_handled_loses_nothing(tmp_path, kind):
    generator, count = random.Random(0), 0
    for number in range(2000):
        distances = [generator.randint(1, 3500 if kind == "files" else 900), generator.randint(1, 100)]
        count += is_sound_after(kind, tmp_path / str(number), distances, KeyboardInterrupt, is_first=number % 5 == 0)
    print(f"{kind}: {count} interruptions, each followed by a second one")
    assert count > 500


def replace_without_end(kind: str, path: Path, started: int) -> None:
    """Replace with growing numbers, as a program does that handles its signals as Python does.

    :param started: file descriptor to write to before the first replacement
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    os.write(started, b"!")
    number = 0
    while True:
        number += 1
        put(kind, path, f"{os.getpid()} {number}")


def kill_at_random(kind: str, directory: Path, kills: int) -> int:
    """Send signals to processes that replace the same content again and again; return how many of them had begun."""
    generator, begun = random.Random(0), 0
    path = directory / "target"
    put(kind, path, "old")
    reading, writing = os.pipe()
    for _ in range(kills):
        number = generator.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL])
        child = os.fork()
        if child == 0:
            try:
                with open(os.devnull, "w") as sys.stderr:
                    replace_without_end(kind, path, writing)
            finally:
                os._exit(1)
        os.read(reading, 1)
        time.sleep(generator.uniform(0.0, 0.02))
        os.kill(child, number)
        if number != signal.SIGKILL:
            time.sleep(0.01)
            os.kill(child, signal.SIGKILL)  # Python continues after an error in a destructor
        os.waitpid(child, 0)

        _io.restore(path)
        if kind == "files":
            _io.remove_leftovers(path)
        begun += content(path).startswith(str(child))  # raises if it is of two versions, or missing
        put(kind, path, "next")
        assert content(path) == "next"
        assert os.listdir(directory) == ["target"]
        assert not hidden(directory)
    os.close(reading)
    os.close(writing)
    return begun


def test_a_killed_process_leaves_the_old_or_the_new_content(tmp_path, kind):
    assert kill_at_random(kind, tmp_path, 25) > 5


@pytest.mark.slow
def test_many_killed_processes_leave_the_old_or_the_new_content(tmp_path, kind):
    begun = kill_at_random(kind, tmp_path, 2000)
    print(f"{kind}: 2000 killed processes, of which {begun} had replaced something")
    assert begun > 500
