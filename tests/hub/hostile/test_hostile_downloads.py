"""A hostile repository: no module of its choice is imported, no environment is made, and nothing large is downloaded."""

import json
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import gymnasium as gym
import pytest
import yaml
from huggingface_hub import HfApi

from sb3_ano.hub import HubError, download, download_run, load_from_hub, save_safe
from tests.hub.agents import trained

REPOSITORY = "somebody/ano-CartPole-v1"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files of an agent of CartPole."""
    folder = save_safe(trained(), tmp_path_factory.mktemp("files") / "agent")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def shared(hub, files):
    """A function that puts the agent on the Hub, with results.json as given."""

    def add(task, **others):
        content = task if isinstance(task, bytes) else json.dumps(task).encode()
        hub.add(REPOSITORY, {**files, "results.json": content, **others})

    return add


@pytest.fixture
def no_environments(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError(f"an environment was made: {arguments} {options}")

    for name in ("make", "make_vec", "spec"):
        monkeypatch.setattr(gym, name, refuse)
    monkeypatch.setattr("gymnasium.envs.registration.make", refuse)


# Review safety H1, and the row of download_run among the unclear errors.
HOSTILE_IDS = [
    "train:CartPole-v1", "this:CartPole-v1", "test.__main__:CartPole-v1", "evil_agent.evil:CartPole-v1", ":CartPole-v1",
    "a:b:c", "", ".", "..", "../../CartPole-v1", "/etc/passwd", "x" * 300, "CartPole", "CartPole-v1\n", "CartPole-v1\0",
    "\x1b]0;title\x07CartPole-v1", "Nowhere-v0", "NoFrameskip:Pong", "ALE/../Pong-v5",
]  # fmt: skip


@pytest.mark.parametrize("env_id", HOSTILE_IDS)
def test_an_id_is_only_looked_up(env_id, shared, no_environments, tmp_path, monkeypatch):
    for name in ("train.py", "evil_agent/evil.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    modules = set(sys.modules)
    shared({"env_id": env_id})
    with pytest.raises(ValueError, match=f"{REPOSITORY}/results.json names the environment .* not registered here") as caught:
        download_run(REPOSITORY, tmp_path / "run")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
    assert not {name for name in set(sys.modules) - modules if name.split(".")[0] in ("train", "this", "test", "evil_agent")}
    assert not (tmp_path / "run").exists()


# Review safety H2: files elsewhere, memory, executables.
HOSTILE_SETTINGS = {
    "HalfCheetah-v5": {"xml_file": "/etc/passwd"},
    "FrozenLake-v1": {"desc": ["S" + "F" * 999] * 1000},
    "ALE/Pong-v5": {"screen_size": 60_000, "frame_stack": 3_000_000},
    "CartPole-v1": {"vzd_path": "/bin/sh", "game_args": "-c reboot"},
}


@pytest.mark.parametrize("env_id", HOSTILE_SETTINGS)
def test_settings_of_an_environment_are_shown_and_left_out(env_id, shared, no_environments, tmp_path):
    settings = HOSTILE_SETTINGS[env_id]
    shared({"env_id": env_id, "env_kwargs": settings})
    with pytest.warns(UserWarning, match=f"env_kwargs=.*{next(iter(settings))}.* are left out") as caught:
        run = download_run(REPOSITORY, tmp_path / "run")
    assert len(str(caught[0].message)) < 500
    name = env_id.replace("/", "-")
    arguments = yaml.safe_load((run / name / "args.yml").read_text())
    assert (arguments["env"], arguments["env_kwargs"]) == (env_id, {})
    assert yaml.safe_load((run / name / "env_kwargs.yml").read_text()) == {}
    assert (run / f"{name}.zip").is_file()


def test_settings_are_kept_for_those_who_trust_their_author(shared, no_environments, tmp_path):
    shared({"env_id": "CartPole-v1", "env_kwargs": {"sutton_barto_reward": True}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = download_run(REPOSITORY, tmp_path / "run", trust_remote_code=True)
    assert yaml.safe_load((run / "CartPole-v1" / "args.yml").read_text())["env_kwargs"] == {"sutton_barto_reward": True}
    shared({"env_id": "this:CartPole-v1"})
    with pytest.raises(ValueError, match="not registered here"):
        download_run(REPOSITORY, tmp_path / "other", trust_remote_code=True)


def test_the_environment_is_the_one_that_was_asked_for(shared, tmp_path):
    """Review safety H8: an agent for CartPole-v0 was taken for one of CartPole-v1."""
    shared({"env_id": "CartPole-v0"})
    with pytest.raises(ValueError, match=f"{REPOSITORY} holds an agent for CartPole-v0, not for CartPole-v1"):
        download_run(REPOSITORY, tmp_path / "run", env_id="CartPole-v1")
    download_run(REPOSITORY, tmp_path / "run", env_id="CartPole-v0")


@pytest.mark.parametrize("content", [b"{", b"[]", b"[" * 100_000, b'{"env_id": ["CartPole-v1"]}', b" " * 2**22 + b"{}"])
def test_results_that_name_no_environment_are_refused(content, shared, tmp_path):
    shared(content)
    with pytest.raises(ValueError, match=f"{REPOSITORY}/results.json does not name the agent's environment"):
        download_run(REPOSITORY, tmp_path / "run")


def test_loading_makes_no_environment_and_needs_none(shared, no_environments):
    shared({"env_id": "this:CartPole-v1", "env_kwargs": {"x": 1}})
    model = load_from_hub(REPOSITORY)
    assert model.get_env() is None
    assert "this" not in sys.modules


# Review safety H8: max_bytes.


def test_the_files_together_have_a_limit(shared, files, tmp_path):
    shared({"env_id": "CartPole-v1"})
    total = sum(map(len, files.values())) + len(json.dumps({"env_id": "CartPole-v1"}))
    download(REPOSITORY, tmp_path / "agent", max_bytes=total)
    with pytest.raises(HubError, match="allowed are .* more, see max_bytes="):
        download(REPOSITORY, tmp_path / "agent", max_bytes=total - 1)


@pytest.mark.parametrize(("listed", "message"), [(None, "does not say how large"), (10, r"has [0-9,]+ bytes, not 10")])
def test_a_size_that_is_unknown_or_wrong_is_refused(listed, message, shared, hub, monkeypatch):
    shared({"env_id": "CartPole-v1"})
    names = hub.repositories[REPOSITORY].files
    siblings = [SimpleNamespace(rfilename=name, size=listed) for name in names]
    commit = hub.repositories[REPOSITORY].head
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: SimpleNamespace(sha=commit, siblings=siblings))
    with pytest.raises(HubError, match=message):
        load_from_hub(REPOSITORY, max_bytes=1000)


def test_hundreds_of_models_are_one_short_line(hub):
    hub.add("somebody/many", {f"ano-{'x' * 40}-{index}.zip": b"" for index in range(300)})
    with pytest.raises(ValueError, match="several saved models, .* and 295 more; choose one") as caught:
        load_from_hub("somebody/many", trust_remote_code=True)
    assert len(str(caught.value)) < 500


IN_THE_FOLDER = """
import os, sys
import sb3_ano.hub
sys.path.insert(0, "")
os.chdir(sys.argv[1])
model = sb3_ano.hub.load_safe(".")
model.predict(model.observation_space.sample())
assert sys.path[0] == ""
"""


def test_a_folder_supplies_no_modules_even_if_it_is_the_current_one(files, tmp_path):
    """Review safety H7: packages that PyTorch imports late, and those that this package imports late."""
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for name in ("sympy", "mpmath", "triton", "optree", "networkx", "pandas", "onnx", "safetensors", "huggingface_hub"):
        (tmp_path / f"{name}.py").write_text(f"print('{name} ran')\nraise SystemExit(9)")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_FOLDER, str(tmp_path)], capture_output=True, text=True, cwd="/", env=environment
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
