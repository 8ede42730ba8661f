"""What a report consists of, apart from how it is written."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sb3_ano.bench.statistics import Estimate

#: In the place of a number that there is not.
MISSING = "-"


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    :param text: what is shown
    :param order: by what it is sorted: a number, or None for the text
    """

    text: str
    order: float | None = None


@dataclass(frozen=True)
class Row:
    """A row of a table.

    :param cells: under the columns of the table
    :param run_ids: the runs that its numbers are from
    """

    cells: tuple[Cell, ...]
    run_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """A table; the column of the runs is added when it is written.

    :param caption: what it shows
    :param columns: names
    :param rows: their cells
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Picture:
    """A drawn figure.

    :param name: of its files, unique in the report
    :param caption: what it shows
    :param alt: the same for those who cannot see it, with the numbers that matter
    :param svg: the drawing
    :param png: the drawing
    :param run_ids: the runs that it is from
    :param small: whether several stand side by side
    """

    name: str
    caption: str
    alt: str
    svg: bytes
    png: bytes
    run_ids: tuple[str, ...] = ()
    small: bool = False


@dataclass(frozen=True)
class Section:
    """A part of the report.

    :param title: heading
    :param text: paragraphs
    :param pictures: figures
    :param tables: tables
    :param notes: what is missing, and why
    """

    title: str
    text: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chapter:
    """The sections of a suite.

    :param title: heading
    :param sections: its parts
    :param summary: what was run, in a sentence
    """

    title: str
    sections: tuple[Section, ...]
    summary: str = ""


@dataclass(frozen=True)
class Report:
    """All of it.

    :param title: heading
    :param facts: how it was made: pairs of a name and a text
    :param chapters: one a suite, and what belongs to none
    """

    title: str
    facts: tuple[tuple[str, str], ...]
    chapters: tuple[Chapter, ...] = field(default=())


def number(value: float) -> str:
    """A number with three significant digits; from 1,000 on, without decimals."""
    if not math.isfinite(value):
        return MISSING if math.isnan(value) else "∞" if value > 0 else "-∞"
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    if 0 < abs(value) < 1e-3:
        return f"{value:.2e}"
    digits = 2 - max(-1, math.floor(math.log10(abs(value)))) if value else 2
    return f"{value:.{max(0, min(3, digits))}f}"


def percent(value: float) -> str:
    """A share as a percentage with its sign."""
    return MISSING if not math.isfinite(value) else f"{100 * value:+.1f} %"


def estimate(of: Estimate, write: Callable[[float], str] = number) -> str:
    """A number with its interval, where it has one."""
    return f"{write(of.value)} ({write(of.low)} to {write(of.high)})" if math.isfinite(of.low) else write(of.value)


def estimate_cell(of: Estimate) -> Cell:
    """The cell of a number with its interval."""
    return Cell(estimate(of), of.value)


def number_cell(value: float) -> Cell:
    """The cell of a number."""
    return Cell(number(value), value)


def joined(words: Iterable[str], last: str = "and") -> str:
    """Words in a sentence."""
    *others, final = list(words) or [""]
    return f"{', '.join(others)} {last} {final}" if others else final


def plural(count: int, thing: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def listed(run_ids: Sequence[str], most: int = 5) -> str:
    """The first few names, and how many more there are."""
    more = len(run_ids) - most
    return ", ".join(run_ids[:most]) + (f" and {more:,} more" if more > 0 else "")
