"""An agent goes to the Hub and comes back as what it was."""

import inspect
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize, unwrap_vec_normalize

import sb3_ano.hub
from sb3_ano import ANO, PAPO, SPO
from sb3_ano.envs import make_vec_env
from sb3_ano.hub.packaging import package
from sb3_ano.hub.pull import download, load_from_hub
from sb3_ano.hub.push import push_folder, push_to_hub
from tests.common import SMALL, parameters
from tests.hub.hub_server import uploads_warn

pytestmark = uploads_warn
QUICK = {"n_eval_episodes": 2, "video_length": 3, "verbose": 0}


def observations(model, n=1000) -> np.ndarray:
    generator = np.random.default_rng(0)
    return generator.normal(size=(n, *model.observation_space.shape)).astype(np.float32)


def returns(model, env_id) -> list[float]:
    """Of 20 seeded episodes, as the agent's own environments normalise."""
    env = make_vec_env(env_id, 1, backend="gymnasium")
    statistics = model.get_vec_normalize_env()
    if statistics is not None:
        normalised = VecNormalize(env, training=False, norm_reward=False, clip_obs=statistics.clip_obs)
        normalised.obs_rms = statistics.obs_rms
        env = normalised
    env.seed(11)
    return evaluate_policy(model, env, 20, return_episode_rewards=True)[0]


@pytest.mark.parametrize(("agent", "env_id"), [("cartpole", "CartPole-v1"), ("pendulum", "Pendulum-v1")])
def test_a_loaded_agent_acts_and_scores_as_the_pushed_one(agent, env_id, hub, request):
    model = request.getfixturevalue(agent)
    url = push_to_hub(model, "somebody/agent", **QUICK)
    assert url == f"{hub.url}/somebody/agent"
    expected = returns(model, env_id)
    for trust in (False, True):
        loaded = load_from_hub("somebody/agent", make_vec_env(env_id, 1, backend="gymnasium"), trust_remote_code=trust)
        assert type(loaded) is type(model)
        for deterministic in (True, False):
            actions = []
            for one in (model, loaded):
                torch.manual_seed(3)
                actions.append(one.predict(observations(model), deterministic=deterministic)[0])
            np.testing.assert_array_equal(*actions)
        assert returns(loaded, env_id) == expected
        normalised = unwrap_vec_normalize(loaded.get_env())
        assert (normalised is None) == (agent == "cartpole")
        assert normalised is None or not (normalised.training or normalised.norm_reward)


@pytest.mark.parametrize(
    ("cls", "options"), [(SPO, {}), (PAPO, {}), (ANO, {"shaping": ("ano", "spo"), "clip_range_high": 0.3})]
)
@pytest.mark.parametrize("trust", [False, True], ids=["safe", "zip"])
def test_the_algorithm_comes_back_without_being_asked_for(cls, options, trust, hub):
    model = cls("MlpPolicy", make_vec_env("CartPole-v1", 1, backend="gymnasium"), **SMALL, **options)
    push_to_hub(model, "somebody/agent", video=False, **{**QUICK, "n_eval_episodes": 1})
    loaded = load_from_hub("somebody/agent", trust_remote_code=trust)
    assert type(loaded) is cls
    assert torch.equal(parameters(loaded), parameters(model))
    assert getattr(loaded, "shaping_name", None) == getattr(model, "shaping_name", None)


def test_a_push_is_one_commit_with_everything_in_it(cartpole, hub, capsys):
    push_to_hub(cartpole, "somebody/agent", n_eval_episodes=2, video_length=3)
    repository = hub.repositories["somebody/agent"]
    assert len(repository.commits) == 2, "the Hub's own and the push"
    assert set(repository.files) == {
        ".gitattributes", "README.md", "results.json", "replay.mp4",
        "sb3_ano.json", "policy.safetensors", "ano-CartPole-v1.zip",
        "args.yml", "config.yml", "env_kwargs.yml", "train_eval_metrics.zip",
    }  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["saving", "evaluating", "mean", "recording", "pushing"]


def test_a_second_push_replaces_the_first_and_leaves_other_files(cartpole, pendulum, hub):
    push_to_hub(pendulum, "somebody/agent", include_optimizer=True, **QUICK)
    repository = hub.repositories["somebody/agent"]
    assert {"vec_normalize.pkl", "vec_normalize.safetensors", "optimizer.safetensors"} < set(repository.files)
    repository.commit({**repository.files, "notes.txt": b"mine"})
    push_to_hub(cartpole, "somebody/agent", video=False, **QUICK)
    gone = {"vec_normalize.pkl", "vec_normalize.safetensors", "optimizer.safetensors", "ano-Pendulum-v1.zip", "replay.mp4"}
    assert not gone & set(repository.files)
    assert {"notes.txt", ".gitattributes", "ano-CartPole-v1.zip"} < set(repository.files)
    assert load_from_hub("somebody/agent").observation_space.shape == (4,)
    first = next(commit for commit, files in repository.commits.items() if "ano-Pendulum-v1.zip" in files)
    assert load_from_hub("somebody/agent", revision=first).observation_space.shape == (3,)


def test_only_the_files_that_are_needed_are_downloaded(cartpole, hub, tmp_path):
    push_to_hub(cartpole, "somebody/agent", **QUICK)
    hub.requests.clear()
    load_from_hub("somebody/agent")
    fetched = {request.rsplit("/", 1)[1] for request in hub.requests if "/resolve/" in request}
    assert fetched == {"sb3_ano.json", "policy.safetensors", "results.json"}
    folder = download("somebody/agent", tmp_path / "agent")
    assert {path.name for path in folder.iterdir()} == fetched
    assert not any(path.is_symlink() for path in folder.iterdir())


def test_a_package_can_be_looked_at_and_pushed_later(cartpole, hub, tmp_path):
    folder = package(cartpole, tmp_path / "agent", "somebody/agent", **QUICK)
    assert not hub.requests
    (folder / "README.md").write_text((folder / "README.md").read_text() + "\nA note of mine.\n")
    push_folder(folder, "somebody/agent")
    assert b"A note of mine." in hub.repositories["somebody/agent"].files["README.md"]


def test_private_repositories_need_the_token(cartpole, hub, monkeypatch):
    push_to_hub(cartpole, "somebody/agent", private=True, video=False, **QUICK)
    assert hub.count("POST /api/repos/create") == 1
    monkeypatch.delenv("HF_TOKEN")
    push_to_hub(cartpole, "somebody/agent", video=False, token="hf_of_somebody", **QUICK)
    assert load_from_hub("somebody/agent", token="hf_of_somebody").num_timesteps == cartpole.num_timesteps


def test_the_snippet_of_the_card_runs_as_it_stands_and_repeats_the_evaluation(pendulum, hub, tmp_path):
    """In a process that has nothing but HF_ENDPOINT."""
    push_to_hub(pendulum, "somebody/agent", **{**QUICK, "n_eval_episodes": 5})
    files = hub.repositories["somebody/agent"].files
    code = ModelCard(files["README.md"].decode()).text.split("```python\n")[1].split("```")[0]
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert run.returncode == 0, run.stderr
    results = json.loads(files["results.json"])
    assert run.stdout.strip() == f"{results['mean_reward']:.2f} +/- {results['std_reward']:.2f}"


def test_the_two_ways_to_push_take_the_same_arguments():
    packaging, pushing = (inspect.signature(function).parameters for function in (package, push_to_hub))
    common = {name: parameter for name, parameter in packaging.items() if name != "path"}
    assert {name: pushing[name] for name in common} == common
    assert set(pushing) - set(common) == {"commit_message", "private", "token"}


def test_public_names_are_listed_for_completion():
    """users U6 a"""
    assert {"load_from_hub", "package", "push_to_hub", "save_safe"} < set(dir(sb3_ano.hub)) == set(sb3_ano.hub.__all__)
