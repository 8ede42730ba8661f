"""Figures: one color, line style and marker per algorithm throughout, in a palette for color-blind readers."""

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from sb3_ano.bench.report.data import title
from sb3_ano.bench.statistics import Estimate

# Okabe and Ito's palette (2008), without its yellow, which is too light for lines.
_STYLES: dict[str, tuple[str, Any, str]] = {
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


class Style:
    """Colors, line styles and markers.

    :param algorithms: labels, in the order in which those without a style of their own get one
    """

    def __init__(self, algorithms: Iterable[str] = ()) -> None:
        others = [label for label in dict.fromkeys(algorithms) if label not in _STYLES]
        self._styles = _STYLES | {label: _OTHERS[index % len(_OTHERS)] for index, label in enumerate(others)}

    def line(self, algorithm: str) -> dict[str, Any]:
        """Return the keyword arguments of a line."""
        color, line, _ = self._styles[algorithm]
        return {"color": color, "linestyle": line}

    def marker(self, algorithm: str) -> dict[str, Any]:
        """Return the keyword arguments of markers."""
        color, _, marker = self._styles[algorithm]
        return {"color": color, "marker": marker}


@dataclass(frozen=True)
class Line:
    """A line with an interval.

    :param algorithm: label of the algorithm, which decides about the style
    :param x: shape ``(points,)``
    :param estimate: values and ends of the interval, each of shape ``(points,)``
    :param label: text of the legend, by default the title of the algorithm
    """

    algorithm: str
    x: np.ndarray
    estimate: Estimate
    label: str = ""

    @property
    def text(self) -> str:
        """Text of the legend."""
        return self.label or title(self.algorithm)


def frame_of(panels: Mapping[str, Sequence[Line]]) -> pd.DataFrame:
    """Return the numbers of a figure of lines.

    :param panels: lines by title
    """
    parts = []
    for name, lines in panels.items():
        for line in lines:
            columns = {"x": line.x, "value": line.estimate.value, "low": line.estimate.low, "high": line.estimate.high}
            parts.append(pd.DataFrame({"panel": name, "line": line.text, **columns}))
    return pd.concat(parts, ignore_index=True)


def new_figure(panels: int, columns: int = 2, height: float = _PANEL_HEIGHT, **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure and its axes, row by row.

    :param panels: number of axes
    :param columns: most axes side by side
    :param height: height of an axes in inches
    :param options: arguments of ``Figure.subplots``
    """
    columns = min(columns, panels)
    rows = -(-panels // columns)
    width = 5.6 if columns == 1 else _PANEL_WIDTH * columns
    figure = Figure(figsize=(width, height * rows + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for unused in axes[panels:]:
        unused.set_visible(False)
    return figure, axes[:panels]


@styled
def draw_intervals(
    panels: Mapping[str, Sequence[tuple[str, str, Estimate]]],
    style: Style,
    xlabel: Mapping[str, str],
    mark: float | None = None,
) -> Figure:
    """Draw estimates with their intervals, one below the other.

    :param panels: by title, rows of label, algorithm and estimate
    :param style: colors and markers
    :param xlabel: label of the horizontal axis by title
    :param mark: where to draw a vertical line
    """
    longest = max(len(rows) for rows in panels.values())
    figure, axes = new_figure(len(panels), height=0.7 + 0.27 * longest)
    for index, (axis, (name, rows)) in enumerate(zip(axes, panels.items(), strict=True)):
        for height, (_, algorithm, estimate) in enumerate(rows):
            ends = [[estimate.value - estimate.low], [estimate.high - estimate.value]]
            error = None if np.isnan(ends).any() else np.maximum(ends, 0.0)
            axis.errorbar(float(estimate.value), height, xerr=error, linewidth=2.2, capsize=3, **style.marker(algorithm))
        axis.set_yticks(range(len(rows)), [label for label, _, _ in rows] if index % 2 == 0 else [""] * len(rows))
        axis.set(ylim=(len(rows) - 0.5, -0.5), title=name, xlabel=xlabel[name])
        axis.xaxis.set_major_locator(MaxNLocator(5))
        if mark is not None:
            axis.axvline(mark, color="black", linewidth=0.8, linestyle="--", zorder=1)
    return figure


@styled
def draw_lines(
    panels: Mapping[str, Sequence[Line]],
    style: Style,
    *,
    xlabel: str,
    ylabel: str,
    columns: int = 2,
    steps: bool = False,
    markers: bool = False,
    logarithmic_x: bool = False,
    logarithmic_y: Sequence[str] = (),
) -> Figure:
    """Draw lines with intervals, and one legend for all panels.

    :param panels: lines by title
    :param style: colors, line styles and markers
    :param xlabel: label of the horizontal axes
    :param ylabel: label of the vertical axes, or an empty string for the titles
    :param columns: most panels side by side
    :param steps: whether values last until the next point
    :param markers: whether to mark the points, with error bars instead of bands
    :param logarithmic_x: whether horizontal axes are logarithmic
    :param logarithmic_y: titles of the panels whose vertical axes are logarithmic
    """
    figure, axes = new_figure(len(panels), columns)
    handles: dict[str, Any] = {}
    for axis, (name, lines) in zip(axes, panels.items(), strict=True):
        for line in lines:
            kind = style.line(line.algorithm) | (style.marker(line.algorithm) if markers else {})
            drawstyle = "steps-post" if steps else "default"
            handles.setdefault(line.text, axis.plot(line.x, line.estimate.value, drawstyle=drawstyle, **kind)[0])
            ends = (line.x, line.estimate.low, line.estimate.high)
            if markers:
                axis.vlines(*ends, color=kind["color"], linewidth=1.3)
            elif np.isfinite(line.estimate.low).any():
                axis.fill_between(*ends, color=kind["color"], alpha=0.15, linewidth=0, step="post" if steps else None)
        axis.set(title=name, ylabel=ylabel or name)
        if logarithmic_x:
            _make_logarithmic(axis, "x", np.concatenate([line.x for line in lines]))
        if name in logarithmic_y:
            _make_logarithmic(axis, "y", np.concatenate([line.estimate.value for line in lines]))
    for axis in axes[-min(columns, len(axes)) :]:
        axis.set_xlabel(xlabel)
    figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=min(3, len(handles)))
    return figure


def _make_logarithmic(axes: Axes, which: str, values: np.ndarray) -> None:
    """Make an axis logarithmic, with plain numbers at its ticks."""
    values = np.unique(values[values > 0])
    if not len(values):
        return
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if values[-1] < 8 * values[0] else ""))
    if which == "x" and len(values) <= _MOST_TICKS and np.all(values[1:] > 1.15 * values[:-1]):
        axis.set_ticks(values.tolist(), [f"{value:.3g}" for value in values])
        axis.set_minor_locator(NullLocator())
    # A learning rate that ends at 0 leaves rounding errors, which would take up most of the axis.
    if values[0] < values[-1] / _LARGEST_SPAN:
        axes.set(**{f"{which}lim": (values[-1] / _LARGEST_SPAN, None)})


@styled
def render(figure: Figure, kind: str) -> bytes:
    """Return a figure as ``"png"`` or ``"pdf"``, without dates, so that equal figures are equal files."""
    file = io.BytesIO()
    figure.savefig(file, format=kind, dpi=200, metadata={"Software": None} if kind == "png" else {"CreationDate": None})
    return file.getvalue()
