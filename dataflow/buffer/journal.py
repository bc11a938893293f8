"""Journal: what a run notes of itself while it goes on, each thing once, at the end of a file.

    metrics.arrows    a value of a step a row: (step, name, value)       -> metrics.parquet, a row per step
    timeline.arrows   a call of a worker group a row                     -> timeline.parquet, the same

An Arrow IPC stream that is appended to: what a flush costs does not depend on how long the run has gone on, and any Arrow tool reads
what is there so far. A kill leaves at most a torn message at the end, which readers pass over. When the run ends, the streams
become Parquet files; `read_metrics` and `read_timeline` find whichever there is.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .disk import Disk, replacing

STREAM, PARQUET = ".arrows", ".parquet"
ROW_GROUP = 1 << 16
"""Rows of the timeline that are held at once when it becomes a Parquet file."""
METRICS, TIMELINE = "metrics", "timeline"
"""What the files are called, before their endings."""

VALUES = pa.schema([("step", pa.float64()), ("name", pa.string()), ("value", pa.float64())])
"""Metrics as they are noted: a step has other metrics than the one before, and some that are measured after it was closed."""

CALLS = pa.schema(
    [
        ("step", pa.int64()),  # the step that the call is part of
        ("graph", pa.string()),  # empty for calls beside the graphs
        ("group", pa.string()),
        ("node", pa.string()),
        ("start_s", pa.float64()),  # since the start of the run
        ("end_s", pa.float64()),
        ("worker_s", pa.float64()),  # what the slowest rank itself took
        ("rows", pa.int64()),
        ("tokens", pa.int64()),
        ("last", pa.bool_()),  # of an update that comes in parts: its batch is whole with this one
    ]
)
"""The timeline: a row per call, in the order in which they ended."""


class Journal:
    """A file that rows of one schema are added to, by one writer."""

    def __init__(self, path: Path, schema: pa.Schema, *, disk: Disk | None = None) -> None:
        self.path = path
        self.schema = schema
        self._disk = disk or Disk()
        self._descriptor = -1
        self._size = 0
        self._pending: list[Mapping[str, Any]] = []

    def add(self, **row: Any) -> None:
        """Note a row; it is in the file after the next `flush`."""
        self._pending.append(row)

    def flush(self) -> None:
        """Append what was added. What does not fit on the disk is cut off again, and stays to be written."""
        if not self._pending:
            return
        number = len(self._pending)
        data = pa.RecordBatch.from_pylist([dict(row) for row in self._pending], self.schema).serialize().to_pybytes()
        if self._descriptor < 0:
            self._descriptor = self._disk.open(self.path)
            self._size = os.fstat(self._descriptor).st_size
        data = data if self._size else self.schema.serialize().to_pybytes() + data
        try:
            self._disk.write(self._descriptor, data)
        except OSError:
            self._disk.truncate(self._descriptor, self._size)
            raise
        self._size += len(data)
        del self._pending[:number]

    def read(self) -> pa.Table:
        """All rows so far, written or not; safe in another thread than that which adds and flushes."""
        pending = pa.Table.from_pylist(
            [dict(row) for row in self._pending], self.schema
        )  # first: a flush moves them to the file
        return pa.concat_tables([pa.Table.from_batches(batches(self.path), self.schema), pending])

    def close(self) -> None:
        """Flush, and let go of the file."""
        try:
            self.flush()
        finally:
            if self._descriptor >= 0:
                self._disk.close(self._descriptor)
                self._descriptor = -1


def batches(path: Path) -> Iterator[pa.RecordBatch]:
    """The messages of a stream, as far as they are whole; none where there is no file."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        try:
            yield from pa.ipc.open_stream(file)
        except (pa.ArrowException, OSError):
            return


# Metrics, a row per step


def by_step(table: pa.Table) -> list[dict[str, float]]:
    """Values of `VALUES` as a mapping per step. Those that are noted again replace what was noted before.

    >>> table = pa.Table.from_pylist([{"step": s, "name": n, "value": v} for s, n, v in [(0, "a", 1), (1, "a", 2), (0, "b", 3)]], VALUES)
    >>> by_step(table)
    [{'step': 0.0, 'a': 1.0, 'b': 3.0}, {'step': 1.0, 'a': 2.0}]
    """
    rows: dict[float, dict[str, float]] = {}
    for step, name, value in zip(*(table[c].to_pylist() for c in VALUES.names), strict=True):
        rows.setdefault(step, {"step": step})[name] = value
    return list(rows.values())


def values_of(table: pa.Table, name: str) -> dict[int, float]:
    """Step -> one metric, where it was measured."""
    own = table.filter(pc.field("name") == name)
    return {int(step): value for step, value in zip(own["step"].to_pylist(), own["value"].to_pylist(), strict=True)}


def wide(rows: Sequence[Mapping[str, float]]) -> pa.Table:
    """A column per metric, null where a step has none."""
    return pa.table({key: [row.get(key) for row in rows] for key in dict.fromkeys(k for row in rows for k in row)})


# Readers


def read_metrics(run: Path) -> pa.Table | None:
    """The metrics of a run, a row per step and a column per metric, also while it goes on; None where there are none.

    Raises:
        OSError, pyarrow.ArrowException: a Parquet file that is no such thing.
    """
    if (run / f"{METRICS}{STREAM}").is_file():
        return wide(by_step(_streamed(run / f"{METRICS}{STREAM}", VALUES)))
    return read_parquet(run / f"{METRICS}{PARQUET}")


def read_timeline(run: Path) -> pa.Table | None:
    """The calls of a run, a row each, in the order in which they ended, also while it goes on; None where there are none.

    Raises:
        OSError, pyarrow.ArrowException: a Parquet file that is no such thing.
    """
    if (run / f"{TIMELINE}{STREAM}").is_file():
        return _streamed(run / f"{TIMELINE}{STREAM}", CALLS)
    return read_parquet(run / f"{TIMELINE}{PARQUET}")


def _streamed(path: Path, schema: pa.Schema) -> pa.Table:
    return pa.Table.from_batches(batches(path), schema)


def read_parquet(path: Path) -> pa.Table | None:
    """The table of a file; None where there is none."""
    return pq.read_table(path) if path.is_file() else None


# The end of a run, and going on


def to_parquet(run: Path) -> None:
    """Make Parquet files of the streams of a run that is over. At every moment one of both is there, whole."""
    _replace(run, METRICS, lambda: (t for t in [read_metrics(run)] if t is not None))
    _replace(run, TIMELINE, lambda: _row_groups(batches(run / f"{TIMELINE}{STREAM}")))


def _row_groups(parts: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The rows of all parts in tables of about ROW_GROUP rows."""
    held: list[pa.RecordBatch] = []
    for part in parts:
        held.append(part)
        if sum(map(len, held)) >= ROW_GROUP:
            yield pa.Table.from_batches(held).combine_chunks()
            held = []
    if held:
        yield pa.Table.from_batches(held).combine_chunks()


def _replace(run: Path, name: str, read: Callable[[], Iterable[pa.Table]]) -> None:
    stream, target = run / f"{name}{STREAM}", run / f"{name}{PARQUET}"
    if not stream.is_file():
        return
    tables = iter(read())
    first = next(tables, None)
    if first is None:
        return
    with replacing(target) as partial, pq.ParquetWriter(partial, first.schema) as writer:
        for table in itertools.chain([first], tables):
            writer.write_table(table)
    stream.unlink()


def begin_again(run: Path, name: str, table: pa.Table) -> None:
    """Have the stream of a run that goes on hold this, and no more."""
    stream = run / f"{name}{STREAM}"
    if len(table):
        parts = [table.schema, *table.combine_chunks().to_batches()]
        Disk().write_whole(stream, b"".join(part.serialize().to_pybytes() for part in parts))
    else:
        stream.unlink(missing_ok=True)
    (run / f"{name}{PARQUET}").unlink(missing_ok=True)


def values_from(row: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """A step's metrics as rows of `VALUES`."""
    step = float(row["step"])
    yield from ({"step": step, "name": name, "value": float(value)} for name, value in row.items())


def present(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without what it has not.

    >>> present({"step": 0.0, "loss": None})
    {'step': 0.0}
    """
    return {name: value for name, value in row.items() if value is not None}
