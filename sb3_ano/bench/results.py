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
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tqdm import tqdm

from sb3_ano._io import DirectoryLock, read_json, write_file, write_json
from sb3_ano._system import now
from sb3_ano.bench.training import CHECKPOINTS, EVALUATIONS, FILES, FORMAT, MONITOR, PROGRESS, RUN, checksum
from sb3_ano.checkpoints.files import remove_checkpoints

_RUNS = "runs"
_UNFINISHED = "unfinished"
_FAILED = "failed"
_LARGEST_INTEGER = 2**63 - 1
# Bytes at the end of a Monitor file that have a complete row: two rows are shorter.
_TAIL = 200
# Seconds after which reading shows a bar.
_SILENT_SECONDS = 2.0


class _Document(BaseModel):
    """Describe what must be in ``run.json``, and the types of what may be there."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    name: str
    identity: str
    suite: str
    env_id: str
    algorithm: str
    seed: int = Field(ge=-_LARGEST_INTEGER, le=_LARGEST_INTEGER)
    total_timesteps: int = Field(ge=1, le=_LARGEST_INTEGER)
    hyperparameters: dict[str, Any]
    changed: dict[str, Any]
    evaluation: dict[str, Any]
    sha256: dict[str, str]
    finished: str | None = None
    commit: str | None = None
    backend_used: str | None = None
    versions: dict[str, Any] | None = None
    machine: dict[str, Any] | None = None
    seconds: float | None = Field(None, ge=0.0)
    timesteps: int | None = Field(None, ge=0, le=_LARGEST_INTEGER)


@dataclass(frozen=True)
class RunFiles:
    """Read the files of a finished run.

    :param path: directory of the run
    :param document: content of ``run.json``
    """

    path: Path
    document: Mapping[str, Any] = field(hash=False)

    def evaluations(self) -> pd.DataFrame:
        """Return one row per evaluation: ``timesteps``, and ``mean`` and ``std`` of the returns.

        :raises ValueError: if the file is missing or has another content, with its name
        """
        file = self.path / EVALUATIONS
        with named_errors(file):
            # Read first, because NumPy leaves a file open that it cannot read.
            content = io.BytesIO(file.read_bytes())
            with np.load(content) as arrays:
                steps = arrays["timesteps"]
                results = arrays["results"].astype(float)

            has_episodes = results.ndim == 2 and results.shape[1] > 0
            if steps.ndim != 1 or not has_episodes or len(steps) != len(results):
                raise ValueError(
                    f"timesteps has shape {steps.shape}, and results {results.shape} instead of (evaluations, episodes)"
                )

            # Infinite returns have no standard deviation.
            with np.errstate(invalid="ignore"):
                mean = results.mean(axis=1)
                std = results.std(axis=1)
            table = pd.DataFrame({"timesteps": steps, "mean": mean, "std": std})
            _check_rows(table, "timesteps")

        return table

    def episodes(self) -> pd.DataFrame:
        """Return one row per episode of the training: ``r`` (return), ``l`` (length), ``t`` (seconds), ``timesteps``.

        :raises ValueError: if the file is missing or has another content, with its name
        """
        file = self.path / MONITOR
        with named_errors(file):
            table = pd.read_csv(file, comment="#", encoding="utf-8")
            # Environments that end an episode in the same step have the same steps.
            _check_rows(table, "timesteps", ("r", "l", "t"), strictly=False)

        return table

    def updates(self) -> pd.DataFrame:
        """Return one row per update, with the columns of SB3's logger and of :func:`measure_update`.

        :raises ValueError: if the file is missing or has another content, with its name
        """
        file = self.path / PROGRESS
        with named_errors(file):
            table = pd.read_csv(file, encoding="utf-8")
            _check_rows(table, "time/total_timesteps")

        return table


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


def _check_rows(
    table: pd.DataFrame,
    steps: str,
    columns: Collection[str] = (),
    strictly: bool = True,
) -> None:
    """Check that a table has numbers only, and increasing steps.

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
    # Comparisons with NaN are false.
    is_possible = (counts >= 0) & (counts <= _LARGEST_INTEGER)
    if not is_possible.all():
        raise ValueError(f"column {steps!r} has values that are not numbers of environment steps")

    growth = np.diff(counts)
    is_wrong = growth < 0
    if strictly:
        is_wrong = growth <= 0
    if is_wrong.any():
        raise ValueError(f"column {steps!r} does not increase")


def read_run(path: Path) -> RunFiles:
    """Read and check a finished run.

    :param path: directory of the run
    :raises ValueError: if the run is damaged
    :raises OSError: if ``run.json`` cannot be read
    """
    # The last file of a run, which is incomplete without it
    document = read_json(path / RUN)
    if document.get("format") != FORMAT:
        raise ValueError(f"{path}: format {document.get('format')!r}; this version of sb3_ano reads format {FORMAT}")
    try:
        # The document itself is kept, with all that the run says about its circumstances.
        _Document.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        key = first["loc"][0]
        raise ValueError(f"{path}: {RUN} has {key}={document.get(str(key))!r}: {first['msg']}") from error

    try:
        # Other programs could not read it, and reports could not write it.
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise ValueError(f"{path}: {RUN} has NaN, Infinity or text that is not Unicode: {error}") from error

    if document["name"] != path.name:
        # A copy would count twice.
        raise ValueError(f"{path}: {RUN} is that of {document['name']}")

    for name, expected in document["sha256"].items():
        # Checked before the path is used, which could lead anywhere.
        if name not in FILES:
            raise ValueError(f"{path}: {name!r} is not a file of a run")
        if not (path / name).is_file():
            raise ValueError(f"{path}: {name!r} is missing")
        # A file that was changed is no result of this run.
        if checksum(path / name) != expected:
            raise ValueError(f"{path}: the checksum of {name} does not match")

    return RunFiles(path, document)


class Results:
    """Read a directory of results.

    :param path: directory that ``run --out`` wrote
    :raises FileNotFoundError: if there are no results
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / _RUNS).is_dir():
            raise FileNotFoundError(f"{self.path} holds no results; 'sb3-ano bench run --out {self.path}' makes some")

    def names(self) -> list[str]:
        """Return the names of the finished runs."""
        names = []
        for path in (self.path / _RUNS).iterdir():
            # Users leave files there.
            if path.is_dir():
                names.append(path.name)
        return sorted(names)

    def runs(self, names: Collection[str] | None = None) -> list[RunFiles]:
        """Read finished runs.

        :param names: names of runs, of which missing ones are left out; None for all
        :raises ValueError: if runs are damaged, with the names of all of them, or if ``names`` is None and no run has finished
        """
        runs = []
        damaged = []
        bar = {
            "unit": "run",
            "delay": _SILENT_SECONDS,
            "leave": False,
            "disable": None,
        }

        for name in tqdm(self.names(), "Reading runs", **bar):
            if names is not None and name not in names:
                continue
            try:
                runs.append(read_run(self.path / _RUNS / name))
            except (OSError, ValueError) as error:
                # All are named at once, because each may take hours to train again.
                damaged.append(str(error))

        if damaged:
            raise ValueError(f"{len(damaged)} damaged runs; remove their directories to run them again: {'; '.join(damaged)}")
        if names is None and not runs:
            raise ValueError(f"{self.path}: no run has finished")
        return runs


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
        self.held: tuple[int, ...] = ()
        if self._lock.descriptor is not None:
            self.held = (self._lock.descriptor,)

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
        try:
            # Every second for each run, so that only the end is read.
            with (self.path / _UNFINISHED / name / MONITOR).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL))
                tail = file.read()

            # The last row may be incomplete.
            complete_rows = tail.rpartition(b"\n")[0]
            return int(complete_rows.rpartition(b",")[2])
        except (OSError, ValueError):
            return 0

    def publish(
        self,
        name: str,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Turn an unfinished run into a finished one, by one rename.

        :param name: name of the run
        :param files: content by file name, if another machine has made the run
        :raises ValueError: if the run is damaged
        :raises OSError: if the directory cannot be written
        """
        directory = self.begin(name)
        if files is not None:
            # They may be of an attempt on this machine.
            remove_checkpoints(directory / CHECKPOINTS)
            for file, content in files.items():
                write_file(directory / file, content)

        # What cannot be read now is a failure of the run, and not of the report.
        read_run(directory)
        os.rename(directory, self.path / _RUNS / name)

        # Of an earlier attempt.
        self._failure(name).unlink(missing_ok=True)
        # It stays if there are other unfinished runs.
        with contextlib.suppress(OSError):
            (self.path / _UNFINISHED).rmdir()

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
