"""Reference scores of tasks, and normalized returns: 0 is an agent with random actions, 1 is the reference player."""

import csv
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_DIRECTORY = Path(__file__).parent / "reference"
# CartPole-v1, ALE/Pong-v5 and PongNoFrameskip-v4 without library, protocol and version.
_ID = re.compile(r"(?:.*/)?(?P<task>.+?)(?:NoFrameskip)?(?:-v\d+)?")
# File of the table, unit, title.
_TABLES = {
    "td3": ("mujoco_td3", "TD3", "TD3 of tianshou's benchmark, random of SimbaV2 (Swimmer's measured)"),
    "simbav2": ("mujoco_simbav2", "TD3", "TD3 and random of SimbaV2"),
    "mnih2015": ("atari_mnih2015", "Human", "human and random of Mnih et al. 2015"),
    "wang2016": ("atari_wang2016", "Human", "human and random of Wang et al. 2016, no-op starts"),
    "classic": ("classic", "Zoo", "PPO of the RL Zoo, random measured"),
}
# Random scores for the gaps of a table.
_FILLERS = {"td3": "mujoco_random_measured"}
#: The tables that the paper cites, and the one for classic control.
DEFAULT_TABLES = ("td3", "mnih2015", "classic")


@dataclass(frozen=True)
class Reference:
    """Hold the reference scores of a task.

    :param random: mean return of an agent with random actions; None if the table does not have it
    :param player: mean return of the reference player; None if the table does not have it
    :param source: source of the numbers
    """

    random: float | None
    player: float | None
    source: str = ""


@dataclass(frozen=True)
class ScoreTable:
    """Hold a table of reference scores.

    :param name: name of the table
    :param player: ``"expert"`` or ``"human"``, the column of the reference player
    :param references: references by task
    :param unit: name of the normalized score, for axes
    :param title: reference player and source, in words
    """

    name: str
    player: str
    references: Mapping[str, Reference]
    unit: str = "Normalized score"
    title: str = ""

    def find(self, env_id: str) -> Reference | None:
        """Return the row of an environment id, or of the same task under another id; None if there is none."""
        same = (name for name in self.references if task_of(name) == task_of(env_id))
        return self.references.get(env_id) or self.references.get(next(same, ""))


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
        if not Path(name).is_file():
            raise ValueError(f"no score table {name!r}: it is neither a file nor one of {', '.join(_TABLES)}")
        return ScoreTable(name, *_read(Path(name)), title=Path(name).name)
    file, unit, title = _TABLES[name]
    player, references = _read(_DIRECTORY / f"{file}.csv")
    fillers = _read(_DIRECTORY / f"{_FILLERS[name]}.csv", filler=True)[1] if name in _FILLERS else {}
    for task, row in references.items():
        if row.random is None and task in fillers:
            source = f"{row.source}; random: {fillers[task].source}"
            references[task] = Reference(fillers[task].random, row.player, source)
    return ScoreTable(name, player, references, f"{unit}-normalized score", title)


def _read(path: Path, *, filler: bool = False) -> tuple[str, dict[str, Reference]]:
    """Name of the player's column, and the rows."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            header, rows = list(reader.fieldnames or []), list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"score table {str(path)!r} is not a CSV file: {error}") from error
    task_column = next((column for column in ("env", "game", "task") if column in header), "")
    player = next((column for column in ("expert", "human") if column in header), "")
    if not task_column or "random" not in header or not (player or filler):
        needed = "it needs one of env, game, task, then random, and one of expert, human"
        raise ValueError(f"score table {str(path)!r} has the columns {', '.join(header) or 'none'}; {needed}")
    references: dict[str, Reference] = {}
    for line, row in enumerate(rows, 2):
        where = f"score table {str(path)!r}, line {line}"
        task = (row[task_column] or "").strip()
        if not task or task in references:
            raise ValueError(f"{where}: {f'{task!r} is listed twice' if task else 'the task is missing'}")
        random, best = (_number(row.get(column), f"{where}, {column}") for column in ("random", player))
        if random is not None and random == best:
            raise ValueError(f"{where}: random and {player} are both {random:g}, so that scores cannot be normalized")
        references[task] = Reference(random, best, (row.get("source") or "").strip())
    return player, references


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
        rows = ((table, table.find(env_id)) for table in self.tables)
        return next(((table, row) for table, row in rows if row and None not in (row.random, row.player)), None)

    def normalize(self, env_id: str, returns: np.ndarray | float) -> np.ndarray:
        """Return ``(return - random) / (player - random)``; NaN if no table has both scores.

        :param env_id: id of the environment
        :param returns: returns of any shape
        """
        found = self.find(env_id)
        if found is None or found[1].random is None or found[1].player is None:
            return np.full(np.shape(returns), np.nan)
        return (np.asarray(returns, np.float64) - found[1].random) / (found[1].player - found[1].random)

    normalise = normalize  # name in zoo/repairs

    def missing(self, env_ids: Iterable[str]) -> dict[str, str]:
        """Return the environments whose returns cannot be normalized, each with the reason."""
        return {env_id: self._reason(env_id) for env_id in env_ids if self.find(env_id) is None}

    def _reason(self, env_id: str) -> str:
        reasons = []
        for table in self.tables:
            if row := table.find(env_id):
                names = [name for name, value in (("random", row.random), (table.player, row.player)) if value is None]
                reasons.append(f"{table.name} has no {' and '.join(names)} score")
        return "; ".join(reasons) or f"in none of the tables {', '.join(table.name for table in self.tables)}"
