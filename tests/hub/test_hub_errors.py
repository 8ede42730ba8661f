"""Failures of the Hub, the connection and the disk: one clear line each, and nothing half done."""

import contextlib
import io
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import cloudpickle
import pytest
from stable_baselines3 import PPO

from sb3_ano.hub import HubError, SafeFormatError, download, load_from_hub, package, push_folder, push_to_hub

QUICK = {"n_eval_episodes": 1, "video": False, "verbose": 0}


@contextlib.contextmanager
def one_line(kind, pattern):
    """Expect an error of one line, without the chain of huggingface_hub's own errors."""
    with pytest.raises(kind, match=pattern) as caught:
        yield
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.fixture
def pushed(cartpole, hub):
    """A Hub with an agent on it."""
    push_to_hub(cartpole, "somebody/agent", **QUICK)
    hub.requests.clear()
    return hub


@pytest.fixture
def no_waiting(monkeypatch):
    """huggingface_hub tries again after seconds."""
    for module in ("huggingface_hub.file_download", "huggingface_hub.utils._http"):
        monkeypatch.setattr(f"{module}.time", SimpleNamespace(**{**vars(__import__("time")), "sleep": lambda seconds: None}))


def test_a_push_that_cannot_succeed_stops_before_anything_is_done(cartpole, hub, capsys, monkeypatch):
    """users U6 c: a wrong class is reported before a wrong token, which comes before the evaluation."""
    model = PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8)
    with one_line(TypeError, "model is of class PPO; allowed are SPO, PAPO, ANO"):
        push_to_hub(model, "no repository/at all", token="hf_wrong")
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


def test_what_the_hub_says_is_passed_on(pushed, cartpole, tmp_path):
    with one_line(HubError, "401 .*Invalid credentials"):
        load_from_hub("somebody/agent", token="hf_wrong")
    with one_line(HubError, "403 .*rights to create a model under this namespace"):
        push_to_hub(cartpole, "nobody/agent", **QUICK)
    with one_line(HubError, "download somebody/other: .*Repository Not Found"):
        download("somebody/other", tmp_path / "agent")
    with one_line(HubError, "download somebody/agent: .*Revision Not Found"):
        load_from_hub("somebody/agent", revision="v2")
    with one_line(HubError, "download ppo-CartPole-v1.zip of somebody/agent: .*Entry Not Found"):
        load_from_hub("somebody/agent", trust_remote_code=True, filename="ppo-CartPole-v1.zip")
    files = pushed.repositories["somebody/agent"].files
    pushed.add("somebody/half", {"sb3_ano.json": files["sb3_ano.json"]})
    with one_line(SafeFormatError, "somebody/half.*policy.safetensors"):
        load_from_hub("somebody/half")
    # A link in a repository is a file with text.
    pushed.add("somebody/links", {**files, "sb3_ano.json": b"../../../../etc/passwd"})
    with one_line(SafeFormatError, "not valid JSON"):
        load_from_hub("somebody/links")
    pushed.fail = {"HEAD .*policy.safetensors": 403}
    with one_line(HubError, "download policy.safetensors of somebody/agent: .*403"):
        load_from_hub("somebody/agent")
    pushed.fail = {"POST .*/commit/main": 500}
    with one_line(HubError, "500 .*as the test asks for"):
        push_to_hub(cartpole, "somebody/agent", **QUICK)
    assert not list(tmp_path.glob("*agent*"))


@pytest.mark.parametrize("repo_id", ["agent", "a/b/c", "some body/agent", "../agent", "somebody/agent.git", ""])
def test_malformed_ids_are_rejected_without_asking_the_hub(repo_id, cartpole, hub, tmp_path):
    for call in (
        lambda: load_from_hub(repo_id),
        lambda: push_to_hub(cartpole, repo_id),
        lambda: push_folder(tmp_path, repo_id),
    ):
        with one_line(ValueError, "repo_id="):
            call()
    assert not hub.requests


def test_no_connection_is_one_line_at_once(cartpole, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    for call in (lambda: load_from_hub("somebody/agent"), lambda: push_to_hub(cartpole, "somebody/agent")):
        with one_line(HubError, "refused"):
            call()


def test_a_download_survives_dropped_connections(pushed, cartpole, no_waiting):
    pushed.drop, pushed.drops = "GET .*resolve.*/policy.safetensors", 2
    assert load_from_hub("somebody/agent").num_timesteps == cartpole.num_timesteps
    assert pushed.drops == 0


@pytest.mark.parametrize("dropped", ["GET .*resolve.*/policy.safetensors", "HEAD .*resolve.*/policy.safetensors"])
def test_a_connection_that_keeps_dropping_leaves_no_directory(dropped, pushed, no_waiting, tmp_path):
    pushed.drop, pushed.drops = dropped, 10**6
    with one_line(HubError, "download policy.safetensors of somebody/agent: (?!LocalEntryNotFoundError)"):
        download("somebody/agent", tmp_path / "agents" / "agent")
    assert not list((tmp_path / "agents").iterdir())
    pushed.drops = 0
    download("somebody/agent", tmp_path / "agents" / "agent")


@pytest.mark.parametrize("dropped", ["POST .*/commit/main", "POST .*/preupload/main"])
def test_a_push_that_is_cut_off_leaves_the_repository_as_it_was(dropped, pushed, pendulum, no_waiting):
    before = pushed.repositories["somebody/agent"].head
    pushed.drop, pushed.drops = dropped, 10**6
    with one_line(HubError, "push to somebody/agent: "):
        push_to_hub(pendulum, "somebody/agent", **QUICK)
    assert pushed.repositories["somebody/agent"].head == before


def test_a_repository_that_changes_meanwhile_is_not_overwritten(pushed, cartpole, tmp_path, monkeypatch):
    from huggingface_hub import HfApi

    folder = package(cartpole, tmp_path / "agent", "somebody/agent", **QUICK)
    repository, info = pushed.repositories["somebody/agent"], HfApi.model_info

    def then_somebody_commits(self, *args, **kwargs):
        found = info(self, *args, **kwargs)
        repository.commit({**repository.files, "new.txt": b""})
        return found

    monkeypatch.setattr(HfApi, "model_info", then_somebody_commits)
    with one_line(HubError, "412 .*A commit has happened since"):
        push_folder(folder, "somebody/agent")
    assert "new.txt" in repository.files


FULL_DISK = """
import resource
from sb3_ano.hub import download, load_from_hub, push_to_hub
model = load_from_hub("somebody/agent", cache_dir="other_cache")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for call in (
    lambda: download("somebody/agent", "agents/agent"),
    lambda: push_to_hub(model, "somebody/new", "CartPole-v1", n_eval_episodes=1, verbose=0),
):
    try:
        call()
    except OSError as error:
        print(f"{type(error).__name__}: {error}")
"""


def test_a_full_disk_is_one_line_and_leaves_nothing_half_done(pushed, tmp_path, monkeypatch):
    """The system lets no file grow beyond 1000 bytes, which looks like a full disk to every writer."""
    place, temporary = tmp_path / "place", tmp_path / "temporary"
    place.mkdir()
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    run = subprocess.run([sys.executable, "-c", FULL_DISK], capture_output=True, text=True, cwd=place, timeout=120)
    assert run.returncode == 0, run.stderr
    pulled, push = run.stdout.splitlines()
    assert pulled.startswith("HubError: cannot download sb3_ano.json of somebody/agent: OSError: [Errno 27] File too large")
    assert push.startswith("HubError: cannot push to somebody/new: OSError: [Errno 27] File too large")
    assert sorted(path.name for path in place.iterdir()) == ["agents", "other_cache"]
    assert not list((place / "agents").iterdir())
    assert not list(temporary.iterdir())
    assert "somebody/new" not in pushed.repositories


class _Canary:
    """Write a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_a_pickle_is_not_even_downloaded_unless_its_author_is_trusted(hub, tmp_path):
    canary = cloudpickle.dumps(_Canary(tmp_path / "canary"))
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("data", canary)
    hub.add("somebody/zoo", {"ano-CartPole-v1.zip": archive.getvalue(), "vec_normalize.pkl": canary})
    with one_line(ValueError, r"no safe format, only ano-CartPole-v1.zip, .*runs any code .*pass trust_remote_code=True"):
        load_from_hub("somebody/zoo")
    with one_line(ValueError, "trust_remote_code"):
        download("somebody/zoo", tmp_path / "agent")
    assert hub.count("/resolve/") == 0
    assert not (tmp_path / "canary").exists()


def test_trusted_files_are_those_of_one_agent_of_ours(hub, tmp_path):
    PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8).save(tmp_path / "ppo")
    hub.add("somebody/ppo", {"ppo-CartPole-v1.zip": (tmp_path / "ppo.zip").read_bytes()})
    with one_line(ValueError, "ppo-CartPole-v1.zip was not saved by sb3_ano"):
        load_from_hub("somebody/ppo", trust_remote_code=True)
    hub.add("somebody/two", {"ano-a.zip": b"", "ano-b.zip": b"", "train_eval_metrics.zip": b""})
    with one_line(ValueError, "several saved models, ano-a.zip, ano-b.zip; choose one with filename="):
        load_from_hub("somebody/two", trust_remote_code=True)


HOSTILE_NAMES = [
    "../evil.zip", "../../evil.zip", "/tmp/evil.zip", "a/../../evil.zip", "folder/evil.zip", "..\\evil.zip", ".evil.zip",
    "evil.zip\n", "evil\x00.zip", "evil.zip/..", "~/evil.zip", "$(touch evil).zip", "-rf.zip", "e" * 300 + ".zip",
    "../sb3_ano.json", "./sb3_ano.json", "sb3_ano.json/../../evil", "SB3_ANO.JSON", "%2e%2e/evil.zip",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_names_never_become_paths(name, hub, tmp_path):
    hub.add("somebody/hostile", {name: b"evil"})
    for call in (
        lambda: load_from_hub("somebody/hostile"),
        lambda: load_from_hub("somebody/hostile", trust_remote_code=True),
        lambda: download("somebody/hostile", tmp_path / "agent"),
    ):
        with one_line(ValueError, "holds no agent"):
            call()
    with one_line(ValueError, "filename="):
        load_from_hub("somebody/hostile", trust_remote_code=True, filename=name)
    assert hub.count("/resolve/") == 0, "a file was requested"
    assert [path.name for path in tmp_path.iterdir() if path.name != "hf_home"] == []


def test_a_file_that_is_too_large_is_not_downloaded(pushed):
    with one_line(HubError, "sb3_ano.json of somebody/agent: it has [0-9,]+ bytes; allowed are 1,000"):
        load_from_hub("somebody/agent", max_bytes=1000)
    assert pushed.count("/resolve/") == 0
