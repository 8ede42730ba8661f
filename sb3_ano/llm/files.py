"""JSON on disk, there whole or not at all."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: Any) -> None:
    """Write text, or anything else as JSON, so that a process killed at any moment leaves the file as it was or as it will be.

    :param path: the file; its folder is made
    :param content: text, or what JSON can say
    """
    text = content if isinstance(content, str) else json.dumps(content) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_json(path: Path) -> Any:
    """Read JSON, or None where there is no file.

    :raises ValueError: if it is no JSON
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a file of results: {error}") from error
