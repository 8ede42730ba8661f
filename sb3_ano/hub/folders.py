"""Directories of agents: written whole or not at all, and never a source of modules."""

import contextlib
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from sb3_ano._io import replace_directory


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str], own: Collection[str]) -> Iterator[Path]:
    """Yield a new directory that takes the place of ``path`` if the block ends without an error.

    :param path: directory that does not exist, is empty, or holds only files with names in ``own``, which are replaced
    :param own: names of the files that may be replaced
    :raises FileExistsError: if ``path`` is a file, or a directory with other content
    """
    target = Path(os.path.realpath(path))  # a link to a directory stays a link
    _check_replaceable(target, own)
    with replace_directory(target) as directory:
        yield directory
        _check_replaceable(target, own)  # again, because the block may have taken minutes


def _check_replaceable(path: Path, own: Collection[str]) -> None:
    if not path.exists():
        return
    allowed = "allowed are a new directory and one that holds only an agent"
    if not path.is_dir():
        raise FileExistsError(f"path={str(path)!r} is a file; {allowed}")
    others = sorted(entry.name for entry in path.iterdir() if entry.name not in own or not entry.is_file())
    if others:
        raise FileExistsError(f"path={str(path)!r} holds {others[0]!r}, which would be lost; {allowed}")


@contextlib.contextmanager
def no_imports_from(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Import no module from a directory that a stranger filled.

    The current directory is on Python's path. PyTorch imports some modules late, and looks for packages that are not
    installed: a file of the right name in the directory would run.

    :param folder: directory to take off Python's path inside the block
    """
    path = sys.path.copy()
    with contextlib.suppress(ValueError):  # raised for a name with a null byte
        excluded = os.path.realpath(folder)
        sys.path[:] = [entry for entry in path if os.path.realpath(entry or os.curdir) != excluded]
    try:
        yield
    finally:
        sys.path[:] = path
