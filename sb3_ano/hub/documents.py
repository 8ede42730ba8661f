"""Reading JSON that a stranger wrote: bounded, checked, and with one clear line where something is wrong."""

import hashlib
import json
import math
import os
import reprlib
import stat
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeAlias

#: Looks at a decoded value of the given name, and returns it or raises.
Check: TypeAlias = Callable[[Any, str], Any]

MAX_DOCUMENT_BYTES = 2**22
_MAX_DEPTH = 24
_MAX_MESSAGE = 900
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120
_MAX_WHOLE = 2**63 - 1


class SafeFormatError(ValueError):
    """A directory is not an agent in the safe format, is damaged, or asks for what the format does not allow.

    :param message: may quote what a stranger wrote; kept on one line of bounded length, without control characters
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, _MAX_MESSAGE))


def printable(message: str, longest: int) -> str:
    """Put a text on one line of at most ``longest`` characters, and replace control characters by ``?``.

    Terminals obey escape sequences, which a stranger's names may contain.
    """
    message = " ".join(message.split())
    if len(message) > longest:
        message = f"{message[: longest // 2 - 3]} ... {message[-longest // 2 + 3 :]}"
    return "".join(character if character.isprintable() else "?" for character in message)


def shown(value: Any) -> str:
    """Represent a stranger's value in at most 150 characters, on one line."""
    return printable(_SHORT.repr(value), 150)


def one_line(error: BaseException) -> str:
    """Return type and message of an error on one line of bounded length."""
    return printable(f"{type(error).__name__}: {error}", 500)


def checksum(document: dict[str, Any]) -> str:
    """Return the SHA-256 of a JSON object's content, without its key ``checksum``."""
    content = {key: value for key, value in document.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def refused(name: str, value: Any, allowed: str) -> SafeFormatError:
    """The error for a value that is not allowed."""
    return SafeFormatError(f"{name}={shown(value)} is not allowed; allowed are {allowed}")


def size_of(path: Path) -> int:
    """Size of a regular file, in bytes.

    :raises SafeFormatError: if there is no such file, or it is a link, a folder or a device
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError as error:
        raise SafeFormatError(f"{path.parent} is no agent in the safe format: it has no {path.name}") from error
    except NotADirectoryError as error:
        raise SafeFormatError(f"{path.parent} is a file; the safe format is a folder with {path.name} in it") from error
    except (OSError, ValueError) as error:  # a loop of links, a name that is too long or contains a null byte
        raise SafeFormatError(f"the path cannot be read: {one_line(error)}") from error
    if not stat.S_ISREG(status.st_mode):
        kind = "a link" if stat.S_ISLNK(status.st_mode) else "no regular file"
        raise SafeFormatError(f"{path} is {kind}; allowed are regular files, so copy what it stands for")
    return status.st_size


def read_document(path: Path) -> dict[str, Any]:
    """Read a JSON object, in which every number is finite and every key occurs once.

    :raises SafeFormatError: if the file is missing, a link, too large, or not such an object
    """
    size = size_of(path)
    if size > MAX_DOCUMENT_BYTES:
        raise SafeFormatError(f"{path} is {size} bytes long; allowed are {MAX_DOCUMENT_BYTES}")
    try:
        document = json.loads(
            path.read_bytes().decode(), object_pairs_hook=_unique, parse_constant=_not_finite, parse_float=_finite
        )
    except OSError as error:
        raise SafeFormatError(f"{path} cannot be read: {one_line(error)}") from error
    except (ValueError, RecursionError) as error:
        raise SafeFormatError(f"{path} is not valid JSON: {one_line(error)}") from error
    if not isinstance(document, dict):
        raise SafeFormatError(f"{path} is not a JSON object")
    _require_shallow(document, path)
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError(f"a key occurs twice among {shown([key for key, _ in pairs])}")
    for key, _ in pairs:
        if not key.isprintable() or len(key) > 200:
            raise ValueError(f"the key {shown(key)} is too long or cannot be printed")
    return dict(pairs)


def _not_finite(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large")
    return value


def _require_shallow(document: dict[str, Any], path: Path) -> None:
    # What follows walks the document by recursion.
    level: list[Any] = [document]
    for _ in range(_MAX_DEPTH):
        level = [
            part
            for each in level
            if isinstance(each, dict | list)
            for part in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise SafeFormatError(f"{path} is nested more than {_MAX_DEPTH} levels deep")


def fields(value: Any, name: str, required: Collection[str], optional: Iterable[str] = ()) -> dict[str, Any]:
    """A JSON object with exactly these keys.

    :raises SafeFormatError: if it is no object, lacks a required key, or has any other
    """
    if not isinstance(value, dict):
        raise refused(name, value, "objects")
    missing = [key for key in required if key not in value]
    if missing:
        raise SafeFormatError(f"{name} lacks {missing[0]!r}")
    unknown = value.keys() - set(required) - set(optional)
    if unknown:
        raise SafeFormatError(
            f"{name} has the unknown key {shown(min(unknown))}; allowed are {sorted({*required, *optional})}"
        )
    return value


def whole(low: int, high: int = _MAX_WHOLE) -> Check:
    """Whole numbers from ``low`` to ``high``."""

    def check(value: Any, name: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise refused(name, value, f"whole numbers from {low}" + (f" to {high}" if high < _MAX_WHOLE else ""))
        return value

    return check


def number(low: float = -math.inf, *, infinite: bool = False) -> Check:
    """Numbers from ``low``, among them infinity if ``infinite``."""

    def check(value: Any, name: str) -> float:
        # A whole number may have thousands of digits, which no float can hold.
        sound = type(value) is float or (type(value) is int and abs(value) <= _MAX_WHOLE)
        if not sound or not low <= value or not (infinite or math.isfinite(value)):
            raise refused(name, value, "numbers" + (f" from {low:g}" if low > -math.inf else ""))
        return value

    return check


def boolean(value: Any, name: str) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise refused(name, value, "true and false")
    return value


def text(value: Any, name: str) -> str:
    """A string that can be printed on one line."""
    if not isinstance(value, str) or not value.isprintable() or len(value) > 1000:
        raise refused(name, value, "short strings")
    return value


def one_of(*allowed: Any) -> Check:
    """One of these values, of the same type."""

    def check(value: Any, name: str) -> Any:
        if not any(type(value) is type(each) and value == each for each in allowed):
            raise refused(name, value, " and ".join(map(repr, allowed)))
        return value

    return check


def optional(check: Check) -> Check:
    """None, or what ``check`` allows."""
    return lambda value, name: None if value is None else check(value, name)


def list_of(check: Check, longest: int) -> Check:
    """Lists of at most ``longest`` elements, each of which ``check`` allows."""

    def check_list(value: Any, name: str) -> list[Any]:
        if not isinstance(value, list | tuple) or len(value) > longest:
            raise refused(name, value, f"lists of up to {longest} elements")
        return [check(each, f"{name}.{index}") for index, each in enumerate(value)]

    return check_list
