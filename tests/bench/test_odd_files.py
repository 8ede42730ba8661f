"""Results that a stranger wrote, or that a disk damaged: one line that names the file, and nothing that a program obeys."""

import io
import json
import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import yaml

from sb3_ano.bench.cli import main
from sb3_ano.bench.export import merge_csv, safe_for_spreadsheets
from sb3_ano.bench.plan import make_plan
from sb3_ano.bench.results import Results
from sb3_ano.bench.suites import load_suite
from sb3_ano.bench.training import checksum
from tests.bench.common import runs, small_run, write_results, write_run_files


def npz(**arrays) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


STEPS, RETURNS = np.array([10, 20]), np.ones((2, 3))
ODD_FILES = {
    "monitor.csv": [
        b"",
        b"\xff\xfe\x00r,l",
        b"#{}\nr,l,t\n1,2,3\n",
        b"#{}\nr,l,t,timesteps\nabc,2,3,4\n",
        b"#{}\nr,l,t,timesteps\n1,2,3,nan\n1,2,3,4\n",
        b"#{}\nr,l,t,timesteps\n1,2,3,9\n1,2,3,4\n",
        b"#{}\nr,l,t,timesteps\n1,2,3,-1\n",
        b"#{}\nr,l,t,timesteps\n1,2,3,1e300\n",
        b'#{}\nr,l,t,timesteps\n1,2,3,"4\n',
    ],
    "progress.csv": [
        b"",
        b"\xe9\n1\n",
        b"update/kl_after\n0.1\n",
        b"time/total_timesteps,update/kl_after\n10,high\n20,0.1\n",
        b"time/total_timesteps\ninf\n",
        b"time/total_timesteps\n10\n10\n",
        b"a,b\n1,2,3\n1\n",
    ],
    "evaluations.npz": [
        b"",
        b"PK\x03\x04 truncated",
        npz(timesteps=STEPS, results=RETURNS)[:-40],
        npz(timesteps=STEPS),
        npz(timesteps=STEPS, results=np.ones(2)),
        npz(timesteps=STEPS, results=np.ones((3, 3))),
        npz(timesteps=STEPS, results=np.ones((2, 0))),
        npz(timesteps=STEPS, results=np.full((2, 3), "a")),
        npz(timesteps=STEPS, results=np.full((2, 3), {}, dtype=object)),
        npz(timesteps=np.array([20, 10]), results=RETURNS),
        npz(timesteps=np.array([np.nan, 10]), results=RETURNS),
    ],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return write_results(tmp_path_factory.mktemp("results"), runs(["Hopper-v4"], ["ano"]))


def rewrite(results, name: str, content: bytes, keep):
    """Write a file of the first run with a checksum that matches; ``keep`` restores it."""
    run = Results(results).runs()[0].path
    for file in (run / name, run / "run.json"):
        keep.append((file, file.read_bytes()))
    (run / name).write_bytes(content)
    if name != "run.json":
        document = json.loads((run / "run.json").read_text())
        document["sha256"][name] = checksum(run / name)
        (run / "run.json").write_text(json.dumps(document))
    return run


@pytest.fixture
def kept():
    files: list = []
    yield files
    for file, content in reversed(files):
        file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "content"), [(name, content) for name, contents in ODD_FILES.items() for content in contents]
)
@pytest.mark.parametrize("command", ["report", "export"])
def test_a_file_with_odd_content_is_named_in_one_line(command, name, content, results, kept, tmp_path, capsys):
    run = rewrite(results, name, content, kept)
    options = ["--returns", "training"] if command == "report" and name == "monitor.csv" else []
    assert main([command, str(results), "--out", str(tmp_path / "out"), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {run / name} cannot be read: ")
    assert not (tmp_path / "out").exists()


ODD_VALUES = [
    {"total_timesteps": 0},
    {"total_timesteps": True},
    {"total_timesteps": 10**30},
    {"seed": 10**30},
    {"seed": False},
    {"seconds": "long"},
    {"seconds": -1},
    {"seconds": float("nan")},
    {"timesteps": "many"},
    {"finished": 5},
    {"commit": {}},
    {"backend_used": [1]},
    {"versions": 3},
    {"machine": "a"},
    {"suite": None},
    {"suite": "\ud800"},
    {"hyperparameters": {"clip_range": float("inf")}},
    {"hyperparameters": []},
    {"evaluation": {"episodes": float("nan")}},
]


@pytest.mark.parametrize("odd", ODD_VALUES)
def test_odd_values_in_run_json_are_named_in_one_line(odd, results, kept, tmp_path, capsys):
    document = Results(results).runs()[0].document
    run = rewrite(results, "run.json", json.dumps({**document, **odd}).encode(), kept)
    assert main(["report", str(results), "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{run}: run.json has " in line


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe{}", b"null", b'{"format": 2}', b"[NaN]"])
def test_a_run_json_that_is_none_is_named_in_one_line(content, results, kept, capsys):
    run = rewrite(results, "run.json", content, kept)
    assert main(["report", str(results)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(run) in line


ODD_BUT_ALLOWED = {
    "algorithm": "their_algorithm",
    "hyperparameters": {"clip_range": "nan", "n_epochs": [1, {"a": None}], "gamma": 10**400, "max_grad_norm": "inf"},
    "changed": {"total_timesteps": "many"},
    "suite": "",
    "versions": {"torch": 2},
    "seconds": None,
}


def test_odd_values_that_are_allowed_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("sb3_ano.bench.report.render", lambda figure, kind: b"")
    write_results(tmp_path, runs(["Hopper-v4"], ["ano"], [0, 1]))
    for run in Results(tmp_path).runs():
        (run.path / "run.json").write_text(json.dumps({**run.document, **ODD_BUT_ALLOWED}))
    assert main(["report", str(tmp_path), "--reps", "20"]) == 0
    assert "their_algorithm" in (tmp_path / "report" / "index.html").read_text()
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "csv")]) == 0


def constants(text: str):
    """Parse JSON as other languages do, which have no NaN and no infinity."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_what_a_run_writes_is_strict_json_also_with_infinite_settings(tmp_path):
    run = small_run("ano", hyperparameters={"max_grad_norm": float("inf")}, env_kwargs={"g": float("nan")})
    write_run_files(tmp_path, run, 1.0, details={"seconds": float("nan")} | {"timesteps": 512})
    document = constants((tmp_path / "runs" / run.name / "run.json").read_text())
    assert (document["hyperparameters"]["max_grad_norm"], document["env_kwargs"]["g"]) == ("inf", "nan")


def test_a_value_of_a_suite_that_json_lacks_is_named(tmp_path):
    (tmp_path / "mine.yml").write_text("tasks: {Pendulum-v1: {env_kwargs: {g: 2026-01-01}}}")
    with pytest.raises(ValueError, match="suite 'mine' has a value for Pendulum-v1 that JSON lacks: .*date"):
        make_plan(load_suite(str(tmp_path / "mine.yml")), ["ano"], [0])
    assert yaml.safe_load("2026-01-01") is not str


CELLS = ["=1+1", "+cmd", "-cmd", "@SUM(A1)", "\t=1", "\r=1", "\uff1d1", "-1.5", "+3", "-1e-3", "-inf", "plain", "a=1", -2.5, 3]


def test_formulas_are_escaped_once_and_numbers_are_not(tmp_path):
    table = pd.DataFrame({"a": CELLS, "=b": range(len(CELLS))})
    safe = safe_for_spreadsheets(table)
    assert list(safe) == ["a", "'=b"]
    assert safe["a"].tolist() == [*(f"'{cell}" for cell in CELLS[:7]), *CELLS[7:]]
    pd.testing.assert_frame_equal(safe_for_spreadsheets(safe), safe)


def test_exported_rows_of_odd_names_are_escaped_and_found_again(tmp_path):
    made = runs(["=HYPERLINK(0)"], ["@algorithm"], [0, 1], final=-1000.0, changed={"=x": "-1"}, hyperparameters={})
    results = write_results(tmp_path / "results", made)
    for _ in range(2):
        assert main(["export", str(results), "--out", str(tmp_path / "csv")]) == 0
    for name, count in (("runs.csv", 2), ("curves.csv", 40)):
        table = pd.read_csv(tmp_path / "csv" / name, dtype=str)
        assert len(table) == count
        assert set(table["env"]) == {"'=HYPERLINK(0)"}
        assert set(table["algorithm"]) == {"'@algorithm"}
        assert set(table["changed"]) == {"'=x=-1"}
        assert table["evaluation_return"].astype(float).min() == -1000.0


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n", b"\xff\xfe\x00", b"env\n1,2,3\n1\n"])
def test_a_csv_file_that_export_did_not_write_is_named_and_kept(content, results, tmp_path, capsys):
    (tmp_path / "runs.csv").write_bytes(content)
    assert main(["export", str(results), "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path / 'runs.csv'} cannot be read: ")
    assert (tmp_path / "runs.csv").read_bytes() == content


def test_rows_without_an_identity_are_merged(tmp_path):
    key = ["env", "identity"]
    (tmp_path / "runs.csv").write_text("env,value\nA,1\nB,2\n")
    assert merge_csv(pd.DataFrame({"env": ["A"], "identity": ["x"], "value": [3]}), tmp_path / "runs.csv", key) == 2


# Python's own mode for UTF-8 would hide the locale.
LOCALES = [{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "latin-1"}]


@pytest.mark.skipif(sys.platform != "linux", reason="the locales are those of Linux")
@pytest.mark.slow
@pytest.mark.parametrize("variables", LOCALES)
def test_paths_and_tasks_that_a_locale_lacks_are_reported(variables, tmp_path):
    directory = tmp_path / "результаты 実験"
    write_results(directory, runs(["Zürich-v0"], ["ano"], [0, 1], suite="実験"))
    command = [sys.executable, "-m", "sb3_ano.bench", "report", str(directory), "--reps", "20"]
    finished = subprocess.run(command, capture_output=True, env={**os.environ, **variables})
    assert (finished.returncode, finished.stderr) == (0, b"")
    page = (directory / "report" / "index.html").read_text(encoding="utf-8")
    assert all(name in page for name in ("результаты 実験", "Zürich-v0", "実験"))
    assert all(path.name.isascii() for path in (directory / "report").rglob("*"))
