"""Observation and action spaces as JSON."""

import math
from collections import OrderedDict
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces

from sb3_ano.hub.documents import Document, SafeFormatError, rejected, require_like, translate_errors

#: A space of any kind.
Space: TypeAlias = spaces.Space[Any]
#: Inputs of a network that a space may become: elements of arrays, and values of discrete spaces, which SB3 encodes one-hot.
#: An RGB image of 2048 x 2048 pixels has fewer.
MAX_ELEMENTS = 2**24
# Attributes that are stored of each kind of space, and the keys of its JSON besides the type.
_KEYS = {
    "Box": ("shape", "dtype", "low", "high"),
    "Discrete": ("n", "start", "dtype"),
    "MultiDiscrete": ("shape", "dtype", "nvec", "start"),
    "MultiBinary": ("n",),
    "Dict": ("spaces",),
}
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_DTYPES = ("bool", "float16", "float32", "float64", *_INTEGERS)
_MAX_PARTS = 1000


def encode_space(space: Space) -> Document:
    """Convert a space to JSON.

    :param space: space of a kind that SB3 supports
    :raises TypeError: if the space is of another kind
    """
    for kind, keys in _KEYS.items():
        if isinstance(space, getattr(spaces, kind)):
            document: Document = {"type": kind}
            for key in keys:
                document[key] = _encode_attribute(getattr(space, key), key)
            return document
    raise TypeError(f"the space {space} cannot be stored; allowed are {', '.join(_KEYS)}")


def _encode_attribute(value: Any, key: str) -> object:
    if key == "spaces":
        return {name: encode_space(part) for name, part in value.items()}

    if key in ("low", "high"):
        bounds: list[object] = []
        for number in value.ravel().tolist():
            # JSON lacks infinity.
            bound = number
            if not math.isfinite(number):
                bound = str(number)
            bounds.append(bound)
        # Images have thousands of equal bounds.
        if len(set(bounds)) == 1:
            return bounds[0]
        return bounds

    if isinstance(value, np.ndarray | tuple):
        return np.ravel(value).tolist()
    if key == "dtype":
        return str(value)
    return int(value)


def decode_space(document: object, name: str) -> Space:
    """Convert JSON to the space that :func:`encode_space` described.

    :param document: decoded JSON
    :param name: name of the space, for messages
    :raises SafeFormatError: if the JSON describes no space, or a larger one than is allowed
    """
    if not isinstance(document, dict):
        raise rejected(name, document, "objects")
    kind = document.get("type")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise rejected(f"{name}.type", kind, ", ".join(_KEYS))
    require_like(document, dict.fromkeys(("type", *_KEYS[kind])), name)

    with translate_errors(f"{name} does not describe a {kind}"):
        attributes: Document = {}
        for key in _KEYS[kind]:
            attributes[key] = _decode_attribute(document, key, f"{name}.{key}")
        if kind == "MultiDiscrete":  # whose shape is that of its arrays
            del attributes["shape"]
        space: Space = getattr(spaces, kind)(**attributes)

    # Of a Dict, the sum; its parts have been checked alone.
    if _width(space) > MAX_ELEMENTS:
        raise rejected(name, space, f"spaces of up to {MAX_ELEMENTS} elements")
    _require_representable(space, name)
    return space


def _require_representable(space: Space, name: str) -> None:
    """Check that the type of a discrete space holds its largest value, which would wrap around."""
    if isinstance(space, spaces.Discrete):
        counts = [int(space.n)]
        starts = [int(space.start)]
    elif isinstance(space, spaces.MultiDiscrete):
        counts = space.nvec.ravel().tolist()
        starts = space.start.ravel().tolist()
    else:
        return

    largest = np.iinfo(np.dtype(space.dtype)).max
    for count, start in zip(counts, starts, strict=True):
        if start + count - 1 > largest:
            raise rejected(f"{name}.start", start, f"integers up to {largest - count + 1}, because of n={count}")


def _decode_attribute(document: Document, key: str, name: str) -> object:
    """Convert JSON to an argument of the space; shape and type are checked before the arrays that need them."""
    kind = document["type"]
    value = document[key]
    if key == "spaces":
        return _decode_parts(value, name)

    if key == "dtype":
        allowed = _DTYPES if kind == "Box" else _INTEGERS
        if value not in allowed:
            raise rejected(name, value, ", ".join(allowed))
        return np.dtype(value).type

    if key == "shape":
        _require_sizes(value, name)
        return tuple(value)
    if kind == "MultiBinary":
        # A number, or the shape of the bits
        sizes = value
        if isinstance(value, int):
            sizes = [value]
        _require_sizes(sizes, name)
        return value
    if kind == "Discrete":
        # gymnasium checks it.
        return value
    return _decode_array(value, document["shape"], np.dtype(document["dtype"]), name)


def _require_sizes(sizes: object, name: str) -> None:
    """Check the lengths of an array before it takes memory."""
    is_allowed = False
    if isinstance(sizes, list):
        are_sizes = all(type(size) is int and size > 0 for size in sizes)
        is_allowed = are_sizes and math.prod(sizes) <= MAX_ELEMENTS
    if not is_allowed:
        raise rejected(name, sizes, f"positive integers with a product of up to {MAX_ELEMENTS}")


def _decode_parts(parts: object, name: str) -> OrderedDict[str, Space]:
    if not isinstance(parts, dict) or not 0 < len(parts) <= _MAX_PARTS:
        raise rejected(name, parts, f"objects with up to {_MAX_PARTS} spaces")

    # Ordered, because gymnasium sorts a plain dict, and the order of the keys is that of the inputs of the network.
    decoded: OrderedDict[str, Space] = OrderedDict()
    elements = 0
    for key, part in parts.items():
        if isinstance(part, dict) and part.get("type") == "Dict":
            raise SafeFormatError(f"{name}.{key} is a Dict inside of a Dict, which SB3 does not support")
        decoded[key] = decode_space(part, f"{name}.{key}")
        elements += _width(decoded[key])
        if elements > MAX_ELEMENTS:  # before the next one takes memory
            raise SafeFormatError(f"{name} has more than {MAX_ELEMENTS} elements")
    return decoded


def _decode_array(value: object, shape: list[int], dtype: np.dtype, name: str) -> np.ndarray:
    """Read an array that is stored as one number for all elements, or as a flat list."""
    allowed = f"numbers that {dtype} holds exactly"
    given = [value]
    if isinstance(value, list):
        given = value

    items = []
    for item in given:
        # In Python, booleans are numbers.
        if isinstance(item, bool) and dtype != np.bool_:
            raise rejected(name, value, allowed)
        items.append(float(item) if item in ("inf", "-inf") else item)

    # Overflow shows in the comparison below.
    with np.errstate(all="ignore"):
        array = np.array(items, dtype)
    if array.ndim != 1 or array.tolist() != items:  # text, null, lists, and what the type does not hold
        raise rejected(name, value, allowed)
    if isinstance(value, list):
        return array.reshape(shape)
    return np.full(shape, array[0], dtype)


def _width(space: Space) -> int:
    """Return the inputs of a network that a space becomes, in Python's integers: those of an array would wrap around."""
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return sum(space.nvec.ravel().tolist())
    return math.prod(space.shape or ())
