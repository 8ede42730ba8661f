"""A look into a saved model before SB3 loads it.

SB3 turns an attribute that it cannot unpickle into a warning and keeps the constructor's default, and loads the file of
one algorithm into another. Either would bring a model back as something that it was not trained as.
"""

import io
import json
import pathlib
import zipfile
import zlib
from dataclasses import dataclass
from typing import Any

from stable_baselines3.common.save_util import open_path

#: SB3 does not compress, so that a saved model unpacks to its own size. A model that was compressed again may unpack to so
#: many bytes, and so many times its own size.
_MAX_UNPACKED_BYTES, _MAX_RATIO = 2**24, 20


@dataclass(frozen=True)
class SavedModel:
    """The readable part of a saved model: attributes stored as plain JSON, nothing unpickled.

    :param path: where it was found, for messages
    :param attributes: of the algorithm
    """

    path: str
    attributes: dict[str, Any]

    def require_algorithm(self, name: str) -> None:
        """Complain unless the class called ``name`` saved this file.

        :raises ValueError: if it did not
        """
        found = self.attributes.get("algorithm")
        if found is None:
            raise ValueError(
                f"{self.path} was not saved by sb3_ano, so {name}.load cannot take it; load it with the class that saved it. "
                "A network of the same shape can be taken over with model.set_parameters"
            )
        if found != name:
            raise ValueError(f"{self.path} was saved by {found}; load it with {found}.load, not {name}.load")


def read_saved_model(path: str | pathlib.Path | io.BufferedIOBase) -> SavedModel:
    """Read the attributes of a model, and check that the whole file is sound.

    :param path: as for SB3's ``load``; a stream is left where it was
    :raises ValueError: if the path is a folder, or the file is no zip archive, is damaged, or holds no model
    :raises FileNotFoundError: if there is no such file, with or without ``.zip``
    """
    shown = str(path) if isinstance(path, str | pathlib.Path) else "the stream"
    try:
        file = open_path(path, "r", suffix="zip")
    except IsADirectoryError as error:
        raise ValueError(f"{shown} is a folder, not a saved model; a model ends in .zip") from error
    start = file.tell()
    try:
        with zipfile.ZipFile(file) as archive:
            _require_no_bomb(archive, file)
            damaged = archive.testzip()
            if damaged is not None:
                raise zipfile.BadZipFile(f"the checksum of its entry {damaged!r} does not match")
            attributes = json.loads(archive.read("data"))
            for entry in ("policy.pth", "policy.optimizer.pth"):
                archive.getinfo(entry)
    # RuntimeError: a damaged header may ask for a password or an unknown compression.
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        raise ValueError(f"{shown} is not a saved model, or is damaged or cut off: {error}") from error
    except (KeyError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{shown} is a zip archive, but not of a saved model, or was cut off: {error}") from error
    finally:
        if isinstance(path, str | pathlib.Path):
            file.close()
        else:
            file.seek(start)
    if not isinstance(attributes, dict):
        raise ValueError(f"{shown} is a zip archive, but not of a saved model")
    return SavedModel(shown, attributes)


def _require_no_bomb(archive: zipfile.ZipFile, file: Any) -> None:
    unpacked = sum(entry.file_size for entry in archive.infolist())
    packed = file.seek(0, io.SEEK_END)
    if unpacked > max(_MAX_UNPACKED_BYTES, _MAX_RATIO * packed):
        raise zipfile.BadZipFile(f"its {packed:,} bytes would unpack to {unpacked:,}")
