"""The zoo's plots as files."""

import matplotlib
import pytest
from matplotlib import pyplot as plt
from matplotlib.image import imread

from sb3_ano.zoo.figures import figures


@pytest.fixture(autouse=True)
def own_backend():
    backend = matplotlib.get_backend()
    yield
    plt.close("all")
    matplotlib.use(backend)


def draw(label):
    plt.figure(label)
    plt.plot([1, 2, 3])


def test_a_figure_is_written_where_it_would_have_been_shown(tmp_path, capsys):
    with figures(tmp_path / "curve.png", has_display=True):
        draw("Training")
        plt.show()
    assert imread(tmp_path / "curve.png").std() > 0
    assert capsys.readouterr().out == f"Training: {tmp_path / 'curve.png'}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]
    assert plt.get_fignums() == []


def test_several_figures_are_numbered(tmp_path):
    with figures(tmp_path / "curve.svg", has_display=False):
        for label in ("one", "two", "three"):
            draw(label)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curve-2.svg", "curve-3.svg", "curve.svg"]
    assert all("<svg" in path.read_text() for path in tmp_path.iterdir())


def test_figures_are_written_that_are_drawn_and_not_shown(tmp_path):
    with figures(tmp_path / "curve.pdf", has_display=False):
        draw("drawn with --no-display")
    assert (tmp_path / "curve.pdf").read_bytes().startswith(b"%PDF")


def test_an_empty_figure_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no run fits the options"), figures(tmp_path / "curve.png", has_display=False):
        plt.figure("Training")
    assert not list(tmp_path.iterdir())


def test_without_display_and_file_a_line_says_what_to_do(capsys):
    show = plt.show
    with figures(None, has_display=False):
        draw("Training")
        plt.show()
    assert "--figure FILE" in capsys.readouterr().out
    assert plt.show is show


def test_with_a_display_nothing_changes():
    show = plt.show
    with figures(None, has_display=True):
        assert plt.show is show


def test_nothing_plotted_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no run fits the options"), figures(tmp_path / "curve.png", has_display=False):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("file", "error", "message"),
    [("curve.txt", ValueError, "allowed are files that end in"), ("no/curve.png", FileNotFoundError, "no folder that exists")],
)
def test_a_file_that_cannot_be_written_is_refused_before_plotting(file, error, message, tmp_path):
    with pytest.raises(error, match=message), figures(tmp_path / file, has_display=True):
        raise AssertionError("too late")
