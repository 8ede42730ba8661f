"""Failures of the Hub, the connection and the disk: one clear line each, and nothing half done."""

import resource
import time
from types import SimpleNamespace

import gymnasium as gym
import pytest
from huggingface_hub import HfApi
from stable_baselines3 import PPO

from sb3_ano.hub import HubError, SafeFormatError, download_run, load_from_hub, push_to_hub, save_safe
from tests.hub.agents import QUICK, one_line, trained
from tests.hub.hub_server import DROP


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """huggingface_hub tries again after seconds."""
    for module in ("huggingface_hub.file_download", "huggingface_hub.utils._http"):
        monkeypatch.setattr(f"{module}.time", SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None}))


def test_a_push_that_cannot_succeed_stops_before_anything_is_done(cartpole, hub, capsys, monkeypatch):
    """users U6 c: a wrong class is reported before a wrong token, which comes before the evaluation."""
    with one_line(TypeError, "model is of class PPO; allowed are SPO, PAPO, ANO"):
        push_to_hub(trained(PPO, steps=0), "no repository/at all", token="hf_wrong")
    assert not hub.requests
    with one_line(HubError, "push to somebody/agent: .*Invalid user token"):
        push_to_hub(cartpole, "somebody/agent", token="hf_wrong")
    monkeypatch.delenv("HF_TOKEN")
    for name in ("HF_TOKEN_PATH", "HF_STORED_TOKENS_PATH"):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", "/nonexistent")
    with one_line(HubError, "no token found.*hf auth login"):
        push_to_hub(cartpole, "somebody/agent")
    assert capsys.readouterr().out == ""
    assert not hub.repositories


@pytest.mark.parametrize(
    ("repository", "options", "error", "message"),
    [
        ("agent", {"token": "hf_wrong"}, HubError, "401 .*Invalid credentials"),
        ("agent", {"revision": "v2"}, HubError, "download somebody/agent: .*Revision Not Found"),
        ("other", {}, HubError, "download somebody/other: .*Repository Not Found"),
        ("half", {}, SafeFormatError, "somebody/half.*policy.safetensors"),
        ("links", {}, SafeFormatError, "not valid JSON"),
        ("pickles", {}, ValueError, "no agent in the safe format .*runs any code .*hf_hub_download and ANO.load"),
    ],
)
def test_what_is_wrong_with_a_repository_is_one_line(repository, options, error, message, pushed):
    """A pickle is not even downloaded. A link in a repository is a file with text."""
    files = pushed.repositories["somebody/agent"].files
    pushed.add("somebody/half", {"sb3_ano.json": files["sb3_ano.json"]})
    pushed.add("somebody/links", {**files, "sb3_ano.json": b"../../../../etc/passwd"})
    pushed.add("somebody/pickles", {"ano-x.zip": b"a pickle", "vec_normalize.pkl": b"a pickle"})
    with one_line(error, message):
        load_from_hub(f"somebody/{repository}", **options)
    assert not any(name.endswith((".zip", ".pkl")) for name in pushed.fetched)


POLICY = "/resolve/.*/policy.safetensors"
PULLING = "download somebody/agent: (?!LocalEntryNotFoundError)"


@pytest.mark.parametrize(
    ("pattern", "status", "message"),
    [
        (f"GET .*{POLICY}", DROP, PULLING),
        (f"HEAD .*{POLICY}", DROP, PULLING),
        (f"HEAD .*{POLICY}", 403, f"{PULLING}.*403"),
        ("GET /api/models", DROP, "download somebody/agent: "),
        ("POST .*/commit/main", DROP, "push to somebody/agent: "),
        ("POST .*/preupload/main", DROP, "push to somebody/agent: "),
        ("POST .*/commit/main", 500, "push to somebody/agent: .*500 .*as the test asks for"),
        ("POST /api/repos/create", 403, "push to somebody/new: .*403 .*as the test asks for"),
    ],
)
def test_what_fails_leaves_directory_and_repository_as_they_were(pattern, status, message, pushed, pendulum, tmp_path):
    head = pushed.repositories["somebody/agent"].head
    pushed.fail = {pattern: status}
    with one_line(HubError, message):
        if pattern.startswith("POST"):
            push_to_hub(pendulum, "somebody/new" if "create" in pattern else "somebody/agent", **QUICK)
        else:
            download_run("somebody/agent", tmp_path / "agents" / "agent")
    assert pushed.repositories["somebody/agent"].head == head
    assert "somebody/new" not in pushed.repositories
    assert not list(tmp_path.glob("agents/*"))


def test_single_dropped_connections_are_survived(pushed):
    pushed.fail, pushed.failures = {f"GET .*{POLICY}": DROP}, 2
    load_from_hub("somebody/agent")
    assert pushed.failures == 0


def test_a_repository_that_changes_meanwhile_is_not_overwritten(pushed, cartpole, monkeypatch):
    repository, info = pushed.repositories["somebody/agent"], HfApi.model_info

    def then_somebody_commits(*arguments, **options):
        found = info(*arguments, **options)
        repository.commit({**repository.files, "new.txt": b""})
        return found

    monkeypatch.setattr(HfApi, "model_info", then_somebody_commits)
    with one_line(HubError, "412 .*A commit has happened since"):
        push_to_hub(cartpole, "somebody/agent", **QUICK)
    assert "new.txt" in repository.files


@pytest.mark.parametrize("repo_id", ["agent", "a/b/c", "some body/agent", "../agent", "somebody/agent.git", ""])
def test_malformed_ids_are_rejected_without_asking_the_hub(repo_id, cartpole, hub):
    with one_line(ValueError, "repo_id=|[Rr]epo id|Repo_id"):
        push_to_hub(cartpole, repo_id)
    assert not hub.requests


def test_no_connection_is_one_line_at_once(cartpole, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    for call in (lambda: load_from_hub("somebody/agent"), lambda: push_to_hub(cartpole, "somebody/agent")):
        with one_line(HubError, "refused"):
            call()


def test_a_full_disk_is_one_line_and_leaves_nothing_half_done(pushed, tmp_path, monkeypatch):
    """The system lets no file grow beyond 1000 bytes, which looks like a full disk to every writer."""
    agents, temporary = tmp_path / "agents", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    model = load_from_hub("somebody/agent")
    old = {path.name: path.read_bytes() for path in save_safe(model, agents / "old").iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match=r"^\[Errno 27\] File too large"):
            save_safe(model, agents / "old")
        with one_line(HubError, "cannot download somebody/agent: OSError: .Errno 27. File too large"):
            download_run("somebody/agent", agents / "agent")
        with one_line(HubError, "cannot push to somebody/new: OSError: .Errno 27. File too large"):
            push_to_hub(model, "somebody/new", gym.make("CartPole-v1"), **QUICK)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in agents.iterdir()] == ["old"]
    assert {path.name: path.read_bytes() for path in (agents / "old").iterdir()} == old
    assert not list(temporary.iterdir())
    assert "somebody/new" not in pushed.repositories


HOSTILE_NAMES = [
    "../evil.zip", "/tmp/evil.zip", "a/../../evil.zip", "..\\evil.zip", "evil.zip\n", "evil\x00.zip", "$(touch evil).zip",
    "../sb3_ano.json", "./sb3_ano.json", "sb3_ano.json/../../evil", "SB3_ANO.JSON", "%2e%2e/evil.zip", "e" * 300 + ".zip",
]  # fmt: skip


def test_names_never_become_paths(hub, packed):
    hostile = dict.fromkeys(HOSTILE_NAMES, b"evil")
    hub.add("somebody/hostile", hostile)
    with one_line(ValueError, "holds no agent"):
        load_from_hub("somebody/hostile")
    assert not hub.fetched, "a file was requested"
    hub.add("somebody/hostile", {**hostile, **packed})
    load_from_hub("somebody/hostile")
    assert hub.fetched == {"sb3_ano.json", "policy.safetensors", "results.json"}
