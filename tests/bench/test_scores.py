"""Normalized scores, worked by hand from the sources, and the reasons for those that are missing."""

import numpy as np
import pytest

from sb3_ano.bench.scores import DEFAULT_TABLES, ReferenceScores, load_table, task_of
from sb3_ano.bench.suites import load_suite

RETURNS = [
    (DEFAULT_TABLES, "HalfCheetah-v4", 4955.8925, 0.5),  # half way from -289.415 to 10201.2
    (DEFAULT_TABLES, "Swimmer-v4", 104.2, 1.0),
    (DEFAULT_TABLES, "Swimmer-v4", -1.329, 0.0),  # the measured score fills the gap
    (DEFAULT_TABLES, "Boxing-v5", 100.0, 99.9 / 4.2),
    (("wang2016", "mnih2015"), "Boxing-v5", 100.0, 99.9 / 12.0),  # the first table that has the task
    (("simbav2", "td3"), "Swimmer-v4", 104.2, 1.0),
    (("simbav2",), "HalfCheetah-v4", 10574.0, 1.0),
    (DEFAULT_TABLES, "CartPole-v1", 500.0, 1.0),
    *((DEFAULT_TABLES, env_id, 9.3, 1.0) for env_id in ("Pong-v5", "ALE/Pong-v5", "PongNoFrameskip-v4", "Pong")),
]


@pytest.mark.parametrize(("tables", "env_id", "value", "expected"), RETURNS)
def test_returns_are_in_units_of_the_first_table_that_has_the_task_under_any_id(tables, env_id, value, expected):
    assert ReferenceScores(tables).normalize(env_id, value) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_a_version_finds_its_own_row_before_that_of_another(tmp_path):
    path = tmp_path / "scores.csv"
    path.write_text("task,random,expert\nLander-v2,0,100\n Lander-v3 ,0,200\nEqual-v0,1,1.0\n")
    scores = ReferenceScores([str(path)])
    assert scores.find("Equal-v0") is None
    assert scores.normalize("Lander-v3", np.array([[100.0, 50.0]])).tolist() == [[0.5, 0.25]]
    assert scores.normalize("Lander-v4", 100.0) == 1.0


MISSING = [
    ("mnih2015", "atari", {"Phoenix", "Skiing", "ElevatorAction", "AirRaid", "Berzerk", "Carnival"}),
    ("wang2016", "atari", {"ElevatorAction", "AirRaid", "Carnival"}),
    ("td3", "mujoco", set()),
    ("simbav2", "mujoco-v5", {"Swimmer"}),
    ("classic", "classic", set()),
]


@pytest.mark.parametrize(("table", "suite", "missing"), MISSING)
def test_missing_scores_stay_missing(table, suite, missing):
    scores, tasks = ReferenceScores([table]), list(load_suite(suite).tasks)
    assert {task_of(env_id) for env_id in tasks if scores.find(env_id) is None} == missing
    assert all(np.isnan(scores.normalize(task, np.ones((2, 3)))).all() == (task_of(task) in missing) for task in tasks)
    assert load_table(table)["source"].str.len().min() > 0
