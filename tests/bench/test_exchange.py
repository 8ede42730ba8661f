"""Results in other formats and from other programs."""

import sys
from unittest import mock

import numpy as np
import pandas as pd
import pytest

from sb3_ano.bench.cli import main
from sb3_ano.bench.exchange import KEY, export, import_logs
from sb3_ano.bench.results import Results
from tests.bench.common import runs, write_results

RATES = ({}, {"learning_rate": "lin_0.001"})
RETURNS = [1000.0, 1010.0] * 4
RUNS = [run for name in ("ppo", "spo") for changed in RATES for run in runs(["Hopper-v4"], [name], (0, 1), changed=changed)]


def test_csv_has_a_row_per_run_and_one_per_evaluation_and_keeps_other_rows(tmp_path):
    first, second = write_results(tmp_path / "first", RUNS[:4]), write_results(tmp_path / "second", RUNS[4:])
    files = [tmp_path / "csv" / name for name in ("runs.csv", "curves.csv")]
    assert export(first, tmp_path / "csv").endswith(f"4 runs; {files[0]} has 4")
    export(second, tmp_path / "csv")
    before = [file.read_text() for file in files]
    assert export(second, tmp_path / "csv").endswith("runs.csv has 8")
    assert [file.read_text() for file in files] == before
    table, curves = map(pd.read_csv, files)
    assert list(table)[: len(KEY)] == KEY
    assert table["learning_rate"].tolist() == [0.0003, 0.0003, 0.001, 0.001] * 2
    assert table["evaluation_return"].tolist() == RETURNS
    assert table["last_evaluations"].tolist() == pytest.approx([950.0, 959.5] * 4)
    assert table["training_return"][0] == pytest.approx(np.mean(1000.0 * np.arange(101, 201) / 200), rel=1e-4)
    assert curves["evaluation_return"].tolist() == pytest.approx([k * final / 20 for final in RETURNS for k in range(1, 21)])


@pytest.mark.parametrize("command", ["export", "report"])
def test_results_without_a_finished_run_are_one_line_and_write_nothing(command, tmp_path, capsys):
    (tmp_path / "results" / "runs").mkdir(parents=True)
    assert main([command, str(tmp_path / "results"), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'results'}: no run has finished\n"
    assert not (tmp_path / "out").exists()


def test_csv_keeps_runs_apart_that_differ_in_any_hyperparameter(tmp_path):
    changes = [{"omega": 0.001}, {"omega": 0.01, "learning_rate": "lin_0.001"}, {}]
    grid = [run for changed in changes for run in runs(["Hopper-v4"], ["papo"], (0,), changed=changed)]
    results = write_results(tmp_path / "grid", grid)
    for _ in range(2):
        assert export(results, tmp_path / "csv").endswith("has 3")
    table = pd.read_csv(tmp_path / "csv" / "runs.csv")
    assert table["changed"].fillna("").tolist() == ["omega=0.001", "", "omega=0.01"]
    assert table["learning_rate"].tolist() == [0.0003, 0.0003, 0.001]


def test_csv_keeps_runs_apart_that_differ_in_a_schedule_or_in_what_only_the_suite_sets(tmp_path):
    settings = [{}, {"learning_rate": 0.0003}, {"policy_kwargs": "dict(net_arch=[256])"}, {"n_steps": 7}]
    for value in settings:  # of separate directories, as of a suite that was edited
        made = runs(["Hopper-v4"], ["ppo"], (0, 1), hyperparameters=value)
        export(write_results(tmp_path / str(settings.index(value)), made), tmp_path / "csv")
    table, curves = (pd.read_csv(tmp_path / "csv" / name, dtype=str) for name in ("runs.csv", "curves.csv"))
    assert table.groupby("identity")["seed"].agg(list).tolist() == [["0", "1"]] * len(settings)
    assert len(curves) == 20 * 2 * len(settings)


def test_rows_of_earlier_versions_stay_and_those_of_the_same_runs_are_replaced(tmp_path):
    both = [write_results(tmp_path / name, runs(["Hopper-v4"], [name], (0, 1))) for name in ("ppo", "ano")]
    for results in both:
        export(results, tmp_path / "csv")
    files = [tmp_path / "csv" / name for name in ("runs.csv", "curves.csv")]
    expected = [pd.read_csv(file, dtype=str) for file in files]
    for file, rows in zip(files, expected, strict=True):
        rows.drop(columns="identity").to_csv(file, index=False)
    export(both[1], tmp_path / "csv")
    for file, rows in zip(files, expected, strict=True):
        rows["identity"] = rows["identity"].where(rows["algorithm"] == "ano")
        pd.testing.assert_frame_equal(pd.read_csv(file, dtype=str), rows, check_like=True)


@pytest.mark.parametrize("targets", [[0.01, None], [None, 0.01]])
def test_csv_takes_runs_without_a_number_that_the_others_have(targets, tmp_path):
    for target in targets:
        changed = {} if target is None else {"desired_kl": target}
        export(write_results(tmp_path / str(target), runs(["Hopper-v4"], ["ano"], (0,), changed=changed)), tmp_path)
    assert pd.read_csv(tmp_path / "runs.csv")["desired_kl"].fillna(-1.0).tolist() == [0.01, -1.0]


# Their rows in CSV files differ in steps or identity.
@pytest.mark.parametrize("other", [{"steps": 5000}, {"evaluated": 9}])
def test_two_runs_of_one_row_of_a_report_are_named(other, tmp_path, capsys):
    results = write_results(tmp_path, runs(["Hopper-v4"], seeds=[0]) + runs(["Hopper-v4"], ["ano"], [0], **other))
    names = [run.path.name for run in Results(results).runs() if run.document["algorithm"] == "ano"]
    message = (
        f"error: {' and '.join(names)} have the same algorithm, hyperparameters, task and seed; move one to other results\n"
    )
    assert main(["report", str(results)]) == 2
    assert capsys.readouterr().err == message
    assert main(["export", str(results), "--out", str(tmp_path / "csv")]) == 0
    assert len(pd.read_csv(tmp_path / "csv" / "runs.csv")) == 3


def test_an_import_writes_all_or_nothing_and_each_seed_once(tmp_path):
    for name, length in {"first": 10, "second": 20}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "monitor.csv").write_text(f"#{{}}\nr,l,t\n0,{length},1\n")
    logs, out = [tmp_path / "first", tmp_path / "missing"], tmp_path / "out"
    with pytest.raises(ValueError, match="missing has no episodes: neither"):
        import_logs(logs, out, "ppo", "Hopper-v4")
    assert not out.exists()
    (name,) = import_logs(logs[:1], out, "ppo", "Hopper-v4")
    with pytest.raises(ValueError, match=f"out has a run {name} already; --seed gives"):
        import_logs([tmp_path / "second"], out, "ppo", "Hopper-v4")
    import_logs([tmp_path / "second"], out, "ppo", "Hopper-v4", seed=1)
    for _ in range(2):  # without evaluations there are no curves
        assert export(out, tmp_path / "csv").endswith("runs.csv has 2")


@pytest.mark.parametrize("rows", ["", "r,t\n1,2\n", "r,l,t\nabc,5,1\n", "r,l,t\n1,-5,1\n", "r,l,t,timesteps\n1,5,1,inf\n"])
def test_episodes_that_are_no_numbers_are_named_with_their_file(rows, tmp_path, capsys):
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "0.monitor.csv").write_text("#{}\n" + (rows or "r,l,t\n"))
    assert main(f"import {tmp_path}/log --algo a --env CartPole-v1 --out {tmp_path}/out".split()) == 2
    assert (
        f"error: {tmp_path / 'log' / '0.monitor.csv'} has no episodes, or some without finite numbers"
        in capsys.readouterr().err
    )


def test_monitor_files_of_several_environments_are_merged_by_their_steps(tmp_path):
    (tmp_path / "zoo").mkdir()
    for index, rows in enumerate(("0,10,1\n1,20,1\n", "10,15,1\n11,15,1\n")):
        (tmp_path / "zoo" / f"{index}.monitor.csv").write_text(f'#{{"t_start": 0.0, "env_id": "A"}}\nr,l,t\n{rows}')
    import_logs([tmp_path / "zoo"], tmp_path / "out", "ppo", "Hopper-v4")
    (run,) = Results(tmp_path / "out").runs()
    assert run.episodes()[["timesteps", "r"]].to_numpy().tolist() == [[20, 0.0], [30, 10.0], [60, 1.0], [60, 11.0]]
    assert run.document["total_timesteps"] == 60
    for logs, message in (("zoo", "--seed gives the first directory another seed"), ("out/runs", "runs has no episodes")):
        with pytest.raises(ValueError, match=message):
            import_logs([tmp_path / logs], tmp_path / "out", "ppo", "Hopper-v4")


def test_tensorboard_logs_go_out_come_back_in_and_are_reported_by_their_training_returns(tmp_path, capsys, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setattr("sb3_ano.bench.report.render", lambda figure, kind: b"")
    results, out = write_results(tmp_path / "results", RUNS[:2]), tmp_path / "imported"
    for _ in range(2):  # a second export replaces the first
        export(results, tmp_path / "logs", "tensorboard")
    before = sorted(results.rglob("*"))
    with pytest.raises(ValueError, match="holds results, which would be replaced; give another directory"):
        export(results, results / "runs", "tensorboard")
    assert sorted(results.rglob("*")) == before
    logs = sorted(map(str, (tmp_path / "logs").iterdir()))
    assert main(["import", *logs, "--algo", "theirs", "--env", "Hopper-v4", "--seed", "3", "--out", str(out)]) == 0
    for seed, (run, original) in enumerate(zip(Results(out).runs(), Results(results).runs(), strict=True), start=3):
        assert (run.document["seed"], run.document["algorithm"]) == (seed, "theirs")
        np.testing.assert_allclose(run.episodes()[["r", "timesteps"]], original.episodes()[["r", "timesteps"]], rtol=1e-6)
    assert main(["report", str(out)]) == 2
    assert "no run has evaluation returns; imported runs need --returns training" in capsys.readouterr().err
    assert main(["report", str(out), "--returns", "training", "--reps", "20"]) == 0
    assert "theirs" in (out / "report" / "summary.md").read_text()


def test_weights_and_biases_gets_a_run_with_all_values_and_its_settings(tmp_path, monkeypatch):
    wandb = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    results = write_results(tmp_path / "results", RUNS[:1])
    export(results, tmp_path / "logs", "wandb")
    settings, (run,) = wandb.init.call_args.kwargs, Results(results).runs()
    assert (settings["name"], settings["id"], settings["config"]) == (run.path.name, run.path.name, run.document)
    wandb.init.return_value.__exit__.assert_called_once()
    logged = [call.args[0] for call in wandb.init.return_value.__enter__.return_value.log.call_args_list]
    returns = [(row["global_step"], row["charts/episodic_return"]) for row in logged if "charts/episodic_return" in row]
    assert returns == [*run.episodes()[["timesteps", "r"]].itertuples(index=False, name=None)]
    assert all(
        {"global_step": 100_000, **row} in logged for row in ({"eval/mean_reward": 1e3}, {"update/ratio_max_after": 1.5})
    )
    assert [row["global_step"] for row in logged] == sorted(row["global_step"] for row in logged)


@pytest.mark.parametrize(("to", "install"), [("wandb", "wandb"), ("tensorboard", "'sb3-ano[zoo]'")])
def test_a_missing_package_is_one_line(tmp_path, capsys, monkeypatch, to, install):
    monkeypatch.setitem(sys.modules, to, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    results = write_results(tmp_path / "results", RUNS[:1])
    assert main(["export", str(results), "--to", to, "--out", str(tmp_path / "logs")]) == 2
    assert f"error: {to} is not installed; install it with: pip install {install}" in capsys.readouterr().err
