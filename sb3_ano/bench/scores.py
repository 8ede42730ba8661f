"""Reference scores of tasks, and returns in their units: 0 is an agent that acts at random, 1 the reference player."""

import csv
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_FOLDER = Path(__file__).parent / "reference"
_TASK_COLUMNS = ("env", "game", "task")
_PLAYERS = ("expert", "human")
# CartPole-v1, ALE/Pong-v5 and PongNoFrameskip-v4 without library, protocol and version.
_ID = re.compile(r"(?:.*/)?(?P<task>.+?)(?:NoFrameskip)?(?:-v\d+)?")


@dataclass(frozen=True)
class Reference:
    """What two players score on a task.

    :param task: as the table names it
    :param random: mean return of an agent that acts at random; None if the table does not have it
    :param player: mean return of the reference player; None if the table does not have it
    :param source: where the numbers are from
    """

    task: str
    random: float | None
    player: float | None
    source: str = ""

    @property
    def missing(self) -> str:
        """What is missing, ``""`` if nothing is."""
        return " and ".join(name for name, value in (("random", self.random), ("player", self.player)) if value is None)

    def normalise(self, returns: np.ndarray | float) -> np.ndarray:
        """``(return - random) / (player - random)``, NaN where one of them is missing."""
        if self.random is None or self.player is None:
            return np.full(np.shape(returns), np.nan)
        return (np.asarray(returns, np.float64) - self.random) / (self.player - self.random)


@dataclass(frozen=True)
class ScoreTable:
    """Reference scores of a suite.

    :param name: of the table
    :param player: ``"expert"`` or ``"human"``, the column of the reference player
    :param references: by the names of the tasks
    :param title: the reference player and the source, in words
    """

    name: str
    player: str
    references: Mapping[str, Reference]
    title: str = ""

    def find(self, env_id: str) -> Reference | None:
        """The row of an environment: of its id, or else of the same task under another id."""
        if env_id in self.references:
            return self.references[env_id]
        return next((row for name, row in self.references.items() if task_of(name) == task_of(env_id)), None)


# File of the table, files with random scores for its gaps, and what it is.
_TABLES = {
    "td3": (("mujoco_td3", "mujoco_random_measured"), "TD3 of tianshou's benchmark, random of SimbaV2 (Swimmer's measured)"),
    "simbav2": (("mujoco_simbav2",), "TD3 and random of SimbaV2"),
    "mnih2015": (("atari_mnih2015",), "human and random of Mnih et al. 2015"),
    "wang2016": (("atari_wang2016",), "human and random of Wang et al. 2016, no-op starts"),
    "classic": (("classic",), "PPO of the RL Zoo, random measured"),
}
#: The tables that the paper cites, and the one for classic control.
DEFAULT_TABLES = ("td3", "mnih2015", "classic")


def task_of(env_id: str) -> str:
    """The task that an id stands for, whatever library and version: ``"Pong"`` for ``"ALE/Pong-v5"``."""
    match = _ID.fullmatch(env_id)
    return match["task"] if match else env_id


def load_table(name: str) -> ScoreTable:
    """A table of this package, or one of the user's.

    :param name: ``"td3"``, ``"simbav2"``, ``"mnih2015"``, ``"wang2016"``, ``"classic"``, or the path of a CSV file with the
        columns ``env`` (or ``game`` or ``task``), ``random``, and ``expert`` or ``human``; ``source`` may follow
    :raises ValueError: if there is no such table, or the file is none
    """
    if name not in _TABLES:
        path = Path(name)
        if not path.is_file():
            raise ValueError(
                f"no score table {name!r}: it is no file, and none of this package's tables, which are {', '.join(_TABLES)}"
            )
        return _read(path, name, f"of the file {path.name}")
    (first, *fillers), title = _TABLES[name]
    table = _read(_FOLDER / f"{first}.csv", name, title)
    for filler in fillers:
        table = _fill_gaps(table, _read(_FOLDER / f"{filler}.csv", name, title, filler=True))
    return table


def _fill_gaps(table: ScoreTable, filler: ScoreTable) -> ScoreTable:
    references = dict(table.references)
    for task, row in references.items():
        other = filler.references.get(task)
        if row.random is None and other is not None:
            references[task] = Reference(task, other.random, row.player, f"{row.source}; random: {other.source}")
    return ScoreTable(table.name, table.player, references, table.title)


def _read(path: Path, name: str, title: str, *, filler: bool = False) -> ScoreTable:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            header, rows = reader.fieldnames or [], list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"score table {str(path)!r} is no CSV file: {error}") from error
    task_column = next((column for column in _TASK_COLUMNS if column in header), None)
    player = next((column for column in _PLAYERS if column in header), None)
    if task_column is None or "random" not in header or not (player or filler):
        raise ValueError(
            f"score table {str(path)!r} has the columns {', '.join(header) or 'none'}; it needs one of "
            f"{', '.join(_TASK_COLUMNS)}, then random, and one of {', '.join(_PLAYERS)}"
        )
    references: dict[str, Reference] = {}
    for number, row in enumerate(rows, 2):
        where = f"score table {str(path)!r}, line {number}"
        task = (row[task_column] or "").strip()
        if not task or task in references:
            raise ValueError(f"{where}: {f'{task!r} is there twice' if task else 'no task'}")
        random, best = (_number(row.get(column or ""), f"{where}, {column}") for column in ("random", player))
        if random is not None and random == best:
            raise ValueError(f"{where}: random and {player} are both {random:g}, which leaves no scale")
        references[task] = Reference(task, random, best, (row.get("source") or "").strip())
    return ScoreTable(name, player or "", references, title)


def _number(text: str | None, where: str) -> float | None:
    if not (text or "").strip():
        return None
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{where}: {text!r} is not allowed; allowed are finite numbers, or nothing where there is none")
    return value


class ReferenceScores:
    """Several tables, of which the first with both scores of a task counts.

    :param names: as for :func:`load_table`
    :raises ValueError: if one of them cannot be had
    """

    def __init__(self, names: Sequence[str] = DEFAULT_TABLES) -> None:
        self.tables = tuple(load_table(name) for name in dict.fromkeys(names))

    def find(self, env_id: str) -> tuple[ScoreTable, Reference] | None:
        """The table and the row by which returns of an environment are normalised; None if there is none."""
        found = ((table, table.find(env_id)) for table in self.tables)
        return next(((table, row) for table, row in found if row is not None and not row.missing), None)

    def normalise(self, env_id: str, returns: np.ndarray | float) -> np.ndarray:
        """Returns as :meth:`Reference.normalise` does, NaN where no table has both scores.

        :param env_id: the environment
        :param returns: of its episodes, any shape
        """
        found = self.find(env_id)
        return np.full(np.shape(returns), np.nan) if found is None else found[1].normalise(returns)

    def missing(self, env_ids: Iterable[str]) -> dict[str, str]:
        """The environments that cannot be normalised, each with the reason."""
        return {env_id: self._reason(env_id) for env_id in env_ids if self.find(env_id) is None}

    def _reason(self, env_id: str) -> str:
        rows = [(table, row) for table in self.tables if (row := table.find(env_id)) is not None]
        if not rows:
            return f"in none of the tables {', '.join(table.name for table in self.tables)}"
        return "; ".join(f"{table.name} has no {row.missing.replace('player', table.player)} score" for table, row in rows)
