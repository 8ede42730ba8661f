"""An agent in the safe format comes back as it was, to the last digit."""

import importlib
import json

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ano import PAPO
from sb3_ano.envs import make_vec_env
from sb3_ano.hub import load_normalization, load_safe, save_safe
from sb3_ano.hub.codec import CLASSES, decode, encode
from sb3_ano.hub.spaces import decode_space, encode_space
from tests.common import ALGORITHMS, SMALL, parameters
from tests.hub.agents import acts_like, document, trained
from tests.tiny_envs import BOX_ACTIONS, BOX_OBSERVATIONS, IMAGE_OBSERVATIONS, tiny_vec_env

# Not in the order of the alphabet, because the order of the parts is that of a network's inputs.
MIXED = [
    ("zoo", BOX_OBSERVATIONS),
    ("image", IMAGE_OBSERVATIONS),
    ("kind", spaces.Discrete(3)),
    ("a b/c", spaces.MultiBinary([2, 3])),
    ("half infinite", spaces.Box(np.float32([-np.inf, -1, 0.1]), np.float32([np.inf, np.inf, 1e30]))),
    ("integers", spaces.Box(-(2**63), 2**63 - 1, (2,), np.int64)),
    ("several", spaces.MultiDiscrete([2, 5, 3])),
]
OTHERS = [
    ("negative", spaces.Discrete(2, start=-3)),
    ("small", spaces.Discrete(7, start=np.int8(1), dtype=np.int8)),
    ("rows", spaces.MultiDiscrete([[1, 5], [3, 4]], np.int32, start=[[4, -9], [0, 1]])),
    ("bits", spaces.MultiBinary(4)),
    ("short", spaces.Box(np.int16([[1, 2], [3, 4]]), np.int16([[5, 6], [7, 8]]), dtype=np.int16)),
    ("scalar", SCALAR := spaces.Box(-2.0, 0.5, (), np.float16)),
    ("unbounded", spaces.Box(-np.inf, np.inf, (2, 3), np.float64)),
]


@pytest.mark.parametrize("cls", ALGORITHMS)
@pytest.mark.parametrize(
    ("policy", "observations", "actions", "options"),
    [
        ("MlpPolicy", BOX_OBSERVATIONS, BOX_ACTIONS, {"use_sde": True, "policy_kwargs": {"use_expln": True}}),
        ("MlpPolicy", spaces.Discrete(5), spaces.MultiDiscrete([2, 3], np.int32), {"precision": "bfloat16"}),
        ("MultiInputPolicy", spaces.Dict(MIXED), spaces.MultiBinary(3), {}),
        ("CnnPolicy", IMAGE_OBSERVATIONS, SCALAR, {"policy_kwargs": {"share_features_extractor": False}}),
    ],
    ids=["gsde", "discrete", "dict", "image"],
)
@pytest.mark.filterwarnings("ignore:precision='bfloat16'")
def test_a_loaded_agent_acts_as_the_saved_one(cls, policy, observations, actions, options, tmp_path):
    model = cls(policy, tiny_vec_env(observations, actions), **SMALL, **options)
    assert save_safe(model, tmp_path / "agent") == tmp_path / "agent"
    loaded = load_safe(tmp_path / "agent")
    assert type(loaded) is cls
    assert torch.equal(parameters(loaded), parameters(model))
    assert (loaded.observation_space, loaded.action_space) == (model.observation_space, model.action_space)
    assert loaded.policy_kwargs == model.policy_kwargs
    assert loaded.rollout_buffer_class is model.rollout_buffer_class
    assert acts_like(loaded, model)


def test_spaces_come_back():
    expected = spaces.Dict([*MIXED, *OTHERS])
    found = decode_space(json.loads(json.dumps(encode_space(expected), allow_nan=False)), "observation_space")
    assert list(found) == list(expected)
    for name, space in expected.items():
        assert (found[name], found[name].shape, found[name].dtype) == (space, space.shape, space.dtype)


@pytest.mark.parametrize("cls", ALGORITHMS)
def test_arguments_and_progress_come_back_exactly_and_training_resumes(cls, tmp_path):
    options = {"gamma": 1.0 / 3.0, "target_kl": 0.1 + 0.2, "max_grad_norm": float("inf"), "seed": 2**32 - 1, "n_epochs": 1}
    options |= {"clip_range_high": "lin_0.3", "clip_range_vf": 0.5, "stats_window_size": 7, "normalize_advantage": False}
    options |= {"policy_kwargs": {"net_arch": {"pi": [7], "vf": []}, "activation_fn": torch.nn.SiLU, "log_std_init": -0.1}}
    options |= {"check_finite": False, "tensorboard_log": str(tmp_path / "log")}
    options["policy_kwargs"]["optimizer_class"] = torch.optim.SGD  # has no state, which the format would not store
    options |= {"k": 3.7} if cls is PAPO else {"desired_kl": "lin_0.01", "rollout_buffer_class": RolloutBuffer}
    model = trained(cls, VecNormalize(make_vec_env("CartPole-v1")), **options)
    agent, zipped = save_safe(model, tmp_path / "agent"), tmp_path / "model.zip"
    model.save(zipped)
    model.get_vec_normalize_env().save(tmp_path / "normalize.pkl")
    loaded, expected = load_safe(agent), cls.load(zipped)  # what SB3's own format brings back
    schedules = {"clip_range_high", "clip_range_vf", "clip_range", "desired_kl"}
    unstored = {"tensorboard_log", "start_time", "_last_obs", "_last_episode_starts", "_last_original_obs"}
    for name in vars(expected).keys() - unstored:
        value = getattr(expected, name)
        if name in schedules and value is not None:
            assert [getattr(loaded, name)(x / 7) for x in range(8)] == [value(x / 7) for x in range(8)]
        elif isinstance(value, int | float | str | dict | tuple | type | type(None)):
            assert getattr(loaded, name) == value, name
    assert loaded.tensorboard_log is None  # a path on the author's machine, to which training would write
    assert str(tmp_path) not in (agent / "sb3_ano.json").read_text()
    resumed = []
    for load in (
        lambda env: load_safe(agent, load_normalization(agent, env)),
        lambda env: cls.load(zipped, VecNormalize.load(tmp_path / "normalize.pkl", env)),
    ):
        each = load(make_vec_env("CartPole-v1")).learn(96, reset_num_timesteps=False)
        resumed.append((parameters(each).tolist(), each.num_timesteps, each.get_vec_normalize_env().obs_rms.mean.tolist()))
    assert resumed[0] == resumed[1]


LINEAR = LinearSchedule(0.1 + 0.2, 1.0 / 3.0, 0.7)


@pytest.mark.parametrize("shaping", ["spo", ("ano", "ppo"), ["ppo", "identity"]], ids=str)
@pytest.mark.parametrize("schedule", [ConstantSchedule(1.0 / 3.0), FloatSchedule(FloatSchedule(LINEAR)), "zoo"], ids=str)
def test_schedules_and_built_in_shapes_come_back(schedule, shaping, tmp_path):
    if schedule == "zoo":
        schedule = pytest.importorskip("rl_zoo3.utils").linear_schedule("2.5e-4")
    model = trained(steps=0, clip_range=schedule, shaping=shaping)
    loaded = load_safe(save_safe(model, tmp_path / "agent"))
    assert loaded._shape == model._shape
    progress = np.linspace(1.0, 0.0, 101)
    expected = [float(schedule(each)) for each in progress]
    np.testing.assert_allclose([loaded.clip_range(each) for each in progress], expected, rtol=1e-12, atol=1e-18)


@pytest.mark.parametrize("argument", CLASSES)
def test_classes_come_back_by_name_and_are_where_it_says(argument):
    for name, cls in CLASSES[argument].items():
        assert decode(encode(cls, argument, {}), argument, {}) is cls
        module, _, attribute = name.rpartition(".")
        assert not module or getattr(importlib.import_module(module), attribute) is cls


KEYS = st.text().filter(lambda key: not key.startswith("$"))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats() | st.text(),
    lambda parts: st.lists(parts, max_size=4) | st.tuples(parts, parts) | st.dictionaries(KEYS, parts, max_size=4),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(PLAIN)
def test_plain_values_come_back_with_their_types(value):
    custom: dict = {}
    found = decode(json.loads(json.dumps(encode(value, "anything", custom), allow_nan=False)), "anything", custom)
    assert repr(found) == repr(value)  # tells 0.0 from -0.0, 1 from True, tuples from lists
    assert not custom
    numpys = [np.float32(0.1), np.int64(3), np.bool_(True)]
    assert repr(encode(numpys, "anything", custom)) == "[0.10000000149011612, 3, True]"


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_the_files_are_plain_json_and_tensors(tmp_path):
    """Shared layers are stored once, also those of a policy that the user compiled."""
    model = trained(env=VecNormalize(tiny_vec_env(IMAGE_OBSERVATIONS, BOX_ACTIONS), norm_obs=False), policy="CnnPolicy")
    policy, model.policy = model.policy, torch.compile(model.policy)
    folder = save_safe(model, tmp_path / "agent")
    names = {"sb3_ano.json", "policy.safetensors", "vec_normalize.safetensors"}
    assert {path.name for path in folder.iterdir()} == names
    stored, state = load_file(folder / "policy.safetensors"), dict(policy.named_parameters())
    assert stored.keys() == state.keys()
    assert all(np.array_equal(stored[name], state[name].detach().numpy()) for name in state)
    statistics = load_file(folder / "vec_normalize.safetensors")
    assert statistics["ret_rms.var"] == model.get_vec_normalize_env().ret_rms.var
    content = document(folder)
    assert (content["algorithm"], content["policy"], content["shaping"]["name"]) == ("ANO", "CnnPolicy", "ano")
    assert content["versions"]["torch"] == torch.__version__
    loaded = load_safe(folder, tiny_vec_env(IMAGE_OBSERVATIONS, BOX_ACTIONS))  # transposed as they were
    assert loaded.observation_space.shape == model.observation_space.shape == (1, 36, 36)
    assert loaded.get_vec_normalize_env().ret_rms.var == statistics["ret_rms.var"]
    loaded = loaded.policy
    assert loaded.pi_features_extractor.cnn[0].weight is loaded.features_extractor.cnn[0].weight
