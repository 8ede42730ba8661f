"""Tables for readers: numbers with three significant digits, and intervals next to their values.

A table is a DataFrame in full precision. The interval of column ``X`` is in ``X low`` and ``X high``.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from sb3_ano.bench.statistics import Estimate

_ENDS = ("", " low", " high")
_MISSING = "-"
# Signs that a spreadsheet takes for the beginning of a formula.
_FORMULA = re.compile(r"[=+\-@\t\r]")
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|&$~#])")
# Rounding errors of slopes and probabilities.
_ZERO = 1e-12


def frame(rows: Iterable[Mapping[Any, Any]]) -> pd.DataFrame:
    """Return a table of rows whose cells may be estimates, which become three columns."""
    return pd.DataFrame([_expanded(row) for row in rows])


def _expanded(row: Mapping[Any, Any]) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for name, cell in row.items():
        parts = map(float, cell) if isinstance(cell, Estimate) else (cell,)
        cells |= {f"{name}{end}": part for end, part in zip(_ENDS, parts, strict=False)}
    return cells


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """Return the cells as texts for readers.

    :param table: table in full precision; columns whose names end with ``%`` are changes
    """
    ends = {f"{name}{end}" for name in table for end in _ENDS[1:]}
    texts = {}
    for name in table.columns.difference(list(ends), sort=False):
        parts = table[[f"{name}{end}" for end in _ENDS if f"{name}{end}" in table]].itertuples(index=False, name=None)
        texts[name] = [_change(*cells) if name.endswith("%") else text(*cells) for cells in parts]
    return pd.DataFrame(texts)


def text(value: Any, low: float = math.nan, high: float = math.nan) -> str:
    """Return a text as it is, and a number with its interval, all with the decimals that the largest of them needs."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    numbers = np.array([math.nan if value is None else value, low, high], float)
    if not np.isfinite(numbers).all():
        return number(numbers[0])
    most = np.abs(numbers).max()
    places = min(_decimals(most), 6) if most > _ZERO else 0
    return "{} ({} to {})".format(*(f"{part:,.{places}f}" for part in numbers + 0.0))


def number(value: float) -> str:
    """Return a number with three significant digits, whole above 1000."""
    if math.isnan(value):
        return _MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if abs(value) < _ZERO:
        return "0"
    return f"{value:.2e}" if abs(value) < 1e-4 else f"{value:,.{_decimals(value)}f}"


def _decimals(value: float) -> int:
    # Rounded first: 0.9996 is 1.00.
    return max(0, 2 - math.floor(math.log10(abs(float(f"{value:.2e}")))))


def _change(value: float, low: float = math.nan, high: float = math.nan) -> str:
    """Return a change in whole percents: more digits would say more than the bootstrap knows."""
    if math.isnan(value):
        return _MISSING
    return f"{value:+.0f}" + ("" if math.isnan(low + high) else f" ({low:+.0f} to {high:+.0f})")


def latex(table: pd.DataFrame) -> str:
    """Return a table as LaTeX (booktabs)."""
    styler = shown(table).style.hide(axis="index").format(escape="latex").format_index(axis=1, escape="latex")
    return styler.to_latex(hrules=True)


def escaped(content: Any) -> str:
    """Return a text in which Markdown and HTML find no markup."""
    return _MARKDOWN.sub(r"\\\1", " ".join(str(content).split()))


def safe_for_spreadsheets(table: pd.DataFrame) -> pd.DataFrame:
    """Put an apostrophe before texts that a spreadsheet would take for formulas.

    :param table: table with texts
    """
    return table.map(lambda cell: f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell)
