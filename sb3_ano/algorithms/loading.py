"""Check a saved model before SB3 loads it, and copy parameters that are to be saved.

SB3 turns an attribute that it cannot unpickle into a warning and keeps the constructor's default, and loads the file of
one algorithm into another. Either would bring a model back as something that it was not trained as. The check comes first,
because after loading nothing shows what the file lacked, and because a small archive may unpack to gigabytes.
"""

import copy
import io
import json
import pathlib
import zipfile
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from stable_baselines3.common.save_util import open_path

#: Limits of what a model may unpack to: bytes, and multiples of its own size. SB3 does not compress its files; these limits
#: are for models that were compressed again.
_MAX_UNPACKED_BYTES, _MAX_RATIO = 2**24, 20


@dataclass(frozen=True)
class SavedModel:
    """The readable part of a saved model: attributes stored as plain JSON, nothing unpickled.

    :param path: path for messages
    :param attributes: attributes of the algorithm
    """

    path: str
    attributes: dict[str, Any]

    def require_algorithm(self, name: str) -> None:
        """Check that the class called ``name`` saved this file.

        :raises ValueError: if it did not
        """
        saved_by = self.attributes.get("algorithm")
        if saved_by is None:
            raise ValueError(
                f"{self.path} was not saved by sb3_ano, so {name}.load cannot take it; load it with the class that saved it. "
                "A network of the same shape can be taken over with model.set_parameters"
            )
        if saved_by != name:
            raise ValueError(f"{self.path} was saved by {saved_by}; load it with {saved_by}.load, not {name}.load")


def read_saved_model(path: str | pathlib.Path | io.BufferedIOBase) -> SavedModel:
    """Read the attributes of a model, and check that the whole file is intact.

    :param path: path or stream as for SB3's ``load``; a stream keeps its position
    :raises ValueError: if the file is no zip archive, is damaged, or holds no model
    :raises OSError: if there is no such file, with or without ``.zip``
    """
    is_path = isinstance(path, str | pathlib.Path)
    shown = str(path) if is_path else "the stream"
    file = open_path(path, "r", suffix="zip")
    start = file.tell()
    try:
        with zipfile.ZipFile(file) as archive:
            unpacked, packed = sum(entry.file_size for entry in archive.infolist()), file.seek(0, io.SEEK_END)
            if unpacked > max(_MAX_UNPACKED_BYTES, _MAX_RATIO * packed):
                raise zipfile.BadZipFile(f"its {packed:,} bytes would unpack to {unpacked:,}")
            # Python 3.13 reads an entry that is stored uncompressed, and shorter than its size, without an error.
            stored = (entry for entry in archive.infolist() if entry.compress_type == zipfile.ZIP_STORED)
            cut = (entry.filename for entry in stored if entry.compress_size != entry.file_size)
            if damaged := archive.testzip() or next(cut, None):
                raise zipfile.BadZipFile(f"the checksum or size of its entry {damaged!r} does not match")
            for entry in ("policy.pth", "policy.optimizer.pth"):
                archive.getinfo(entry)
            return SavedModel(shown, dict(json.loads(archive.read("data"))))
    # RuntimeError: a damaged header may ask for a password or an unknown compression.
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{shown} is not a saved model, or is damaged or cut off: {error}") from error
    finally:
        if is_path:
            file.close()
        else:
            file.seek(start)


def unshared(state: Any, copies: dict[tuple[Any, ...], torch.Tensor]) -> Any:
    """Copy a nested state so that its tensors own their memory, which saved files and safetensors need.

    :param state: state of a policy or an optimizer
    :param copies: dictionary of the copies made so far, because a policy may name a layer twice, which is stored once
    """
    if isinstance(state, torch.Tensor):
        place = (state.device, state.data_ptr(), state.dtype, state.shape, state.stride())
        return copies.setdefault(place, state.detach().clone())
    if isinstance(state, dict):
        copied = copy.copy(state)  # with its attributes, such as the versions of the modules of a state dict
        copied.update((key, unshared(value, copies)) for key, value in state.items())
        return copied
    return [unshared(value, copies) for value in state] if isinstance(state, list) else state
