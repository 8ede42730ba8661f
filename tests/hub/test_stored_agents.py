"""Agents that earlier versions stored load and act as they did. Those in stored/ were written at commit 3baf6fd."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces

from sb3_ano.hub import load_normalization, load_safe
from tests.hub.agents import MISSING, rewrite
from tests.tiny_envs import tiny_vec_env

STORED = Path(__file__).with_name("stored")


@pytest.mark.parametrize("name", ["ano", "papo", "spo"])
def test_agents_of_earlier_versions_act_as_they_did(name):
    expected = json.loads((STORED / f"{name}.json").read_text())
    model = load_safe(STORED / name)
    parts = model.observation_space.spaces if isinstance(model.observation_space, spaces.Dict) else None
    observations = expected["observations"]
    if parts is None:
        observations = np.array(observations, model.observation_space.dtype)
    else:
        observations = {key: np.array(observations[key], parts[key].dtype) for key in parts}
    if (STORED / name / "vec_normalize.safetensors").exists():
        venv = load_normalization(STORED / name, tiny_vec_env(model.observation_space, model.action_space))
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
    state = model.policy.optimizer.state_dict()["state"]
    moments = [value.double().abs().sum() for values in state.values() for value in values.values() if torch.is_tensor(value)]
    stored_moments = expected["optimizer"] if (STORED / name / "optimizer.safetensors").exists() else 0.0
    assert float(sum(moments)) == pytest.approx(stored_moments, rel=1e-6)


@pytest.mark.parametrize(
    ("part", "name", "other", "default"),
    [
        ("arguments", "check_finite", False, True),  # review users U7
        ("arguments", "desired_kl", 0.02, None),
        ("progress", "radius_factor", 2.0, 1.0),
    ],
)
def test_what_earlier_versions_did_not_store_gets_its_default(part, name, other, default, tmp_path):
    folder = shutil.copytree(STORED / "spo", tmp_path / "agent")
    rewrite(folder, {f"{part}/{name}": other})
    found = getattr(load_safe(folder), name)
    assert (found(1.0) if callable(found) else found) == other
    rewrite(folder, {f"{part}/{name}": MISSING})
    assert getattr(load_safe(folder), name) == default
