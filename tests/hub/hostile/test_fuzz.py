"""Random mutations of four sound agents: each is refused in one line, or loads and acts as before.

Who leaves out the checksum of the JSON, or makes the SHA-256 of a file fit, writes another agent, which may act differently.
"""

import copy
import functools
import json
import random
import shutil
import struct

import pytest
from gymnasium import spaces
from safetensors.torch import load, save
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ano import ANO, PAPO, SPO
from sb3_ano.envs import make_vec_env
from sb3_ano.hub import save_safe
from tests.hub.agents import trained, write_document
from tests.hub.hostile.common import TENSOR_FILES, judged, watched_process, write_tensors
from tests.tiny_envs import BOX_ACTIONS, BOX_OBSERVATIONS, IMAGE_OBSERVATIONS, tiny_vec_env

DICT = spaces.Dict({"image": IMAGE_OBSERVATIONS, "kind": spaces.Discrete(3), "place": BOX_OBSERVATIONS})
SMALL_CNN = {"features_extractor_kwargs": {"cnn_output_dim": 8}, "net_arch": [8]}
AGENTS = {
    "normalized": lambda: trained(ANO, VecNormalize(make_vec_env("CartPole-v1")), policy_kwargs={"net_arch": [8, 8]}),
    "plain": lambda: trained(steps=0, clip_range="lin_0.2", policy_kwargs={"net_arch": {"pi": [8], "vf": [4]}}),
    "gsde": lambda: trained(PAPO, tiny_vec_env(BOX_OBSERVATIONS, BOX_ACTIONS), steps=0, use_sde=True),
    "dict": lambda: trained(
        SPO, tiny_vec_env(DICT, spaces.MultiDiscrete([2, 3])), "MultiInputPolicy", steps=0, policy_kwargs=SMALL_CNN
    ),
}
VALUES = [
    None, True, -1, 0, 1, 3, 2**24, 2**31, 2**63 - 1, 2**64, 10**400, -0.5, 1e-300, 1e308, "", "ano", "os.system", "os:system",
    "\x1b[31m", "x" * 2000, [], {}, [[]], [1, 2], {"a": 1}, {"$class": "os.system"}, {"$class": "torch.nn.ReLU"},
    {"$custom": "os:system"}, {"$tuple": [1, 2]}, {"$float": "nan"}, {"$float": "inf"}, {"$schedule": "linear"}, ["type"] * 9,
]  # fmt: skip
# In the proportions of the outside review.
KINDS = ["structure"] * 14 + ["json"] * 5 + ["tensors"] * 3 + ["fitting tensors"] * 4 + ["header"] * 4


def places(content):
    """Every object or list with each of its keys."""
    keys = content.keys() if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    for key in keys:
        yield content, key
        yield from places(content[key])


def mutate_structure(content, generator):
    """Change up to three places of a JSON document."""
    for _ in range(generator.choice([1, 1, 1, 2, 3])):
        owner, key = generator.choice(list(places(content)) or [({"": 0}, "")])
        how = generator.choice(["value", "value", "value", "scale", "delete", "rename", "swap", "nest"])
        value = owner.pop(key) if how in ("delete", "rename") else owner[key]
        if how == "scale" and isinstance(value, int | float):
            owner[key] = type(value)(value * generator.choice([-1, 0, 2, 10, 1000]))
        elif how == "rename" and isinstance(owner, dict):
            owner[generator.choice(["$class", "$custom", "__class__", f"{key}x", "a" * 300])] = value
        elif how == "swap":
            other, place = generator.choice(list(places(content)))
            owner[key] = copy.deepcopy(other[place])
        elif how == "nest":
            owner[key] = functools.reduce(lambda inner, _: [inner], range(generator.choice([1, 10, 40])), value)
        elif how in ("value", "scale"):
            owner[key] = copy.deepcopy(generator.choice(VALUES))


def mutate_bytes(content, generator):
    """Flip a few bits, or insert or cut off some bytes, too."""
    changed = bytearray(content)
    for _ in range(generator.choice([1, 1, 2, 8])):
        how = generator.choice(["flip", "flip", "flip", "insert", "delete", "cut"])
        if not changed:
            break
        position = generator.randrange(len(changed))
        if how == "flip":
            changed[position] ^= 1 << generator.randrange(8)
        elif how == "insert":
            changed[position:position] = generator.randbytes(generator.choice([1, 4, 100]))
        elif len(changed) > 100:
            del changed[position : position + (1 if how == "delete" else len(changed))]
    return bytes(changed)


def mutate(folder, kind, name, generator):
    """Change one file, and return whether checksums fit the result."""
    path = folder / ("sb3_ano.json" if kind in ("structure", "json") else name)
    whole = path.read_bytes()
    if kind == "structure":
        content = json.loads(whole)
        is_rewritten = generator.random() < 0.8
        if is_rewritten:
            del content["checksum"]
        before = json.dumps(content)
        mutate_structure(content, generator)
        write_document(folder, content)
        return is_rewritten or json.dumps(content) == before
    if kind == "header":
        size = struct.unpack("<Q", whole[:8])[0]
        content = json.loads(whole[8 : 8 + size])
        mutate_structure(content, generator)
        changed = json.dumps(content).encode()
        length = len(changed) if generator.random() < 0.8 else generator.choice([0, 2**31, 2**63, len(changed) + 1])
        write_tensors(folder, name, struct.pack("<Q", length) + changed + whole[8 + size :])
    elif kind == "fitting tensors":
        write_tensors(folder, name, mutate_bytes(whole, generator))
    else:
        path.write_bytes(mutate_bytes(whole, generator))
        return False
    return True


@pytest.mark.parametrize(
    ("agent", "seed", "n"), [("dict", 0, 30), *(pytest.param(agent, 1, 750, marks=pytest.mark.slow) for agent in AGENTS)]
)
def test_mutations(agent, seed, n, tmp_path):
    sound = save_safe(AGENTS[agent](), tmp_path / "sound" / "agent")
    files = {path.name: path.read_bytes() for path in sound.iterdir()}
    tensor_files = [name for name in TENSOR_FILES if name in files]
    folder = tmp_path / "mutated"
    generator = random.Random(f"{agent} {seed}")
    bad = []
    with watched_process(sound) as load_there:
        acts = load_there(sound)["acts"]
        for index in range(n):
            shutil.copytree(sound, folder, dirs_exist_ok=True)
            kind = generator.choice(KINDS)
            is_rewritten = mutate(folder, kind, generator.choice(tensor_files), generator)
            result = judged(load_there(folder), acts, is_rewritten)
            bad += [(index, kind, result)] * result.startswith("BAD")
        shutil.copytree(sound, folder, dirs_exist_ok=True)
        weights = {name: 2 * weight for name, weight in load(files["policy.safetensors"]).items()}
        write_tensors(folder, "policy.safetensors", save(weights))
        assert judged(load_there(folder), acts, True) == "another agent"  # the comparison sees what it should
    assert bad == []
