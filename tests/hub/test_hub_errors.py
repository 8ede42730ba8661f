"""Failures of the Hub and the connection leave nothing half done; what is wrong with a repository is one line."""

import time
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi, errors
from stable_baselines3 import PPO

from sb3_ano.hub import SafeFormatError, download_run, load_from_hub, push_to_hub
from tests.hub.agents import QUICK, one_line, trained
from tests.hub.hub_server import DROP


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """huggingface_hub tries again after seconds."""
    for module in ("huggingface_hub.file_download", "huggingface_hub.utils._http"):
        monkeypatch.setattr(f"{module}.time", SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None}))


def test_a_push_that_cannot_succeed_stops_before_anything_is_done(cartpole, hub, capsys):
    """users U6 c: a wrong class and a malformed id are reported without the Hub, a wrong token before the evaluation."""
    with one_line(TypeError, "model is of class PPO; allowed are SPO, PAPO, ANO"):
        push_to_hub(trained(PPO, steps=0), "somebody/agent", token="hf_wrong")
    for repo_id in ("a/b/c", "../agent"):
        for call in (lambda name: push_to_hub(cartpole, name), load_from_hub):
            with pytest.raises(ValueError, match="[Rr]epo id"):
                call(repo_id)
    assert not hub.requests
    with pytest.raises(OSError, match="Invalid credentials"):
        push_to_hub(cartpole, "somebody/agent", token="hf_wrong")
    assert capsys.readouterr().out == ""
    assert not hub.repositories


@pytest.mark.parametrize(
    ("repository", "error", "message"),
    [
        ("half", SafeFormatError, "somebody/half/policy.safetensors"),
        ("links", SafeFormatError, "is not a JSON file"),
        ("pickles", ValueError, "no agent in the safe format .*runs any code .*hf_hub_download and ANO.load"),
    ],
)
def test_what_is_wrong_with_a_repository_is_one_line(repository, error, message, pushed):
    """A pickle is not even downloaded. A link in a repository is a file with text."""
    files = pushed.repositories["somebody/agent"].files
    pushed.add("somebody/half", {"sb3_ano.json": files["sb3_ano.json"]})
    pushed.add("somebody/links", {**files, "sb3_ano.json": b"../../../../etc/passwd"})
    pushed.add("somebody/pickles", {"ano-x.zip": b"a pickle", "vec_normalize.pkl": b"a pickle"})
    with one_line(error, message):
        load_from_hub(f"somebody/{repository}")
    assert not any(name.endswith((".zip", ".pkl")) for name in pushed.fetched)


@pytest.mark.parametrize(
    ("pattern", "status"),
    [("GET .*/resolve/.*/policy.safetensors", DROP), ("POST .*/commit/main", 500), ("POST /api/repos/create", 403)],
)
def test_what_fails_leaves_directory_and_repository_as_they_were(pattern, status, pushed, pendulum, tmp_path):
    head = pushed.repositories["somebody/agent"].head
    pushed.fail = {pattern: status}
    calls = [lambda: download_run("somebody/agent", tmp_path / "agents" / "agent")]
    if pattern.startswith("POST"):
        calls = [lambda: push_to_hub(pendulum, "somebody/new" if "create" in pattern else "somebody/agent", **QUICK)]
    with pytest.raises((OSError, errors.HTTPError)):
        calls[0]()
    assert pushed.repositories["somebody/agent"].head == head
    assert "somebody/new" not in pushed.repositories
    assert not list(tmp_path.glob("agents/*"))


def test_a_repository_that_changes_meanwhile_is_not_overwritten(pushed, cartpole, monkeypatch):
    repository, info = pushed.repositories["somebody/agent"], HfApi.model_info

    def then_somebody_commits(*arguments, **options):
        found = info(*arguments, **options)
        repository.commit({**repository.files, "new.txt": b""})
        return found

    monkeypatch.setattr(HfApi, "model_info", then_somebody_commits)
    with pytest.raises(OSError, match="A commit has happened since"):
        push_to_hub(cartpole, "somebody/agent", **QUICK)
    assert "new.txt" in repository.files


def test_names_never_become_paths(hub, packed):
    names = ("../evil.zip", "/tmp/evil.zip", "..\\evil.zip", "evil\x00.zip", "./sb3_ano.json", "sb3_ano.json/../../evil")
    hostile = dict.fromkeys(names, b"evil")
    hub.add("somebody/hostile", hostile)
    with one_line(ValueError, "holds no agent"):
        load_from_hub("somebody/hostile")
    assert not hub.fetched, "a file was requested"
    hub.add("somebody/hostile", {**hostile, **packed})
    load_from_hub("somebody/hostile")
    assert hub.fetched == {"sb3_ano.json", "policy.safetensors", "results.json"}
