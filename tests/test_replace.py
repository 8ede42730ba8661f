"""Files and directories that are replaced: whatever interrupts the process, the old or the new content is there."""

import os
import random
import signal
import sys
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


class Interrupted:
    """Raise an error before the n-th bytecode instruction of the module in this thread, and again some instructions later.

    :param distances: number of instructions up to each error
    """

    def __init__(self, distances: list[int], error: type[BaseException]) -> None:
        self.distances, self.error = list(distances), error

    def __call__(self, frame, event, argument):
        # Python prints errors of a destructor, and goes on.
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
    sys.settrace(Interrupted(distances, error))
    try:
        put(kind, path, "new")
    except error:
        interrupted = True
    finally:
        sys.settrace(None)
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
    count = interrupt_everywhere(kind, tmp_path, error)
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


def replace_without_end(kind: str, path: Path) -> None:
    """Replace with growing numbers, as a program does that handles its signals as Python does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    number = 0
    while True:
        number += 1
        put(kind, path, f"{os.getpid()} {number}")


def kill_at_random(kind: str, directory: Path, kills: int) -> int:
    """Send signals to processes that replace the same content again and again; return how many of them had begun."""
    generator, begun = random.Random(0), 0
    path = directory / "target"
    put(kind, path, "old")
    for _ in range(kills):
        number = generator.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL])
        child = os.fork()
        if child == 0:
            try:
                with open(os.devnull, "w") as sys.stderr:
                    replace_without_end(kind, path)
            finally:
                os._exit(1)
        time.sleep(generator.uniform(0.002, 0.02))
        os.kill(child, number)
        if number != signal.SIGKILL:
            time.sleep(0.01)
            os.kill(child, signal.SIGKILL)  # Python goes on after an error in a destructor
        os.waitpid(child, 0)

        _io.restore(path)
        if kind == "files":
            _io.remove_leftovers(path)
        begun += content(path).startswith(str(child))  # raises if it is of two versions, or missing
        put(kind, path, "next")
        assert content(path) == "next"
        assert os.listdir(directory) == ["target"]
        assert not hidden(directory)
    return begun


def test_a_killed_process_leaves_the_old_or_the_new_content(tmp_path, kind):
    assert kill_at_random(kind, tmp_path, 25) > 5


@pytest.mark.slow
def test_many_killed_processes_leave_the_old_or_the_new_content(tmp_path, kind):
    begun = kill_at_random(kind, tmp_path, 2000)
    print(f"{kind}: 2000 killed processes, of which {begun} had replaced something")
    assert begun > 500
