"""The tables of a run: written as streams while it lasts, kept as Parquet."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sb3_ano.extras import missing_extra

try:
    import pyarrow as pa
    from pyarrow import ipc, parquet
except ImportError as error:
    raise missing_extra("bench", error.name or "pyarrow") from error

#: Diagnostics that are measured on each rollout after its update, the same way for all algorithms.
MEASURED = ("approx_kl", "ratio_mean", "ratio_max", "clip_fraction")
#: Diagnostics as the algorithms log them, where they do.
LOGGED = (
    "policy_gradient_loss",
    "value_loss",
    "entropy_loss",
    "loss",
    "explained_variance",
    "learning_rate",
    "clip_range",
    "std",
    "kl_mean",
    "kl_max",
    "grad_norm",
    "ppo_discarded_gradient",
    "skipped_minibatches",
)
_WHEN = [("timesteps", pa.int64()), ("wall_seconds", pa.float64())]
_EPISODE = [("episode_return", pa.float64()), ("episode_length", pa.int64())]
#: Tables of a run by name.
SCHEMAS: dict[str, pa.Schema] = {
    "episodes": pa.schema([*_WHEN, *_EPISODE]),
    "evaluations": pa.schema([*_WHEN, ("episode", pa.int64()), *_EPISODE]),
    "diagnostics": pa.schema([*_WHEN, *((name, pa.float64()) for name in (*MEASURED, *LOGGED))]),
}


def stream_file(folder: Path, name: str) -> Path:
    """Where the rows of an unfinished run are.

    :param folder: of the run
    :param name: of the table
    """
    return folder / f"{name}.arrows"


def table_file(folder: Path, name: str) -> Path:
    """Where a table of a finished run is; arguments as in :func:`stream_file`."""
    return folder / f"{name}.parquet"


class TableStream:
    """Appends rows to a file, of which a killed process leaves all that had been flushed.

    Parquet has its index at the end of the file; killed before, it cannot be read at all.

    :param folder: of the run
    :param name: of the table, one of ``SCHEMAS``
    :raises OSError: if it cannot be written
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._schema = SCHEMAS[name]
        self._rows: list[Mapping[str, Any]] = []
        self._file = stream_file(folder, name).open("wb")
        self._writer = ipc.new_stream(self._file, self._schema)

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep a row in memory until the next flush.

        :param row: values by column; missing ones are NaN
        """
        self._rows.append(row)

    def flush(self) -> None:
        """Hand what was added to the operating system."""
        if self._rows:
            columns = {column: [row.get(column, float("nan")) for row in self._rows] for column in self._schema.names}
            self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
            self._rows.clear()
        self._file.flush()

    def finish(self) -> None:
        """Turn the stream into Parquet, and remove it."""
        self.flush()
        self.close()
        file = table_file(self._folder, self._name)
        with file.open("wb") as sink:
            parquet.write_table(read_stream(stream_file(self._folder, self._name)), sink)
            sink.flush()
            os.fsync(sink.fileno())
        stream_file(self._folder, self._name).unlink()

    def close(self) -> None:
        """Close the file; what was not flushed is lost."""
        if not self._file.closed:
            self._writer.close()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            self.close()
        except OSError:
            if error is None:
                raise


def read_stream(file: str | Path) -> pa.Table:
    """What there is of a stream, also of one that was cut off.

    :param file: from :func:`stream_file`
    :raises OSError: if it cannot be read
    """
    batches: list[pa.RecordBatch] = []
    with Path(file).open("rb") as source:
        reader = ipc.open_stream(source)
        with contextlib.suppress(pa.ArrowInvalid, OSError):  # the last batch is not whole
            batches.extend(reader)
        return pa.Table.from_batches(batches, reader.schema)
