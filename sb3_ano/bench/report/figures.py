"""Figures: one color, line style and marker per algorithm throughout, in a palette for color-blind readers.

The data of a figure is a DataFrame with a row per point: ``panel``, ``algorithm``, ``line`` (text of the legend), ``x``,
``value`` with its interval from ``low`` to ``high``, NaN if there is none.
"""

import io
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator

from sb3_ano.bench.algorithms import title
from sb3_ano.bench.looks import Looks
from sb3_ano.bench.statistics import Estimate

# Inches.
_PANEL_WIDTH = 3.3
_PANEL_HEIGHT = 2.3
_ONLY_PANEL_WIDTH = 5.6
# Ratio of the ends of a logarithmic axis that is cut, and most values that are ticks themselves.
_LARGEST_SPAN = 1e4
_MOST_TICKS = 6
# Ratios of the ends of a logarithmic axis below which powers of ten alone, or with 2 and 5, are too few ticks.
_FEW_DECADES = 100.0
_HALF_DECADE = 3.0
# Part of a logarithmic axis that a tick's text needs.
_TICK_WIDTH = 0.1
# Markers of an algorithm's lines that differ in their settings, because its color and line style are the same.
_FILLS = ("full", "none", "left", "right", "top", "bottom")
# Part of the range of the values by which an axis may extend beyond them, so that intervals do not set its scale.
_ROOM_FOR_INTERVALS = 0.5
# Part of the distance between neighboring points that is used to draw lines next to each other.
_DODGE = 0.12
# Most letters of a line of a panel's title, and of the legend.
_TITLE_LETTERS = 40
_LEGEND_LETTERS = 100
# Inches of a letter of the legend, and of what is next to its text.
_LETTER_WIDTH = 0.08
_LEGEND_HANDLE_WIDTH = 0.6

#: Decorates functions that draw: matplotlib reads its settings whenever an artist is made.
_STYLE = mpl.rc_params_from_file(Path(__file__).with_name("figures.mplstyle"), use_default_template=False)
styled = mpl.rc_context(_STYLE)


def points(
    algorithm: str,
    x: Any,
    estimate: Estimate,
    panel: str = "",
    line: str = "",
) -> pd.DataFrame:
    """Return the points of a line, one if ``x`` is a number.

    :param algorithm: label of the algorithm, which determines the look
    :param x: shape ``(points,)``
    :param estimate: values and intervals, each of shape ``(points,)``
    :param panel: title of the panel
    :param line: text of the legend, by default the title of the algorithm
    """
    columns = {
        "panel": panel,
        "algorithm": algorithm,
        "line": line or title(algorithm),
        "x": np.atleast_1d(x),
        "value": np.atleast_1d(estimate.value),
        "low": np.atleast_1d(estimate.low),
        "high": np.atleast_1d(estimate.high),
    }
    return pd.DataFrame(columns)


def _new_figure(
    data: pd.DataFrame,
    columns: int,
    height: float,
) -> tuple[Figure, list[tuple[Axes, pd.DataFrame]]]:
    """Return a figure, and for each panel its axes and points."""
    panels = [(str(name), rows) for name, rows in data.groupby("panel", sort=False)]
    columns = min(columns, len(panels))
    lines = -(-len(panels) // columns)
    width = _PANEL_WIDTH * columns
    if columns == 1:
        width = _ONLY_PANEL_WIDTH
    figure = Figure(figsize=(width, height * lines + 0.4), layout="constrained")

    parts = []
    for place, (name, rows) in enumerate(panels, start=1):
        axes = figure.add_subplot(lines, columns, place)
        axes.set_title(textwrap.fill(name, _TITLE_LETTERS))
        parts.append((axes, rows))

    return figure, parts


@styled
def draw_intervals(
    data: pd.DataFrame,
    looks: Looks,
    xlabel: str,
    mark: float | None = None,
    limits: Sequence[float] | None = None,
) -> Figure:
    """Draw values with their intervals, one below the other, each with its text.

    :param data: points
    :param looks: color, line style and marker of each algorithm
    :param xlabel: label of the horizontal axes
    :param mark: position of a vertical line
    :param limits: ends of the horizontal axes, by default those of the data
    """
    # As high as the panel with the most lines
    most_lines = data.groupby("panel")["line"].nunique().max()
    figure, panels = _new_figure(data, 2, 0.7 + 0.27 * most_lines)

    # As wide as the longest text needs
    longest = data["line"].str.len().max()
    figure.set_figwidth(figure.get_figwidth() + 0.07 * max(0, longest - 12))

    for index, (axes, rows) in enumerate(panels):
        for height, row in enumerate(rows.to_dict("records")):
            color, _, marker = looks[row["algorithm"]]
            axes.plot(row["value"], height, color=color, marker=marker)
            axes.hlines(height, row["low"], row["high"], color=color, linewidth=2.2)

        # Texts only at the left panels, whose lines are those of the right ones, too.
        texts = list(rows["line"])
        if index % 2 == 1:
            texts = [""] * len(rows)
        axes.set_yticks(range(len(rows)), texts)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel(xlabel)
        axes.xaxis.set_major_locator(MaxNLocator(5))

        if limits is None:
            # Wide, because a line of this figure is its interval.
            _limit_by_values(axes, "x", rows, room=3.0)
        else:
            axes.set_xlim(*limits)

        if mark is not None:
            axes.axvline(mark, color="black", linewidth=0.8, linestyle="--", zorder=1)

    return figure


def _limit_by_values(
    axes: Axes,
    which: str,
    rows: pd.DataFrame,
    room: float = _ROOM_FOR_INTERVALS,
) -> None:
    """Limit a linear axis to the values, and to their intervals as far as these leave the values a readable scale.

    :param axes: axes of the panel
    :param which: ``"x"`` or ``"y"``
    :param rows: points of the panel
    :param room: part of the range of the values by which the axis may extend beyond them
    """
    values = rows["value"][np.isfinite(rows["value"])]
    if values.empty:
        return
    lowest = values.min()
    highest = values.max()
    # Values that are all equal have no range.
    span = highest - lowest or 0.1 * abs(highest) or 1.0

    ends = rows[["low", "high"]].to_numpy(float)
    ends = ends[np.isfinite(ends)]
    low = max(ends.min(initial=lowest), lowest - room * span)
    high = min(ends.max(initial=highest), highest + room * span)
    margin = 0.05 * (high - low) or 0.5 * span
    if which == "x":
        axes.set_xlim(low - margin, high + margin)
    else:
        axes.set_ylim(low - margin, high + margin)


@styled
def draw_lines(
    data: pd.DataFrame,
    looks: Looks,
    xlabel: str,
    ylabel: str = "",
    *,
    columns: int = 2,
    markers: bool = False,
    joined: bool = True,
    dodge: bool = False,
) -> Figure:
    """Draw lines with intervals, and one legend for all panels.

    :param data: points
    :param looks: color, line style and marker of each algorithm
    :param xlabel: label of the horizontal axes
    :param ylabel: label of the vertical axes
    :param columns: most panels side by side
    :param markers: whether to mark the points, with error bars instead of bands, on logarithmic horizontal axes
    :param joined: whether to draw lines between the points
    :param dodge: whether to draw lines next to each other, because they have their points at the same places
    """
    figure, panels = _new_figure(data, columns, _PANEL_HEIGHT)
    handles: dict[str, Any] = {}
    styles = _styles_of_lines(data, looks)

    for axes, rows in panels:
        # Settings are varied by factors.
        is_logarithmic = markers and bool((rows["x"] > 0).all())
        offsets = {}
        if dodge:
            offsets = _offsets(rows, is_logarithmic)

        for (algorithm, text), line in rows.groupby(["algorithm", "line"], sort=False):
            style = dict(styles[algorithm, text])
            if not markers:
                # Curves have too many points for markers.
                style["marker"] = ""
            if not joined:
                style["linestyle"] = "none"
            color = style["color"]
            offset = offsets.get(str(text), 0.0)

            line = line.sort_values("x")
            x = _moved(line["x"], offset, is_logarithmic)
            (handle,) = axes.plot(x, line["value"], **style)
            # One entry of the legend for all panels.
            handles.setdefault(str(text), handle)

            # A band would suggest that something was measured between the points.
            if markers:
                axes.vlines(x, line["low"], line["high"], color=color, linewidth=1.3)
            else:
                axes.fill_between(x, line["low"], line["high"], color=color, alpha=0.15, linewidth=0)

        axes.set_ylabel(ylabel)
        if is_logarithmic:
            _make_logarithmic(axes, rows["x"], ticks_at_values=joined)
        _limit_by_values(axes, "y", rows)

    for axes, _ in panels[-columns:]:
        axes.set_xlabel(xlabel)
    _add_legend(figure, handles)
    return figure


def _add_legend(figure: Figure, handles: Mapping[str, Any]) -> None:
    """Add a legend above the panels, and make the figure wide enough for its texts."""
    texts = [textwrap.fill(text, _LEGEND_LETTERS) for text in handles]
    longest = max(len(line) for text in texts for line in text.splitlines())
    width = _LEGEND_HANDLE_WIDTH + _LETTER_WIDTH * longest
    figure.set_figwidth(max(figure.get_figwidth(), width))

    fitting = max(1, int(figure.get_figwidth() / width))
    columns = min(3, len(texts), fitting)
    figure.legend(
        list(handles.values()),
        texts,
        loc="outside upper center",
        ncols=columns,
    )


def _styles_of_lines(data: pd.DataFrame, looks: Looks) -> dict[tuple[Any, Any], dict[str, Any]]:
    """Return the style of each line: the look of its algorithm, and a fill of the markers that tells its lines apart."""
    styles = {}
    for algorithm, lines in data.groupby("algorithm")["line"]:
        color, linestyle, marker = looks[str(algorithm)]
        for index, text in enumerate(lines.unique()):
            styles[algorithm, text] = {
                "color": color,
                "linestyle": linestyle,
                "marker": marker,
                "fillstyle": _FILLS[index % len(_FILLS)],
                "markerfacecoloralt": "white",
            }

    return styles


def _offsets(rows: pd.DataFrame, is_logarithmic: bool) -> dict[str, float]:
    """Return by how much each line is moved to the right, in decades on a logarithmic axis, so that none hides another."""
    lines = rows["line"].unique()
    places = np.unique(rows["x"])
    if is_logarithmic:
        places = np.log10(places)
    distance = 1.0
    if len(places) > 1:
        distance = np.diff(places).min()
    step = _DODGE * distance / len(lines)
    middle = (len(lines) - 1) / 2
    return {line: step * (index - middle) for index, line in enumerate(lines)}


def _moved(
    x: pd.Series,
    offset: float,
    is_logarithmic: bool,
) -> pd.Series:
    """Return places on an axis, moved by an offset."""
    if is_logarithmic:
        return x * 10.0**offset
    return x + offset


def _make_logarithmic(axes: Axes, column: pd.Series, ticks_at_values: bool) -> None:
    """Make the horizontal axis logarithmic, with plain numbers at its ticks: the values themselves if their texts fit."""
    values = np.unique(column[(column > 0) & np.isfinite(column)])
    if not len(values):
        return
    axis = axes.xaxis
    axes.set_xscale("log")
    ratio = values[-1] / values[0]
    if ratio < _FEW_DECADES:
        # Otherwise the axis would have one number or none.
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())
    if ratio < _HALF_DECADE:
        axis.set_minor_formatter("{x:g}")

    distances = np.diff(np.log(values))
    has_room = np.all(distances > _TICK_WIDTH * np.log(ratio))

    if ticks_at_values and has_room and len(values) <= _MOST_TICKS:
        axis.set_ticks(values.tolist(), [f"{value:.3g}" for value in values])
        # Ticks between the values would look like values.
        axis.set_minor_locator(NullLocator())
    # A learning rate that ends at 0 leaves rounding errors, which would take up most of the axis.
    if ratio > _LARGEST_SPAN:
        axes.set_xlim(values[-1] / _LARGEST_SPAN, None)


@styled
def render(figure: Figure, kind: str) -> bytes:
    """Render a figure as a file without dates, so that equal figures are equal files.

    :param figure: figure to render
    :param kind: ``"png"`` or ``"pdf"``
    """
    # The page needs the bytes, too.
    file = io.BytesIO()
    metadata = {"CreationDate": None}
    if kind == "png":
        metadata = {"Software": None}

    with warnings.catch_warnings():
        # A name of a task may have letters that the font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure.savefig(file, format=kind, dpi=200, metadata=metadata)

    return file.getvalue()
