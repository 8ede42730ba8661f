"""A sound agent, copies of it to be spoilt, and a process that loads them under watch."""

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ano import ANO
from sb3_ano.hub import save_safe
from tests.common import SMALL
from tests.hub.hostile.common import WATCHED_LOADER

#: Seconds that a case may take on a busy machine.
TIME_LIMIT = 60


@pytest.fixture(scope="session")
def sound(tmp_path_factory):
    """An agent with all files of the format."""
    env = VecNormalize(ANO("MlpPolicy", "CartPole-v1", **SMALL).get_env())
    model = ANO("MlpPolicy", env, policy_kwargs={"net_arch": [8, 8]}, **SMALL).learn(64)
    return save_safe(model, tmp_path_factory.mktemp("sound") / "agent", include_optimizer=True)


@pytest.fixture(scope="session")
def watched(sound):
    """A function that loads a folder in another process, and returns what happened there."""
    with watched_process(sound) as load_there:
        yield load_there


@contextlib.contextmanager
def watched_process(sound, *options):
    """A function as :func:`watched` provides it, for another sound agent."""
    paths = os.pathsep.join([str(WATCHED_LOADER.parents[3]), os.environ.get("PYTHONPATH", "")])
    # On its path lies a module that leaves a trace when it is imported.
    canaries = sound.parent / "modules"
    canaries.mkdir(exist_ok=True)
    canary = sound.parent / "imported"
    (canaries / "canary_module.py").write_text(f"open({str(canary)!r}, 'w').close()\ndef shape(x): return x\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(canaries), paths]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(WATCHED_LOADER), str(sound), *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:

        def load_there(folder):
            process.stdin.write(f"{folder}\n")
            process.stdin.flush()
            if not select.select([process.stdout], [], [], TIME_LIMIT)[0]:
                process.kill()
                raise AssertionError(f"loading {folder} took more than {TIME_LIMIT} s")
            answer = process.stdout.readline()
            assert answer, "the loader died"
            assert not canary.exists()
            return json.loads(answer)

        yield load_there
        process.stdin.close()


@pytest.fixture
def folder(sound, tmp_path):
    """A copy to be spoilt."""
    return Path(shutil.copytree(sound, tmp_path / "agent"))
