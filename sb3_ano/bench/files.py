"""Results on disk, and the machine that they are from."""

import json
import os
import platform
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write a file so that, killed at any moment, it is there as it was or as it will be.

    :param path: the file; its folder is made
    :param text: its content
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON as :func:`write_text` does."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Read what :func:`write_json` wrote, or None where there is no file.

    :raises ValueError: if it is no JSON
    """
    if path.exists() and not path.is_file():  # a device is read without end
        raise ValueError(f"{path} is not a file of results")
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a file of results: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a file of results")
    return content


def now() -> str:
    """Date and time, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """Processor, cores and system."""
    return {"cpu": _cpu_model(), "cores": cores(), "system": platform.platform(), "python": platform.python_version()}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
