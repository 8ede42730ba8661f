"""Checkpoint files: written whole or not at all, and read whole before anything in them is unpickled."""

import contextlib
import io
import json
import re
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sb3_ano._io import read_file, remove_leftovers, write_file

FORMAT = 1
_NAME = re.compile(r"checkpoint_(\d+)_steps\.zip")
_MANIFEST = "checkpoint.json"
_STATE = "training_state.pkl"


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. Its file is also a model file, which the algorithm's ``load`` reads.

    :param path: path of the file
    :param num_timesteps: environment steps of the training so far
    :param details: plain JSON values: algorithm, settings, versions, and total number of steps
    :param state: pickled state of the training
    """

    path: Path
    num_timesteps: int
    details: dict[str, Any]
    state: bytes


def write_checkpoint(
    directory: Path,
    steps: int,
    model: bytes,
    state: bytes,
    details: dict[str, Any],
    keep: int,
) -> Path:
    """Write a checkpoint, and remove all but the last ones up to it once it is safely on the disk.

    Only the process that holds the directory's lock may call it.

    :param directory: directory of the checkpoints
    :param steps: environment steps of the training so far
    :param model: content of a file that SB3's ``save`` wrote
    :param state: pickled state of the training
    :param details: plain JSON values
    :param keep: number of checkpoints to keep, including this one
    :return: path of the file
    :raises OSError: if the file cannot be written; the earlier checkpoints then remain
    """
    manifest = {
        "format": FORMAT,
        "num_timesteps": steps,
        "details": details,
    }
    # Entries are added to SB3's file, which ignores them.
    archive = io.BytesIO(model)
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr(_STATE, state)
        file.writestr(_MANIFEST, json.dumps(manifest, indent=1))

    path = directory / f"checkpoint_{steps}_steps.zip"
    write_file(path, archive.getvalue())

    # Newest first
    n_kept = 0
    for other in checkpoint_files(directory):
        if not other.is_file():  # a directory, or a link to nowhere
            continue
        # Those that are further are damaged, or the training would be there.
        is_further = n_kept == 0 and other != path
        if is_further or n_kept >= keep:
            other.unlink(missing_ok=True)
        else:
            n_kept += 1
    return path


def remove_checkpoints(directory: Path) -> None:
    """Remove the checkpoints of a finished training, and their directory if nothing else is in it.

    :param directory: directory of the checkpoints; it need not exist
    """
    remove_leftovers(directory)
    for path in checkpoint_files(directory):
        if path.is_file():
            path.unlink(missing_ok=True)
    (directory / ".lock").unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty
        directory.rmdir()


def checkpoint_files(directory: Path) -> list[Path]:
    """Return the files that are named like checkpoints, newest first, without looking into them."""
    # By number, because file systems have no order, and times can be equal.
    numbered = []
    for path in directory.glob("*.zip"):
        match = _NAME.fullmatch(path.name)
        if match is not None:
            numbered.append((int(match[1]), path))
    return [path for _, path in sorted(numbered, reverse=True)]


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint and verify the checksums of the archive's entries.

    Nothing is unpickled here. The state is a pickle, which can run code: resume only from your own files.

    :param path: path of the file
    :raises ValueError: if the file is damaged, truncated, or not a checkpoint, such as a pipe
    :raises OSError: if the file cannot be read
    """
    path = Path(path)
    # At once, because another process may replace it meanwhile.
    content = io.BytesIO(read_file(path, sys.maxsize))
    try:
        with zipfile.ZipFile(content) as archive:
            # Reading verifies their checksums.
            entries = {name: archive.read(name) for name in archive.namelist()}

        manifest = json.loads(entries[_MANIFEST])
        # Of a later version
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']}, and this version of sb3_ano reads format {FORMAT}")
        return Checkpoint(
            path,
            manifest["num_timesteps"],
            manifest["details"],
            entries[_STATE],
        )
    # A damaged header can name a password, an unknown compression, or an offset outside of the file.
    except Exception as error:
        raise ValueError(f"{path} is not a checkpoint, or is damaged or truncated: {error}") from error


def newest_checkpoint(folder: str | Path, tell: Callable[[str], None] = print) -> Checkpoint | None:
    """Return the newest undamaged checkpoint in a directory, or None.

    Directories and links to nowhere are skipped, too. A file that cannot be read now is not: it may be whole.

    :param folder: directory of the checkpoints
    :param tell: function that receives one line per newer file that is skipped
    :raises OSError: if a file cannot be read
    """
    for path in checkpoint_files(Path(folder)):
        try:
            return read_checkpoint(path)
        except (ValueError, FileNotFoundError, IsADirectoryError) as error:
            tell(f"skipped: {error}")
    return None
