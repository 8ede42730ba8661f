"""A suite as its sections see it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from sb3_ano.bench.report.contenders import Block, Contender, contenders, rectangles, run_names, select
from sb3_ano.bench.report.content import Picture, joined, listed, plural
from sb3_ano.bench.report.drawing import Style
from sb3_ano.bench.report.results import SuiteResults
from sb3_ano.bench.statistics import Bootstrap, Estimate, aggregate


@dataclass(frozen=True)
class Settings:
    """How a report is made.

    :param bootstrap: intervals
    :param kind: ``"evaluation"`` or ``"training"``, where scores are from
    :param threshold: normalised score whose time is measured
    """

    bootstrap: Bootstrap = field(default_factory=Bootstrap)
    kind: str = "evaluation"
    threshold: float = 0.5


@dataclass(frozen=True)
class SuiteView:
    """What all sections of a suite share.

    :param results: the runs
    :param settings: of the report
    :param everyone: all algorithms with all settings
    :param chosen: each algorithm once
    :param blocks: their runs, every seed on every task
    :param tasks: of the blocks
    :param style: colours
    """

    results: SuiteResults
    settings: Settings
    everyone: tuple[Contender, ...]
    chosen: tuple[Contender, ...]
    blocks: tuple[Block, ...]
    tasks: tuple[str, ...]
    style: Style
    _aggregates: dict[bytes, dict[str, Estimate]] = field(default_factory=dict)

    def aggregates(self, block: Block) -> dict[str, Estimate]:
        """All aggregates of final scores; several sections ask for the same."""
        key = block.rows.tobytes()
        if key not in self._aggregates:
            self._aggregates[key] = aggregate(self.scores(block), self.settings.bootstrap)
        return self._aggregates[key]

    def scores(self, block: Block) -> np.ndarray:
        """Final normalised scores, shape ``(seeds, tasks)``."""
        return self.results.runs["score"].to_numpy()[block.rows]

    def run_ids(self, rows: Iterable[int]) -> tuple[str, ...]:
        """Names of runs."""
        return tuple(self.results.runs["run_id"].iloc[list(rows)])

    def of_blocks(self, blocks: Iterable[Block]) -> tuple[str, ...]:
        """Names of the runs of several blocks."""
        return self.run_ids(row for block in blocks for row in block.rows.T.flat)

    def on_task(self, contender: Contender, task: str) -> list[int]:
        """The runs of a contender on a task, as rows."""
        env_ids = self.results.runs["env_id"].to_numpy()
        return [row for row in contender.rows if env_ids[row] == task]

    def picture(
        self, name: str, drawn: tuple[bytes, bytes], caption: str, alt: str, run_ids: tuple[str, ...], small: bool = False
    ) -> Picture:
        """A figure of this suite."""
        return Picture(slug(f"{self.results.name}-{name}"), caption, alt, *drawn, run_ids, small)

    @property
    def unit(self) -> str:
        """The unit of scores, with the names of its tables."""
        tables = {found[0].name: found[0] for task in self.tasks if (found := self.results.references.find(task))}
        players = joined(dict.fromkeys(table.player for table in tables.values()))
        return f"{players}-normalised score ({', '.join(tables)})" if tables else "score"

    def left_out(self, blocks: Iterable[Block], tasks: Iterable[str]) -> list[str]:
        """Notes on what is not in aggregates of these blocks, and why."""
        blocks, tasks = list(blocks), list(tasks)
        notes = []
        lacking = [task for task in self.results.scored_tasks if task not in tasks]
        if lacking:
            notes.append(f"Not in the aggregates, because not every algorithm has runs there: {', '.join(lacking)}.")
        for task, reason in self.results.references.missing(self.results.tasks).items():
            notes.append(f"Not in the aggregates: {task} ({reason}).")
        for block in blocks:
            if block.left_out:
                names = run_names(self.run_ids(block.left_out))
                which = f"{plural(len(block.left_out), 'run')} of {block.contender.label}"
                notes.append(f"Not in the aggregates: {which} with seeds that do not have all tasks: {listed(names)}.")
        return notes


def make_view(results: SuiteResults, settings: Settings) -> SuiteView:
    """Sort out what is compared in a suite.

    :param results: the runs
    :param settings: of the report
    """
    everyone = contenders(results)
    chosen = select(results, everyone)
    blocks, tasks = rectangles(results, chosen, results.scored_tasks)
    style = Style(one.algorithm for one in chosen)
    return SuiteView(results, settings, tuple(everyone), tuple(chosen), tuple(blocks), tuple(tasks), style)


def slug(text: str) -> str:
    """A name for files and anchors."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-")
