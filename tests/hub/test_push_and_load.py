"""An agent goes to the Hub and comes back as what it was, here, in Stable-Baselines3 and in the RL Zoo.

Failures of the Hub and the connection leave nothing half done; what is wrong with a repository is one line.
"""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from huggingface_hub import HfApi, constants, errors
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

from sb3_ano import ANO
from sb3_ano.envs import make_vec_env
from sb3_ano.hub import SafeFormatError, download_run, load_from_hub, push_to_hub
from tests.common import python
from tests.envs.tensor_envs import EXAMPLES
from tests.hub.agents import QUICK, acts_like, one_line, trained
from tests.hub.hub_server import DROP

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


def test_an_agent_of_tensor_environments_is_one_like_any_other(hub, tmp_path):
    env = EXAMPLES.TensorPendulum(4, max_steps=20)
    model = ANO("MlpPolicy", env, n_steps=32, batch_size=64, device="cpu").learn(128)
    assert model.rollout_buffer.held, "it was trained on tensors"
    model.save(tmp_path / "agent")
    assert acts_like(ANO.load(tmp_path / "agent", device="cpu"), model)

    push_to_hub(model, "agent", env, env_id="TensorPendulum", **QUICK)
    loaded = load_from_hub("somebody/agent", EXAMPLES.TensorPendulum(2))
    assert acts_like(loaded, model)
    loaded.learn(128)


def test_a_push_is_one_commit_and_replaces_an_earlier_one_but_no_other_files(cartpole, pendulum, hub, monkeypatch, capsys):
    push_to_hub(pendulum, "somebody/agent", private=True, n_eval_episodes=2, video_length=3)
    push_to_hub(cartpole, "organization/agent", n_eval_episodes=1, video=False, verbose=0)
    assert hub.visibility == {"somebody/agent": "private", "organization/agent": None}, "None is the owner's default"
    _, files = hub.repositories["somebody/agent"]  # the Hub's own commit and the push
    names = ".gitattributes README.md results.json replay.mp4 ano-Pendulum-v1.zip train_eval_metrics.zip vec_normalize.pkl "
    names += "sb3_ano.json policy.safetensors vec_normalize.safetensors args.yml config.yml env_kwargs.yml"
    assert set(files) == {*names.split()}
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["evaluating", "mean"]
    exec(files["README.md"].decode().split("```python\n")[1].split("```")[0], {})
    results = json.loads(files["results.json"])
    assert capsys.readouterr().out == f"{results['mean_reward']:.2f} +/- {results['std_reward']:.2f}\n"
    first = HfApi().model_info("somebody/agent").sha
    hub.add("somebody/agent", files | {"notes.txt": b"mine"})
    monkeypatch.delenv("HF_TOKEN")
    push_to_hub(cartpole, "somebody/agent", token="hf_3kQ9vXb7LmZt", **QUICK)
    files = set(hub.repositories["somebody/agent"][-1])
    assert not {"vec_normalize.pkl", "vec_normalize.safetensors", "replay.mp4"} & files
    assert {"notes.txt", ".gitattributes", "ano-CartPole-v1.zip", "ano-Pendulum-v1.zip"} < files
    assert load_from_hub("somebody/agent", token="hf_3kQ9vXb7LmZt").observation_space.shape == (4,)
    assert load_from_hub("somebody/agent", revision=first, token="hf_3kQ9vXb7LmZt").observation_space.shape == (3,)


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
    "from stable_baselines3 import PPO\n"
    "model = PPO.load(sys.argv[1], custom_objects={'rollout_buffer_class': None})\n"
    "print(model.predict(model.observation_space.high, deterministic=True)[0].tolist())\n"
)


def test_the_tools_of_sb3_find_the_model_with_and_without_this_package(pushed, pendulum):
    huggingface_sb3 = pytest.importorskip("huggingface_sb3")
    path = huggingface_sb3.load_from_hub(REPOSITORY, "ano-Pendulum-v1.zip")
    # SB3's PPO reads what it knows; it would go on training with PPO's clip.
    assert all(acts_like(algorithm.load(path), pendulum) for algorithm in (ANO, PPO))
    require_statistics(huggingface_sb3.load_from_hub(REPOSITORY, "vec_normalize.pkl"), pendulum)
    action, _ = pendulum.predict(pendulum.observation_space.high, deterministic=True)
    assert json.loads(python("-c", WITHOUT_US, path, check=True).stdout) == action.tolist()


def test_a_run_is_made_of_the_safe_format_alone(pushed, pendulum, tmp_path):
    """Every pickle and every YAML file of the repository is broken.

    Settings of an environment can be files elsewhere, memory, executables. They are shown and left out.
    """
    files = pushed.repositories[REPOSITORY][-1]
    broken = {name: b"no pickle, no YAML: {" for name in files if name.endswith((".zip", ".pkl", ".yml"))}
    env_kwargs = {"xml_file": "/etc/passwd", "desc": ["S" * 999] * 1000, "frame_stack": 3_000_000}
    broken["results.json"] = json.dumps({"env_id": "ALE/Pong-v5", "env_kwargs": env_kwargs}).encode()
    pushed.add(REPOSITORY, {**files, **broken})
    with pytest.warns(UserWarning, match="env_kwargs={'desc': .*are left out") as caught:
        run = download_run(REPOSITORY, tmp_path / "run")
    assert [len(str(each.message)) < 500 for each in caught] == [True]
    require_statistics(run / "ALE-Pong-v5" / "vecnormalize.pkl", pendulum)
    assert acts_like(ANO.load(run / "ALE-Pong-v5.zip"), pendulum)
    files = {path.stem: yaml.safe_load(path.read_text()) for path in (run / "ALE-Pong-v5").glob("*.yml")}
    expected = {"algo": "ano", "device": "auto", "env": "ALE/Pong-v5", "env_kwargs": {}, "n_timesteps": 1024, "seed": 0}
    assert files["args"] == expected
    assert (files["config"]["n_envs"], files["config"]["normalize"]["clip_obs"], files["env_kwargs"]) == (2, 5.0, {})
    with pytest.raises(FileExistsError):
        download_run(REPOSITORY, run)


def test_a_missing_package_is_named_with_its_extra():
    code = "import sys; sys.modules['safetensors'] = None\nimport sb3_ano.hub; sb3_ano.hub.save_safe"
    message = "safetensors is not installed; install it with: pip install 'sb3-ano[hub]'"
    assert python("-c", code).stderr.strip().endswith(message)


def test_a_push_that_cannot_succeed_stops_before_anything_is_done(cartpole, hub, capsys, tmp_path):
    """A wrong class and a malformed id are reported without the Hub, a wrong token before the evaluation."""
    with one_line(TypeError, "model is of class PPO; allowed are SPO, PAPO, ANO"):
        push_to_hub(trained(PPO, steps=0), "somebody/agent", token="hf_wrong")
    for repo_id in ("a/b/c", "../agent"):
        for call in (lambda name: push_to_hub(cartpole, name), load_from_hub):
            with pytest.raises(ValueError, match="[Rr]epo id"):
                call(repo_id)
    assert not hub.requests
    with pytest.raises(OSError, match="Invalid credentials"):
        push_to_hub(cartpole, "somebody/agent", token="hf_wrong")
    assert not hub.repositories
    cartpole.save(tmp_path / "model")
    with pytest.raises(ValueError, match="pass the environment as env="):
        push_to_hub(ANO.load(tmp_path / "model"), "somebody/agent")
    assert capsys.readouterr().out == ""


AGENT = "somebody/agent"
FAILURES = [
    (lambda model, path: load_from_hub("somebody/other"), {}, errors.RepositoryNotFoundError),
    (lambda model, path: load_from_hub(AGENT, revision="v2"), {}, errors.RevisionNotFoundError),
    (lambda model, path: load_from_hub(AGENT, token="hf_wrong"), {}, OSError),
    (lambda model, path: download_run(AGENT, path), {"GET .*/resolve/.*/policy.safetensors": DROP}, OSError),
    (lambda model, path: push_to_hub(model, AGENT, **QUICK), {"POST .*/commit/main": 500}, OSError),
    (lambda model, path: push_to_hub(model, "somebody/new", **QUICK), {"POST /api/repos/create": 403}, OSError),
]


@pytest.mark.parametrize(("call", "fail", "kind"), FAILURES)
def test_what_fails_leaves_all_as_it_was_with_the_hubs_error(call, fail, kind, hub, packed, pendulum, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # huggingface_hub tries again after seconds
    hub.add(AGENT, packed)
    hub.fail = fail
    with pytest.raises(kind) as caught:
        call(pendulum, tmp_path / "agents" / "agent")
    assert isinstance(caught.value, OSError)
    assert hub.repositories == {AGENT: [packed]}
    assert not list(tmp_path.glob("agents/*"))


def test_a_repository_that_changes_meanwhile_is_read_as_it_was_and_not_overwritten(hub, packed, cartpole, monkeypatch):
    hub.add("somebody/agent", packed)
    info = HfApi.model_info

    def then_somebody_commits(*arguments, **options):
        found = info(*arguments, **options)
        hub.add("somebody/agent", packed | {"new.txt": b"", "policy.safetensors": b"of another agent"})
        return found

    monkeypatch.setattr(HfApi, "model_info", then_somebody_commits)
    assert acts_like(load_from_hub("somebody/agent"), cartpole), "all files are of one commit"
    with pytest.raises(OSError, match="A commit has happened since"):
        push_to_hub(cartpole, "somebody/agent", **QUICK)
    assert "new.txt" in hub.repositories["somebody/agent"][-1]


def test_only_files_of_the_format_are_fetched_and_errors_name_the_repository(hub, packed):
    """Names never become paths, and pickles are not even downloaded."""
    names = ("../evil.zip", "/tmp/evil.zip", "..\\evil.zip", "evil\x00.zip", "./sb3_ano.json", "sb3_ano.json/../../evil")
    files = dict.fromkeys((*names, "ano-x.zip", "vec_normalize.pkl"), b"evil")
    hub.add("somebody/hostile", files)
    with one_line(ValueError, "no agent in the safe format .*runs any code .*hf_hub_download and ANO.load"):
        load_from_hub("somebody/hostile")
    assert not hub.fetched, "a file was requested"
    hub.add("somebody/hostile", files | {"sb3_ano.json": packed["sb3_ano.json"]})
    with one_line(SafeFormatError, "somebody/hostile/policy.safetensors"):
        load_from_hub("somebody/hostile")
    hub.add("somebody/hostile", files | packed)
    load_from_hub("somebody/hostile")
    assert hub.fetched == {"sb3_ano.json", "policy.safetensors", "results.json"}
    assert [path.name for path in Path(constants.HF_HUB_CACHE).glob("models--*")] == ["models--somebody--hostile"]
