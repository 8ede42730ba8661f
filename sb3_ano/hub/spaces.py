"""Observation and action spaces as JSON."""

import math
from collections import OrderedDict
from typing import Any

import numpy as np
from gymnasium import spaces

from sb3_ano.hub.documents import SafeFormatError, fields, list_of, number, one_line, one_of, refused, text, whole

#: Elements of all arrays of a space together, and values of discrete ones; an RGB image of 2048 x 2048 is below it.
MAX_ELEMENTS = 2**24
_FLOATS = ("float16", "float32", "float64")
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_MAX_AXES = 8
_MAX_START = 2**53


def encode_space(space: spaces.Space) -> dict[str, Any]:
    """A space of a kind that SB3 supports, as JSON.

    :raises TypeError: if it is of another kind
    """
    if isinstance(space, spaces.Dict):
        parts = {key: encode_space(part) for key, part in space.spaces.items()}
        if all(part["type"] != "Dict" for part in parts.values()):
            return {"type": "Dict", "spaces": parts}
    if isinstance(space, spaces.Box):
        bounds = {"low": _encode_array(space.low), "high": _encode_array(space.high)}
        return {"type": "Box", "shape": list(space.shape), "dtype": str(space.dtype), **bounds}
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": str(space.dtype)}
    if isinstance(space, spaces.MultiDiscrete):
        arrays = {"nvec": space.nvec.ravel().tolist(), "start": space.start.ravel().tolist()}
        return {"type": "MultiDiscrete", "shape": list(space.shape), "dtype": str(space.dtype), **arrays}
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "n": space.n if isinstance(space.n, int) else [int(size) for size in space.n]}
    raise TypeError(
        f"the space {space} cannot be stored; allowed are Box, Discrete, MultiDiscrete, MultiBinary and a Dict of those"
    )


def _encode_array(array: np.ndarray) -> Any:
    """One number if all elements are the same, else a flat list; infinities as strings, which JSON has no numbers for."""
    flat = array.ravel().tolist()
    if len(set(flat)) == 1:
        flat = flat[:1]
    encoded = [each if math.isfinite(each) else str(each) for each in flat]
    return encoded[0] if len(encoded) == 1 else encoded


def decode_space(document: Any, name: str) -> spaces.Space:
    """The space that :func:`encode_space` described.

    :param name: what it is called in messages
    :raises SafeFormatError: if it describes none, or a larger one than is allowed
    """
    kind = document.get("type") if isinstance(document, dict) else document
    if not isinstance(kind, str) or kind not in _DECODERS:
        raise refused(f"{name}.type", kind, ", ".join(_DECODERS))
    try:
        return _DECODERS[kind](document, name)
    except SafeFormatError:
        raise
    except (ValueError, TypeError, ArithmeticError, AssertionError) as error:  # whatever gymnasium and NumPy complain of
        raise SafeFormatError(f"{name} describes no {kind}: {one_line(error)}") from error


def _shape(value: Any, name: str) -> tuple[int, ...]:
    shape = tuple(list_of(whole(1), _MAX_AXES)(value, name))
    if math.prod(shape) > MAX_ELEMENTS:
        raise SafeFormatError(f"{name}={shape} is not allowed; allowed are up to {MAX_ELEMENTS} elements")
    return shape


def _decode_array(value: Any, shape: tuple[int, ...], dtype: np.dtype, name: str) -> np.ndarray:
    check = whole(-(2**63), 2**64 - 1)
    if dtype.kind == "f":
        infinities = {"inf": math.inf, "-inf": -math.inf}
        finite = number()

        def check(each: Any, name: str) -> float:
            return infinities[each] if isinstance(each, str) and each in infinities else finite(each, name)

    size = math.prod(shape)
    if not isinstance(value, list):
        return np.full(shape, _cast([check(value, name)], dtype)[0], dtype)
    if len(value) != size:
        raise SafeFormatError(f"{name} has {len(value)} elements; its shape {shape} needs {size}")
    return _cast([check(each, f"{name}.{index}") for index, each in enumerate(value)], dtype).reshape(shape)


def _cast(numbers: list[float], dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="raise"):
        return np.array(numbers, dtype=dtype)


def _decode_box(document: dict[str, Any], name: str) -> spaces.Box:
    fields(document, name, ("type", "shape", "dtype", "low", "high"))
    shape = _shape(document["shape"], f"{name}.shape")
    dtype = np.dtype(one_of(*_FLOATS, *_INTEGERS)(document["dtype"], f"{name}.dtype"))
    low, high = (_decode_array(document[key], shape, dtype, f"{name}.{key}") for key in ("low", "high"))
    return spaces.Box(low, high, shape, dtype.type)


def _decode_discrete(document: dict[str, Any], name: str) -> spaces.Discrete:
    fields(document, name, ("type", "n", "start", "dtype"))
    dtype = one_of(*_INTEGERS)(document["dtype"], f"{name}.dtype")
    start = whole(-_MAX_START, _MAX_START)(document["start"], f"{name}.start")
    return spaces.Discrete(whole(1, MAX_ELEMENTS)(document["n"], f"{name}.n"), start=start, dtype=dtype)


def _decode_multi_discrete(document: dict[str, Any], name: str) -> spaces.MultiDiscrete:
    fields(document, name, ("type", "shape", "dtype", "nvec", "start"))
    shape = _shape(document["shape"], f"{name}.shape")
    dtype = np.dtype(one_of(*_INTEGERS)(document["dtype"], f"{name}.dtype"))
    # SB3 encodes each number one-hot. Python's integers do not wrap around, as the sum of an array would.
    sizes = list_of(whole(1, MAX_ELEMENTS), MAX_ELEMENTS)(document["nvec"], f"{name}.nvec")
    if sum(sizes) > MAX_ELEMENTS:
        raise SafeFormatError(f"{name}.nvec has the sum {sum(sizes)}; allowed are up to {MAX_ELEMENTS}")
    list_of(whole(-_MAX_START, _MAX_START), MAX_ELEMENTS)(document["start"], f"{name}.start")
    nvec, start = (_decode_array(document[key], shape, dtype, f"{name}.{key}") for key in ("nvec", "start"))
    return spaces.MultiDiscrete(nvec, dtype=dtype.name, start=start)


def _decode_multi_binary(document: dict[str, Any], name: str) -> spaces.MultiBinary:
    fields(document, name, ("type", "n"))
    n = document["n"]
    return spaces.MultiBinary(_shape(n, f"{name}.n") if isinstance(n, list) else whole(1, MAX_ELEMENTS)(n, f"{name}.n"))


def _decode_dict(document: dict[str, Any], name: str) -> spaces.Dict:
    fields(document, name, ("type", "spaces"))
    parts = document["spaces"]
    if not isinstance(parts, dict) or not 0 < len(parts) <= 1000:
        raise refused(f"{name}.spaces", parts, "objects with up to 1000 spaces")
    for key, part in parts.items():
        if isinstance(part, dict) and part.get("type") == "Dict":
            raise SafeFormatError(f"{name}.{text(key, name)} is a Dict inside of a Dict, which SB3 does not support")
    # Ordered, because gymnasium sorts a plain dict, and the order of the keys is that of the inputs of the network.
    decoded: OrderedDict[str, spaces.Space] = OrderedDict()
    elements = 0
    for key, part in parts.items():
        decoded[key] = decode_space(part, f"{name}.{key}")
        elements += _width(decoded[key])
        if elements > MAX_ELEMENTS:
            raise SafeFormatError(f"{name} has more than {MAX_ELEMENTS} elements")
    return spaces.Dict(decoded)


def _width(space: spaces.Space) -> int:
    """Numbers that the observation becomes as the input of a network."""
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    return int(space.nvec.sum()) if isinstance(space, spaces.MultiDiscrete) else math.prod(space.shape or ())


_DECODERS = {
    "Box": _decode_box,
    "Discrete": _decode_discrete,
    "MultiDiscrete": _decode_multi_discrete,
    "MultiBinary": _decode_multi_binary,
    "Dict": _decode_dict,
}
