"""The forms of figures: intervals in rows, lines with bands, values of a setting."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sb3_ano.bench.report.contenders import short_label
from sb3_ano.bench.report.content import MISSING, number
from sb3_ano.bench.report.drawing import INK, SMALL, WIDE, Style, new_figure, panels, render, styled
from sb3_ano.bench.statistics import Band, Estimate
from sb3_ano.extras import missing_extra

try:
    from matplotlib.axes import Axes
    from matplotlib.ticker import LogFormatter, MaxNLocator
except ImportError as error:
    raise missing_extra("bench", "matplotlib") from error

_PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
# Of the numbers beside bars, and of a panel, of which labels take the rest.
_INCHES_A_LETTER, _SHARE_OF_AXES = 0.07, 0.7
# Of a logarithmic axis.
_LARGEST_SPAN = 1e4


@dataclass(frozen=True)
class Bar:
    """A row of a panel.

    :param label: at its left
    :param algorithm: whose colour it has
    :param estimate: value and interval
    :param faint: lighter than others
    :param note: in place of the value
    """

    label: str
    algorithm: str
    estimate: Estimate
    faint: bool = False
    note: str = ""


@dataclass(frozen=True)
class Line:
    """A line with a band.

    :param label: in the legend
    :param algorithm: whose colour and pattern it has
    :param x: of its points
    :param band: values and interval
    """

    label: str
    algorithm: str
    x: np.ndarray
    band: Band


@styled
def draw_bars(
    groups: Mapping[str, Sequence[Bar]], style: Style, *, columns: int = 1, mark: float | None = None, xlabel: str = ""
) -> tuple[bytes, bytes]:
    """Intervals as bars with a tick at the value, a panel a group.

    :param groups: rows by the titles of their panels
    :param style: colours
    :param columns: panels side by side
    :param mark: where to draw a vertical line
    :param xlabel: of the lowest panels
    """
    lines = -(-len(groups) // columns)
    longest = max(len(rows) for rows in groups.values())
    figure = new_figure(WIDE, lines * (0.27 * longest + 0.75))
    axes = panels(figure, lines, columns)
    for position, (one, (title, rows)) in enumerate(zip(axes, groups.items(), strict=False)):
        _draw_rows(one, rows, style, WIDE / columns, mark)
        one.set_title(title)
        one.set_yticks(range(len(rows)), [row.label for row in rows] if position % columns == 0 else [""] * len(rows))
        if mark is not None:
            one.axvline(mark, color=INK, linewidth=0.8, linestyle="--", zorder=1)
        if position >= len(groups) - columns and xlabel:
            one.set_xlabel(xlabel)
    for one in axes[len(groups) :]:
        one.set_visible(False)
    return render(figure)


def _draw_rows(axes: Axes, rows: Sequence[Bar], style: Style, width: float, mark: float | None) -> None:
    ends = [value for row in rows for value in (row.estimate.value, row.estimate.low, row.estimate.high) if np.isfinite(value)]
    ends += [] if mark is None else [mark]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    span = (high - low) or abs(high) or 1.0
    for height, row in enumerate(rows):
        value, left, right = row.estimate.value, row.estimate.low, row.estimate.high
        if not np.isfinite(value):
            axes.text(low, height, row.note or MISSING, va="center", fontsize=8)
            continue
        if np.isfinite(left) and np.isfinite(right):
            colour = style.colour(row.algorithm)
            axes.barh(height, right - left, left=left, height=0.62, color=colour, alpha=0.35 if row.faint else 0.8)
        axes.vlines(value, height - 0.31, height + 0.31, color=INK, linewidth=1.6)
        end = right if np.isfinite(right) else value
        text = row.note or number(value)
        axes.text(end + 0.02 * span, height, text, va="center", fontsize=8, bbox=_PAPER, zorder=4)
    # Room for the numbers beside the bars.
    longest = max(len(row.note or number(row.estimate.value)) for row in rows)
    text_share = min(0.6, _INCHES_A_LETTER * longest / (_SHARE_OF_AXES * width))
    axes.set_xlim(low - 0.04 * span, high + span * text_share / (1.0 - text_share) + 0.04 * span)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(5))


@styled
def draw_lines(
    lines: Sequence[Line],
    style: Style,
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    small: bool = False,
    steps: bool = False,
) -> tuple[bytes, bytes]:
    """Lines with bands.

    :param lines: what to draw
    :param style: colours and patterns
    :param xlabel: below
    :param ylabel: at the left
    :param title: above
    :param small: a figure that stands beside others
    :param steps: whether values last until the next point
    """
    figure = new_figure(*((SMALL, 2.5) if small else (WIDE, 3.0)))
    axes = panels(figure, 1, 1)[0]
    _draw_bands(axes, lines, style, steps)
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axes.legend(fontsize=7 if small else 9)
    return render(figure)


def _draw_bands(axes: Axes, lines: Sequence[Line], style: Style, steps: bool = False) -> None:
    for line in lines:
        if np.isfinite(line.band.low).any():
            axes.fill_between(
                line.x,
                line.band.low,
                line.band.high,
                color=style.colour(line.algorithm),
                alpha=0.15,
                linewidth=0,
                step="post" if steps else None,
            )
        drawn = "steps-post" if steps else "default"
        axes.plot(line.x, line.band.values, label=line.label, drawstyle=drawn, **style.line(line.algorithm))


@styled
def draw_line_grid(
    rows: Mapping[str, Mapping[str, Sequence[Line]]], style: Style, *, xlabel: str, logarithmic: Sequence[str] = ()
) -> tuple[bytes, bytes]:
    """Lines with bands, a row of panels for each name.

    :param rows: by the title of the row and of the panel
    :param style: colours and patterns
    :param xlabel: of the lowest panels
    :param logarithmic: titles of panels with a logarithmic axis
    """
    columns = max(len(row) for row in rows.values())
    figure = new_figure(WIDE, 2.1 * len(rows) * -(-columns // 2) + 0.3)
    across = min(2, columns)
    axes = iter(panels(figure, len(rows) * -(-columns // across), across))
    for title, row in rows.items():
        own = [next(axes) for _ in range(across * -(-columns // across))]
        for one, (name, lines) in zip(own, row.items(), strict=False):
            _draw_bands(one, lines, style)
            one.set_title(f"{title}: {name}" if title else name, fontsize=9)
            one.set_xlabel(xlabel)
            if name in logarithmic:
                _make_logarithmic(one, np.concatenate([line.band.values for line in lines]))
        for one in own[len(row) :]:
            one.set_visible(False)
    handles = {line.label: line for row in rows.values() for lines in row.values() for line in lines}
    first = figure.axes[0]
    figure.legend(
        [first.plot([], [], **style.line(line.algorithm))[0] for line in handles.values()],
        list(handles),
        loc="outside upper center",
        ncols=min(3, len(handles)),
        frameon=False,
    )
    return render(figure)


def _make_logarithmic(axes: Axes, values: np.ndarray) -> None:
    positive = values[values > 0]
    if not len(positive):
        return
    axes.set_yscale("log")
    # A learning rate that ends at 0 leaves rounding errors, which would take up most of the axis.
    if positive.min() < positive.max() / _LARGEST_SPAN:
        axes.set_ylim(bottom=positive.max() / _LARGEST_SPAN)
    for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))


@styled
def draw_settings(
    groups: Mapping[str, Mapping[str, Sequence[tuple[float, Estimate]]]], style: Style, *, ylabel: str
) -> tuple[bytes, bytes]:
    """Values of a score against values of a setting, a panel a setting.

    :param groups: by the name of the setting and the label of the algorithm: values of the setting and of the score
    :param style: colours and patterns
    :param ylabel: name of the score
    """
    columns = min(2, len(groups))
    lines = -(-len(groups) // columns)
    figure = new_figure(WIDE, 2.6 * lines)
    axes = panels(figure, lines, columns, sharey=True)
    for one, (name, algorithms) in zip(axes, groups.items(), strict=False):
        values = sorted({value for points in algorithms.values() for value, _ in points})
        apart = 0.012 * ((values[-1] - values[0]) or 1.0)
        for index, (algorithm, points) in enumerate(algorithms.items()):
            # A little apart, or intervals at the same value would hide each other.
            x = np.array([value for value, _ in points]) + apart * (index - (len(algorithms) - 1) / 2)
            middle, low, high = (np.array([getattr(of, end) for _, of in points]) for end in ("value", "low", "high"))
            one.vlines(x, low, high, color=style.colour(algorithm), linewidth=1.2)
            one.plot(x, middle, label=short_label(algorithm), marker="o", markersize=4, **style.line(algorithm))
        one.set_xticks(values, [f"{value:g}" for value in values])
        one.set_xlabel(name)
        one.legend(fontsize=8)
    for position in range(0, len(groups), columns):
        axes[position].set_ylabel(ylabel)
    for one in axes[len(groups) :]:
        one.set_visible(False)
    return render(figure)
