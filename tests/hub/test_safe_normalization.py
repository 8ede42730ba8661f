"""Statistics of VecNormalize come back with the agent, and agents that earlier versions stored act as they did."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ano.hub import SafeFormatError, load_normalization, load_safe, save_safe
from tests.hub.agents import MISSING, one_line, rewrite, trained
from tests.tiny_envs import BOX_ACTIONS, BOX_OBSERVATIONS, DICT_OBSERVATIONS, tiny_vec_env


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


def test_without_environments_there_are_no_statistics_to_save(sound, tmp_path):
    folder = save_safe(load_safe(sound), tmp_path / "agent")
    with one_line(SafeFormatError, "holds no statistics"):
        load_normalization(folder, tiny_vec_env(BOX_OBSERVATIONS, BOX_ACTIONS))
    assert {path.name for path in folder.iterdir()} == {"policy.safetensors", "sb3_ano.json"}
    assert load_safe(folder, "CartPole-v1").get_vec_normalize_env() is None


# Written at commit 3baf6fd, before the format's release; the learning rate of "ano" is a custom schedule.
STORED = Path(__file__).with_name("stored")


@pytest.mark.parametrize("name", ["ano", "papo", "spo"])
def test_stored_agents_act_as_they_did(name):
    expected = json.loads((STORED / f"{name}.json").read_text())
    model = load_safe(STORED / name, custom_objects={"learning_rate": 1e-3} if name == "ano" else None)
    observations, space = expected["observations"], model.observation_space
    if isinstance(space, spaces.Dict):
        observations = {key: np.array(observations[key], part.dtype) for key, part in space.items()}
    else:
        observations = np.array(observations, space.dtype)
    if (STORED / name / "vec_normalize.safetensors").exists():
        venv = load_normalization(STORED / name, tiny_vec_env(space, model.action_space))
        assert (venv.clip_obs, venv.clip_reward) == (5.0, float("inf"))
        observations = venv.normalize_obs(observations)
    actions = model.predict(observations, deterministic=True)[0]
    np.testing.assert_allclose(actions, expected["actions"], rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        tensors, _ = model.policy.obs_to_tensor(observations)
        values, log_prob, _ = model.policy.evaluate_actions(tensors, torch.as_tensor(actions))
    np.testing.assert_allclose(values, expected["values"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(log_prob, expected["log_prob"], rtol=1e-4, atol=1e-5)
    arguments = expected["arguments"]
    assert [model.clip_range(progress) for progress in (1.0, 0.8, 0.1)] == pytest.approx(arguments.pop("clip_range"))
    assert {argument: getattr(model, argument) for argument in arguments} == arguments


def test_what_is_missing_has_its_default(folder):
    """review users U7: agents of before an argument was added."""
    rewrite(folder, dict.fromkeys(("arguments/check_finite", "arguments/gamma", "progress/radius_factor"), MISSING))
    model = load_safe(folder)
    assert (model.check_finite, model.gamma, model.radius_factor) == (True, 0.99, 1.0)
