"""Check a saved model before SB3 loads it, and copy parameters that are to be saved.

SB3 turns an attribute that it cannot unpickle into a warning and keeps the constructor's default, and loads the file of
one algorithm into another. Either would bring a model back as something that it was not trained as. The check comes first,
because after loading nothing shows what the file lacked, and because a small archive may unpack to gigabytes.
"""

import io
import json
import pathlib
import zipfile
import zlib
from dataclasses import dataclass
from typing import Any

from stable_baselines3.common.save_util import open_path

#: Limits of what a model may unpack to: bytes, and multiples of its own size. SB3 does not compress its files; these limits
#: are for models that were compressed again.
_MAX_UNPACKED_BYTES = 2**24
_MAX_RATIO = 20


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
    shown = "the stream"
    if is_path:
        shown = str(path)

    # SB3's function, so that the same file is found, with or without its suffix.
    file = open_path(path, "r", suffix="zip")
    start = file.tell()
    try:
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
            packed = file.seek(0, io.SEEK_END)
            if unpacked > max(_MAX_UNPACKED_BYTES, _MAX_RATIO * packed):
                raise zipfile.BadZipFile(f"its {packed:,} bytes would unpack to {unpacked:,}")
            # Python 3.13 reads an entry that is stored uncompressed, and shorter than its size, without an error.
            damaged = archive.testzip()
            for entry in archive.infolist():
                if entry.compress_type == zipfile.ZIP_STORED and entry.compress_size != entry.file_size:
                    damaged = damaged or entry.filename

            if damaged:
                raise zipfile.BadZipFile(f"the checksum or size of its entry {damaged!r} does not match")

            # A KeyError tells which is missing.
            archive.getinfo("policy.pth")
            archive.getinfo("policy.optimizer.pth")
            return SavedModel(shown, dict(json.loads(archive.read("data"))))
    # RuntimeError: a damaged header may ask for a password or an unknown compression.
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{shown} is not a saved model, or is damaged or cut off: {error}") from error
    finally:
        # A stream belongs to the caller, and SB3 reads it next.
        if is_path:
            file.close()
        else:
            file.seek(start)
