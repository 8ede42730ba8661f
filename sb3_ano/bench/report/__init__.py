"""Reports of experiments: one HTML page, figures as PNG and PDF, tables as CSV and LaTeX."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from sb3_ano._io import now, replace_directory
from sb3_ano.bench.report import effects, sections
from sb3_ano.bench.report.data import Chapter, Settings, load_chapters
from sb3_ano.bench.report.figures import render
from sb3_ano.bench.report.sections import Section, View
from sb3_ano.bench.report.tables import escaped, safe_for_spreadsheets
from sb3_ano.bench.results import Results

__all__ = ["Settings", "write_report"]

_PAGE = "index.html"
_MARK = 'content="sb3_ano.bench report"'

#: The sections of a chapter, in their order. One that has nothing to show returns None.
_SECTIONS = (
    *(sections.aggregates, sections.profiles, sections.improvement, sections.sample_efficiency, sections.tasks),
    *(effects.settings, effects.dynamics, effects.matched_kl, effects.wall_clock, effects.records),
)


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
    chapters = load_chapters(results, settings)
    parts: list[tuple[str, list[Section]]] = []
    for chapter in chapters:
        view = View(chapter)
        parts.append((chapter.name, [section for make in _SECTIONS if (section := make(view)) is not None]))
    loader, escape = FileSystemLoader(Path(__file__).parent), select_autoescape(["html"])
    environment = Environment(loader=loader, autoescape=escape, undefined=StrictUndefined)
    environment.filters |= {"base64": _base64, "escaped": escaped, "slug": _slug}
    with replace_directory(out) as new:
        images = _write_parts(new, [section for _, made in parts for section in made])
        values = {"parts": parts, "facts": _facts(results, chapters, settings), "images": images}
        for name in (_PAGE, "summary.md"):
            (new / name).write_text(environment.get_template(f"template_{name}").render(values), encoding="utf-8")
    return [f"{name}: {note}" for name, made in parts for section in made for note in section.notes]


def _write_parts(out: Path, made: Sequence[Section]) -> dict[str, bytes]:
    """Write the files of figures and tables, and return the figures as PNG by name."""
    images = {}
    for directory in ("figures", "tables"):
        (out / directory).mkdir()
    for section in made:
        for picture in section.pictures:
            file = out / "figures" / picture.name
            images[picture.name] = render(picture.figure, "png")
            file.with_suffix(".png").write_bytes(images[picture.name])
            file.with_suffix(".pdf").write_bytes(render(picture.figure, "pdf"))
            safe_for_spreadsheets(picture.data).to_csv(file.with_suffix(".csv"), index=False)
        for table in section.tables:
            file = out / "tables" / table.name
            table.data().to_csv(file.with_suffix(".csv"), index=False)
            file.with_suffix(".tex").write_text(table.latex(), encoding="utf-8")
    return images


def _facts(results: Results, chapters: Sequence[Chapter], settings: Settings) -> dict[str, str]:
    documents: list[dict[Any, Any]] = [run for chapter in chapters for run in chapter.runs.to_dict("records")]
    actions = {"deterministic" if run["evaluation"].get("deterministic", True) else "stochastic" for run in documents}
    kind = f"evaluations during training ({' and '.join(sorted(actions))} actions)"
    facts = {
        "Results": str(results.path),
        "Runs": "; ".join(f"{chapter.name}: {len(chapter.runs)}" for chapter in chapters),
        "Written": now(),
        "Command": settings.command or "-",
        "Returns": kind if settings.returns == "evaluation" else "training episodes",
        "Reference scores": "; ".join(f"{table.name} ({table.title})" for table in chapters[0].references.tables),
        "Intervals": f"95 %, Student's t with a stratified bootstrap ({settings.reps:,} resamples, seed {settings.seed})",
        "Made with": " / ".join(dict.fromkeys(_circumstances(run) for run in documents)),
    }
    for failure in results.failures():
        lines = [line for line in "\n".join(map(str, failure.get("errors", []))).splitlines() if line.strip()]
        facts[f"Failed: {failure.get('name')}"] = lines[-1].strip() if lines else "no message"
    return facts


def _circumstances(run: dict[Any, Any]) -> str:
    parts = [run.get("versions"), run.get("machine")]
    known = {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}
    return ", ".join(f"{key} {value}" for key, value in known.items()) or "unknown versions"


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _slug(text: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in text.lower())
