"""Results as rows of CSV files."""

import numpy as np
import pandas as pd
import pytest

from sb3_ano.bench.cli import main
from sb3_ano.bench.export import KEY, export
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
