"""The table of what is measured."""

import dataclasses
import inspect
import json

import pytest
from stable_baselines3 import PPO

from sb3_ano import ANO
from sb3_ano.bench import parity, scaling
from sb3_ano.bench.cases import CASES, all_contenders, select
from sb3_ano.bench.processes import Threads, specification

CONTENDERS = [*all_contenders(CASES), *parity.CONTENDERS, *scaling.CONTENDERS]


def test_names_are_unique_and_the_reference_is_ppo_of_sb3():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    for case in CASES:
        own = [contender.name for contender in case.contenders]
        assert len(set(own)) == len(own)
        assert case.reference.name == "sb3"
        assert (case.reference.library, case.reference.envs) == ("sb3", "sb3")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_settings_are_arguments_of_ppo(case):
    assert set(case.settings) <= set(inspect.signature(PPO).parameters)
    if case.n_envs is not None:
        assert case.n_envs * case.settings["n_steps"] % case.settings["batch_size"] == 0


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.name)
def test_the_options_are_arguments_of_the_algorithm(contender):
    assert set(contender.options) <= set(inspect.signature(ANO if contender.library == "ano" else PPO).parameters)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_specification_is_json(case):
    for contender in case.contenders:
        spec = specification(case, contender, Threads(1, 2), "cpu")
        assert json.loads(json.dumps(spec)) == spec
        assert spec["case"]["settings"] == dict(case.settings)
        assert spec["threads"] == {"torch": 1, "envs": 2}


def test_selection_keeps_the_order_of_the_table():
    assert [case.name for case in select(CASES, ["pong", "defaults"], "case")] == ["defaults", "pong"]
    with pytest.raises(ValueError, match=r"unknown case 'pogn', did you mean 'pong'\? \(cases are defaults, "):
        select(CASES, ["pogn"], "case")


def test_a_rollout_has_one_size_for_all_numbers_of_environments():
    for n_envs in scaling.NUMBERS_OF_ENVS:
        case = scaling.case_of(n_envs)
        assert n_envs * case.settings["n_steps"] == 2048
        assert dataclasses.replace(case, name="", n_envs=None, settings={}).env_id == "HalfCheetah-v4"
