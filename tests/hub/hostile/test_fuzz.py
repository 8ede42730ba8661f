"""Random mutations of four sound agents, by someone who makes the fingerprints fit: each is refused in one line, or loads."""

import copy
import json
import random
import shutil
import struct

import pytest
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ano import ANO, PAPO, SPO
from sb3_ano.envs import make_vec_env
from sb3_ano.hub import save_safe
from tests.hub.agents import document, trained
from tests.hub.hostile.common import TENSOR_FILES, judged, places, watched_process, with_header, write_tensors
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
KEYS = ["$class", "$custom", "__class__", "a" * 300]


def mutate_structure(content, generator):
    """Change up to three places of a JSON document: another value, its own scaled, nested or renamed, another's, or none."""
    for _ in range(generator.choice([1, 1, 1, 2, 3])):
        _, owner, key = generator.choice(list(places(content)) or [((), {"": 0}, "")])
        value, (_, other, place) = owner.pop(key), generator.choice(list(places(content)) or [((), [0], 0)])
        scaled = value * generator.choice([-1, 2, 10, 1000]) if isinstance(value, int | float) else [[value]]
        new = copy.deepcopy(generator.choice([*[generator.choice(VALUES)] * 4, scaled, other[place]]))
        if isinstance(owner, list):
            owner.insert(key, new)
        elif (how := generator.random()) > 0.1:
            owner[key if how > 0.2 else generator.choice(KEYS)] = new if how > 0.2 else value


def mutate_bytes(content, generator):
    """Flip a few bits, insert some bytes, or cut some off."""
    for _ in range(generator.choice([1, 1, 2, 8])):
        position = generator.randrange(len(content) or 1)
        begin, rest = content[:position], content[position:]
        inserted = generator.randbytes(generator.choice([1, 4, 100]))
        flipped = bytes([rest[0] ^ 1 << generator.randrange(8)]) + rest[1:] if rest else b""
        content = generator.choice([*[begin + flipped] * 5, begin + inserted + rest, begin + rest[1:], begin])
    return content


def mutate(folder, generator):
    """Change the JSON, or a file of tensors or its header; the checksum is left out, and the fingerprints fit."""
    path = generator.choice([folder / "sb3_ano.json", *sorted(folder.iterdir())])
    content, data, is_structural = document(folder), b"", generator.random() < 0.7
    if path.name in TENSOR_FILES:
        whole = path.read_bytes()
        end = 8 + struct.unpack("<Q", whole[:8])[0]
        content, data = json.loads(whole[8:end]), whole[end:]
    if is_structural:
        mutate_structure(content, generator)
    changed = with_header(content, data) if data else json.dumps(content).encode()
    path.write_bytes(changed if is_structural else mutate_bytes(changed, generator))
    if path.name in TENSOR_FILES:
        write_tensors(folder, path.name, path.read_bytes())


@pytest.mark.parametrize(
    ("agent", "seed", "n"), [("dict", 0, 60), *(pytest.param(agent, 1, 750, marks=pytest.mark.slow) for agent in AGENTS)]
)
def test_mutations(agent, seed, n, tmp_path):
    sound = save_safe(AGENTS[agent](), tmp_path / "sound" / "agent")
    folder = tmp_path / "mutated"
    generator = random.Random(f"{agent} {seed}")
    results = []
    with watched_process(sound) as load_there:
        for _ in range(n):
            shutil.copytree(sound, folder, dirs_exist_ok=True)
            mutate(folder, generator)
            results.append(judged(load_there(folder)))
    assert not [(index, result) for index, result in enumerate(results) if result.startswith("BAD")]
    assert len(set(results)) > 2, "some load, and act in other ways"
