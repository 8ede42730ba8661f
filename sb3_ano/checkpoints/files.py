"""The files of checkpoints: written whole or not at all, and verified before anything in them is unpickled."""

import contextlib
import hashlib
import io
import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
_NAME = re.compile(r"checkpoint_(\d+)_steps\.zip")
_UNFINISHED = ".checkpoint.unfinished"
_MANIFEST, _STATE = "checkpoint.json", "training_state.pkl"


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. Its file is a model that the algorithm's ``load`` takes, too.

    :param path: of the file
    :param num_timesteps: environment steps of the training so far
    :param details: what the writer noted beside that, plain JSON
    :param state: the pickled state of the training
    """

    path: Path
    num_timesteps: int
    details: dict[str, Any]
    state: bytes


def write_checkpoint(folder: Path, num_timesteps: int, model: bytes, state: bytes, details: dict[str, Any], keep: int) -> Path:
    """Write a checkpoint, and when it is safely on the disk, remove all but the last ones.

    :param folder: of the checkpoints
    :param num_timesteps: environment steps of the training so far
    :param model: a file that SB3's ``save`` wrote
    :param state: pickled
    :param details: plain JSON
    :param keep: checkpoints that stay, this one included
    :return: path of the file
    :raises OSError: if it cannot be written; those of before are still there then
    """
    archive = io.BytesIO(model)
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr(_STATE, state)
        checksums = {name: hashlib.sha256(file.read(name)).hexdigest() for name in file.namelist()}
        manifest = {"format": FORMAT, "num_timesteps": num_timesteps, "details": details, "sha256": checksums}
        file.writestr(_MANIFEST, json.dumps(manifest, indent=1))
    path = folder / f"checkpoint_{num_timesteps}_steps.zip"
    write_atomically(path, archive.getbuffer(), folder / _UNFINISHED)
    for outdated in checkpoint_files(folder)[keep:]:
        outdated.unlink(missing_ok=True)
    return path


def write_atomically(path: Path, content: bytes | memoryview, unfinished: Path) -> None:
    """Write a file that is there as a whole or not at all, whenever process or machine die.

    :param path: of the file; one that is there is replaced
    :param content: of the file
    :param unfinished: where to write it first, in the same folder
    :raises OSError: if it cannot be written
    """
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Have the names of the files in a folder survive a loss of power."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoint_files(folder: Path) -> list[Path]:
    """The files that are named as checkpoints, newest first; one of them may be damaged."""
    found = [(int(match[1]), path) for path in folder.glob("*.zip") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint, and compare all of it with its checksums.

    Nothing is unpickled here. The state is a pickle, which is code: go on only from files of your own.

    :param path: of the file
    :raises ValueError: if it is damaged, cut off, or no checkpoint
    :raises OSError: if it cannot be read
    """
    path = Path(path)
    content = io.BytesIO(path.read_bytes())
    try:
        with zipfile.ZipFile(content) as archive:
            manifest = json.loads(archive.read(_MANIFEST))
            found, checksums = manifest["format"], manifest["sha256"]
            entries = {name: archive.read(name) for name in checksums}
            wrong = [name for name, entry in entries.items() if hashlib.sha256(entry).hexdigest() != checksums[name]]
            if wrong:
                raise ValueError(f"the checksum of its entry {wrong[0]!r} does not match")
            checkpoint = Checkpoint(path, manifest["num_timesteps"], manifest["details"], entries[_STATE])
    # A damaged header may ask for a password or an unknown compression, and a damaged number may lead anywhere.
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, KeyError, TypeError, ValueError, OSError) as error:
        raise ValueError(f"{path} is no checkpoint, or is damaged or cut off: {error}") from error
    if found != FORMAT:
        raise ValueError(f"{path} has format {found!r}; this version of sb3_ano reads format {FORMAT}")
    return checkpoint


def newest_checkpoint(folder: str | Path, tell: Callable[[str], None] = print) -> Checkpoint | None:
    """The newest checkpoint in a folder that is whole.

    :param folder: of the checkpoints
    :param tell: gets one line for each newer file that is damaged and skipped
    :return: None if there is no whole one
    :raises OSError: if a file cannot be read
    """
    for path in checkpoint_files(Path(folder)):
        try:
            return read_checkpoint(path)
        except ValueError as error:
            tell(f"skipped: {error}")
    return None


class FolderLock:
    """Held by the one process that writes checkpoints into a folder; the system ends it with the process.

    A process that asks again gets it again: a training that ended with an exception releases its own only when its callback
    is deleted, which a traceback may delay.

    :param folder: an existing folder
    :raises BlockingIOError: if another process holds it
    """

    _held: ClassVar[dict[str, "FolderLock"]] = {}

    def __init__(self, folder: Path) -> None:
        self._descriptor: int | None = None
        if fcntl is None:
            return
        self._key = os.path.realpath(folder)
        if self._key in self._held:
            self._held[self._key].release()
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise BlockingIOError(
                f"folder={str(folder)!r} is in use: a training writes its checkpoints there now, or has ended with an "
                "exception in a process that still holds it; end that process"
            ) from error
        self._descriptor = descriptor
        self._held[self._key] = self

    def release(self) -> None:
        """Let others have it; a second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            del self._held[self._key]
