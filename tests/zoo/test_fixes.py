"""Each fix removes its fault while a command runs, and a zoo that has changed costs one fix and no more."""

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack

import pytest
import requests
import rl_zoo3.enjoy
import rl_zoo3.exp_manager
import rl_zoo3.load_from_hub
import rl_zoo3.plots
import rl_zoo3.utils
from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError
from huggingface_sb3 import EnvironmentName

from sb3_ano.zoo import fixes


@pytest.fixture
def apply(monkeypatch):
    """Applies fixes for the duration of a test."""
    monkeypatch.delenv("TRUST_REMOTE_CODE", raising=False)
    with ExitStack() as stack:
        yield lambda *some: fixes.apply_fixes(stack, some)


def model_in(directory) -> str:
    return rl_zoo3.utils.get_model_path(0, str(directory), "ano", EnvironmentName("CartPole-v1"))[1]


def test_an_agent_is_found_in_the_newest_run_that_has_one(apply, tmp_path, capsys):
    for number, has_agent in enumerate((True, True, False, False), 1):
        (tmp_path / "ano" / f"CartPole-v1_{number}").mkdir(parents=True)
        if has_agent:
            (tmp_path / "ano" / f"CartPole-v1_{number}" / "CartPole-v1.zip").touch()
    with pytest.raises(ValueError, match="No model found"):
        model_in(tmp_path)
    apply(fixes.newest_run_without_agent)
    assert model_in(tmp_path).endswith("CartPole-v1_2/CartPole-v1.zip")
    assert "CartPole-v1_4 holds no agent" in capsys.readouterr().out
    assert rl_zoo3.exp_manager.get_latest_run_id(str(tmp_path / "ano"), "CartPole-v1") == 4, "training uses no number twice"
    shutil.rmtree(tmp_path / "ano" / "CartPole-v1_1")
    shutil.rmtree(tmp_path / "ano" / "CartPole-v1_2")
    with pytest.raises(ValueError, match="No model found"):
        model_in(tmp_path)


def test_a_changed_zoo_costs_one_fix_but_no_guard(apply, monkeypatch):
    monkeypatch.delattr(rl_zoo3.utils, "get_latest_run_id")
    call = subprocess.call
    with pytest.warns(UserWarning, match="newest_run_without_agent is not fixed: .*get_latest_run_id"):
        apply(fixes.newest_run_without_agent, fixes.child_processes)
    assert subprocess.call is not call
    monkeypatch.delattr(rl_zoo3.utils, "get_trained_models")
    monkeypatch.delattr(rl_zoo3.load_from_hub, "download_from_hub")
    for guard in (fixes.unsafe_settings, fixes.untrusted_downloads):
        with pytest.raises(ValueError, match=f"{guard.__name__} cannot be prevented.*--trust-remote-code"):
            apply(guard)
    monkeypatch.setenv("TRUST_REMOTE_CODE", "1")
    with pytest.warns(UserWarning, match="unsafe_settings is not fixed"):
        apply(fixes.unsafe_settings)


FIXES = [fixes.unsafe_settings, fixes.untrusted_downloads, fixes.newest_run_without_agent, fixes.missing_metadata]
FIXES += [fixes.missing_optional_file, fixes.child_processes, fixes.single_runs]


@pytest.mark.parametrize("fix", FIXES)
def test_a_fix_ends_with_its_command(fix):
    modules = [module for name, module in sys.modules.items() if name.startswith(("rl_zoo3", "huggingface_sb3", "subprocess"))]
    before = [dict(vars(module)) for module in modules]
    with ExitStack() as stack:
        fixes.apply_fixes(stack, [fix])
        assert [dict(vars(module)) for module in modules] != before
    assert [dict(vars(module)) for module in modules] == before


def test_a_missing_file_is_what_the_zoo_waits_for_and_a_lost_connection_is_not(apply):
    apply(fixes.missing_optional_file)
    for error in (rl_zoo3.load_from_hub.HTTPError, requests.exceptions.HTTPError):
        assert issubclass(RemoteEntryNotFoundError, error)
        assert not issubclass(LocalEntryNotFoundError, error)


def test_what_the_zoo_downloads_needs_trust(apply, monkeypatch):
    modules, downloads = [rl_zoo3.load_from_hub, sys.modules["rl_zoo3.enjoy"]], []
    download = downloads.append  # one object, as in the zoo
    for module in modules:
        monkeypatch.setattr(module, "download_from_hub", download)
    apply(fixes.untrusted_downloads)
    for module in modules:
        with pytest.raises(ValueError, match="use --trust-remote-code"):
            module.download_from_hub("ppo")
    assert not downloads
    monkeypatch.setenv("TRUST_REMOTE_CODE", "1")  # as a child of a command inherits it
    for module in modules:
        module.download_from_hub("ppo")
    assert downloads == ["ppo", "ppo"]


def test_children_of_the_zoo_are_started_with_our_command_line(apply, monkeypatch, tmp_path, capfd):
    start, started = subprocess.call, []
    monkeypatch.setattr(subprocess, "call", lambda command, **kwargs: started.append(command) or 0)
    apply(fixes.child_processes)
    subprocess.call(["python", "enjoy.py", "--algo", "papo", "-f", str(tmp_path)])
    subprocess.call(["python", "-m", "rl_zoo3.record_video", "--env", "x"])
    subprocess.call(["python", "-m", "http.server"])
    subprocess.call("python enjoy.py", shell=True)
    assert [command[0] for command in started[:2]] == [sys.executable] * 2
    assert started[1][-3:] == ["record_video", "--env", "x"]
    assert started[2:] == [["python", "-m", "http.server"], "python enjoy.py"]
    assert start(started[0], cwd=tmp_path) == 2
    assert f"error: The {tmp_path}/papo folder was not found" in capfd.readouterr().err


def test_ffmpeg_is_found_where_there_is_none(apply, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    apply(fixes.missing_ffmpeg)
    assert subprocess.run(["ffmpeg", "-version"], capture_output=True, text=True).stdout.startswith("ffmpeg version")
    found = shutil.which("ffmpeg")
    apply(fixes.missing_ffmpeg)
    assert shutil.which("ffmpeg") == found, "another one is left alone"
    assert os.environ["PATH"].startswith(str(tmp_path))
