"""Random mutations of four sound agents: each is refused in one line, or loads and acts as before.

Who leaves out the checksum of the JSON, or makes the SHA-256 of a file fit, writes another agent, which may act differently.
"""

import copy
import json
import random
import struct
from collections import Counter

import pytest
from gymnasium import spaces
from safetensors.torch import load, save
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ano import ANO, PAPO, SPO
from sb3_ano.hub import save_safe
from tests.common import SMALL
from tests.hub.hostile.common import TENSOR_FILES, write_json, write_tensors
from tests.hub.hostile.conftest import watched_process
from tests.tiny_envs import BOX_ACTIONS, BOX_OBSERVATIONS, IMAGE_OBSERVATIONS, tiny_vec_env

MIB = 2**20


def normalized():
    env = VecNormalize(ANO("MlpPolicy", "CartPole-v1", **SMALL).get_env())
    return ANO("MlpPolicy", env, policy_kwargs={"net_arch": [8, 8]}, **SMALL).learn(64)


def plain():
    return ANO("MlpPolicy", "CartPole-v1", clip_range="lin_0.2", policy_kwargs={"net_arch": {"pi": [8], "vf": [4]}}, **SMALL)


def with_sde():
    return PAPO("MlpPolicy", tiny_vec_env(BOX_OBSERVATIONS, BOX_ACTIONS), use_sde=True, **SMALL)


def with_images():
    observations = spaces.Dict({"image": IMAGE_OBSERVATIONS, "kind": spaces.Discrete(3), "place": BOX_OBSERVATIONS})
    small = {"features_extractor_kwargs": {"cnn_output_dim": 8}, "net_arch": [8]}
    env = tiny_vec_env(observations, spaces.MultiDiscrete([2, 3]))
    return SPO("MultiInputPolicy", env, policy_kwargs=small, **SMALL)


AGENTS = {"normalized": (normalized, True), "plain": (plain, False), "gsde": (with_sde, False), "dict": (with_images, False)}
VALUES = [
    None, True, -1, 0, 1, 3, 2**24, 2**31, 2**63 - 1, 2**64, 10**400, -0.5, 1e-300, 1e308, "", "ano", "os.system", "os:system",
    "\x1b[31m", "x" * 2000, [], {}, [[]], [1, 2], {"a": 1}, {"$class": "os.system"}, {"$class": "torch.nn.ReLU"},
    {"$custom": "os:system"}, {"$tuple": [1, 2]}, {"$float": "nan"}, {"$float": "inf"}, {"$schedule": "linear"}, ["type"] * 9,
]  # fmt: skip


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
        value = owner[key]
        if how == "scale" and isinstance(value, int | float):
            owner[key] = type(value)(value * generator.choice([-1, 0, 2, 10, 1000]))
        elif how == "delete":
            del owner[key]
        elif how == "rename" and isinstance(owner, dict):
            owner[generator.choice(["$class", "$custom", "__class__", f"{key}x", "a" * 300])] = owner.pop(key)
        elif how == "swap":
            other, place = generator.choice(list(places(content)))
            owner[key] = copy.deepcopy(other[place])
        elif how == "nest":
            for _ in range(generator.choice([1, 10, 40])):
                value = [value]
            owner[key] = value
        else:
            owner[key] = copy.deepcopy(generator.choice(VALUES))


def mutate_bytes(content, generator):
    """Flip a few bits, or insert or cut off some bytes, too."""
    changed = bytearray(content)
    ways = generator.choice([["flip"], ["flip"], ["flip", "insert", "delete", "cut"]])
    for _ in range(generator.choice([1, 1, 2, 8])):
        position = generator.randrange(len(changed))
        how = generator.choice(ways)
        if how == "flip":
            changed[position] ^= 1 << generator.randrange(8)
        elif how == "insert":
            changed[position:position] = generator.randbytes(generator.choice([1, 4, 100]))
        elif len(changed) > 100:
            del changed[position : position + (1 if how == "delete" else len(changed))]
    return bytes(changed)


def json_structure(folder, name, generator):
    content = json.loads((folder / "sb3_ano.json").read_text())
    rewritten = generator.random() < 0.8
    if rewritten:
        del content["checksum"]
    before = json.dumps(content)
    mutate_structure(content, generator)
    write_json(folder, content)
    return rewritten or json.dumps(content) == before


def json_bytes(folder, name, generator):
    path = folder / "sb3_ano.json"
    path.write_bytes(mutate_bytes(path.read_bytes(), generator))
    return False


def tensor_bytes(folder, name, generator):
    path = folder / name
    path.write_bytes(mutate_bytes(path.read_bytes(), generator))
    return False


def fitting_tensor_bytes(folder, name, generator):
    write_tensors(folder, name, mutate_bytes((folder / name).read_bytes(), generator))
    return True


def header(folder, name, generator):
    whole = (folder / name).read_bytes()
    size = struct.unpack("<Q", whole[:8])[0]
    content = json.loads(whole[8 : 8 + size])
    mutate_structure(content, generator)
    changed = json.dumps(content).encode()
    length = len(changed) if generator.random() < 0.8 else generator.choice([0, 2**31, 2**63, len(changed) + 1])
    write_tensors(folder, name, struct.pack("<Q", length) + changed + whole[8 + size :])
    return True


# In the proportions of the outside review.
KINDS = [json_structure] * 14 + [json_bytes] * 5 + [tensor_bytes] * 3 + [fitting_tensor_bytes] * 4 + [header] * 4


def fuzzed(agent, seed, n, tmp_path):
    """Count what happens to ``n`` mutations of an agent, and list what must not happen."""
    make, include_optimizer = AGENTS[agent]
    sound = save_safe(make(), tmp_path / "sound" / "agent", include_optimizer=include_optimizer)
    files = {path.name: path.read_bytes() for path in sound.iterdir()}
    folder = tmp_path / "mutated"
    folder.mkdir()
    generator = random.Random(f"{agent} {seed}")
    counts, bad = Counter(), []
    with watched_process(sound, "act") as load_there:
        expected = load_there(sound)["acts"]
        for index in range(n):
            for name, content in files.items():
                (folder / name).write_bytes(content)
            kind = generator.choice(KINDS)
            is_rewritten = kind(folder, generator.choice([name for name in TENSOR_FILES if name in files]), generator)
            outcome = load_there(folder)
            result = judged(outcome, expected, is_rewritten)
            counts[kind.__name__, result] += 1
            if result.startswith("BAD"):
                bad.append((index, kind.__name__, result, outcome["message"][:300], outcome["seen"]))
        for name, content in files.items():
            (folder / name).write_bytes(content)
        weights = load(files["policy.safetensors"])
        write_tensors(folder, "policy.safetensors", save({name: 2 * weight for name, weight in weights.items()}))
        assert judged(load_there(folder), expected, True) == "another agent"  # the comparison sees what it should
    return counts, bad


def judged(outcome, expected, is_rewritten):
    if outcome["seen"]:
        return "BAD: forbidden"
    if outcome["seconds"] > 30.0:
        return "BAD: slow"
    if outcome["peak_bytes"] > 2000 * MIB:
        return "BAD: memory"
    if outcome["error"] is not None:
        message = outcome["message"]
        if "ValueError" not in outcome["error"] or len(message) > 1000 or not message.isprintable():
            return f"BAD: {outcome['error'][0]}"
        return "refused"
    if outcome["acts"] == expected:
        return "acts the same"
    return "another agent" if is_rewritten else "BAD: acts otherwise"


@pytest.mark.parametrize("agent", ["dict", pytest.param("normalized", marks=pytest.mark.slow)])
def test_a_few_mutations(agent, tmp_path):
    counts, bad = fuzzed(agent, 0, 30, tmp_path)
    assert bad == []
    assert sum(counts.values()) == 30


@pytest.mark.slow
@pytest.mark.parametrize("agent", AGENTS)
def test_750_mutations_of_each_agent(agent, tmp_path, capsys):
    counts, bad = fuzzed(agent, 1, 750, tmp_path)
    with capsys.disabled():
        print(f"\n{agent}:", *(f"{kind} {result} {count};" for (kind, result), count in sorted(counts.items())))
    assert bad == []
    assert sum(counts.values()) == 750
