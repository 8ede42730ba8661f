"""A plan on the terminal."""

import argparse
from collections.abc import Collection, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from sb3_ano.bench.experiments.estimate import Estimate, in_words
from sb3_ano.bench.experiments.plan import Run
from sb3_ano.bench.experiments.suites import Suite


def show_plan(
    suite: Suite,
    runs: Sequence[Run],
    finished: Collection[str],
    known: Mapping[str, Estimate],
    options: argparse.Namespace,
    jobs: int,
) -> None:
    """Print a plan: a line for each algorithm and setting, and how long the rest will take.

    :param suite: whose runs they are
    :param runs: all of the plan
    :param finished: names of those that are there
    :param known: what is expected of each, by name
    :param options: of the command line
    :param jobs: runs at a time
    """
    table = Table(
        title=f"{suite.name}: {_counted(len(suite.tasks), 'task')}, {_counted(options.seeds, 'seed')}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for column in ("algorithm", "settings", "tasks"):
        table.add_column(column)
    for column in ("steps", "runs", "finished", "to go"):
        table.add_column(column, justify="right")
    for row in plan_rows(runs, finished, known):
        table.add_row(*row)
    console = Console()
    console.print(table)
    console.print(expectation(runs, finished, known, options, jobs), highlight=False, soft_wrap=True)


def plan_rows(runs: Sequence[Run], finished: Collection[str], known: Mapping[str, Estimate]) -> list[tuple[str, ...]]:
    """A row for each algorithm with its settings.

    :return: of each its name, settings, tasks, steps of a run, number of runs, finished ones, and the time of the others, one
        after the other
    """
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        settings = ", ".join(f"{name} {value}" for name, value in run.settings.items())
        groups.setdefault((run.algorithm, settings), []).append(run)
    all_tasks = {run.env_id for run in runs}
    rows: list[tuple[str, ...]] = []
    for (label, settings), members in groups.items():
        tasks = list(dict.fromkeys(run.env_id for run in members))
        least, most = min(run.total_timesteps for run in members), max(run.total_timesteps for run in members)
        left = [known[run.run_id].seconds for run in members if run.run_id not in finished]
        rows.append(
            (
                label,
                settings,
                "all" if len(tasks) == len(all_tasks) else ", ".join(tasks),
                f"{least:,}" if least == most else f"{least:,} to {most:,}",
                str(len(members)),
                str(len(members) - len(left)),
                _time_left(left),
            )
        )
    return rows


def _counted(number: int, noun: str) -> str:
    """``"1 task"``, ``"2 tasks"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _time_left(left: Sequence[float | None]) -> str:
    seconds = [one for one in left if one is not None]
    if not left:
        return "-"
    if len(seconds) < len(left):
        return "?"
    return "< 1 min" if sum(seconds) < 30.0 else in_words(sum(seconds)).removeprefix("about ")


def expectation(
    runs: Sequence[Run],
    finished: Collection[str],
    known: Mapping[str, Estimate],
    options: argparse.Namespace,
    jobs: int,
) -> str:
    """One line: what is left, and how long it will take; arguments as in :func:`show_plan`."""
    left = [known[run.run_id] for run in runs if run.run_id not in finished]
    if not left:
        return f"All {len(runs)} runs are in {options.out}."
    seconds = [one.seconds for one in left if one.seconds is not None]
    if len(seconds) < len(left):
        return f"{_counted(len(left), 'run')} to go; how long they take is not known before some have finished."
    measured = sum(one.measured for one in left)
    sources = ["finished runs"] * (measured > 0) + ["the suite's speeds"] * (measured < len(left))
    if options.backend == "ray":
        time = f"{in_words(sum(seconds))} if one at a time"
    else:
        time = f"{in_words(sum(seconds) / min(jobs, len(left)))}, {min(jobs, len(left))} at a time"
    return f"{_counted(len(left), 'run')} to go: {time}, estimated from {' and '.join(sources)}."
