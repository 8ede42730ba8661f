"""Load the directories named on the standard input, one a line, and report what Python was seen doing meanwhile.

Audit hooks cannot be taken back, and memory limits neither, hence a process of its own. A line is a JSON list of a directory
and of code to run instead of loading it, by which the tests show that the watch sees something.
"""

import hashlib
import json
import os
import resource
import sys
import traceback
from pathlib import Path

from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.vector.utils import batch_space

from sb3_ano.hub import load_safe
from tests.hub.agents import answers

_FORBIDDEN = (
    "pickle.", "marshal.", "exec", "os.", "subprocess.", "socket.", "shutil.", "ctypes.", "code.", "webbrowser.", "urllib.",
    "tempfile.",
)  # fmt: skip
_HARMLESS = ("os.listdir", "os.scandir")
# Modules that are imported late are read from where they are installed, and traceback reads their lines.
_INSTALLED = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[3]))

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
        if writes or not (inside or str(path).startswith(_INSTALLED)):
            seen.append(f"open {path} {mode}")
    elif event == "import":
        if arguments[0].split(".")[0] not in known_modules:
            seen.append(f"import {arguments[0]}")
    elif event.startswith(_FORBIDDEN) and event not in _HARMLESS:
        code = arguments[0] if event == "exec" else None
        if code is None or not str(code.co_filename).startswith((sys.prefix, sys.base_prefix, "<frozen", "<string>")):
            seen.append(f"{event} {str(arguments)[:200]}")


def load(folder: str, code: str) -> dict:
    """Load one agent, with environments if it is normalized, so that every file is read."""
    global watching
    seen.clear()
    outcome: dict = {"error": None}
    watching = Path(folder)
    try:
        if code:
            exec(code)
        else:
            outcome["acts"] = digest(load_safe(folder, make()))
    except BaseException as error:
        watching = None
        kinds = [each.__name__ for each in type(error).__mro__]
        outcome = {"error": kinds, "message": str(error), "traceback": traceback.format_exc()}
    watching = None
    return {**outcome, "seen": list(seen)}


def digest(model) -> str:
    """Return a digest of an agent's spaces and of its answers to observations of the sound agent's space."""
    parts = [str(model.observation_space), str(model.action_space)]
    venv = model.get_vec_normalize_env()
    try:
        given = observations if venv is None else venv.normalize_obs(observations)
        parts += [answer.tobytes().hex() for answer in answers(model, given)]
        model.predict(observations)
    except Exception as error:
        parts.append(f"raises {error!r}")
    return hashlib.sha256(repr(parts).encode()).hexdigest()


if __name__ == "__main__":
    sound = Path(sys.argv[1])
    make = CartPoleEnv if (sound / "vec_normalize.safetensors").exists() else lambda: None
    sound_model = load_safe(sound, make())
    batch = batch_space(sound_model.observation_space, 8)
    batch.seed(0)
    observations = batch.sample()
    # What predict imports late, also when it raises.
    digest(sound_model)
    for parameter in sound_model.policy.parameters():
        parameter.data.fill_(float("nan"))
    digest(sound_model)
    known_modules = {name.split(".")[0] for name in sys.modules} | set(sys.stdlib_module_names)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]),) * 2)
    sys.addaudithook(watch)
    for line in sys.stdin:
        print(json.dumps(load(*json.loads(line))), flush=True)
