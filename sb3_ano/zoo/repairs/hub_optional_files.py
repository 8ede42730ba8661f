"""``load_from_hub`` dies of an agent without ``vec_normalize.pkl``, because it waits for an error of ``requests``.

huggingface_hub has stopped using requests, so its errors are others.
"""

import functools
from typing import Any

from sb3_ano.extras import missing_extra

try:
    import huggingface_sb3  # type: ignore[import-untyped]
    import requests
    import rl_zoo3.load_from_hub
    from huggingface_hub.errors import RemoteEntryNotFoundError
except ImportError as error:
    raise missing_extra("zoo", error.name or "sb3-team-hf-integration") from error


class MissingFileError(requests.exceptions.HTTPError):
    """A repository has no such file; in terms of requests, which the zoo knows."""


def is_needed() -> bool:
    """Whether the error that the zoo waits for is not the one that a missing file causes."""
    if hasattr(huggingface_sb3.load_from_hub, "__wrapped__"):
        return False
    return not issubclass(RemoteEntryNotFoundError, rl_zoo3.load_from_hub.HTTPError)


def apply() -> None:
    """Translate the error."""
    load = huggingface_sb3.load_from_hub

    @functools.wraps(load)
    def load_from_hub(repo_id: str, filename: str) -> Any:
        try:
            return load(repo_id, filename)
        except RemoteEntryNotFoundError as error:
            raise MissingFileError(f"{repo_id} has no file {filename}") from error

    huggingface_sb3.load_from_hub = load_from_hub
    rl_zoo3.load_from_hub.load_from_hub = load_from_hub
