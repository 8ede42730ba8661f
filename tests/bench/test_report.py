"""The report as a folder: what is in it, what it says, and what is refused without a trace."""

import csv
import json
import re
import resource
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib.resources import files

import numpy as np
import pytest

from sb3_ano.bench.cli import main
from sb3_ano.bench.report.content import estimate, number, percent
from sb3_ano.bench.statistics import Estimate
from tests.bench.synthetic_results import write_results

MUJOCO = {"HalfCheetah-v4": (-289.415, 10201.2), "Hopper-v4": (18.791, 3472.2)}
# Normalised final scores by algorithm, learning rate and clip range.
SCORES = {
    "ppo": {(3e-4, 0.1): 0.5, (3e-4, 0.2): 0.6, (1e-3, 0.1): 0.3, (1e-3, 0.2): 0.36},
    "ano": {(3e-4, 0.1): 0.6, (3e-4, 0.2): 0.7, (1e-3, 0.1): 0.55, (1e-3, 0.2): 0.63},
}


def mujoco_runs(seeds=3):
    for env_id, (random, expert) in MUJOCO.items():
        for algorithm, by_setting in SCORES.items():
            for (rate, clip_range), score in by_setting.items():
                for seed in range(seeds):
                    final = random + (score + 0.01 * (seed - 1)) * (expert - random)
                    settings = {"learning_rate": rate, "clip_range": clip_range}
                    yield {"env_id": env_id, "algorithm": algorithm, "seed": seed, "final": final, "start": random} | {
                        "settings": settings
                    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    runs = list(mujoco_runs())
    runs += [
        {"env_id": env_id, "algorithm": algorithm, "seed": 0, "final": 5.0, "suite": "mine"}
        for env_id in ("Own-v0", "AirRaid-v5")
        for algorithm in ("ppo", "ano:shaping=identity")
    ]
    folder = write_results(tmp_path_factory.mktemp("bench") / "results", runs)
    failed = {"run_id": "Own-v0__ppo__seed9", "attempts": 2, "errors": ["Traceback\nValueError: it broke"], "date": ""}
    (folder / "failed").mkdir()
    (folder / "failed" / "Own-v0__ppo__seed9.json").write_text(json.dumps(failed))
    return folder


@pytest.fixture(scope="module")
def report(results, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "report"
    assert main(["report", str(results), "--out", str(folder), "--reps", "50"]) == 0
    return folder


class Page(HTMLParser):
    """Tables by their captions, sources of images, and attributes that could reach a network."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.images, self.links, self._row, self._caption, self._in = {}, [], [], [], "", None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        if tag == "img":
            self.images.append(named)
        self.links += [value for name, value in attributes if name in ("src", "href", "action", "data")]
        if tag == "caption":
            self._caption = ""
        if tag == "tr":
            self._row = []
        if tag in ("td", "th"):
            self._row.append("")
        if tag in ("caption", "td", "th"):
            self._in = tag

    def handle_data(self, data):
        if self._in == "caption":
            self._caption += data
        elif self._in:
            self._row[-1] += data

    def handle_endtag(self, tag):
        if tag in ("caption", "td", "th"):
            self._in = None
        if tag == "tr":
            self.tables.setdefault(self._caption, []).append(self._row)


@pytest.fixture(scope="module")
def page(report):
    return Page((report / "index.html").read_text())


def rows_of(page, caption):
    (found,) = [rows for name, rows in page.tables.items() if name.startswith(caption)]
    return [dict(zip(found[0], row, strict=True)) for row in found[1:]]


def test_the_page_refers_to_nothing_outside_itself(page):
    assert page.links
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert all(image["alt"] and image["src"].startswith("data:image/svg+xml;base64,") for image in page.images)


def test_every_figure_is_there_as_png_and_svg(report, page):
    names = {file.stem for file in (report / "figures").iterdir()}
    assert len(names) == len(page.images)
    wanted = ["aggregates", "profiles", "improvement", "efficiency", "learning-rates", "sensitivity", "dynamics", "speed"]
    assert {f"mujoco-{name}" for name in wanted} | {"geometry", "mujoco-task-Hopper-v4"} <= names
    for name in names:
        assert (report / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert b"<svg" in (report / "figures" / f"{name}.svg").read_bytes()


def test_aggregates_are_those_of_the_best_settings(page):
    rows = {row["algorithm"]: row for row in rows_of(page, "The algorithms of the figure")}
    # Of 0.69 0.69 0.70 0.70 0.71 0.71, the middle four.
    assert rows["ano clip_range=0.2 learning_rate=0.0003"]["IQM"].startswith("0.700 (")
    assert rows["ppo clip_range=0.2 learning_rate=0.0003"]["mean"].startswith("0.600 (")
    assert len(rows_of(page, "All settings")) == 8


def test_relative_drops_are_those_of_the_scores(page):
    rows = rows_of(page, "Scores and relative changes")
    changes = {(row["algorithm"].split()[0], row["learning rate"]): row["IQM, change"] for row in rows}
    assert changes["ppo", "0.001"].startswith("-40.0 % (")
    assert changes["ano", "0.001"].startswith("-10.0 % (")
    assert changes["ano", "0.0003"] == ""


def test_improvement_areas_and_sensitivity_are_those_of_the_scores(page):
    (better,) = rows_of(page, "Probability of improvement")
    assert (better["P(X > Y)"], better["interval"]) == ("1.00 (1.00 to 1.00)", "above 0.5")
    areas = {row["algorithm"].split()[0]: float(row["IQM"].split()[0]) for row in rows_of(page, "Area under")}
    assert areas == pytest.approx({"ppo": 0.6 * 0.525, "ano": 0.7 * 0.525}, abs=1e-3)
    values = {(row["algorithm"].split()[0], row["value"]): row["IQM"][:5] for row in rows_of(page, "Scores by setting")}
    assert values == {("ppo", "0.1"): "0.500", ("ppo", "0.2"): "0.600", ("ano", "0.1"): "0.600", ("ano", "0.2"): "0.700"}


def test_every_row_names_its_runs_and_the_list_has_them_all(page, results):
    run_ids = {folder.name for folder in (results / "runs").iterdir()}
    listed = {row["run"] for caption, rows in page.tables.items() if caption.startswith("All runs") for row in records(rows)}
    assert listed == run_ids
    (ano,) = [row for row in rows_of(page, "The algorithms of the figure") if row["algorithm"].startswith("ano")]
    stem = "ano__clip_range=0.2,learning_rate=0.0003__seed{0,1,2}"
    assert ano["runs"] == f"6 runsHalfCheetah-v4__{stem}Hopper-v4__{stem}"
    without = [caption for caption, rows in page.tables.items() if "runs" not in rows[0]]
    assert {caption.split(",")[0] for caption in without} == {
        "All runs of mujoco",
        "All runs of mine",
        "Slopes for a positive advantage",
    }


def records(rows):
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def test_what_is_missing_is_named_with_its_reason(report):
    text = (report / "summary.md").read_text()
    assert "Not in the aggregates: Own-v0 (in none of the tables td3, mnih2015, classic)." in text
    assert "Not in the aggregates: AirRaid-v5 (mnih2015 has no random and human score)." in text
    assert "1 failed run: Own-v0__ppo__seed9 (ValueError: it broke)" in text


def test_the_summary_shows_the_figures_and_names_all_runs(report, results):
    text = (report / "summary.md").read_text()
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert {f"figures/{file.name}" for file in (report / "figures").glob("*.png")} == set(pictures)
    patterns = re.findall(r"- `(.+)__seed(?:\{([\d,]+)\}|(\d+))`", text)
    named = {f"{stem}__seed{seed}" for stem, several, one in patterns for seed in (several or one).split(",")}
    assert named == {folder.name for folder in (results / "runs").iterdir()}


def test_the_table_of_runs_has_the_numbers_in_full(report):
    with (report / "runs.csv").open() as file:
        rows = {row["run_id"]: row for row in csv.DictReader(file)}
    row = rows["Hopper-v4__ano__clip_range=0.2,learning_rate=0.0003__seed1"]
    assert float(row["score"]) == pytest.approx(0.7, abs=1e-12)
    assert float(row["wall_seconds"]) == 50.0


def test_the_same_seed_gives_the_same_report(results, report, tmp_path):
    assert main(["report", str(results), "--out", str(tmp_path / "again"), "--reps", "50"]) == 0
    for file in sorted(report.rglob("*.*")):
        first, second = (one / file.relative_to(report) for one in (report, tmp_path / "again"))
        assert first.is_dir() or without_dates(first) == without_dates(second), file.name


def without_dates(file):
    if file.suffix not in (".html", ".md"):
        return file.read_bytes()
    return [line for line in file.read_text().splitlines() if not re.search("Written|Command", line)]


def test_a_report_is_replaced_as_a_whole(results, report, tmp_path):
    folder = tmp_path / "report"
    folder.mkdir()
    (folder / "index.html").write_bytes((report / "index.html").read_bytes())
    (folder / "of_the_earlier_one").touch()
    assert main(["report", str(results), "--out", str(folder), "--reps", "2", "--returns", "training"]) == 0
    assert sorted(one.name for one in folder.iterdir()) == ["figures", "index.html", "runs.csv", "summary.md"]
    assert "Returns: of the training's episodes" in (folder / "summary.md").read_text()


def test_a_folder_with_something_else_is_not_touched(results, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert main(["report", str(results), "--out", str(tmp_path)]) == 2
    assert "holds other files" in capsys.readouterr().err
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("thesis.tex", "years of work")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tables", "mnih2013"], "no score table 'mnih2013'"),
        (["--reps", "0"], "'0' is not allowed"),
        (["--seed", "-1"], "seed=-1 is not allowed"),
        (["--returns", "best"], "invalid choice: 'best'"),
    ],
)
def test_bad_options_are_one_line_and_leave_nothing(results, tmp_path, capsys, options, message):
    assert main(["report", str(results), "--out", str(tmp_path / "report"), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_folders_without_results_and_of_another_version_are_one_line(tmp_path, capsys):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "results.json").write_text('{"format": 2}')
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert main(["report", str(tmp_path / "other")]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "is not a folder of results" in first
    assert "format 2; this version of sb3_ano reads and writes format 1" in second


def test_an_earlier_report_stays_where_a_new_one_cannot_be_written(results, report, tmp_path, capsys):
    folder = tmp_path / "report"
    shutil.copytree(report, folder)
    before = {file: file.read_bytes() for file in folder.rglob("*.*") if file.is_file()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        assert main(["report", str(results), "--out", str(folder), "--reps", "2"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in folder.rglob("*.*") if file.is_file()} == before
    assert [one.name for one in tmp_path.iterdir()] == ["report"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.7064, "0.706"), (4.514, "4.51"), (-12.34, "-12.3"), (1234.5, "1,234"), (999.6, "1,000"), (0.0, "0.00")],
)
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


def test_numbers_that_are_none_are_shown_as_such():
    assert [number(value) for value in (np.nan, np.inf)] == ["-", "∞"]
    assert estimate(Estimate(0.5)) == "0.500"
    assert estimate(Estimate(-0.373, -0.4, -0.3), percent) == "-37.3 % (-40.0 % to -30.0 %)"


_LARGE = """
import resource, sys, time
from sb3_ano.bench.cli import main
start = time.perf_counter()
status = main(["report", sys.argv[1], "--out", sys.argv[2]])
used = resource.getrusage(resource.RUSAGE_SELF)
print(status, time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_a_thousand_runs_are_reported_within_a_minute_and_two_gigabytes(tmp_path):
    with (files("sb3_ano.bench") / "reference" / "atari_wang2016.csv").open() as file:
        games = [row["game"] for row in csv.DictReader(file)]
    rng = np.random.default_rng(0)
    runs = [
        {"env_id": f"{game}-v5", "algorithm": algorithm, "seed": seed, "final": 1000 * rng.lognormal(), "suite": "atari"}
        for game in games
        for algorithm in ("ppo", "trpo", "spo", "papo", "ano")
        for seed in range(5)
    ]
    assert len(runs) == 1000
    folder = write_results(tmp_path / "results", runs, episodes=4000)
    command = [sys.executable, "-c", _LARGE, str(folder), str(tmp_path / "report")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    status, seconds, cpu_seconds, memory = map(float, done.stdout.splitlines()[-1].split())
    print(f"{seconds:.1f} s, with imports {cpu_seconds:.1f} s of a processor, {memory / 1e9:.2f} GB")
    assert status == 0
    # The time of a processor is what the report needs; other tests may run at the same time.
    assert cpu_seconds < 60
    assert memory < 2e9


@pytest.mark.slow
def test_real_runs_are_reported(tmp_path):
    run = ["run", "--suite", "classic", "--envs", "CartPole-v1", "--algos", "ppo", "ano", "--seeds", "2", "--steps", "2048"]
    assert main([*run, "--jobs", "1", "--out", str(tmp_path / "results")]) == 0
    assert main(["report", str(tmp_path / "results"), "--reps", "50"]) == 0
    page = Page((tmp_path / "results" / "report" / "index.html").read_text())
    returns = {row["algorithm"]: float(row["return"]) for row in rows_of(page, "Mean return at the end")}
    assert set(returns) == {"ppo", "ano"}
    assert all(8 < value <= 500 for value in returns.values())  # CartPole-v1 falls after eight steps at the earliest
    (ano,) = [row for row in rows_of(page, "Medians over all tasks") if row["algorithm"] == "ano"]
    assert float(ano["KL of an update"]) > 0
    assert float(ano["largest ratio"]) > 1
