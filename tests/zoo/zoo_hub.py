"""The local Hub with what the zoo's own commands ask beside: lists of files."""

import contextlib
import hashlib
import re
from collections.abc import Iterator
from unittest import mock

from tests.hub import hub_server


class Handler(hub_server.Handler):
    def _route(self, path: str, body: bytes) -> None:
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path)
        if not found:
            super()._route(path, body)
            return
        _, files = self._files(*found.groups())
        entries = ((name, data, hashlib.sha1(data).hexdigest()) for name, data in files.items())
        self._json([{"type": "file", "path": name, "size": len(data), "oid": oid} for name, data, oid in entries])


@contextlib.contextmanager
def running_zoo_hub() -> Iterator[tuple[hub_server.FakeHub, dict[str, str]]]:
    """A Hub, and the variables by which other processes find it."""
    with mock.patch.object(hub_server, "Handler", Handler), hub_server.running_hub() as hub:
        yield (
            hub,
            {
                "HF_ENDPOINT": hub.url,
                "HF_TOKEN": hub_server.TOKEN,
                "HF_HUB_DISABLE_XET": "1",
                "HF_HUB_DISABLE_PROGRESS_BARS": "1",
                "HF_HUB_DISABLE_TELEMETRY": "1",
            },
        )
