"""Files that are written whole or not at all, locks of directories, facts about measurements, arguments of constructors."""

import contextlib
import inspect
import json
import os
import platform
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from sb3_ano._secrets import hide

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

#: Packages whose versions decide about results.
PACKAGES = ("sb3-ano", "stable-baselines3", "sb3-contrib", "torch", "numpy", "gymnasium", "mujoco", "envpool", "ale-py")
# The largest JSON file that is read.
_MAX_JSON_BYTES = 4_000_000
_CONNECT_SECONDS = 10.0


def write_file(path: Path, content: bytes | str) -> None:
    """Write a file so that, whenever process or machine fail, either the old or the new content is there.

    :param path: file to write; missing parent directories are made
    :param content: new content; text is encoded as UTF-8, without the keys and passwords of this process
    :raises OSError: if the file cannot be written
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hide(content).encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    # The name survives a loss of power only if the directory is synchronized, too. Windows and some file systems cannot.
    with contextlib.suppress(OSError):
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


@contextlib.contextmanager
def replace_directory(path: Path) -> Iterator[Path]:
    """Yield a new directory that takes the place of ``path`` if the block ends without an error.

    :param path: directory to replace; it need not exist
    :raises OSError: if the directory cannot be written
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as temporary:
        new, old = Path(temporary) / "new", Path(temporary) / "old"
        new.mkdir()
        yield new
        if path.exists():
            os.replace(path, old)
        try:
            os.replace(new, path)
        except OSError:
            if old.exists():
                os.replace(old, path)
            raise


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with :func:`write_file`."""
    write_file(path, json.dumps(hide(dict(content)), indent=1) + "\n")


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


def constructor_arguments(kind: type) -> set[str]:
    """Return the names of a constructor's arguments, with those of the base classes that its ``**kwargs`` go to.

    :param kind: class
    """
    names: set[str] = set()
    for base in kind.__mro__:
        parameters = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
        names |= {parameter.name for parameter in parameters}
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            break
    return names


class DirectoryLock(contextlib.AbstractContextManager[Any]):
    """Lock a directory for one writing process.

    The lock belongs to an open file, which child processes can inherit. It lasts until the last of them has ended.

    :param path: existing directory
    :param patience: seconds to wait for another process
    :raises BlockingIOError: if another process holds the lock
    """

    def __init__(self, path: Path, patience: float = 5.0) -> None:
        self.descriptor: int | None = None
        if fcntl is None:
            return
        self.descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    self.release()
                    raise BlockingIOError(f"{path} is in use: another process writes to it now") from error
            time.sleep(0.1)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def __exit__(self, *exception: object) -> None:
        self.release()


def now() -> str:
    """Return the date and time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """Return processor, cores, operating system and Python version."""
    cpu = platform.processor()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {"cpu": cpu or "unknown", "cores": cores(), "system": platform.platform(), "python": platform.python_version()}


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of the packages that are installed.

    :param packages: distribution names
    """
    installed = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed


def commit() -> str | None:
    """Return the git commit of this source tree, with ``-dirty`` after local changes; None outside of a git checkout."""
    options: Any = {"cwd": Path(__file__).resolve().parent, "check": True, "capture_output": True, "text": True}
    try:
        # It fails for a package that is installed, which may be inside of another repository.
        subprocess.run(["git", "ls-files", "--error-unmatch", "__init__.py"], **options)
        described = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"], **options)
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()


def require_reachable(option: str, address: str) -> None:
    """Check at once whether a Ray cluster can be there; Ray itself tries for minutes.

    :param option: option of the command line, for messages
    :param address: address that the user gave, except ``"auto"``
    :raises ValueError: if it is not ``HOST:PORT``
    :raises OSError: if nothing answers
    """
    host, _, port = address.rpartition(":")
    address = hide(address)
    if "//" in address or not host or not port.isdecimal():
        raise ValueError(f"{option} {address} is not allowed; allowed are auto, and HOST:PORT of a cluster's head")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise OSError(f"{option} {address}: no Ray cluster was found: {error}") from error
