"""A local Hub, agents to put on it, and a process that loads what strangers put there."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ano.envs import make_vec_env
from sb3_ano.hub import package, save_safe
from tests.hub.agents import QUICK, trained
from tests.hub.hostile.common import watched_process
from tests.hub.hub_server import running_hub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub of this process and of the processes that it starts, with a token that may write, and an empty cache."""
    with running_hub() as server:
        server.connect(monkeypatch, tmp_path / "hf_home")
        yield server


@pytest.fixture(scope="session")
def cartpole():
    """An agent that has learnt a little."""
    return trained(env=make_vec_env("CartPole-v1", 2, backend="gymnasium"), steps=2048, policy_kwargs={"net_arch": [16]})


@pytest.fixture(scope="session")
def pendulum():
    """An agent whose observations and rewards are normalized."""
    env = VecNormalize(make_vec_env("Pendulum-v1", 2, backend="gymnasium"), gamma=0.98, clip_obs=5.0)
    return trained(env=env, steps=1024, policy_kwargs={"net_arch": [16]})


@pytest.fixture(scope="session")
def packed(cartpole, tmp_path_factory):
    """Provide the files that a push of an agent puts on a Hub."""
    folder = package(cartpole, tmp_path_factory.mktemp("packed") / "agent", "somebody/agent", **QUICK)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def random_generators():
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


@pytest.fixture
def pack(tmp_path):
    """A function that packages an agent.

    A package that fails leaves the directory as it was; any leaves the random generators of the process alone.
    """

    def pack_in(model, env=None, name="agent", **options):
        before, generators = set(tmp_path.rglob("*")), random_generators()
        try:
            return package(model, tmp_path / name, "somebody/agent", env, **{**QUICK, **options})
        except Exception:
            assert set(tmp_path.rglob("*")) == before
            raise
        finally:
            assert random_generators() == generators

    return pack_in


@pytest.fixture(scope="session")
def sound(tmp_path_factory):
    """An agent with all files of the format, and a value in most places of its JSON."""
    policy_kwargs = {"net_arch": [8, 8], "activation_fn": torch.nn.Tanh, "log_std_init": 0.0, "ortho_init": True}
    policy_kwargs |= {"normalize_images": True, "optimizer_kwargs": {"eps": 1e-5, "betas": (0.9, 0.999), "amsgrad": False}}
    model = trained(env=VecNormalize(make_vec_env("CartPole-v1")), clip_range="lin_0.2", policy_kwargs=policy_kwargs)
    return save_safe(model, tmp_path_factory.mktemp("sound") / "agent")


@pytest.fixture(scope="session")
def watched(sound):
    """A function that loads a directory in another process, and returns what happened there."""
    with watched_process(sound) as load_there:
        yield load_there


@pytest.fixture
def folder(sound, tmp_path):
    """A copy to be spoilt."""
    return Path(shutil.copytree(sound, tmp_path / "agent"))
