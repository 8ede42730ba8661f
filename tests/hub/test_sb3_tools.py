"""Agents of this package in the hands of Stable-Baselines3, its Hub tools and the RL Zoo."""

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
from tests.hub.test_push_and_load import observations


@pytest.fixture
def pushed(pendulum, hub, monkeypatch):
    push_to_hub(pendulum, "somebody/ano-Pendulum-v1", n_eval_episodes=1, video=False, verbose=0)
    monkeypatch.setenv("TRUST_REMOTE_CODE", "True")  # what SB3's tools ask for before they unpickle
    return hub


def test_sb3s_own_hub_functions_find_the_model(pushed, pendulum):
    load_from_hub = pytest.importorskip("huggingface_sb3").load_from_hub
    path = load_from_hub("somebody/ano-Pendulum-v1", "ano-Pendulum-v1.zip")
    statistics = load_from_hub("somebody/ano-Pendulum-v1", "vec_normalize.pkl")
    seen = observations(pendulum)
    expected = pendulum.predict(seen, deterministic=True)[0]
    # SB3's PPO reads what it knows; it would go on training with PPO's clip.
    for algorithm in (ANO, PPO):
        model = algorithm.load(path)
        assert type(model) is algorithm
        np.testing.assert_array_equal(model.predict(seen, deterministic=True)[0], expected)
    env = VecNormalize.load(statistics, make_vec_env("Pendulum-v1", 1, backend="gymnasium"))
    np.testing.assert_array_equal(env.obs_rms.mean, pendulum.get_env().obs_rms.mean)


def test_sb3_loads_the_model_without_this_package(pushed, pendulum, tmp_path):
    name = "ano-Pendulum-v1.zip"
    (tmp_path / name).write_bytes(pushed.repositories["somebody/ano-Pendulum-v1"].files[name])
    np.save(tmp_path / "seen.npy", observations(pendulum, 20))
    code = (
        "import sys; sys.modules['sb3_ano'] = None\n"
        "import numpy as np\n"
        "from stable_baselines3 import PPO\n"
        f"model = PPO.load({name!r}, custom_objects={{'rollout_buffer_class': None}})\n"
        "np.save('actions.npy', model.predict(np.load('seen.npy'), deterministic=True)[0])\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)
    expected = pendulum.predict(observations(pendulum, 20), deterministic=True)[0]
    np.testing.assert_array_equal(np.load(tmp_path / "actions.npy"), expected)


def test_the_zoo_downloads_the_run(pushed, pendulum, tmp_path):
    zoo = pytest.importorskip("rl_zoo3.load_from_hub")
    from huggingface_sb3 import EnvironmentName

    zoo.download_from_hub("ano", EnvironmentName("Pendulum-v1"), 0, str(tmp_path / "logs"), "somebody")
    run = tmp_path / "logs" / "ano" / "Pendulum-v1_1"
    assert (run / "Pendulum-v1" / "vecnormalize.pkl").is_file()
    assert yaml.safe_load((run / "Pendulum-v1" / "config.yml").read_text())["normalize"]["clip_obs"] == 5.0
    assert ANO.load(run / "Pendulum-v1.zip").num_timesteps == pendulum.num_timesteps


def test_the_examples_of_the_documentation_run(pushed, tmp_path, monkeypatch):
    """As they stand, but for the length of the training and the video."""
    pytest.importorskip("huggingface_sb3")
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


def without_pickles(hub) -> None:
    """Break every pickle and every YAML file of the repository."""
    repository = hub.repositories["somebody/ano-Pendulum-v1"]
    broken = {name: b"no pickle, no YAML: {" for name in repository.files if name.endswith((".zip", ".pkl", ".yml"))}
    repository.commit({**repository.files, **broken})


def test_a_run_is_made_of_the_safe_format_alone(pushed, pendulum, tmp_path):
    without_pickles(pushed)
    run = download_run("somebody/ano-Pendulum-v1", tmp_path / "logs" / "ano" / "Pendulum-v1_1")
    own = VecNormalize.load(str(run / "Pendulum-v1" / "vecnormalize.pkl"), make_vec_env("Pendulum-v1", 1, backend="gymnasium"))
    np.testing.assert_array_equal(own.obs_rms.mean, pendulum.get_env().obs_rms.mean)
    assert (own.training, own.norm_reward, own.gamma) == (True, True, 0.98)
    seen = observations(pendulum)
    loaded = ANO.load(run / "Pendulum-v1.zip")
    expected = pendulum.predict(seen, deterministic=True)[0]
    np.testing.assert_array_equal(loaded.predict(seen, deterministic=True)[0], expected)
    arguments = yaml.safe_load((run / "Pendulum-v1" / "args.yml").read_text())
    assert (arguments["algo"], arguments["env"], arguments["seed"]) == ("ano", "Pendulum-v1", 0)
    with pytest.raises(FileExistsError):
        download_run("somebody/ano-Pendulum-v1", run)


def test_a_run_that_cannot_be_made_leaves_no_folder(pushed, tmp_path):
    repository = pushed.repositories["somebody/ano-Pendulum-v1"]
    for content in (b"{", b"[]", b'{"env_id": 3}', b'{"env_id": "Nowhere-v0"}', b'{"env_id": "../../Pendulum-v1"}'):
        repository.commit({**repository.files, "results.json": content})
        with pytest.raises(ValueError, match="does not name|is not registered here"):
            download_run("somebody/ano-Pendulum-v1", tmp_path / "logs" / "run")
    assert not list((tmp_path / "logs").iterdir())


@pytest.mark.slow
def test_the_zoo_enjoys_such_a_run(pushed, tmp_path):
    pytest.importorskip("rl_zoo3")
    without_pickles(pushed)
    download_run("somebody/ano-Pendulum-v1", tmp_path / "logs" / "ano" / "Pendulum-v1_1")
    command = [
        sys.executable,
        "-m",
        "sb3_ano.zoo",
        "enjoy",
        "--algo",
        "ano",
        "--env",
        "Pendulum-v1",
        "--no-render",
        "-n",
        "200",
    ]
    run = subprocess.run([*command, "-f", "logs"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "Episode Reward" in run.stdout
