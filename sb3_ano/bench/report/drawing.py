"""How figures look: one colour and line for an algorithm throughout, text that stays text, the same bytes each time."""

import io
from collections.abc import Iterable
from typing import Any

from sb3_ano.extras import missing_extra

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError as error:
    raise missing_extra("bench", error.name or "matplotlib") from error

INK = "#212529"
#: Widths in inches, of figures that fill the page, and of those that stand side by side.
WIDE, SMALL = 5.6, 3.5
_KNOWN = {
    "ppo": ("#495057", "-"),
    "trpo": ("#0c8599", (0, (1, 1))),
    "spo": ("#d9730d", (0, (5, 1.5))),
    "papo": ("#6741d9", (0, (5, 1.5, 1, 1.5))),
    "ano": ("#c2255c", "-"),
    "identity": ("#868e96", (0, (1, 1))),
}
_OTHERS = ("#1971c2", "#2f9e44", "#a61e4d", "#5f3dc4", "#e67700", "#087f5b")
_SETTINGS: Any = {
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.edgecolor": "#868e96",
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.0,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    # Smaller, and searchable; the fonts that browsers take are narrower than the one that is measured.
    "svg.fonttype": "none",
    "svg.hashsalt": "sb3_ano",
}

#: Decorates the functions that draw: matplotlib looks at its settings whenever something is made.
styled = mpl.rc_context(_SETTINGS)


class Style:
    """Colours and lines.

    :param algorithms: in the order in which those that are not known get theirs
    """

    def __init__(self, algorithms: Iterable[str] = ()) -> None:
        others = [name for name in dict.fromkeys(algorithms) if name not in _KNOWN]
        self._others = {name: (_OTHERS[index % len(_OTHERS)], "--") for index, name in enumerate(others)}

    def colour(self, algorithm: str) -> str:
        """The colour of an algorithm."""
        return self._of(algorithm)[0]

    def line(self, algorithm: str) -> dict[str, Any]:
        """Arguments of a line: colour and pattern."""
        colour, pattern = self._of(algorithm)
        return {"color": colour, "linestyle": pattern}

    def _of(self, algorithm: str) -> tuple[str, object]:
        return _KNOWN.get(algorithm) or self._others.get(algorithm, (_OTHERS[0], "--"))


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def panels(figure: Figure, rows: int, columns: int, **options: Any) -> list[Axes]:
    """Empty axes, row by row, without frames.

    :param figure: that they are in
    :param rows: of axes
    :param columns: of axes
    :param options: of ``Figure.subplots``
    """
    axes = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.25)
        one.set_axisbelow(True)
    return axes


def render(figure: Figure) -> tuple[bytes, bytes]:
    """The figure as SVG and as PNG."""
    found = []
    for kind, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
        file = io.BytesIO()
        figure.savefig(file, format=kind, dpi=150, metadata=metadata)
        found.append(file.getvalue())
        figure.set_layout_engine("none")  # what was laid out for the first need not be laid out again
    return found[0], found[1]
