"""Check what a stranger wrote, with one clear line if something is wrong; write directories whole."""

import contextlib
import math
import os
import reprlib
import sys
import threading
from collections.abc import Collection, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeAlias

from sb3_ano._io import replace_directory
from sb3_ano.extras import printable

#: An object of JSON, whose values are not checked yet.
Document: TypeAlias = dict[str, Any]
#: Flag for files of a directory that a stranger filled: links are not followed.
NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
_MAX_MESSAGE = 900
_LOCK = threading.RLock()
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


class SafeFormatError(ValueError):
    """A directory is not an agent in the safe format, is damaged, or asks for what the format does not allow.

    :param message: text that may quote what a stranger wrote; it is put on one line of bounded length, without control
        characters
    """

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message, _MAX_MESSAGE))


def shortened(message: str, longest: int) -> str:
    """Put a text on one line of at most ``longest`` printable characters."""
    message = printable(message)
    if len(message) <= longest:
        return message

    # Its end often says more than its middle.
    half = longest // 2 - 3
    return f"{message[:half]} ... {message[-half:]}"


def shown(value: object) -> str:
    """Represent a stranger's value in at most 150 characters, on one line."""
    return shortened(_SHORT.repr(value), 150)


def one_line(error: BaseException) -> str:
    """Return type and message of an error on one line of bounded length."""
    return shortened(f"{type(error).__name__}: {error}", 500)


def rejected(name: str, value: object, allowed: str) -> SafeFormatError:
    """Create the error for a value that is not allowed.

    :param name: dotted name of the value
    :param value: value that a stranger wrote
    :param allowed: description of the allowed values
    """
    return SafeFormatError(f"{name}={shown(value)} is not allowed; allowed are {allowed}")


@contextlib.contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Raise a SafeFormatError instead of whatever error a stranger's values cause in the block.

    Constructors of other libraries raise errors of every type, with messages of any length.

    :param what: first part of the message
    """
    try:
        yield
    except (SafeFormatError, MemoryError):  # untrusted has one message for all that is too large
        raise
    except Exception as error:
        # The cause is kept for tracebacks.
        raise SafeFormatError(f"{what}: {one_line(error)}") from error


@contextlib.contextmanager
def untrusted(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Work with a directory that a stranger filled: import no module from it, and name it if memory runs out.

    The current directory is on Python's path. PyTorch imports some modules late, and looks for packages that are not
    installed: a file of the right name in the directory would run.

    :param folder: directory to take off Python's path inside the block
    """
    with _LOCK:  # Python's path is one for all threads
        path = sys.path.copy()
        # Links and relative names may lead to the directory, too.
        with contextlib.suppress(ValueError):  # raised for a name with a null byte
            excluded = os.path.realpath(folder)
            sys.path[:] = [entry for entry in path if os.path.realpath(entry or os.curdir) != excluded]

        try:
            yield
        except MemoryError as error:
            raise SafeFormatError(f"{folder} needs more memory than is available") from error
        finally:
            sys.path[:] = path


def require_like(value: object, example: object, name: str) -> None:
    """Check that a value has the type of an example, such as the default of an argument; ranges are not checked.

    Python's numbers and booleans would otherwise pass for each other, or fail long after the agent was loaded.

    :param value: decoded value
    :param example: boolean or number; dictionary of examples, whose keys are required, and no others are allowed; a value
        is not compared with any other example, such as None
    :param name: dotted name of the value, for messages
    :raises SafeFormatError: if a type differs, a key is missing or unknown, or a number is NaN
    """
    if isinstance(example, dict):
        if not isinstance(value, dict):
            raise rejected(name, value, "objects")
        for key in {**example, **value}:
            allowed = f"its keys are {', '.join(example)}"
            if key not in value:
                raise SafeFormatError(f"{name} lacks {shown(key)}; {allowed}")
            if key not in example:
                raise SafeFormatError(f"{name} has the unknown key {shown(key)}; {allowed}")
            require_like(value[key], example[key], f"{name}.{key}")

    elif isinstance(example, bool):
        if not isinstance(value, bool):
            raise rejected(name, value, "true and false")

    elif isinstance(example, int | float):
        # NumPy and PyTorch hold no larger integers. Booleans are integers in Python.
        is_integer = type(value) is int and abs(value) < 2**63
        is_float = isinstance(value, float) and not math.isnan(value)
        if not is_integer and not is_float:
            raise rejected(name, value, "numbers")


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str], own: Collection[str]) -> Iterator[Path]:
    """Yield a new directory that takes the place of ``path`` if the block ends without an error.

    :param path: directory that does not exist, is empty, or holds only files of these names, which are replaced
    :param own: names of the files that may be replaced, or patterns of such names
    :raises FileExistsError: if ``path`` is a directory with other content, before or after the block
    :raises NotADirectoryError: if ``path`` is a file
    """
    target = Path(os.path.realpath(path))  # a link to a directory stays a link

    def require_own() -> None:
        if not target.exists():
            return
        for entry in sorted(target.iterdir()):
            # A directory is never ours, whatever its name is.
            is_own = not entry.is_dir() and any(fnmatch(entry.name, name) for name in own)
            if not is_own:
                allowed = "allowed are a new directory and one that holds only an agent"
                raise FileExistsError(f"path={str(path)!r} holds {entry.name!r}, which would be lost; {allowed}")

    require_own()
    with replace_directory(target) as folder:
        yield folder
        # The user may have put a file there meanwhile.
        require_own()
