"""Plans: how many runs, which, in which order, with which names."""

import json

import pytest

from sb3_ano.bench.experiments.estimate import STARTUP_SECONDS, estimates, in_words
from sb3_ano.bench.experiments.plan import Axis, Run, make_plan, parse_grid
from sb3_ano.bench.experiments.show import plan_rows
from sb3_ano.bench.experiments.suites import Evaluation, Suite, Task, load_suite

ALL = ("ppo", "trpo", "spo", "papo", "ano")


def test_the_papers_search_is_three_settings_of_each_algorithm():
    runs = make_plan(load_suite("mujoco"), ALL, 5, parse_grid(["paper"]))
    assert len(runs) == len({run.run_id for run in runs}) == 6 * 5 * 5 * 3
    found = {name: {tuple(run.settings.items()) for run in runs if run.algorithm == name} for name in ALL}
    lr = ("learning_rate", 3e-4)
    assert found["ano"] == found["ppo"] == {(("clip_range", eps), lr) for eps in (0.1, 0.2, 0.3)}
    assert found["trpo"] == {(lr, ("target_kl", delta)) for delta in (0.01, 0.02, 0.03)}
    assert found["papo"] == {(("clip_range", 0.2), lr, ("omega", omega)) for omega in (0.001, 0.005, 0.01)}


def test_without_a_grid_there_is_one_run_for_each_seed_task_and_algorithm():
    suite = load_suite("classic")
    runs = make_plan(suite, ["ano", "ppo", "ano"], 2)
    assert [run.seed for run in runs] == [0] * 6 + [1] * 6
    assert [run.algorithm for run in runs[:4]] == ["ano", "ppo", "ano", "ppo"]
    assert runs[0].run_id == "CartPole-v1__ano__clip_range=0.2,learning_rate=0.002__seed0"
    assert {run.total_timesteps for run in runs} == {40_000}
    assert {run.total_timesteps for run in make_plan(suite, ["ano"], 1, total_timesteps=7)} == {7}


def test_a_value_of_the_grid_that_is_the_suites_own_is_the_same_run():
    suite = load_suite("mujoco").with_tasks(["Hopper"])
    (plain,) = make_plan(suite, ["ano"], 1)
    varied = make_plan(suite, ["ano"], 1, parse_grid(["clip_range=0.1,0.2", "learning_rate=3e-4"]))
    assert plain in varied
    assert len(varied) == 2


def test_a_learning_rate_of_the_grid_keeps_the_schedule():
    (run,) = make_plan(load_suite("mujoco").with_tasks(["Hopper"]), ["spo"], 1, parse_grid(["learning_rate=1e-3"]))
    assert run.settings["learning_rate"] == 1e-3
    assert run.hyperparameters["learning_rate"] == "lin_0.001"
    (run,) = make_plan(load_suite("classic").with_tasks(["Acrobot"]), ["spo"], 1, parse_grid(["learning_rate=1e-3"]))
    assert run.hyperparameters["learning_rate"] == 1e-3


def test_an_axis_varies_the_algorithms_that_have_it():
    suite = load_suite("classic").with_tasks(["CartPole"])
    counts = {
        name: sum(run.algorithm == name for run in make_plan(suite, ALL, 1, parse_grid(["ano.clip_range", "n_epochs=1,2"])))
        for name in ALL
    }
    assert counts == {"ppo": 2, "trpo": 1, "spo": 2, "papo": 2, "ano": 6}
    (run, _) = make_plan(suite, ["ano:shaping=ppo"], 1, parse_grid(["ano.n_epochs=1,2"]))
    assert run.run_id == "CartPole-v1__ano-shaping=ppo__clip_range=0.2,learning_rate=0.002,n_epochs=1__seed0"


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("clip_range", [Axis("clip_range", (0.1, 0.2, 0.3))]),
        ("learning_rate=3e-4,1e-3", [Axis("learning_rate", (3e-4, 1e-3))]),
        ("trpo.delta=0.01", [Axis("delta", (0.01,), "trpo")]),
        ("n_steps=32,64,32", [Axis("n_steps", (32, 64))]),
        ("normalize=true,false", [Axis("normalize", (True, False))]),
        ("precision=bfloat16", [Axis("precision", ("bfloat16",))]),
    ],
)
def test_the_grid_of_the_command_line(text, axes):
    assert parse_grid([text]) == axes


@pytest.mark.parametrize("text", ["", "=1", "n_epochs", "clip_range=", "clip_range=0.1,", "ano."])
def test_what_is_no_grid(text):
    with pytest.raises(ValueError, match=f"grid {text!r} is not allowed; allowed are NAME=VALUE,VALUE"):
        parse_grid([text])


def test_an_axis_that_varies_nothing_is_refused():
    suite = load_suite("classic")
    with pytest.raises(
        ValueError,
        match=r"no algorithm of this plan \(ppo, ano\) has the hyperparameter 'clip_rnage', did you mean 'clip_range'",
    ):
        make_plan(suite, ["ppo", "ano"], 1, parse_grid(["clip_rnage=0.1"]))
    with pytest.raises(ValueError, match=r"no algorithm of this plan \(ano\) has the hyperparameter 'omega' and is 'papo'"):
        make_plan(suite, ["ano"], 1, parse_grid(["papo.omega"]))
    with pytest.raises(ValueError, match=r"no algorithm of this plan \(ano\) has the hyperparameter 'omega'$"):
        make_plan(suite, ["ano"], 1, parse_grid(["omega"]))
    with pytest.raises(ValueError, match="unknown algorithm 'ana' "):
        parse_grid(["ana.clip_range"])


def test_a_specification_survives_json():
    for run in make_plan(load_suite("atari").with_tasks(["Pong"]), [*ALL, "ano:shaping=spo"], 1, parse_grid(["paper"])):
        there = json.loads(json.dumps(run.specification()))
        assert Run.from_specification("atari", there) == run


def run_of(env_id: str, label: str, steps: int) -> Run:
    suite = Suite("s", (Task(env_id, steps),), evaluation=Evaluation(1, 1))
    return make_plan(suite, [label], 1)[0]


def test_the_estimate_is_that_worked_by_hand():
    runs = [run_of("A-v0", "ppo", 1000), run_of("A-v0", "ano:shaping=spo", 1000), run_of("A-v0", "trpo", 1000)]
    documents = [
        {"env_id": "A-v0", "algorithm": "ppo", "total_timesteps": 100, "process_seconds": seconds}
        for seconds in (1.0, 2.0, 10.0)
    ]
    documents.append({"env_id": "B-v0", "algorithm": "trpo", "total_timesteps": 100, "process_seconds": 1.0})
    known = [estimates(runs, documents, {"ppo": 1.0, "ano": 500.0})[run.run_id] for run in runs]
    assert known[0].seconds == pytest.approx(STARTUP_SECONDS + 1000 / 50)  # the median of 100, 50 and 10 steps a second
    assert known[1].seconds == pytest.approx(STARTUP_SECONDS + 2)
    assert known[2].seconds is None
    assert [one.measured for one in known] == [True, False, False]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(5, "less than a minute"), (60, "about 1 min"), (12_000, "about 3 h 20 min"), (172_800, "about 2.0 days")],
)
def test_durations_in_words(seconds, words):
    assert in_words(seconds) == words


def test_the_plan_has_a_row_for_each_setting():
    runs = make_plan(load_suite("classic"), ["ano"], 2, parse_grid(["learning_rate=3e-4,1e-3"]))
    finished = {runs[0].run_id}
    rows = plan_rows(runs, finished, estimates(runs, (), {"ano": 900.0}))
    assert rows == [
        ("ano", "clip_range 0.2, learning_rate 0.0003", "all", "40,000", "6", "1", "4 min"),
        ("ano", "clip_range 0.2, learning_rate 0.001", "all", "40,000", "6", "0", "5 min"),
    ]
    assert plan_rows(runs, finished, estimates(runs, (), {}))[0][-1] == "?"
    assert plan_rows(runs, {run.run_id for run in runs}, estimates(runs, (), {}))[0][-1] == "-"


def test_a_row_of_some_tasks_names_them():
    runs = make_plan(load_suite("classic"), ["ano"], 1)
    rows = plan_rows(runs, (), estimates(runs, (), {"ano": 1000.0}))
    assert [(row[1], row[2]) for row in rows] == [
        ("clip_range 0.2, learning_rate 0.002", "CartPole-v1"),
        ("clip_range 0.2, learning_rate 0.0003", "Acrobot-v1"),
        ("clip_range 0.2, learning_rate 0.001", "Pendulum-v1"),
    ]
