"""The command line: one line for each mistake, and a plan from beginning to end."""

import dataclasses
import re
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest

from sb3_ano.bench import runner
from sb3_ano.bench.cli import main
from sb3_ano.bench.plan import make_plan
from sb3_ano.bench.report import Settings
from sb3_ano.bench.results import Results
from sb3_ano.bench.suites import load_suite

RUN = ["run", "--suite", "classic", "--envs", "CartPole", "--algos", "ppo", "ano"]


MISTAKES = [
    (["run", "--suite", "clasic"], "unknown suite 'clasic', did you mean 'classic'?"),
    (["run", "--suite", "mujoco-v9", "--plan"], "cannot be trained on HalfCheetah-v9"),
    ([*RUN, "--envs", "Cartpole"], "did you mean 'CartPole'?"),
    ([*RUN, "--jobs", "0"], "argument --jobs: '0' is not allowed; allowed are positive integers"),
    ([*RUN, "--seeds", "5-3"], "seeds='5-3' is not allowed; allowed are a number such as 5, ranges such as 3-5"),
    ([*RUN, "--algos", "ano:clip_rang=1"], "unknown option of ano 'clip_rang', did you mean 'clip_range'?"),
    ([*RUN, "--grid", "ano.clip_range=wide"], "ano cannot be trained on CartPole-v1: clip_range='wide' is of type str"),
    ([*RUN, "--grid", "ano.policy_kwargs=__import__('os')"], "cannot be evaluated: name '__import__' is not defined"),
    ([*RUN, "--algos", "ano:shaping"], "option 'shaping' of 'ano:shaping' is not allowed; allowed is OPTION=VALUE"),
    ([*RUN, "--grid", "clip_range="], "grid 'clip_range=' is not allowed; allowed are [ALGORITHM.]NAME=VALUE,VALUE and paper"),
    ([*RUN, "--grid", "n_epochs=5", "n_epochs=10,20"], "grid has 'n_epochs' twice; give all of its values at once"),
    ([*RUN, "--algos", "ano:n_envs=0", "--plan"], "n_envs=0 is not allowed; allowed are integers from 1"),
    ([*RUN, "--algos", "ano:frame_stack=-2", "--plan"], "frame_stack=-2 is not allowed; allowed are integers from 1"),
    ([*RUN, "--device", "gpu"], "device='gpu' is not allowed; allowed are auto, cpu, cuda"),
    ([*RUN, "--grid", "lr=1e-3"], "unknown hyperparameter of this plan 'lr', did you mean 'learning_rate'?"),
    ([*RUN, "--algos", "ano", "trpo", "--grid", "trpo.clip_range=1"], "of this plan 'trpo.clip_range'"),
    (["report", "nowhere"], "nowhere holds no results"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_are_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert re.fullmatch(rf"error: .*{re.escape(message)}.*\n", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_a_plan_is_shown_and_nothing_is_written_and_without_plan_it_is_executed(capsys, monkeypatch, tmp_path):
    arguments = [*RUN, "--seeds", "2", "--steps", "512", "--grid", "n_epochs=10,20", "--out", str(tmp_path / "out")]
    assert main([*arguments, "--plan"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["all", "1", "8", "8", "4,096"] in rows
    assert not (tmp_path / "out").exists()
    execute = mock.Mock(return_value={})
    monkeypatch.setattr("sb3_ano.bench.runner.execute", execute)
    assert main([*arguments, "--jobs", "3", "--threads", "2", "--no-models"]) == 0
    missing, pool, _, options = execute.call_args.args
    assert (len(missing), options) == (8, {"device": "cpu", "models": False})
    assert (pool._executor._max_workers, pool._options["threads"]) == (3, 2)  # no more run at a time


@pytest.mark.parametrize("backend", ["auto", "envpool"])
def test_a_plan_of_atari_games_makes_one_of_them_and_finds_those_that_are_none(backend, monkeypatch):
    """The models of 40 games and five algorithms took minutes; with a backend of the user's choice, a game may be missing."""
    made = mock.Mock(side_effect=runner.make_env), mock.Mock(side_effect=runner.make_model)
    for name, function in zip(("make_env", "make_model"), made, strict=True):
        monkeypatch.setattr(runner, name, function)
    suite = load_suite("atari").select(["Pong", "Breakout", "Boxing"]).model_copy(update={"backend": backend})
    plan = make_plan(suite, ["ppo", "ano"], range(3), {"n_epochs": [2, 4]})
    runner.check_runs(plan)
    assert [function.call_count for function in made] == [1 if backend == "auto" else 3, 4]

    tasks = {"Pong-v5": suite.tasks["Pong-v5"], "Pongg-v5": suite.tasks["Pong-v5"]}
    with pytest.raises(ValueError, match="ppo cannot be trained on Pongg-v5"):
        runner.check_runs(make_plan(suite.model_copy(update={"tasks": tasks}), ["ppo"], [0]))


def test_a_configuration_is_tried_on_each_kind_of_spaces():
    suite = load_suite("classic").select(["CartPole", "Pendulum"])
    with pytest.raises(ValueError, match="ano cannot be trained on CartPole-v1: .*[Ss][Dd][Ee]"):
        runner.check_runs(make_plan(suite, ["ano"], [0], {"use_sde": [True]}))


def test_a_plan_that_is_checked_for_long_shows_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(runner, "_SILENT_SECONDS", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # in a file, it would mix with errors
    runner.check_runs(make_plan(load_suite("classic").select(["CartPole"]), ["ppo"], [0, 1]))
    assert "Checking the plan" in capsys.readouterr().err


def test_a_plan_has_no_warnings_of_gymnasium_and_no_broken_numbers(capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    arguments = ["run", "--suite", "mujoco", "--envs", "HalfCheetah", "--algos", "ppo", "ano:shaping=spo,desired_kl=0.01"]
    arguments += ["--grid", "learning_rate=1e-4,1e-3", "policy_kwargs=dict(net_arch=[64,64]),dict(net_arch=[/red])"]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        main([*arguments, "--plan"])
        assert "cannot be evaluated" in capfd.readouterr().err
        assert main([*arguments[:-1], "--seeds", "9999", "--plan"]) == 0
    out, err = capfd.readouterr()
    assert "\x1b" not in out + err
    assert "WARN" not in out + err
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].split() == ["all", "1", "39,996", "39,996", "399,960,000,000"]
    assert out.count(" 99,990,000,000") == 4


def test_names_in_a_plan_are_no_markup(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    run = make_plan(load_suite("classic").select(["CartPole"]), ["ano"], [0])[0]
    runner.show_plan([dataclasses.replace(run, changed={"policy_kwargs": "dict(net_arch=[a])", "x": "[/red]"})], [])
    # The console may be that of an earlier test, which is narrower.
    shown = "".join(capsys.readouterr().out.split())
    assert "[a])" in shown
    assert "x=[/red]" in shown


def test_the_options_of_a_report_are_its_settings(capsys, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr("sb3_ano.bench.report.write_report", lambda *arguments: calls.append(arguments) or ["a note"])
    more = "--out shown --tables td3 classic --returns training --last 3 --reps 20"
    commands = f"report {tmp_path}", f"report {tmp_path} {more}"
    assert [main(command.split(), "bench") for command in commands] == [0, 0]
    default = Settings("evaluation", 1, 2000, ("td3", "mnih2015", "classic"), f"bench {commands[0]}")
    given = Settings("training", 3, 20, ("td3", "classic"), f"bench {commands[1]}")
    assert calls == [(tmp_path, tmp_path / "report", default), (tmp_path, Path("shown"), given)]
    assert capsys.readouterr().out.splitlines()[:2] == ["a note", str(tmp_path / "report" / "index.html")]


@pytest.mark.slow
def test_from_the_plan_to_the_report(tmp_path, capfd):
    out = tmp_path / "out"
    arguments = [*RUN, "--seeds", "2", "--steps", "600", "--jobs", "2", "--out", str(out)]
    assert main([*arguments, "--seeds", "1"]) == 0
    assert len(Results(out).names()) == 2
    assert main([*arguments, "--no-models"]) == 0
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert main(arguments) == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before
    assert [(run.path / "model.zip").exists() for run in Results(out).runs()].count(True) == 2
    assert main(["report", str(out), "--reps", "50"]) == 0
    assert "PPO" in (out / "report" / "index.html").read_text()
