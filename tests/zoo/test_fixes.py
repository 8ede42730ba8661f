"""Each fix removes its fault while a command runs; ``nothing_stays_replaced`` checks that it ends with it."""

import functools
import subprocess
import sys

import pytest
import rl_zoo3.exp_manager
import rl_zoo3.load_from_hub
import rl_zoo3.utils
from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError
from huggingface_sb3 import EnvironmentName

from sb3_ano.zoo import fixes
from tests.zoo.conftest import ROOT


def test_an_agent_is_found_in_the_newest_run_that_has_one(stack, tmp_path):
    model = functools.partial(rl_zoo3.utils.get_model_path, 0, str(tmp_path), "ano", EnvironmentName("CartPole-v1"))
    runs = [tmp_path / "ano" / f"CartPole-v1_{number}" for number in (1, 2, 3, 4)]
    for run in runs:
        run.mkdir(parents=True)
    fixes.newest_run_without_agent(stack)
    with pytest.raises(ValueError, match="No model found"):
        model()
    for run in runs[:2]:
        (run / "CartPole-v1.zip").touch()
    assert model()[1] == str(runs[1] / "CartPole-v1.zip")
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


def test_children_of_the_zoo_are_started_with_our_command_line(stack):
    started = []
    fixes.replace(stack, subprocess, "call", started.append)
    fixes.child_processes(stack)
    for line in ("python enjoy.py --algo papo", "python -m rl_zoo3.record_video --env x", "python -m http.server"):
        subprocess.call(line.split())
    subprocess.call("python enjoy.py")
    program = [sys.executable, str(ROOT / "zoo_runner.py")]
    ours = [[*program, "enjoy", "--algo", "papo"], [*program, "record_video", "--env", "x"]]
    assert started == [*ours, ["python", "-m", "http.server"], "python enjoy.py"]
