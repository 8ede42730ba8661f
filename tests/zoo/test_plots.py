"""The zoo's plots as files, with or without a display."""

from argparse import Namespace

import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.image import imread

from sb3_ano.envs import make_vec_env
from sb3_ano.zoo.figures import figures
from tests.envs.backends import needs_envpool

VALUES = Namespace(input="results.pkl")


@pytest.fixture(autouse=True)
def own_backend():
    backend = matplotlib.get_backend()
    yield
    matplotlib.use(backend)


def draw(*labels):
    for label in labels:
        plt.figure(label)
        plt.plot([1, 2, 3])
    plt.show()


@pytest.mark.parametrize("has_display", [True, False])
def test_figures_are_written_instead_of_shown(has_display, tmp_path, capsys):
    with figures("all_plots", VALUES, str(tmp_path / "curve.png"), has_display=has_display):
        draw("one", "two", "three")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curve-2.png", "curve-3.png", "curve.png"]
    assert imread(tmp_path / "curve.png").std() > 0
    assert capsys.readouterr().out.startswith(f"one: {tmp_path / 'curve.png'}\n")
    assert plt.get_fignums() == []


@pytest.mark.parametrize(("suffix", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_suffix_is_the_format_also_without_show(suffix, start, tmp_path):
    with figures("all_plots", VALUES, str(tmp_path / f"curve.{suffix}"), has_display=False):
        plt.plot([1, 2])  # all_plots --no-display
    assert (tmp_path / f"curve.{suffix}").read_bytes().startswith(start)


@pytest.mark.parametrize("has_display", [True, False])
def test_an_empty_figure_is_an_error(has_display, tmp_path):
    error = pytest.raises(ValueError, match="results.pkl holds no results for these options")
    with error, figures("plot_from_file", VALUES, str(tmp_path / "curve.png"), has_display=has_display):
        plt.figure("Training")
    assert not list(tmp_path.iterdir())


def test_without_display_and_file_a_line_says_what_to_do(capsys):
    with figures("all_plots", VALUES, None, has_display=False):
        draw("Training")
    assert "--figure FILE" in capsys.readouterr().out


def test_with_a_display_figures_are_shown(monkeypatch):
    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.get_fignums()))
    with figures("all_plots", VALUES, None, has_display=True):
        draw("Training")
    assert shown == [[1]]


@needs_envpool
def test_training_curves_read_the_monitor_file_of_a_batch(zoo, tmp_path):
    env = make_vec_env("Hopper-v5", 8, backend="envpool", monitor_dir=tmp_path / "logs" / "ano" / "Hopper-v5_1")
    env.reset()
    for _ in range(200):
        env.step(np.zeros((8, 3)))
    env.close()
    zoo("plot_train -a ano -e Hopper-v5 -f logs -w 5 --figure curve.png")
    assert imread(tmp_path / "curve.png").std() > 0.01
