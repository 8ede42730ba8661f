"""The Hub of tests/hub for the zoo's own commands, which run in other processes."""

import contextlib
from collections.abc import Iterator

from tests.hub.hub_server import FakeHub, running_hub


@contextlib.contextmanager
def running_zoo_hub() -> Iterator[tuple[FakeHub, dict[str, str]]]:
    """A Hub, and the variables by which other processes find it."""
    with running_hub() as hub:
        yield hub, hub.variables
