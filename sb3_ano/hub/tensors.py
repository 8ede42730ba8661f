"""Files of tensors (safetensors), whose names, shapes and types are known before any number in them is read."""

import hashlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sb3_ano.extras import missing_extra
from sb3_ano.hub.documents import SafeFormatError, require_like, shown, size_of, translate_errors

try:
    from safetensors import safe_open
    from safetensors.torch import load, save
except ImportError as error:
    raise missing_extra("hub", error.name or "safetensors") from error

MAX_TENSOR_BYTES = 2**31
_MAX_HEADER_BYTES = 2**24
# Names of the types in a file.
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip


def specify(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Describe types and shapes of tensors by name; they may be on PyTorch's ``meta`` device.

    :raises ValueError: if the type of a tensor is unknown to the format, or a value is not a tensor
    """
    for name, tensor in tensors.items():
        dtype = getattr(tensor, "dtype", type(tensor))
        if dtype not in _DTYPES:
            raise ValueError(f"tensor {name!r} is of type {dtype}; allowed are {', '.join(map(str, _DTYPES))}")
    return {name: f"{_DTYPES[tensor.dtype]} of shape {tuple(tensor.shape)}" for name, tensor in tensors.items()}


def serialize(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Convert tensors to the content of a file.

    :raises ValueError: if the type of a tensor is unknown to the format
    """
    specify(tensors)
    return save({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()})


def fingerprint_of(content: bytes) -> dict[str, Any]:
    """Return size and SHA-256 of a file, by which damage is noticed."""
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


class TensorFile:
    """Open a file of tensors and read its header.

    :param path: file of at most 2 GiB
    :param fingerprint: size and SHA-256 that the JSON states
    :raises SafeFormatError: if the file is missing, not a regular file, too large, or not of the stated size, or its header
        is damaged
    """

    def __init__(self, path: Path, fingerprint: Any) -> None:
        self.path, self.fingerprint = path, fingerprint
        require_like(fingerprint, {"size": 0, "sha256": ""}, f"files.{path.name}")
        size, stated = size_of(path), fingerprint["size"]
        if size != stated:
            raise SafeFormatError(f"{path} is {size} bytes long, but was written with {shown(stated)}: damaged or cut off")
        if size > MAX_TENSOR_BYTES:
            raise SafeFormatError(f"{path} is {size} bytes long; allowed are up to {MAX_TENSOR_BYTES}")
        with translate_errors(f"{path} is damaged"):
            with path.open("rb") as file:
                header = int.from_bytes(file.read(8), "little")
            if header > _MAX_HEADER_BYTES:  # safetensors takes up to 100 MB, with a minute and a gigabyte to read them
                raise SafeFormatError(f"{path} is damaged: its header claims {header} bytes")
            with safe_open(path, framework="pt") as tensors:
                parts = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  # it is not a dict
                self.specs = {name: f"{part.get_dtype()} of shape {tuple(part.get_shape())}" for name, part in parts.items()}

    def require(self, expected: Mapping[str, str], owner: str) -> None:
        """Compare names, types and shapes with those that are expected.

        :param expected: descriptions of all tensors that the file must hold
        :param owner: owner of the tensors, for messages
        :raises SafeFormatError: if they differ
        """
        differing = sorted(expected.keys() ^ self.specs.keys())
        if differing:
            verb = "has" if differing[0] in self.specs else "lacks"
            raise SafeFormatError(f"{self.path} {verb} {shown(differing[0])}, unlike {owner}")
        for name, spec in self.specs.items():
            if spec != expected[name]:
                raise SafeFormatError(f"{self.path}: {shown(name)} is {spec}, but that of {owner} is {expected[name]}")

    def read(self) -> dict[str, torch.Tensor]:
        """Return the tensors, on the CPU. NaN and Inf are warned about.

        :raises SafeFormatError: if the content is not what was written
        """
        with translate_errors(f"{self.path} cannot be read"):
            content = self.path.read_bytes()
            if fingerprint_of(content) != self.fingerprint:
                stated = shown(self.fingerprint["sha256"])
                raise SafeFormatError(f"{self.path} is damaged: its SHA-256 is not {stated}, which it was written with")
            tensors = load(content)
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                warnings.warn(f"{self.path}: {shown(name)} has NaN or Inf", stacklevel=4)
        return tensors
