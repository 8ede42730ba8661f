"""The demo's curves, its report, and the processes that it starts."""

import json

import pytest

from sb3_ano.llm.demo import QUICK, Plan, _check_folder, _in_parallel, run_file
from sb3_ano.llm.demo_report import write_report
from sb3_ano.llm.demo_run import _curves
from sb3_ano.llm.files import read_json, write_whole

CURVES = ("gold", "proxy", "kl", "entropy", "length", "outside_low", "outside_high", "ratio_max")


def test_a_curve_has_one_value_for_each_generation():
    """Rewards are logged with the first of the updates with the same completions, everything else with all of them."""
    generation = {"rewards/gold/mean": 0.5, "rewards/reward_model/mean": 2.0, "completions/mean_length": 7.0}
    update = {"loss": 0.1, "entropy": 1.0, "ratio/outside_low": 0.0, "ratio/outside_high": 0.0, "ratio/max": 1.0}
    history = [
        {**update, **generation, "kl": 0.1},
        {**update, "kl": 0.3},
        {**update, **generation, "rewards/gold/mean": 0.7, "kl": 0.5},
        {**update, "kl": 0.9, "ratio/outside_low": 0.5},
        {"train_runtime": 1.0},
    ]
    curves = _curves(history, iterations=2)
    assert curves["completions"] == [64, 128]
    assert curves["gold"] == [0.5, 0.7]
    assert curves["kl"] == [0.2, 0.7]
    assert curves["outside_low"] == [0.0, 0.25]


def curve(gold: list[float]) -> dict:
    return {"completions": [64 * (i + 1) for i in range(len(gold))], **dict.fromkeys(CURVES, gold)}


def test_the_report_says_what_the_trainings_came_to(tmp_path):
    """The mean of the last tenth, over seeds, and the best tenth of the gold reward."""
    rising = [0.1 * i for i in range(20)]  # ends with 1.8, 1.9
    falling = rising[::-1]  # begins with 1.9, 1.8
    write_whole(run_file(tmp_path, "gano", "0"), curve(rising))
    write_whole(run_file(tmp_path, "gano", "1"), curve(falling))
    table = write_report(tmp_path, Plan(), ["grpo", "gano"])
    summary = json.loads((tmp_path / "report.json").read_text())["summary"]
    assert list(summary) == ["gano"]  # the other has not been trained yet
    assert summary["gano"]["seeds"] == 2
    assert summary["gano"]["gold"] == pytest.approx([(1.85 + 0.05) / 2, 1.8 / 2**0.5])
    assert summary["gano"]["best_gold"] == pytest.approx([1.85, 0.0])
    assert summary["gano"]["first_gold"] == pytest.approx([0.95, 1.9 / 2**0.5])
    assert summary["gano"]["outside_low"] == pytest.approx([0.95, 0.0])  # of the whole training
    assert "| gano | 2 | 0.95 ± 1.34 | 1.85 ± 0.00 | 0.95 ± 1.27 |" in table
    assert (tmp_path / "report.md").read_text().strip() == table
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_of_other_settings_is_refused(tmp_path):
    _check_folder(tmp_path, Plan())
    _check_folder(tmp_path, Plan())
    with pytest.raises(ValueError, match="holds results of other settings; name another folder"):
        _check_folder(tmp_path, QUICK)


def test_a_training_that_fails_is_told_of_with_its_last_line(tmp_path):
    with pytest.raises(ValueError, match="nonsense failed: error: unknown command 'nonsense'"):
        list(_in_parallel(tmp_path, [["nonsense"]], jobs=1))
    assert len(list(_in_parallel(tmp_path, [["--help"], ["-h"]], jobs=2))) == 2


def test_files_are_whole_or_not_there(tmp_path):
    write_whole(tmp_path / "new" / "a.json", {"a": 1})
    assert read_json(tmp_path / "new" / "a.json") == {"a": 1}
    with pytest.raises(TypeError):
        write_whole(tmp_path / "new" / "a.json", {"a": object()})
    assert read_json(tmp_path / "new" / "a.json") == {"a": 1}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]
    assert read_json(tmp_path / "nothing.json") is None
    (tmp_path / "half.json").write_text('{"a": ')
    with pytest.raises(ValueError, match="half.json is not a file of results"):
        read_json(tmp_path / "half.json")
