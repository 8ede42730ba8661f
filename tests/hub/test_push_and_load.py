"""An agent goes to the Hub and comes back as what it was, here, in Stable-Baselines3 and in the RL Zoo."""

import json
import subprocess
import sys

import numpy as np
import pytest
import yaml
from gymnasium.vector.utils import batch_space
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

from sb3_ano import ANO
from sb3_ano.envs import make_vec_env
from sb3_ano.hub import download_run, load_from_hub, push_to_hub
from tests.hub.agents import QUICK, acts_like, trained

REPOSITORY = "somebody/ano-Pendulum-v1"


def normalized_pendulum(stack=0):
    """An environment with a VecNormalize of the caller's, below a frame stack or not."""
    env = VecNormalize(make_vec_env("Pendulum-v1", 1, backend="gymnasium"), clip_obs=5.0)
    return VecFrameStack(env, stack) if stack else env


@pytest.mark.parametrize("stack", [0, 2])
def test_environments_are_normalized_as_in_training(stack, hub):
    """The statistics of an environment that has not been stepped were used silently."""
    model = trained(ANO, normalized_pendulum(stack), use_sde=True)
    trained_with = model.get_vec_normalize_env()
    assert push_to_hub(model, "agent", model.get_env(), **QUICK) == f"{hub.url}/somebody/agent"
    given = load_from_hub("somebody/agent", normalized_pendulum(stack)).get_vec_normalize_env()
    assert (given.training, given.norm_reward, given.clip_obs) == (True, True, 5.0)  # settings stay the caller's
    np.testing.assert_array_equal(given.obs_rms.mean, trained_with.obs_rms.mean)
    assert load_from_hub("somebody/agent", model.get_env()).get_vec_normalize_env() is trained_with
    assert trained_with.training
    if not stack:
        loaded = load_from_hub("somebody/agent", "Pendulum-v1")
        added = loaded.get_vec_normalize_env()
        assert (added.training, added.norm_reward) == (False, False)
        np.testing.assert_array_equal(added.obs_rms.mean, trained_with.obs_rms.mean)
        assert acts_like(loaded, model)
    with pytest.raises(ValueError, match="observations of env"):
        load_from_hub("somebody/agent", "CartPole-v1")


def test_a_push_is_one_commit_and_replaces_an_earlier_one_but_no_other_files(cartpole, pendulum, hub, monkeypatch, capsys):
    push_to_hub(pendulum, "somebody/agent", private=True, n_eval_episodes=2, video_length=3)
    repository = hub.repositories["somebody/agent"]
    assert repository.is_private
    assert len(repository.commits) == 2, "the Hub's own and the push"
    assert set(repository.files) == {
        ".gitattributes", "README.md", "results.json", "replay.mp4", "ano-Pendulum-v1.zip", "vec_normalize.pkl",
        "sb3_ano.json", "policy.safetensors", "vec_normalize.safetensors",
        "args.yml", "config.yml", "env_kwargs.yml", "train_eval_metrics.zip",
    }  # fmt: skip
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["evaluating", "mean"]
    exec(repository.files["README.md"].decode().split("```python\n")[1].split("```")[0], {})
    results = yaml.safe_load(repository.files["results.json"])
    assert capsys.readouterr().out == f"{results['mean_reward']:.2f} +/- {results['std_reward']:.2f}\n"
    first = repository.head
    repository.commit({**repository.files, "notes.txt": b"mine"})
    monkeypatch.delenv("HF_TOKEN")
    push_to_hub(cartpole, "somebody/agent", token="hf_of_somebody", **QUICK)
    assert not {"vec_normalize.pkl", "vec_normalize.safetensors", "replay.mp4"} & set(repository.files)
    assert {"notes.txt", ".gitattributes", "ano-CartPole-v1.zip", "ano-Pendulum-v1.zip"} < set(repository.files)
    assert load_from_hub("somebody/agent", token="hf_of_somebody").observation_space.shape == (4,)
    assert load_from_hub("somebody/agent", revision=first, token="hf_of_somebody").observation_space.shape == (3,)


@pytest.fixture
def pushed(pendulum, hub, monkeypatch):
    push_to_hub(pendulum, REPOSITORY, **QUICK)
    monkeypatch.setenv("TRUST_REMOTE_CODE", "True")  # what SB3's tools ask for before they unpickle
    return hub


def require_statistics(path, model):
    """Check VecNormalize as SB3 loads it."""
    env = VecNormalize.load(str(path), make_vec_env("Pendulum-v1", 1, backend="gymnasium"))
    np.testing.assert_array_equal(env.obs_rms.mean, model.get_env().obs_rms.mean)
    assert (env.training, env.norm_reward, env.gamma) == (True, True, 0.98)


WITHOUT_US = (
    "import sys; sys.modules['sb3_ano'] = None\n"
    "import numpy as np\n"
    "from stable_baselines3 import PPO\n"
    "model = PPO.load(sys.argv[1], custom_objects={'rollout_buffer_class': None})\n"
    "np.save('actions.npy', model.predict(np.load('seen.npy'), deterministic=True)[0])\n"
)


def test_the_tools_of_sb3_and_the_zoo_find_the_model(pushed, pendulum, tmp_path):
    huggingface_sb3, zoo = pytest.importorskip("huggingface_sb3"), pytest.importorskip("rl_zoo3.load_from_hub")
    path = huggingface_sb3.load_from_hub(REPOSITORY, "ano-Pendulum-v1.zip")
    # SB3's PPO reads what it knows; it would go on training with PPO's clip.
    assert all(acts_like(algorithm.load(path), pendulum) for algorithm in (ANO, PPO))
    require_statistics(huggingface_sb3.load_from_hub(REPOSITORY, "vec_normalize.pkl"), pendulum)
    seen = batch_space(pendulum.observation_space, 20).sample()
    np.save(tmp_path / "seen.npy", seen)
    subprocess.run([sys.executable, "-c", WITHOUT_US, path], cwd=tmp_path, check=True, timeout=120)
    np.testing.assert_array_equal(np.load(tmp_path / "actions.npy"), pendulum.predict(seen, deterministic=True)[0])
    name = huggingface_sb3.EnvironmentName("Pendulum-v1")
    zoo.download_from_hub("ano", name, 0, str(tmp_path / "logs"), "somebody")
    run = tmp_path / "logs" / "ano" / "Pendulum-v1_1"
    assert (run / "Pendulum-v1" / "vecnormalize.pkl").is_file()
    assert yaml.safe_load((run / "Pendulum-v1" / "config.yml").read_text())["normalize"]["clip_obs"] == 5.0
    assert ANO.load(run / "Pendulum-v1.zip").num_timesteps == pendulum.num_timesteps


def test_a_run_is_made_of_the_safe_format_alone(pushed, pendulum, tmp_path):
    """Every pickle and every YAML file of the repository is broken.

    Review safety H2: settings of an environment can be files elsewhere, memory, executables. They are shown and left out.
    """
    files = pushed.repositories[REPOSITORY].files
    broken = {name: b"no pickle, no YAML: {" for name in files if name.endswith((".zip", ".pkl", ".yml"))}
    env_kwargs = {"xml_file": "/etc/passwd", "desc": ["S" * 999] * 1000, "frame_stack": 3_000_000}
    broken["results.json"] = json.dumps({"env_id": "ALE/Pong-v5", "env_kwargs": env_kwargs}).encode()
    pushed.add(REPOSITORY, {**files, **broken})
    with pytest.warns(UserWarning, match="env_kwargs={'desc': .*are left out") as caught:
        run = download_run(REPOSITORY, tmp_path / "run")
    assert [len(str(each.message)) < 500 for each in caught] == [True]
    require_statistics(run / "ALE-Pong-v5" / "vecnormalize.pkl", pendulum)
    assert acts_like(ANO.load(run / "ALE-Pong-v5.zip"), pendulum)
    args, config, settings = (
        yaml.safe_load((run / "ALE-Pong-v5" / f"{name}.yml").read_text()) for name in ("args", "config", "env_kwargs")
    )
    assert args == {"algo": "ano", "env": "ALE/Pong-v5", "env_kwargs": {}, "n_timesteps": 1024, "seed": 0}
    assert (config["n_envs"], config["normalize"]["clip_obs"], settings) == (2, 5.0, {})
    with pytest.raises(FileExistsError):
        download_run(REPOSITORY, run)


def test_a_missing_package_is_named_with_its_extra():
    code = "import sys; sys.modules['safetensors'] = None\nimport sb3_ano.hub; sb3_ano.hub.save_safe"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip().endswith("safetensors is not installed; install it with: pip install 'sb3-ano[hub]'")
