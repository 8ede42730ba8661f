"""Loads the folders named on its standard input, one a line, and reports what Python was seen doing meanwhile.

Audit hooks cannot be taken back, and memory limits neither, hence a process of its own.
"""

import json
import os
import resource
import sys
import traceback
import warnings
from pathlib import Path

#: Memory that loading may take beyond what the process has after it loaded a sound agent.
SPARE_BYTES = 2**30
_FORBIDDEN = (
    "pickle.",
    "marshal.",
    "exec",
    "os.",
    "subprocess.",
    "socket.",
    "shutil.",
    "ctypes.",
    "code.",
    "webbrowser.",
    "urllib.",
    "tempfile.",
)
_HARMLESS = ("os.listdir", "os.scandir")

watching: Path | None = None
seen: list[str] = []


def watch(event: str, arguments: tuple) -> None:
    """Note what loading an agent has no business with."""
    if watching is None:
        return
    if event == "open":
        path, mode, flags = arguments
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        inside = isinstance(path, str | bytes | os.PathLike) and Path(os.fsdecode(path)).parent == watching
        # Modules that are imported late are read from where Python is installed, and traceback reads their lines.
        installed = str(path).startswith((sys.prefix, sys.base_prefix)) or str(path).endswith(".py")
        if writes or not (inside or installed):
            seen.append(f"open {path} {mode}")
    elif event == "import":
        if arguments[0].split(".")[0] not in known_modules:
            seen.append(f"import {arguments[0]}")
    elif event.startswith(_FORBIDDEN) and event not in _HARMLESS:
        code = arguments[0] if event == "exec" else None
        if code is None or not str(code.co_filename).startswith((sys.prefix, sys.base_prefix, "<frozen", "<string>")):
            seen.append(f"{event} {str(arguments)[:200]}")


def load(folder: str) -> dict:
    """Load one agent with environments, so that every file is read."""
    global watching
    seen.clear()
    watching = Path(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load_safe(folder, CartPoleEnv())
        outcome = {"error": None, "message": ""}
    except BaseException as error:
        watching = None
        kinds = [each.__name__ for each in type(error).__mro__]
        outcome = {"error": kinds, "message": str(error), "traceback": traceback.format_exc()}
    watching = None
    return {**outcome, "seen": list(seen)}


if __name__ == "__main__":
    from gymnasium.envs.classic_control.cartpole import CartPoleEnv

    from sb3_ano.hub import load_safe

    sound = sys.argv[1]
    load_safe(sound, CartPoleEnv())
    known_modules = {name.split(".")[0] for name in sys.modules} | set(sys.stdlib_module_names)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, used + SPARE_BYTES))
    sys.addaudithook(watch)
    for line in sys.stdin:
        print(json.dumps(load(line.rstrip("\n"))), flush=True)
