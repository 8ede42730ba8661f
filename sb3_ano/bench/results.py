"""Directories of results: one directory per run, which is complete or missing."""

import contextlib
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd

from sb3_ano._io import DirectoryLock, now, read_json, write_file, write_json
from sb3_ano.bench.training import EVALUATIONS, FILES, FORMAT, MONITOR, PROGRESS, RUN, checksum

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
        """Return one row per evaluation: ``timesteps``, ``mean`` and ``std`` of returns, ``episodes``; no rows if imported."""
        if not (self.path / EVALUATIONS).is_file():
            return pd.DataFrame(columns=["timesteps", "mean", "std", "episodes"], dtype=float)
        with np.load(self.path / EVALUATIONS) as content:
            results, steps = content["results"], content["timesteps"]
        columns = {"mean": results.mean(axis=1), "std": results.std(axis=1), "episodes": results.shape[1]}
        return pd.DataFrame({"timesteps": steps, **columns})

    def episodes(self) -> pd.DataFrame:
        """Return one row per episode of the training: ``r`` (return), ``l`` (length), ``t`` (seconds), ``timesteps``."""
        return pd.read_csv(self.path / MONITOR, comment="#")

    def updates(self) -> pd.DataFrame:
        """Return one row per update, with the columns of SB3's logger and of :func:`measure_update`; no rows if imported."""
        file = self.path / PROGRESS
        return pd.read_csv(file) if file.is_file() else pd.DataFrame(columns=["time/total_timesteps"], dtype=float)


def read_run(path: Path, verify: Iterable[str] = FILES) -> RunFiles:
    """Read and check a finished run.

    :param path: directory of the run
    :param verify: files whose checksums are compared; other files need only be present
    :raises ValueError: if the run is damaged
    """
    try:
        document = read_json(path / RUN)
    except (OSError, ValueError) as error:
        reason = f"{RUN} is missing" if isinstance(error, FileNotFoundError) else str(error)
        raise ValueError(f"{path}: {reason}") from error
    if document.get("format") != FORMAT:
        raise ValueError(f"{path}: format {document.get('format')!r}; this version of sb3_ano reads format {FORMAT}")
    for key, kind in _REQUIRED.items():
        if not isinstance(document.get(key), kind):
            raise ValueError(f"{path}: {RUN} has {key}={document.get(key)!r}, not a value of type {kind.__name__}")
    for name, expected in document["sha256"].items():
        if name not in FILES or not (path / name).is_file():
            raise ValueError(f"{path}: {name!r} is {'missing' if name in FILES else 'not a file of a run'}")
        if name in verify and checksum(path / name) != expected:
            raise ValueError(f"{path}: the checksum of {name} does not match")
    return RunFiles(path, document)


class Results:
    """Read a directory of results.

    :param path: directory that ``run --out`` or ``import --out`` wrote
    :param make: whether to create the directory if it is missing
    :raises FileNotFoundError: if there are no results
    :raises ValueError: if the directory has results of another format, or other files
    """

    def __init__(self, path: str | Path, make: bool = False) -> None:
        self.path = Path(path)
        if (self.path / "results.json").exists():
            raise ValueError(f"{self.path} holds results of an earlier format, which this version of sb3_ano cannot read")
        visible = {file.name for file in self.path.glob("[!.]*")}
        if visible and not visible & {_RUNS, _UNFINISHED, _FAILED}:
            raise ValueError(f"{self.path} holds other files and no results; choose an empty or a new directory")
        if make:
            (self.path / _RUNS).mkdir(parents=True, exist_ok=True)
        if not (self.path / _RUNS).is_dir():
            raise FileNotFoundError(f"{self.path} holds no results; 'sb3-ano bench run --out {self.path}' makes some")

    def names(self) -> list[str]:
        """Return the names of the finished runs."""
        return sorted(path.name for path in (self.path / _RUNS).iterdir() if path.is_dir())

    def runs(self, names: Collection[str] | None = None) -> list[RunFiles]:
        """Read finished runs.

        :param names: names of runs, of which missing ones are left out; None for all
        :raises ValueError: if runs are damaged or duplicates of others; the message lists all of them
        """
        runs: dict[tuple[str, int], RunFiles] = {}
        damaged = []
        for name in self.names():
            if names is not None and name not in names:
                continue
            try:
                run = read_run(self.path / _RUNS / name, (MONITOR, PROGRESS, EVALUATIONS))
            except ValueError as error:
                damaged.append(str(error))
                continue
            first = runs.setdefault((run.document["identity"], run.document["seed"]), run)
            if first is not run:
                damaged.append(f"{run.path}: the same run as {first.path.name}")
        if damaged:
            remedy = "remove their directories to run them again"
            raise ValueError(f"{len(damaged)} damaged runs; {remedy}: {'; '.join(damaged)}")
        return list(runs.values())

    def failures(self) -> list[dict[str, Any]]:
        """Return ``name``, ``errors`` and ``date`` of each run that failed."""
        return [read_json(file) for file in sorted((self.path / _FAILED).glob("*.json"))]


class ResultsWriter(Results):
    """Write to a directory of results, as the only process that does.

    :param path: directory to write, which is created if it is missing
    :raises BlockingIOError: if another process writes to it
    :raises ValueError: if it holds other files
    :raises OSError: if it cannot be written
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, make=True)
        self._lock = DirectoryLock(self.path)
        #: File descriptors that keep the directory locked while they are open.
        self.held = () if self._lock.descriptor is None else (self._lock.descriptor,)

    def begin(self, name: str, resume: bool = True) -> Path:
        """Return the directory of an unfinished run, with its last checkpoint.

        :param name: name of the run
        :param resume: whether to keep the files of an earlier attempt
        """
        directory = self.path / _UNFINISHED / name
        if directory.exists() and not resume:
            shutil.rmtree(directory)
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def publish(self, name: str, files: Mapping[str, bytes] | None = None, attempts: int = 1) -> None:
        """Turn an unfinished run into a finished one, by one rename.

        :param name: name of the run
        :param files: content by file name, if another machine has made the run
        :param attempts: number of attempts
        :raises ValueError: if the run is damaged
        :raises OSError: if the directory cannot be written
        """
        directory = self.begin(name, resume=files is None)
        for file, content in (files or {}).items():
            write_file(directory / file, content)
        write_json(directory / RUN, {**read_run(directory).document, "attempts": attempts})
        os.rename(directory, self.path / _RUNS / name)
        self._failure(name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (self.path / _UNFINISHED).rmdir()  # if it is empty

    def record_failure(self, name: str, errors: Sequence[str]) -> None:
        """Record the errors of a run that failed in all attempts.

        :param name: name of the run
        :param errors: error of each attempt
        """
        write_json(self._failure(name), {"name": name, "errors": list(errors), "date": now()})

    def _failure(self, name: str) -> Path:
        return self.path / _FAILED / f"{name}.json"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.release()
