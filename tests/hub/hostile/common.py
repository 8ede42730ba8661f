"""What the hostile cases share: how a sound agent is spoilt, and what must hold of the result."""

import hashlib
import json
import pickle
from pathlib import Path

import numpy as np

WATCHED_LOADER = Path(__file__).with_name("watched_loader.py")
TENSOR_FILES = ("policy.safetensors", "optimizer.safetensors", "vec_normalize.safetensors")
HUGE = 10**12


def everything_in(path):
    return sorted((str(each), each.lstat().st_size) for each in path.rglob("*"))


def refused_by(watched, folder, message):
    """Check that the folder is refused in one clear line, and nothing else happens."""
    before = everything_in(folder.parent)
    outcome = watched(folder)
    assert outcome["seen"] == []
    assert outcome["error"] is not None, "it was loaded"
    assert "ValueError" in outcome["error"], outcome["traceback"]
    assert outcome["message"].isprintable()  # one line, and nothing that a terminal obeys
    assert len(outcome["message"]) < 1000
    assert "allocate" not in outcome["message"]
    assert "MemoryError" not in outcome["message"]
    assert message in outcome["message"]
    assert everything_in(folder.parent) == before


def read_json(folder):
    """The content without its checksum, which whoever rewrites it leaves out."""
    content = json.loads((folder / "sb3_ano.json").read_text())
    content.pop("checksum", None)
    return content


def write_json(folder, content):
    (folder / "sb3_ano.json").write_text(json.dumps(content))


def put(content, place, value):
    """Set the value at a place such as ``arguments/gamma``, and return the last part of the place."""
    *parents, last = place.split("/", 1) if place.startswith("files/") else place.split("/")
    for parent in parents:
        content = content[int(parent) if parent.isdigit() else parent]
    content[last] = value
    return last


def write_tensors(folder, name, content):
    """Write a file of tensors, with a fingerprint that fits."""
    (folder / name).write_bytes(content)
    document = read_json(folder)
    document["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_json(folder, document)


class Evil:
    """Leaves a trace when it is unpickled."""

    def __init__(self, canary):
        self.canary = str(canary)

    def __reduce__(self):
        return (open, (self.canary, "w"))


def evil_pickle(folder):
    return pickle.dumps(Evil(folder.parent / "canary"))


def spots(size, count):
    return [0, 1, size // 2, size - 1, *np.random.default_rng(size).integers(0, size, count).tolist()]
