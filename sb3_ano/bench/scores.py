"""Reference scores of tasks, and normalized returns: 0 is an agent with random actions, 1 is the reference player."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

_DIRECTORY = Path(__file__).parent / "reference"
# Library, protocol and version in CartPole-v1, ALE/Pong-v5 and PongNoFrameskip-v4.
_NOT_OF_TASK = re.compile(r"^.*/|(NoFrameskip)?(-v\d+)?$")
# File of the table, and unit of its scores.
_TABLES = {
    "td3": ("mujoco_td3.csv", "TD3-normalized score"),
    "simbav2": ("mujoco_simbav2.csv", "TD3-normalized score"),
    "mnih2015": ("atari_mnih2015.csv", "Human-normalized score"),
    "wang2016": ("atari_wang2016.csv", "Human-normalized score"),
    "classic": ("classic.csv", "Zoo-normalized score"),
}
_COLUMNS = {
    "game": "env",
    "task": "env",
    "expert": "player",
    "human": "player",
}
#: The tables that the paper cites, and the one for classic control.
DEFAULT_TABLES = ("td3", "mnih2015", "classic")


def task_of(env_id: str) -> str:
    """Return the task of an environment id, without library and version: ``"Pong"`` for ``"ALE/Pong-v5"``.

    :param env_id: id of the environment
    """
    return _NOT_OF_TASK.sub("", env_id)


def load_table(name: str) -> pd.DataFrame:
    """Read a table of this package, or a CSV file.

    :param name: ``"td3"``, ``"simbav2"``, ``"mnih2015"``, ``"wang2016"``, ``"classic"``, or the path of a CSV file with the
        columns ``env`` (or ``game`` or ``task``), ``random``, and ``expert`` or ``human``
    :return: a row per task that has both scores: ``table`` (its name), ``unit`` (name of the normalized score, for axes),
        ``env``, the mean returns ``random`` and ``player``, and the other columns of the file
    :raises FileNotFoundError: if there is no such table
    :raises ValueError: if the file is invalid
    """
    # A file of the user's, unless it is one of ours
    unit = "Normalized score"
    path = Path(name)
    if name in _TABLES:
        file, unit = _TABLES[name]
        path = _DIRECTORY / file

    try:
        rows = pd.read_csv(path, encoding="utf-8-sig", skipinitialspace=True).rename(columns=_COLUMNS)
        rows = rows.astype({"env": str, "random": float, "player": float})
    except (KeyError, ValueError) as error:
        raise ValueError(f"score table {name!r} is invalid: {error}") from error

    # Spreadsheets leave spaces.
    rows["env"] = rows["env"].str.strip()

    gap = (rows["player"] - rows["random"]).abs()
    has_infinity = (gap == np.inf).any()
    if has_infinity or rows["env"].duplicated().any():
        raise ValueError(f"score table {name!r} is invalid: a task is there twice, or has an infinite score")
    # Without a gap, or with a missing score, returns cannot be normalized.
    return rows[gap > 0].assign(table=name, unit=unit)


class ReferenceScores:
    """Normalize returns by the first of several tables that has both scores of a task.

    ``tables`` are their names and ``rows`` their rows, see :func:`load_table`.

    :param names: names as for :func:`load_table`
    :raises ValueError: if one of the tables cannot be read
    """

    def __init__(self, names: Sequence[str] = DEFAULT_TABLES) -> None:
        self.tables = tuple(dict.fromkeys(names))
        tables = [load_table(name) for name in self.tables]
        self.rows = pd.concat(tables, ignore_index=True)
        self._tasks = self.rows["env"].map(task_of)

    def find(self, env_id: str) -> pd.Series | None:
        """Return the row that normalizes returns of an environment, or None if no table has both scores.

        A table's row of the environment id comes before that of the same task under another id.

        :param env_id: id of the environment
        """
        rows = self.rows[self._tasks == task_of(env_id)]
        exact = rows["env"] == env_id
        tables_with_exact = rows["table"][exact]
        # The first row is that of the first table that has one.
        rows = rows[exact | ~rows["table"].isin(tables_with_exact)]
        if rows.empty:
            return None
        return rows.iloc[0]

    def normalize(
        self,
        env_id: str,
        returns: np.ndarray | float,
    ) -> np.ndarray:
        """Return ``(return - random) / (player - random)``; NaN if no table has both scores.

        :param env_id: id of the environment
        :param returns: returns of any shape
        """
        # The first table that has the task
        row = self.find(env_id)
        values = np.asarray(returns, np.float64)
        if row is None:
            return np.full_like(values, np.nan)
        return (values - row["random"]) / (row["player"] - row["random"])
