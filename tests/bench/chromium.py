"""Headless Chromium through its debugging pipe, which needs no package."""

import base64
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """The path of a Chromium, None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """A page, and what it says while it is there.

    :param send: file descriptor of commands
    :param receive: file descriptor of answers and events
    """

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._buffer = b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the DevTools protocol, and its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._receive, 1 << 20)
            if not chunk:
                raise RuntimeError("Chromium has ended")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path, width: int, height: int, phone: bool) -> None:
        """Load a page in a window of this size, and wait until all of it is there."""
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.call("Page.navigate", url=page.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def screenshot(self) -> bytes:
        """What the window shows, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, and requests that went out."""
        said = []
        for event in self.events:
            method, parameters = event["method"], event["params"]
            if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                said.append(json.dumps(parameters))
            if method == "Network.requestWillBeSent" and not parameters["request"]["url"].startswith(("file:", "data:")):
                said.append(f"request to {parameters['request']['url']}")
        return said


@contextmanager
def headless(executable: str, profile: Path) -> Iterator[Tab]:
    """A tab of a Chromium that ends with the block.

    :param executable: its path
    :param profile: a folder for its files
    """
    to_browser, from_us = os.pipe()
    to_us, from_browser = os.pipe()
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    # Chromium reads commands from descriptor 3 and answers on 4; the shell puts them there.
    shell = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
    browser = subprocess.Popen(
        ["bash", "-c", shell, executable, *options], pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Tab(from_us, to_us)
    finally:
        browser.kill()
        browser.wait()
        os.close(from_us)
        os.close(to_us)
