"""What is running, on the terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Reporter:
    """A progress bar, or with ``bar=None`` nothing.

    :param bar: rich's progress
    :param total: units of the whole
    """

    def __init__(self, bar: Progress | None = None, total: float = 0.0) -> None:
        self._bar = bar
        self._task = TaskID(0) if bar is None else bar.add_task("starting", total=total)

    def describe(self, text: str) -> None:
        """Say what is running."""
        if self._bar is not None:
            self._bar.update(self._task, description=text)

    def advance(self, units: float = 1.0) -> None:
        """So much more is done."""
        if self._bar is not None:
            self._bar.advance(self._task, units)

    def note(self, text: str) -> None:
        """Print a line above the bar, which stays there."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)


@contextmanager
def reporting(total: float, remaining: bool = False) -> Iterator[Reporter]:
    """A progress bar on standard error.

    :param total: units of the whole
    :param remaining: also estimate the time that is left
    """
    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %")]
    columns += [TimeElapsedColumn(), *([TextColumn("left"), TimeRemainingColumn()] if remaining else [])]
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=600.0) as bar:
        yield Reporter(bar, total)
