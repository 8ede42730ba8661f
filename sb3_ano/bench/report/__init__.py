"""Reports of experiments: one HTML page, figures as PNG and PDF, tables as CSV and LaTeX."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from sb3_ano._io import now, replace_directory
from sb3_ano.bench.report import tables
from sb3_ano.bench.report.data import Chapter, Settings, load_chapters
from sb3_ano.bench.report.figures import render
from sb3_ano.bench.report.sections import Section, make_sections
from sb3_ano.bench.results import Results

__all__ = ["Settings", "write_report"]

_PAGE = "index.html"
_MARK = 'content="sb3_ano.bench report"'


def write_report(path: Path, out: Path, settings: Settings = Settings()) -> list[str]:  # noqa: B008  # frozen
    """Write a report; an earlier one in the directory is replaced as soon as the new one is complete.

    :param path: directory of results
    :param out: directory of the report
    :param settings: how it is made
    :return: notes on what was left out
    :raises ValueError: if runs are damaged, there are none, or ``out`` holds other files
    :raises OSError: if files cannot be read or written
    """
    page = out / _PAGE
    earlier = page.read_text(encoding="utf-8", errors="replace")[:2000] if page.is_file() else ""
    if out.is_file() or (out.exists() and any(out.iterdir()) and _MARK not in earlier):
        raise ValueError(f"{out} holds other files; the report needs an empty directory, or that of an earlier report")
    results = Results(path)
    parts = [(chapter, make_sections(chapter)) for chapter in load_chapters(results, settings)]
    loader, escape = FileSystemLoader(Path(__file__).parent), select_autoescape(["html"])
    environment = Environment(loader=loader, autoescape=escape, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"escaped": tables.escaped, "shown": tables.shown}
    with replace_directory(out) as new:
        for directory in ("figures", "tables"):
            (new / directory).mkdir()
        images = {section.name: _write_files(new, section) for _, sections in parts for section in sections}
        facts = _facts(results, [chapter for chapter, _ in parts], settings)
        values = {"facts": facts, "parts": parts, "images": images}
        for name in (_PAGE, "summary.md"):
            (new / name).write_text(environment.get_template(f"template_{name}").render(values), encoding="utf-8")
    return [f"{chapter.name}: {note}" for chapter, sections in parts for section in sections for note in section.notes]


def _write_files(out: Path, section: Section) -> str:
    """Write figure and table of a section, and return the figure as PNG in base64."""
    if not section.table.empty:
        file = out / "tables" / section.name
        tables.safe_for_spreadsheets(section.table).to_csv(file.with_suffix(".csv"), index=False)
        file.with_suffix(".tex").write_text(tables.latex(section.table), encoding="utf-8")
    if section.figure is None:
        return ""
    file = out / "figures" / section.name
    image = render(section.figure, "png")
    file.with_suffix(".png").write_bytes(image)
    file.with_suffix(".pdf").write_bytes(render(section.figure, "pdf"))
    tables.safe_for_spreadsheets(section.data).to_csv(file.with_suffix(".csv"), index=False)
    return base64.b64encode(image).decode()


def _facts(results: Results, chapters: Sequence[Chapter], settings: Settings) -> dict[str, str]:
    runs: list[dict[Any, Any]] = [run for chapter in chapters for run in chapter.runs.to_dict("records")]
    actions = {"deterministic" if run["evaluation"].get("deterministic", True) else "stochastic" for run in runs}
    kind = f"evaluations during training ({' and '.join(sorted(actions))} actions)"
    known = [part for run in runs for part in (run.get("versions"), run.get("machine")) if isinstance(part, dict)]
    bootstrap = settings.bootstrap
    facts = {
        "Results": str(results.path),
        "Runs": "; ".join(f"{chapter.name}: {len(chapter.runs)}" for chapter in chapters),
        "Written": now(),
        "Command": settings.command or "-",
        "Returns": kind if settings.returns == "evaluation" else "training episodes",
        "Reference scores": "; ".join(f"{table.name} ({table.title})" for table in chapters[0].references.tables),
        "Intervals": f"95 %, Student's t with a stratified bootstrap ({bootstrap.reps:,} resamples, seed {bootstrap.seed})",
        "Made with": ", ".join(dict.fromkeys(f"{key} {value}" for part in known for key, value in part.items())),
    }
    for failure in results.failures():
        facts[f"Failed: {failure.get('name')}"] = "\n".join(map(str, failure.get("errors", []))).split("\n")[-1]
    return facts
