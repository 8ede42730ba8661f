"""An agent in the safe format comes back as it was, with what only its author has supplied by the caller, or not at all."""

import hashlib
import json
import stat
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ano import ANO, PAPO, SPO
from sb3_ano.hub import SafeFormatError, load_safe, save_safe
from tests.common import ALGORITHMS, SMALL, needs_compiler, parameters
from tests.hub.agents import acts_like, document, rewrite, trained
from tests.tiny_envs import BOX_ACTIONS, BOX_OBSERVATIONS, IMAGE_OBSERVATIONS, tiny_vec_env

MIXED = spaces.Dict({"zoo": BOX_OBSERVATIONS, "image": IMAGE_OBSERVATIONS, "kind": spaces.Discrete(3)})


def read_by_hand(path):
    """A safetensors file as its specification says: a length, a JSON header, and little-endian numbers."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    dtypes = {"F32": "<f4", "F64": "<f8", "I64": "<i8"}
    return {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], dtypes[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
    }


@pytest.mark.parametrize("cls", ALGORITHMS)
@pytest.mark.parametrize(
    ("policy", "observations", "actions", "options"),
    [
        ("MlpPolicy", BOX_OBSERVATIONS, spaces.Discrete(3), {}),
        ("MlpPolicy", BOX_OBSERVATIONS, BOX_ACTIONS, {"use_sde": True, "policy_kwargs": {"use_expln": True}}),
        ("MlpPolicy", spaces.Discrete(5), spaces.MultiDiscrete([2, 3]), {"precision": "bfloat16"}),
        ("MultiInputPolicy", MIXED, spaces.MultiBinary(3), {}),
        ("CnnPolicy", IMAGE_OBSERVATIONS, BOX_ACTIONS, {"policy_kwargs": {"share_features_extractor": False}}),
    ],
    ids=["box", "gsde", "discrete", "dict", "image"],
)
@pytest.mark.filterwarnings("ignore:precision='bfloat16'")
def test_a_loaded_agent_acts_as_the_saved_one(cls, policy, observations, actions, options, tmp_path):
    model = cls(policy, tiny_vec_env(observations, actions), **SMALL, **options)
    assert save_safe(model, tmp_path / "agent") == tmp_path / "agent"
    loaded = load_safe(tmp_path / "agent")
    assert type(loaded) is cls
    assert torch.equal(parameters(loaded), parameters(model))
    assert (loaded.observation_space, loaded.action_space) == (model.observation_space, model.action_space)
    assert list(getattr(loaded.observation_space, "spaces", [])) == list(getattr(model.observation_space, "spaces", []))
    assert loaded.policy_kwargs == model.policy_kwargs
    assert acts_like(loaded, model)


@pytest.mark.parametrize("cls", ALGORITHMS)
def test_arguments_and_progress_come_back_exactly(cls, tmp_path):
    options = {
        "check_finite": False,
        "gamma": 1.0 / 3.0,
        "max_grad_norm": float("inf"),
        "target_kl": 0.1 + 0.2,
        "n_epochs": 1,
        "seed": 2**32 - 1,
    }
    options |= {"clip_range_high": "lin_0.3", "clip_range_vf": 0.5, "stats_window_size": 7, "normalize_advantage": False}
    options |= {"policy_kwargs": {"net_arch": {"pi": [7], "vf": []}, "activation_fn": torch.nn.SiLU, "log_std_init": -0.1}}
    options |= {"k": 3.7} if cls is PAPO else {"desired_kl": "lin_0.01"}
    model = cls("MlpPolicy", "CartPole-v1", **{**SMALL, **options}, tensorboard_log=str(tmp_path / "log")).learn(64)
    loaded = load_safe(save_safe(model, tmp_path / "agent"))
    # Compared with what SB3's own format brings back.
    model.save(tmp_path / "model.zip")
    expected = cls.load(tmp_path / "model.zip")
    for name, value in vars(expected).items():
        if name in ("clip_range_high", "clip_range_vf", "clip_range", "desired_kl") and value is not None:
            assert [getattr(loaded, name)(x / 7) for x in range(8)] == [value(x / 7) for x in range(8)]
        elif isinstance(value, int | float | str | dict | tuple | type(None)) and name not in (
            "tensorboard_log",
            "start_time",
            "_last_obs",
            "_last_episode_starts",
            "_last_original_obs",
        ):
            assert getattr(loaded, name) == value, name
    assert loaded.tensorboard_log is None  # a path on the author's machine, to which training would write
    assert str(tmp_path) not in (tmp_path / "agent" / "sb3_ano.json").read_text()


@pytest.mark.parametrize(
    ("cls", "policy_kwargs"),
    [
        (ANO, {}),
        (SPO, {"optimizer_class": torch.optim.SGD, "optimizer_kwargs": {"momentum": 0.9}}),
        (PAPO, {"optimizer_class": torch.optim.AdamW, "optimizer_kwargs": {"betas": (0.8, 0.99), "amsgrad": True}}),
    ],
)
def test_training_goes_on_as_from_sb3s_zip(cls, policy_kwargs, tmp_path):
    model = trained(cls, policy_kwargs=policy_kwargs, learning_rate=1e-3)
    model.save(tmp_path / "model.zip")
    save_safe(model, tmp_path / "agent", include_optimizer=True)
    save_safe(model, tmp_path / "without")
    results = []
    for load in (
        lambda env: cls.load(tmp_path / "model.zip", env=env),
        lambda env: load_safe(tmp_path / "agent", env),
        lambda env: load_safe(tmp_path / "without", env),
    ):
        loaded = load(gym.make("CartPole-v1"))
        assert torch.equal(parameters(loaded), parameters(model))
        loaded.learn(96, reset_num_timesteps=False)
        results.append((parameters(loaded), loaded.num_timesteps, loaded._n_updates))
    (zipped, *counts), (safe, *safe_counts), (without, *_) = results
    assert safe_counts == counts
    assert torch.equal(safe, zipped)
    assert not torch.equal(without, zipped)  # the state of the optimizer matters


def test_an_optimizer_of_parameters_that_were_not_trained_comes_back(tmp_path):
    model = ANO("MlpPolicy", "CartPole-v1", **SMALL)
    for name, steps in (("fresh", 0), ("agent", 32)):
        model.policy.value_net.weight.requires_grad = not steps
        if steps:
            model.learn(steps)
        expected = model.policy.optimizer.state_dict()
        found = load_safe(save_safe(model, tmp_path / name, include_optimizer=True)).policy.optimizer.state_dict()
        assert found["param_groups"] == expected["param_groups"]
        assert found["state"].keys() == expected["state"].keys()
        for index, values in expected["state"].items():
            assert all(torch.equal(found["state"][index][key], value) for key, value in values.items())


def test_the_files_are_plain_json_and_tensors(tmp_path):
    model = trained(env=VecNormalize(tiny_vec_env(BOX_OBSERVATIONS, BOX_ACTIONS)))
    folder = save_safe(model, tmp_path / "agent", include_optimizer=True)
    names = {"sb3_ano.json", "policy.safetensors", "optimizer.safetensors", "vec_normalize.safetensors"}
    assert {path.name for path in folder.iterdir()} == names
    assert {stat.S_IMODE(path.stat().st_mode) & 0o444 for path in folder.iterdir()} == {0o444}
    stored = read_by_hand(folder / "policy.safetensors")
    state = model.policy.state_dict()
    assert stored.keys() == state.keys()
    assert all(np.array_equal(stored[name], state[name].numpy()) for name in state)
    statistics = read_by_hand(folder / "vec_normalize.safetensors")
    assert np.array_equal(statistics["obs_rms.mean"], model.get_vec_normalize_env().obs_rms.mean)
    content = document(folder)
    assert (content["algorithm"], content["policy"], content["shaping"]["name"]) == ("ANO", "MlpPolicy", "ano")
    assert content["versions"]["torch"] == torch.__version__
    for name in names - {"sb3_ano.json"}:
        expected = {"size": (folder / name).stat().st_size, "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest()}
        assert content["files"][name] == expected


def test_shared_layers_are_stored_once(tmp_path):
    model = ANO("CnnPolicy", tiny_vec_env(IMAGE_OBSERVATIONS, BOX_ACTIONS), **SMALL)
    save_safe(model, tmp_path / "agent")
    size = sum(parameter.numel() for parameter in model.policy.parameters()) * 4
    assert size < (tmp_path / "agent" / "policy.safetensors").stat().st_size < size + 4096
    loaded = load_safe(tmp_path / "agent").policy
    assert loaded.pi_features_extractor.cnn[0].weight is loaded.features_extractor.cnn[0].weight


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch.*")
def test_a_compiled_model_is_stored_and_goes_on_like_any_other(tmp_path):
    model = trained(torch_compile=True)
    folder = save_safe(model, tmp_path / "agent", include_optimizer=True)
    eager = save_safe(trained(torch_compile=False), tmp_path / "eager", include_optimizer=True)
    for name in ("policy.safetensors", "optimizer.safetensors"):
        compiled, expected = read_by_hand(folder / name), read_by_hand(eager / name)
        assert compiled.keys() == expected.keys()
        assert all(np.allclose(compiled[key], expected[key], atol=1e-5) for key in expected)
    load_safe(folder, gym.make("CartPole-v1")).learn(32)


def test_a_newer_format_is_named(tmp_path):
    save_safe(trained(), tmp_path / "agent")
    rewrite(tmp_path / "agent", lambda content: content.update(format_version=2, novelty=True))
    with pytest.raises(SafeFormatError, match="is of format version 2; this sb3_ano reads 1: install a newer one"):
        load_safe(tmp_path / "agent")


def test_weights_that_are_no_numbers_are_warned_about(tmp_path):
    model = trained()
    with torch.no_grad():
        model.policy.value_net.bias.fill_(float("nan"))
    save_safe(model, tmp_path / "agent")
    with pytest.warns(UserWarning, match=r"'value_net.bias' has NaN or Inf"):
        load_safe(tmp_path / "agent")


def test_a_missing_package_is_named_with_its_extra():
    code = "import sys; sys.modules['safetensors'] = None\nimport sb3_ano.hub; sb3_ano.hub.save_safe"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip().endswith("safetensors is not installed; install it with: pip install 'sb3-ano[hub]'")
