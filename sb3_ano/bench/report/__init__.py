"""Reports of experiments: one HTML page, figures as PNG and PDF, tables as CSV.

A table is a DataFrame in full precision. The interval of column ``X`` is in ``X low`` and ``X high``. For readers, numbers
have three significant digits, and intervals are next to their values.
"""

import base64
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from tqdm import tqdm

from sb3_ano._io import remove_leftovers, replace_files
from sb3_ano._system import now
from sb3_ano.bench.export import safe_for_spreadsheets
from sb3_ano.bench.report.data import Chapter, Settings, load_chapters
from sb3_ano.bench.report.figures import render
from sb3_ano.bench.report.sections import ENDS, Section, make_sections
from sb3_ano.bench.results import Results

__all__ = ["Settings", "write_report"]

_PAGE = "index.html"
# The page has it among its first bytes.
_MARK = 'content="sb3_ano.bench report"'
_MARK_BYTES = 2000
_MISSING = "-"
# Smaller numbers are rounding errors of 0.
_SMALLEST = 1e-12
# Bars of work that takes a while.
_BAR: dict[str, Any] = {
    "unit": "part",
    "delay": 2.0,
    "leave": False,
    "disable": None,
}
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|&$~#])")


def write_report(
    path: Path,
    out: Path,
    settings: Settings = Settings(),  # noqa: B008  # frozen
) -> list[str]:
    """Write a report; an earlier one in the directory is replaced as soon as the new one is complete, and other files stay.

    :param path: directory of results
    :param out: directory of the report
    :param settings: settings of the report
    :return: notes on what was left out
    :raises ValueError: if runs are damaged or missing, or ``out`` holds other files and no earlier report
    :raises FileExistsError: if a file of the earlier report was changed since
    :raises OSError: if files cannot be read or written
    """
    remove_leftovers(out)
    _require_replaceable(out)
    results = Results(path)
    chapters = load_chapters(results, settings)

    parts = []
    sections = []
    notes = []
    names = set()

    for chapter in tqdm(chapters, "Comparing runs", **_BAR):
        of_chapter = make_sections(chapter)
        for section in of_chapter:
            # Names of suites can differ in nothing but case or punctuation.
            while section.name in names:
                section.name += "-2"
            names.add(section.name)
            notes += [f"{chapter.name}: {note}" for note in section.notes]

        parts.append((chapter, of_chapter))
        sections += of_chapter

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {"escaped": escaped, "shown": shown}

    # The earlier report stays until all files of the new one are written.
    with replace_files(out) as new:
        for directory in ("figures", "tables"):
            (new / directory).mkdir()
        images = {}
        for section in tqdm(sections, "Drawing figures", **_BAR):
            images[section.name] = _write_files(new, section)

        values = {
            "facts": _facts(results, chapters, settings),
            "parts": parts,
            "images": images,
        }
        for name in (_PAGE, "summary.md"):
            page = environment.get_template(f"template_{name}").render(values)
            (new / name).write_text(page, encoding="utf-8")

    return notes


def _require_replaceable(out: Path) -> None:
    """Reject a directory that holds other files and no earlier report."""
    page = out / _PAGE
    if page.is_file():
        begin = page.read_text(encoding="utf-8", errors="replace")[:_MARK_BYTES]
        if _MARK in begin:
            return

    # Files of the user's could have the names of the report's.
    has_files = out.is_dir() and any(out.iterdir())
    if out.is_file() or has_files:
        raise ValueError(f"{out} holds other files; the report needs an empty directory, or that of an earlier report")


def _write_files(out: Path, section: Section) -> str:
    """Write figure and table of a section, and return the figure as PNG in base64."""
    if not section.table.empty:
        # Names of tasks and suites may be a stranger's.
        safe_for_spreadsheets(section.table).to_csv(out / "tables" / f"{section.name}.csv", index=False)
    if section.figure is None:
        return ""

    file = out / "figures" / section.name
    image = render(section.figure, "png")
    file.with_suffix(".png").write_bytes(image)
    file.with_suffix(".pdf").write_bytes(render(section.figure, "pdf"))
    safe_for_spreadsheets(section.data).to_csv(file.with_suffix(".csv"), index=False)
    return base64.b64encode(image).decode()


def _facts(
    results: Results,
    chapters: Sequence[Chapter],
    settings: Settings,
) -> dict[str, str]:
    """Return what the first lines of the report say."""
    counts = []
    actions = set()
    # Each once, in the order in which they appear.
    made_with: dict[str, None] = {}

    for chapter in chapters:
        counts.append(f"{chapter.name}: {len(chapter.runs)}")
        for run in chapter.runs.to_dict("records"):
            # A suite that says nothing evaluates the mode of the policy.
            actions.add("deterministic" if run["evaluation"].get("deterministic", True) else "stochastic")
            for part in (run.get("versions"), run.get("machine")):
                if isinstance(part, dict):
                    made_with |= dict.fromkeys(f"{key} {value}" for key, value in part.items())

    # How the numbers came about, next to the numbers
    returns = "means of the last 100 training episodes"
    if settings.returns == "evaluation":
        returns = f"means of the last evaluations ({settings.last}; {' and '.join(sorted(actions))} actions)"
    intervals = f"95 %, Student's t with a stratified bootstrap ({settings.reps:,} resamples)"
    return {
        "Results": readable(str(results.path)),
        "Runs": "; ".join(counts),
        "Written": now(),
        "Command": readable(settings.command) or _MISSING,
        "Returns": returns,
        "Reference scores": readable(", ".join(settings.tables)),
        "Intervals": f"{intervals}; they hold less if runs end at one of two levels",
        "Made with": ", ".join(made_with),
    }


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """Return the cells as texts for readers.

    :param table: table in full precision; columns whose names end with ``%`` are changes
    """
    texts = pd.DataFrame(index=table.index)
    ends = {f"{name}{end}" for name in table for end in ENDS[1:]}

    for name in table:
        # They are shown with their value.
        if name in ends:
            continue

        columns = [f"{name}{end}" for end in ENDS if f"{name}{end}" in table]
        # More digits of a change would say more than the bootstrap knows.
        is_whole = str(name).endswith("%")
        cells = table[columns].itertuples(index=False, name=None)
        texts[name] = [text(*numbers, whole=is_whole) for numbers in cells]

    return texts


def text(value: Any, *interval: float, whole: bool = False) -> str:
    """Return a text as it is, and a number with its interval, with three significant digits of the largest of them.

    :param value: text or number, which may be NaN or infinite
    :param interval: ends of the interval, NaN if there is none
    :param whole: whether to leave out decimals, as for integers
    """
    if isinstance(value, str):
        return value
    # Infinity is shown as such.
    if pd.isna(value):
        return _MISSING

    numbers = [number for number in (value, *interval) if math.isfinite(number)]
    largest = max((abs(number) for number in numbers), default=0.0)
    # Rounded first: 0.9996 is 1.00.
    largest = float(f"{largest:.2e}")
    places = 0
    if not whole and largest >= _SMALLEST and not isinstance(value, int | np.integer):
        places = max(0, 2 - math.floor(math.log10(largest)))

    # Without the sign of -0.0.
    texts = [f"{number + 0.0:,.{places}f}" for number in (value, *interval)]
    if len(numbers) == 3:
        return "{} ({} to {})".format(*texts)
    return texts[0]


def readable(path: str) -> str:
    """Return a text with the name of a file as UTF-8 has it, which may be another than that of the locale.

    :param path: text from the command line, in which bytes that the locale lacks are surrogates
    """
    return os.fsencode(path).decode("utf-8", "replace")


def escaped(content: Any) -> str:
    """Return a text in which Markdown and HTML find no markup.

    :param content: text, or an object with a text
    """
    return _MARKDOWN.sub(r"\\\1", " ".join(str(content).split()))
