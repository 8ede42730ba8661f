"""Reports of experiments: one HTML page, figures as PNG and PDF, tables as CSV and LaTeX.

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
from sb3_ano.bench.exchange import safe_for_spreadsheets
from sb3_ano.bench.report.data import Chapter, Settings, load_chapters
from sb3_ano.bench.report.figures import render
from sb3_ano.bench.report.sections import ENDS, Section, make_sections
from sb3_ano.bench.results import Results

__all__ = ["Settings", "write_report"]

_PAGE = "index.html"
_MARK = 'content="sb3_ano.bench report"'
_MISSING = "-"
# Seconds after which the work shows a bar.
_SILENT_SECONDS = 2.0
_NEGATIVE = re.compile(r"-(\d)")
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|&$~#])")


def write_report(path: Path, out: Path, settings: Settings = Settings()) -> list[str]:  # noqa: B008  # frozen
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
    page = out / _PAGE
    earlier = page.read_text(encoding="utf-8", errors="replace")[:2000] if page.is_file() else ""
    if out.is_file() or (out.exists() and any(out.iterdir()) and _MARK not in earlier):
        raise ValueError(f"{out} holds other files; the report needs an empty directory, or that of an earlier report")
    results = Results(path)
    chapters = load_chapters(results, settings)
    style: dict[str, Any] = {"unit": "part", "delay": _SILENT_SECONDS, "leave": False, "disable": None}
    parts = [(chapter, make_sections(chapter)) for chapter in tqdm(chapters, "Comparing runs", **style)]
    names: set[str] = set()
    for section in (section for _, sections in parts for section in sections):
        while section.name in names:  # of suites whose names differ in case or punctuation
            section.name += "-2"
        names.add(section.name)
    loader, escape = FileSystemLoader(Path(__file__).parent), select_autoescape(["html"])
    environment = Environment(loader=loader, autoescape=escape, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"escaped": escaped, "shown": shown}
    with replace_files(out) as new:
        for directory in ("figures", "tables"):
            (new / directory).mkdir()
        every = [section for _, sections in parts for section in sections]
        images = {section.name: _write_files(new, section) for section in tqdm(every, "Drawing figures", **style)}
        values = {"facts": _facts(results, [chapter for chapter, _ in parts], settings), "parts": parts, "images": images}
        for name in (_PAGE, "summary.md"):
            (new / name).write_text(environment.get_template(f"template_{name}").render(values), encoding="utf-8")
    return [f"{chapter.name}: {note}" for chapter, sections in parts for section in sections for note in section.notes]


def _write_files(out: Path, section: Section) -> str:
    """Write figure and table of a section, and return the figure as PNG in base64."""
    if not section.table.empty:
        file = out / "tables" / section.name
        safe_for_spreadsheets(section.table).to_csv(file.with_suffix(".csv"), index=False)
        file.with_suffix(".tex").write_text(latex(section.wide), encoding="utf-8")
    if section.figure is None:
        return ""
    file = out / "figures" / section.name
    for kind in ("png", "pdf"):
        file.with_suffix(f".{kind}").write_bytes(render(section.figure, kind))
    safe_for_spreadsheets(section.data).to_csv(file.with_suffix(".csv"), index=False)
    return base64.b64encode(file.with_suffix(".png").read_bytes()).decode()


def _facts(results: Results, chapters: Sequence[Chapter], settings: Settings) -> dict[str, str]:
    runs: list[dict[Any, Any]] = [run for chapter in chapters for run in chapter.runs.to_dict("records")]
    actions = {"deterministic" if run["evaluation"].get("deterministic", True) else "stochastic" for run in runs}
    kind = f"means of the last evaluations ({settings.last}; {' and '.join(sorted(actions))} actions)"
    known = [part for run in runs for part in (run.get("versions"), run.get("machine")) if isinstance(part, dict)]
    holds = f"95 %, Student's t with a stratified bootstrap ({settings.reps:,} resamples)"
    return {
        "Results": readable(str(results.path)),
        "Runs": "; ".join(f"{chapter.name}: {len(chapter.runs)}" for chapter in chapters),
        "Written": now(),
        "Command": readable(settings.command) or _MISSING,
        "Returns": kind if settings.returns == "evaluation" else "means of the last 100 training episodes",
        "Reference scores": readable(", ".join(settings.tables)),
        "Intervals": f"{holds}; they hold less if runs end at one of two levels",
        "Made with": ", ".join(dict.fromkeys(f"{key} {value}" for part in known for key, value in part.items())),
    }


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """Return the cells as texts for readers.

    :param table: table in full precision; columns whose names end with ``%`` are changes
    """
    ends = {f"{name}{end}" for name in table for end in ENDS[1:]}
    texts = {}
    for name in table.columns.difference(list(ends), sort=False):
        parts = table[[f"{name}{end}" for end in ENDS if f"{name}{end}" in table]].itertuples(index=False, name=None)
        # More digits of a change would say more than the bootstrap knows.
        texts[name] = [text(*cells, whole=name.endswith("%")) for cells in parts]
    return pd.DataFrame(texts)


def text(value: Any, *interval: float, whole: bool = False) -> str:
    """Return a text as it is, and a number with its interval, with three significant digits of the largest of them.

    :param value: text or number, which may be NaN or infinite
    :param interval: ends of the interval, NaN if there is none
    :param whole: whether to leave out decimals, as for integers
    """
    if isinstance(value, str):
        return value
    if pd.isna(value):
        return _MISSING
    numbers = [number for number in (value, *interval) if math.isfinite(number)]
    # Rounded first: 0.9996 is 1.00. The smallest numbers are rounding errors of 0.
    largest = float(f"{max(map(abs, numbers), default=0.0):.2e}")
    exact = whole or largest < 1e-12 or isinstance(value, int | np.integer)
    places = 0 if exact else max(0, 2 - math.floor(math.log10(largest)))
    texts = [f"{number + 0.0:,.{places}f}" for number in (value, *interval)]
    return "{} ({} to {})".format(*texts) if len(numbers) == 3 else texts[0]


def latex(table: pd.DataFrame) -> str:
    """Return a table as LaTeX (booktabs), with numbers to the right.

    :param table: table in full precision
    """
    texts = shown(table)
    numeric = [name for name in texts if name in table and pd.api.types.is_numeric_dtype(table[name])]
    columns = "".join("r" if name in numeric else "l" for name in texts)
    styler = texts.style.hide(axis="index").format(escape="latex").format_index(axis=1, escape="latex")
    # A hyphen is no minus sign.
    styler = styler.format(lambda cell: _NEGATIVE.sub(r"$-$\1", str(cell)), subset=numeric)
    return styler.to_latex(hrules=True, column_format=columns)


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
