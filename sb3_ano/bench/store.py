"""Results of the experiments on disk: one folder a run, there as a whole or not at all."""

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from sb3_ano.bench.experiments.tables import SCHEMAS, table_file
from sb3_ano.bench.files import now, read_json, write_json
from sb3_ano.extras import missing_extra

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

try:
    import pandas as pd
    import pyarrow as pa
    from pyarrow import dataset
except ImportError as error:
    raise missing_extra("bench", error.name or "pyarrow") from error

FORMAT = 1
RUN_FILE, MODEL_FILE = "run.json", "model.zip"
_FORMAT_FILE, _LOCK_FILE = "results.json", ".lock"
_RUNS, _UNFINISHED, _FAILED = "runs", "unfinished", "failed"


class Store:
    """Results, to be read.

    :param path: the folder
    :raises FileNotFoundError: if there are no results
    :raises ValueError: if they are of another version
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not check_format(self.path):
            raise FileNotFoundError(f"{self.path} is not a folder of results; 'python -m sb3_ano.bench run' makes one")

    def run_ids(self) -> list[str]:
        """Names of the finished runs."""
        return sorted(folder.name for folder in (self.path / _RUNS).glob("*") if folder.is_dir())

    def documents(self) -> list[dict[str, Any]]:
        """``run.json`` of each finished run, sorted by task, algorithm, settings and seed.

        :raises ValueError: if one is damaged
        """
        found = [read_run(self.path / _RUNS / run_id) for run_id in self.run_ids()]
        return sorted(found, key=lambda run: (run["env_id"], run["algorithm"], str(run["settings"]), run["seed"]))

    def runs(self) -> pd.DataFrame:
        """One row a finished run: its name, what it is a run of, and how it went.

        Settings are in the dictionary ``settings``, and each also in a column of its own, NaN where a run has no such setting.

        :raises ValueError: if a run is damaged
        """
        rows = [{**run, **run["settings"]} for run in self.documents()]
        return pd.DataFrame(rows) if rows else pd.DataFrame(columns=["run_id", "suite", "env_id", "algorithm", "seed"])

    def table(self, name: str, run_ids: Iterable[str] | None = None) -> pd.DataFrame:
        """A table of several runs, with the column ``run_id`` first.

        :param name: ``"episodes"``, ``"evaluations"`` or ``"diagnostics"``
        :param run_ids: of these runs, in this order; None for all
        :raises ValueError: for an unknown table or run, or a damaged file
        """
        if name not in SCHEMAS:
            raise ValueError(f"name={name!r} is not a table; allowed are {', '.join(SCHEMAS)}")
        known = self.run_ids()
        wanted = known if run_ids is None else list(run_ids)
        if unknown := sorted(set(wanted) - set(known)):
            raise ValueError(f"{self.path} has no run {unknown[0]!r}")
        files = [str(table_file(self.path / _RUNS / run_id, name)) for run_id in wanted]
        columns = ["run_id", *SCHEMAS[name].names]
        if not files:
            return pd.DataFrame(columns=columns)
        try:
            found = dataset.dataset(files, schema=SCHEMAS[name]).to_table(columns=[*SCHEMAS[name].names, "__filename"])
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.path} has a damaged {name} table: {error}") from error
        names = dict(zip(files, wanted, strict=True))
        encoded = found["__filename"].combine_chunks().dictionary_encode()
        if isinstance(encoded, pa.ChunkedArray):
            encoded = encoded.unify_dictionaries().combine_chunks()
        ids = pa.DictionaryArray.from_arrays(encoded.indices, pa.array([names[file.as_py()] for file in encoded.dictionary]))
        frame = found.drop_columns(["__filename"]).to_pandas()
        frame.insert(0, "run_id", ids.to_pandas().astype(object))
        return frame

    def failures(self) -> list[dict[str, Any]]:
        """What is known of the runs that failed: ``run_id``, ``attempts``, ``errors``, ``date``."""
        found = [read_json(file) for file in sorted((self.path / _FAILED).glob("*.json"))]
        return [one for one in found if one is not None]


def open_store(path: str | Path) -> Store:
    """Results, to be read.

    :param path: the folder
    :raises FileNotFoundError: if there are no results
    :raises ValueError: if they are of another version
    """
    return Store(path)


def check_format(path: Path) -> bool:
    """Whether a folder has results; False if there is nothing in it.

    :raises ValueError: if its results are of another version, or it is a folder of something else
    """
    content = read_json(path / _FORMAT_FILE)
    if content is None:
        # A process that was killed at its start leaves hidden files.
        if path.is_dir() and any(not file.name.startswith(".") for file in path.iterdir()):
            raise ValueError(f"{path} holds other files and no results; take an empty or a new folder")
        return False
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{path} has results of format {content.get('format')!r}; this version of sb3_ano reads and writes format {FORMAT}"
        )
    return True


def read_run(folder: Path) -> dict[str, Any]:
    """``run.json`` of a finished run.

    :raises ValueError: if it is damaged
    """
    content = read_json(folder / RUN_FILE)
    if (
        content is None
        or not {"run_id", "env_id", "algorithm", "settings", "seed", "checksum"} <= content.keys()
        or not isinstance(content["settings"], dict)
    ):
        raise ValueError(f"{folder} is damaged: {RUN_FILE} is missing or not whole; remove the folder to run it again")
    return content


def checksum(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def verify(folder: Path, files: Sequence[str] | None = None) -> dict[str, Any]:
    """``run.json`` of a run whose files are as they were written.

    :param folder: of the run
    :param files: those to read in full; of the others, only whether they are there. None for all
    :raises ValueError: if one is missing or damaged
    """
    content = read_run(folder)
    for name, expected in content["checksum"].items():
        file = folder / name
        if file.parent != folder or not file.is_file():
            raise ValueError(f"{folder} is damaged: {name} is missing; remove the folder to run it again")
        if (files is None or name in files) and checksum(file) != expected:
            raise ValueError(f"{folder} is damaged: the checksum of {name} does not match; remove the folder to run it again")
    return content


class ResultsFolder:
    """Results, open for the one process that writes them.

    The lock is that of an open file, which processes that train inherit: it lasts until the last of them has ended.

    :param path: the folder; it is made
    :param patience: seconds to wait for another process to end
    :raises BlockingIOError: if another process writes there
    :raises ValueError: if there are results of another version, or other files
    :raises OSError: if the folder cannot be written
    """

    def __init__(self, path: str | Path, patience: float = 5.0) -> None:
        self.path = Path(path)
        check_format(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock: int | None = self._lock(patience)
        try:
            if not check_format(self.path):
                write_json(self.path / _FORMAT_FILE, {"format": FORMAT, "created": now()})
        except BaseException:
            self.close()
            raise

    def _lock(self, patience: float) -> int | None:
        if fcntl is None:
            return None
        descriptor = os.open(self.path / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    os.close(descriptor)
                    raise BlockingIOError(f"{self.path} is in use: another process writes its results there now") from error
            time.sleep(0.1)

    def finished(self, specifications: Mapping[str, Mapping[str, Any]]) -> set[str]:
        """Names of those runs that are there.

        :param specifications: of the runs to look for, by name
        :raises ValueError: if one was made with other settings, or is damaged
        """
        found = set()
        for run_id, specification in specifications.items():
            folder = self.path / _RUNS / run_id
            if not folder.exists():
                continue
            content = verify(folder, [table_file(folder, name).name for name in SCHEMAS])
            plain = json.loads(json.dumps(specification))
            for key, value in plain.items():
                if content.get(key) != value:
                    raise ValueError(
                        f"{folder} was made with other settings: {key} was {content.get(key)!r} and is {value!r} now; "
                        "--out takes another folder"
                    )
            found.add(run_id)
        return found

    def unfinished(self, run_id: str) -> Path:
        """Where a run writes until it is whole."""
        return self.path / _UNFINISHED / run_id

    def begin(self, run_id: str) -> Path:
        """An empty folder for a run, in place of what an earlier attempt left there."""
        folder = self.unfinished(run_id)
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        return folder

    def receive(self, run_id: str, files: Mapping[str, bytes]) -> None:
        """Write the files of a run that another machine has made.

        :param run_id: its name
        :param files: their content by name
        :raises OSError: if they cannot be written
        """
        folder = self.begin(run_id)
        for name, content in files.items():
            with (folder / name).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())

    def publish(self, run_id: str, attempts: int) -> None:
        """Make an unfinished run a finished one, in a single step.

        :param run_id: its name
        :param attempts: tries that it took
        :raises ValueError: if its files are not whole
        :raises OSError: if the folder cannot be written
        """
        folder = self.unfinished(run_id)
        write_json(folder / RUN_FILE, verify(folder) | {"attempts": attempts})
        runs = self.path / _RUNS
        runs.mkdir(exist_ok=True)
        os.rename(self.unfinished(run_id), runs / run_id)
        self._failure_file(run_id).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (self.path / _UNFINISHED).rmdir()  # if it is empty

    def record_failure(self, run_id: str, errors: Sequence[str]) -> None:
        """Note why a run could not be made.

        :param run_id: its name
        :param errors: of each attempt
        """
        content = {"run_id": run_id, "attempts": len(errors), "errors": list(errors), "date": now()}
        write_json(self._failure_file(run_id), content)

    def _failure_file(self, run_id: str) -> Path:
        return self.path / _FAILED / f"{run_id}.json"

    def close(self) -> None:
        """Let others write; a second call does nothing."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
