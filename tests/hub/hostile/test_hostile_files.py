"""Hostile files: none runs code, none is read or written outside of its directory, none takes memory it has no bytes for.

Each case spoils a sound agent as someone could who knows the format: unless a case is about the fingerprints, those in the
JSON are made to fit. A process that is watched by an audit hook, with little memory, loads the result.

Of a hostile repository, no module of its choice is imported, no environment is made, and nothing large is downloaded.
"""

import itertools
import json
import os
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load, save
from stable_baselines3 import PPO

from sb3_ano.envs import make_vec_env
from sb3_ano.hub import SafeFormatError, download_run, load_from_hub, load_safe
from sb3_ano.hub.safe_format import SAFE_FILES
from tests.common import parameters, python
from tests.hub.agents import one_line, rewrite
from tests.hub.hostile import common
from tests.hub.hostile.common import HUGE, TENSOR_FILES, everything_in, judged, refused_by, with_header, write_tensors

WATCHED = {
    "import pickle; pickle.loads(bytes.fromhex('{pickle}'))": ["pickle.find_class", "canary w"],
    "import os; os.system('true')": ["os.system"],
    "open('/nowhere/elsewhere')": ["/nowhere/elsewhere r"],
    "import importlib; importlib.import_module('canary_module')": ["canary_module.py"],  # seen by what it runs
    "import canary_package": ["import canary_package"],
}


def test_the_watch_sees_what_no_file_may_do(sound, folder):
    """In a process of its own, because a module is imported only once."""
    with common.watched_process(sound) as load_there:
        for code, events in WATCHED.items():
            seen = load_there(folder, code.replace("{pickle}", common.evil_pickle(folder).hex()))["seen"]
            assert all(any(event in each for each in seen) for event in events), seen


def entry(shape, begin, end):
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


def changed(path, change):
    """The content of a file, after a change of its largest tensor."""
    tensors = load(path.read_bytes())
    change(tensors, max(tensors, key=lambda key: (tensors[key].numel(), key)))
    return save(tensors)


TEXTS = {
    "not UTF-8": b'{"format": "\xff\xfe"}',
    "deep lists": b"[" * 1_000_000,
    "a list": b"[]",
}
TENSORS = {
    "nothing": b"",
    "a length beyond everything": struct.pack("<Q", 2**63) + b"{}" * 100,
    "deep JSON": with_header(b'{"a":' * 10_000),
    "terabytes without data": with_header({"value_net.bias": entry([HUGE], 0, 4 * HUGE)}),
    "overflowing shape": with_header({"value_net.bias": entry([2**33, 2**33], 0, 4)}, b"\0" * 4),
    "a name of a megabyte": with_header({"a\nb\x1b[31m" + "x" * 2**20: entry([1], 0, 4)}, b"\0" * 4),
    "a header of 17 MiB": with_header(b" " * 17 * 2**20),
}
CHANGES = {
    "one more axis": lambda tensors, key: tensors.update({key: tensors[key].reshape(*tensors[key].shape, 1)}),
    "half precision": lambda tensors, key: tensors.update({key: tensors[key].half()}),
    "missing": lambda tensors, key: tensors.pop(key),
    "one more": lambda tensors, key: tensors.update({"evil": torch.zeros(1)}),
}
# What stands in the place of a file.
NODES = {
    "no file": lambda path: None,
    "folder": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "link out": lambda path: path.symlink_to(path.parents[1] / "elsewhere"),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *itertools.product(["pickle", *NODES], SAFE_FILES),
        *itertools.product(TEXTS, SAFE_FILES[:1]),
        *itertools.product([*TENSORS, *CHANGES], TENSOR_FILES),
    ],
)
def test_what_is_no_file_of_the_format_is_rejected(kind, name, watched, folder):
    path = folder / name
    if kind in NODES:
        path.rename(folder.parent / "elsewhere")
        NODES[kind](path)
    elif kind in CHANGES:
        write_tensors(folder, name, changed(path, CHANGES[kind]))
    else:
        content = {"pickle": common.evil_pickle(folder), **TEXTS, **TENSORS}[kind]
        path.write_bytes(content)
        if name in TENSOR_FILES:
            write_tensors(folder, name, content)
    refused_by(watched, folder, "its header claims" if "MiB" in kind else name)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_parameters_that_are_no_numbers_are_rejected(number, watched, folder):
    def spoil(tensors, key):
        tensors[key].view(-1)[-1] = number

    write_tensors(folder, "policy.safetensors", changed(folder / "policy.safetensors", spoil))
    refused_by(watched, folder, "holds NaN or Inf")


def test_the_json_has_at_most_4_mb(watched, folder):
    path = folder / "sb3_ano.json"
    path.write_bytes(path.read_bytes().ljust(4_000_000))
    assert judged(watched(folder)) != "refused"
    path.write_bytes(path.read_bytes() + b" ")
    refused_by(watched, folder, "is larger than 4000000 bytes")


def test_pickles_and_code_next_to_the_files_are_not_looked_at(watched, folder, sound):
    """A sound agent does nothing that is watched."""
    acts = judged(watched(sound))
    pickles = ("vec_normalize.pkl", "model.zip", "policy.pth", "ano-CartPole-v1.zip", "data", "pytorch_variables.pth")
    planted = dict.fromkeys(pickles, common.evil_pickle(folder))
    planted |= dict.fromkeys(("config.yml", "args.yml"), b"!!python/object/apply:os.system ['touch canary']\n")
    planted |= dict.fromkeys(("__init__.py", "sitecustomize.py"), f"open({str(folder.parent / 'canary')!r}, 'w')".encode())
    for name, content in planted.items():
        (folder / name).write_bytes(content)
    paths = ("../evil.safetensors", "/etc/passwd", "..", "sub/policy.safetensors", "C:\\evil", "model.zip")
    rewrite(folder, {("files", name): {"size": 8, "sha256": ""} for name in paths})
    before = everything_in(folder.parent)
    assert judged(watched(folder)) == acts == watched(sound)["acts"]
    assert everything_in(folder.parent) == before
    weights = changed(folder / "policy.safetensors", lambda tensors, key: tensors.update({key: 2 * tensors[key]}))
    write_tensors(folder, "policy.safetensors", weights)
    assert watched(folder)["acts"] != acts, "the comparison sees another agent"


def test_paths_that_are_no_directory_are_one_line(tmp_path):
    (tmp_path / "file").write_text("no directory")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("file", "nowhere", "loop", "x" * 5000, "a\0b"):
        with one_line(SafeFormatError, "sb3_ano.json"):
            load_safe(f"{tmp_path}/{name}")


def test_a_file_of_holes_is_refused_before_memory_is_taken(watched, folder):
    """A sparse file of 2 GiB, with 1 GiB to spare."""
    n = (2**31 - 104) // 4
    begin = with_header({"value_net.bias": entry([n], 0, 4 * n)})
    path = folder / "policy.safetensors"
    path.write_bytes(begin)
    os.truncate(path, len(begin) + 4 * n)
    rewrite(folder, {("files", "policy.safetensors"): {"size": path.stat().st_size, "sha256": "0" * 64}})
    refused_by(watched, folder, "needs more memory than is available")
    os.truncate(path, 2**31 + 1)
    refused_by(watched, folder, "policy.safetensors is larger than 2147483648 bytes")


#: A program that loads two agents, and prints how many KiB the second takes.
GROWTH = """
import sys
from sb3_ano.hub import load_safe
memory = lambda: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
load_safe(sys.argv[1])  # imports modules
before = memory()
model = load_safe(sys.argv[2])
print(model.n_steps, memory() - before)
"""


def test_a_rollout_takes_no_memory_before_training(watched, sound, folder):
    """A buffer of 1.9 GiB was written in full; the real number of environments counts."""
    rewrite(folder, {"arguments/n_steps": 10**7, "n_envs": 1000})  # of the author's; one environment is given
    assert watched(folder)["error"] is None
    rewrite(folder, {"n_envs": 1})
    steps, growth = python("-W", "ignore", "-c", GROWTH, sound, folder, check=True).stdout.split()
    assert (int(steps), int(growth) < 20_000) == (10**7, True), growth  # of 520 MB
    eight = make_vec_env("CartPole-v1", 8, backend="gymnasium")
    with pytest.raises(SafeFormatError, match=r"n_steps=10000000 x 8 environments.*or custom_objects=\{'n_steps': ...\}"):
        load_safe(folder, eight)
    rewrite(folder, {"n_envs": 2**20})  # of the author's, which a number of steps does not agree to
    with pytest.raises(SafeFormatError, match=r"n_steps=64 x 1048576 environments.*together with env="):
        load_safe(folder, custom_objects={"n_steps": 64})
    assert load_safe(folder, eight, custom_objects={"n_steps": 64}).n_steps == 64


def test_no_weights_are_made_orthogonal_to_be_replaced(sound):
    """In cubic time, minutes for a file of 137 MB."""
    with torch.profiler.profile() as whole:
        assert load_safe(sound).policy.ortho_init
    with torch.profiler.profile() as afterwards:
        torch.nn.init.orthogonal_(torch.empty(2, 2))
    assert ["aten::linalg_qr" in {event.name for event in each.events()} for each in (whole, afterwards)] == [False, True]


def test_agents_can_be_loaded_by_several_threads_at_once(sound):
    path = sys.path.copy()
    with ThreadPoolExecutor(4) as pool:
        agents = list(pool.map(lambda _: load_safe(sound, device="cpu"), range(32)))
    assert sys.path == path
    weights = PPO("MlpPolicy", "CartPole-v1", device="cpu").policy.mlp_extractor.policy_net[2].weight
    torch.testing.assert_close(torch.linalg.svdvals(weights), torch.full((64,), 2**0.5))  # orthogonal, as by SB3
    assert all(torch.equal(parameters(agent), parameters(agents[0])) for agent in agents)


@pytest.mark.parametrize("name", SAFE_FILES)
def test_damage_is_always_noticed(name, watched, folder, sound):
    """Damage without intent: cuts and flipped bits, the fingerprints as they were."""
    whole, acts = (folder / name).read_bytes(), judged(watched(sound))
    # Of the JSON, the last character may be missed.
    for size in spots(len(whole) - 2, 6):
        (folder / name).write_bytes(whole[:size])
        refused_by(watched, folder, name)
    for position in [7, 8, 9, *spots(len(whole), 20)]:
        spoilt = whole[:position] + bytes([whole[position] ^ 1 << position % 8]) + whole[position + 1 :]
        (folder / name).write_bytes(spoilt)
        result = judged(watched(folder))
        # The same JSON in other letters, such as 1E-05, acts the same.
        is_same = name == "sb3_ano.json" and result == acts and json.loads(spoilt) == json.loads(whole)
        assert result == "refused" or is_same


def spots(size, count):
    return [0, 1, size // 2, size - 1, *np.random.default_rng(size).integers(0, size, count).tolist()]


REPOSITORY = "somebody/ano-CartPole-v1"
# Names of modules, and files of theirs in the current directory.
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
    """Sizes that the Hub does not list, and all files together."""
    share(b"{}")
    total = len(packed["sb3_ano.json"]) + len(packed["policy.safetensors"]) + 2
    monkeypatch.setattr("sb3_ano.hub.pull.MAX_BYTES", total)
    load_from_hub(REPOSITORY)
    monkeypatch.setattr("sb3_ano.hub.pull.MAX_BYTES", total - 1)
    with one_line(ValueError, f"{REPOSITORY} has [0-9,]+ bytes; allowed are "):
        load_from_hub(REPOSITORY)


def test_sizes_that_the_hub_does_not_list_are_asked_for(share, packed, hub, monkeypatch):
    hub.lists_sizes = False
    share(b"{}")
    assert load_from_hub(REPOSITORY).get_env() is None
    monkeypatch.setattr("sb3_ano.hub.pull.MAX_BYTES", 1000)
    with one_line(ValueError, f"{REPOSITORY} has [0-9,]+ bytes; allowed are 1,000"):
        load_from_hub(REPOSITORY)
    unknown = mock.Mock(size=None)
    monkeypatch.setattr(HfApi, "get_hf_file_metadata", lambda *_, **__: unknown)
    with one_line(ValueError, "does not tell the size of policy.safetensors; .* set HF_ENDPOINT to a Hub that tells it"):
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
    """Packages that PyTorch imports late, and those that this package imports late."""
    for name, content in packed.items():
        (tmp_path / name).write_bytes(content)
    for name in ("sympy", "mpmath", "triton", "optree", "networkx", "pandas", "onnx", "safetensors", "late"):
        (tmp_path / f"{name}.py").write_text(f"print('{name} ran')\nraise SystemExit(9)")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", IN_THE_FOLDER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
