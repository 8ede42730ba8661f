"""Each fix removes its fault while a command runs; ``nothing_stays_replaced`` checks that it ends with it."""

import os
import shutil
import subprocess
import sys

import pytest
import rl_zoo3.exp_manager
import rl_zoo3.load_from_hub
import rl_zoo3.utils
from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError
from huggingface_sb3 import EnvironmentName

from sb3_ano.zoo import fixes


def test_an_agent_is_found_in_the_newest_run_that_has_one(stack, tmp_path):
    def model() -> str:
        return rl_zoo3.utils.get_model_path(0, str(tmp_path), "ano", EnvironmentName("CartPole-v1"))[1]

    for number in (1, 2, 3, 4):
        (tmp_path / "ano" / f"CartPole-v1_{number}").mkdir(parents=True)
    fixes.newest_run_without_agent(stack)
    with pytest.raises(ValueError, match="No model found"):
        model()
    for number in (1, 2):
        (tmp_path / "ano" / f"CartPole-v1_{number}" / "CartPole-v1.zip").touch()
    assert model().endswith("CartPole-v1_2/CartPole-v1.zip")
    assert rl_zoo3.exp_manager.get_latest_run_id(str(tmp_path / "ano"), "CartPole-v1") == 4, "training uses no number twice"


def test_a_changed_zoo_costs_one_fix_but_no_guard(stack, monkeypatch):
    monkeypatch.delenv("TRUST_REMOTE_CODE", raising=False)
    with monkeypatch.context() as changed:
        changed.delattr(rl_zoo3.utils, "get_latest_run_id")
        call = subprocess.call
        with pytest.warns(UserWarning, match="newest_run_without_agent is not fixed: .*get_latest_run_id"):
            fixes.apply_fixes(stack, [fixes.newest_run_without_agent, fixes.child_processes])
        assert subprocess.call is not call
        changed.delattr(rl_zoo3.utils, "get_trained_models")
        with pytest.raises(ValueError, match="unsafe_settings is not fixed.*--trust-remote-code goes ahead"):
            fixes.apply_fixes(stack, [fixes.unsafe_settings])
        changed.setenv("TRUST_REMOTE_CODE", "1")
        with pytest.warns(UserWarning, match="unsafe_settings is not fixed"):
            fixes.apply_fixes(stack, [fixes.unsafe_settings])


def test_a_missing_file_is_what_the_zoo_waits_for_and_a_lost_connection_is_not(stack):
    fixes.missing_optional_file(stack)
    for error, is_awaited in {RemoteEntryNotFoundError: True, LocalEntryNotFoundError: False}.items():
        assert issubclass(error, rl_zoo3.load_from_hub.HTTPError) == is_awaited


def test_children_of_the_zoo_are_started_with_our_command_line(stack, monkeypatch, tmp_path, capfd):
    start, started = subprocess.call, []
    fixes.replace(stack, subprocess, "call", lambda command, **kwargs: started.append(command) or 0)
    fixes.child_processes(stack)
    subprocess.call(["python", "enjoy.py", "--algo", "papo", "-f", str(tmp_path)])
    subprocess.call(["python", "-m", "rl_zoo3.record_video", "--env", "x"])
    subprocess.call(["python", "-m", "http.server"])
    subprocess.call("python enjoy.py", shell=True)
    assert [command[0] for command in started[:2]] == [sys.executable] * 2
    assert started[1][-3:] == ["record_video", "--env", "x"]
    assert started[2:] == [["python", "-m", "http.server"], "python enjoy.py"]
    assert start(started[0], cwd=tmp_path) == 2
    assert f"error: The {tmp_path}/papo folder was not found" in capfd.readouterr().err


def test_ffmpeg_is_found_where_there_is_none(monkeypatch, stack, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    fixes.missing_ffmpeg(stack)
    assert subprocess.run(["ffmpeg", "-version"], capture_output=True, text=True).stdout.startswith("ffmpeg version")
    found = shutil.which("ffmpeg")
    fixes.missing_ffmpeg(stack)
    assert shutil.which("ffmpeg") == found, "another one is left alone"
    stack.close()
    assert os.environ["PATH"] == str(tmp_path)
