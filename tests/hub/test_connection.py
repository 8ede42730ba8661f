"""Agents in the cache load without the Hub, errors are one line, and no token or password is written, printed or raised."""

import json
import re
import traceback
import zipfile

import gymnasium as gym
import numpy as np
import pytest
import yaml
from huggingface_hub import constants, errors, hf_hub_download
from stable_baselines3.common.env_util import make_vec_env as sb3_make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from sb3_ano.envs import make_vec_env
from sb3_ano.hub import download_run, load_from_hub, package, push_to_hub
from sb3_ano.hub.connection import safe_errors
from tests.hub.agents import QUICK, acts_like, one_line, trained
from tests.hub.hub_server import TOKEN

AGENT = "somebody/agent"
COMMIT = f"{0:040x}"
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def shared(hub, packed):
    """A Hub with an agent that has a tag and is on a second branch."""
    hub.add(AGENT, packed)
    hub.branches[AGENT] = {"best": [packed]}
    hub.tags[AGENT] = {"v1": COMMIT}
    return hub


def offline(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def out_of_reach(monkeypatch):
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, NOWHERE)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", NOWHERE)


@pytest.mark.parametrize("disconnect", [offline, out_of_reach])
@pytest.mark.parametrize("revision", [None, "main", "best", "v1", COMMIT])
def test_what_was_loaded_once_loads_without_the_hub(revision, disconnect, shared, cartpole, monkeypatch, tmp_path):
    load_from_hub(AGENT, revision=revision)
    disconnect(monkeypatch)
    assert acts_like(load_from_hub(AGENT, revision=revision), cartpole)
    assert hf_hub_download(AGENT, "sb3_ano.json", revision=revision), "huggingface_hub finds it, too"
    run = download_run(AGENT, tmp_path / "run", revision=revision)
    assert (run / "CartPole-v1.zip").is_file()
    with one_line(errors.LocalEntryNotFoundError, "somebody/agent at revision 'v2' is not in the cache .*; "):
        load_from_hub(AGENT, revision="v2")


def test_a_hub_that_fails_is_as_good_as_none(shared, cartpole):
    load_from_hub(AGENT)
    shared.fail = {"/api/models/somebody/agent": 503}
    assert acts_like(load_from_hub(AGENT), cartpole)


@pytest.mark.parametrize(
    ("disconnect", "reason"), [(offline, "HF_HUB_OFFLINE is set, and "), (out_of_reach, f"the Hub at {NOWHERE} ")]
)
def test_what_is_not_in_the_cache_is_one_line_without_a_directory(disconnect, reason, shared, monkeypatch, tmp_path):
    disconnect(monkeypatch)
    for call in (load_from_hub, lambda name: download_run(name, tmp_path / "logs" / "run")):
        with one_line(errors.LocalEntryNotFoundError, f"^{reason}.*somebody/agent at revision 'main' is not in the cache"):
            call(AGENT)
    assert not list((tmp_path / "logs").iterdir())


def test_a_push_without_the_hub_is_one_line(cartpole, hub, monkeypatch):
    out_of_reach(monkeypatch)
    with one_line(ConnectionError, f"^the Hub at {NOWHERE} cannot be reached: "):
        push_to_hub(cartpole, AGENT, **QUICK)


def test_the_newest_commit_is_taken_when_there_is_a_hub(shared, packed, pendulum, cartpole, tmp_path, monkeypatch):
    load_from_hub(AGENT)
    push_to_hub(pendulum, AGENT, **QUICK)
    assert load_from_hub(AGENT).observation_space.shape == (3,)
    offline(monkeypatch)
    assert load_from_hub(AGENT).observation_space.shape == (3,)
    assert load_from_hub(AGENT, revision=COMMIT).observation_space.shape == (4,)


def test_a_push_to_a_branch_leaves_the_others_alone(shared, packed, pendulum):
    page = push_to_hub(pendulum, AGENT, revision="lessons", **QUICK)
    assert page == f"{shared.url}/{AGENT}/tree/lessons"
    assert shared.repositories[AGENT] == [packed]
    assert shared.branches[AGENT]["best"] == [packed]
    assert load_from_hub(AGENT, revision="lessons").observation_space.shape == (3,)
    card = shared.branches[AGENT]["lessons"][-1]["README.md"].decode()
    assert f"load_from_hub({AGENT!r}, revision='lessons', env=env)" in card
    push_to_hub(pendulum, AGENT, revision="lessons", **QUICK)
    assert len(shared.branches[AGENT]["lessons"]) == 3


PASSWORD = "correct-horse"


@pytest.fixture
def with_password(shared, monkeypatch):
    """The address of the Hub has a user and a password in it, as behind a company's proxy."""
    address = shared.url.replace("http://", f"http://alice:{PASSWORD}@")
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    return shared


def test_errors_show_no_token_and_no_password(with_password, cartpole, capsys):
    secret = "hf_8sWq2RnYc5Jd"
    calls = [
        lambda: load_from_hub("somebody/other", token=secret),
        lambda: load_from_hub(AGENT, token=secret),
        lambda: push_to_hub(cartpole, AGENT, token=secret, **QUICK),
    ]
    for call in calls:
        with pytest.raises(OSError, match="127.0.0.1") as caught:
            call()
        shown = "".join(traceback.format_exception(caught.value, chain=True)) + repr(caught.value)
        for text in (secret, PASSWORD, "alice:", TOKEN):
            assert text not in shown
    output = capsys.readouterr()
    assert PASSWORD not in output.out + output.err


def test_the_address_of_a_lost_hub_has_no_password(with_password, cartpole, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", f"http://alice:{PASSWORD}@127.0.0.1:9")
    with one_line(errors.LocalEntryNotFoundError, "the Hub at http://.*127.0.0.1:9 cannot be reached") as _:
        load_from_hub(AGENT)
    for call in (lambda: load_from_hub(AGENT), lambda: push_to_hub(cartpole, AGENT, **QUICK)):
        with pytest.raises(OSError, match="cannot be reached") as caught:
            call()
        assert PASSWORD not in str(caught.value)


def with_secret_setting(model):
    model.note = {"login": f"token {TOKEN}"}
    return {}


def with_secret_log(model, run):
    run.mkdir()
    (run / "progress.csv").write_text(f"time,{TOKEN}\n")
    return {"run": run}


@pytest.mark.parametrize("where", ["attribute", "log"])
def test_no_token_is_published(where, hub, tmp_path):
    model = trained(steps=0)
    options = with_secret_setting(model) if where == "attribute" else with_secret_log(model, tmp_path / "run")
    with one_line(ValueError, r"\.zip/\S+ would publish a key, token or password; remove it"):
        push_to_hub(model, AGENT, **QUICK, **options)
    assert [set(files) for files in hub.repositories[AGENT]] == [{".gitattributes"}]


def test_no_password_of_an_environment_is_published(tmp_path, monkeypatch):
    """Nobody remembered it before: it is an argument of the environment, like its size."""
    spec = gym.envs.registration.EnvSpec("Locked-v0", "tests.tiny_envs:Locked", kwargs={"password": None})
    monkeypatch.setitem(gym.registry, spec.id, spec)
    password = "correct-horse-1"
    folder = package(trained(env=gym.make(spec.id, password=password), steps=0), tmp_path / "agent", AGENT, **QUICK)
    for path in folder.iterdir():
        assert password.encode() not in path.read_bytes(), path
    assert "'password': '***'" in (folder / "README.md").read_text()


def test_errors_of_every_kind_show_no_secret():
    """In a cause, a note, a group, an argument that is an error, and the parts of an OSError's text."""
    secret = "-".join(["hunter2", "and", "more"])  # so that tracebacks do not show it as source

    def fail():
        with safe_errors(secret):
            try:
                raise FileNotFoundError(2, f"no {secret}", f"/tmp/{secret}")
            except OSError as error:
                other = ValueError(secret)
                other.add_note(f"of {secret}")
                group = ExceptionGroup("two", [error, other])
                raise RuntimeError(KeyError(secret)) from group

    with pytest.raises(RuntimeError) as caught:
        fail()
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    assert secret not in shown
    assert shown.count("***") == 6
    assert "[Errno 2] no ***: '/tmp/***'" in shown


class Returns(gym.RewardWrapper):
    """Rewards of NaN or infinity at the end."""

    def __init__(self, env, value):
        super().__init__(env)
        self.value = value

    def reward(self, reward):
        return self.value


def strict_json(text):
    def reject(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=reject)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_returns_that_are_no_numbers_are_strict_json_and_no_metric(value, cartpole, pack):
    env = DummyVecEnv([lambda: Monitor(Returns(gym.make("CartPole-v1"), value))])
    with pytest.warns(UserWarning, match="the mean return is .*; results.json has null in its place"):
        folder = pack(cartpole, env)
    results = strict_json((folder / "results.json").read_text())
    assert (results["mean_reward"], results["episode_returns"]) == (None, [None])
    card = (folder / "README.md").read_text()
    assert not re.search(r"\.nan|\.inf|model-index", card.split("\n---\n")[0])
    strict_json(card.split("```json\n")[1].split("```")[0])


@pytest.fixture
def filed(monkeypatch):
    """A function that makes an environment from a file, or any other value."""
    spec = gym.envs.registration.EnvSpec("Filed-v0", "tests.tiny_envs:Filed", max_episode_steps=10)
    monkeypatch.setitem(gym.registry, spec.id, spec)
    return lambda file: make_vec_env(spec.id, backend="gymnasium", env_kwargs={"file": file})


def test_settings_that_are_infinite_are_strict_json_and_python(filed, pack):
    folder = pack(trained(steps=0, env=filed(float("inf")), max_grad_norm=float("inf")))
    assert strict_json((folder / "results.json").read_text())["env_kwargs"] == {"file": "inf"}
    card = (folder / "README.md").read_text()
    assert strict_json(card.split("```json\n")[1].split("```")[0])["max_grad_norm"] == "inf"
    assert "env_kwargs={'file': float('inf')}" in card
    assert yaml.safe_load((folder / "config.yml").read_text())["max_grad_norm"] == float("inf")


def test_files_of_this_machine_are_named_without_their_place(filed, pack, tmp_path):
    file = tmp_path / "alice_q7x" / "maze.npz"
    file.parent.mkdir()
    file.touch()
    folder = pack(trained(env=filed(str(file)), steps=0))
    for path in folder.iterdir():
        contents = [path.read_bytes()]
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                contents = [archive.read(name) for name in archive.namelist()]
        assert not any(b"q7x" in content for content in contents), path
    card = (folder / "README.md").read_text()
    assert "- `./maze.npz`: the author's file, in the current directory\n" in card
    assert "env_kwargs={'file': './maze.npz'}" in card


def test_environments_in_other_processes_are_named_with_the_remedy_and_the_remedy_makes_a_video(pack, capsys):
    remedy = r"SubprocVecEnv, which cannot be inspected; .*env=gym.make\({}, render_mode='rgb_array'\)"
    own = sb3_make_vec_env("CartPole-v1", 2, vec_env_cls=SubprocVecEnv, vec_env_kwargs={"start_method": "fork"})
    known = make_vec_env("CartPole-v1", 2, vec_env_cls=SubprocVecEnv, vec_env_kwargs={"start_method": "fork"})
    for env, name in ((own, "id"), (known, "'CartPole-v1'")):
        model = trained(env=env, steps=0)
        with one_line(ValueError, remedy.format(name)):
            pack(model)
        folder = pack(model, gym.make("CartPole-v1", render_mode="rgb_array"), video=True, video_length=3)
        assert (folder / "replay.mp4").is_file()
        pack(model, gym.make("CartPole-v1"), video=True)
        assert "made without render_mode='rgb_array'; make it with gym.make(id, render" in capsys.readouterr().out
        env.close()
