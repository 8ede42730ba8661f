"""Files of tensors (safetensors), whose names, shapes and types are known before a byte of them is read."""

import hashlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sb3_ano.extras import missing_extra
from sb3_ano.hub.documents import SafeFormatError, fields, one_line, shown, size_of, text, whole

try:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load as deserialized
    from safetensors.torch import save as serialize
except ImportError as error:
    raise missing_extra("hub", error.name or "safetensors") from error

MAX_TENSOR_BYTES = 2**31
_MAX_HEADER_BYTES = 2**24
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class TensorSpec(NamedTuple):
    """What is known of a tensor without its numbers.

    :param dtype: in safetensors' names
    :param shape: may be empty
    """

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


def specify(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    """What is known of each tensor; the device may be PyTorch's ``meta``.

    :raises ValueError: if one is of a type that a file cannot hold
    """
    unknown = [(name, tensor.dtype) for name, tensor in tensors.items() if tensor.dtype not in _DTYPES]
    if unknown:
        raise ValueError(f"tensor {unknown[0][0]!r} is of type {unknown[0][1]}; allowed are {', '.join(map(str, _DTYPES))}")
    return {name: TensorSpec(_DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}


def serialized(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Tensors as the content of a file.

    :raises ValueError: if one is of a type that a file cannot hold
    """
    specify(tensors)
    return serialize({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()})


def fingerprint_of(content: bytes) -> dict[str, Any]:
    """What the JSON says of a file, by which cuts and flipped bits are noticed."""
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


class TensorFile:
    """A file of tensors whose header has been read.

    :param path: the file
    :param fingerprint: what the JSON says of it
    :raises SafeFormatError: if the file is missing, a link, too large, of another size than the JSON says, or its header
        is damaged
    """

    def __init__(self, path: Path, fingerprint: Any) -> None:
        self.path = path
        fields(fingerprint, f"files.{path.name}", ("size", "sha256"))
        self._sha256 = text(fingerprint["sha256"], f"files.{path.name}.sha256")
        size = whole(8, MAX_TENSOR_BYTES)(fingerprint["size"], f"files.{path.name}.size")
        found = size_of(path)
        if found != size:
            raise SafeFormatError(f"{path} is {found} bytes long, but was written with {size}: it is damaged or cut off")
        try:
            with path.open("rb") as file:
                header = int.from_bytes(file.read(8), "little")
        except OSError as error:
            raise SafeFormatError(f"{path} cannot be read: {one_line(error)}") from error
        if header > min(_MAX_HEADER_BYTES, size - 8):
            raise SafeFormatError(f"{path} is damaged: its header claims {header} bytes")
        try:
            with safe_open(path, framework="pt") as opened:
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # it is no dict
                self.specs = {name: TensorSpec(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
        except (SafetensorError, ValueError, OSError) as error:
            raise SafeFormatError(f"{path} is damaged: {one_line(error)}") from error

    def require(self, expected: Mapping[str, TensorSpec], owner: str) -> None:
        """Compare names, types and shapes.

        :param expected: what must be there, and nothing else
        :param owner: whose tensors they are, for messages
        :raises SafeFormatError: if they differ
        """
        missing, unknown = sorted(expected.keys() - self.specs.keys()), sorted(self.specs.keys() - expected.keys())
        if missing or unknown:
            names = f"lacks {shown(missing[0])}" if missing else f"has {shown(unknown[0])}"
            raise SafeFormatError(f"{self.path} {names}, unlike {owner}")
        for name, spec in self.specs.items():
            if spec != expected[name]:
                raise SafeFormatError(f"{self.path}: {shown(name)} is {spec}, but that of {owner} is {expected[name]}")

    def read(self) -> dict[str, torch.Tensor]:
        """The tensors, on the CPU; numbers that are none are warned about.

        :raises SafeFormatError: if the content is not what was written
        """
        try:
            content = self.path.read_bytes()
            if hashlib.sha256(content).hexdigest() != self._sha256:
                raise SafeFormatError(
                    f"{self.path} is damaged: its SHA-256 is not {shown(self._sha256)}, which it was written with"
                )
            tensors = deserialized(content)
        except (OSError, SafetensorError) as error:
            raise SafeFormatError(f"{self.path} cannot be read: {one_line(error)}") from error
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                warnings.warn(f"{self.path}: {shown(name)} has numbers that are not finite", stacklevel=5)
        return tensors
