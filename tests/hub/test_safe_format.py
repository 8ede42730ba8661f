"""An agent in the safe format comes back as it was, to the last digit.

Statistics of VecNormalize come back with it. Whoever loads the agent supplies custom parts; if a part cannot be stored, the
directory is left unchanged.
"""

import importlib
import json

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ano import ANO, PAPO, SPO
from sb3_ano._io import write_file
from sb3_ano.envs import make_vec_env
from sb3_ano.hub import SafeFormatError, download_run, load_normalization, load_safe, save_safe
from sb3_ano.hub.codec import CLASSES, decode, encode
from sb3_ano.hub.documents import new_folder
from sb3_ano.hub.safe_format import SAFE_FILES, describe
from sb3_ano.hub.spaces import decode_space, encode_space
from tests.common import ALGORITHMS, SMALL, parameters, pseudo_huber
from tests.hub.agents import MISSING, CustomPolicy, acts_like, document, one_line, rewrite, trained
from tests.tiny_envs import BOX_ACTIONS, BOX_OBSERVATIONS, DICT_OBSERVATIONS, IMAGE_OBSERVATIONS, tiny_vec_env

# Optimizers and policies of these tests are custom ones.
pytestmark = pytest.mark.filterwarnings("ignore:this training leaves the fast path")

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
    ("flags", spaces.Box(0, 1, (3,), np.bool_)),
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
    options |= {"clip_range_high": 0.3, "clip_range_vf": "lin_0.5", "stats_window_size": 7, "normalize_advantage": False}
    options |= {"policy_kwargs": {"net_arch": {"pi": [7], "vf": []}, "activation_fn": torch.nn.SiLU, "log_std_init": -0.1}}
    options |= {"check_finite": False, "tensorboard_log": str(tmp_path / "log")}
    options["policy_kwargs"]["optimizer_class"] = torch.optim.SGD  # has no state, which the format would not store
    options |= {"k": 3.7} if cls is PAPO else {"desired_kl": "lin_0.01"}
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
    # PyPI's wheels do not name their build in their metadata.
    assert content["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    loaded = load_safe(folder, tiny_vec_env(IMAGE_OBSERVATIONS, BOX_ACTIONS))  # transposed as they were
    assert loaded.observation_space.shape == model.observation_space.shape == (1, 36, 36)
    assert loaded.get_vec_normalize_env().ret_rms.var == statistics["ret_rms.var"]
    loaded = loaded.policy
    assert loaded.pi_features_extractor.cnn[0].weight is loaded.features_extractor.cnn[0].weight


@pytest.mark.parametrize(
    ("policy", "observations", "options"),
    [
        ("MlpPolicy", BOX_OBSERVATIONS, {"gamma": 0.9, "epsilon": 1e-5, "clip_obs": float("inf"), "clip_reward": 3.0}),
        ("MlpPolicy", BOX_OBSERVATIONS, {"norm_obs": False}),
        ("MultiInputPolicy", DICT_OBSERVATIONS, {"norm_obs_keys": ["place"], "norm_reward": False}),
    ],
)
def test_normalization_comes_back_as_from_sb3s_pickle(policy, observations, options, tmp_path):
    model = trained(env=VecNormalize(tiny_vec_env(observations, BOX_ACTIONS), **options), policy=policy)
    save_safe(model, tmp_path / "agent")
    model.get_vec_normalize_env().save(tmp_path / "normalize.pkl")
    expected = VecNormalize.load(tmp_path / "normalize.pkl", tiny_vec_env(observations, BOX_ACTIONS))
    found = load_normalization(tmp_path / "agent", tiny_vec_env(observations, BOX_ACTIONS))
    for name in ("training", "norm_obs", "norm_reward", "clip_obs", "clip_reward", "gamma", "epsilon", "norm_obs_keys"):
        assert getattr(found, name) == getattr(expected, name), name
    for venv in (found, expected):
        venv.seed(3)
        venv.reset()
    for _ in range(40):  # both continue to learn, and normalize what they return
        action = np.full((2, 2), 0.3, np.float32)
        for one, other in zip(found.step(action)[:3], expected.step(action)[:3], strict=True):
            np.testing.assert_equal(one, other)


@pytest.mark.parametrize(
    "bad", [{"obs_rms.var": -1.0}, {"obs_rms.mean": float("nan")}, {"ret_rms.count": -1.0}, {"epsilon": -1.0}]
)
def test_statistics_that_cannot_normalize_are_rejected(bad, tmp_path):
    env = VecNormalize(tiny_vec_env(BOX_OBSERVATIONS, BOX_ACTIONS))
    for name, value in bad.items():
        owner, _, part = name.rpartition(".")
        setattr(getattr(env, owner) if owner else env, part, np.full_like(env.obs_rms.mean, value) if "obs" in name else value)
    save_safe(trained(env=env, steps=0), tmp_path / "agent")
    with one_line(SafeFormatError, f"{min(bad)}.* cannot normalize"):
        load_normalization(tmp_path / "agent", tiny_vec_env(BOX_OBSERVATIONS, BOX_ACTIONS))


def test_statistics_that_divide_by_zero_are_rejected(tmp_path):
    env = VecNormalize(tiny_vec_env(BOX_OBSERVATIONS, BOX_ACTIONS), epsilon=0.0)
    env.obs_rms.var = np.zeros_like(env.obs_rms.var)
    save_safe(trained(env=env, steps=0), tmp_path / "agent")
    with one_line(SafeFormatError, "obs_rms.var cannot normalize; it is 0, and so is epsilon"):
        load_normalization(tmp_path / "agent", tiny_vec_env(BOX_OBSERVATIONS, BOX_ACTIONS))


def test_a_policy_that_diverged_is_not_saved(tmp_path):
    model = trained(steps=0)
    model.policy.value_net.bias.data.fill_(float("nan"))
    with one_line(SafeFormatError, "model.policy: the parameter value_net.bias holds NaN or Inf"):
        save_safe(model, tmp_path / "agent")
    assert not (tmp_path / "agent").exists()


def test_without_environments_there_are_no_statistics_to_save(sound, tmp_path):
    folder = save_safe(load_safe(sound), tmp_path / "agent")
    with one_line(SafeFormatError, "holds no statistics"):
        load_normalization(folder, tiny_vec_env(BOX_OBSERVATIONS, BOX_ACTIONS))
    assert {path.name for path in folder.iterdir()} == {"policy.safetensors", "sb3_ano.json"}
    assert load_safe(folder, "CartPole-v1").get_vec_normalize_env() is None


def test_what_is_missing_has_its_default(folder):
    """Agents of before an argument was added."""
    rewrite(folder, dict.fromkeys(("arguments/check_finite", "arguments/gamma", "progress/radius_factor"), MISSING))
    model = load_safe(folder)
    assert (model.check_finite, model.gamma, model.radius_factor) == (True, 0.99, 1.0)


@pytest.mark.parametrize("factor", [0.0, 1e300])
def test_a_factor_that_no_radius_survives_is_rejected(factor, folder):
    rewrite(folder, {"progress/radius_factor": factor})
    with pytest.raises(
        SafeFormatError, match="progress.radius_factor=.* is not allowed; allowed are numbers from 1e-9 to 1e9"
    ):
        load_safe(folder)


EXTRACTOR = "policy_kwargs.features_extractor_class"


def saved(model, path):
    """Save an agent, and check which of its parts only the caller can supply."""
    objects: dict = {}
    describe(model, objects)
    custom = ", ".join(sorted(objects)) or "shaping"
    warning = f"stored by name only, because not built in: {custom}; .* passes them to load_safe, a shape as shaping="
    with pytest.warns(UserWarning, match=warning):
        return save_safe(model, path), objects


def test_a_custom_shape_is_stored_by_name_and_supplied_by_the_caller(hub, packed, tmp_path):
    agent, _ = saved(trained(shaping=pseudo_huber), tmp_path / "agent")
    with pytest.raises(SafeFormatError, match="trained with shaping='tests.common:pseudo_huber', which is not built in"):
        load_safe(agent)
    hub.add("somebody/agent", packed | {path.name: path.read_bytes() for path in agent.iterdir()})
    with pytest.raises(SafeFormatError, match="which is not built in"):
        download_run("somebody/agent", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    for shape in (pseudo_huber, "tests.common:pseudo_huber"):
        loaded = load_safe(agent, "CartPole-v1", shaping=shape)
        assert loaded._shape.f is pseudo_huber
        loaded.learn(32)
    with pytest.warns(UserWarning, match="the given shaping= is another function"):
        assert load_safe(agent, shaping="spo").shaping == "spo"
    with pytest.raises(TypeError, match="shaping='ano' is given, but .* holds an agent of SPO"):
        load_safe(save_safe(trained(SPO), tmp_path / "spo"), shaping="ano")


def square_root(progress_remaining):
    return 1e-3 * progress_remaining**0.5


class Squared(LinearSchedule):
    """A subclass of a schedule that the format knows."""

    def __call__(self, progress_remaining):
        return super().__call__(progress_remaining) ** 2


class LooksAtNumbers(BaseFeaturesExtractor):
    """Cannot be built without memory, because it asks for the value of a parameter."""

    def __init__(self, observation_space, width=6):
        super().__init__(observation_space, width)
        self.layer = torch.nn.Linear(observation_space.shape[0], width)
        self.sign = float(self.layer.weight.detach().sum().sign())

    def forward(self, observations):
        return self.layer(observations)


@pytest.mark.parametrize(
    ("options", "policy_kwargs"),
    [
        ({"learning_rate": square_root, "clip_range_vf": Squared(0.5, 0.1, 1.0), "desired_kl": square_root}, {}),
        ({"policy": CustomPolicy}, {"features_extractor_class": LooksAtNumbers, "features_extractor_kwargs": {"width": 5}}),
        *[({"policy": CustomPolicy}, {"anything": {"part": [value]}}) for value in (object(), {1: 2}, {"$class": "x"}, len)],
    ],
)
def test_what_is_not_built_in_is_named_and_supplied_by_the_caller(options, policy_kwargs, tmp_path):
    model = trained(policy_kwargs={"optimizer_class": torch.optim.SGD, **policy_kwargs}, **options)
    agent, objects = saved(model, tmp_path / "agent")
    for name in objects:
        others = {other: value for other, value in objects.items() if other != name}
        message = rf"{name} was '[\w.]+:\w+', which is not built in.*custom_objects=\{{'{name}': ...\}}"
        with pytest.raises(SafeFormatError, match=message):
            load_safe(agent, custom_objects=others)
    assert acts_like(load_safe(agent, custom_objects=objects), model)
    model.save(tmp_path / "model.zip")
    loads = (lambda env: load_safe(agent, env, custom_objects=objects), lambda env: ANO.load(tmp_path / "model.zip", env))
    resumed = [load(make_vec_env("CartPole-v1")).learn(64, reset_num_timesteps=False) for load in loads]
    assert torch.equal(*map(parameters, resumed))


def test_a_class_that_cannot_be_built_without_memory_is_compared_afterwards(tmp_path):
    agent, objects = saved(trained(policy_kwargs={"features_extractor_class": LooksAtNumbers}), tmp_path / "agent")
    assert list(objects) == [EXTRACTOR]
    rewrite(agent, {"arguments/policy_kwargs/net_arch": [65]})
    with pytest.raises(SafeFormatError, match="but that of the built policy"):
        load_safe(agent, custom_objects=objects)


@pytest.mark.parametrize(
    ("objects", "error", "message"),
    [
        ({"clip_rang": 0.1}, TypeError, "has 'clip_rang', which the agent does not have; allowed are .*'clip_range'"),
        ({"n_steps": 0}, SafeFormatError, "n_steps=0 is not allowed"),
        ({"policy": "CustomPolicy"}, SafeFormatError, "policy='CustomPolicy' is not allowed; allowed are MlpPolicy"),
        ({"policy_kwargs": {"net_arch": [64, 32]}}, SafeFormatError, "but that of the policy that the JSON describes is"),
    ],
)
def test_arguments_can_be_replaced_if_this_makes_sense(objects, error, message, sound):
    loaded = load_safe(sound, "CartPole-v1", custom_objects={"n_steps": 64, "clip_range": 0.1})
    assert (loaded.n_steps, loaded.clip_range(1.0)) == (64, 0.1)
    with pytest.raises(error, match=message):
        load_safe(sound, custom_objects=objects)


class Derived(ANO):
    """A subclass, which the format does not know."""


def test_what_cannot_be_stored_is_named_and_nothing_is_written(tmp_path):
    with pytest.raises(TypeError, match="model is of class Derived; allowed are SPO, PAPO, ANO"):
        save_safe(trained(Derived, steps=0), tmp_path / "agent")
    model = trained(steps=0)
    model.observation_space = spaces.Tuple([spaces.Discrete(2)])
    with pytest.raises(TypeError, match="cannot be stored; allowed are Box, Discrete"):
        save_safe(model, tmp_path / "agent")
    assert list(tmp_path.iterdir()) == []


def test_only_agents_are_replaced_and_a_link_stays_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "agent").symlink_to(tmp_path / "disk")
    save_safe(trained(SPO, VecNormalize(make_vec_env("CartPole-v1"))), tmp_path / "agent")
    model = trained(ANO)
    save_safe(model, str(tmp_path / "agent"))
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["policy.safetensors", "sb3_ano.json"]
    assert torch.equal(parameters(load_safe(tmp_path / "agent")), parameters(model))
    assert (tmp_path / "agent").is_symlink()
    (tmp_path / "disk" / "vec_normalize.safetensors").mkdir()  # a directory is not ours
    with pytest.raises(FileExistsError, match=r"vec_normalize.safetensors"):
        save_safe(model, tmp_path / "agent")
    (tmp_path / "disk" / "thesis.tex").write_text("years of work")
    for path, error in ((tmp_path / "agent", FileExistsError), (tmp_path / "disk" / "thesis.tex", NotADirectoryError)):
        with pytest.raises(error, match="thesis.tex"):
            save_safe(model, path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent", "disk"]
    assert (tmp_path / "disk" / "thesis.tex").read_text() == "years of work"
    folder = new_folder(tmp_path / "new", SAFE_FILES)
    folder.__enter__()
    write_file(tmp_path / "new" / "late.txt", "written while the agent is evaluated")
    with pytest.raises(FileExistsError, match=r"late.txt"):
        folder.__exit__(None, None, None)
    assert (tmp_path / "new" / "late.txt").exists()
