"""Results as rows of CSV files."""

import re
from pathlib import Path

import pandas as pd

from sb3_ano._io import write_file
from sb3_ano.bench.algorithms import number
from sb3_ano.bench.results import Results, RunFiles, named_errors

_SETTINGS = ["clip_range", "desired_kl", "learning_rate", "n_epochs"]
#: Columns that identify a run in CSV files.
KEY = ["env", "algorithm", *_SETTINGS, "changed", "steps", "seed", "identity"]
# Columns of texts; without this, a commit of digits would be read as a number.
_TEXTS = dict.fromkeys(["env", "algorithm", "changed", "identity", "date", "commit"], str)
# Signs that a spreadsheet takes for the beginning of a formula, also in their full width.
_FORMULA = re.compile(r"[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
# Training episodes and evaluations that a final return averages.
_LAST_EPISODES = 100
_LAST_EVALUATIONS = 3
# Numbers in the files have as many digits.
_DIGITS = ".5g"


def export(path: Path, out: Path) -> str:
    """Write a row per run to ``runs.csv``, and a row per evaluation to ``curves.csv``.

    :param path: directory of results
    :param out: directory of the files, whose other rows are kept
    :return: message for the user
    :raises ValueError: if runs are damaged, if none has finished, or if a file has other columns
    """
    runs = Results(path).runs()
    rows = []
    points = []

    for run in runs:
        key = key_of(run)
        evaluations = run.evaluations()
        rows.append({**key, **_summary(run, evaluations["mean"])})

        # The key in every row.
        curve = pd.DataFrame([key] * len(evaluations))
        curve["timesteps"] = evaluations["timesteps"]
        curve["evaluation_return"] = evaluations["mean"]
        points.append(curve)

    count = merge_csv(pd.DataFrame(rows), out / "runs.csv", KEY)
    merge_csv(pd.concat(points), out / "curves.csv", [*KEY, "timesteps"])
    return f"{path}: {len(runs)} runs; {out}/runs.csv has {count}"


def key_of(run: RunFiles) -> dict[str, object]:
    """Return the columns that identify a run.

    :param run: finished run
    """
    document = run.document
    key = {"env": document["env_id"], "algorithm": document["algorithm"]}

    for name in _SETTINGS:
        value = number(document["hyperparameters"].get(name))
        if value is not None:
            # As many digits as the file has, or the run would not be found there.
            value = float(format(value, _DIGITS))
        key[name] = value

    others = []
    for name, value in document["changed"].items():
        if name not in (*_SETTINGS, "total_timesteps"):
            # The settings above have columns of their own, and so have the steps.
            others.append(f"{name}={value}")
    key["changed"] = ", ".join(sorted(others)) or None
    key["steps"] = document["total_timesteps"]
    key["seed"] = document["seed"]
    key["identity"] = document["identity"]
    return key


def _summary(run: RunFiles, curve: pd.Series) -> dict[str, object]:
    updates = run.updates()

    def of_updates(column: str) -> pd.Series:
        # Not all algorithms log all of them.
        return updates.get(column, pd.Series(dtype=float))

    return {
        "training_return": run.episodes()["r"].tail(_LAST_EPISODES).mean(),
        "evaluation_return": curve.tail(1).mean(),
        "last_evaluations": curve.tail(_LAST_EVALUATIONS).mean(),
        "kl_after": of_updates("update/kl_after").mean(),
        # The median, because single updates have huge ratios.
        "ratio_max_after": of_updates("update/ratio_max_after").quantile(),
        "outside_after": of_updates("update/outside_after").mean(),
        "ppo_discarded_gradient": of_updates("train/ppo_discarded_gradient").mean(),
        "clip_range_mean": of_updates("train/clip_range").mean(),
        "seconds": round(run.document.get("seconds") or 0),
        "date": str(run.document.get("finished"))[:10],
        "commit": str(run.document.get("commit") or "")[:12],
    }


def safe_for_spreadsheets(table: pd.DataFrame) -> pd.DataFrame:
    """Put an apostrophe before texts that a spreadsheet would take for formulas; numbers stay numbers.

    :param table: table with texts, whose column names may be a stranger's, too
    """
    return table.map(_safe_cell).rename(columns=_safe_cell)


def _safe_cell(cell: object) -> object:
    # Negative numbers begin like formulas.
    if isinstance(cell, str) and _FORMULA.match(cell) and number(cell) is None:
        return f"'{cell}"
    return cell


def merge_csv(table: pd.DataFrame, file: Path, key: list[str]) -> int:
    """Merge rows into a CSV file.

    :param table: new rows, which replace old ones of the same key, or of the same key without an identity
    :param file: file to write
    :param key: columns that identify a row
    :return: number of rows in the file
    :raises ValueError: if the file has other columns, or is none
    """
    # Rows of other programs have no identity.
    settings = [name for name in key if name != "identity"]
    # Texts in the file are safe already; a row is found there by the same texts.
    table = safe_for_spreadsheets(table)

    if file.exists():
        with named_errors(file):
            rows = pd.read_csv(file, dtype=_TEXTS, encoding="utf-8")
            for name in settings:
                if name not in rows:
                    raise ValueError(f"column {name!r} is missing")

        # pandas warns of columns without values unless all are objects.
        together = [rows.astype(object), table.astype(object)]
        table = pd.concat(together).infer_objects()

    # A row without an identity may be of any run that is equal in the other columns.
    is_last = ~table.duplicated(settings, keep="last")
    table = table[table["identity"].notna() | is_last]
    # The new rows are last.
    table = table.drop_duplicates(key, keep="last").sort_values(key)
    write_file(file, table.to_csv(index=False, float_format=f"%{_DIGITS}"))
    return len(table)
