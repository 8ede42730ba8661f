"""Agents that the zoo downloads are pickles: they come only to those who say that they trust them."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from sb3_ano.extras import missing_extra
from sb3_ano.zoo.trust import is_trusted

try:
    import rl_zoo3.load_from_hub
except ImportError as error:
    raise missing_extra("zoo", error.name or "rl-zoo3") from error


def require_trust() -> None:
    """Say what downloading an agent of the zoo means.

    :raises ValueError: if the user has not said that its author is trusted
    """
    meaning = "agents that Stable-Baselines3 saved are pickles: loading one runs any code that its author put in"
    if not is_trusted():
        raise ValueError(f"{meaning}; if you trust the author with your machine, use --trust-remote-code")
    print(f"Its author is trusted: {meaning}")


@contextlib.contextmanager
def guarded_downloads() -> Iterator[None]:
    """Inside the block, commands of the zoo that would download an agent which is not there ask for trust first."""
    download = rl_zoo3.load_from_hub.download_from_hub

    def ask_and_download(*arguments: Any, **options: Any) -> None:
        require_trust()
        download(*arguments, **options)

    def put(function: Any) -> None:
        rl_zoo3.load_from_hub.download_from_hub = function
        if "rl_zoo3.enjoy" in sys.modules:  # it took the name with it when it was imported, before the block or in it
            sys.modules["rl_zoo3.enjoy"].download_from_hub = function  # type: ignore[attr-defined]

    put(ask_and_download)
    try:
        yield
    finally:
        put(download)
