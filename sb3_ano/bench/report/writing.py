"""From a folder of results to a folder with a report."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from sb3_ano.bench.files import now
from sb3_ano.bench.report.content import Chapter, Report, joined, listed, plural
from sb3_ano.bench.report.markdown import markdown
from sb3_ano.bench.report.page import html
from sb3_ano.bench.report.results import SuiteResults, load_results
from sb3_ano.bench.report.sections import SECTIONS, geometry
from sb3_ano.bench.report.sections.records import environments
from sb3_ano.bench.report.view import Settings, SuiteView, make_view
from sb3_ano.bench.scores import ReferenceScores
from sb3_ano.bench.store import Store
from sb3_ano.extras import missing_extra

try:
    import pandas as pd
except ImportError as error:
    raise missing_extra("bench", "pandas") from error

PAGE, SUMMARY, RUNS, FIGURES = "index.html", "summary.md", "runs.csv", "figures"
# run.json tells them in full.
_NOT_IN_CSV = ("settings", "hyperparameters", "evaluation", "versions", "hardware", "checksum", "env_kwargs", "imports")


def write_report(store: Store, folder: Path, references: ReferenceScores, settings: Settings, command: str = "") -> Report:
    """Write the page, its figures, a summary and a table of the runs.

    :param store: the results
    :param folder: to write; an earlier report there is replaced once the new one is whole
    :param references: by which returns are normalised
    :param settings: how it is made
    :param command: that asked for it, for the record
    :return: what was written
    :raises ValueError: if there are no runs, or the folder holds something else
    """
    check_replaceable(folder)
    suites = load_results(store, references, settings.kind, settings.threshold)
    views = [make_view(results, settings) for results in suites]
    report = Report("Report of the experiments", _facts(store, suites, references, settings, command), _chapters(views))
    with _replacing(folder) as new:
        (new / PAGE).write_text(html(report), encoding="utf-8")
        (new / SUMMARY).write_text(markdown(report, FIGURES), encoding="utf-8")
        _table_of_runs(suites).to_csv(new / RUNS, index=False)
        (new / FIGURES).mkdir()
        for chapter in report.chapters:
            for section in chapter.sections:
                for picture in section.pictures:
                    (new / FIGURES / f"{picture.name}.svg").write_bytes(picture.svg)
                    (new / FIGURES / f"{picture.name}.png").write_bytes(picture.png)
    return report


def _chapters(views: Sequence[SuiteView]) -> tuple[Chapter, ...]:
    chapters = []
    for view in views:
        sections = tuple(section for make in SECTIONS if (section := make(view)) is not None)
        chapters.append(Chapter(view.results.name, sections, _summary(view)))
    labels = [one.algorithm for view in views for one in view.everyone]
    return (*chapters, Chapter("Shaping functions", (geometry(labels),)))


def _summary(view: SuiteView) -> str:
    runs = view.results.runs
    names = joined(dict.fromkeys(one.algorithm for one in view.everyone))
    seeds = plural(runs["seed"].nunique(), "seed")
    lengths = sorted(set(runs["total_timesteps"]))
    steps = f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,}"
    return (
        f"{plural(len(runs), 'run')}: {names} on {plural(len(view.results.tasks), 'task')}, up to {seeds}, {steps} steps each."
    )


def _facts(
    store: Store, suites: Sequence[SuiteResults], references: ReferenceScores, settings: Settings, command: str
) -> tuple[tuple[str, str], ...]:
    tables = "; ".join(f"{table.name} ({table.title})" for table in references.tables)
    bootstrap = settings.bootstrap
    facts = [
        ("Results", str(store.path)),
        ("Written", now()),
        ("Returns", "of deterministic evaluations" if settings.kind == "evaluation" else "of the training's episodes"),
        ("Reference scores", tables),
        (
            "Intervals",
            f"{bootstrap.confidence:.0%}, stratified bootstrap, {bootstrap.reps:,} resamples, seed {bootstrap.seed}",
        ),
        ("Made with", " / ".join(environments(pd.concat([suite.runs for suite in suites])))),
    ]
    if command:
        facts.append(("Command", command))
    failures = store.failures()
    if failures:
        said = [f"{one.get('run_id')} ({_last_line(one)})" for one in failures]
        facts.append((plural(len(failures), "failed run"), listed(said)))
    return tuple(facts)


def _last_line(failure: dict) -> str:
    lines = [line for error in failure.get("errors") or () for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"


def _table_of_runs(suites: Sequence[SuiteResults]) -> pd.DataFrame:
    runs = pd.concat([suite.runs for suite in suites])
    return runs.drop(columns=[name for name in _NOT_IN_CSV if name in runs])


def check_replaceable(folder: Path) -> None:
    """Make sure that a folder is new, empty, or an earlier report.

    :raises ValueError: if it holds something else
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; the report takes a folder")
    page = folder / PAGE
    ours = page.is_file() and 'content="sb3_ano.bench report"' in page.read_text(encoding="utf-8", errors="replace")[:2000]
    if any(folder.iterdir()) and not ours:
        raise ValueError(f"{folder} holds other files; the report takes a new or empty folder, or that of an earlier report")


@contextlib.contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A new folder that takes the place of another once it is whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        new, old = Path(temporary) / "new", Path(temporary) / "old"
        new.mkdir()
        yield new
        if folder.exists():
            os.replace(folder, old)
        try:
            os.replace(new, folder)
        except OSError:
            if old.exists():
                os.replace(old, folder)
            raise
