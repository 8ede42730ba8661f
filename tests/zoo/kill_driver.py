"""Runs of the zoo's command line that are killed, in children of one process, so that the libraries are imported once.

Reads commands from its standard input, one a line, ``{"arguments": [...], "folder": "...", "kill_after": ...}``, and answers
each with what became of it.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rl_zoo3 import train  # noqa: F401  # what the children would import

from sb3_ano.zoo import cli, commands  # noqa: F401


def start(arguments: list[str], folder: str, output: Path) -> int:
    """Start a command in a child process, and return its id."""
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        status = cli.main(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return child


def wait(child: int, its_time_has_come: Callable[[], bool]) -> int:
    """Exit status of a child; negative if it had to be killed."""
    while not its_time_has_come():
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(command: dict[str, Any]) -> dict[str, Any]:
    """Run one command, killed after ``kill_after``: so many seconds, or as soon as there is such a file; null never."""
    folder, kill_after, began = Path(command["folder"]), command["kill_after"], time.monotonic()
    output = folder / "output.txt"

    def its_time_has_come() -> bool:
        if isinstance(kill_after, str):
            return any(folder.glob(kill_after))
        return kill_after is not None and time.monotonic() - began >= kill_after

    status = wait(start(command["arguments"], command["folder"], output), its_time_has_come)
    return {"status": status, "seconds": time.monotonic() - began, "output": output.read_text()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
