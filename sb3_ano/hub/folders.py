"""A folder that appears whole or not at all."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str], own: Collection[str]) -> Iterator[Path]:
    """A temporary folder beside ``path``, which takes its place when the block ends, and is removed if it fails.

    :param path: may be a folder that is empty or holds nothing but files called as in ``own``, which is then replaced
    :param own: names of the files that may be replaced
    :raises FileExistsError: if ``path`` is a file, or a folder with anything else in it
    """
    target = Path(os.path.realpath(path))
    _require_replaceable(target, own)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        yield temporary
        temporary.chmod(0o755)
        _require_replaceable(target, own)  # it took a while
        _replace(target, temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _require_replaceable(path: Path, own: Collection[str]) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise FileExistsError(
            f"path={str(path)!r} is a file; allowed are a new folder and one with nothing but an agent in it"
        )
    others = sorted(entry.name for entry in path.iterdir() if entry.name not in own or not entry.is_file())
    if others:
        raise FileExistsError(
            f"path={str(path)!r} holds {others[0]!r}, which would be lost; allowed are a new folder and one with nothing but "
            "an agent in it"
        )


def _replace(target: Path, temporary: Path) -> None:
    if not target.exists():
        temporary.rename(target)
        return
    aside = temporary.with_name(f"{temporary.name}.old")
    target.rename(aside)
    try:
        temporary.rename(target)
    except BaseException:
        aside.rename(target)
        raise
    shutil.rmtree(aside)


@contextlib.contextmanager
def no_imports_from(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Import no module from a folder of a stranger's, which is on Python's path where it is the current one.

    PyTorch imports some modules late, and looks for packages that are not installed.
    """
    path = sys.path.copy()
    with contextlib.suppress(ValueError):  # of a name with a null byte
        excluded = os.path.realpath(folder)
        sys.path[:] = [entry for entry in path if os.path.realpath(entry or os.curdir) != excluded]
    try:
        yield
    finally:
        sys.path[:] = path


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file through to the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
