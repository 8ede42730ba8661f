"""Tables: numbers in words, and the same rows as HTML, Markdown, LaTeX and CSV."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from sb3_ano.bench.statistics import Estimate

_MISSING = "-"
# Signs that a spreadsheet takes for the beginning of a formula.
_FORMULA = re.compile(r"[=+\-@\t\r]")
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|&$~#])")
# Rounding errors of slopes and probabilities.
_ZERO = 1e-12


def number(value: float) -> str:
    """Return a number with three significant digits, whole above 1000."""
    value = float(value)
    if math.isnan(value):
        return _MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if abs(value) < _ZERO:
        return "0"
    if abs(value) < 1e-4:
        return f"{value:.2e}"
    return f"{value:,.{decimals(value)}f}"


def decimals(value: float) -> int:
    """Return the decimals that show three significant digits of a number."""
    # Rounded first: 0.9996 is 1.00.
    exponent = math.floor(math.log10(abs(float(f"{value:.2e}")))) if value else 0
    return max(0, 2 - exponent)


def interval(estimate: Estimate) -> str:
    """Return a value with its interval, all with the decimals that the largest of them needs."""
    numbers = [float(part) for part in (estimate.value, estimate.low, estimate.high)]
    if not np.isfinite(numbers).all():
        return number(numbers[0])
    most = max(map(abs, numbers))
    places = min(decimals(most), 6) if most > _ZERO else 0
    value, low, high = (f"{part + 0.0:,.{places}f}" for part in numbers)
    return f"{value} ({low} to {high})"


def percent(estimate: Estimate) -> str:
    """Return a relative change in whole percents, with its interval."""
    value, low, high = (100.0 * float(part) for part in (estimate.value, estimate.low, estimate.high))
    if math.isnan(value):
        return _MISSING
    return f"{value:+.0f} %" + ("" if math.isnan(low + high) else f" ({low:+.0f} to {high:+.0f})")


@dataclass(frozen=True)
class Percent:
    """A relative change, which is shown in percents."""

    estimate: Estimate


@dataclass(frozen=True)
class Table:
    """Rows of texts, numbers and estimates.

    :param name: name of its files
    :param caption: text above the table
    :param rows: cells by column
    """

    name: str
    caption: str
    rows: Sequence[Mapping[str, Any]]

    def shown(self) -> pd.DataFrame:
        """Return the cells as texts for readers."""
        return pd.DataFrame([{name: _text(cell) for name, cell in row.items()} for row in self.rows]).fillna(_MISSING)

    def data(self) -> pd.DataFrame:
        """Return the cells in full precision, estimates in three columns, safe for spreadsheets."""
        return safe_for_spreadsheets(pd.DataFrame([_expanded(row) for row in self.rows]))

    def html(self) -> str:
        """Return the table as HTML with escaped texts."""
        return self.shown().to_html(index=False, border=0, escape=True, justify="unset")

    def markdown(self) -> str:
        """Return the table as Markdown with escaped texts."""
        frame = self.shown()
        lines = [list(frame.columns), ["---"] * len(frame.columns), *frame.to_numpy().tolist()]
        return "\n".join(f"| {' | '.join(cells if cells[0] == '---' else map(escaped, cells))} |" for cells in lines)

    def latex(self) -> str:
        """Return the table as LaTeX (booktabs)."""
        styler = self.shown().style.hide(axis="index").format(escape="latex").format_index(axis=1, escape="latex")
        return styler.to_latex(hrules=True)


def _text(cell: Any) -> str:
    if isinstance(cell, Estimate):
        return interval(cell)
    if isinstance(cell, Percent):
        return percent(cell.estimate)
    if isinstance(cell, bool | str) or cell is None:
        return str(cell if cell is not None else _MISSING)
    return f"{cell:,}" if isinstance(cell, int | np.integer) else number(cell)


def _expanded(row: Mapping[str, Any]) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for name, cell in row.items():
        part = cell.estimate if isinstance(cell, Percent) else cell
        if isinstance(part, Estimate):
            cells |= {name: float(part.value), f"{name} low": float(part.low), f"{name} high": float(part.high)}
        else:
            cells[name] = part
    return cells


def escaped(text: Any) -> str:
    """Return a text in which Markdown and HTML find no markup."""
    return _MARKDOWN.sub(r"\\\1", " ".join(str(text).split()))


def safe_for_spreadsheets(frame: pd.DataFrame) -> pd.DataFrame:
    """Put an apostrophe before texts that a spreadsheet would take for formulas.

    :param frame: table with texts
    """
    return frame.map(lambda cell: f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell)
