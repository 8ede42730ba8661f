"""Medians, quartiles and tables, from blocks whose results can be worked by hand."""

import pytest

from sb3_ano.bench.speed_report import markdown, ratios, shares, summarise

PROFILE = {"seconds": 10.0, "env": 2.0, "forward": 1.0, "update": 6.0, "collect": 3.5}


def block(speed, seconds=2.0, **more):
    return {"steps": speed * seconds, "seconds": seconds, **more}


def content(contenders, total_steps=None):
    return {
        "case": {"name": "tiny", "title": "A tiny task", "total_steps": total_steps},
        "settings": {"pairs": 5, "block_seconds": 4.0, "quick": False},
        "machine": {"cpu": "a processor", "cores": 2},
        "reference": {
            "date": "2026-01-02T00:00:00",
            "threads": {"torch": 1, "envs": 1},
            "memory": {"peak_bytes": 400e6},
            "versions": {"torch": "2"},
            "profile": PROFILE,
        },
        "contenders": contenders,
    }


# Ratios 2, 3, 1, 4, 2: sorted 1, 2, 2, 3, 4, so quartiles 2, 2, 3.
PAIRS = [
    {"first": "reference", "reference": block(1000), "contender": block(2000)},
    {"first": "contender", "reference": block(1000), "contender": block(3000, seconds=5.0)},
    {"first": "reference", "reference": block(2000), "contender": block(2000)},
    {"first": "contender", "reference": block(500), "contender": block(2000)},
    {"first": "reference", "reference": block(1100), "contender": block(2200)},
]
FAST = {
    "status": "finished",
    "date": "2026-01-03T00:00:00",
    "threads": {"torch": 1, "envs": 2},
    "memory": {"peak_bytes": 500e6},
    "versions": {"torch": "2", "envpool": "1"},
    "profile": {**PROFILE, "forward": 0.0},
    "pairs": PAIRS,
}
ALONE = {
    "status": "finished",
    "date": "2026-01-03T00:00:00",
    "threads": {"torch": 1, "envs": 1},
    "pairs": [{"first": "contender", "reference": None, "contender": block(9000)}],
}
MISSING = {"status": "skipped", "date": "2026-01-03T00:00:00", "message": "sbx is not installed here"}


def test_ratios_are_taken_pair_by_pair():
    assert ratios(PAIRS) == [2.0, 3.0, 1.0, 4.0, 2.0]
    assert ratios(ALONE["pairs"]) == []


def test_rows_are_those_worked_by_hand():
    sb3, fast, alone, missing = summarise(content({"fast": FAST, "env": ALONE, "sbx": MISSING}))
    assert sb3.name == "sb3"
    assert sb3.steps_per_second == (1000.0, 500.0, 2000.0)
    assert sb3.ratio is None
    assert fast.steps_per_second == (2000.0, 2000.0, 3000.0)
    assert fast.ratio == (2.0, 2.0, 3.0)
    assert fast.not_slower
    assert fast.threads == (1, 2)
    assert fast.memory_ratio == 1.25
    assert alone.steps_per_second == (9000.0, 9000.0, 9000.0)
    assert alone.ratio is alone.not_slower is None
    assert (missing.status, missing.message) == ("skipped", "sbx is not installed here")


@pytest.mark.parametrize(("slow", "verdict"), [(980, True), (960, False)])
def test_not_slower_looks_at_the_lower_quartile(slow, verdict):
    pairs = [{"reference": block(1000), "contender": block(speed)} for speed in (slow, slow, 1500, 1500, 1500)]
    assert summarise(content({"fast": {**FAST, "pairs": pairs}}))[1].not_slower is verdict


def test_shares_sum_to_one():
    assert shares(PROFILE) == pytest.approx({"env": 0.2, "forward": 0.1, "update": 0.6, "other": 0.1})


def test_the_table_of_a_steady_state():
    text = markdown([content({"fast": FAST, "env": ALONE, "sbx": MISSING})])
    assert "### A tiny task (`tiny`)\n\n2026-01-03; a processor, 2 cores; 5 pairs of 4 s blocks; torch 2, envpool 1." in text
    assert "| sb3 | 1 | 1,000 (500 to 2,000) |  | 400 |" in text
    assert "| fast | 1 + 2 | 2,000 (2,000 to 3,000) | 2.00, **2.00**, 3.00 | 500 (1.25 x SB3) |" in text
    assert "| env | 1 | 9,000 (9,000 to 9,000) |  |  |" in text
    assert "| sbx |  |  |  | skipped: sbx is not installed here |" in text
    assert "| sb3 | 20 % | 10 % | 60 % | 10 % |" in text
    assert "| fast | 20 % | - | 60 % | 20 % |" in text
    assert "quick" not in text


def test_the_table_of_whole_runs():
    runs = [
        {
            "reference": block(100, 10.0, process_seconds=13.0, versions={"torch": "2"}),
            "contender": block(200, 5.0, process_seconds=9.0, versions={"torch": "2"}),
        }
    ]
    whole = content({"fast": {**FAST, "pairs": runs, "status": "unfinished"}}, total_steps=1000)
    del whole["reference"]["profile"], whole["contenders"]["fast"]["profile"]
    text = markdown([whole])
    assert "| contender | threads | seconds (range) | whole process | times SB3 | memory, MB |" in text
    assert "| sb3 | 1 | 10.0 (10.0 to 10.0) | 13.0 (13.0 to 13.0) |  | 400 |" in text
    assert "| fast (unfinished) | 1 + 2 | 5.0 (5.0 to 5.0) | 9.0 (9.0 to 9.0) | 2.00, **2.00**, 2.00 |" in text
    assert "share of time" not in text


def test_a_quick_run_is_marked():
    quick = content({})
    quick["settings"]["quick"] = True
    assert "these numbers mean nothing" in markdown([quick])
