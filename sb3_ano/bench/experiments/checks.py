"""Checks of what a YAML file says, with messages of one line."""

import difflib
import re
from collections.abc import Iterable
from typing import Any


def with_numbers(value: Any) -> Any:
    """The same nested value with its numbers as numbers: YAML 1.1 takes 3e-4, which has no dot, for text."""
    if isinstance(value, dict):
        return {key: with_numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [with_numbers(one) for one in value]
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value


def as_mapping(what: str, value: Any) -> dict[str, Any]:
    """``value``, where None is an empty mapping.

    :raises ValueError: if it is no mapping
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{what} holds {value!r}, not a mapping")
    return value


def as_strings(what: str, value: Any) -> list[str]:
    """``value``.

    :raises ValueError: if it is no list of texts
    """
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{what} holds {value!r}, not a list of names")
    return value


def require_known(what: str, keys: Iterable[Any], known: Iterable[str]) -> None:
    """Complain of an unknown key.

    :raises ValueError: naming the first one
    """
    allowed = sorted(known)
    for key in keys:
        if key not in allowed:
            raise ValueError(f"unknown {what}: {key!r}{hint(str(key), allowed)} (allowed are {', '.join(allowed)})")


def require_whole(name: str, value: Any) -> None:
    """Complain of a value that is no whole number from 1.

    :raises ValueError: naming it
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} is not allowed; allowed are whole numbers from 1")


def hint(name: str, known: Iterable[str]) -> str:
    """What may have been meant, for the end of a message; empty if nothing is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {near[0]!r}?" if near else ""
