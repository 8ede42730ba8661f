"""What goes wrong between here and the Hub: one clear line each, and nothing half done."""

import contextlib
import io
import subprocess
import sys
import time
import types
import zipfile

import pytest
from stable_baselines3 import PPO

from sb3_ano.hub.documents import SafeFormatError
from sb3_ano.hub.errors import HubError
from sb3_ano.hub.packaging import package
from sb3_ano.hub.pull import download, load_from_hub
from sb3_ano.hub.push import push_folder, push_to_hub
from tests.hub.hub_server import uploads_warn

pytestmark = uploads_warn
QUICK = {"n_eval_episodes": 1, "video": False, "verbose": 0}


@contextlib.contextmanager
def one_line(kind, pattern):
    """An error of one line, that shows nothing of huggingface_hub's inside."""
    with pytest.raises(kind, match=pattern) as caught:
        yield
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.fixture
def pushed(cartpole, hub, tmp_path_factory):
    """A Hub with an agent on it."""
    push_to_hub(cartpole, "somebody/agent", **QUICK)
    hub.requests.clear()
    return hub


@pytest.fixture
def no_waiting(monkeypatch):
    """huggingface_hub tries again after seconds."""
    hurried = types.ModuleType("time")
    vars(hurried).update(vars(time))
    hurried.sleep = lambda seconds: None
    for module in ("huggingface_hub.file_download", "huggingface_hub.utils._http"):
        monkeypatch.setattr(f"{module}.time", hurried)


def test_a_wrong_token_is_noticed_before_anything_is_done(cartpole, hub, capsys):
    with one_line(HubError, "push to somebody/agent: the Hub does not accept the token"):
        push_to_hub(cartpole, "somebody/agent", token="hf_wrong")
    assert capsys.readouterr().out == ""
    assert not hub.repositories


def test_a_model_that_no_token_would_help_is_refused_first(hub):
    """users U6 c"""
    model = PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8)
    with one_line(TypeError, "model is of class PPO; allowed are ANO, SPO, PAPO"):
        push_to_hub(model, "no repository/at all", token="hf_wrong")
    assert not hub.requests


def test_no_token_says_how_to_log_in(cartpole, hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nonexistent")
    monkeypatch.setattr("huggingface_hub.constants.HF_STORED_TOKENS_PATH", "/nonexistent")
    with one_line(HubError, "no token was found; log in with 'hf auth login'"):
        push_to_hub(cartpole, "somebody/agent", **QUICK)


def test_a_wrong_token_is_no_missing_repository(pushed, tmp_path):
    with one_line(HubError, "the Hub does not accept the token"):
        load_from_hub("somebody/agent", token="hf_wrong")
    with one_line(HubError, "the Hub does not accept the token"):
        download("somebody/agent", tmp_path / "agent", token="hf_wrong")
    assert not (tmp_path / "agent").exists()


def test_somebody_elses_name_space_is_refused(cartpole, hub):
    with one_line(HubError, "the token may not do that"):
        push_to_hub(cartpole, "nobody/agent", **QUICK)


def test_missing_repositories_revisions_and_files_are_named(pushed, tmp_path):
    with one_line(HubError, "download somebody/other: there is no such repository"):
        load_from_hub("somebody/other")
    with one_line(HubError, "download somebody/agent: it has no such revision"):
        load_from_hub("somebody/agent", revision="v2")
    with one_line(HubError, "download ppo-CartPole-v1.zip of somebody/agent: it has no such file"):
        load_from_hub("somebody/agent", trust_remote_code=True, filename="ppo-CartPole-v1.zip")
    pushed.add("somebody/half", {"sb3_ano.json": pushed.repositories["somebody/agent"].files["sb3_ano.json"]})
    with one_line(ValueError, "policy.safetensors"):
        load_from_hub("somebody/half")
    with one_line(HubError, "no such repository"):
        download("somebody/other", tmp_path / "agent")
    assert not list(tmp_path.glob("agent*")) + list(tmp_path.glob(".agent*"))


@pytest.mark.parametrize("repo_id", ["agent", "a/b/c", "some body/agent", "../agent", "somebody/agent.git", ""])
def test_malformed_names_are_refused_without_asking_the_hub(repo_id, cartpole, hub, tmp_path):
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
        with one_line(HubError, "the connection failed .*refused"):
            call()


def test_a_download_survives_a_dropped_connection(pushed, cartpole, no_waiting):
    pushed.drop, pushed.drops = "GET /lfs/", 2
    assert load_from_hub("somebody/agent").num_timesteps == cartpole.num_timesteps
    assert pushed.drops == 0


@pytest.mark.parametrize("dropped", ["GET /lfs/", "GET .*resolve.*/sb3_ano.json"])
def test_a_connection_that_keeps_dropping_leaves_no_folder(dropped, pushed, no_waiting, tmp_path):
    pushed.drop, pushed.drops = dropped, 10**6
    with one_line(HubError, "download (policy.safetensors|sb3_ano.json) of somebody/agent: the connection failed"):
        download("somebody/agent", tmp_path / "agents" / "agent")
    assert not list((tmp_path / "agents").iterdir())
    cache = tmp_path / "hf_home" / "hub"
    assert not list(cache.rglob("*.incomplete"))
    pushed.drops = 0
    download("somebody/agent", tmp_path / "agents" / "agent")


@pytest.mark.parametrize("dropped", ["PUT /lfs/", "POST .*/commit/main", "POST .*/preupload/main"])
def test_a_push_that_is_cut_off_leaves_the_repository_as_it_was(dropped, pushed, pendulum, no_waiting):
    before = pushed.repositories["somebody/agent"].head
    pushed.drop, pushed.drops = dropped, 10**6
    with one_line(HubError, "push to somebody/agent: the connection failed"):
        push_to_hub(pendulum, "somebody/agent", **QUICK)
    assert pushed.repositories["somebody/agent"].head == before


def test_a_repository_that_changes_meanwhile_is_not_overwritten(pushed, cartpole, tmp_path, monkeypatch):
    folder = package(cartpole, tmp_path / "agent", "somebody/agent", **QUICK)
    repository = pushed.repositories["somebody/agent"]
    from huggingface_hub import HfApi

    info = HfApi.model_info

    def then_somebody_commits(self, *args, **kwargs):
        found = info(self, *args, **kwargs)
        repository.commit({**repository.files, "new.txt": b""})
        return found

    monkeypatch.setattr(HfApi, "model_info", then_somebody_commits)
    with one_line(HubError, "changed meanwhile"):
        push_folder(folder, "somebody/agent")
    assert "new.txt" in repository.files


def test_what_the_hub_itself_says_is_passed_on(pushed, cartpole):
    pushed.fail["POST .*/commit/main"] = 500
    with one_line(HubError, "the Hub answered 500: as the test asks for"):
        push_to_hub(cartpole, "somebody/agent", **QUICK)


FULL_DISK = """
import resource
from sb3_ano.hub.pull import download, load_from_hub
from sb3_ano.hub.push import push_to_hub
model = load_from_hub("somebody/agent", cache_dir="other_cache")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for call in (
    lambda: download("somebody/agent", "agents/agent"),
    lambda: load_from_hub("somebody/agent"),
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
    *downloads, push = run.stdout.splitlines()
    assert len(downloads) == 2
    for line in downloads:
        assert line.startswith("HubError: cannot download sb3_ano.json of somebody/agent: File too large")
    assert push == "HubError: cannot push to somebody/new: File too large"
    assert sorted(path.name for path in place.iterdir()) == ["agents", "other_cache"]
    assert not list((place / "agents").iterdir())
    assert not list(temporary.iterdir())
    assert "somebody/new" not in pushed.repositories


class _Canary:
    """Unpickled, it leaves a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_a_pickle_is_not_even_downloaded_unless_its_author_is_trusted(hub, tmp_path):
    import cloudpickle

    canary = tmp_path / "canary"
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("data", cloudpickle.dumps(_Canary(canary)))
    hub.add(
        "somebody/zoo", {"ano-CartPole-v1.zip": archive.getvalue(), "vec_normalize.pkl": cloudpickle.dumps(_Canary(canary))}
    )
    with one_line(ValueError, r"no safe format, only ano-CartPole-v1.zip, .*runs any code .*pass trust_remote_code=True"):
        load_from_hub("somebody/zoo")
    with one_line(ValueError, "trust_remote_code"):
        download("somebody/zoo", tmp_path / "agent")
    assert hub.count("/resolve/") == 0
    assert not canary.exists()


def test_an_agent_of_another_library_is_named_as_such(hub, tmp_path):
    PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8).save(tmp_path / "ppo")
    hub.add("somebody/ppo", {"ppo-CartPole-v1.zip": (tmp_path / "ppo.zip").read_bytes()})
    with one_line(ValueError, "was not saved by sb3_ano"):
        load_from_hub("somebody/ppo", trust_remote_code=True)


HOSTILE_NAMES = [
    "../evil.zip",
    "../../evil.zip",
    "/tmp/evil.zip",
    "a/../../evil.zip",
    "folder/evil.zip",
    "..\\evil.zip",
    ".evil.zip",
    "evil.zip\n",
    "evil\x00.zip",
    "evil.zip/..",
    "~/evil.zip",
    "$(touch evil).zip",
    "-rf.zip",
    "e" * 300 + ".zip",
    "../sb3_ano.json",
    "./sb3_ano.json",
    "sb3_ano.json/../../evil",
    "SB3_ANO.JSON",
    "%2e%2e/evil.zip",
]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_names_in_a_repository_never_become_paths(name, hub, tmp_path):
    hub.add("somebody/hostile", {name: b"evil"})
    before = sorted(path for path in tmp_path.rglob("*") if "hf_home" not in path.parts)
    for trust in (False, True):
        with one_line(ValueError, "holds no"):
            load_from_hub("somebody/hostile", trust_remote_code=trust)
    with one_line(ValueError, "holds no agent"):
        download("somebody/hostile", tmp_path / "agent")
    assert hub.count("/resolve/") == 0, "it was asked for"
    assert sorted(path for path in tmp_path.rglob("*") if "hf_home" not in path.parts) == before


@pytest.mark.parametrize("filename", HOSTILE_NAMES)
def test_a_filename_is_a_name(filename, hub):
    hub.add("somebody/agent", {filename: b"evil"})
    with one_line(ValueError, "filename="):
        load_from_hub("somebody/agent", trust_remote_code=True, filename=filename)
    assert hub.count("/resolve/") == 0


def test_a_link_in_a_repository_is_a_file_with_text(pushed, tmp_path):
    files = pushed.repositories["somebody/agent"].files
    pushed.add("somebody/links", {**files, "sb3_ano.json": b"../../../../etc/passwd"})
    with one_line(SafeFormatError, "not valid JSON"):
        load_from_hub("somebody/links")


def test_a_file_that_is_too_large_is_not_downloaded(pushed):
    with one_line(HubError, "sb3_ano.json of somebody/agent: it has [0-9,]+ bytes; allowed are 1,000"):
        load_from_hub("somebody/agent", max_bytes=1000)
    assert pushed.count("/resolve/") == 0


def test_several_models_are_a_question(hub):
    hub.add("somebody/two", {"ano-a.zip": b"", "ano-b.zip": b"", "train_eval_metrics.zip": b""})
    with one_line(ValueError, "several saved models, ano-a.zip, ano-b.zip; choose one with filename="):
        load_from_hub("somebody/two", trust_remote_code=True)
