"""Agents on the Hub are found by Stable-Baselines3, its Hub tools and the RL Zoo."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ano import ANO
from sb3_ano.envs import make_vec_env
from sb3_ano.hub import download_run, push_to_hub
from tests.hub.agents import QUICK, acts_like

huggingface_sb3 = pytest.importorskip("huggingface_sb3")

REPOSITORY = "somebody/ano-Pendulum-v1"


@pytest.fixture
def pushed(pendulum, hub, monkeypatch):
    push_to_hub(pendulum, REPOSITORY, **QUICK)
    monkeypatch.setenv("TRUST_REMOTE_CODE", "True")  # what SB3's tools ask for before they unpickle
    return hub


def normalization(path):
    """VecNormalize as SB3 loads it."""
    return VecNormalize.load(str(path), make_vec_env("Pendulum-v1", 1, backend="gymnasium"))


def test_sb3s_own_hub_functions_find_the_model(pushed, pendulum):
    path = huggingface_sb3.load_from_hub(REPOSITORY, "ano-Pendulum-v1.zip")
    # SB3's PPO reads what it knows; it would go on training with PPO's clip.
    for algorithm in (ANO, PPO):
        model = algorithm.load(path)
        assert type(model) is algorithm
        assert acts_like(model, pendulum)
    env = normalization(huggingface_sb3.load_from_hub(REPOSITORY, "vec_normalize.pkl"))
    np.testing.assert_array_equal(env.obs_rms.mean, pendulum.get_env().obs_rms.mean)


def test_sb3_loads_the_model_without_this_package(pushed, pendulum, tmp_path):
    (tmp_path / "model.zip").write_bytes(pushed.repositories[REPOSITORY].files["ano-Pendulum-v1.zip"])
    seen = np.stack([pendulum.observation_space.sample() for _ in range(20)])
    np.save(tmp_path / "seen.npy", seen)
    code = (
        "import sys; sys.modules['sb3_ano'] = None\n"
        "import numpy as np\n"
        "from stable_baselines3 import PPO\n"
        "model = PPO.load('model.zip', custom_objects={'rollout_buffer_class': None})\n"
        "np.save('actions.npy', model.predict(np.load('seen.npy'), deterministic=True)[0])\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)
    np.testing.assert_array_equal(np.load(tmp_path / "actions.npy"), pendulum.predict(seen, deterministic=True)[0])


def test_the_zoo_downloads_the_run(pushed, pendulum, tmp_path):
    zoo = pytest.importorskip("rl_zoo3.load_from_hub")
    zoo.download_from_hub("ano", huggingface_sb3.EnvironmentName("Pendulum-v1"), 0, str(tmp_path / "logs"), "somebody")
    run = tmp_path / "logs" / "ano" / "Pendulum-v1_1"
    assert (run / "Pendulum-v1" / "vecnormalize.pkl").is_file()
    assert yaml.safe_load((run / "Pendulum-v1" / "config.yml").read_text())["normalize"]["clip_obs"] == 5.0
    assert ANO.load(run / "Pendulum-v1.zip").num_timesteps == pendulum.num_timesteps


def test_the_examples_of_the_documentation_run(pushed, tmp_path, monkeypatch):
    """As they stand, but for the length of the training and the video."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "hub.md").read_text()
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    training = None
    for block in text.split("```python\n")[1:]:
        code = block.split("```")[0].replace("60_000", "512").replace('run="run")', 'run="run", video_length=5)')
        exec(code, names)
        training = training or names["model"].get_env()
    training.close()
    assert type(names["model"]) is PPO
    assert (tmp_path / "logs" / "ano" / "CartPole-v1_1" / "CartPole-v1.zip").is_file()
    assert "learning_curve.png" in pushed.repositories["me/ano-CartPole-v1"].files


def test_a_run_is_made_of_the_safe_format_alone(pushed, pendulum, tmp_path):
    """Every pickle and every YAML file of the repository is broken."""
    files = pushed.repositories[REPOSITORY].files
    broken = {name: b"no pickle, no YAML: {" for name in files if name.endswith((".zip", ".pkl", ".yml"))}
    pushed.add(REPOSITORY, {**files, **broken})
    run = download_run(REPOSITORY, tmp_path / "logs" / "ano" / "Pendulum-v1_1")
    env = normalization(run / "Pendulum-v1" / "vecnormalize.pkl")
    np.testing.assert_array_equal(env.obs_rms.mean, pendulum.get_env().obs_rms.mean)
    assert (env.training, env.norm_reward, env.gamma) == (True, True, 0.98)
    assert acts_like(ANO.load(run / "Pendulum-v1.zip"), pendulum)
    arguments = yaml.safe_load((run / "Pendulum-v1" / "args.yml").read_text())
    assert (arguments["algo"], arguments["env"], arguments["seed"]) == ("ano", "Pendulum-v1", 0)
    with pytest.raises(FileExistsError):
        download_run(REPOSITORY, run)
