"""A local Hub, and agents to put on it."""

import pytest
from huggingface_hub import constants
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ano import ANO
from sb3_ano.envs import make_vec_env
from tests.common import SMALL
from tests.hub.hub_server import TOKEN, running_hub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub of this process and of the processes that it starts, with a token that may write, and an empty cache."""
    with running_hub() as server:
        settings = {
            "HF_ENDPOINT": server.url,
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(tmp_path / "hf_home"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        # huggingface_hub reads its variables when it is imported, which has happened in this process.
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf_home" / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield server


@pytest.fixture(scope="session")
def cartpole():
    """An agent that has learnt a little."""
    model = ANO("MlpPolicy", make_vec_env("CartPole-v1", 2, backend="gymnasium"), policy_kwargs={"net_arch": [16]}, **SMALL)
    return model.learn(2048)


@pytest.fixture(scope="session")
def pendulum():
    """An agent whose observations and rewards are normalised."""
    env = VecNormalize(make_vec_env("Pendulum-v1", 2, backend="gymnasium"), gamma=0.98, clip_obs=5.0)
    return ANO("MlpPolicy", env, policy_kwargs={"net_arch": [16]}, **SMALL).learn(1024)
