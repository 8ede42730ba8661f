"""Hostile JSON: none runs code, none is read or written outside of its folder, none takes memory it has no bytes for.

Each case spoils a sound agent as someone could who knows the format: unless a case is about the fingerprints, those in the
JSON are made to fit. A process that is watched by an audit hook, with little memory, loads the result.
"""

import base64
import hashlib
import json
import pickle
import subprocess
import sys

import pytest
import torch

from sb3_ano.hub import load_safe
from tests.hub.hostile.common import HUGE, everything_in, put, read_json, refused_by, spots, write_json

BLOB = base64.b64encode(pickle.dumps(print)).decode()

# Names that lead to code, in every place that takes a name; and the message.
NAMES = [
    "os.system",
    "os:system",
    "posix.system",
    "builtins.eval",
    "subprocess.Popen",
    "canary_module.shape",
    "canary_module:shape",
    "torch.load",
    "torch.nn.modules.module.Module",
    "../../evil",
    "__main__.x",
]
NAMED_PLACES = {
    "algorithm": "algorithm='",
    "policy": "policy='",
    "arguments/policy_kwargs/activation_fn": "policy_kwargs.activation_fn='",
    "arguments/rollout_buffer_class": "rollout_buffer_class='",
    "arguments/learning_rate": "learning_rate='",
    "observation_space/type": "observation_space.type='",
    "observation_space/dtype": "observation_space.dtype='",
    "shaping/name": "which is not built in and is never imported",
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", NAMED_PLACES)
def test_names_of_code_are_not_followed(place, name, watched, folder):
    content = read_json(folder)
    put(content, place, name)
    write_json(folder, content)
    refused_by(watched, folder, NAMED_PLACES[place])


TAGS = {
    "class": ({"$class": "os.system"}, "is not allowed; allowed are"),
    "class of modules": ({"$class": "torch.nn.modules.activation.Tanh"}, "is not allowed; allowed are"),
    "class as list": ({"$class": ["os.system", "touch canary"]}, "is not allowed; allowed are"),
    "class with arguments": ({"$class": "os.system", "$args": ["touch canary"]}, "unknown key"),
    "custom": ({"$custom": "os:system"}, "never imported by its name"),
    "custom as object": ({"$custom": {"$class": "os.system"}}, "is not allowed; allowed are short strings"),
    "schedule": ({"$schedule": "os.system"}, "allowed"),
    "unknown tag": ({"$pickle": BLOB}, "is not allowed; allowed are plain values"),
    "float": ({"$float": "__import__('os')"}, "is not allowed"),
    "SB3's pickle": ({":type:": "<class 'function'>", ":serialized:": BLOB}, "allowed"),
    "jsonpickle": ({"py/object": "os.system", "py/reduce": [{"py/function": "os.system"}]}, "allowed"),
    "YAML": ("!!python/object/apply:os.system ['touch canary']", "is not allowed"),
    "template": ("{{ ''.__class__.__mro__ }}", "is not allowed"),
}


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize(
    "place",
    ["arguments/policy_kwargs/activation_fn", "arguments/policy_kwargs/optimizer_class", "arguments/rollout_buffer_class"],
)
def test_objects_that_stand_for_code_are_not_followed(place, tag, watched, folder):
    value, message = TAGS[tag]
    content = read_json(folder)
    put(content, place, value)
    write_json(folder, content)
    refused_by(watched, folder, message)


def test_a_class_of_another_kind_is_not_taken(watched, folder):
    content = read_json(folder)
    put(content, "arguments/policy_kwargs/activation_fn", {"$class": "torch.optim.Adam"})
    write_json(folder, content)
    refused_by(watched, folder, "policy_kwargs.activation_fn='torch.optim.Adam' is not allowed")


VALUES = [
    ("algorithm", "PPO", "algorithm='PPO'"),
    ("algorithm", None, "algorithm=None"),
    ("algorithm", ["ANO"], "algorithm=['ANO']"),
    ("algorithm", "SPO", "shaping="),
    ("algorithm", "PAPO", "arguments lacks 'k'"),
    ("policy", 5, "policy=5"),
    ("policy", {"MlpPolicy": 1}, "policy="),
    ("policy", "CnnPolicy", "there is no ActorCriticCnnPolicy with these arguments"),
    ("format", "pickle", "is not of an agent in the safe format"),
    ("format_version", 0, "format_version=0"),
    ("format_version", "1", "format_version='1'"),
    ("format_version", True, "format_version=True"),
    ("format_version", 10**6, "so install a newer one"),
    ("arguments", [], "arguments=[]"),
    ("arguments/__class__", "os.system", "unknown key '__class__'"),
    ("arguments/tensorboard_log", "/tmp/evil", "unknown key 'tensorboard_log'"),
    ("arguments/env", "evil:Env-v0", "unknown key 'env'"),
    ("arguments/n_steps", HUGE, "asks for rollouts of n_steps=1000000000000"),
    ("arguments/n_steps", 4 * 10**8, "asks for rollouts of n_steps=400000000 x 1 environments x 52 bytes"),  # review safety H4
    ("arguments/n_steps", -1, "n_steps=-1"),
    ("arguments/n_steps", 32.0, "n_steps=32.0"),
    ("arguments/n_steps", True, "n_steps=True"),
    ("arguments/n_steps", "32", "n_steps='32'"),
    ("arguments/batch_size", 0, "batch_size=0"),
    ("arguments/gamma", "0.99", "gamma='0.99'"),
    ("arguments/gamma", {"$float": "nan"}, "gamma=nan"),
    ("arguments/gamma", 10**400, "gamma=1000"),
    ("arguments/learning_rate", -1.0, "learning_rate=-1.0"),
    ("arguments/learning_rate", [], "learning_rate=[]"),
    ("arguments/learning_rate", True, "learning_rate=True"),
    ("arguments/clip_range", {"$schedule": "linear", "start": 1, "end": 0, "end_fraction": 0}, "end_fraction=0"),
    ("arguments/clip_range", {"$schedule": "linear", "start": [1], "end": 0, "end_fraction": 1}, "start=[1]"),
    ("arguments/clip_range", {"$schedule": "linear"}, "lacks 'start'"),
    ("arguments/clip_range", {"$custom": "os:system", "initial": "1"}, "clip_range.initial='1'"),
    ("arguments/clip_range_vf", {"$custom": ["os"], "initial": 1}, "clip_range_vf.$custom=['os']"),
    ("arguments/seed", -1, "seed=-1"),
    ("arguments/seed", 2**64, "seed=18446744073709551616"),
    ("arguments/verbose", -1, "verbose=-1"),
    ("arguments/torch_compile", 1, "torch_compile=1"),
    ("arguments/precision", "float8", "precision='float8'"),
    ("arguments/use_sde", 1, "use_sde=1"),
    ("arguments/use_sde", True, "there is no ActorCriticPolicy with these arguments"),
    ("arguments/rollout_buffer_kwargs", {"buffer_size": HUGE}, "cannot be set up: TypeError"),
    ("arguments/rollout_buffer_kwargs", [1], "rollout_buffer_kwargs=[1]"),
    ("arguments/policy_kwargs", [1], "policy_kwargs=[1]"),
    ("arguments/policy_kwargs/net_arch", [HUGE, HUGE], "with these arguments and spaces: RuntimeError"),
    ("arguments/policy_kwargs/net_arch", [10**6, 10**6], "but that of the policy"),
    ("arguments/policy_kwargs/net_arch", [8, 9], "but that of the policy"),
    ("arguments/policy_kwargs/net_arch", [8], "unlike the policy"),
    ("arguments/policy_kwargs/net_arch", [8] * 100_000, "allowed are lists of up to 256 elements"),
    ("arguments/policy_kwargs/net_arch", {"pi": [8, 8], "vf": [8, 8], "x": []}, "unknown key 'x'"),
    ("arguments/policy_kwargs/net_arch", [[8], [8]], "net_arch.0=[8]"),
    ("arguments/policy_kwargs/net_arch", [-8, 8], "net_arch.0=-8"),
    ("arguments/policy_kwargs/net_arch", "8", "net_arch='8'"),
    ("arguments/policy_kwargs/device", "cuda", "unknown key 'device'"),
    ("arguments/policy_kwargs/log_std_init", [1], "log_std_init=[1]"),
    (
        "arguments/policy_kwargs/features_extractor_kwargs",
        {"features_dim": HUGE},
        "with these arguments and spaces: TypeError",
    ),
    ("arguments/policy_kwargs/features_extractor_kwargs", {"fn": "os.system"}, "unknown key 'fn'"),
    ("arguments/policy_kwargs/optimizer_kwargs", {"lr": 1, "eps": 1}, "with these arguments and spaces: TypeError"),
    ("arguments/policy_kwargs/optimizer_kwargs", {"betas": [0.9] * 10}, "optimizer_kwargs.betas="),
    ("arguments/policy_kwargs/optimizer_kwargs", {"eps": "1e-5"}, "optimizer_kwargs.eps='1e-5'"),
    ("progress/num_timesteps", -5, "progress.num_timesteps=-5"),
    ("progress/num_timesteps", "many", "progress.num_timesteps='many'"),
    ("progress/evil", 1, "unknown key 'evil'"),
    ("observation_space", None, "observation_space.type=None"),
    ("observation_space/type", ["Box"], "observation_space.type=['Box'] is not allowed"),  # review safety, unclear errors
    ("observation_space/type", {"a": 1}, "observation_space.type={'a': 1} is not allowed"),
    ("observation_space/type", [[["x" * 100] * 10] * 10] * 10, "observation_space.type=[[["),
    ("observation_space", {"type": "Discrete", "n": 2, "start": -(2**63), "dtype": "int64"}, "observation_space.start=-922"),
    (
        "observation_space",  # the sum is 4 modulo 2^64: review safety H5
        {
            "type": "MultiDiscrete",
            "shape": [3],
            "dtype": "int64",
            "nvec": [2**22, 2**63 - 1, 2**63 - 2**22 + 5],
            "start": [0, 0, 0],
        },
        "observation_space.nvec.1=9223372036854775807",
    ),
    (
        "action_space",
        {"type": "MultiDiscrete", "shape": [2], "dtype": "int64", "nvec": [2**24, 2], "start": [0, 0]},
        "action_space.nvec has the sum 16777218; allowed are up to 16777216",
    ),
    (
        "observation_space",
        {
            "type": "Dict",
            "spaces": {str(i): {"type": "Discrete", "n": 2**23, "start": 0, "dtype": "int64"} for i in range(3)},
        },
        "observation_space has more than 16777216 elements",
    ),
    ("observation_space/type", "Graph", "observation_space.type='Graph'"),
    ("observation_space/shape", [HUGE, HUGE], "allowed are up to 16777216 elements"),
    ("observation_space/shape", [2**24], "has 4 elements; its shape"),
    ("observation_space/shape", [-4], "observation_space.shape.0=-4"),
    ("observation_space/shape", [4] * 100, "lists of up to 8 elements"),
    ("observation_space/shape", [5], "has 4 elements; its shape (5,) needs 5"),
    ("observation_space/dtype", "object", "observation_space.dtype='object'"),
    ("observation_space/dtype", "U1000000000", "observation_space.dtype='U1000000000'"),
    ("observation_space/dtype", "uint8", "observation_space.low.0=-4.8"),
    ("observation_space/low", "nan", "observation_space.low='nan'"),
    ("observation_space/low", [0, 0, 0, "eval"], "observation_space.low.3='eval'"),
    ("observation_space/low", -1e300, "observation_space describes no Box: FloatingPointError: overflow"),
    ("observation_space/seed", 1, "unknown key 'seed'"),
    ("observation_space", {"type": "Discrete", "n": 0, "start": 0, "dtype": "int64"}, "observation_space.n=0"),
    ("observation_space", {"type": "Discrete", "n": 10**30, "start": 0, "dtype": "int64"}, "observation_space.n=1000"),
    ("observation_space", {"type": "Discrete", "n": 300, "start": 0, "dtype": "int8"}, "describes no Discrete"),
    ("observation_space", {"type": "Discrete", "n": HUGE, "start": 0, "dtype": "int64"}, "observation_space.n=1000000000000"),
    ("observation_space", {"type": "MultiBinary", "n": [2**13, 2**13]}, "allowed are up to 16777216 elements"),
    ("observation_space", {"type": "MultiBinary", "n": HUGE}, "observation_space.n=1000000000000"),
    (
        "observation_space",
        {"type": "MultiDiscrete", "shape": [1], "dtype": "int64", "nvec": [-1], "start": [0]},
        "observation_space.nvec.0=-1 is not allowed",
    ),
    ("observation_space", {"type": "Dict", "spaces": {}}, "observation_space.spaces={}"),
    ("observation_space", {"type": "Dict", "spaces": {"a": {"type": "Dict", "spaces": {}}}}, "is a Dict inside of a Dict"),
    (
        "observation_space",
        {
            "type": "Dict",
            "spaces": {str(i): {"type": "MultiBinary", "n": 2**23} for i in range(999)},
        },
        "observation_space has more than 16777216 elements",
    ),
    ("action_space", {"type": "Dict", "spaces": {"a": {"type": "MultiBinary", "n": 2}}}, "with these arguments and spaces"),
    ("action_space/n", 10**9, "action_space.n=1000000000"),
    ("action_space/n", 10**7, "but that of the policy"),
    ("n_envs", 10**18, "n_envs=1000000000000000000"),
    ("n_envs", 0, "n_envs=0"),
    ("shaping", None, "shaping=None"),
    ("shaping/name", ["ano", "os:system"], "which is not built in and is never imported"),
    ("shaping/name", ["ano"], "shaping.name=['ano']"),
    ("shaping/name", {"$class": "os.system"}, "shaping.name="),
    ("shaping/name", "x" * 1000, "which is not built in and is never imported"),
    ("shaping/name", "spo", "the function of that name is another one now"),
    ("shaping/fingerprint", [[0.0] * 9] * 2, "the function of that name is another one now"),
    ("shaping/fingerprint", [[0.0] * 8] * 2, "shaping.fingerprint has not the 9 and 9 values"),
    ("shaping/fingerprint", [["x"] * 9] * 2, "shaping.fingerprint.0.0='x'"),
    ("vec_normalize", 1, "vec_normalize=1"),
    ("vec_normalize/norm_obs_keys", ["x"], "vec_normalize.norm_obs_keys=['x'] are not all among the observations"),
    ("vec_normalize/norm_obs_keys", ["x" * 900] * 1000, "are not all among the observations"),
    ("vec_normalize/norm_obs", False, "unlike the observations of env"),
    ("vec_normalize/clip_obs", -1.0, "vec_normalize.clip_obs=-1.0"),
    ("vec_normalize/epsilon", "0", "vec_normalize.epsilon='0'"),
    ("vec_normalize/venv", "evil", "unknown key 'venv'"),
    ("optimizer", [], "optimizer=[]"),
    ("optimizer/param_groups", [], "optimizer.param_groups=[]"),
    ("optimizer/param_groups", [{"lr": 1.0}], "optimizer.param_groups.0 lacks"),
    ("optimizer/numbers", {"0.step": 1.0}, "optimizer.numbers has the unknown key '0.step'"),
    ("optimizer/numbers", {"9.evil": 1.0}, "optimizer.numbers has the unknown key '9.evil'"),
    ("files", [], "files=[]"),
    ("files/policy.safetensors", "x", "files.policy.safetensors='x'"),
    ("files/policy.safetensors", {"size": 2**62, "sha256": ""}, "files.policy.safetensors.size="),
    ("files/..%2fevil.safetensors".replace("%2f", "\\"), {"size": 8, "sha256": ""}, "unknown key"),
]


@pytest.mark.parametrize(
    ("place", "value", "message"), VALUES, ids=lambda value: str(value)[:40] if isinstance(value, str) else ""
)
def test_values_that_are_not_allowed_are_refused(place, value, message, watched, folder):
    content = read_json(folder)
    put(content, place, value)
    write_json(folder, content)
    refused_by(watched, folder, message)


LARGEST = {
    "arguments/n_steps": 1,
    "policy": "CnnPolicy",
    "arguments/policy_kwargs": {},
    "observation_space": {"type": "Box", "shape": [1, 2**12, 2**12], "dtype": "uint8", "low": 0, "high": 255},
    "action_space": {"type": "Box", "shape": [2**24], "dtype": "float64", "low": -1, "high": 1},
}


def test_more_memory_than_there_is_is_one_line(watched, folder):
    content = read_json(folder)
    for place, value in LARGEST.items():
        put(content, place, value)
    write_json(folder, content)
    refused_by(watched, folder, "needs more memory than is available")


@pytest.mark.slow
def test_the_largest_spaces_take_no_more_memory_than_stated(folder):
    """2 GiB, and ten times the size of the files, says the documentation."""
    content = read_json(folder)
    for place, value in LARGEST.items():
        put(content, place, value)
    write_json(folder, content)
    code = (
        "import resource, sys; from sb3_ano.hub import SafeFormatError, load_safe\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20\n"
        "before = peak()\n"
        "try: load_safe(sys.argv[1])\n"
        "except SafeFormatError as error: print(peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert 0.5 < float(done.stdout) < 2.0  # GiB


@pytest.mark.parametrize(
    "name", ["../evil.safetensors", "/etc/passwd", "..", "sub/policy.safetensors", "C:\\evil", "model.zip"]
)
def test_files_of_other_names_are_not_looked_for(name, watched, folder):
    content = read_json(folder)
    content["files"][name] = content["files"]["policy.safetensors"]
    write_json(folder, content)
    refused_by(watched, folder, "files has the unknown key")


@pytest.mark.parametrize("setting", ["lr", "betas", "eps", "amsgrad"])
def test_settings_of_the_optimizer_that_are_none_are_refused(setting, watched, folder):
    content = read_json(folder)
    content["optimizer"]["param_groups"][0][setting] = {"$class": "os.system"}
    write_json(folder, content)
    refused_by(watched, folder, f"optimizer.param_groups.0.{setting}='os.system' is not allowed")


TEXTS = {
    "empty": b"",
    "not UTF-8": b'{"format": "\xff\xfe"}',
    "UTF-16": '{"format": "sb3_ano agent"}'.encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf{}",
    "null bytes": b"\0" * 1000,
    "deep lists": b"[" * 1_000_000,
    "deep objects": b'{"a":' * 100_000,
    "deep, but closed": b'{"a":' + b"[" * 500 + b"]" * 500 + b"}",
    "a number of many digits": b'{"format_version": ' + b"9" * 100_000 + b"}",
    "a number beyond floats": b'{"format_version": 1e999}',
    "NaN": b'{"format_version": NaN}',
    "Infinity": b'{"format_version": -Infinity}',
    "a key twice": b'{"format": "sb3_ano agent", "format": "pickle"}',
    "a key with a line break": b'{"format\\n": 1}',
    "a list": b"[]",
    "a string": b'"sb3_ano agent"',
    "YAML": b"!!python/object/apply:os.system ['touch canary']\n",
    "Python": b"__import__('os').system('touch canary')\n",
    "a pickle": pickle.dumps({"format": "sb3_ano agent"}),
    "too large": b'{"format": "' + b"x" * 2**24 + b'"}',
    "half a surrogate": b'{"format": "\\ud800"}',
}


@pytest.mark.parametrize("kind", TEXTS)
def test_what_is_no_json_of_an_agent_is_refused(kind, watched, folder):
    (folder / "sb3_ano.json").write_bytes(TEXTS[kind])
    refused_by(watched, folder, "sb3_ano.json is ")


def test_a_damaged_json_is_refused(watched, folder):
    path = folder / "sb3_ano.json"
    whole = path.read_bytes()
    assert whole.endswith(b"}\n")  # only its last character can be missed
    for size in spots(len(whole) - 2, 20):
        path.write_bytes(whole[:size])
        refused_by(watched, folder, "sb3_ano.json is ")
    content = json.loads(whole)
    for position in spots(len(whole), 80):
        bit = 1 << (position % 7)
        path.write_bytes(whole[:position] + bytes([whole[position] ^ bit]) + whole[position + 1 :])
        before = everything_in(folder.parent)
        outcome = watched(folder)
        assert outcome["seen"] == []
        assert everything_in(folder.parent) == before
        if outcome["error"] is None:  # the same in other letters, such as 1E-05
            assert json.loads(path.read_bytes()) == content
        else:
            assert "ValueError" in outcome["error"], outcome["traceback"]
            assert "\n" not in outcome["message"]


@pytest.mark.parametrize(
    ("place", "value"),
    [("arguments/learning_rate", 3.1e-4), ("arguments/gamma", 0.98), ("vec_normalize/clip_reward", 11.0), ("seed", 1)],
)
def test_the_json_has_a_checksum_of_its_own(place, value, watched, folder):
    """Review safety: 4.2 % of single flipped bits loaded unnoticed."""
    path = folder / "sb3_ano.json"
    content = json.loads(path.read_text())
    stored = content["checksum"]
    put(content, place, value)
    path.write_text(json.dumps(content))
    refused_by(watched, folder, "its content does not match its checksum; if you edited it, remove the key 'checksum'")
    assert stored == content["checksum"]


def test_agents_from_before_the_checksum_load(sound, folder):
    write_json(folder, read_json(folder))
    assert "checksum" not in (folder / "sb3_ano.json").read_text()
    load_safe(folder)


def test_the_checksum_is_that_of_the_content(sound):
    """By hand: the SHA-256 of everything but the checksum, as Python's json writes it."""
    content = json.loads((sound / "sb3_ano.json").read_text())
    stored = content.pop("checksum")
    assert stored == hashlib.sha256(json.dumps(content).encode()).hexdigest()


def test_rewriting_the_json_alone_spoils_nothing(sound, folder):
    # The cases above would mean nothing if their starting point could not be loaded.
    write_json(folder, read_json(folder))
    assert torch.equal(load_safe(folder).policy.value_net.weight, load_safe(sound).policy.value_net.weight)
