"""Failures of the Hub and the connection leave nothing half done; what is wrong with a repository is one line."""

import time
from pathlib import Path

import pytest
from huggingface_hub import HfApi, constants, errors
from stable_baselines3 import PPO

from sb3_ano.hub import SafeFormatError, download_run, load_from_hub, push_to_hub
from tests.hub.agents import QUICK, acts_like, one_line, trained
from tests.hub.hub_server import DROP


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """huggingface_hub tries again after seconds."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


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
    ("call", "pattern", "status"),
    [
        (lambda model, path: download_run("somebody/agent", path), "GET .*/resolve/.*/policy.safetensors", DROP),
        (lambda model, path: push_to_hub(model, "somebody/agent", **QUICK), "POST .*/commit/main", 500),
        (lambda model, path: push_to_hub(model, "somebody/new", **QUICK), "POST /api/repos/create", 403),
    ],
)
def test_what_fails_leaves_directory_and_repository_as_they_were(call, pattern, status, hub, packed, pendulum, tmp_path):
    hub.add("somebody/agent", packed)
    before = {name: repository.head for name, repository in hub.repositories.items()}
    hub.fail = {pattern: status}
    with pytest.raises((OSError, errors.HTTPError)):
        call(pendulum, tmp_path / "agents" / "agent")
    assert {name: repository.head for name, repository in hub.repositories.items()} == before
    assert not list(tmp_path.glob("agents/*"))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"repo_id": "somebody/other"}, errors.RepositoryNotFoundError, "Repository Not Found"),
        ({"revision": "v2"}, errors.RevisionNotFoundError, "Invalid rev id: v2"),
        ({"token": "hf_wrong"}, OSError, "Invalid credentials"),
    ],
)
def test_a_load_that_cannot_succeed_raises_the_error_of_huggingface_hub(options, kind, message, hub, packed):
    hub.add("somebody/agent", packed)
    with pytest.raises(kind, match=message):
        load_from_hub(**{"repo_id": "somebody/agent", **options})


def test_a_repository_that_changes_meanwhile_is_read_as_it_was_and_not_overwritten(hub, packed, cartpole, monkeypatch):
    hub.add("somebody/agent", packed)
    repository, info = hub.repositories["somebody/agent"], HfApi.model_info

    def then_somebody_commits(*arguments, **options):
        found = info(*arguments, **options)
        repository.commit({**repository.files, "new.txt": b"", "policy.safetensors": b"of another agent"})
        return found

    monkeypatch.setattr(HfApi, "model_info", then_somebody_commits)
    assert acts_like(load_from_hub("somebody/agent"), cartpole), "all files are of one commit"
    with pytest.raises(OSError, match="A commit has happened since"):
        push_to_hub(cartpole, "somebody/agent", **QUICK)
    assert "new.txt" in repository.files


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
