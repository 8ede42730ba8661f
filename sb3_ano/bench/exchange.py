"""Results in other formats: CSV, TensorBoard and Weights & Biases; and runs of other programs as results."""

import importlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sb3_ano._io import replace_files, write_file
from sb3_ano._secrets import hide
from sb3_ano._system import now
from sb3_ano.bench.algorithms import number
from sb3_ano.bench.plan import Run
from sb3_ano.bench.results import Results, ResultsWriter, RunFiles, named_errors
from sb3_ano.bench.training import MONITOR, RUN, write_run

_SETTINGS = ["clip_range", "desired_kl", "learning_rate", "n_epochs"]
#: Columns that identify a run in CSV files; rows of earlier versions have no identity.
KEY = ["env", "algorithm", *_SETTINGS, "changed", "steps", "seed", "identity"]
# Columns of texts; without this, a commit of digits would be read as a number.
_TEXTS = dict.fromkeys(["env", "algorithm", "changed", "identity", "date", "commit"], str)
# Columns of progress.csv, and how their updates are summarized.
_DIAGNOSTICS = {
    "kl_after": ("update/kl_after", "mean"),
    "ratio_max_after": ("update/ratio_max_after", "median"),
    "outside_after": ("update/outside_after", "mean"),
    "ppo_discarded_gradient": ("train/ppo_discarded_gradient", "mean"),
    "clip_range_mean": ("train/clip_range", "mean"),
}
# Signs that a spreadsheet takes for the beginning of a formula, also in their full width.
_FORMULA = re.compile(r"[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
# Training episodes and evaluations that a final return averages.
_LAST_EPISODES, _LAST_EVALUATIONS = 100, 3
#: Tag of returns in the TensorBoard logs of CleanRL, which openrlbenchmark reads, too.
RETURN_TAG = "charts/episodic_return"


def export(path: Path, out: Path, to: str = "csv") -> str:
    """Write results in another format.

    :param path: directory of results
    :param out: directory to write
    :param to: ``"csv"``, ``"tensorboard"`` or ``"wandb"``
    :return: message for the user
    :raises ValueError: if runs are damaged, or if none has finished
    :raises ModuleNotFoundError: if the package of the format is not installed
    """
    runs = Results(path).runs()
    if to == "csv":
        rows = [(key_of(run), run) for run in runs]
        count = merge_csv(pd.DataFrame([key | _summary(run) for key, run in rows]), out / "runs.csv", KEY)
        points = [key | point for key, run in rows for point in _curve(run).to_dict("records")]
        columns = [*KEY, "timesteps"]
        merge_csv(pd.DataFrame(points, columns=[*columns, "evaluation_return"]), out / "curves.csv", columns)
        return f"{path}: {len(runs)} runs; {out}/runs.csv has {count}"
    for run in runs:
        (_to_tensorboard if to == "tensorboard" else _to_wandb)(run, out)
    return f"{path}: {len(runs)} runs in {out}"


def key_of(run: RunFiles) -> dict[str, Any]:
    """Return the columns that identify a run.

    :param run: finished run
    """
    document = {**run.document, "env": run.document["env_id"], "steps": run.document["total_timesteps"]}
    numbers = {name: number(document["hyperparameters"].get(name)) for name in _SETTINGS}
    # As many digits as the file has, or the run would not be found there.
    settings = {name: None if value is None else float(f"{value:.5g}") for name, value in numbers.items()}
    others = [f"{name}={value}" for name, value in document["changed"].items() if name not in (*_SETTINGS, "total_timesteps")]
    return {name: {**document, **settings, "changed": ", ".join(sorted(others)) or None}[name] for name in KEY}


def _curve(run: RunFiles) -> pd.DataFrame:
    return run.evaluations()[["timesteps", "mean"]].rename(columns={"mean": "evaluation_return"})


def _summary(run: RunFiles) -> dict[str, Any]:
    curve, updates = _curve(run)["evaluation_return"], run.updates()
    return {
        "training_return": run.episodes()["r"].tail(_LAST_EPISODES).mean(),
        "evaluation_return": curve.tail(1).mean(),
        "last_evaluations": curve.tail(_LAST_EVALUATIONS).mean(),
        **{name: updates.get(column, curve[:0]).agg(function) for name, (column, function) in _DIAGNOSTICS.items()},
        "seconds": round(run.document.get("seconds") or 0),
        "date": str(run.document.get("finished"))[:10],
        "commit": str(run.document.get("commit") or "")[:12],
    }


def safe_for_spreadsheets(table: pd.DataFrame) -> pd.DataFrame:
    """Put an apostrophe before texts that a spreadsheet would take for formulas; numbers stay numbers.

    :param table: table with texts, whose column names may be a stranger's, too
    """
    return table.map(_safe_cell).rename(columns=_safe_cell)


def _safe_cell(cell: Any) -> Any:
    if not isinstance(cell, str) or not _FORMULA.match(cell):
        return cell
    return cell if number(cell) is not None else f"'{cell}"


def merge_csv(table: pd.DataFrame, file: Path, key: list[str]) -> int:
    """Merge rows into a CSV file.

    :param table: new rows, which replace old ones of the same key, or of the same key without an identity
    :param file: file to write
    :param key: columns that identify a row
    :return: number of rows in the file
    """
    # Texts in the file are safe already; a row is found there by the same texts.
    table = safe_for_spreadsheets(table)
    if file.exists():
        with named_errors(file):
            rows = pd.read_csv(file, dtype=_TEXTS, encoding="utf-8")
            for name in key:
                # Rows without an identity are merged by the other columns.
                if name not in rows and name != "identity":
                    raise ValueError(f"column {name!r} is missing")
        # pandas warns of columns without values unless all are objects.
        table = pd.concat([frame.astype(object) for frame in (rows, table)]).infer_objects()
    if not table.empty:
        # A row without an identity may be of any run that is equal in the other columns.
        table = table[table["identity"].notna() | ~table.duplicated([name for name in key if name != "identity"], keep="last")]
        table = table.drop_duplicates(key, keep="last").sort_values(key)
    write_file(file, table.to_csv(index=False, float_format="%.5g"))
    return len(table)


def _scalars(run: RunFiles) -> Iterator[tuple[str, float, int]]:
    """Yield tag, value and step of all episodes, evaluations and updates, in the order of the steps."""
    tables = [
        run.episodes().rename(columns={"r": RETURN_TAG, "l": "charts/episodic_length"}).drop(columns="t"),
        run.evaluations()[["timesteps", "mean"]].rename(columns={"mean": "eval/mean_reward"}),
        run.updates().rename(columns={"time/total_timesteps": "timesteps"}),
    ]
    rows = pd.concat([table.melt("timesteps").dropna() for table in tables if len(table)])
    yield from rows.sort_values("timesteps", kind="stable")[["variable", "value", "timesteps"]].itertuples(index=False)


def _to_tensorboard(run: RunFiles, out: Path) -> None:
    tensorboard = importlib.import_module("torch.utils.tensorboard")
    if (out / run.path.name / RUN).exists():
        raise ValueError(f"--out {out} holds results, which would be replaced; give another directory")
    # A second event file would double all points.
    with replace_files(out / run.path.name) as directory, tensorboard.SummaryWriter(str(directory)) as writer:
        for tag, value, step in _scalars(run):
            writer.add_scalar(tag, value, int(step))


def _to_wandb(run: RunFiles, out: Path) -> None:
    wandb = importlib.import_module("wandb")
    out.mkdir(parents=True, exist_ok=True)
    with wandb.init(name=run.path.name, id=run.path.name, dir=str(out), config=hide(run.document)) as started:
        for tag, value, step in _scalars(run):
            started.log({tag: value, "global_step": int(step)})


def import_logs(
    logs: Sequence[Path], out: Path, algorithm: str, env_id: str, seed: int = 0, suite: str = "imported"
) -> list[str]:
    """Convert the training episodes of other programs to results.

    :param logs: a directory per run, with Monitor files of SB3 or the RL Zoo, or TensorBoard event files of CleanRL
    :param out: directory of results
    :param algorithm: name of the algorithm in reports
    :param env_id: id of the task
    :param seed: seed of the first run; the next ones follow
    :param suite: suite that the runs belong to in reports
    :return: names of the runs
    :raises ValueError: if a directory has no episodes, or there is a run of this algorithm, task and seed; nothing is written
    """
    read = [_read_episodes(path) for path in logs]
    with ResultsWriter(out) as results:
        documents = [run.document for run in results.runs(results.names())]
        there = {run["seed"]: run["name"] for run in documents if (run["env_id"], run["algorithm"]) == (env_id, algorithm)}
        if taken := there.keys() & range(seed, seed + len(logs)):
            raise ValueError(f"{out} has a run {there[min(taken)]} already; --seed gives the first directory another seed")
        names = []
        for index, (path, episodes) in enumerate(zip(logs, read, strict=True)):
            steps = int(episodes["timesteps"].max())
            run = Run(suite, env_id, algorithm, seed + index, steps, {}, {}, backend="imported")
            directory = results.begin(run.name)
            with (directory / MONITOR).open("w", encoding="utf-8") as file:
                file.write('#{"t_start": 0.0}\n')
                episodes.to_csv(file, index=False)
            write_run(run, directory, {"finished": now(), "timesteps": steps, "imported_from": str(path)})
            results.publish(run.name)
            names.append(run.name)
        return names


def _require_numbers(path: Path, episodes: pd.DataFrame) -> pd.DataFrame:
    """Return the columns of Monitor, and steps if there are any; all must be finite, and only returns may be below 0."""
    found = episodes.reindex(columns=["r", "l", "t", *episodes.columns.intersection(["timesteps"])])
    numbers = found.apply(pd.to_numeric, errors="coerce")
    if numbers.empty or not np.isfinite(numbers).all(axis=None) or (numbers.drop(columns="r") < 0).any(axis=None):
        raise ValueError(f"{path} has no episodes, or some without finite numbers in {', '.join(found.columns)}")
    return found


def _read_episodes(path: Path) -> pd.DataFrame:
    """Return episodes in the columns of Monitor; their environment steps are those of all environments together."""
    if files := sorted(path.glob("*monitor.csv")):
        frames = []
        for file in files:
            with named_errors(file):
                episodes = pd.read_csv(file, comment="#", encoding="utf-8")
            frames.append(_require_numbers(file, episodes))
        # Environments step together: a step of each is as many steps of the training.
        steps = [frame["l"].cumsum() * len(frames) if "timesteps" not in frame else frame["timesteps"] for frame in frames]
        together = pd.concat([frame.assign(timesteps=done) for frame, done in zip(frames, steps, strict=True)])
        return together.sort_values("timesteps", kind="stable")
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(path), size_guidance={"scalars": 0})
    if not path.is_dir() or RETURN_TAG not in events.Reload().Tags()["scalars"]:
        raise ValueError(f"{path} has no episodes: neither *monitor.csv nor TensorBoard events of {RETURN_TAG!r}")
    scalars = pd.DataFrame(events.Scalars(RETURN_TAG)).rename(columns={"value": "r", "step": "timesteps"})
    return _require_numbers(path, scalars.assign(l=0, t=scalars["wall_time"] - scalars["wall_time"].min()))
