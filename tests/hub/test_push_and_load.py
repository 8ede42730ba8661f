"""An agent goes to the Hub and comes back as what it was."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize, unwrap_vec_normalize

import sb3_ano.hub
from sb3_ano import ANO, PAPO, SPO
from sb3_ano.envs import make_vec_env
from sb3_ano.hub import download, load_from_hub, package, push_folder, push_to_hub
from tests.common import SMALL, parameters

QUICK = {"n_eval_episodes": 2, "video": False, "verbose": 0}


def observations(model, n=1000) -> np.ndarray:
    generator = np.random.default_rng(0)
    return generator.normal(size=(n, *model.observation_space.shape)).astype(np.float32)


def returns(model, env_id) -> list[float]:
    """Returns of 5 seeded episodes, with observations normalized as by the agent's own environments."""
    env = make_vec_env(env_id, 1, backend="gymnasium")
    statistics = model.get_vec_normalize_env()
    if statistics is not None:
        normalized = VecNormalize(env, training=False, norm_reward=False, clip_obs=statistics.clip_obs)
        normalized.obs_rms = statistics.obs_rms
        env = normalized
    env.seed(11)
    return evaluate_policy(model, env, 5, return_episode_rewards=True)[0]


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
            for each in (model, loaded):
                torch.manual_seed(3)
                actions.append(each.predict(observations(model), deterministic=deterministic)[0])
            np.testing.assert_array_equal(*actions)
        assert returns(loaded, env_id) == expected
        normalized = unwrap_vec_normalize(loaded.get_env())
        assert (normalized is None) == (agent == "cartpole")
        assert normalized is None or not (normalized.training or normalized.norm_reward)


@pytest.mark.parametrize(
    ("cls", "options"), [(SPO, {}), (PAPO, {}), (ANO, {"shaping": ("ano", "spo"), "clip_range_high": 0.3})]
)
def test_the_algorithm_comes_back_without_being_asked_for(cls, options, hub):
    model = cls("MlpPolicy", make_vec_env("CartPole-v1", 1, backend="gymnasium"), **SMALL, **options)
    push_to_hub(model, "somebody/agent", **QUICK)
    for trust in (False, True):
        loaded = load_from_hub("somebody/agent", trust_remote_code=trust)
        assert type(loaded) is cls
        assert torch.equal(parameters(loaded), parameters(model))
        assert getattr(loaded, "shaping_name", None) == getattr(model, "shaping_name", None)


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("stack", [False, True])
def test_a_new_vec_normalize_gets_the_statistics_of_the_agent(stack, trust, hub):
    """The statistics of an environment that has not been stepped were used silently."""

    def env():
        normalized = VecNormalize(make_vec_env("Pendulum-v1", 1, backend="gymnasium"), clip_obs=5.0)
        return VecFrameStack(normalized, 2) if stack else normalized

    model = ANO("MlpPolicy", env(), **SMALL).learn(64)
    push_to_hub(model, "somebody/agent", model.get_env(), **QUICK)
    loaded = unwrap_vec_normalize(load_from_hub("somebody/agent", env(), trust_remote_code=trust).get_env())
    np.testing.assert_array_equal(loaded.obs_rms.mean, model.get_vec_normalize_env().obs_rms.mean)
    assert (loaded.training, loaded.norm_reward, loaded.clip_obs) == (True, True, 5.0)  # settings stay the caller's
    kept = load_from_hub("somebody/agent", model.get_env(), trust_remote_code=trust).get_vec_normalize_env()
    assert kept is model.get_vec_normalize_env()
    assert kept.training


def test_an_environment_that_the_statistics_do_not_fit_is_rejected(pendulum, hub):
    push_to_hub(pendulum, "somebody/agent", **QUICK)
    for trust in (False, True):
        with pytest.raises(ValueError, match="env does not fit|observations of env"):
            load_from_hub("somebody/agent", "CartPole-v1", trust_remote_code=trust)


def test_a_push_is_one_commit_and_a_load_takes_only_what_it_needs(cartpole, hub, capsys, tmp_path):
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
    hub.requests.clear()
    load_from_hub("somebody/agent")
    fetched = {request.rsplit("/", 1)[1] for request in hub.requests if "/resolve/" in request}
    assert fetched == {"sb3_ano.json", "policy.safetensors", "results.json"}
    folder = download("somebody/agent", tmp_path / "agent")
    assert {path.name for path in folder.iterdir()} == fetched
    assert not any(path.is_symlink() for path in folder.iterdir())


def test_a_second_push_replaces_the_first_and_leaves_other_files(cartpole, pendulum, hub, monkeypatch):
    push_to_hub(
        pendulum, "somebody/agent", include_optimizer=True, private=True, **QUICK | {"video": "auto", "video_length": 3}
    )
    repository = hub.repositories["somebody/agent"]
    assert {"vec_normalize.pkl", "vec_normalize.safetensors", "optimizer.safetensors"} < set(repository.files)
    repository.commit({**repository.files, "notes.txt": b"mine", "ppo-CartPole-v1.zip": b"mine"})
    monkeypatch.delenv("HF_TOKEN")
    push_to_hub(cartpole, "somebody/agent", token="hf_of_somebody", **QUICK)
    gone = {"vec_normalize.pkl", "vec_normalize.safetensors", "optimizer.safetensors", "ano-Pendulum-v1.zip", "replay.mp4"}
    assert not gone & set(repository.files)
    assert {"notes.txt", ".gitattributes", "ano-CartPole-v1.zip", "ppo-CartPole-v1.zip"} < set(repository.files)
    assert load_from_hub("somebody/agent", token="hf_of_somebody").observation_space.shape == (4,)
    first = next(commit for commit, files in repository.commits.items() if "ano-Pendulum-v1.zip" in files)
    assert load_from_hub("somebody/agent", revision=first).observation_space.shape == (3,)


def test_a_package_can_be_looked_at_and_pushed_later(cartpole, hub, tmp_path):
    folder = package(cartpole, tmp_path / "agent", "somebody/agent", **QUICK)
    assert not hub.requests
    (folder / "README.md").write_text((folder / "README.md").read_text() + "\nA note of mine.\n")
    push_folder(folder, "somebody/agent")
    assert b"A note of mine." in hub.repositories["somebody/agent"].files["README.md"]
    with pytest.raises(ValueError, match=r"holds no README.md; sb3_ano.hub.package writes a directory to push"):
        push_folder(tmp_path, "somebody/agent")


def test_the_snippet_of_the_card_runs_as_it_stands_and_repeats_the_evaluation(pendulum, hub, tmp_path):
    """In a process that has nothing but HF_ENDPOINT."""
    push_to_hub(pendulum, "somebody/agent", **{**QUICK, "n_eval_episodes": 5})
    files = hub.repositories["somebody/agent"].files
    code = files["README.md"].decode().split("```python\n")[1].split("```")[0]
    command = [sys.executable, "-W", "error", "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert run.returncode == 0, run.stderr
    results = json.loads(files["results.json"])
    assert run.stdout.strip() == f"{results['mean_reward']:.2f} +/- {results['std_reward']:.2f}"


def test_public_names_are_listed_for_completion(cartpole, hub):
    """users U6 a"""
    assert {"load_from_hub", "package", "push_to_hub", "save_safe"} < set(sb3_ano.hub.__all__) <= set(dir(sb3_ano.hub))
    with pytest.raises(TypeError, match="licence"):
        push_to_hub(cartpole, "somebody/agent", licence="mit")
    assert not hub.repositories
