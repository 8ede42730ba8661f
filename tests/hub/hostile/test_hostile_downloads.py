"""A hostile repository: no module of its choice is imported, no environment is made, and nothing large is downloaded."""

import json
import os
import subprocess
import sys

import pytest
from huggingface_hub import HfApi

from sb3_ano.hub import download_run, load_from_hub
from tests.hub.agents import one_line

REPOSITORY = "somebody/ano-CartPole-v1"
# The review's names of modules, and files of theirs in the current directory.
MODULES = ("train", "this", "test", "evil_agent")


@pytest.fixture
def share(hub, packed, monkeypatch):
    """A function that puts the agent on the Hub, with results.json as given; nobody makes an environment meanwhile."""

    def add(results):
        content = results if isinstance(results, bytes) else json.dumps(results).encode()
        hub.add(REPOSITORY, {**packed, "results.json": content})

    for name in ("make", "make_vec", "spec", "envs.registration.make"):
        monkeypatch.setattr(f"gymnasium.{name}", None)
    return add


NOT_REGISTERED = "results.json names the environment .{,200} not registered here"
NO_NAME = "results.json does not name the agent's environment"


@pytest.mark.parametrize(
    ("results", "message"),
    [
        # Review safety H1, and the row of download_run among the unclear errors.
        *[({"env_id": f"{name}:CartPole-v1"}, NOT_REGISTERED) for name in (*MODULES, "test.__main__", "evil_agent.evil", "")],
        *[({"env_id": name}, NOT_REGISTERED) for name in ("", "/etc/passwd", "x" * 300, "CartPole-v1\0", "\x1b]0;title\x07x")],
        *[({"env_id": value}, NO_NAME) for value in (["CartPole-v1"], 3)],
        *[(content, NO_NAME) for content in (b"{", b"[]", b"[" * 100_000, b'{"env_id": "CartPole-v1"}'.ljust(2**22))],
    ],
)
def test_an_environment_is_only_looked_up(results, message, share, tmp_path, monkeypatch):
    for name in ("train.py", "evil_agent/evil.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    modules = set(sys.modules)
    share(results)
    with one_line(ValueError, f"{REPOSITORY}/{message}"):
        download_run(REPOSITORY, tmp_path / "logs" / "run")
    assert load_from_hub(REPOSITORY).get_env() is None
    assert not {name for name in set(sys.modules) - modules if name.split(".")[0] in MODULES}
    assert not list((tmp_path / "logs").iterdir())


def test_the_files_together_have_a_limit(share, packed, monkeypatch):
    """Review safety H8: sizes that the Hub does not list, and all files together."""
    share(b"{}")
    total = len(packed["sb3_ano.json"]) + len(packed["policy.safetensors"]) + 2
    monkeypatch.setattr("sb3_ano.hub.pull.MAX_BYTES", total)
    load_from_hub(REPOSITORY)
    monkeypatch.setattr("sb3_ano.hub.pull.MAX_BYTES", total - 1)
    with one_line(ValueError, f"{REPOSITORY} has [0-9,]+ bytes; allowed are "):
        load_from_hub(REPOSITORY)
    info = HfApi().model_info(REPOSITORY)
    for file in info.siblings:
        file.size = None
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: info)
    with one_line(ValueError, "has inf bytes"):
        load_from_hub(REPOSITORY)


IN_THE_FOLDER = """
import importlib.util, os, sys
import sb3_ano.hub
from stable_baselines3.common.policies import ActorCriticPolicy
class Late(ActorCriticPolicy):
    def __init__(self, *arguments, **options):
        assert importlib.util.find_spec("late") is None
        super().__init__(*arguments, **options)
sys.path.insert(0, "")
os.chdir(sys.argv[1])
assert importlib.util.find_spec("late")
model = sb3_ano.hub.load_safe(".", custom_objects={"policy": Late})
model.predict(model.observation_space.sample())
assert sys.path[0] == ""
"""


def test_a_directory_supplies_no_modules_even_if_it_is_the_current_one(packed, tmp_path):
    """Review safety H7: packages that PyTorch imports late, and those that this package imports late."""
    for name, content in packed.items():
        (tmp_path / name).write_bytes(content)
    for name in ("sympy", "mpmath", "triton", "optree", "networkx", "pandas", "onnx", "safetensors", "late"):
        (tmp_path / f"{name}.py").write_text(f"print('{name} ran')\nraise SystemExit(9)")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", IN_THE_FOLDER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
