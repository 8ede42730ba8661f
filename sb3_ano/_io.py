"""Files and directories that are replaced whole or not at all, and locks."""

import contextlib
import ctypes
import errno
import functools
import hashlib
import io
import json
import math
import os
import re
import secrets
import shutil
import stat
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sb3_ano._secrets import hide

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# The largest JSON file that is read.
_MAX_JSON_BYTES = 4_000_000
# Names of temporary files and directories.
_SUFFIX = ".sb3_ano"
_LEFTOVER = re.compile(r"\..*\.[0-9a-f]{16}" + re.escape(_SUFFIX), re.DOTALL)
# Without locks, temporary files older than this are leftovers.
_LONGEST_SECONDS = 86_400.0
# Checksums of the files that the last call of replace_files wrote to a directory.
_MANIFEST = ".sb3_ano_files.json"
# Constants of Linux's renameat2.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
# How often a directory is moved aside while other processes put theirs there.
_ATTEMPTS = 100
# Errors of a rename to a directory that is not empty; the last one is that of Windows.
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST) + ((errno.EACCES,) if os.name == "nt" else ())


class _Lock:
    """A lock on an open file or directory, which ends with the process, or when it is dropped.

    Forked children do not keep it: a child that outlives its parent must not keep others out.
    """

    # In the class, because an interrupt can also come before a constructor sets anything.
    descriptor: int | None = None

    def open(self, path: Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> None:
        """Open a file or directory.

        :param path: file or directory
        :param flags: flags of ``os.open``
        :param mode: mode of a new file, from which the umask is subtracted
        """
        self.descriptor = os.open(path, flags, mode)
        _locks.add(self)

    def take(self) -> bool:
        """Lock what is open; return False if it is locked already.

        :raises OSError: if the file system has no locks
        """
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[arg-type]
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        descriptor = self.descriptor
        self.descriptor = None
        if descriptor is not None:
            os.close(descriptor)

    # An interrupt can come between any two steps, also before a block that would release the lock.
    def __del__(self) -> None:
        self.release()


_locks: "weakref.WeakSet[_Lock]" = weakref.WeakSet()


def _release_in_child() -> None:
    for lock in list(_locks):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)


class _Temporary(_Lock):
    """A temporary file or directory next to what it replaces. Its lock tells others that the writer still runs."""

    path: Path | None = None

    def create_file(self, target: Path, mode: int) -> Path:
        """Create and lock a file.

        :param target: file that it will replace
        :param mode: mode, from which the umask is subtracted
        """
        while True:
            self.path = path = _new_path(target.parent, target.name)
            self.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
            # Otherwise another process has removed it.
            if self._is_ours(path):
                return path

    def create_directory(self, parent: Path, name: str, mode: int) -> Path:
        """Create and lock a directory.

        :param parent: directory to create it in
        :param name: part of its name
        :param mode: mode, from which the umask is subtracted
        """
        while True:
            self.path = path = _new_path(parent, name)
            path.mkdir(mode | stat.S_IRWXU)

            if fcntl is None:  # Windows opens no directories
                return path
            with contextlib.suppress(FileNotFoundError):
                self.open(path)
                if self._is_ours(path):
                    return path

    def _is_ours(self, path: Path) -> bool:
        """Lock it; return False if another process has taken it for a leftover before it was locked."""
        is_locked = True
        if fcntl is not None:
            with contextlib.suppress(OSError):  # without locks, the age protects it
                is_locked = self.take()
        if is_locked and path.exists():
            return True

        self.release()
        return False

    def remove(self) -> None:
        """Complete or undo the replacement, remove the file or directory, and release the lock."""
        try:
            if self.path is not None and self.path.is_dir():
                _complete(self.path)
            elif self.path is not None:
                self.path.unlink(missing_ok=True)
        finally:
            self.release()


def _new_path(directory: Path, name: str) -> Path:
    return directory / f".{name[:50]}.{secrets.token_hex(8)}{_SUFFIX}"


def _is_abandoned(path: Path, lock: _Lock) -> bool:
    """Return whether the writer of a temporary file or directory has ended."""
    if fcntl is not None:
        try:
            lock.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
            return lock.take()
        except FileNotFoundError:
            return False
        except OSError:  # a file system without locks, or another user's file
            pass
    # Nobody writes for a day.
    return time.time() - path.stat().st_mtime > _LONGEST_SECONDS


def _complete(container: Path) -> None:
    """Complete or undo a replacement whose temporary directory this process has locked, and remove the directory.

    :param container: temporary directory. ``new`` is unfinished, or was replaced; ``ready`` holds files to be moved; ``old``
        holds a directory that was moved aside
    """
    parent = container.parent
    os.utime(container)  # without locks, its age says that somebody works on it

    if (container / "ready").is_dir():
        _publish(container / "ready", parent)
        # What is half removed must never be published.
        os.rename(container / "ready", container / "published")

    aside = container / "old"
    if aside.is_dir():
        for old in aside.iterdir():
            if not os.path.lexists(parent / old.name):
                try:
                    os.rename(old, parent / old.name)
                except OSError as error:
                    # Another writer has put a directory there since.
                    if error.errno not in _OCCUPIED:
                        raise
        # Nor restored
        os.rename(aside, container / "outdated")

    shutil.rmtree(container, ignore_errors=True)
    if container.exists():
        # Directories without write permission.
        for directory, names, _ in os.walk(container):
            for path in [directory, *(os.path.join(directory, name) for name in names)]:
                if not os.path.islink(path):
                    os.chmod(path, stat.S_IRWXU)
        shutil.rmtree(container, ignore_errors=True)


def _put(new: Path, target: Path) -> None:
    """Let a complete directory take the place of another one, which need not exist."""
    if _exchange(new, target):
        return

    container = new.parent
    for attempt in range(_ATTEMPTS):
        try:
            os.rename(new, target)
            return
        except OSError as error:
            if error.errno not in _OCCUPIED or attempt == _ATTEMPTS - 1:
                raise

        # Its name is that of the target, so that whoever completes the replacement knows where it belongs.
        aside = container / "old" / target.name
        aside.parent.mkdir(exist_ok=True)
        if aside.exists():  # another process has put a directory there meanwhile
            os.rename(aside, container / f"outdated-{attempt}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(target, aside)


@functools.cache
def _renameat2() -> Any:
    """Return Linux's function that exchanges two names; None on other systems."""
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return function


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two files or directories in one step; return False if one is missing, or the file system cannot."""
    function = _renameat2()
    if function is None:
        return False

    status = function(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return bool(status == 0)


def _stat_of(path: Path) -> os.stat_result | None:
    """Return what there is to know of a file or directory, in one call: another writer may move it at any time."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _require_replaceable(target: Path) -> None:
    """Check that a directory can be renamed.

    :raises NotADirectoryError: if it is a file
    :raises OSError: if it is a mount point, or a process with the current directory in it would be left in a removed one
    """
    found = _stat_of(target)
    if found is not None and not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "a file is in the place of the directory", str(target))

    with contextlib.suppress(FileNotFoundError):  # the current directory was removed
        if Path.cwd().is_relative_to(target):
            raise OSError(errno.EBUSY, "the current directory cannot be replaced; give a new one", str(target))

    if os.path.ismount(target):
        raise OSError(errno.EBUSY, "a mount point cannot be replaced; give a directory in it", str(target))


def _copy_owner(old: os.stat_result, path: Path) -> None:
    """Give a new file or directory the owner and the mode of the one that it replaces."""
    with contextlib.suppress(OSError, AttributeError):  # only root can, or Windows
        os.chown(path, old.st_uid, old.st_gid)
    os.chmod(path, stat.S_IMODE(old.st_mode))


def _finish_files(directory: Path, mode: int) -> None:
    """Write files to the disk, with the mode that the umask allows: safetensors makes files that only the user can read.

    :param directory: directory of the files
    :param mode: mode of a directory that was made under the umask
    """
    for name in [directory, *directory.rglob("*")]:
        if not name.is_symlink() and name.is_file():
            name.chmod(stat.S_IMODE(name.stat().st_mode) | (mode & 0o666))
            _synchronize(name)
        elif name.is_dir():
            _synchronize(name)


def _synchronize(path: Path) -> None:
    # The name of a file survives a loss of power only if its directory is synchronized, too. Windows and some file systems
    # cannot.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _link_others(old: Path, new: Path) -> None:
    """Add the files that only an old directory has to a new one, as further names of the same files."""
    for directory, names, files in os.walk(old):
        there = new / Path(directory).relative_to(old)
        # Links to directories are not followed.
        links = [name for name in names if os.path.islink(os.path.join(directory, name))]
        for name in [*files, *links]:
            if os.path.lexists(there / name):
                continue

            there.mkdir(parents=True, exist_ok=True)
            try:
                os.link(os.path.join(directory, name), there / name, follow_symlinks=False)
            except OSError:  # a file system without further names
                shutil.copy2(os.path.join(directory, name), there / name, follow_symlinks=False)


def _publish(ready: Path, directory: Path) -> None:
    """Write complete files to a directory, and remove the files of the earlier call that have no successor.

    The manifest is written last. Before, all steps can be repeated.
    """
    earlier = _read_manifest(directory / _MANIFEST)
    names = _files_in(ready)
    for name in names:
        # The user may have put files there since the process was killed.
        if _obstacle(directory, name, earlier) is None:
            write_file(directory / name, (ready / name).read_bytes())

    for name in earlier.keys() - set(names):
        path = directory / name
        if _is_inside(directory, name) and _is_as_written(path, earlier[name]):
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty
                path.parent.rmdir()

    write_file(directory / _MANIFEST, (ready / _MANIFEST).read_bytes())


def _files_in(directory: Path) -> list[str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return [path.relative_to(directory).as_posix() for path in files if path.name != _MANIFEST]


def _obstacle(directory: Path, name: str, earlier: Mapping[str, object]) -> str | None:
    """Return why a file must not be written, for a message; None if it may be.

    :param directory: directory without links in its path
    :param name: path of the file in it
    :param earlier: checksums of the files that earlier calls wrote
    """
    path = directory / name
    if not _is_inside(directory, name):
        return "it leads out of the directory; move the link away"

    for parent in path.parents:
        if parent == directory:
            break
        if os.path.lexists(parent) and not parent.is_dir():
            return f"{parent.name} is a file, but must be a directory; move it away"

    if not os.path.lexists(path):
        return None
    if not _is_as_written(path, earlier.get(name)):
        return "the file is not as this command wrote it, and would be lost; move it away"
    if not os.access(path, os.W_OK):
        return "the file is write-protected"
    return None


def _is_inside(directory: Path, name: str) -> bool:
    """Return whether a name, which a stranger may have written, leads to a file in a directory, also through links."""
    return Path(os.path.realpath(directory / name)).is_relative_to(directory)


def _read_manifest(path: Path) -> dict[str, Any]:
    """Return the checksums of the files that an earlier call wrote, by name."""
    # Without it, all files are taken for the user's own.
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


def _is_as_written(path: Path, checksum: object) -> bool:
    return path.is_file() and not path.is_symlink() and _checksum(path) == checksum


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_file(path: Path, content: bytes | str) -> None:
    """Write a file so that, whenever process or machine fail, either the old or the new content is there.

    As with ``open(path, "w")``, the umask decides about the mode of a new file, an old file keeps its mode, and a link stays a
    link. What is no regular file, such as ``/dev/stdout``, is written to and not replaced.

    :param path: file to write; missing parent directories are made
    :param content: new content; text is encoded as UTF-8, without the keys and passwords of this process
    :raises OSError: if the file cannot be written
    """
    if isinstance(content, str):
        # Names of files that are no UTF-8 are in Python's texts as halves of characters.
        content = hide(content).encode(errors="backslashreplace")

    old = _stat_of(path)
    if old is not None and stat.S_ISDIR(old.st_mode):
        raise IsADirectoryError(errno.EISDIR, "a directory is in the place of the file", str(path))
    if old is not None and not stat.S_ISREG(old.st_mode):
        path.write_bytes(content)
        return
    if old is not None and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "the file is write-protected", str(path))

    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target.parent)

    mode = 0o666
    if old is not None:
        mode = stat.S_IMODE(old.st_mode)
    temporary = _Temporary()
    try:
        new = temporary.create_file(target, mode)

        # Without a buffer, whose rest could be written later, to another file with the same descriptor.
        remaining = memoryview(content)
        while remaining:
            remaining = remaining[os.write(temporary.descriptor, remaining) :]  # type: ignore[arg-type]
        os.fsync(temporary.descriptor)  # type: ignore[arg-type]

        if old is not None:
            _copy_owner(old, new)
        if fcntl is None:
            temporary.release()  # Windows renames no open file
        os.replace(new, target)
    finally:
        temporary.remove()
    _synchronize(target.parent)


@contextlib.contextmanager
def replace_directory(path: Path, *, keep_others: bool = False) -> Iterator[Path]:
    """Yield a new directory that takes the place of ``path`` if the block ends without an error.

    Whenever process or machine fail, the old or the new directory survives. On Linux, it is always there, because the two are
    exchanged in one step. On other systems there is a moment between two renames: if the process is killed then, the next
    writer, or a reader that calls :func:`restore`, brings the old directory back.

    :param path: directory to replace; it need not exist; a link to a directory stays a link
    :param keep_others: whether files of the old directory that the new one lacks are kept
    :raises NotADirectoryError: if ``path`` is a file
    :raises OSError: if the directory cannot be replaced
    """
    target = Path(os.path.realpath(path))
    _require_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target.parent)

    temporary = _Temporary()
    try:
        before = _stat_of(target)
        mode = 0o777
        if before is not None:
            mode = stat.S_IMODE(before.st_mode)
        container = temporary.create_directory(target.parent, target.name, mode)
        new = container / "new"
        new.mkdir()
        allowed = stat.S_IMODE(new.stat().st_mode)  # by the umask
        yield new

        _finish_files(new, allowed)
        # Another writer may have replaced it meanwhile.
        old = _stat_of(target)
        if old is not None:
            _copy_owner(old, new)
            if keep_others:
                _link_others(target, new)
        _put(new, target)
    finally:
        temporary.remove()
    _synchronize(target.parent)


@contextlib.contextmanager
def replace_files(path: Path) -> Iterator[Path]:
    """Yield a new directory whose files are moved to ``path`` if the block ends without an error.

    Of the files that are there, only those that an earlier call wrote are replaced or removed: others may be the user's own.
    Each file is the old or the new one at any time. If the process is killed while it moves the files, the next call moves the
    remaining ones.

    :param path: directory to write to, which is made if it does not exist
    :raises FileExistsError: if a file would be replaced that no earlier call wrote, or that was changed since
    :raises OSError: if the directory cannot be written
    """
    target = Path(os.path.realpath(path))
    is_new = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target)

    temporary = _Temporary()
    try:
        container = temporary.create_directory(target, "files", 0o777)
        new = container / "new"
        new.mkdir()
        allowed = stat.S_IMODE(new.stat().st_mode)  # by the umask
        yield new

        earlier = _read_manifest(target / _MANIFEST)
        manifest = {}
        for name in _files_in(new):
            obstacle = _obstacle(target, name, earlier)
            if obstacle is not None:
                raise FileExistsError(errno.EEXIST, obstacle, str(path / name))
            manifest[name] = _checksum(new / name)

        # From this rename on, the files are moved, whatever happens.
        (new / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        _finish_files(new, allowed)
        os.rename(new, container / "ready")
    finally:
        temporary.remove()
        if is_new:
            with contextlib.suppress(OSError):  # not empty
                target.rmdir()
    _synchronize(target)


def restore(path: Path) -> None:
    """Bring a directory back if the process that was replacing it has been killed; to be called before it is read.

    :param path: directory that may be missing
    """
    target = Path(os.path.realpath(path))
    for _ in range(100):
        # Unlike Path.exists, this takes names that are too long.
        if os.path.exists(target) or not remove_leftovers(target.parent):
            return
        time.sleep(0.01)  # until the other process has put the new directory there


def remove_leftovers(directory: Path) -> bool:
    """Complete or undo what killed processes were replacing in a directory, and remove their temporary files.

    :param directory: directory, which need not exist
    :return: whether a running process is about to put a new directory in the place of one that it has moved aside
    """
    found = []
    # Faster than Path.iterdir, because every writer calls it.
    try:
        with os.scandir(os.path.realpath(directory)) as entries:
            for entry in entries:
                if _LEFTOVER.fullmatch(entry.name) and not entry.is_symlink():
                    found.append(Path(entry.path))
    except OSError:
        return False

    is_moving = False
    for path in found:
        lock = _Lock()
        try:
            if not _is_abandoned(path, lock):
                is_moving |= (path / "old").is_dir()
            elif path.is_dir():
                _complete(path)
            else:
                path.unlink(missing_ok=True)
        except OSError:  # another user's, or another process removes it at this moment
            pass
        finally:
            lock.release()
    return is_moving


@contextlib.contextmanager
def no_empty_directories(directory: Path) -> Iterator[None]:
    """Remove a directory that a failed block made, and the parents that it made, if they are empty.

    :param directory: directory that the block may make
    """
    new = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        for path in new:
            with contextlib.suppress(OSError):  # not empty, or never made
                path.rmdir()
        raise


def write_figure(path: Path, figure: Any, **options: Any) -> None:
    """Write a figure of matplotlib with :func:`write_file`, in the format of the file's name."""
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:].lower() or None, **options)
    write_file(path, content.getvalue())


def strict(value: Any, *, named: bool = True) -> Any:
    """Replace NaN and infinity, which JSON lacks, in a plain value.

    :param value: plain value
    :param named: whether their names take their place, instead of None
    """
    if isinstance(value, float) and not math.isfinite(value):
        if named:
            return str(value)
        return None
    if isinstance(value, dict):
        return {str(key): strict(item, named=named) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item, named=named) for item in value]
    return value


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON object with :func:`write_file`.

    :param path: file to write
    :param content: plain values
    :raises ValueError: if a number is NaN or Inf, which JSON lacks and other readers of JSON reject
    """
    try:
        text = json.dumps(hide(dict(content)), indent=1, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"{path} cannot be written, because JSON has no NaN and no Inf: {error}") from error
    write_file(path, text + "\n")


def read_file(path: Path, longest: int, flags: int = 0) -> bytes:
    """Read a regular file of bounded size.

    :param path: file to read
    :param longest: number of bytes that are allowed
    :param flags: further flags of ``os.open``, such as ``os.O_NOFOLLOW``
    :raises OSError: if the file cannot be opened
    :raises ValueError: if the file is not a regular file, or is larger
    """
    flags |= getattr(os, "O_NONBLOCK", 0)  # opening a FIFO would wait for a writer
    with open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a regular file")
        if status.st_size > longest:
            raise ValueError(f"{path} is larger than {longest} bytes")

        return file.read()


def read_json(path: Path, flags: int = 0) -> dict[str, Any]:
    """Read a JSON object from a regular file of bounded size.

    :param path: file to read
    :param flags: as for :func:`read_file`
    :raises FileNotFoundError: if there is no file
    :raises ValueError: if the file is not a regular file, is larger than 4 MB, or holds anything but a JSON object
    """
    text = read_file(path, _MAX_JSON_BYTES, flags)
    try:
        content = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON file: {error}") from error

    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}, not a JSON object")
    return content


class DirectoryLock(_Lock, contextlib.AbstractContextManager[Any]):
    """Lock a directory for one writer.

    The lock belongs to an open file. It ends with the process, unless a program that the process has started was given the
    file descriptor. Forked children do not keep it.

    :param path: existing directory
    :param patience: seconds to wait for another writer
    :raises BlockingIOError: if another process, or another thread of this one, holds the lock
    """

    def __init__(self, path: Path, patience: float = 5.0) -> None:
        if fcntl is None:
            return
        file = path / ".lock"
        deadline = time.monotonic() + patience
        while True:
            self.open(file, os.O_RDWR | os.O_CREAT)
            # The holder may have removed the file, which is then no longer what others lock.
            if self.take() and self._is_at(file):
                return

            self.release()
            if time.monotonic() > deadline:
                raise BlockingIOError(f"{path} is in use: another process writes to it now")
            time.sleep(0.1)

    def _is_at(self, file: Path) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self.descriptor), file.stat())  # type: ignore[arg-type]
        return False

    def __exit__(self, *exception: object) -> None:
        self.release()
