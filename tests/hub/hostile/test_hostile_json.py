"""Hostile JSON: no case runs code, reads or writes outside of its directory, or takes memory it has no bytes for.

Each case spoils a sound agent as someone could who knows the format: unless a case is about the checksum, it is left out. A
process that is watched by an audit hook, with little memory, loads the result.
"""

import functools
import math

import pytest

from tests.hub.agents import MISSING, document, rewrite, write_document
from tests.hub.hostile.common import HUGE, judged, places, refused_by, watched_process

# Names that lead to code, in every place that takes a name.
NAMES = ["os.system", "os:system", "canary_module:shape", "torch.nn.modules.module.Module", "../../evil", "__main__.x"]
NAMED_PLACES = ["algorithm", "policy", "observation_space/type", "observation_space/dtype"]
NAMED_PLACES += ["arguments/learning_rate", "arguments/rollout_buffer_class"]
# Objects that stand for code, in every place that takes a class. To others than classes, a policy has an answer of its own.
PLAIN = "allowed are"
TAGS = [
    ({"$class": "os.system"}, "='os.system' is not allowed"),
    ({"$class": ["os.system", "touch canary"]}, "is not allowed; allowed are"),
    ({"$class": "os.system", "$args": ["touch canary"]}, "has the unknown key '$args'"),
    ({"$custom": "os:system"}, "never imported by its name"),
    ({"$custom": {"$class": "os.system"}}, "is not allowed; allowed are plain values"),
    ({"$schedule": "os.system"}, "is not allowed; allowed are plain values"),
    ({"$pickle": "gASVHAAAAAAAAACMCGJ1aWx0aW5zlIwFcHJpbnSUk5Qu"}, "is not allowed; allowed are plain values"),
    ({"$float": "__import__('os')"}, "is not allowed; allowed are plain values"),
    ({"py/object": "os.system", "py/reduce": [{"py/function": "os.system"}]}, PLAIN),
]
CLASS_PLACES = ["arguments/policy_kwargs/activation_fn", "arguments/rollout_buffer_class"]


def discrete(n, dtype="int64"):
    return {"type": "Discrete", "n": n, "start": 0, "dtype": dtype}


def multi_discrete(*nvec):
    return {"type": "MultiDiscrete", "shape": [len(nvec)], "dtype": "int64", "nvec": nvec, "start": [0] * len(nvec)}


def dict_of(*parts):
    return {"type": "Dict", "spaces": {str(index): part for index, part in enumerate(parts)}}


TOO_LARGE = "is not allowed; allowed are spaces of up to 16777216 elements"
NO_POLICY = "there is no ActorCriticPolicy with these arguments and spaces: "
DEEP = functools.reduce(lambda inner, _: [inner], range(300), [])
OTHER_SHAPE = "the function of that name is another one now"
COUNTS = ["num_timesteps", "total_timesteps", "num_timesteps_at_start", "n_updates", "episode_num", "n_skipped_minibatches"]
# By place: values, and what the message says. The name of a place without a message is in the message, with the value.
# Values of another type, and keys that are missing or unknown, are in the test below this table.
VALUES = {
    "algorithm": [("SPO", "shaping="), ("PAPO", "arguments has the unknown key")],
    "format_version": [(0, "is not of an agent in the safe format"), (10**6, "has format version 1000000; install a newer")],
    "arguments/n_steps": [(41_297_763, "of n_steps=41297763 x 1 environments x 52 bytes"), (32.0, ""), (True, "")],
    "arguments/gamma": [({"$float": "nan"}, "gamma=nan"), (10**400, "")],
    "arguments/clip_range": [
        ({"$schedule": "linear", "start": 1, "end": 0, "end_fraction": 0}, "clip_range.end_fraction=0"),
        ({"$schedule": "linear", "start": 1, "end": 0.5, "end_fraction": "1"}, "clip_range.end_fraction='1'"),
        ({"$schedule": "linear", "start": 1, "end": True, "end_fraction": 1}, "clip_range.end=True"),
        ({"$schedule": "linear", "start": -1, "end": 0, "end_fraction": 1}, "clip_range.start=-1"),
    ],
    "arguments/seed": [(2**64, "seed=18446744073709551616")],
    "arguments/rollout_buffer_kwargs": [({"buffer_size": HUGE}, "cannot be set up: TypeError")],
    "arguments/policy_kwargs/net_arch": [
        ([10**6, 10**6], "but that of the policy"),
        ([8] * 1001, "allowed are lists of up to 1000 elements"),
        ({"$class": "torch.nn.ReLU"}, "allowed are values that are not classes"),
    ],
    "observation_space": [
        (multi_discrete(2**22, 2**63 - 1, 2**63 - 2**22 + 5), TOO_LARGE),  # the sum is 4 modulo 2^64
        (discrete(10**30), "does not describe a Discrete: "),
        (discrete(2, dtype="float32"), "observation_space.dtype='float32' is not allowed"),
        ({"type": "MultiBinary", "n": [2**13, 2**13]}, "observation_space.n=[8192, 8192] is not allowed"),
        (dict_of(), "observation_space.spaces={}"),
        (dict_of(*[discrete(2)] * 1001), "objects with up to 1000 spaces"),
        (dict_of(dict_of()), "is a Dict inside of a Dict"),
        (dict_of(*[{"type": "Box", "shape": [2**23], "dtype": "float64", "low": 0, "high": 1}] * 9), "has more than 16777216"),
    ],
    "observation_space/type": [([[["x" * 100] * 10] * 10] * 10, "type=[[[")],
    "observation_space/shape": [
        ([HUGE, HUGE], ""), ([-4], ""), ([0], ""), ([4.0], ""), ([1] * 99, "does not describe a Box"),
    ],
    "observation_space/dtype": [("U1000000000", ""), ("uint8", "does not describe a Box")],
    "observation_space/low": [([0, 0, 0, "1.5"], ""), (0.1, "low=0.1 is not allowed; allowed are numbers that float32 holds")],
    "action_space": [(multi_discrete(2**24, 2), TOO_LARGE), (dict_of({"type": "MultiBinary", "n": 2}), NO_POLICY)],
    "action_space/n": [(2**24 + 1, TOO_LARGE), (10**7, "but that of the policy")],
    "n_envs": [(2**20 + 1, ""), (0, ""), (1.0, "")],
    "shaping/name": [(["ano"], "shaping cannot be read: TypeError"), ({"ano": 1}, "shaping"), ("spo", OTHER_SHAPE)],
    "shaping/fingerprint": [([[0.0] * 9] * 2, OTHER_SHAPE), ([[0.0] * 8] * 2, "shaping cannot be read: ValueError")],
    "vec_normalize/norm_obs_keys": [(["x" * 900] * 1000, "cannot be normalized as they were")],
    "vec_normalize/norm_obs": [(False, "but that of the observations of env"), (1, "")],
    "vec_normalize/gamma": [(1.5, ""), (-1, ""), (True, "")],
    "vec_normalize/clip_obs": [(0, ""), (-1.0, ""), (True, "")],
    "vec_normalize/clip_reward": [(-1.0, ""), ({"$float": "nan"}, "clip_reward=nan")],
    "vec_normalize/epsilon": [({"$float": "inf"}, "epsilon cannot normalize"), (True, "")],
    **{f"progress/{name}": [(True, ""), (1.5, ""), (1e300, "")] for name in COUNTS},
    "progress/current_progress_remaining": [(1.5, ""), (True, "")],
    "progress/adapted_from": [(1e300, ""), (True, "")],
    "progress/radius_factor": [(True, "")],
    **{f"arguments/{name}": [(True, "")] for name in ("batch_size", "n_epochs", "sde_sample_freq", "stats_window_size")},
    "arguments/policy_kwargs/log_std_init": [({"$float": "nan"}, "log_std_init=nan"), (True, "")],
    "arguments/policy_kwargs/optimizer_kwargs/eps": [({"$float": "inf"}, "eps=inf"), (True, "")],
    "arguments/policy_kwargs/optimizer_kwargs/betas": [({"$tuple": [False, 0.9]}, "betas=(False, 0.9)")],
    "observation_space/high": [(True, ""), ("-inf", "does not describe a Box"), (["nan"] * 4, "")],
    "action_space/start": [(2**63 - 1, ""), (True, "does not describe a Discrete")],
    "versions/torch": [(number, "JSON compliant") for number in (math.nan, -math.inf)],  # which nothing else looks at
    **{name: [(DEEP, name)] for name in ("policy", "arguments", "shaping", "vec_normalize")},
    ("files", "policy.safetensors"): [({"size": 2**62, "sha256": ""}, "damaged or cut off")],
    # 4.2 % of single flipped bits loaded unnoticed. Stored agents have checksums that fit.
    "checksum": [("0" * 64, "does not match its checksum: it is damaged; if you edited it, remove the key 'checksum'")],
}  # fmt: skip
CASES = [
    *[(place, name, "") for place in NAMED_PLACES for name in NAMES],
    *[(CLASS_PLACES[0], name, NO_POLICY) for name in NAMES],
    *[("shaping/name", name, "which is not built in and is never imported") for name in NAMES],
    *[
        (place, value, NO_POLICY if message is PLAIN and "policy_kwargs" in place else message)
        for place in CLASS_PLACES
        for value, message in TAGS
    ],
    (CLASS_PLACES[0], {"$class": "torch.optim.Adam"}, "activation_fn='torch.optim.Adam' is not allowed"),
    *[(place, *case) for place, cases in VALUES.items() for case in cases],
]


@pytest.mark.parametrize(("place", "value", "message"), CASES, ids=[f"{index}-{case[0]}" for index, case in enumerate(CASES)])
def test_what_is_not_allowed_is_rejected_by_name(place, value, message, watched, folder):
    rewrite(folder, {place: value})
    refused_by(watched, folder, message or f"{place.rpartition('/')[2]}={value!r}"[:30])


PARTS = ["format", "format_version", "algorithm", "policy", "arguments", "progress", "observation_space", "action_space"]
PARTS += ["n_envs", "shaping", "vec_normalize", "files"]
NULLABLE = {"rollout_buffer_class", "seed", "vec_normalize"}
# Of which a policy has a default: what is missing, and what it takes instead of another type, is left to it.
LENIENT = {"arguments", "progress"}


@pytest.mark.parametrize("part", PARTS)
def test_values_of_another_type_and_other_keys_are_rejected(part, watched, folder):
    """In every place of the JSON: a value of every other type, no value, and a key that is unknown."""
    content = document(folder)
    for place, owner, key in places({part: content[part]}):
        value, name, takes_any = owner[key], place[-1], "policy_kwargs" in place[:-1]
        skipped = [value, *[None] * (name in NULLABLE), *[-1.5] * (type(value) in (int, float))]
        skipped += [MISSING] * (name.isdigit() or bool(LENIENT.intersection(place[:-1])))
        changes = [(place, other) for other in (None, "evil", ["evil"], -1.5, MISSING) if other not in skipped]
        # Names of files that are not the format's are not looked at.
        changes += [((*place, "evil"), 1)] * (isinstance(value, dict) and place != ("files",))
        for changed, other in changes:
            rewrite(folder, {changed: other})
            if takes_any:
                assert not judged(watched(folder)).startswith("BAD")
            else:
                message = refused_by(watched, folder, "")
                assert "is not allowed" not in message or next(filter(str.isidentifier, reversed(changed))) in message
            write_document(folder, content)


LARGEST = {
    "arguments/n_steps": 1,
    "policy": "CnnPolicy",
    "arguments/policy_kwargs": {},
    "observation_space": {"type": "Box", "shape": [1, 2**12, 2**12], "dtype": "uint8", "low": 0, "high": 255},
    "action_space": {"type": "Box", "shape": [2**24], "dtype": "float64", "low": -1, "high": 1},
}


@pytest.mark.parametrize(
    ("spare", "message"),
    [(2**30, "needs more memory than is available"), pytest.param(2**31, "but that of the policy", marks=pytest.mark.slow)],
)
def test_the_largest_spaces_take_no_more_memory_than_stated(spare, message, sound, folder):
    """2 GiB, and ten times the size of the files, says the documentation. With less, this is one line."""
    rewrite(folder, LARGEST)
    with watched_process(sound, spare) as load_there:
        refused_by(load_there, folder, message)
