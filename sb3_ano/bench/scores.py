"""Reference scores of tasks, and normalized returns: 0 is an agent with random actions, 1 is the reference player."""

import csv
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_DIRECTORY = Path(__file__).parent / "reference"
_TASK_COLUMNS = ("env", "game", "task")
_PLAYERS = ("expert", "human")
# CartPole-v1, ALE/Pong-v5 and PongNoFrameskip-v4 without library, protocol and version.
_ID = re.compile(r"(?:.*/)?(?P<task>.+?)(?:NoFrameskip)?(?:-v\d+)?")


@dataclass(frozen=True)
class Reference:
    """Hold the reference scores of a task.

    :param task: name in the table
    :param random: mean return of an agent with random actions; None if the table does not have it
    :param player: mean return of the reference player; None if the table does not have it
    :param source: source of the numbers
    """

    task: str
    random: float | None
    player: float | None
    source: str = ""

    @property
    def missing(self) -> str:
        """Names of the missing scores, joined by "and"."""
        return " and ".join(name for name, value in (("random", self.random), ("player", self.player)) if value is None)

    def normalize(self, returns: np.ndarray | float) -> np.ndarray:
        """Return ``(return - random) / (player - random)``, NaN if a score is missing."""
        if self.random is None or self.player is None:
            return np.full(np.shape(returns), np.nan)
        return (np.asarray(returns, np.float64) - self.random) / (self.player - self.random)


@dataclass(frozen=True)
class ScoreTable:
    """Hold a table of reference scores.

    :param name: name of the table
    :param player: ``"expert"`` or ``"human"``, the column of the reference player
    :param references: references by task
    :param title: reference player and source, in words
    :param unit: name of the normalized score, for axes
    """

    name: str
    player: str
    references: Mapping[str, Reference]
    title: str = ""
    unit: str = "Normalized score"

    def find(self, env_id: str) -> Reference | None:
        """Return the row of an environment id, or of the same task under another id; None if there is none."""
        if env_id in self.references:
            return self.references[env_id]
        return next((row for name, row in self.references.items() if task_of(name) == task_of(env_id)), None)


# File of the table, files with random scores for its gaps, unit, title.
_TABLES = {
    "td3": (
        ("mujoco_td3", "mujoco_random_measured"),
        "TD3-normalized score",
        "TD3 of tianshou's benchmark, random of SimbaV2 (Swimmer's measured)",
    ),
    "simbav2": (("mujoco_simbav2",), "TD3-normalized score", "TD3 and random of SimbaV2"),
    "mnih2015": (("atari_mnih2015",), "Human-normalized score", "human and random of Mnih et al. 2015"),
    "wang2016": (("atari_wang2016",), "Human-normalized score", "human and random of Wang et al. 2016, no-op starts"),
    "classic": (("classic",), "Zoo-normalized score", "PPO of the RL Zoo, random measured"),
}
#: The tables that the paper cites, and the one for classic control.
DEFAULT_TABLES = ("td3", "mnih2015", "classic")


def task_of(env_id: str) -> str:
    """Return the task of an environment id, without library and version: ``"Pong"`` for ``"ALE/Pong-v5"``."""
    match = _ID.fullmatch(env_id)
    return match["task"] if match else env_id


def load_table(name: str) -> ScoreTable:
    """Read a table of this package, or a CSV file.

    :param name: ``"td3"``, ``"simbav2"``, ``"mnih2015"``, ``"wang2016"``, ``"classic"``, or the path of a CSV file with the
        columns ``env`` (or ``game`` or ``task``), ``random``, and ``expert`` or ``human``; ``source`` may follow
    :raises ValueError: if there is no such table, or the file is invalid
    """
    if name not in _TABLES:
        path = Path(name)
        if not path.is_file():
            raise ValueError(f"no score table {name!r}: it is neither a file nor one of {', '.join(_TABLES)}")
        return _read(path, name, path.name)
    (first, *fillers), unit, title = _TABLES[name]
    table = _read(_DIRECTORY / f"{first}.csv", name, title)
    for filler in fillers:
        table = _fill_gaps(table, _read(_DIRECTORY / f"{filler}.csv", name, title, filler=True))
    return dataclasses.replace(table, unit=unit)


def _fill_gaps(table: ScoreTable, filler: ScoreTable) -> ScoreTable:
    references = dict(table.references)
    for task, row in references.items():
        other = filler.references.get(task)
        if row.random is None and other is not None:
            references[task] = Reference(task, other.random, row.player, f"{row.source}; random: {other.source}")
    return dataclasses.replace(table, references=references)


def _read(path: Path, name: str, title: str, *, filler: bool = False) -> ScoreTable:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            header, rows = reader.fieldnames or [], list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"score table {str(path)!r} is not a CSV file: {error}") from error
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
            raise ValueError(f"{where}: {f'{task!r} is listed twice' if task else 'the task is missing'}")
        random, best = (_number(row.get(column or ""), f"{where}, {column}") for column in ("random", player))
        if random is not None and random == best:
            raise ValueError(f"{where}: random and {player} are both {random:g}, so that scores cannot be normalized")
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
        raise ValueError(f"{where}: {text!r} is not allowed; allowed are finite numbers and empty cells")
    return value


class ReferenceScores:
    """Normalize returns by the first of several tables that has both scores of a task.

    :param names: names as for :func:`load_table`
    :raises ValueError: if one of the tables cannot be read
    """

    def __init__(self, names: Sequence[str] = DEFAULT_TABLES) -> None:
        self.tables = tuple(load_table(name) for name in dict.fromkeys(names))

    def find(self, env_id: str) -> tuple[ScoreTable, Reference] | None:
        """Return the table and the row that normalize returns of an environment; None if there is none."""
        found = ((table, table.find(env_id)) for table in self.tables)
        return next(((table, row) for table, row in found if row is not None and not row.missing), None)

    def normalize(self, env_id: str, returns: np.ndarray | float) -> np.ndarray:
        """Normalize returns as :meth:`Reference.normalize` does; NaN if no table has both scores.

        :param env_id: id of the environment
        :param returns: returns of any shape
        """
        found = self.find(env_id)
        return np.full(np.shape(returns), np.nan) if found is None else found[1].normalize(returns)

    normalise = normalize  # name in zoo/repairs

    def missing(self, env_ids: Iterable[str]) -> dict[str, str]:
        """Return the environments whose returns cannot be normalized, each with the reason."""
        return {env_id: self._reason(env_id) for env_id in env_ids if self.find(env_id) is None}

    def _reason(self, env_id: str) -> str:
        rows = [(table, row) for table in self.tables if (row := table.find(env_id)) is not None]
        if not rows:
            return f"in none of the tables {', '.join(table.name for table in self.tables)}"
        return "; ".join(f"{table.name} has no {row.missing.replace('player', table.player)} score" for table, row in rows)
