"""Reports: the numbers against hand-worked ones, what is selected and left out, and the effect of strangers' names."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sb3_ano.bench.algorithms import title
from sb3_ano.bench.looks import looks
from sb3_ano.bench.report import Settings, escaped, load_chapters, render, shown, text, write_report
from sb3_ano.bench.report.figures import draw_lines, points
from sb3_ano.bench.report.sections import make_sections, tasks
from sb3_ano.bench.results import Results
from sb3_ano.bench.scores import ReferenceScores
from sb3_ano.bench.statistics import Estimate
from tests.bench.common import runs, write_results

FEW = 50
SETTINGS = Settings(reps=FEW, command="the command")
FAST = {"learning_rate": "lin_0.001"}


def load(directory, settings=SETTINGS):
    (chapter,) = load_chapters(Results(directory), settings)
    return chapter


def cells(out, table: str, index: str | None = None) -> pd.DataFrame:
    return pd.read_csv(out / "tables" / f"mujoco-{table}.csv", dtype={"commit": str}, index_col=index)


def drawn(out) -> dict[str, pd.DataFrame]:
    """Return the points of figures by name."""
    return {file.stem.removeprefix("mujoco-"): pd.read_csv(file) for file in (out / "figures").glob("*.csv")}


@pytest.fixture
def report(tmp_path, monkeypatch):
    """Write a report without rendering its figures, which takes most of the time; return its directory and its notes."""
    monkeypatch.setattr("sb3_ano.bench.report.render", lambda figure, kind: b"")

    def write(*parts):
        for part in parts:
            write_results(tmp_path, part)
        return tmp_path / "report", write_report(tmp_path, tmp_path / "report", SETTINGS)

    return write


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A report with two learning rates, of which the higher is better for PPO only, and a task without reference scores."""
    directory = tmp_path_factory.mktemp("written")
    fast = [*runs(algorithms=["ppo"], final=2000.0, changed=FAST), *runs(algorithms=["ano"], changed=FAST)]
    notes = write_report(write_results(directory, runs() + fast + runs(["Own-v0"])), directory / "report", SETTINGS)
    return directory / "report", notes


def test_numbers_are_those_of_the_normalized_scores(written):
    row = cells(written[0], "aggregates", "Algorithm").loc["PPO learning_rate=0.0003"]
    normalize = ReferenceScores().normalize
    normalized = [float(normalize(task, 1000.0 + 10 * seed)) for task in ("HalfCheetah-v4", "Hopper-v4") for seed in range(3)]
    assert row[["Mean", "IQM", "Seeds"]].tolist() == pytest.approx([np.mean(normalized), np.mean(sorted(normalized)[1:5]), 3])
    curve = drawn(written[0])["efficiency"].query("line == 'PPO'")
    assert curve["x"].tolist() == pytest.approx(list(range(5, 101, 5)))
    assert curve["value"].iloc[-1] == pytest.approx(row["IQM"])
    assert cells(written[0], "improvement")[["Tasks", "P(X > Y)"]].to_numpy().tolist() == [pytest.approx([3, 6 / 9])]
    own = cells(written[0], "tasks", "Task").loc["Own-v0"]
    columns = ["Return", "Worst seed", "Steps per second"]
    assert own[columns].to_numpy().tolist() == [[1010.0, 1000.0, 1000.0], [1015.0, 1005.0, 1000.0]]
    hyperparameters = cells(written[0], "hyperparameters", "Hyperparameter")
    assert hyperparameters.loc["learning_rate"].to_dict() == {"PPO": "lin_0.0003", "ANO": "lin_0.0003"}
    listed = cells(written[0], "runs")
    assert sorted(listed["name"]) == sorted(Results(written[0].parent).names())
    assert set(listed["final"]) | {*listed["commit"]} == {*range(1000, 1030, 5), 2000.0, 2010.0, 2020.0, "0" * 40}


def test_the_points_of_figures_have_intervals_and_are_those_of_the_tables_and_updates(written):
    files = drawn(written[0])
    for rows in files.values():
        assert set(rows) == {"panel", "algorithm", "line", "x", "value", "low", "high"}
        assert rows[rows["low"].notna()].eval("low <= value <= high").all()
    (point,) = files["aggregates"].query("algorithm == 'ano' and panel == 'IQM'").to_dict("records")
    row = cells(written[0], "aggregates", "Algorithm").loc["ANO learning_rate=0.0003"]
    assert [point[name] for name in ("value", "low", "high")] == row[["IQM", "IQM low", "IQM high"]].tolist()
    expected = {"Entropy": 2.0, "Fraction outside": 0.1, "KL divergence": 3.01e-3, "Largest ratio": 1.5}
    diagnostics = cells(written[0], "diagnostics", "Algorithm").loc["PPO learning_rate=0.001"]
    assert diagnostics["Task"].tolist() == BOTH
    assert diagnostics[list(expected)].to_numpy().tolist() == [pytest.approx(list(expected.values()))] * 2
    matched = files["matched-kl"].sort_values("x")
    assert matched["x"].tolist() == pytest.approx([2.01e-3, 2.015e-3, 2.015e-3, 3.01e-3])
    assert matched["value"].iloc[-1] == cells(written[0], "all-settings", "Algorithm")["IQM"]["PPO learning_rate=0.001"]


def test_changes_are_relative_to_the_suites_learning_rate(written):
    table = cells(written[0], "sensitivity-learning-rate", "Algorithm")
    slow, fast = (table.loc[[f"{name} learning_rate={rate}" for name in ("PPO", "ANO")]] for rate in ("0.0003", "0.001"))
    changes = 100 * (fast["Mean"].to_numpy() / slow["Mean"].to_numpy() - 1)
    np.testing.assert_allclose(fast["Mean, change in %"], changes, atol=1e-9)
    assert slow["Mean, change in %"].isna().all()


# No figure came with its numbers.
def test_every_figure_and_table_is_a_file_and_the_page_needs_none_of_them(written):
    out, notes = written
    both = ["aggregates", "improvement", "tasks", "sensitivity-learning-rate"]
    for kind, endings, others in (
        ("figures", ("png", "pdf", "csv"), ["efficiency", "matched-kl"]),
        ("tables", ("csv",), ["all-settings", "diagnostics", "hyperparameters", "runs"]),
    ):
        expected = {f"mujoco-{name}.{ending}" for name in both + others for ending in endings}
        assert {path.name for path in (out / kind).iterdir()} == expected
    page = (out / "index.html").read_text()
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page)
    assert page.count("<img") == page.count(" alt=") == len(list((out / "figures").glob("*.png")))
    named = ["TD3-normalized score", "the command", "torch 2.13.0", "deterministic actions", "td3, mnih2015", "Own-v0 is not"]
    assert [name for name in named if name not in page] == []
    assert "mujoco: Own-v0 is not aggregated: no scores in td3, mnih2015, classic." in notes
    summary = (out / "summary.md").read_text()
    assert "Own-v0" in summary
    assert "](figures/mujoco-aggregates.png)" in summary
    assert re.search(r"^\| PPO learning\\_rate=0.0003 \| 3 \| 0\.\d+ \(0\.\d+ to 0\.\d+\) \|", summary, re.MULTILINE)


# Curves were drawn at tenths of the training, before anything had been measured there.
def test_curves_are_drawn_at_the_steps_where_they_were_measured(tmp_path):
    curve = {"curve": (np.array([4096, 8192]), np.array([100.0, 200.0])), "steps": 6000}
    (section,) = tasks(load(write_results(tmp_path, runs(**curve))))
    line = section.data.query("panel == 'Hopper-v4' and line == 'PPO'")
    assert line[["x", "value"]].to_numpy().tolist() == [[4096, 100.0], [8192, 200.0]]
    assert b"CreationDate" not in render(section.figure, "pdf")  # equal figures are equal files


# Figures took the lowest learning rate, and said that it was the suite's.
@pytest.mark.parametrize(("rates", "chosen"), [([1e-4, None, 1e-3], 3e-4), ([1e-3, 1e-4], 1e-4)])
def test_the_suites_learning_rate_is_shown_or_else_the_lowest(rates, chosen, tmp_path, report):
    changes = [{"changed": {"learning_rate": f"lin_{rate}"}, "final": 1e6 * rate} if rate else {} for rate in rates]
    out, notes = report(*(runs(**change) for change in changes))
    assert notes == []
    assert [variant.value("learning_rate") for variant in load(tmp_path).chosen] == [chosen] * 2
    assert ("Not run at the suite" in (out / "index.html").read_text()) == (None not in rates)


# A second grid removed the first one's figure.
def test_the_best_of_two_grids_is_selected_and_said_to_flatter(report):
    grid = {900.0: {"clip_range": 0.1}, 1000.0: {}, 1100.0: {"clip_range": 0.3}, 1200.0: {"n_epochs": 20}}
    out, _ = report(*(runs(final=final, changed=changed) for final, changed in grid.items()))
    best = ", ".join(f"{name} clip_range=0.2 n_epochs=20 (best of 4)" for name in ("PPO", "ANO"))
    assert f"which flatters: {best}" in (out / "index.html").read_text()
    assert (out / "figures" / "mujoco-sensitivity-clip-range.png").exists()
    assert len(cells(out, "sensitivity-clip-range")) == 6


def of_suite(task, **values):
    return runs([task], ["ppo"], hyperparameters=values)


def of_grid(task, rate, **values):
    return runs([task], ["ppo"], changed={"learning_rate": rate}, hyperparameters=values)


def variants(directory):
    """Return tasks by label, after a check that all seeds of these tasks are aggregated."""
    chapter = load(directory)
    assert (chapter.notes, chapter.run_notes) == ([], [])
    blocks, notes = chapter.complete(chapter.variants)
    assert notes == []
    return {variant.label.removeprefix("PPO "): sorted(rows) for variant, rows in blocks.items() if len(rows) == 3}


CHEETAH, HOPPER = BOTH = ["HalfCheetah-v4", "Hopper-v4"]
SLOW, QUICK = {"learning_rate": "lin_0.0003"}, {"learning_rate": 0.001}


def test_a_grid_with_the_suites_value_of_some_tasks_is_aggregated(tmp_path):
    rates = ["learning_rate=0.0003", "learning_rate=0.001"]
    only_hopper = [*of_suite(HOPPER, **SLOW), *of_grid(HOPPER, "lin_0.001")]  # the suite has 0.01 for HalfCheetah
    only_hopper += of_grid(CHEETAH, 0.0003, learning_rate=0.01) + of_grid(CHEETAH, 0.001, learning_rate=0.01)
    assert variants(write_results(tmp_path / "one", only_hopper)) == dict.fromkeys(rates, BOTH)
    both = [*of_suite(HOPPER, **SLOW), *of_grid(HOPPER, "lin_0.001"), *of_suite(CHEETAH, **QUICK), *of_grid(CHEETAH, 0.0003)]
    assert variants(write_results(tmp_path / "both", both)) == dict.fromkeys([*rates, "learning_rate=suite's"], BOTH)
    (chosen,) = load(tmp_path / "both").chosen
    assert chosen.label == "PPO learning_rate=suite's"


def test_runs_of_a_suite_that_was_edited_are_two_settings(tmp_path):
    edited = [run for task in BOTH for epochs in (10, 20) for run in of_suite(task, n_epochs=epochs)]
    assert variants(write_results(tmp_path, edited)) == {"n_epochs=10": BOTH, "n_epochs=20": BOTH}


def test_a_schedule_and_its_constant_are_two_settings_if_a_task_has_both(tmp_path):
    rates = [0.0003, "lin_0.0003", 0.001, "lin_0.001"]
    grid = [run for rate in rates for task in BOTH for run in of_grid(task, rate)]
    assert variants(write_results(tmp_path, grid)) == {f"learning_rate={rate}": BOTH for rate in rates}
    section = next(part for part in make_sections(load(tmp_path)) if part.name == "mujoco-sensitivity-learning-rate")
    lines = section.data.groupby("line")["x"].agg(list)
    assert lines.to_dict() == {"PPO": [0.0003, 0.001], "PPO learning_rate=linear": [0.0003, 0.001]}


# The number of steps was a hyperparameter, and the longest runs were selected.
def test_runs_of_different_length_are_chapters_of_their_own(tmp_path):
    write_results(tmp_path, runs(seeds=[0, 1]) + runs(seeds=[0, 1], steps=5000, changed={"total_timesteps": 5000}))
    assert [chapter.name for chapter in load_chapters(Results(tmp_path), SETTINGS)] == ["mujoco", "mujoco, 5,000 steps"]


@pytest.mark.slow
def test_suites_whose_names_differ_in_case_have_figures_of_their_own(tmp_path):
    for suite, algorithm in (("Team A", "ppo"), ("team-a", "ano")):
        write_results(tmp_path / "results", runs(algorithms=[algorithm], seeds=[0, 1], suite=suite))
    write_report(tmp_path / "results", tmp_path / "report", SETTINGS)
    names = [path.name for path in sorted((tmp_path / "report" / "tables").glob("team-a-runs*.csv"))]
    assert names == ["team-a-runs-2.csv", "team-a-runs.csv"]
    algorithms = [set(pd.read_csv(tmp_path / "report" / "tables" / name)["algorithm"]) for name in names]
    assert sorted(map(sorted, algorithms)) == [["ano"], ["ppo"]]


# HalfCheetah's training return was that of a single episode at 77 % of the training.
def test_returns_are_those_of_the_last_hundred_episodes_or_of_the_last_evaluations(tmp_path):
    write_results(tmp_path, runs(seeds=[0, 1]), episodes=400)
    chapter = load(tmp_path, Settings("training", reps=FEW))
    episodes = 1000.0 * np.arange(1, 401) / 400
    assert chapter.runs["final"][0] == pytest.approx(episodes[-100:].mean())
    assert chapter.curves[0].iloc[0][["timesteps", "value"]].tolist() == pytest.approx([2000, episodes[:8].mean()])
    chapter = load(tmp_path, Settings(last=4, reps=FEW))
    assert chapter.runs["final"][0] == pytest.approx(np.mean([850.0, 900.0, 950.0, 1000.0]))
    assert chapter.runs["score"][0] == pytest.approx(float(ReferenceScores().normalize("HalfCheetah-v4", 925.0)))


def test_nothing_is_left_out_in_silence(report):
    swimmer = runs(["Swimmer-v4"], seeds=[7], details={"backend_used": "envpool"}) + runs(["Swimmer-v4"], seeds=[8])
    own = [runs(["Own-v0"], changed=changed, suite="own") for changed in ({}, FAST)]  # has no reference scores
    swimmer += runs(["Swimmer-v4"], ["ppo"], seeds=[9], final=np.nan)
    out, notes = report(runs()[:-1] + runs(["Ant-v4"], ["ppo"]) + swimmer, runs(suite="other", seeds=[9]), *own)
    mine, one_seed = (" ".join(note for note in notes if note.startswith(f"{suite}: ")) for suite in ("mujoco", "other"))
    assert "Ant-v4 is not aggregated: no runs of ANO." in mine
    assert re.search(r"Without a finite final return of evaluation, and in no figure: Swimmer-v4__ppo__\w+__seed9\.", mine)
    assert "Runs of Swimmer-v4 used different backends, which may differ in protocol: envpool, gymnasium." in mine
    assert re.search(r"their seed has no run of another task: .*Hopper-v4__ppo__\w+__seed0", mine)
    assert "No algorithm has a seed with runs of all tasks." in mine
    assert one_seed == "other: One seed only, and therefore no interval: PPO, ANO."
    assert "own: No figure of learning_rate: its values are not numbers, or no task has runs" in "".join(notes)
    assert not list(out.glob("figures/own-efficiency*"))


# Names of tasks in Markdown, in spreadsheets, and in matplotlib's formulas.
def test_names_are_only_names(tmp_path):
    name = "=cmd|' /C calc'!A0 <script>alert(1)</script> $\\frac{ [a](b) `c` {unit}"
    both = runs(["Hopper-v4"], ["ano"], [0, 1], suite=name, details={"versions": {name: "1"}})
    out = tmp_path / "report"
    write_report(write_results(tmp_path, both + runs([name], ["ano"], [0, 1], suite=name)), out, SETTINGS)
    assert "<script>alert" not in (out / "index.html").read_text()
    summary = (out / "summary.md").read_text()
    assert "<script>alert" not in summary.replace(r"\<", "")
    assert "[a](b)" not in summary.replace(r"\[", "")
    assert escaped("a|b\n<c>") == r"a\|b \<c\>"
    for path in out.rglob("*.csv"):
        assert not pd.read_csv(path, header=None, dtype=str).stack().str.match("[=+@]").any(), path


def test_numbers_have_three_significant_digits_and_their_intervals_the_same_decimals():
    # The first ones were 0.001 and 0.009.
    values = [0.00149, 0.0094, 0.00099, 0.9996, 2.78e-16, 1234.6, -12.345, 7, 4000, np.inf, np.nan, "x_1"]
    assert " ".join(map(text, values)) == "0.00149 0.00940 0.000990 1.00 0 1,235 -12.3 7 4,000 inf - x_1"
    names = ["A", "B", "B low", "B high", "C, change in %", "C, change in % low", "C, change in % high"]
    rows = [["x_3", 0.148, 0.0, 0.37, 70.4, -26.0, 167.5], ["x_4", 991.2, 524.1, 1458.3, np.nan, np.nan, np.nan]]
    table, first = pd.DataFrame(rows, columns=names), ["x_3", "0.148 (0.000 to 0.370)", "70 (-26 to 168)"]
    assert shown(table).to_numpy().tolist() == [first, ["x_4", "991 (524 to 1,458)", "-"]]


OKABE_ITO = {"#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"}


# PPO and ANO were the same color for readers without red receptors, and both were solid lines.
def test_algorithms_are_named_and_told_apart_by_colors_of_okabe_and_ito_and_line_styles_in_a_legend_that_fits():
    labels = ["ppo", "ano:shaping=spo,desired_kl=0.01", "cleanrl_ppo"]
    assert [title(label) for label in labels] == ["PPO", "ANO (shaping=spo, desired_kl=0.01)", "cleanrl_ppo"]
    labels += ["trpo", "spo", "papo", "ano", "ano:shaping=ppo"]
    every = looks([*labels, "a", "b", "c"])
    assert len({str(every[label]) for label in labels}) == 8
    colors, lines, markers = zip(*looks().values(), strict=True)
    assert set(colors) < OKABE_ITO
    assert len(set(colors)) == len(set(map(str, lines))) == len(set(markers)) == 5
    figure = draw_lines(pd.concat(points(label, [0.0, 1.0], Estimate.exact(np.ones(2))) for label in labels), every, "steps")
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    assert 0.0 <= legend.x0 < legend.x1 <= figure.bbox.width


def files_in(directory) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def test_an_earlier_report_is_replaced_and_other_files_are_not(tmp_path, report):
    both = write_results(tmp_path / "both", runs(tasks=["Hopper-v4"], seeds=[0, 1]))
    one = write_results(tmp_path / "one", runs(tasks=["Hopper-v4"], algorithms=["ano"], seeds=[0, 1]))
    out, only = tmp_path / "report", tmp_path / "only"
    write_report(both, out, SETTINGS)
    write_report(one, only, SETTINGS)
    assert files_in(out) > files_in(only)

    mine = {"notes.txt", "figures/mine.png", "tables/mine/deep.csv"}
    for name in mine:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(name)
    (tmp_path / "link").symlink_to(out)
    write_report(one, tmp_path / "link", SETTINGS)
    assert (tmp_path / "link").is_symlink()
    assert files_in(out) == files_in(only) | mine
    assert all((out / name).read_text() == name for name in mine)


def test_a_file_of_a_report_that_was_changed_is_not_replaced(tmp_path, report):
    out, _ = report(runs(tasks=["Hopper-v4"], algorithms=["ano"], seeds=[0, 1]))
    with open(out / "summary.md", "a") as file:
        file.write("my conclusion")
    with pytest.raises(FileExistsError, match=r"not as this command wrote it.*report/summary\.md"):
        write_report(tmp_path, out, SETTINGS)
    assert (out / "summary.md").read_text().endswith("my conclusion")
    (out / "summary.md").unlink()
    write_report(tmp_path, out, SETTINGS)
    assert (out / "summary.md").exists()


def test_a_report_is_written_to_the_current_directory_or_a_directory_with_other_files_is_rejected(
    tmp_path, report, monkeypatch
):
    out, _ = report(runs(tasks=["Hopper-v4"], algorithms=["ano"], seeds=[0, 1]))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for _ in range(2):
        write_report(tmp_path, Path(), SETTINGS)
        assert files_in(here) == files_in(out)

    (out / "index.html").write_text("a thesis")
    with pytest.raises(ValueError, match="report holds other files"):
        write_report(tmp_path, out, SETTINGS)
    assert (out / "index.html").read_text() == "a thesis"


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Measures the page in a frame of the given width, and leaves the numbers as the frame's page.
SCRIPT = """<body style="margin: 0"><iframe src="page.html" style="width: WIDTHpx; height: 800px; border: 0"></iframe><script>
document.querySelector("iframe").onload = (event) => {
  const page = event.target.contentDocument, box = (item) => item.getBoundingClientRect();
  const boxes = [...page.querySelectorAll("figure img")].map((image) => box(image.parentElement));  // that scrolls
  const rights = [...page.querySelectorAll("table, img")].map((item) => box(item).right);
  document.body.textContent = JSON.stringify({boxes, right: Math.max(...rights), width: page.documentElement.scrollWidth});
};
</script>"""


# Wide tables were cut off on paper.
@pytest.mark.slow
# On a machine of continuous integration, a browser that is missing is a failure.
@pytest.mark.skipif(CHROMIUM is None and not os.environ.get("CI"), reason="Chromium is not installed")
@pytest.mark.parametrize(("medium", "width"), [("screen", 1300), ("screen", 400), ("print", 720)])  # A4 with margins
def test_figures_and_tables_fit_in_a_browser(written, medium, width):
    out = written[0]
    (out / "page.html").write_text((out / "index.html").read_text().replace(f"@media {medium}", "@media all"))
    (out / "frame.html").write_text(SCRIPT.replace("WIDTH", str(width)))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--allow-file-access-from-files"]
    options += ["--dump-dom", "--virtual-time-budget=10000", f"--user-data-dir={out / 'profile'}"]
    command = [CHROMIUM, *options, (out / "frame.html").as_uri()]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    measured = json.loads(html.unescape(re.search("<body[^>]*>(.*)</body>", finished.stdout, re.DOTALL)[1]))
    assert 0 < measured["width"] <= width  # the page itself does not scroll sideways
    assert medium == "screen" or measured["right"] <= width
    assert len(measured["boxes"]) == len(list((out / "figures").glob("*.png"))) == 6
    assert all(0 <= box["left"] < box["left"] + 300 < box["right"] <= width for box in measured["boxes"])
    assert min(box["height"] for box in measured["boxes"]) > 40
