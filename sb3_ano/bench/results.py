"""Directories of results: one directory per run, which is complete or missing."""

import contextlib
import io
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from sb3_ano._io import DirectoryLock, read_json, write_file, write_json
from sb3_ano._system import now
from sb3_ano.bench.training import CHECKPOINTS, EVALUATIONS, FILES, FORMAT, MONITOR, PROGRESS, RUN, checksum
from sb3_ano.checkpoints.files import remove_checkpoints

_RUNS, _UNFINISHED, _FAILED = "runs", "unfinished", "failed"
_REQUIRED = {
    **dict.fromkeys(("name", "identity", "suite", "env_id", "algorithm"), str),
    **dict.fromkeys(("seed", "total_timesteps"), int),
    **dict.fromkeys(("hyperparameters", "changed", "evaluation", "sha256"), dict),
}
# Circumstances of a training, which imported runs lack.
_OPTIONAL: dict[str, Any] = {
    **dict.fromkeys(("finished", "commit", "backend_used"), str),
    **dict.fromkeys(("versions", "machine"), dict),
    "seconds": (int, float),
    "timesteps": int,
}
_LARGEST_INTEGER = 2**63 - 1
_STEPS_OF_UPDATES = "time/total_timesteps"
# Seconds after which reading shows a bar.
_SILENT_SECONDS = 2.0


@dataclass(frozen=True)
class RunFiles:
    """Read the files of a finished run.

    :param path: directory of the run
    :param document: content of ``run.json``
    """

    path: Path
    document: Mapping[str, Any] = field(hash=False)

    def evaluations(self) -> pd.DataFrame:
        """Return one row per evaluation: ``timesteps``, and ``mean`` and ``std`` of the returns; no rows if imported.

        :raises ValueError: if the file has another content, with its name
        """
        file = self.path / EVALUATIONS
        if not file.is_file():
            return pd.DataFrame(columns=["timesteps", "mean", "std"], dtype=float)
        # NumPy leaves a file open that is none of its own.
        with named_errors(file), np.load(io.BytesIO(file.read_bytes())) as content, np.errstate(invalid="ignore"):
            steps = content["timesteps"]
            results = content["results"].astype(float)
            if steps.ndim != 1 or results.ndim != 2 or len(steps) != len(results) or not results.shape[1]:
                raise ValueError(
                    f"timesteps has shape {steps.shape}, and results {results.shape} instead of (evaluations, episodes)"
                )
            table = pd.DataFrame({"timesteps": steps, "mean": results.mean(axis=1), "std": results.std(axis=1)})
            return _checked_rows(table, "timesteps")

    def episodes(self) -> pd.DataFrame:
        """Return one row per episode of the training: ``r`` (return), ``l`` (length), ``t`` (seconds), ``timesteps``.

        :raises ValueError: if the file has another content, with its name
        """
        with named_errors(self.path / MONITOR):
            table = pd.read_csv(self.path / MONITOR, comment="#", encoding="utf-8")
            # Environments that end an episode in the same step have the same steps.
            return _checked_rows(table, "timesteps", ("r", "l", "t"), strictly=False)

    def updates(self) -> pd.DataFrame:
        """Return one row per update, with the columns of SB3's logger and of :func:`measure_update`; no rows if imported.

        :raises ValueError: if the file has another content, with its name
        """
        file = self.path / PROGRESS
        if not file.is_file():
            return pd.DataFrame(columns=[_STEPS_OF_UPDATES], dtype=float)
        with named_errors(file):
            return _checked_rows(pd.read_csv(file, encoding="utf-8"), _STEPS_OF_UPDATES)


@contextlib.contextmanager
def named_errors(file: Path) -> Iterator[None]:
    """Turn any error of reading a file, which may be a stranger's, into one that names it.

    :param file: file that the block reads
    :raises ValueError: instead of the error
    """
    try:
        yield
    # NumPy, pandas and zipfile raise many kinds of errors on bytes that they do not expect.
    except Exception as error:
        raise ValueError(f"{file} cannot be read: {' '.join(str(error).split()) or repr(error)}") from error


def _checked_rows(table: pd.DataFrame, steps: str, columns: Collection[str] = (), strictly: bool = True) -> pd.DataFrame:
    """Return a table of numbers with increasing steps.

    :param table: table to check
    :param steps: column of the environment steps
    :param columns: further columns that must be there
    :param strictly: whether rows may not have the same steps
    :raises ValueError: naming the column that is missing or invalid
    """
    for name in (steps, *columns):
        if name not in table:
            raise ValueError(f"column {name!r} is missing")
    for title, column in table.items():
        # A column without values has no numbers that it could be told by.
        is_number = pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_complex_dtype(column)
        if not is_number and not column.isna().all():
            raise ValueError(f"column {title!r} has values that are not numbers")

    counts = table[steps].to_numpy(float)
    if not np.isfinite(counts).all() or (counts < 0).any() or (counts > _LARGEST_INTEGER).any():
        raise ValueError(f"column {steps!r} has values that are not numbers of environment steps")
    growth = np.diff(counts)
    if (growth < 0).any() or (strictly and (growth == 0).any()):
        raise ValueError(f"column {steps!r} does not increase")
    return table


def read_run(path: Path) -> RunFiles:
    """Read and check a finished run.

    :param path: directory of the run
    :raises ValueError: if the run is damaged
    :raises OSError: if ``run.json`` cannot be read
    """
    document = read_json(path / RUN)
    if document.get("format") != FORMAT:
        raise ValueError(f"{path}: format {document.get('format')!r}; this version of sb3_ano reads format {FORMAT}")
    for key, kind in _REQUIRED.items():
        # Python takes True for an integer.
        if not isinstance(document.get(key), kind) or isinstance(document[key], bool):
            raise ValueError(f"{path}: {RUN} has {key}={document.get(key)!r}, not a value of type {kind.__name__}")
    for key, kinds in _OPTIONAL.items():
        value = document.get(key)
        if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
            raise ValueError(f"{path}: {RUN} has {key}={value!r}, which is of type {type(value).__name__}")
    if not 1 <= document["total_timesteps"] <= _LARGEST_INTEGER or abs(document["seed"]) > _LARGEST_INTEGER:
        raise ValueError(f"{path}: {RUN} has an impossible number of total_timesteps or seed")
    if not 0 <= (document.get("seconds") or 0) < float("inf") or not 0 <= (document.get("timesteps") or 0) <= _LARGEST_INTEGER:
        raise ValueError(f"{path}: {RUN} has an impossible number of seconds or timesteps")
    try:
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise ValueError(f"{path}: {RUN} has NaN, Infinity or text that is not Unicode: {error}") from error
    if document["name"] != path.name:  # a copy would count twice
        raise ValueError(f"{path}: {RUN} is that of {document['name']}")
    for name, expected in document["sha256"].items():
        if name not in FILES or not (path / name).is_file():
            raise ValueError(f"{path}: {name!r} is {'missing' if name in FILES else 'not a file of a run'}")
        if checksum(path / name) != expected:
            raise ValueError(f"{path}: the checksum of {name} does not match")
    return RunFiles(path, document)


class Results:
    """Read a directory of results.

    :param path: directory that ``run --out`` or ``import --out`` wrote
    :raises FileNotFoundError: if there are no results
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / _RUNS).is_dir():
            raise FileNotFoundError(f"{self.path} holds no results; 'sb3-ano bench run --out {self.path}' makes some")

    def names(self) -> list[str]:
        """Return the names of the finished runs."""
        return sorted(path.name for path in (self.path / _RUNS).iterdir() if path.is_dir())

    def runs(self, names: Collection[str] | None = None) -> list[RunFiles]:
        """Read finished runs.

        :param names: names of runs, of which missing ones are left out; None for all
        :raises ValueError: if runs are damaged, with the names of all of them, or if ``names`` is None and no run has finished
        """
        runs, damaged = [], []
        for name in tqdm(self.names(), "Reading runs", unit="run", delay=_SILENT_SECONDS, leave=False, disable=None):
            if names is None or name in names:
                try:
                    runs.append(read_run(self.path / _RUNS / name))
                except (OSError, ValueError) as error:
                    damaged.append(str(error))
        if damaged:
            raise ValueError(f"{len(damaged)} damaged runs; remove their directories to run them again: {'; '.join(damaged)}")
        if names is None and not runs:
            raise ValueError(f"{self.path}: no run has finished")
        return runs


def require_different(runs: pd.DataFrame, columns: list[str]) -> None:
    """Reject two runs that would be one row of a table, such as those of one seed and of two lengths.

    :param runs: a row per run, with ``name``
    :param columns: columns that should tell runs apart
    :raises ValueError: if two runs are equal in all of them
    """
    if len(equal := runs[runs.duplicated(columns, keep=False)].sort_values(columns)):
        names = " and ".join(equal["name"].head(2))
        raise ValueError(f"{names} have the same algorithm, hyperparameters, task and seed; move one to other results")


class ResultsWriter(Results, contextlib.AbstractContextManager["ResultsWriter"]):
    """Write to a directory of results, as the only process that does.

    :param path: directory to write, which is created if it is missing
    :raises BlockingIOError: if another process writes to it
    :raises OSError: if it cannot be written
    """

    def __init__(self, path: str | Path) -> None:
        (Path(path) / _RUNS).mkdir(parents=True, exist_ok=True)
        super().__init__(path)
        self._lock = DirectoryLock(self.path)
        #: File descriptors that keep the directory locked while they are open.
        self.held = () if self._lock.descriptor is None else (self._lock.descriptor,)

    def begin(self, name: str) -> Path:
        """Return the directory of an unfinished run, with its last checkpoint.

        :param name: name of the run
        """
        directory = self.path / _UNFINISHED / name
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def timesteps(self, name: str) -> int:
        """Return the environment steps of an unfinished run up to the end of its last episode, also while it is trained.

        :param name: name of the run
        """
        with contextlib.suppress(OSError, ValueError), (self.path / _UNFINISHED / name / MONITOR).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 200))  # two rows are shorter
            return int(file.read().rpartition(b"\n")[0].rpartition(b",")[2])  # of the last row that is complete
        return 0

    def publish(self, name: str, files: Mapping[str, bytes] | None = None) -> None:
        """Turn an unfinished run into a finished one, by one rename.

        :param name: name of the run
        :param files: content by file name, if another machine has made the run
        :raises ValueError: if the run is damaged
        :raises OSError: if the directory cannot be written
        """
        directory = self.begin(name)
        if files is not None:
            remove_checkpoints(directory / CHECKPOINTS)  # of an attempt on this machine
            for file, content in files.items():
                write_file(directory / file, content)
        read_run(directory)
        os.rename(directory, self.path / _RUNS / name)
        self._failure(name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (self.path / _UNFINISHED).rmdir()  # if it is empty

    def record_failure(self, name: str, error: str) -> None:
        """Record the error of a run that failed.

        :param name: name of the run
        :param error: error with its traceback
        """
        write_json(self._failure(name), {"name": name, "errors": [error], "date": now()})

    def _failure(self, name: str) -> Path:
        return self.path / _FAILED / f"{name}.json"

    def __exit__(self, *exception: object) -> None:
        self._lock.release()
