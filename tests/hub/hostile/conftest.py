"""A sound agent, copies of it to be spoilt, and a process that loads them under watch."""

import shutil
from pathlib import Path

import pytest
import torch
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ano.envs import make_vec_env
from sb3_ano.hub import save_safe
from tests.hub.agents import trained
from tests.hub.hostile.common import watched_process


@pytest.fixture(scope="session")
def sound(tmp_path_factory):
    """An agent with all files of the format, and a value in most places of its JSON."""
    policy_kwargs = {"net_arch": [8, 8], "activation_fn": torch.nn.Tanh, "log_std_init": 0.0, "ortho_init": True}
    policy_kwargs |= {"normalize_images": True, "optimizer_kwargs": {"eps": 1e-5, "betas": (0.9, 0.999), "amsgrad": False}}
    model = trained(env=VecNormalize(make_vec_env("CartPole-v1")), clip_range="lin_0.2", policy_kwargs=policy_kwargs)
    return save_safe(model, tmp_path_factory.mktemp("sound") / "agent", include_optimizer=True)


@pytest.fixture(scope="session")
def watched(sound):
    """A function that loads a directory in another process, and returns what happened there."""
    with watched_process(sound) as load_there:
        yield load_there


@pytest.fixture
def folder(sound, tmp_path):
    """A copy to be spoilt."""
    return Path(shutil.copytree(sound, tmp_path / "agent"))
