"""Plans: the runs, their identity, and the origin of their hyperparameters."""

import pytest
import yaml
from stable_baselines3.common.utils import LinearSchedule
from torch import nn

from sb3_ano.bench import suites
from sb3_ano.bench.algorithms import CLASSES, parse_algorithm
from sb3_ano.bench.plan import Run, make_plan, parse_grid, parse_seeds
from sb3_ano.bench.runner import check_runs
from sb3_ano.bench.scores import load_table
from sb3_ano.bench.suites import Suite, load_suite
from sb3_ano.zoo.hyperparameters import hyperparameter_file
from tests.bench.common import small_run, small_suite


def test_a_task_without_its_version_is_all_of_its_versions():
    suite = Suite.model_validate({"name": "own", "tasks": ["Hopper-v4", "HalfCheetah-v4", "HalfCheetah-v5"]})
    assert [*suite.select(["HalfCheetah"]).tasks] == ["HalfCheetah-v4", "HalfCheetah-v5"]
    assert [*suite.select(["HalfCheetah-v5"]).tasks] == ["HalfCheetah-v5"]


def plan(*grid: str, labels=("ano",), env="CartPole", seeds=(0,), **options):
    return make_plan(load_suite("classic").select([env]), list(labels), list(seeds), parse_grid(grid), **options)


GRIDS = ["n_epochs=20", "clip_range=2e-1", "gae_lambda=0.80", "learning_rate=0.002", "max_grad_norm=0.5", "shaping=ano"]
EQUAL = [("n_epochs=20", label) for label in ("ano:shaping=ano", "ano:clip_range=0.2", "ano:precision=float32")]


# A grid that names the suite's own value trained and counted the same configuration twice.
@pytest.mark.parametrize(("grid", "label"), [*EQUAL, *((grid, "ano") for grid in GRIDS)])
def test_equal_configurations_are_one_run_however_they_are_written(grid, label):
    (default,), (run,) = plan(), plan(grid, labels=[label])
    assert run.name == default.name
    assert not run.changed
    assert len(plan("n_epochs=10,20", "clip_range=0.1,0.2,0.20,0.3")) == 6
    assert len(plan(labels=["ano", "ano:n_epochs=20"], seeds=[0, 1])) == 2


# Results that users have are found by these names.
def test_the_identity_is_stable_the_same_for_all_seeds_and_differs_for_all_else():
    hyperparameters = {"policy": "MlpPolicy", "n_envs": 8, "learning_rate": "lin_3e-4", "clip_range": 0.2, "gamma": 0.98}
    run = Run("any", "CartPole-v1", "ano", 0, 1000, hyperparameters, {"points": 2, "episodes": 3, "deterministic": True})
    assert run.name == "CartPole-v1__ano__14ec88c1e3__seed0"
    run = plan()[0]
    assert {other.identity for other in plan(seeds=range(5))} == {run.identity}
    others = [plan("n_epochs=10")[0], plan(total_timesteps=1000)[0], plan(env="Acrobot")[0], plan(labels=["spo"])[0]]
    settings = ({}, {"points": 2}, {"env_kwargs": {"g": 2.0}}, {"backend": "gymnasium"})
    others += [small_run("ano", **setting) for setting in settings]
    assert len({other.identity for other in others} | {run.identity}) == len(others) + 1


def test_runs_are_ordered_seed_by_seed():
    runs = plan(labels=["ppo", "ano"], seeds=parse_seeds("3-5"))
    assert [run.seed for run in runs] == [3, 3, 4, 4, 5, 5]
    assert (parse_seeds("3"), parse_seeds("0,3-4,3"), parse_seeds("7-7")) == ([0, 1, 2], [0, 3, 4], [7])


def test_a_grid_varies_the_algorithms_that_have_the_hyperparameter():
    of_the_paper = ["ppo", "trpo", "spo", "papo", "ano"]
    runs = make_plan(load_suite("mujoco").select(["Hopper"]), of_the_paper, [0], parse_grid(["paper"]))
    names = {"trpo": "target_kl", "papo": "omega"}
    for algorithm in of_the_paper:
        values = [run.hyperparameters[names.get(algorithm, "clip_range")] for run in runs if run.algorithm == algorithm]
        assert values == {"trpo": [0.01, 0.02, 0.03], "papo": [0.001, 0.005, 0.01]}.get(algorithm, [0.1, 0.2, 0.3])
    few = make_plan(load_suite("mujoco").select(["Hopper"]), ["ppo", "ano"], [0], parse_grid(["paper"]))
    assert sorted(run.name for run in few) == sorted(run.name for run in runs if run.algorithm in ("ppo", "ano"))
    (run,) = make_plan(small_suite(), ["papo"], [0], parse_grid(["omega=0.01", "papo.clip_range=0.3"]))
    model = parse_algorithm("papo").constructor_arguments(run.hyperparameters)
    assert (model["omega1"], model["omega2"], model["clip_range"]) == (0.01, 0.01, 0.3)
    # A learning rate replaces the number of a schedule, and keeps the schedule.
    assert plan("learning_rate=1e-4")[0].changed == {"learning_rate": "lin_0.0001"}


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("env_id", ["HalfCheetah-v4", "Walker2d-v4", "Swimmer-v4"])
def test_hyperparameters_are_those_of_the_zoos_files_at_the_paper_s_rate_and_radius(name, env_id):
    content = yaml.safe_load(hyperparameter_file(name if name in ("spo", "papo") else "ano").read_text())
    content = content["Walker2d-v4"]  # the files have other settings for HalfCheetah and Swimmer
    content |= {"policy": "MlpLstmPolicy" if "lstm" in name else "MlpPolicy", "learning_rate": "lin_3e-4", "desired_kl": None}
    (run,) = make_plan(load_suite("mujoco").select([env_id]), [name], [0])
    shared = {key: value for key, value in content.items() if key in run.hyperparameters}
    assert {"n_envs", "n_steps", "batch_size", "gamma", "normalize", "policy_kwargs"} <= shared.keys()
    assert {key: run.hyperparameters[key] for key in shared} == shared
    arguments = parse_algorithm(name).constructor_arguments(run.hyperparameters)
    assert arguments["policy_kwargs"]["activation_fn"] is nn.Tanh
    assert isinstance(arguments["learning_rate"], LinearSchedule)
    assert arguments["learning_rate"](0.5) == pytest.approx(1.5e-4)


# Atari was evaluated with deterministic actions, unlike in the RL Zoo and CleanRL.
def test_suites_have_the_paper_s_tasks_and_steps_and_atari_stochastic_actions():
    mujoco, atari, classic = (load_suite(name) for name in ("mujoco", "atari", "classic"))
    assert (len(mujoco.tasks), len(atari.tasks), len(classic.tasks)) == (6, 40, 3)
    assert (mujoco.total_timesteps, classic.total_timesteps) == (10_000_000, 40_000)
    assert list(load_suite("mujoco-v5").tasks) == [task.replace("v4", "v5") for task in mujoco.tasks]
    for suite, env_id in ((mujoco, "Hopper-v4"), (small_suite("Breakout-v5"), "Breakout-v5"), (atari, "Pong-v5")):
        settings = suite.resolve(env_id, parse_algorithm("ppo"))
        hyperparameters, is_atari = settings["hyperparameters"], suite is not mujoco
        assert settings["evaluation"]["deterministic"] is not is_atari
        assert hyperparameters["policy"] == ("CnnPolicy" if is_atari else "MlpPolicy")
    assert (settings["total_timesteps"], hyperparameters["n_envs"], hyperparameters["n_steps"]) == (6_000_000, 16, 128)


def test_algorithms_take_options():
    label = "ano:shaping=spo,desired_kl=1e-2,normalize_advantage=false,target_kl=none,clip_range_vf=null"
    expected = {"shaping": "spo", "desired_kl": 0.01, "normalize_advantage": False, "target_kl": None, "clip_range_vf": None}
    assert dict(parse_algorithm(label).options) == expected
    assert small_run(label).algorithm == parse_algorithm(label).label
    assert expected.items() <= small_run(label).hyperparameters.items()


INVALID = [
    (load_suite, "tasks: [A-v0]\nevaluation: {point: 3}", "evaluation.point Extra inputs are not permitted"),
    (load_suite, "tasks: [A-v0]\nhyperparameters: {clip_rang: 1}", "hyperparameter 'clip_rang', did you mean 'clip_range'"),
    (load_suite, "tasks: [A-v0]\nalgorithms: {trpo: {clip_range: 1}}", "unknown hyperparameter of trpo 'clip_range'"),
    (load_suite, "tasks: [A-v0]\nalgorithms: {anno: {}}", "unknown algorithm 'anno'"),
    (load_suite, "tasks: [A-v0]\nalgorithms: {'ano:shape=spo': {}}", "unknown option of ano 'shape'"),
    (load_suite, "tasks: [", "is not a suite in YAML: while parsing"),
    (load_table, "env,expert\nA-v0,1\n", "is invalid: .*'random' not found in columns"),
    (load_table, "", "is invalid: No columns"),
    (load_table, "env,random,expert\nA-v0,0,high\n", "is invalid: could not convert string to float: 'high'"),
]


@pytest.mark.parametrize(("load", "content", "message"), INVALID)
def test_suite_files_and_score_tables_are_checked(load, content, message, tmp_path):
    (tmp_path / "file").write_text(content)
    with pytest.raises(ValueError, match=f"{tmp_path}/file.*{message}"):
        load(str(tmp_path / "file"))


def test_a_custom_suite(tmp_path, monkeypatch):
    (tmp_path / "mine.yml").write_text(
        "evaluation: {points: 3, episodes: 2}\nimports: [my_tasks]\nbackend: gymnasium\nenv_kwargs: {g: 1}\n"
        "hyperparameters: {n_envs: 4, learning_rate: 3e-4, clip_range: 0.1}\nalgorithms: {trpo: {target_kl: 0.03}}\n"
        "tasks:\n  My-v0:\n  My-v1: {total_timesteps: 50, env_kwargs: {size: 3}, algorithms: {ano: {n_steps: 8},\n"
        "    'ano:shaping=spo': {n_steps: 16}, 'ano:shaping=spo,desired_kl=0.01': {n_steps: 32}}}\n"
    )
    suite = load_suite(str(tmp_path / "mine.yml"))
    first, trpo, second, _ = make_plan(suite, ["ano", "trpo"], [0])
    assert (first.suite, first.total_timesteps, first.imports) == ("mine", 1_000_000, ("my_tasks",))  # the zoo's default
    assert (second.total_timesteps, second.env_kwargs, second.hyperparameters["n_steps"]) == (50, {"g": 1, "size": 3}, 8)
    *_, with_options = make_plan(suite, ["ano:shaping=spo"], [0])
    assert with_options.hyperparameters["n_steps"] == 16, "the most special entry counts"
    *_, with_two = make_plan(suite, ["ano:shaping=spo,desired_kl=0.01"], [0])
    assert with_two.hyperparameters["n_steps"] == 32
    assert make_plan(suite, ["ano"], [0], parse_grid(["learning_rate=3e-4"]))[0].name == first.name  # YAML reads a text
    assert "clip_range" not in trpo.hyperparameters
    assert trpo.hyperparameters["target_kl"] == 0.03
    assert parse_algorithm("ano").constructor_arguments(first.hyperparameters)["learning_rate"] == 3e-4
    for runs in ([first, plan()[0]], [plan()[0], first]):
        with pytest.raises(ValueError, match="ano cannot be trained on My-v0: No module named 'my_tasks'"):
            check_runs(runs)
    assert small_run("ano", "CarRacing-v3").hyperparameters["frame_stack"] == 2
    monkeypatch.setitem(suites._zoo_file("ano"), "Odd-v0", {"n_timesteps": 1e6, "callback": "my.Callback"})
    with pytest.raises(ValueError, match="Odd-v0 needs callback of the zoo's file"):
        small_run("ano", "Odd-v0")
