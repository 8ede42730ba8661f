"""Reference scores of tasks, and normalized returns: 0 is an agent with random actions, 1 is the reference player."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

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
#: The tables that the paper cites, and the one for classic control.
DEFAULT_TABLES = ("td3", "mnih2015", "classic")


class ScoreTable(NamedTuple):
    """A table of reference scores.

    :param name: name of the table
    :param unit: name of the normalized score, for axes
    :param title: reference player and source, in words
    :param player: ``"expert"`` or ``"human"``, the column of the reference player
    :param rows: mean returns by environment id: ``random``, ``player`` (both NaN if the source does not have it), ``source``
    """

    name: str
    unit: str
    title: str
    player: str
    rows: pd.DataFrame

    def find(self, env_id: str) -> pd.Series | None:
        """Return the row of an environment id, or of the same task under another id; None if there is none."""
        same = (name for name in self.rows.index if task_of(name) == task_of(env_id))
        name = env_id if env_id in self.rows.index else next(same, None)
        return None if name is None else self.rows.T[name]


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
    if name in _TABLES:
        file, unit, title = _TABLES[name]
        return ScoreTable(name, f"{unit}-normalized score", title, *_read(_DIRECTORY / f"{file}.csv"))
    if not Path(name).is_file():
        raise ValueError(f"no score table {name!r}: it is neither a file nor one of {', '.join(_TABLES)}")
    return ScoreTable(name, "Normalized score", Path(name).name, *_read(Path(name)))


def _read(path: Path) -> tuple[str, pd.DataFrame]:
    """Name of the player's column, and the rows."""
    where = f"score table {str(path)!r}"
    try:
        texts = pd.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8-sig")
    except pd.errors.EmptyDataError:
        texts = pd.DataFrame()
    except (UnicodeDecodeError, pd.errors.ParserError) as error:
        raise ValueError(f"{where} is not a CSV file: {error}") from error
    env = next((column for column in ("env", "game", "task") if column in texts), "")
    player = next((column for column in ("expert", "human") if column in texts), "")
    if not env or "random" not in texts or not player:
        needed = "it needs one of env, game, task, then random, and one of expert, human"
        raise ValueError(f"{where} has the columns {', '.join(texts.columns) or 'none'}; {needed}")

    numbers = texts[["random", player]].apply(lambda column: pd.to_numeric(column.str.strip(), errors="coerce"))
    empty = texts[["random", player]].map(str.strip) == ""
    invalid = texts[env].duplicated() | (texts[env].str.strip() == "") | (numbers["random"] == numbers[player])
    for line in np.flatnonzero(invalid | ~(np.isfinite(numbers) | empty).all(axis=1)):
        cells = ", ".join(texts.iloc[line][[env, "random", player]])
        needed = f"a task that is not in another line, and two different finite numbers or empty cells for random and {player}"
        raise ValueError(f"{where}, line {line + 2}: {cells!r} is not allowed; allowed are {needed}")
    rows = numbers.set_axis(["random", "player"], axis=1).assign(source=texts.get("source", ""))
    return player, rows.set_index(texts[env].str.strip())


class ReferenceScores:
    """Normalize returns by the first of several tables that has both scores of a task.

    :param names: names as for :func:`load_table`
    :raises ValueError: if one of the tables cannot be read
    """

    def __init__(self, names: Sequence[str] = DEFAULT_TABLES) -> None:
        self.tables = tuple(load_table(name) for name in dict.fromkeys(names))

    def find(self, env_id: str) -> tuple[ScoreTable, pd.Series] | None:
        """Return the table and the row that normalize returns of an environment; None if there is none."""
        rows = ((table, table.find(env_id)) for table in self.tables)
        return next(((table, row) for table, row in rows if row is not None and row[["random", "player"]].notna().all()), None)

    def normalize(self, env_id: str, returns: np.ndarray | float) -> np.ndarray:
        """Return ``(return - random) / (player - random)``; NaN if no table has both scores.

        :param env_id: id of the environment
        :param returns: returns of any shape
        """
        found = self.find(env_id)
        random, player = (np.nan, np.nan) if found is None else (found[1]["random"], found[1]["player"])
        return (np.asarray(returns, np.float64) - random) / (player - random)

    def missing(self, env_ids: Iterable[str]) -> dict[str, str]:
        """Return the environments whose returns cannot be normalized, each with the reason."""
        return {env_id: self._reason(env_id) for env_id in env_ids if self.find(env_id) is None}

    def _reason(self, env_id: str) -> str:
        reasons = []
        for table in self.tables:
            if (row := table.find(env_id)) is not None:
                names = [name for name, key in (("random", "random"), (table.player, "player")) if pd.isna(row[key])]
                reasons.append(f"{table.name} has no {' and '.join(names)} score")
        return "; ".join(reasons) or f"in none of the tables {', '.join(table.name for table in self.tables)}"
