"""Reports: the numbers against hand-worked ones, what is selected, what is left out, and what strangers' names do."""

import csv
import io
import re

import numpy as np
import pandas as pd
import pytest

from sb3_ano.bench.report import Settings, write_report
from sb3_ano.bench.report.data import load_chapters, title
from sb3_ano.bench.report.figures import Style
from sb3_ano.bench.report.sections import View, tasks
from sb3_ano.bench.report.tables import Percent, Table, escaped, interval, number, percent
from sb3_ano.bench.results import Results
from sb3_ano.bench.scores import ReferenceScores
from sb3_ano.bench.statistics import Estimate
from tests.bench.common import write_results

SETTINGS = Settings(reps=50)


def runs(tasks=("HalfCheetah-v4", "Hopper-v4"), algorithms=("ppo", "ano"), seeds=(0, 1, 2), final=1000.0, **others):
    return [
        {
            "env_id": task,
            "algorithm": algorithm,
            "seed": seed,
            "final": final + 10.0 * seed + 5.0 * (algorithm == "ano"),
            **others,
        }
        for task in tasks
        for algorithm in algorithms
        for seed in seeds
    ]


@pytest.fixture
def no_images(monkeypatch):
    """Figures are drawn and not rendered, which takes most of the time."""
    monkeypatch.setattr("sb3_ano.bench.report.render", lambda figure, kind: b"")


def view(directory, settings=SETTINGS) -> View:
    (chapter,) = load_chapters(Results(directory), settings)
    return View(chapter)


def cells(table: str, out) -> pd.DataFrame:
    return pd.read_csv(out / "tables" / f"{table}.csv")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A report with two learning rates, of which the higher is better for PPO only."""
    directory = tmp_path_factory.mktemp("written")
    fast = {"changed": {"learning_rate": "lin_0.001"}}
    all_runs = runs() + runs(algorithms=["ppo"], final=2000.0, **fast) + runs(algorithms=["ano"], final=1000.0, **fast)
    all_runs += runs(tasks=["Own-v0"])
    notes = write_report(write_results(directory, all_runs), directory / "report", Settings(reps=50, command="the command"))
    return directory / "report", notes


def test_aggregates_are_those_of_the_normalized_scores(written):
    out, _ = written
    row = cells("mujoco-aggregates", out).set_index("Algorithm").loc["PPO learning_rate=0.0003"]
    normalize = ReferenceScores().normalize
    normalized = [float(normalize(task, 1000.0 + 10 * seed)) for task in ("HalfCheetah-v4", "Hopper-v4") for seed in range(3)]
    assert row["Mean"] == pytest.approx(np.mean(normalized))
    assert row["IQM"] == pytest.approx(np.mean(sorted(normalized)[1:5]))
    assert row["Seeds"] == 3
    assert row["IQM low"] < row["IQM"] < row["IQM high"]


def test_changes_and_interactions_are_relative_to_the_suites_learning_rate(written):
    out, _ = written
    table = cells("mujoco-learning-rate", out).set_index("Algorithm")
    assert table["IQM"].notna().all()
    change = table.loc["PPO learning_rate=0.001", "Mean, change"]
    means = [table.loc[f"PPO learning_rate={rate}", "Mean"] for rate in ("0.0003", "0.001")]
    assert change == pytest.approx(means[1] / means[0] - 1)
    assert np.isnan(table.loc["PPO learning_rate=0.0003", "Mean, change"])
    (row,) = cells("mujoco-interactions", out).to_dict("records")
    assert (row["X"], row["Y"]) == ("PPO learning_rate=0.001", "ANO learning_rate=0.001")
    iqm = {label: table.loc[label, "IQM"] for label in table.index}
    difference = sum(sign * iqm[f"{name} learning_rate={rate}"] for name, rate, sign in _FOUR)
    assert row["Change of X - change of Y"] == pytest.approx(difference)


_FOUR = [("PPO", "0.001", 1), ("PPO", "0.0003", -1), ("ANO", "0.001", -1), ("ANO", "0.0003", 1)]


# Users Z18: no figure came with its numbers.
def test_every_figure_is_there_as_png_pdf_and_csv_and_every_table_as_csv_and_latex(written):
    out, _ = written
    names = {path.stem for path in (out / "figures").iterdir()}
    expected = ["aggregates", "profiles", "improvement", "efficiency", "tasks", "learning-rate", "matched-kl"]
    expected += [f"dynamics-at-learning-rate-{rate}" for rate in ("0-0003", "0-001")]
    assert names == {f"mujoco-{name}" for name in expected}
    assert {path.suffix for path in (out / "figures").iterdir()} == {".png", ".pdf", ".csv"}
    assert len(list((out / "figures").iterdir())) == 3 * len(names)
    tables = {path.stem for path in (out / "tables").iterdir()}
    assert {"mujoco-all-settings", "mujoco-area", "mujoco-hyperparameters", "mujoco-runs", "mujoco-speed"} < tables
    assert len(list((out / "tables").iterdir())) == 2 * len(tables)
    latex = (out / "tables" / "mujoco-aggregates.tex").read_text()
    assert r"PPO learning\_rate=0.0003 & 3 & " in latex
    assert r"\bottomrule" in latex


def test_the_page_needs_nothing_else_and_names_everything(written):
    out, notes = written
    page = (out / "index.html").read_text()
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page)
    assert page.count("<img") == page.count(" alt=") == len(list((out / "figures").glob("*.png")))
    for text in ("TD3-normalized score", "the command", "torch 2.13.0", "deterministic actions", "Hyperparameters"):
        assert text in page
    assert "mujoco: Own-v0 is not aggregated: in none of the tables td3, mnih2015, classic." in notes
    assert "Own-v0 is not aggregated" in page
    assert "Own-v0" in (out / "summary.md").read_text()


# Users Z10, review bench B9: curves were drawn at tenths of the training, before anything had been measured there.
def test_curves_are_drawn_at_the_steps_where_they_were_measured(tmp_path):
    curve = {"curve": (np.array([4096, 8192]), np.array([100.0, 200.0])), "steps": 6000}
    write_results(tmp_path, runs(**curve))
    seen = view(tmp_path)
    (picture,) = tasks(seen).pictures
    line = picture.data[(picture.data["panel"] == "Hopper-v4") & (picture.data["line"] == "PPO")]
    assert line["x"].tolist() == [4.096, 8.192]  # thousand steps
    assert line["value"].tolist() == [100.0, 200.0]


# Review bench B2: figures took the lowest learning rate, and said that it was the suite's.
def test_the_suites_learning_rate_is_shown_or_else_the_lowest(tmp_path, no_images):
    for directory, rates in (("own", [1e-4, None, 1e-3]), ("others", [1e-3, 1e-4])):
        for rate in rates:
            changed = {} if rate is None else {"changed": {"learning_rate": f"lin_{rate}"}}
            write_results(tmp_path / directory, runs(final=1000.0 if rate is None else 1e6 * rate, **changed))
    assert [variant.label for variant in view(tmp_path / "own").chosen] == [
        f"{name} learning_rate=0.0003" for name in ("PPO", "ANO")
    ]
    assert [variant.value("learning_rate") for variant in view(tmp_path / "others").chosen] == [1e-4, 1e-4]
    notes = write_report(tmp_path / "others", tmp_path / "others" / "report", SETTINGS)
    assert "Not run at the suite" in (tmp_path / "others" / "report" / "index.html").read_text()
    assert notes == []


def test_the_best_of_a_grid_is_selected_and_said_to_flatter(tmp_path, no_images):
    for clip_range, final in ((0.1, 900.0), (0.2, 1000.0), (0.3, 1100.0)):
        write_results(tmp_path, runs(final=final, changed={} if clip_range == 0.2 else {"clip_range": clip_range}))
    assert [(variant.label, variant.alternatives) for variant in view(tmp_path).chosen] == [
        ("PPO clip_range=0.3", 3),
        ("ANO clip_range=0.3", 3),
    ]
    write_report(tmp_path, tmp_path / "report", SETTINGS)
    page = (tmp_path / "report" / "index.html").read_text()
    assert "which flatters: PPO clip_range=0.3 (best of 3), ANO clip_range=0.3 (best of 3)" in page
    assert cells("mujoco-clip-range", tmp_path / "report")["IQM"].is_monotonic_increasing is False  # two algorithms
    assert len(cells("mujoco-clip-range", tmp_path / "report")) == 6


# Review bench B8: a second grid removed the first one's figure.
def test_a_second_grid_does_not_hide_the_first(tmp_path, no_images):
    for changed in ({}, {"clip_range": 0.1}, {"n_epochs": 20}):
        write_results(tmp_path, runs(algorithms=["ano"], changed=changed, final=1000.0 + 500.0 * ("n_epochs" in changed)))
    write_report(tmp_path, tmp_path / "report", SETTINGS)
    figures = {path.stem for path in (tmp_path / "report" / "figures").iterdir()}
    assert "mujoco-clip-range" in figures
    table = cells("mujoco-clip-range", tmp_path / "report")
    assert len(table) == 2


# Review bench B11: the number of steps was a hyperparameter, and the longest runs were selected.
def test_runs_of_different_length_are_chapters_of_their_own(tmp_path):
    write_results(tmp_path, runs(seeds=[0, 1]) + runs(seeds=[0, 1], steps=5000, changed={"total_timesteps": 5000}))
    assert [chapter.name for chapter in load_chapters(Results(tmp_path), SETTINGS)] == ["mujoco", "mujoco, 5,000 steps"]


# Review bench B3: HalfCheetah's training return was that of a single episode at 77 % of the training.
def test_training_returns_average_the_last_hundred_episodes(tmp_path):
    write_results(tmp_path, runs(seeds=[0, 1]), episodes=400)
    seen = view(tmp_path, Settings(returns="training", reps=50))
    final, start = seen.chapter.runs["final"].iloc[0], seen.chapter.curves[0].iloc[0]
    episodes = 1000.0 * np.arange(1, 401) / 400
    assert final == pytest.approx(episodes[-100:].mean())
    assert start["value"] == pytest.approx(episodes[:8].mean())
    assert start["timesteps"] == 2000


def test_final_returns_can_average_the_last_evaluations(tmp_path):
    write_results(tmp_path, runs(seeds=[0, 1]))
    (chapter,) = load_chapters(Results(tmp_path), Settings(last=4, reps=50))
    assert chapter.runs["final"].iloc[0] == pytest.approx(np.mean([850.0, 900.0, 950.0, 1000.0]))
    assert chapter.runs["score"].iloc[0] == pytest.approx(float(ReferenceScores().normalize("HalfCheetah-v4", 925.0)))


# Review bench S7, B10.
def test_nothing_is_left_out_in_silence(tmp_path, no_images):
    write_results(tmp_path, runs()[:-1] + runs(tasks=["Ant-v4"], algorithms=["ppo"]))
    write_results(tmp_path, runs(tasks=["Swimmer-v4"], seeds=[7], details={"backend_used": "envpool"}))
    write_results(tmp_path, runs(tasks=["Swimmer-v4"], seeds=[8]))
    text = " ".join(write_report(tmp_path, tmp_path / "report", SETTINGS))
    assert "Ant-v4 is not aggregated: no runs of ANO." in text
    assert "Runs of Swimmer-v4 used different backends, which may differ in protocol: envpool, gymnasium." in text
    assert re.search(r"their seed has no run of another task: .*Hopper-v4__ppo__\w+__seed0", text)
    assert "No algorithm has a seed with runs of all tasks." in text


def test_one_seed_has_no_interval_and_that_is_said(tmp_path, no_images):
    write_results(tmp_path, runs(seeds=[0]))
    notes = write_report(tmp_path, tmp_path / "report", SETTINGS)
    assert notes == ["mujoco: One seed only, and therefore no interval: PPO, ANO."]
    assert cells("mujoco-aggregates", tmp_path / "report")["IQM low"].isna().all()


# Safety H8: names of tasks in Markdown, in spreadsheets, and in matplotlib's formulas.
def test_names_are_only_names(tmp_path):
    name = "=cmd|' /C calc'!A0 <script>alert(1)</script> $\\frac{ [a](b) `c`"
    details = {"versions": {name: "1"}}
    write_results(
        tmp_path,
        runs(tasks=["Hopper-v4"], seeds=[0, 1], suite=name, details=details) + runs(tasks=[name], seeds=[0, 1], suite=name),
    )
    write_report(tmp_path, tmp_path / "report", SETTINGS)
    assert "<script>alert" not in (tmp_path / "report" / "index.html").read_text()
    summary = (tmp_path / "report" / "summary.md").read_text()
    assert "<script>alert" not in summary.replace(r"\<", "")
    assert "[a](b)" not in summary.replace(r"\[", "")
    for path in (tmp_path / "report").rglob("*.csv"):
        for row in csv.reader(io.StringIO(path.read_text())):
            assert not any(cell[:1] in ("=", "+", "@") for cell in row), path


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.00149, "0.00149"),  # review bench B4: 0.001
        (0.0094, "0.00940"),
        (0.00099, "0.000990"),
        (0.9996, "1.00"),
        (2.78e-16, "0"),
        (1234.6, "1,235"),
        (-12.345, "-12.3"),
        (3.14159e-7, "3.14e-07"),
        (float("inf"), "∞"),
        (float("nan"), "-"),
    ],
)
def test_numbers_have_three_significant_digits(value, text):
    assert number(value) == text


def test_intervals_and_changes_in_words():
    def made(*numbers):
        return Estimate(*map(np.array, numbers))

    assert interval(made(0.148, 0.0, 0.37)) == "0.148 (0.000 to 0.370)"
    assert interval(made(991.2, 524.1, 1458.3)) == "991 (524 to 1,458)"
    assert interval(made(0.5, np.nan, np.nan)) == "0.500"
    assert percent(made(0.704, -0.26, 1.675)) == "+70 % (-26 to +168)"
    assert percent(made(np.nan, np.nan, np.nan)) == "-"
    table = Table("t", "c", [{"A": "x_y", "B": Percent(made(0.1, 0.0, 0.2)), "C": 3}])
    assert table.data().to_dict("records") == [{"A": "x_y", "B": 0.1, "B low": 0.0, "B high": 0.2, "C": 3}]
    assert table.markdown() == "| A | B | C |\n| --- | --- | --- |\n| x\\_y | +10 % (+0 to +20) | 3 |"
    assert escaped("a|b\n<c>") == r"a\|b \<c\>"


def test_algorithms_are_named_and_told_apart():
    labels = ["ppo", "ano:shaping=spo,desired_kl=0.01", "cleanrl_ppo"]
    assert [title(label) for label in labels] == ["PPO", "ANO (shaping=spo, desired_kl=0.01)", "cleanrl_ppo"]
    style = Style([*labels, "trpo", "spo", "papo", "ano", "ano:shaping=ppo", "a", "b", "c"])
    looks = {
        (str(style.line(label)), str(style.marker(label)))
        for label in (*labels, "trpo", "spo", "papo", "ano", "ano:shaping=ppo")
    }
    assert len(looks) == 8


# Review bench B5: PPO and ANO were the same color for readers without red receptors, and both were solid lines.
def test_colors_differ_for_protanopes_and_line_styles_for_everyone():
    protanopia = np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]])
    style, names = Style(), ("ppo", "trpo", "spo", "papo", "ano")

    def seen(name):
        color = np.array([int(style.line(name)["color"][index : index + 2], 16) for index in (1, 3, 5)]) / 255.0
        return protanopia @ np.where(
            color <= 0.04045, color / 12.92, ((color + 0.055) / 1.055) ** 2.4
        )  # Machado 2009, linear RGB

    distances = [np.linalg.norm(seen(a) - seen(b)) for index, a in enumerate(names) for b in names[:index]]
    assert min(distances) > 0.1
    assert len({str(style.line(name)["linestyle"]) for name in names}) == len(names)


def test_an_earlier_report_is_replaced_and_other_files_are_not(tmp_path):
    write_results(tmp_path / "results", runs(tasks=["Hopper-v4"], algorithms=["ano"], seeds=[0, 1]))
    out = tmp_path / "out"
    write_report(tmp_path / "results", out, SETTINGS)
    before = {path.name: path.read_bytes() for path in (out / "figures").iterdir()}
    (out / "figures" / "stale.png").touch()
    write_report(tmp_path / "results", out, SETTINGS)
    assert {path.name: path.read_bytes() for path in (out / "figures").iterdir()} == before  # the same bytes each time
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(ValueError, match="other holds other files"):
        write_report(tmp_path / "results", tmp_path / "other", SETTINGS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out", "results"]
