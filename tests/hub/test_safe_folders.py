"""An agent's folder appears whole or not at all, and takes nothing with it."""

import os
import subprocess
import sys

import pytest
import torch
from stable_baselines3 import PPO

from sb3_ano import ANO, SPO
from sb3_ano.hub import load_safe, save_safe
from tests.common import SMALL, parameters
from tests.hub.agents import trained


def test_only_our_algorithms_are_stored(tmp_path):
    class Derived(ANO):
        pass

    for model in (PPO("MlpPolicy", "CartPole-v1", n_steps=32, batch_size=32), Derived("MlpPolicy", "CartPole-v1", **SMALL)):
        with pytest.raises(TypeError, match=f"model is of class {type(model).__name__}; allowed are SPO, PAPO, ANO"):
            save_safe(model, tmp_path / "agent")
    assert list(tmp_path.iterdir()) == []


def test_an_agent_takes_the_place_of_another(tmp_path):
    (tmp_path / "agent").mkdir()
    save_safe(trained(SPO), tmp_path / "agent", include_optimizer=True)
    model = trained(ANO)
    save_safe(model, str(tmp_path / "agent"))
    assert sorted(path.name for path in (tmp_path / "agent").iterdir()) == ["policy.safetensors", "sb3_ano.json"]
    assert torch.equal(parameters(load_safe(tmp_path / "agent")), parameters(model))
    assert [path.name for path in tmp_path.iterdir()] == ["agent"]


def test_folders_that_hold_anything_else_are_left_alone(tmp_path):
    model = trained()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    with pytest.raises(FileExistsError, match=r"holds 'thesis.tex', which would be lost"):
        save_safe(model, tmp_path / "mine")
    with pytest.raises(FileExistsError, match="is a file"):
        save_safe(model, tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine"]
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "agent").symlink_to(tmp_path / "disk")
    model = trained()
    save_safe(model, tmp_path / "agent")
    assert (tmp_path / "agent").is_symlink()
    assert torch.equal(parameters(load_safe(tmp_path / "disk")), parameters(model))


def test_a_failure_leaves_the_previous_agent(tmp_path, monkeypatch):
    model = trained(SPO)
    save_safe(model, tmp_path / "agent")
    replace = os.replace

    def failing(source, target, **options):
        if str(target) == str(tmp_path / "agent") and not str(source).endswith("old"):
            raise OSError(5, "Input/output error")
        replace(source, target, **options)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="Input/output error"):
        save_safe(trained(ANO), tmp_path / "agent")
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["agent"]
    assert torch.equal(parameters(load_safe(tmp_path / "agent")), parameters(model))


def test_a_full_disk_leaves_the_previous_agent_and_nothing_else(tmp_path):
    save_safe(trained(SPO), tmp_path / "agent")
    before = {path.name: path.read_bytes() for path in (tmp_path / "agent").iterdir()}
    code = (
        "import resource, signal, sys; from sb3_ano import ANO; from sb3_ano.hub import save_safe\n"
        "model = ANO('MlpPolicy', 'CartPole-v1', n_steps=32, batch_size=32)\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "save_safe(model, sys.argv[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "agent")], capture_output=True, text=True)
    assert done.returncode == 1
    assert "OSError: [Errno 27] File too large" in done.stderr.splitlines()[-1]
    assert {path.name: path.read_bytes() for path in (tmp_path / "agent").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["agent"]


def test_an_unknown_kind_of_state_is_complained_of_and_nothing_is_written(tmp_path):
    model = trained()
    model.policy.register_buffer("phases", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="tensor 'phases' is of type torch.complex64; allowed are"):
        save_safe(model, tmp_path / "agent")
    assert list(tmp_path.iterdir()) == []
