"""What users of ``python -m sb3_ano.llm`` stumbled over, as strict xfails for its next version."""

import re

import pytest

from sb3_ano.llm.cli import main


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="users Z11")
def test_the_report_of_a_quick_demo_says_that_it_was_quick(tmp_path):
    quick = ["--quick", "--algos", "gano", "--seeds", "1", "--jobs", "1"]
    assert main(["demo", *quick, "--out", str(tmp_path / "llm")]) == 0
    report = (tmp_path / "llm" / "report.md").read_text()
    assert report.startswith("# ")
    assert "quick" in report
    assert "± 0.00" not in report, "one seed has no spread"


@pytest.mark.parametrize(
    "expected",
    [
        r"--algo \{[^}]*gano[^}]*\}",
        r"added by sb3_ano",
        r"(?s)\A(?:[^\n]*\n){0,400}\Z",
    ],
    ids=["choices of --algo", "options of this package together", "400 lines"],
)
@pytest.mark.xfail(strict=True, reason="users Z12")
def test_help_on_train_can_be_read(expected, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["train", "--help"]) == 0
    assert re.search(expected, capsys.readouterr().out)


@pytest.mark.xfail(strict=True, reason="users Z13")
def test_a_missing_data_file_is_found_before_a_model_is_asked_for(tmp_path, capsys):
    assert main(["train", "--model", "nowhere", "--dataset", "nofile.json", "--output_dir", str(tmp_path / "x")]) == 2
    assert "nofile.json" in capsys.readouterr().err
