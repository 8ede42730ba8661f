"""The report as Markdown, for documentation."""

from collections.abc import Iterable

from sb3_ano.bench.report.contenders import run_names
from sb3_ano.bench.report.content import Picture, Report, Section, Table, plural

#: Tables with more rows than this are in the page only.
_MOST_ROWS = 60


def markdown(report: Report, figures: str = "figures") -> str:
    """Text, figures and short tables, and the names of the runs that they are from.

    :param report: what it shows
    :param figures: folder of the pictures, as seen from the file
    """
    blocks = [f"# {report.title}", "\n".join(f"- {name}: {text}" for name, text in report.facts)]
    for chapter in report.chapters:
        blocks += [f"## {chapter.title}", *([chapter.summary] if chapter.summary else [])]
        for section in chapter.sections:
            blocks += _section(section, figures)
        blocks += _runs(chapter.sections)
    return "\n\n".join(blocks) + "\n"


def _section(section: Section, figures: str) -> list[str]:
    blocks = [f"### {section.title}", *section.text]
    if section.notes:
        blocks.append("\n".join(f"- {note}" for note in section.notes))
    for picture in section.pictures:
        blocks.append(f"![{_inline(picture.alt)}]({figures}/{picture.name}.png)")
        blocks += [] if picture.small else [f"{picture.caption}{_count(picture)}"]
    for table in section.tables:
        if len(table.rows) <= _MOST_ROWS:
            blocks += [f"{table.caption}:", _table(table)]
        else:
            blocks.append(f"{table.caption}: {plural(len(table.rows), 'row')}, in the page.")
    return blocks


def _count(picture: Picture) -> str:
    return f" ({plural(len(picture.run_ids), 'run')}.)" if picture.run_ids else ""


def _table(table: Table) -> str:
    with_runs = any(row.run_ids for row in table.rows)
    numbers = [any(row.cells[index].order is not None for row in table.rows) for index in range(len(table.columns))]
    lines = [_line([*table.columns, *(["runs"] if with_runs else [])])]
    lines.append(_line(["--:" if is_number else "---" for is_number in numbers] + (["--:"] if with_runs else [])))
    for row in table.rows:
        lines.append(_line([*(cell.text for cell in row.cells), *([str(len(row.run_ids))] if with_runs else [])]))
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _runs(sections: Iterable[Section]) -> list[str]:
    """Names of all runs of a chapter."""
    run_ids: list[str] = []
    for section in sections:
        for picture in section.pictures:
            run_ids += picture.run_ids
        for table in section.tables:
            for row in table.rows:
                run_ids += row.run_ids
    names = run_names(dict.fromkeys(run_ids))
    return ["### Names of the runs", "\n".join(f"- `{name}`" for name in names)] if names else []


def _inline(text: str) -> str:
    return text.replace("[", "(").replace("]", ")")
