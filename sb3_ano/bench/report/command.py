"""What ``python -m sb3_ano.bench report`` does with its options."""

import argparse

from sb3_ano.bench.report.view import Settings
from sb3_ano.bench.report.writing import PAGE, check_replaceable, write_report
from sb3_ano.bench.scores import ReferenceScores
from sb3_ano.bench.statistics import Bootstrap
from sb3_ano.bench.store import open_store


def run_report(options: argparse.Namespace, command: str) -> int:
    """Write the report of a folder of results.

    :param options: of the command line
    :param command: the command line, for the record
    :return: exit status
    :raises ValueError: for an unknown score table, a number that is not allowed, or results that cannot be read
    :raises OSError: if there are no results, or the report cannot be written
    """
    folder = options.out or options.results / "report"
    settings = Settings(Bootstrap(options.reps, options.seed), options.returns, options.threshold)
    references = ReferenceScores(options.tables)
    store = open_store(options.results)
    check_replaceable(folder)
    report = write_report(store, folder, references, settings, command)
    for chapter in report.chapters:
        for section in chapter.sections:
            for note in section.notes:
                print(f"{chapter.title}: {note}")
    print(folder / PAGE)
    return 0
