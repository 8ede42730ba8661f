"""The runs that all numbers are from."""

import json
from collections.abc import Hashable, Mapping
from typing import Any

from sb3_ano.bench.report.content import Cell, Row, Section, Table, number_cell
from sb3_ano.bench.report.view import SuiteView
from sb3_ano.extras import missing_extra

try:
    import pandas as pd
except ImportError as error:
    raise missing_extra("bench", "pandas") from error

_FACTS = ("versions", "hardware", "commit")


def records(view: SuiteView) -> Section:
    """One row a run."""
    runs = view.results.runs.sort_values(["env_id", "algorithm", "run_id"])
    rows = []
    for run in runs.to_dict("records"):
        cells = [Cell(run["run_id"]), Cell(run["env_id"]), Cell(run["algorithm"]), Cell(str(run["seed"]), run["seed"])]
        cells += [number_cell(float(run[name])) for name in ("total_timesteps", "final", "score", "area")]
        cells += [number_cell(float(run[name])) for name in ("wall_seconds", "steps_per_second")]
        rows.append(Row((*cells, Cell(_made(run)))))
    columns = ("run", "task", "algorithm", "seed", "steps", "return", "normalised", "area", "seconds", "steps/s", "made")
    return Section("Runs", tables=(Table(f"All runs of {view.results.name}", columns, tuple(rows)),))


def _made(run: Mapping[Hashable, Any]) -> str:
    """When, where and by which source a run was made."""
    hardware = run.get("hardware")
    machine = hardware if isinstance(hardware, dict) else {}
    parts = [str(run.get("finished") or "")[:10], str(machine.get("cpu") or ""), str(run.get("commit") or "")[:9]]
    return ", ".join(part for part in parts if part)


def environments(runs: pd.DataFrame) -> list[str]:
    """Software and machines of all runs, each combination once.

    :param runs: the table of the store
    """
    found: dict[str, int] = {}
    for values in zip(*(runs[name] for name in _FACTS if name in runs), strict=True):
        text = "; ".join(_said(value) for value in values if value)
        found[text] = found.get(text, 0) + 1
    return [f"{text} ({count:,} runs)" if len(found) > 1 else text for text, count in found.items()]


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {one}" for key, one in value.items())
    return value if isinstance(value, str) else json.dumps(value)
