"""Facts about this process that results depend on: time, processor, versions of packages, and whether a cluster answers."""

import contextlib
import inspect
import os
import platform
import socket
import subprocess
import warnings
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from sb3_ano._secrets import hide

#: Packages whose versions decide about results.
PACKAGES = ("sb3-ano", "stable-baselines3", "sb3-contrib", "torch", "numpy", "gymnasium", "mujoco", "envpool", "ale-py")
_CONNECT_SECONDS = 10.0
# Packages between a user's line and a warning of this one.
_BETWEEN = {"sb3_ano", "stable_baselines3", "sb3_contrib", "rl_zoo3", "torch"}


def now() -> str:
    """Return the date and time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def warn_user(message: str) -> None:
    """Warn at the line of the user's code, from which ``learn`` or a constructor may be any number of calls away."""
    level = 1
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)


def cores() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS and Windows


def machine() -> dict[str, Any]:
    """Return processor, cores, operating system and Python version."""
    cpu = platform.processor()
    # On Linux, Python knows no more than the architecture.
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break

    return {"cpu": cpu or "unknown", "cores": cores(), "system": platform.platform(), "python": platform.python_version()}


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of the packages that are installed.

    :param packages: distribution names
    """
    installed = {}
    for package in packages:
        # Most of them belong to an extra.
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed


def commit() -> str | None:
    """Return the git commit of this source tree, with ``-dirty`` after local changes; None outside of a git checkout."""
    # It fails for a package that is installed, which may be inside of another repository.
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(*arguments: str) -> str | None:
    """Return what git prints in the directory of this package; None if it fails or is missing."""
    directory = Path(__file__).resolve().parent
    try:
        done = subprocess.run(["git", *arguments], cwd=directory, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def require_reachable(option: str, address: str) -> None:
    """Check at once whether a Ray cluster can be there; Ray itself tries for minutes.

    :param option: option of the command line, for messages
    :param address: address that the user gave, except ``"auto"``
    :raises ValueError: if it is not ``HOST:PORT``
    :raises OSError: if nothing answers
    """
    host, _, port = address.rpartition(":")
    # It may have a password, which no message shows.
    address = hide(address)
    if "//" in address or not host or not port.isdecimal():
        raise ValueError(f"{option} {address} is not allowed; allowed are auto, and HOST:PORT of a cluster's head")

    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise OSError(f"{option} {address}: no Ray cluster was found: {error}") from error
