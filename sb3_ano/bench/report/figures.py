"""Figures: one color, line style and marker per algorithm throughout, in a palette for color-blind readers.

The data of a figure is a DataFrame with a row per point: ``panel``, ``algorithm``, ``line`` (text of the legend), ``x``, and
``value`` with its interval from ``low`` to ``high``, NaN if there is none.
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, NullLocator

from sb3_ano.bench.algorithms import title
from sb3_ano.bench.statistics import Estimate

#: Color, line style and marker by label of the algorithm.
Looks = Mapping[str, tuple[str, Any, str]]
# Okabe and Ito's palette (2008), without its yellow, which is too light for lines.
_LOOKS: Looks = {
    "ppo": ("#000000", (0, (4, 1.5)), "s"),
    "trpo": ("#CC79A7", (0, (1, 1)), "v"),
    "spo": ("#0072B2", (0, (5, 1, 1, 1)), "^"),
    "papo": ("#009E73", (0, (3, 1, 1, 1, 1, 1)), "D"),
    "ano": ("#D55E00", "-", "o"),
}
_OTHERS = [
    (color, line, marker)
    for line, markers in (((0, (2, 1)), "P*X"), ((0, (8, 2)), "<>h"))
    for color, marker in zip(("#E69F00", "#56B4E9", "#999999"), markers, strict=True)
]
_PANEL_WIDTH, _PANEL_HEIGHT = 3.3, 2.3
_LARGEST_SPAN, _MOST_TICKS = 1e4, 6

#: Decorates functions that draw: matplotlib reads its settings whenever an artist is made.
styled = mpl.rc_context(mpl.rc_params_from_file(Path(__file__).with_name("figures.mplstyle"), use_default_template=False))


def looks(algorithms: Iterable[str] = ()) -> Looks:
    """Return color, line style and marker of each algorithm.

    :param algorithms: labels, in the order in which those without a fixed look get one
    """
    others = [label for label in dict.fromkeys(algorithms) if label not in _LOOKS]
    return {**_LOOKS, **{label: _OTHERS[index % len(_OTHERS)] for index, label in enumerate(others)}}


def points(algorithm: str, x: Any, estimate: Estimate, panel: str = "", line: str = "") -> pd.DataFrame:
    """Return the points of a line, one if ``x`` is a number.

    :param algorithm: label of the algorithm, which determines the look
    :param x: shape ``(points,)``
    :param estimate: values and intervals, each of shape ``(points,)``
    :param panel: title of the panel
    :param line: text of the legend, by default the title of the algorithm
    """
    numbers = {name: np.atleast_1d(part) for name, part in zip(("x", *Estimate._fields), (x, *estimate), strict=True)}
    return pd.DataFrame({"panel": panel, "algorithm": algorithm, "line": line or title(algorithm), **numbers})


def _new_figure(data: pd.DataFrame, columns: int, height: float) -> tuple[Figure, list[tuple[Axes, str, pd.DataFrame]]]:
    """Return a figure, and for each panel its axes, title and points."""
    panels = [(str(name), rows) for name, rows in data.groupby("panel", sort=False)]
    columns = min(columns, len(panels))
    lines = -(-len(panels) // columns)
    width = 5.6 if columns == 1 else _PANEL_WIDTH * columns
    figure = Figure(figsize=(width, height * lines + 0.4), layout="constrained")
    return figure, [(figure.add_subplot(lines, columns, place), *panel) for place, panel in enumerate(panels, start=1)]


@styled
def draw_intervals(data: pd.DataFrame, looks: Looks, xlabel: str, mark: float | None = None) -> Figure:
    """Draw values with their intervals, one below the other, each with its text.

    :param data: points
    :param looks: color, line style and marker of each algorithm
    :param xlabel: label of the horizontal axes
    :param mark: position of a vertical line
    """
    figure, panels = _new_figure(data, 2, 0.7 + 0.27 * data.groupby("panel").size().max())
    figure.set_figwidth(figure.get_figwidth() + 0.07 * max(0, data["line"].str.len().max() - 12))
    for index, (axis, panel, rows) in enumerate(panels):
        for height, row in enumerate(rows.to_dict("records")):
            color, _, marker = looks[row["algorithm"]]
            axis.plot(row["value"], height, color=color, marker=marker)
            axis.hlines(height, row["low"], row["high"], color=color, linewidth=2.2)
        axis.set_yticks(range(len(rows)), rows["line"] if index % 2 == 0 else [""] * len(rows))
        axis.set(ylim=(len(rows) - 0.5, -0.5), title=panel, xlabel=xlabel)
        axis.xaxis.set_major_locator(MaxNLocator(5))
        if mark is not None:
            axis.axvline(mark, color="black", linewidth=0.8, linestyle="--", zorder=1)
    return figure


@styled
def draw_lines(
    data: pd.DataFrame,
    looks: Looks,
    xlabel: str,
    ylabel: str = "",
    *,
    columns: int = 2,
    steps: bool = False,
    markers: bool = False,
    logarithmic_y: Sequence[str] = (),
) -> Figure:
    """Draw lines with intervals, and one legend for all panels.

    :param data: points
    :param looks: color, line style and marker of each algorithm
    :param xlabel: label of the horizontal axes
    :param ylabel: label of the vertical axes, by default the titles
    :param columns: most panels side by side
    :param steps: whether values last until the next point
    :param markers: whether to mark the points, with error bars instead of bands, on logarithmic horizontal axes
    :param logarithmic_y: titles of the panels whose vertical axes are logarithmic
    """
    figure, panels = _new_figure(data, columns, _PANEL_HEIGHT)
    handles: dict[str, Any] = {}
    for axis, name, rows in panels:
        for (algorithm, text), line in rows.groupby(["algorithm", "line"], sort=False):
            line, (color, style, marker) = line.sort_values("x"), looks[str(algorithm)]
            kind = {"color": color, "linestyle": style, "marker": marker if markers else None}
            drawstyle = "steps-post" if steps else "default"
            handles.setdefault(str(text), axis.plot(line["x"], line["value"], drawstyle=drawstyle, **kind)[0])
            ends = line["x"], line["low"], line["high"]
            if markers:
                axis.vlines(*ends, color=color, linewidth=1.3)
            else:
                axis.fill_between(*ends, color=color, alpha=0.15, linewidth=0, step="post" if steps else None)
        axis.set(title=name, ylabel=ylabel or name)
        if markers and (rows["x"] > 0).all():
            _make_logarithmic(axis, "x", rows["x"])
        if name in logarithmic_y:
            _make_logarithmic(axis, "y", rows["value"])
    for axis, _, _ in panels[-columns:]:
        axis.set_xlabel(xlabel)
    fitting = max(1, int(figure.get_figwidth() / (0.6 + 0.08 * max(map(len, handles)))))
    figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=min(3, len(handles), fitting))
    return figure


def _make_logarithmic(axes: Axes, which: str, column: pd.Series) -> None:
    """Make an axis logarithmic, with plain numbers at its ticks."""
    values = np.unique(column[column > 0])
    if not len(values):
        return
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("{x:g}" if values[-1] < 8 * values[0] else NullFormatter())
    if which == "x" and len(values) <= _MOST_TICKS and np.all(values[1:] > 1.15 * values[:-1]):
        axis.set_ticks(values.tolist(), [f"{value:.3g}" for value in values])
        axis.set_minor_locator(NullLocator())
    # A learning rate that ends at 0 leaves rounding errors, which would take up most of the axis.
    if values[0] < values[-1] / _LARGEST_SPAN:
        axes.set(**{f"{which}lim": (values[-1] / _LARGEST_SPAN, None)})


@styled
def render(figure: Figure, kind: str) -> bytes:
    """Render a figure as a file without dates, so that equal figures are equal files.

    :param figure: figure to render
    :param kind: ``"png"`` or ``"pdf"``
    """
    file = io.BytesIO()
    figure.savefig(file, format=kind, dpi=200, metadata={"Software": None} if kind == "png" else {"CreationDate": None})
    return file.getvalue()
