"""Reports: the numbers against hand-worked ones, what is selected, what is left out, and what strangers' names do."""

import csv
import io
import itertools
import re

import numpy as np
import pandas as pd
import pytest

from sb3_ano.bench.report import Settings, write_report
from sb3_ano.bench.report.data import Chapter, load_chapters
from sb3_ano.bench.report.figures import looks
from sb3_ano.bench.report.sections import tasks
from sb3_ano.bench.report.tables import escaped, frame, latex, number, shown
from sb3_ano.bench.report.variants import title
from sb3_ano.bench.results import Results
from sb3_ano.bench.scores import ReferenceScores
from sb3_ano.bench.statistics import Bootstrap, Estimate
from tests.bench.common import write_results

FEW = Bootstrap(reps=50)
SETTINGS = Settings(bootstrap=FEW)


def runs(tasks=("HalfCheetah-v4", "Hopper-v4"), algorithms=("ppo", "ano"), seeds=(0, 1, 2), final=1000.0, **others):
    """Runs whose returns grow with the seed, and are a little higher for ANO."""
    return [
        {"env_id": task, "algorithm": name, "seed": seed, "final": final + 10.0 * seed + 5.0 * (name == "ano"), **others}
        for task, name, seed in itertools.product(tasks, algorithms, seeds)
    ]


@pytest.fixture
def no_images(monkeypatch):
    """Draw figures and do not render them, which takes most of the time."""
    monkeypatch.setattr("sb3_ano.bench.report.render", lambda figure, kind: b"")


def load(directory, settings=SETTINGS) -> Chapter:
    (chapter,) = load_chapters(Results(directory), settings)
    return chapter


def cells(out, table: str) -> pd.DataFrame:
    return pd.read_csv(out / "tables" / f"mujoco-{table}.csv")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A report with two learning rates, of which the higher is better for PPO only."""
    directory = tmp_path_factory.mktemp("written")
    fast = {"changed": {"learning_rate": "lin_0.001"}}
    all_runs = runs() + runs(algorithms=["ppo"], final=2000.0, **fast) + runs(algorithms=["ano"], final=1000.0, **fast)
    all_runs += runs(tasks=["Own-v0"])
    settings = Settings(bootstrap=FEW, command="the command")
    notes = write_report(write_results(directory, all_runs), directory / "report", settings)
    return directory / "report", notes


def test_aggregates_are_those_of_the_normalized_scores(written):
    row = cells(written[0], "aggregates").set_index("Algorithm").loc["PPO learning_rate=0.0003"]
    normalize = ReferenceScores().normalize
    normalized = [float(normalize(task, 1000.0 + 10 * seed)) for task in ("HalfCheetah-v4", "Hopper-v4") for seed in range(3)]
    assert row[["Mean", "IQM", "Seeds"]].tolist() == pytest.approx([np.mean(normalized), np.mean(sorted(normalized)[1:5]), 3])
    assert row["IQM low"] < row["IQM"] < row["IQM high"]


def test_changes_and_interactions_are_relative_to_the_suites_learning_rate(written):
    table = cells(written[0], "sensitivity-learning-rate").set_index("Algorithm")
    slow, fast = (table.loc[[f"{name} learning_rate={rate}" for name in ("PPO", "ANO")]] for rate in ("0.0003", "0.001"))
    changes = fast["Mean, change in %"].to_numpy()
    np.testing.assert_allclose(changes, 100 * (fast["Mean"].to_numpy() / slow["Mean"].to_numpy() - 1), atol=1e-9)
    assert slow["Mean, change in %"].isna().all()
    (row,) = cells(written[0], "interactions").to_dict("records")
    assert (row["X"], row["Y"]) == tuple(fast.index)
    ppo, ano = fast["IQM"].to_numpy() - slow["IQM"].to_numpy()
    assert row["Change of X - change of Y"] == pytest.approx(ppo - ano)


# Users Z18: no figure came with its numbers.
def test_every_figure_is_there_as_png_pdf_and_csv_and_every_table_as_csv_and_latex(written):
    figures, tables = ({path.name for path in (written[0] / kind).iterdir()} for kind in ("figures", "tables"))
    names = ["aggregates", "profiles", "improvement", "efficiency", "tasks", "sensitivity-learning-rate", "matched-kl"]
    names += [f"dynamics-at-learning-rate-{rate}" for rate in ("0-0003", "0-001")]
    assert figures == {f"mujoco-{name}.{kind}" for name in names for kind in ("png", "pdf", "csv")}
    names = ["aggregates", "all-settings", "improvement", "efficiency", "tasks", "sensitivity-learning-rate", "interactions"]
    names += ["diagnostics", "speed", "hyperparameters", "runs"]
    assert tables == {f"mujoco-{name}.{kind}" for name in names for kind in ("csv", "tex")}
    text = (written[0] / "tables" / "mujoco-aggregates.tex").read_text()
    assert r"PPO learning\_rate=0.0003 & 3 & " in text
    assert r"\bottomrule" in text


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
    (section,) = tasks(load(write_results(tmp_path, runs(**curve))))
    line = section.data[(section.data["panel"] == "Hopper-v4") & (section.data["line"] == "PPO")]
    assert line["x"].tolist() == [4.096, 8.192]  # thousand steps
    assert line["value"].tolist() == [100.0, 200.0]


# Review bench B2: figures took the lowest learning rate, and said that it was the suite's.
def test_the_suites_learning_rate_is_shown_or_else_the_lowest(tmp_path, no_images):
    for directory, rates in (("own", [1e-4, None, 1e-3]), ("others", [1e-3, 1e-4])):
        for rate in rates:
            changed = {} if rate is None else {"changed": {"learning_rate": f"lin_{rate}"}}
            write_results(tmp_path / directory, runs(final=1000.0 if rate is None else 1e6 * rate, **changed))
    chosen = {name: [variant.value("learning_rate") for variant in load(tmp_path / name).chosen] for name in ("own", "others")}
    assert chosen == {"own": [3e-4, 3e-4], "others": [1e-4, 1e-4]}
    assert write_report(tmp_path / "others", tmp_path / "others" / "report", SETTINGS) == []
    assert "Not run at the suite" in (tmp_path / "others" / "report" / "index.html").read_text()


def test_the_best_of_a_grid_is_selected_and_said_to_flatter(tmp_path, no_images):
    for clip_range, final in ((0.1, 900.0), (0.2, 1000.0), (0.3, 1100.0)):
        write_results(tmp_path, runs(final=final, changed={} if clip_range == 0.2 else {"clip_range": clip_range}))
    write_report(tmp_path, tmp_path / "report", SETTINGS)
    page = (tmp_path / "report" / "index.html").read_text()
    assert "which flatters: PPO clip_range=0.3 (best of 3), ANO clip_range=0.3 (best of 3)" in page
    assert len(cells(tmp_path / "report", "sensitivity-clip-range")) == 6


# Review bench B8: a second grid removed the first one's figure.
def test_a_second_grid_does_not_hide_the_first(tmp_path, no_images):
    for changed in ({}, {"clip_range": 0.1}, {"n_epochs": 20}):
        write_results(tmp_path, runs(algorithms=["ano"], changed=changed, final=1000.0 + 500.0 * ("n_epochs" in changed)))
    write_report(tmp_path, tmp_path / "report", SETTINGS)
    assert (tmp_path / "report" / "figures" / "mujoco-sensitivity-clip-range.png").exists()
    assert len(cells(tmp_path / "report", "sensitivity-clip-range")) == 2


# Review bench B11: the number of steps was a hyperparameter, and the longest runs were selected.
def test_runs_of_different_length_are_chapters_of_their_own(tmp_path):
    write_results(tmp_path, runs(seeds=[0, 1]) + runs(seeds=[0, 1], steps=5000, changed={"total_timesteps": 5000}))
    assert [chapter.name for chapter in load_chapters(Results(tmp_path), SETTINGS)] == ["mujoco", "mujoco, 5,000 steps"]


# Review bench B3: HalfCheetah's training return was that of a single episode at 77 % of the training.
def test_returns_are_those_of_the_last_hundred_episodes_or_of_the_last_evaluations(tmp_path):
    write_results(tmp_path, runs(seeds=[0, 1]), episodes=400)
    chapter = load(tmp_path, Settings("training", bootstrap=FEW))
    episodes = 1000.0 * np.arange(1, 401) / 400
    assert chapter.runs["final"][0] == pytest.approx(episodes[-100:].mean())
    assert chapter.curves[0].iloc[0][["timesteps", "value"]].tolist() == pytest.approx([2000, episodes[:8].mean()])
    chapter = load(tmp_path, Settings(last=4, bootstrap=FEW))
    assert chapter.runs["final"][0] == pytest.approx(np.mean([850.0, 900.0, 950.0, 1000.0]))
    assert chapter.runs["score"][0] == pytest.approx(float(ReferenceScores().normalize("HalfCheetah-v4", 925.0)))


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


def test_tasks_without_reference_scores_have_curves_and_returns(tmp_path, no_images):
    for changed in ({}, {"learning_rate": "lin_0.001"}):
        write_results(tmp_path, runs(tasks=["Own-v0"], changed=changed))
    notes = write_report(tmp_path, tmp_path / "report", SETTINGS)
    assert any("No figure of learning_rate: its values are not numbers, or no task has runs" in note for note in notes)
    assert cells(tmp_path / "report", "tasks")["Return"].tolist() == pytest.approx([1010.0, 1015.0])
    assert not (tmp_path / "report" / "figures" / "mujoco-profiles.csv").exists()


def test_one_seed_has_no_interval_and_that_is_said(tmp_path, no_images):
    write_results(tmp_path, runs(seeds=[0]))
    notes = write_report(tmp_path, tmp_path / "report", SETTINGS)
    assert notes == ["mujoco: One seed only, and therefore no interval: PPO, ANO."]
    assert cells(tmp_path / "report", "aggregates")["IQM low"].isna().all()


# Safety H8: names of tasks in Markdown, in spreadsheets, and in matplotlib's formulas.
def test_names_are_only_names(tmp_path):
    name = "=cmd|' /C calc'!A0 <script>alert(1)</script> $\\frac{ [a](b) `c` {unit}"
    both = runs(["Hopper-v4"], ["ano"], [0, 1], suite=name, details={"versions": {name: "1"}})
    out = tmp_path / "report"
    write_report(write_results(tmp_path, both + runs([name], ["ano"], [0, 1], suite=name)), out, SETTINGS)
    assert "<script>alert" not in (out / "index.html").read_text()
    summary = (out / "summary.md").read_text()
    assert "<script>alert" not in summary.replace(r"\<", "")
    assert "[a](b)" not in summary.replace(r"\[", "")
    for path in out.rglob("*.csv"):
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


def test_a_table_in_full_precision_and_as_texts():
    numbers = [(0.148, 0.0, 0.37), (991.2, 524.1, 1458.3), (0.5, np.nan, np.nan)]
    changes = [(70.4, -26.0, 167.5), (np.nan, np.nan, np.nan), (-12.4, np.nan, np.nan)]
    rows = [
        {
            "A": f"x_{count}",
            "B": Estimate(*map(np.array, number)),
            "C, change in %": Estimate(*map(np.array, change)),
            "D": count,
        }
        for number, change, count in zip(numbers, changes, (3, 4000, None), strict=True)
    ]
    table = frame(rows)
    assert table[["B", "B low", "B high"]].to_numpy()[:2].tolist() == [list(row) for row in numbers[:2]]
    assert shown(table).to_dict("list") == {
        "A": ["x_3", "x_4000", "x_None"],
        "B": ["0.148 (0.000 to 0.370)", "991 (524 to 1,458)", "0.500"],
        "C, change in %": ["+70 (-26 to +168)", "-", "-12"],
        "D": ["3.00", "4,000", "-"],
    }
    assert r"x\_3 & 0.148 (0.000 to 0.370) & +70 (-26 to +168)" in latex(table)
    assert escaped("a|b\n<c>") == r"a\|b \<c\>"


def test_algorithms_are_named_and_told_apart():
    labels = ["ppo", "ano:shaping=spo,desired_kl=0.01", "cleanrl_ppo"]
    assert [title(label) for label in labels] == ["PPO", "ANO (shaping=spo, desired_kl=0.01)", "cleanrl_ppo"]
    labels += ["trpo", "spo", "papo", "ano", "ano:shaping=ppo"]
    every = looks([*labels, "a", "b", "c"])
    assert len({str(every[label]) for label in labels}) == 8


# Review bench B5: PPO and ANO were the same color for readers without red receptors, and both were solid lines.
def test_colors_differ_for_protanopes_and_line_styles_for_everyone():
    protanopia = np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]])

    def seen(color):  # Machado 2009, in linear RGB
        color = np.array([int(color[index : index + 2], 16) for index in (1, 3, 5)]) / 255.0
        return protanopia @ np.where(color <= 0.04045, color / 12.92, ((color + 0.055) / 1.055) ** 2.4)

    colors, lines, markers = zip(*looks().values(), strict=True)
    assert min(np.linalg.norm(seen(a) - seen(b)) for a, b in itertools.combinations(colors, 2)) > 0.1
    assert len(set(map(str, lines))) == len(set(markers)) == 5


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
