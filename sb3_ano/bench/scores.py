"""Reference scores of tasks, and normalized returns: 0 is an agent with random actions, 1 is the reference player."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

_DIRECTORY = Path(__file__).parent / "reference"
# CartPole-v1, ALE/Pong-v5 and PongNoFrameskip-v4 without library, protocol and version.
_ID = re.compile(r"(?:.*/)?(?P<task>.+?)(?:NoFrameskip)?(?:-v\d+)?")
# File of the table, unit, title.
_TABLES = {
    "td3": ("mujoco_td3", "TD3-normalized score", "TD3 of tianshou's benchmark, random of SimbaV2 (Swimmer's measured)"),
    "simbav2": ("mujoco_simbav2", "TD3-normalized score", "TD3 and random of SimbaV2"),
    "mnih2015": ("atari_mnih2015", "Human-normalized score", "human and random of Mnih et al. 2015"),
    "wang2016": ("atari_wang2016", "Human-normalized score", "human and random of Wang et al. 2016, no-op starts"),
    "classic": ("classic", "Zoo-normalized score", "PPO of the RL Zoo, random measured"),
}
#: The tables that the paper cites, and the one for classic control.
DEFAULT_TABLES = ("td3", "mnih2015", "classic")


def task_of(env_id: str) -> str:
    """Return the task of an environment id, without library and version: ``"Pong"`` for ``"ALE/Pong-v5"``.

    :param env_id: id of the environment
    """
    match = _ID.fullmatch(env_id)
    return match["task"] if match else env_id


def load_table(name: str) -> pd.DataFrame:
    """Read a table of this package, or a CSV file.

    :param name: ``"td3"``, ``"simbav2"``, ``"mnih2015"``, ``"wang2016"``, ``"classic"``, or the path of a CSV file with the
        columns ``env`` (or ``game`` or ``task``), ``random``, and ``expert`` or ``human``; ``source`` may follow
    :return: a row per task: ``table`` (its name), ``title`` (reference player and source), ``unit`` (name of the normalized
        score, for axes), ``env``, the mean returns ``random`` and ``player`` (both NaN if the source lacks them), ``role``
        (``"expert"`` or ``"human"``, the column of ``player``), ``source``
    :raises ValueError: if there is no such table, or the file is invalid
    """
    if name not in _TABLES and not Path(name).is_file():
        raise ValueError(f"no score table {name!r}: it is neither a file nor one of {', '.join(_TABLES)}")
    file, unit, title = _TABLES.get(name, (name, "Normalized score", Path(name).name))
    rows = _read(_DIRECTORY / f"{file}.csv" if name in _TABLES else Path(name))
    return rows.assign(table=name, title=title, unit=unit)


def _read(path: Path) -> pd.DataFrame:
    where = f"score table {str(path)!r}"
    try:
        texts = pd.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8-sig")
    except pd.errors.EmptyDataError:
        texts = pd.DataFrame()
    except (UnicodeDecodeError, pd.errors.ParserError) as error:
        raise ValueError(f"{where} is not a CSV file: {error}") from error
    env = next((column for column in ("env", "game", "task") if column in texts), "")
    role = next((column for column in ("expert", "human") if column in texts), "")
    if not env or "random" not in texts or not role:
        needed = "it needs one of env, game, task, then random, and one of expert, human"
        raise ValueError(f"{where} has the columns {', '.join(texts.columns) or 'none'}; {needed}")

    texts = texts.apply(lambda column: column.str.strip())
    numbers = texts[["random", role]].apply(pd.to_numeric, errors="coerce")
    allowed = (np.isfinite(numbers) | (texts[["random", role]] == "")).all(axis=1) & (numbers["random"] != numbers[role])
    for line in np.flatnonzero(~allowed | texts[env].duplicated() | (texts[env] == "")):
        cells = ", ".join(texts.iloc[line][[env, "random", role]])
        needed = f"a task that is not in another line, and two different finite numbers or empty cells for random and {role}"
        raise ValueError(f"{where}, line {line + 2}: {cells!r} is not allowed; allowed are {needed}")
    source = texts.get("source", "")
    columns = {"env": texts[env], "random": numbers["random"], "player": numbers[role], "role": role, "source": source}
    return pd.DataFrame(columns)


class ReferenceScores:
    """Normalize returns by the first of several tables that has both scores of a task.

    ``tables`` are their names and ``rows`` their rows, see :func:`load_table`.

    :param names: names as for :func:`load_table`
    :raises ValueError: if one of the tables cannot be read
    """

    def __init__(self, names: Sequence[str] = DEFAULT_TABLES) -> None:
        self.tables = tuple(dict.fromkeys(names))
        self.rows = pd.concat([load_table(name) for name in self.tables], ignore_index=True)
        self._tasks = self.rows["env"].map(task_of)

    def find(self, env_id: str) -> pd.Series | None:
        """Return the row that normalizes returns of an environment, or None if no table has both scores.

        :param env_id: id of the environment
        """
        rows = self._rows_of(env_id).dropna(subset=["random", "player"])
        return None if rows.empty else rows.iloc[0]

    def _rows_of(self, env_id: str) -> pd.DataFrame:
        """Return a row per table: that of the environment id or, if there is none, of the same task under another id."""
        rows = self.rows[self._tasks == task_of(env_id)]
        exact = rows["env"] == env_id
        return rows[exact | ~rows["table"].isin(rows["table"][exact])].drop_duplicates("table")

    def normalize(self, env_id: str, returns: np.ndarray | float) -> np.ndarray:
        """Return ``(return - random) / (player - random)``; NaN if no table has both scores.

        :param env_id: id of the environment
        :param returns: returns of any shape
        """
        row = self.find(env_id)
        random, player = (np.nan, np.nan) if row is None else (row["random"], row["player"])
        return (np.asarray(returns, np.float64) - random) / (player - random)

    def missing(self, env_ids: Iterable[str]) -> dict[str, str]:
        """Return the environments whose returns cannot be normalized, each with the reason.

        :param env_ids: ids of environments
        """
        return {env_id: self._reason(env_id) for env_id in env_ids if self.find(env_id) is None}

    def _reason(self, env_id: str) -> str:
        reasons = []
        for row in self._rows_of(env_id).to_dict("records"):
            names = [name for name, key in (("random", "random"), (row["role"], "player")) if pd.isna(row[key])]
            reasons.append(f"{row['table']} has no {' and '.join(names)} score")
        return "; ".join(reasons) or f"in none of the tables {', '.join(self.tables)}"
