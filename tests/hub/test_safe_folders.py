"""An agent's directory appears whole or not at all, and takes nothing with it."""

import os

import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import PPO

from sb3_ano import ANO, SPO
from sb3_ano.hub import load_safe, save_safe
from tests.common import parameters
from tests.hub.agents import trained


class Derived(ANO):
    """A subclass, which the format does not know."""


def with_complex_numbers(model):
    model.policy.register_buffer("phases", torch.zeros(2, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("cls", "spoil", "error", "message"),
    [
        (PPO, lambda model: None, TypeError, "model is of class PPO; allowed are SPO, PAPO, ANO"),
        (Derived, lambda model: None, TypeError, "model is of class Derived; allowed are SPO, PAPO, ANO"),
        (ANO, with_complex_numbers, ValueError, "tensor 'phases' is of type torch.complex64; allowed are"),
        *[
            (
                ANO,
                lambda model, space=space: setattr(model, "observation_space", space),
                TypeError,
                "allowed are Box, Discrete",
            )
            for space in (
                spaces.Text(3),
                spaces.Tuple([spaces.Discrete(2)]),
                spaces.Dict({"a": spaces.Dict({"b": spaces.Discrete(2)})}),
            )
        ],
    ],
)
def test_what_cannot_be_stored_is_named_and_nothing_is_written(cls, spoil, error, message, tmp_path):
    model = trained(cls, steps=0)
    spoil(model)
    with pytest.raises(error, match=message):
        save_safe(model, tmp_path / "agent")
    assert list(tmp_path.iterdir()) == []


def test_an_agent_takes_the_place_of_another_and_a_link_stays_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "agent").symlink_to(tmp_path / "disk")
    save_safe(trained(SPO), tmp_path / "agent", include_optimizer=True)
    model = trained(ANO)
    save_safe(model, str(tmp_path / "agent"))
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["policy.safetensors", "sb3_ano.json"]
    assert torch.equal(parameters(load_safe(tmp_path / "agent")), parameters(model))
    assert (tmp_path / "agent").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent", "disk"]


def test_directories_that_hold_anything_else_are_left_alone(tmp_path):
    model = trained(steps=0)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"holds 'thesis.tex', which would be lost"):
        save_safe(model, tmp_path / "mine")
    with pytest.raises(FileExistsError, match="is a file"):
        save_safe(model, tmp_path / "mine" / "thesis.tex")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"


def test_a_failure_leaves_the_previous_agent(tmp_path, monkeypatch):
    model = trained(SPO)
    save_safe(model, tmp_path / "agent")
    replace = os.replace

    def failing(source, target):
        if str(target) == str(tmp_path / "agent") and not str(source).endswith("old"):
            raise OSError(5, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="Input/output error"):
        save_safe(trained(ANO), tmp_path / "agent")
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["agent"]
    assert torch.equal(parameters(load_safe(tmp_path / "agent")), parameters(model))
