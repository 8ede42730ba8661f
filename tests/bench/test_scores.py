"""Normalized scores, worked by hand from the sources, and what is said about those that are missing."""

import numpy as np
import pytest

from sb3_ano.bench.scores import DEFAULT_TABLES, ReferenceScores, load_table, task_of

ATARI_40 = [
    *("Pong", "Breakout", "Freeway", "Boxing", "Seaquest", "BeamRider", "SpaceInvaders", "Riverraid", "DemonAttack"),
    *("Centipede", "VideoPinball", "DoubleDunk", "Asteroids", "Atlantis", "Gopher", "RoadRunner", "TimePilot"),
    *("CrazyClimber", "Tutankham", "Robotank", "StarGunner", "UpNDown", "Phoenix", "Bowling", "IceHockey", "Skiing"),
    *("Kangaroo", "Zaxxon", "ElevatorAction", "Assault", "AirRaid", "Alien", "Amidar", "Asterix", "BankHeist"),
    *("BattleZone", "Berzerk", "Carnival", "ChopperCommand", "Enduro"),
]


@pytest.mark.parametrize(
    ("tables", "env_id", "value", "expected"),
    [
        (DEFAULT_TABLES, "HalfCheetah-v4", 4955.8925, 0.5),  # half way from -289.415 to 10201.2
        (DEFAULT_TABLES, "Hopper-v4", 18.791, 0.0),
        (DEFAULT_TABLES, "Swimmer-v4", 104.2, 1.0),
        (DEFAULT_TABLES, "Swimmer-v4", -1.329, 0.0),  # the measured score fills the gap
        (DEFAULT_TABLES, "Boxing-v5", 100.0, 99.9 / 4.2),
        (("wang2016",), "Boxing-v5", 100.0, 99.9 / 12.0),
        (("simbav2",), "HalfCheetah-v4", 10574.0, 1.0),
        (DEFAULT_TABLES, "CartPole-v1", 500.0, 1.0),
    ],
)
def test_returns_are_in_units_of_the_named_table(tables, env_id, value, expected):
    assert ReferenceScores(tables).normalize(env_id, value) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("env_id", ["Pong-v5", "ALE/Pong-v5", "PongNoFrameskip-v4", "Pong"])
def test_a_task_is_known_under_all_of_its_ids(env_id):
    assert task_of(env_id) == "Pong"
    assert ReferenceScores().normalize(env_id, 9.3) == pytest.approx(1.0)


def test_a_version_finds_the_row_of_its_own_before_that_of_another(tmp_path):
    path = tmp_path / "scores.csv"
    path.write_text("task,random,expert\nLander-v2,0,100\nLander-v3,0,200\n")
    scores = ReferenceScores([str(path)])
    assert scores.normalize("Lander-v3", 100.0) == 0.5
    assert scores.normalize("Lander-v4", 100.0) == 1.0


@pytest.mark.parametrize(
    ("table", "missing"),
    [
        ("mnih2015", {"Phoenix", "Skiing", "ElevatorAction", "AirRaid", "Berzerk", "Carnival"}),
        ("wang2016", {"ElevatorAction", "AirRaid", "Carnival"}),
    ],
)
def test_missing_scores_stay_missing_and_are_named(table, missing):
    scores = ReferenceScores([table])
    assert set(scores.missing(ATARI_40)) == missing
    assert scores.missing(["AirRaid-v5"]) == {"AirRaid-v5": f"{table} has no random and human score"}
    assert np.isnan(scores.normalize("AirRaid-v5", np.ones((2, 3)))).all()
    assert scores.missing(["Ant-v4"]) == {"Ant-v4": f"in none of the tables {table}"}


def test_the_six_tasks_of_the_paper_have_scores_in_the_default_table_only():
    names = ["HalfCheetah", "Ant", "Hopper", "Walker2d", "Humanoid", "Swimmer"]
    tasks = [f"{name}-v{version}" for name in names for version in (4, 5)]
    assert not ReferenceScores().missing(tasks)
    assert set(ReferenceScores(["simbav2"]).missing(tasks)) == {"Swimmer-v4", "Swimmer-v5"}


@pytest.mark.parametrize("name", ["td3", "simbav2", "mnih2015", "wang2016", "classic"])
def test_every_row_names_its_source(name):
    assert load_table(name).rows["source"].str.len().min() > 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("env,expert\nA-v0,1\n", "has the columns env, expert; it needs one of"),
        ("", "has the columns none"),
        ("env,random,expert\nA-v0,0,high\n", "line 2: 'A-v0, 0, high' is not allowed"),
        ("env,random,expert\nA-v0,nan,1\n", "line 2: 'A-v0, nan, 1' is not allowed"),
        ("env,random,expert\nA-v0,0,1\nA-v0,0,1\n", "line 3: 'A-v0, 0, 1' is not allowed; allowed are a task that is not in"),
        ("env,random,expert\nA-v0,1,1.0\n", "line 2: 'A-v0, 1, 1.0' is not allowed; .*two different finite numbers"),
        ("env,random,expert\n,1,2\n", "line 2: ', 1, 2' is not allowed"),
    ],
)
def test_a_file_that_is_no_table_is_refused_with_its_line(tmp_path, content, message):
    path = tmp_path / "scores.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_table(str(path))


def test_a_table_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ValueError, match="no score table .mnih2013.*one of td3, simbav2, mnih2015, wang2016, classic"):
        ReferenceScores(["mnih2013"])
