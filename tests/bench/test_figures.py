"""Figures and tables as a referee reads them: what they compare, what sets their scale, and whether all of it can be seen."""

import contextlib
import importlib
from unittest import mock

import numpy as np
import pandas as pd
import pytest

from sb3_ano.bench.looks import looks
from sb3_ano.bench.report import Settings, load_chapters
from sb3_ano.bench.report.figures import draw_intervals, draw_lines, points
from sb3_ano.bench.report.sections import make_sections
from sb3_ano.bench.results import Results
from sb3_ano.bench.statistics import Estimate
from tests.bench.common import runs, write_results
from tests.common import ROOT

FAST = {"learning_rate": "lin_0.001"}
BOTH = ["HalfCheetah-v4", "Hopper-v4"]


def sections(directory, *parts, drawn=False):
    """Return the sections of a report by name; drawing their figures takes most of the time."""
    for part in parts:
        write_results(directory, part)
    (chapter,) = load_chapters(Results(directory), Settings(reps=50))
    with contextlib.ExitStack() as stack:
        for name in () if drawn else ("draw_lines", "draw_intervals"):
            stack.enter_context(mock.patch(f"sb3_ano.bench.report.sections.{name}"))
        return {section.name.removeprefix("mujoco-"): section for section in make_sections(chapter)}


def test_curves_of_unequal_lengths_and_grids_are_compared_where_all_were_measured(tmp_path):
    short = {"curve": (np.array([10_000, 50_000]), np.array([100.0, 500.0]))}
    long = {"curve": (np.array([20_000, 40_000, 90_000]), np.array([200.0, 400.0, 900.0]))}
    parts = [*runs(["Hopper-v4"], ["ppo"], [0], **short), *runs(["Hopper-v4"], ["ppo"], [1], **long)]
    parts += runs(["HalfCheetah-v4"], ["ppo"], [0, 1], **long)
    made = sections(tmp_path, parts)
    line = made["tasks"].data.query("panel == 'Hopper-v4'")
    assert line[["x", "value"]].to_numpy().tolist() == [[20_000, 200.0], [40_000, 400.0], [50_000, 500.0]]
    assert made["efficiency"].data["x"].agg(["min", "max"]).tolist() == [20.0, 50.0]


def test_runs_without_a_common_step_have_no_curve_and_are_in_the_table(tmp_path):
    first, second = ({"curve": (np.array([at]), np.array([5.0]))} for at in (1_000, 2_000))
    made = sections(tmp_path, [*runs(["Hopper-v4"], ["ppo"], [0], **first), *runs(["Hopper-v4"], ["ppo"], [1], **second)])
    assert made["tasks"].figure is None
    assert made["tasks"].table["Seeds"].tolist() == [2]


def test_a_return_that_is_not_finite_is_left_out_of_curves_and_named(tmp_path):
    ends = np.arange(1, 11) * 10_000
    odd = np.where(ends == 50_000, np.inf, 1.0 * ends)
    made = sections(tmp_path, runs(["Hopper-v4"], ["ppo"], [0, 1], curve=(ends, odd)))
    assert np.isfinite(made["tasks"].data["value"]).all()
    assert made["tasks"].notes == [
        f"1 of 10 returns of {run.path.name} are not finite, and are left out of curves." for run in Results(tmp_path).runs()
    ]


def test_there_is_no_change_in_percent_if_the_base_may_be_zero(tmp_path):
    """The scores of the base are about 0: random actions have -280 on HalfCheetah and 18 on Hopper."""
    base = [*runs(["HalfCheetah-v4"], ["ppo"], final=-290.0), *runs(["Hopper-v4"], ["ppo"], final=18.0)]
    sure = runs(algorithms=["ano"], final=1000.0)
    fast = runs(algorithms=["ppo"], changed=FAST) + runs(algorithms=["ano"], final=2000.0, changed=FAST)
    table = sections(tmp_path, base, sure, fast)["sensitivity-learning-rate"].table.set_index("Algorithm")
    ppo, ano = (table.loc[f"{name} learning_rate=0.001"] for name in ("PPO", "ANO"))
    for name in ("IQM", "Mean"):
        assert np.isnan(ppo[f"{name}, change in %"])
        assert ano[f"{name}, change in %"] > 50.0
    assert table["IQM low"]["PPO learning_rate=0.0003"] < 0.0 < table["IQM high"]["PPO learning_rate=0.0003"]


def test_intervals_do_not_set_the_scale_of_an_axis():
    wide = Estimate(np.array([1.0, 2.0]), np.array([-1e6, 1.9]), np.array([1e6, 2.1]))
    data = points("ano", np.array([1.0, 2.0]), wide)
    for figure, axis in ((draw_lines(data, looks(), "x"), "y"), (draw_intervals(data, looks(), "x"), "x")):
        low, high = getattr(figure.axes[0], f"get_{axis}lim")()
        assert -10.0 < low < 1.0 < 2.0 < high < 10.0
    narrow = points("ano", np.array([1.0, 2.0]), Estimate(np.array([1.0, 2.0]), np.array([0.9, 1.8]), np.array([1.1, 2.3])))
    low, high = draw_lines(narrow, looks(), "x").axes[0].get_ylim()
    assert low < 0.9 < 2.3 < high  # which are shown as a whole where there is room


@pytest.mark.parametrize("value", [0.0, 500.0, np.inf, np.nan])
def test_values_without_a_range_have_axes(value):
    band = Estimate.exact(np.full(2, value))
    data = points("ano", np.array([1.0, 2.0]), band)
    draw_lines(data, looks(), "x", markers=True).draw_without_rendering()
    draw_intervals(data, looks(), "x").draw_without_rendering()


def test_intervals_at_the_same_place_are_drawn_next_to_each_other():
    score = Estimate(np.array(1.0), np.array(0.5), np.array(1.5))
    data = pd.concat([points(name, rate, score) for rate in (3e-4, 1e-3) for name in ("ppo", "spo", "ano")])
    (axes,) = draw_lines(data, looks(), "rate", markers=True, dodge=True).axes
    places = sorted(line.get_xdata()[0] for line in axes.lines)
    assert np.diff(np.log10(places)).min() > 0.01
    assert places[1] == pytest.approx(3e-4)
    assert max(places) < 3.6e-4  # nearer to their own value than to the next
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0.0003", "0.001"]


def test_lines_of_one_algorithm_with_different_settings_are_told_apart():
    one = Estimate.exact(np.ones(2))
    data = pd.concat([points("ano", np.array([1.0, 2.0]), one, line=f"ANO n_epochs={epochs}") for epochs in (4, 10, 20)])
    (axes,) = draw_lines(data, looks(), "x", markers=True).axes
    assert {line.get_color() for line in axes.lines} == {looks()["ano"][0]}
    assert len({line.get_fillstyle() for line in axes.lines}) == 3


LONG = "ano:clip_range=0.2,desired_kl=0.01,normalize_advantage=False,shaping=ppo"


def test_nothing_that_a_figure_says_is_cut(tmp_path):
    parts = [runs([*BOTH, "ExtraordinarilyLongNameOfATask-v0"], ["ppo", LONG], changed=changed) for changed in ({}, FAST)]
    for section in sections(tmp_path, *parts, drawn=True).values():
        if section.figure is None:
            continue
        figure = section.figure
        figure.draw_without_rendering()
        box = figure.get_tightbbox()
        width, height = figure.get_size_inches()
        assert -0.01 <= box.x0 < box.x1 <= width + 0.01, section.name
        assert -0.01 <= box.y0 < box.y1 <= height + 0.01, section.name
        for axes in figure.axes:
            assert axes.get_window_extent().width > 100, section.name  # the texts leave room for the data


def test_texts_have_no_holes_where_a_name_is_missing(tmp_path):
    for section in sections(tmp_path, runs()).values():
        for text in filter(None, [section.title, section.caption, section.table_caption, *section.text]):
            assert " :" not in text
            assert "  " not in text
            assert "{" not in text


def test_hyperparameters_that_differ_between_tasks_name_them(tmp_path):
    parts = [
        runs(["HalfCheetah-v4"], hyperparameters={"gae_lambda": 0.8}),
        runs(["Hopper-v4"], hyperparameters={"n_epochs": 4}),
    ]
    parts += [runs(["Hopper-v4"], ["trpo"])]
    table = sections(tmp_path, *parts)["hyperparameters"].table.set_index("Hyperparameter")
    assert table["ANO"]["gae_lambda"] == "0.8 (HalfCheetah-v4); 0.95 (default) (Hopper-v4)"
    assert table["PPO"]["n_epochs"] == "10 (default) (HalfCheetah-v4); 4 (Hopper-v4)"
    assert table["TRPO"]["n_epochs"] == "-"  # which it does not have
    assert table["PPO"]["clip_range"] == "0.2"


def test_a_hyperparameter_of_most_tasks_need_not_list_them(tmp_path):
    tasks = ["A-v0", "B-v0", "C-v0", "D-v0", "E-v0"]
    parts = [runs(tasks[:4], hyperparameters={"n_steps": 64}), runs(tasks[4:], hyperparameters={"n_steps": 128})]
    table = sections(tmp_path, *parts)["hyperparameters"].table.set_index("Hyperparameter")
    assert table["ANO"]["n_steps"] == "64 (other tasks); 128 (E-v0)"


def test_the_probability_of_improvement_is_over_all_tasks(tmp_path):
    """By hand: ANO is 5 above PPO, and seeds are 10 apart, so 6 of 9 pairs are better; on one task, all are worse."""
    parts = [runs(["Own-v0", "Hopper-v4"]), runs(["Mine-v0"], ["ppo"], final=5000.0), runs(["Mine-v0"], ["ano"])]
    parts += [runs(["Alone-v0"], ["ppo"])]
    section = sections(tmp_path / "mixed", *parts)["improvement"]
    assert section.table[["Tasks", "P(X > Y)"]].to_numpy().tolist() == [[3, pytest.approx((6 / 9 + 6 / 9 + 0) / 3)]]
    assert "Alone-v0 is not aggregated: no runs of ANO." in section.notes
    own = sections(tmp_path / "own", runs(["Own-v0"]))["improvement"]
    assert own.table[["Tasks", "P(X > Y)"]].to_numpy().tolist() == [[1, pytest.approx(6 / 9)]]
    assert own.figure is not None


def test_a_setting_that_was_not_selected_by_iqm_is_not_called_the_best(tmp_path):
    made = sections(tmp_path, *(runs(["Own-v0"], changed=changed) for changed in ({"n_epochs": 4}, {}, {"n_epochs": 40})))
    assert "best of" not in " ".join(made["aggregates"].text)
    assert made["hyperparameters"].table.set_index("Hyperparameter")["ANO"]["n_epochs"] == "10 (default)"


def test_an_algorithm_has_one_color_in_all_figures(monkeypatch):
    styles = looks()
    for directory in ("examples", "benchmarks"):
        monkeypatch.syspath_prepend(ROOT / directory)
    curves, shapings, demo, speed = map(importlib.import_module, ("plot_learning_curves", "plot_shapings", "demo", "figures"))
    for label, (name, color, *_) in curves.SETTINGS.items():
        shown_as = "ppo" if "shaping=ppo" in label else label.partition(":")[0]
        assert color == styles[shown_as][0], name
    for colors in (shapings.COLORS, demo.COLORS):
        assert colors == {name: styles[name][0] for name in colors}
    ours = {style[0] for style in styles.values()}
    assert {name: speed.STYLES[name][0] for name in ("sb3", "ano")} == {"sb3": styles["ppo"][0], "ano": styles["ano"][0]}
    assert not ours & {speed.STYLES[name][0] for name in ("sbx", "other")}  # other programs are no other algorithms
