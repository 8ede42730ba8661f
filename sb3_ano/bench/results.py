"""Directories of results: one directory per run, which is complete or missing."""

import contextlib
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sb3_ano._io import DirectoryLock, now, read_json, write_file, write_json
from sb3_ano.bench.training import CHECKPOINTS, EVALUATIONS, FILES, FORMAT, MONITOR, PROGRESS, RUN, checksum
from sb3_ano.checkpoints.files import remove_checkpoints

_RUNS, _UNFINISHED, _FAILED = "runs", "unfinished", "failed"
_REQUIRED = {
    **dict.fromkeys(("name", "identity", "suite", "env_id", "algorithm"), str),
    **dict.fromkeys(("seed", "total_timesteps"), int),
    **dict.fromkeys(("hyperparameters", "changed", "evaluation", "sha256"), dict),
}


@dataclass(frozen=True)
class RunFiles:
    """Read the files of a finished run.

    :param path: directory of the run
    :param document: content of ``run.json``
    """

    path: Path
    document: Mapping[str, Any] = field(hash=False)

    def evaluations(self) -> pd.DataFrame:
        """Return one row per evaluation: ``timesteps``, and ``mean`` and ``std`` of the returns; no rows if imported."""
        if not (self.path / EVALUATIONS).is_file():
            return pd.DataFrame(columns=["timesteps", "mean", "std"], dtype=float)
        with np.load(self.path / EVALUATIONS) as content:
            steps, results = content["timesteps"], content["results"]
        return pd.DataFrame({"timesteps": steps, "mean": results.mean(axis=1), "std": results.std(axis=1)})

    def episodes(self) -> pd.DataFrame:
        """Return one row per episode of the training: ``r`` (return), ``l`` (length), ``t`` (seconds), ``timesteps``."""
        return pd.read_csv(self.path / MONITOR, comment="#")

    def updates(self) -> pd.DataFrame:
        """Return one row per update, with the columns of SB3's logger and of :func:`measure_update`; no rows if imported."""
        file = self.path / PROGRESS
        return pd.read_csv(file) if file.is_file() else pd.DataFrame(columns=["time/total_timesteps"], dtype=float)


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
        if not isinstance(document.get(key), kind):
            raise ValueError(f"{path}: {RUN} has {key}={document.get(key)!r}, not a value of type {kind.__name__}")
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
        for name in self.names():
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
