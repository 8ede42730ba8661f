"""Folders that a command makes on its way."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def no_empty_folders(*folders: Path) -> Iterator[None]:
    """Where the block fails, remove what it made of these folders and left empty.

    :param folders: the innermost first
    """
    made = [folder for folder in folders if not folder.exists()]
    try:
        yield
    except BaseException:
        for folder in made:
            with contextlib.suppress(OSError):  # it is not empty, or was never made
                folder.rmdir()
        raise
