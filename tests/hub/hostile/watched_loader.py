"""Loads the folders named on its standard input, one a line, and reports what Python was seen doing meanwhile.

Audit hooks cannot be taken back, and memory limits neither, hence a process of its own. With a second argument, ``act``, it
also reports a digest of how each agent acts.
"""

import hashlib
import json
import os
import resource
import sys
import time
import traceback
import warnings
from pathlib import Path

import numpy as np

#: Memory that loading may take beyond what the process has after it loaded a sound agent.
SPARE_BYTES = 2**30
_FORBIDDEN = (
    "pickle.", "marshal.", "exec", "os.", "subprocess.", "socket.", "shutil.", "ctypes.", "code.", "webbrowser.", "urllib.",
    "tempfile.",
)  # fmt: skip
PACKAGE = str(Path(__file__).parents[3])
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
        # Modules that are imported late are read from where they are installed, and traceback reads their lines.
        installed = str(path).startswith((sys.prefix, sys.base_prefix, PACKAGE))
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
    """Load one agent, with environments if it is normalised, so that every file is read."""
    global watching
    seen.clear()
    started = time.monotonic()
    watching = Path(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = load_safe(folder, make())
            outcome = {"error": None, "message": ""}
            if "act" in sys.argv[2:]:
                outcome["acts"] = digest(model)
    except BaseException as error:
        watching = None
        kinds = [each.__name__ for each in type(error).__mro__]
        outcome = {"error": kinds, "message": str(error), "traceback": traceback.format_exc()}
    watching = None
    if "act" in sys.argv[2:]:
        outcome["seconds"] = time.monotonic() - started
        outcome["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - used
    return {**outcome, "seen": list(seen)}


def digest(model) -> str:
    """How an agent acts on observations of the sound agent's space, and between which spaces."""
    parts = [str(model.observation_space), str(model.action_space)]
    venv = model.get_vec_normalize_env()
    try:
        for deterministic in (True, False):
            torch.manual_seed(0)
            if model.use_sde:
                model.policy.reset_noise()
            seen_by_model = observations if venv is None else venv.normalize_obs(observations)
            actions = model.predict(seen_by_model, deterministic=deterministic)[0]
            tensors, _ = model.policy.obs_to_tensor(seen_by_model)
            with torch.no_grad():
                numbers = model.policy.evaluate_actions(tensors, torch.as_tensor(actions))
            parts += [actions.tobytes().hex(), *(number.numpy().tobytes().hex() for number in numbers)]
    except Exception as error:
        parts.append(f"raises {error!r}")
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def samples(space):
    """Eight observations, always the same."""
    space.seed(0)
    drawn = [space.sample() for _ in range(8)]
    return (
        {key: np.stack([each[key] for each in drawn]) for key in drawn[0]} if isinstance(drawn[0], dict) else np.stack(drawn)
    )


if __name__ == "__main__":
    import torch
    from gymnasium.envs.classic_control.cartpole import CartPoleEnv

    from sb3_ano.hub import load_safe

    sound = sys.argv[1]
    make = CartPoleEnv if (Path(sound) / "vec_normalize.safetensors").exists() else lambda: None
    sound_model = load_safe(sound, make())
    observations = samples(sound_model.observation_space)
    # What predict imports late, also when it raises.
    digest(sound_model)
    for parameter in sound_model.policy.parameters():
        parameter.data.fill_(float("nan"))
    digest(sound_model)
    known_modules = {name.split(".")[0] for name in sys.modules} | set(sys.stdlib_module_names)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, used + SPARE_BYTES))
    sys.addaudithook(watch)
    for line in sys.stdin:
        print(json.dumps(load(line.rstrip("\n"))), flush=True)
