"""Statistics of VecNormalize come back with the agent, as from SB3's pickles."""

import json

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ano import ANO
from sb3_ano.hub import SafeFormatError, load_normalization, load_safe, save_safe
from tests.common import SMALL, parameters
from tests.hub.agents import trained
from tests.tiny_envs import BOX_ACTIONS, BOX_OBSERVATIONS, DICT_OBSERVATIONS, IMAGE_OBSERVATIONS, tiny_vec_env


def normalized(observations, steps=64, **options):
    venv = VecNormalize(tiny_vec_env(observations, BOX_ACTIONS), **options)
    policy = "MultiInputPolicy" if isinstance(observations, spaces.Dict) else "MlpPolicy"
    return trained(env=venv, policy=policy, steps=steps, learning_rate=1e-2)


@pytest.mark.parametrize(
    ("observations", "options"),
    [
        (BOX_OBSERVATIONS, {"gamma": 0.9, "epsilon": 1e-5, "clip_obs": float("inf"), "clip_reward": 3.0}),
        (BOX_OBSERVATIONS, {"norm_obs": False}),
        (DICT_OBSERVATIONS, {"norm_obs_keys": ["place"], "norm_reward": False}),
    ],
)
def test_normalisation_comes_back_as_from_sb3s_pickle(observations, options, tmp_path):
    model = normalized(observations, **options)
    save_safe(model, tmp_path / "agent")
    model.get_vec_normalize_env().save(tmp_path / "normalize.pkl")
    expected = VecNormalize.load(tmp_path / "normalize.pkl", tiny_vec_env(observations, BOX_ACTIONS))
    found = load_normalization(tmp_path / "agent", tiny_vec_env(observations, BOX_ACTIONS))
    for name in ("training", "norm_obs", "norm_reward", "clip_obs", "clip_reward", "gamma", "epsilon", "norm_obs_keys"):
        assert getattr(found, name) == getattr(expected, name), name
    for venv in (found, expected):
        venv.seed(3)
        venv.reset()
    for _ in range(40):  # both learn on, and normalise what they return
        action = np.full((2, 2), 0.3, np.float32)
        for one, other in zip(found.step(action)[:3], expected.step(action)[:3], strict=True):
            assert np.array_equal(
                one["place"] if isinstance(one, dict) else one, other["place"] if isinstance(one, dict) else other
            )
    assert found.ret_rms.count == expected.ret_rms.count


def test_environments_are_normalised_with_statistics_that_stay(tmp_path):
    model = normalized(BOX_OBSERVATIONS)
    save_safe(model, tmp_path / "agent")
    loaded = load_safe(tmp_path / "agent", tiny_vec_env(BOX_OBSERVATIONS, BOX_ACTIONS))
    venv = loaded.get_vec_normalize_env()
    assert (venv.training, venv.norm_reward, venv.norm_obs) == (False, False, True)
    raw = np.array([[0.1, -0.2, 0.3, 0.9]])
    assert np.array_equal(venv.normalize_obs(raw), model.get_vec_normalize_env().normalize_obs(raw))
    count = venv.obs_rms.count
    venv.reset()
    venv.step(np.zeros((2, 2), np.float32))
    assert venv.obs_rms.count == count


def test_a_single_environment_and_its_id_are_normalised_too(tmp_path):
    model = ANO("MlpPolicy", VecNormalize(ANO("MlpPolicy", "CartPole-v1", **SMALL).get_env()), **SMALL).learn(64)
    save_safe(model, tmp_path / "agent")
    for env in ("CartPole-v1", gym.make("CartPole-v1")):
        venv = load_safe(tmp_path / "agent", env).get_vec_normalize_env()
        assert np.array_equal(venv.obs_rms.var, model.get_vec_normalize_env().obs_rms.var)


def test_images_whose_rewards_are_normalised_are_transposed_as_they_were(tmp_path):
    venv = VecNormalize(tiny_vec_env(IMAGE_OBSERVATIONS, BOX_ACTIONS), norm_obs=False)
    model = trained(env=venv, policy="CnnPolicy")
    save_safe(model, tmp_path / "agent")
    loaded = load_safe(tmp_path / "agent", tiny_vec_env(IMAGE_OBSERVATIONS, BOX_ACTIONS))
    assert loaded.observation_space.shape == model.observation_space.shape == (1, 36, 36)
    assert np.array_equal(loaded.get_vec_normalize_env().ret_rms.var, venv.ret_rms.var)


def test_environments_with_statistics_are_left_alone(tmp_path):
    save_safe(normalized(BOX_OBSERVATIONS), tmp_path / "agent")
    mine = VecNormalize(tiny_vec_env(BOX_OBSERVATIONS, BOX_ACTIONS), clip_obs=2.0)
    ANO("MlpPolicy", mine, **SMALL).learn(32)
    assert load_safe(tmp_path / "agent", mine).get_vec_normalize_env() is mine
    assert mine.training


def test_without_statistics_there_are_none_to_load(tmp_path):
    save_safe(trained(), tmp_path / "agent")
    with pytest.raises(SafeFormatError, match="holds no statistics"):
        load_normalization(tmp_path / "agent", tiny_vec_env(BOX_OBSERVATIONS, BOX_ACTIONS))
    assert load_safe(tmp_path / "agent", "CartPole-v1").get_vec_normalize_env() is None


def test_normalised_training_goes_on_as_from_sb3s_files(tmp_path):
    model = normalized(BOX_OBSERVATIONS)
    save_safe(model, tmp_path / "agent", include_optimizer=True)
    model.save(tmp_path / "model.zip")
    model.get_vec_normalize_env().save(tmp_path / "normalize.pkl")
    results = []
    for normalize, load in (
        (lambda venv: VecNormalize.load(tmp_path / "normalize.pkl", venv), lambda env: ANO.load(tmp_path / "model", env=env)),
        (lambda venv: load_normalization(tmp_path / "agent", venv), lambda env: load_safe(tmp_path / "agent", env)),
    ):
        loaded = load(normalize(tiny_vec_env(BOX_OBSERVATIONS, BOX_ACTIONS))).learn(128, reset_num_timesteps=False)
        results.append((parameters(loaded), torch.from_numpy(loaded.get_vec_normalize_env().obs_rms.mean)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("env", ["MountainCar-v0", gym.make("Acrobot-v1")], ids=["id", "env"])
def test_an_environment_with_other_spaces_is_refused(env, tmp_path):
    save_safe(trained(), tmp_path / "agent")
    with pytest.raises(ValueError, match=r"env does not fit the agent in .*Observation spaces do not match") as caught:
        load_safe(tmp_path / "agent", env)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("depth", [40, 900])
def test_deep_settings_are_one_line(depth, tmp_path):
    folder = save_safe(normalized(BOX_OBSERVATIONS), tmp_path / "agent")
    content = json.loads((folder / "sb3_ano.json").read_text())
    content["vec_normalize"] = "DEEP"
    content.pop("checksum", None)
    (folder / "sb3_ano.json").write_text(json.dumps(content).replace('"DEEP"', "[" * depth + "]" * depth))
    with pytest.raises(SafeFormatError):
        load_normalization(folder, tiny_vec_env(BOX_OBSERVATIONS, BOX_ACTIONS))
