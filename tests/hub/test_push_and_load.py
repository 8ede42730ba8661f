"""An agent goes to the Hub and comes back as what it was, here, in Stable-Baselines3 and in the RL Zoo."""

import json
import random
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml
from stable_baselines3 import PPO
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize, unwrap_vec_normalize

import sb3_ano.hub
from sb3_ano import ANO, PAPO, SPO, MaskableANO, RecurrentANO
from sb3_ano.envs import make_vec_env
from sb3_ano.hub import download_run, load_from_hub, package, push_to_hub
from tests.hub.agents import QUICK, acts_like, trained
from tests.tiny_envs import OneAllowed


def env_of(env_id, is_normalized=False, stack=0):
    """An environment, with a VecNormalize of the caller's, below a frame stack or not."""
    env = make_vec_env(env_id, 1, backend="gymnasium")
    env = VecNormalize(env, clip_obs=5.0) if is_normalized else env
    return VecFrameStack(env, stack) if stack else env


@pytest.mark.parametrize(
    ("cls", "env_id", "options"),
    [
        (ANO, "Pendulum-v1", {"use_sde": True}),
        (SPO, "CartPole-v1", {}),
        (PAPO, "CartPole-v1", {}),
        (ANO, "CartPole-v1", {"shaping": ("ano", "spo"), "clip_range_high": 0.3}),
        (RecurrentANO, "CartPole-v1", {"policy": "MlpLstmPolicy", "policy_kwargs": {"lstm_hidden_size": 8}}),
        (MaskableANO, "OneAllowed-v0", {}),
    ],
)
def test_a_loaded_agent_acts_as_the_pushed_one(cls, env_id, options, hub, monkeypatch):
    is_normalized = env_id == "Pendulum-v1"
    if env_id == "OneAllowed-v0":
        monkeypatch.setitem(gym.registry, env_id, gym.envs.registration.EnvSpec(env_id, OneAllowed))
    model = trained(cls, env_of(env_id, is_normalized), **options)
    assert push_to_hub(model, "somebody/agent", **QUICK) == f"{hub.url}/somebody/agent"
    loaded = load_from_hub("somebody/agent", env_of(env_id))
    assert type(loaded) is cls
    assert getattr(loaded, "shaping_name", None) == getattr(model, "shaping_name", None)
    assert acts_like(loaded, model)
    normalized = unwrap_vec_normalize(loaded.get_env())
    assert (normalized is not None) == is_normalized
    if is_normalized:
        assert (normalized.training, normalized.norm_reward) == (False, False)
        np.testing.assert_array_equal(normalized.obs_rms.mean, model.get_vec_normalize_env().obs_rms.mean)


def test_packaging_leaves_the_random_generators_of_the_process_alone(cartpole, tmp_path):
    def draw():
        return random.random(), np.random.rand(), torch.rand(()).item()

    set_random_seed(5)
    expected = draw()
    set_random_seed(5)
    package(cartpole, tmp_path / "agent", "somebody/agent", **QUICK)
    assert draw() == expected


@pytest.mark.parametrize("stack", [0, 2])
def test_a_new_vec_normalize_gets_the_statistics_of_the_agent(stack, hub):
    """The statistics of an environment that has not been stepped were used silently."""
    model = trained(ANO, env_of("Pendulum-v1", True, stack))
    push_to_hub(model, "somebody/agent", model.get_env(), **QUICK)
    loaded = load_from_hub("somebody/agent", env_of("Pendulum-v1", True, stack)).get_vec_normalize_env()
    np.testing.assert_array_equal(loaded.obs_rms.mean, model.get_vec_normalize_env().obs_rms.mean)
    assert (loaded.training, loaded.norm_reward, loaded.clip_obs) == (True, True, 5.0)  # settings stay the caller's
    kept = load_from_hub("somebody/agent", model.get_env()).get_vec_normalize_env()
    assert kept is model.get_vec_normalize_env()
    assert kept.training
    with pytest.raises(ValueError, match="env does not fit|observations of env"):
        load_from_hub("somebody/agent", "CartPole-v1")


def test_a_push_is_one_commit_and_a_load_takes_only_what_it_needs(cartpole, hub, capsys):
    push_to_hub(cartpole, "somebody/agent", n_eval_episodes=2, video_length=3)
    repository = hub.repositories["somebody/agent"]
    assert len(repository.commits) == 2, "the Hub's own and the push"
    assert not repository.is_private
    assert set(repository.files) == {
        ".gitattributes", "README.md", "results.json", "replay.mp4",
        "sb3_ano.json", "policy.safetensors", "ano-CartPole-v1.zip",
        "args.yml", "config.yml", "env_kwargs.yml", "train_eval_metrics.zip",
    }  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["saving", "evaluating", "mean", "recording", "pushing"]
    load_from_hub("somebody/agent")
    assert hub.fetched == {"sb3_ano.json", "policy.safetensors", "results.json"}


def test_a_second_push_replaces_the_first_and_leaves_other_files(cartpole, pendulum, hub, monkeypatch):
    push_to_hub(pendulum, "somebody/agent", private=True, **{**QUICK, "video": True, "video_length": 3})
    repository = hub.repositories["somebody/agent"]
    assert repository.is_private
    gone = {"vec_normalize.pkl", "vec_normalize.safetensors", "replay.mp4"}
    assert gone < set(repository.files)
    first = repository.head
    repository.commit({**repository.files, "notes.txt": b"mine"})
    monkeypatch.delenv("HF_TOKEN")
    push_to_hub(cartpole, "somebody/agent", token="hf_of_somebody", **QUICK)
    assert not gone & set(repository.files)
    assert {"notes.txt", ".gitattributes", "ano-CartPole-v1.zip", "ano-Pendulum-v1.zip"} < set(repository.files)
    assert load_from_hub("somebody/agent", token="hf_of_somebody").observation_space.shape == (4,)
    assert load_from_hub("somebody/agent", revision=first).observation_space.shape == (3,)


def test_the_snippet_of_the_card_runs_as_it_stands_and_repeats_the_evaluation(pendulum, hub, capsys):
    push_to_hub(pendulum, "somebody/agent", **{**QUICK, "n_eval_episodes": 5})
    files = hub.repositories["somebody/agent"].files
    exec(files["README.md"].decode().split("```python\n")[1].split("```")[0], {})
    results = json.loads(files["results.json"])
    assert capsys.readouterr().out == f"{results['mean_reward']:.2f} +/- {results['std_reward']:.2f}\n"


def test_public_names_are_listed_for_completion(cartpole, hub):
    """users U6 a"""
    assert {"load_from_hub", "package", "push_to_hub", "save_safe"} < set(sb3_ano.hub.__all__) <= set(dir(sb3_ano.hub))
    with pytest.raises(TypeError, match="licence"):
        push_to_hub(cartpole, "somebody/agent", licence="mit")
    assert not hub.repositories


REPOSITORY = "somebody/ano-Pendulum-v1"


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
    for algorithm in (ANO, PPO):
        model = algorithm.load(path)
        assert type(model) is algorithm
        assert acts_like(model, pendulum)
    require_statistics(huggingface_sb3.load_from_hub(REPOSITORY, "vec_normalize.pkl"), pendulum)
    seen = np.stack([pendulum.observation_space.sample() for _ in range(20)])
    np.save(tmp_path / "seen.npy", seen)
    subprocess.run([sys.executable, "-c", WITHOUT_US, path], cwd=tmp_path, check=True, timeout=120)
    np.testing.assert_array_equal(np.load(tmp_path / "actions.npy"), pendulum.predict(seen, deterministic=True)[0])
    name = huggingface_sb3.EnvironmentName("Pendulum-v1")
    zoo.download_from_hub("ano", name, 0, str(tmp_path / "logs"), "somebody")
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
    assert "replay.mp4" in pushed.repositories["me/ano-CartPole-v1"].files


def test_a_run_is_made_of_the_safe_format_alone(pushed, pendulum, tmp_path):
    """Every pickle and every YAML file of the repository is broken."""
    files = pushed.repositories[REPOSITORY].files
    broken = {name: b"no pickle, no YAML: {" for name in files if name.endswith((".zip", ".pkl", ".yml"))}
    pushed.add(REPOSITORY, {**files, **broken})
    run = download_run(REPOSITORY, tmp_path / "logs" / "ano" / "Pendulum-v1_1")
    require_statistics(run / "Pendulum-v1" / "vecnormalize.pkl", pendulum)
    assert acts_like(ANO.load(run / "Pendulum-v1.zip"), pendulum)
    arguments = yaml.safe_load((run / "Pendulum-v1" / "args.yml").read_text())
    assert (arguments["algo"], arguments["env"], arguments["seed"]) == ("ano", "Pendulum-v1", 0)
    with pytest.raises(FileExistsError):
        download_run(REPOSITORY, run)
