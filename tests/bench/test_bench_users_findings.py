"""What users of the bench report stumbled over, as strict xfails for its next version."""

import html
import re

import pytest

from sb3_ano.bench.cli import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of two short runs, whose evaluations lie between the tenths of the training."""
    folder = tmp_path_factory.mktemp("bench") / "exp"
    few = ["--envs", "CartPole", "--algos", "ano", "--seeds", "2", "--steps", "3000", "--jobs", "1"]
    assert main(["run", "--suite", "classic", *few, "--out", str(folder)]) == 0
    assert main(["report", str(folder), "--reps", "20"]) == 0
    return folder / "report"


def text(report) -> str:
    return html.unescape(re.sub(r"<[^>]*>", " ", (report / "index.html").read_text()))


@pytest.mark.xfail(strict=True, reason="users Z10")
def test_curves_between_the_measured_points_are_called_interpolated(report):
    assert "interpolated" in text(report)


@pytest.mark.xfail(strict=True, reason="users Z18: the numbers of a figure")
def test_every_figure_has_its_numbers_beside_it(report):
    figures = {path for path in (report / "figures").glob("*.png") if "geometry" not in path.stem}
    assert figures
    assert all(path.with_suffix(".csv").is_file() for path in figures)


@pytest.mark.xfail(strict=True, reason="users Z18: intervals of two seeds")
def test_intervals_of_two_seeds_come_with_a_warning(report):
    assert re.search(r"(2|two) seeds.*(range|too few|not reliable|caution)", text(report))
