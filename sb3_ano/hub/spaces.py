"""Observation and action spaces as JSON."""

import math
from collections import OrderedDict
from typing import Any

import numpy as np
from gymnasium import spaces

from sb3_ano.hub.documents import SafeFormatError, rejected, require_like, translate_errors

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


def encode_space(space: spaces.Space[Any]) -> dict[str, Any]:
    """Convert a space to JSON.

    :param space: space of a kind that SB3 supports
    :raises TypeError: if the space is of another kind
    """
    for kind, keys in _KEYS.items():
        if isinstance(space, getattr(spaces, kind)):
            return {"type": kind, **{key: _encode_attribute(getattr(space, key), key) for key in keys}}
    raise TypeError(f"the space {space} cannot be stored; allowed are {', '.join(_KEYS)}")


def _encode_attribute(value: Any, key: str) -> Any:
    if key == "spaces":
        return {name: encode_space(part) for name, part in value.items()}
    if key in ("low", "high"):  # one number if all elements are equal; infinity, which JSON lacks, as a string
        bounds = [number if math.isfinite(number) else str(number) for number in value.ravel().tolist()]
        return bounds[0] if len(set(bounds)) == 1 else bounds
    if isinstance(value, np.ndarray | tuple):
        return np.ravel(value).tolist()
    return str(value) if key == "dtype" else int(value)


def decode_space(document: Any, name: str) -> spaces.Space[Any]:
    """Convert JSON to the space that :func:`encode_space` described.

    :param document: decoded JSON
    :param name: name of the space, for messages
    :raises SafeFormatError: if the JSON describes no space, or a larger one than is allowed
    """
    kind = document.get("type") if isinstance(document, dict) else document
    if not isinstance(kind, str) or kind not in _KEYS:
        raise rejected(f"{name}.type", kind, ", ".join(_KEYS))
    require_like(document, dict.fromkeys(("type", *_KEYS[kind])), name)
    with translate_errors(f"{name} does not describe a {kind}"):
        attributes = {key: _decode_attribute(document, key, f"{name}.{key}") for key in _KEYS[kind]}
        if kind == "MultiDiscrete":  # whose shape is that of its arrays
            del attributes["shape"]
        space: spaces.Space[Any] = getattr(spaces, kind)(**attributes)
    if _width(space) > MAX_ELEMENTS:
        raise rejected(name, space, f"spaces of up to {MAX_ELEMENTS} elements")
    _require_representable(space, name)
    return space


def _require_representable(space: spaces.Space[Any], name: str) -> None:
    """Check that the type of a discrete space holds its largest value, which would wrap around."""
    if isinstance(space, spaces.Discrete):
        counts, starts, dtype = [int(space.n)], [int(space.start)], space.dtype
    elif isinstance(space, spaces.MultiDiscrete):
        counts, starts, dtype = space.nvec.ravel().tolist(), space.start.ravel().tolist(), space.dtype
    else:
        return
    largest = np.iinfo(np.dtype(dtype)).max
    for count, start in zip(counts, starts, strict=True):
        if start + count - 1 > largest:
            raise rejected(f"{name}.start", start, f"integers up to {largest - count + 1}, because of n={count}")


def _decode_attribute(document: dict[str, Any], key: str, name: str) -> Any:
    """Convert JSON to an argument of the space; shape and type are checked before the arrays that need them."""
    kind, value = document["type"], document[key]
    if key == "spaces":
        return _decode_parts(value, name)
    if key == "dtype":
        allowed = _DTYPES if kind == "Box" else _INTEGERS
        if value not in allowed:
            raise rejected(name, value, ", ".join(allowed))
        return np.dtype(value).type
    if key == "shape" or kind == "MultiBinary":
        sizes = [value] if kind == "MultiBinary" and isinstance(value, int) else value
        sound = isinstance(sizes, list) and all(type(size) is int and size > 0 for size in sizes)
        if not sound or math.prod(sizes) > MAX_ELEMENTS:  # before the arrays take memory
            raise rejected(name, sizes, f"positive integers with a product of up to {MAX_ELEMENTS}")
        return tuple(sizes) if key == "shape" else value
    return value if kind == "Discrete" else _decode_array(value, document["shape"], np.dtype(document["dtype"]), name)


def _decode_parts(parts: Any, name: str) -> OrderedDict[str, spaces.Space[Any]]:
    if not isinstance(parts, dict) or not 0 < len(parts) <= _MAX_PARTS:
        raise rejected(name, parts, f"objects with up to {_MAX_PARTS} spaces")
    # Ordered, because gymnasium sorts a plain dict, and the order of the keys is that of the inputs of the network.
    decoded: OrderedDict[str, spaces.Space[Any]] = OrderedDict()
    elements = 0
    for key, part in parts.items():
        if isinstance(part, dict) and part.get("type") == "Dict":
            raise SafeFormatError(f"{name}.{key} is a Dict inside of a Dict, which SB3 does not support")
        decoded[key] = decode_space(part, f"{name}.{key}")
        elements += _width(decoded[key])
        if elements > MAX_ELEMENTS:  # before the next one takes memory
            raise SafeFormatError(f"{name} has more than {MAX_ELEMENTS} elements")
    return decoded


def _decode_array(value: Any, shape: list[int], dtype: np.dtype, name: str) -> np.ndarray:
    """Read an array that is stored as one number for all elements, or as a flat list."""
    items = value if isinstance(value, list) else [value]
    items = [float(item) if item in ("inf", "-inf") else item for item in items]
    if dtype != np.bool_ and any(isinstance(item, bool) for item in items):
        raise rejected(name, value, f"numbers that {dtype} holds exactly")
    with np.errstate(all="ignore"):
        array = np.array(items, dtype)
    if array.ndim != 1 or array.tolist() != items:  # text, null, lists, and what the type does not hold
        raise rejected(name, value, f"numbers that {dtype} holds exactly")
    return array.reshape(shape) if isinstance(value, list) else np.full(shape, array[0], dtype)


def _width(space: spaces.Space[Any]) -> int:
    """Return the inputs of a network that a space becomes, in Python's integers: those of an array would wrap around."""
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    return sum(space.nvec.ravel().tolist()) if isinstance(space, spaces.MultiDiscrete) else math.prod(space.shape or ())
