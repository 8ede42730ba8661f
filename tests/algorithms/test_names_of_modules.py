"""Check that the names of modules and classes have no influence on paths and options."""

import types
from typing import Any

import pytest
import torch
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_ano import ANO
from tests.common import SMALL


def options_of_compiler(monkeypatch: pytest.MonkeyPatch, policy: Any) -> list[dict]:
    """Train with a compiler that does nothing; return the options that it gets."""
    options: list[dict] = []

    def record(function: types.FunctionType, **settings: Any) -> types.FunctionType:
        options.append(settings["options"])
        return function

    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", record)
        ANO(policy, "CartPole-v1", **SMALL, torch_compile=True, device="cpu").learn(64)
    assert options
    return options


def test_an_empty_subclass_of_sb3s_policy_is_sb3s_policy(monkeypatch):
    mine = type("Mine", (ActorCriticPolicy,), {"__module__": "a_users_module"})
    assert options_of_compiler(monkeypatch, mine) == options_of_compiler(monkeypatch, ActorCriticPolicy)


def test_a_directory_may_be_renamed(monkeypatch):
    expected = options_of_compiler(monkeypatch, "MlpPolicy")
    monkeypatch.setattr(ANO.policy_loss, "__module__", "sb3_ano.renamed.ano")
    assert options_of_compiler(monkeypatch, "MlpPolicy") == expected
