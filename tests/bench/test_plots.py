"""Pictures."""

import numpy as np
import pytest
from matplotlib.image import imread

from sb3_ano.bench import plots
from sb3_ano.bench.plots import Colours, plot_learning_curves, plot_ratios, plot_scaling

STEPS = np.array([1000.0, 2000.0, 4000.0])


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved."""
    saved = []
    monkeypatch.setattr(plots, "_save", lambda figure, path, save=plots._save: saved.append(figure) or save(figure, path))
    return saved


def test_bars_have_whiskers_and_labels(figures, tmp_path):
    cases = [("one", {"ano": (2.0, 2.5, 2.75), "sbx": (0.5, 0.75, 1.0)}), ("two", {"ano": (3.0, 4.0, 4.5)})]
    path = plot_ratios(cases, tmp_path / "new" / "speed.png")
    assert imread(path).shape[1] == 1200
    first, second = figures[0].axes
    assert [axes.get_title(loc="left") for axes in (first, second)] == ["one", "two"]
    assert [bar.get_width() for bar in first.patches] == [2.5, 0.75]
    assert [text.get_text() for text in first.texts] == ["2.50", "0.75"]
    assert [label.get_text() for label in first.get_yticklabels()] == ["ano", "sbx"]
    # The same contender has the same colour in all panels.
    assert first.patches[0].get_facecolor() == second.patches[0].get_facecolor() != first.patches[1].get_facecolor()
    assert "SB3's PPO" in second.get_xlabel()
    whisker = first.collections[0].get_segments()[0]
    assert list(whisker[:, 0]) == [2.0, 2.75]


def test_scaling_is_drawn(figures, tmp_path):
    numbers = np.array([1, 8])
    curves = {"ano": (numbers, np.array([40.0, 10.0]), np.array([90.0, 60.0]))}
    assert plot_scaling({"ano": (STEPS, STEPS / 10)}, curves, tmp_path / "scaling.png").exists()
    left, right = figures[0].axes
    assert list(left.lines[0].get_xdata()) == [1.0, 2.0, 4.0]
    assert [line.get_label() for line in right.lines] == ["ano, whole", "ano, collection"]


def test_scaling_may_have_one_half_only(tmp_path):
    assert plot_scaling({"ano": (STEPS, STEPS)}, {}, tmp_path / "scaling.png").exists()


def test_learning_curves_have_bands(figures, tmp_path):
    panels = {"A-v1": {"sb3": (STEPS, STEPS, STEPS - 1, STEPS + 1)}, "B-v1": {"sb3": (STEPS, STEPS, STEPS, STEPS)}}
    assert plot_learning_curves(panels, "mean of 2 seeds", tmp_path / "curves.png").exists()
    assert [axes.get_title() for axes in figures[0].axes] == ["A-v1", "B-v1"]
    assert len(figures[0].axes[0].collections) == 1


def test_colours_are_kept():
    colours = Colours(["a"])
    assert colours.of("a") != colours.of("b") == colours.of("b")
    assert all(colours.of(str(number)) for number in range(20))
