"""The report as one HTML page that needs nothing else."""

import base64
import re
from pathlib import Path

from sb3_ano.bench.report.contenders import run_names
from sb3_ano.bench.report.content import Report, Table, plural
from sb3_ano.bench.report.view import slug
from sb3_ano.extras import missing_extra

try:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
except ImportError as error:
    raise missing_extra("bench", "jinja2") from error

_FOLDER = Path(__file__).parent
_VIEW_BOX = re.compile(rb'viewBox="0 0 ([\d.]+) ([\d.]+)"')


def html(report: Report) -> str:
    """The page, with styles, script and pictures inside.

    :param report: what it shows
    """
    environment = Environment(loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined)
    environment.filters |= {
        "base64": lambda content: base64.b64encode(content).decode(),
        "is_number": _is_number,
        "plural": plural,
        "run_names": run_names,
        "size": _size,
        "slug": slug,
    }
    style, script = ((_FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return environment.get_template("page.html").render(report=report, css=style, js=script) + "\n"


def _is_number(table: Table, column: int) -> bool:
    return any(row.cells[column].order is not None for row in table.rows)


def _size(svg: bytes, axis: int) -> int:
    """Width or height in points, so that a browser leaves room before it has drawn the picture."""
    match = _VIEW_BOX.search(svg)
    return round(float(match.group(axis + 1))) if match else 0
