"""Damage a sound agent, load the result in a watched process, and judge what happened there."""

import contextlib
import hashlib
import json
import os
import pickle
import select
import struct
import subprocess
import sys

from tests.common import ROOT, variables
from tests.hub.agents import Canary, is_one_line, rewrite

TENSOR_FILES = ("policy.safetensors", "vec_normalize.safetensors")
HUGE = 10**12
#: Seconds that a case may take on a busy machine.
TIME_LIMIT = 60


@contextlib.contextmanager
def watched_process(sound, spare=2**30):
    """A function that loads a directory, or runs code, in another process, and returns what happened there.

    :param sound: agent that the process loads first, so that it has imported all that loading needs
    :param spare: bytes of memory that loading may take beyond what the process has then
    """
    # On its path lie modules that it has no reason to import.
    modules = sound.parent / "modules"
    modules.mkdir(exist_ok=True)
    for name in ("canary_module", "canary_package"):
        (modules / f"{name}.py").write_text("def shape(x): return x\n")
    path = os.pathsep.join([str(modules), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", "-m", "tests.hub.hostile.watched_loader", str(sound), str(spare)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=variables(PYTHONPATH=path), **pipes) as process:

        def load_there(folder, code=""):
            process.stdin.write(json.dumps([str(folder), code]) + "\n")
            process.stdin.flush()
            if not select.select([process.stdout], [], [], TIME_LIMIT)[0]:
                process.kill()
                raise AssertionError(f"loading {folder} took more than {TIME_LIMIT} s")
            answer = process.stdout.readline()
            assert answer, "the loader died"
            return json.loads(answer)

        yield load_there
        process.stdin.close()


def judged(outcome):
    """Return a digest of what a loaded agent does, "refused", or words that begin with BAD if that is forbidden.

    :param outcome: answer of the watched process
    """
    if outcome["seen"]:
        return f"BAD: {outcome['seen']}"
    if outcome["error"] is None:
        return outcome["acts"]
    is_clear = "ValueError" in outcome["error"] and is_one_line(outcome["message"])
    return "refused" if is_clear else f"BAD: {outcome['traceback']}"


def everything_in(path):
    return sorted((str(each), each.lstat().st_size) for each in path.rglob("*"))


def refused_by(watched, folder, message):
    """Check that the directory is rejected in one clear line, and nothing else happens."""
    before = everything_in(folder.parent)
    outcome = watched(folder)
    assert judged(outcome) == "refused"
    assert "allocate" not in outcome["message"]
    assert "MemoryError" not in outcome["message"]
    assert message in outcome["message"]
    assert everything_in(folder.parent) == before
    return outcome["message"]


def places(content, path=()):
    """Yield the path of every key of every object, and of every element of every list, with its owner and its key."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield (*path, str(key)), content, key
        yield from places(value, (*path, str(key)))


def with_header(header, data=b""):
    """Return the content of a file of tensors."""
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content + data


def write_tensors(folder, name, content):
    """Write a file of tensors, with a fingerprint that fits."""
    (folder / name).write_bytes(content)
    rewrite(folder, {("files", name): {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}})


def evil_pickle(folder):
    return pickle.dumps(Canary(folder.parent / "canary"))
