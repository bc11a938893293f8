"""Tables that grow during a run: metrics, timeline and process memory.

    metrics.arrows    a row for each value of a step: (step, name, value)   -> metrics.parquet, a row for each step
    timeline.arrows   a row for each call of a worker group                 -> timeline.parquet, the same
    processes.arrows  memory of each process, every few seconds

During the run, each table is an Arrow IPC stream. The cost of a flush does not grow with the length
of the run. A kill leaves at most one incomplete message at the end, which readers skip. At the end
of the run, metrics and timeline become Parquet files. `read_metrics` and `read_timeline` read both.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..safe_files import open_file
from ..untrusted_text import beginning, one_line
from .files import METRICS, PARQUET, STREAM, TIMELINE, Disk, replacing

ROW_GROUP = 1 << 16

VALUES = pa.schema([("step", pa.float64()), ("name", pa.string()), ("value", pa.float64())])
"""Schema of the metrics: one row per value. Steps have different metrics, and some arrive late."""

CALLS = pa.schema(
    [
        ("step", pa.int64()),  # the step that the call is part of
        ("graph", pa.string()),  # empty for calls outside the graphs
        ("group", pa.string()),
        ("node", pa.string()),
        ("start_s", pa.float64()),  # since the start of the run
        ("end_s", pa.float64()),
        ("worker_s", pa.float64()),  # of the slowest rank
        ("rows", pa.int64()),
        ("tokens", pa.int64()),
        ("last", pa.bool_()),  # the last call of an update in several calls
        # For calls on several ranks: when each rank answered, and how long it worked.
        (
            "by_rank",
            pa.list_(
                pa.struct([("rank", pa.int32()), ("end_s", pa.float64()), ("worker_s", pa.float32())])
            ),
        ),
    ]
)
"""Schema of the timeline: one row per call, in the order in which calls end."""
BY_RANK = "by_rank"
"""Column of `CALLS` that timelines of earlier versions lack."""

READINGS = pa.schema(
    [
        ("time_s", pa.float64()),  # since the start of the run
        ("host", pa.string()),
        ("worker", pa.string()),  # such as actor[0] or driver
        ("resident_bytes", pa.int64()),
        ("shared_bytes", pa.int64()),
    ]
)
"""Schema of the memory readings of a run's processes."""


class TableStream:
    """An Arrow stream file with rows of one schema and a single writer."""

    def __init__(self, path: Path, schema: pa.Schema, *, disk: Disk | None = None) -> None:
        self.path = path
        self.schema = schema
        self._disk = disk or Disk()
        self._descriptor = -1
        self._size = 0
        self._pending: list[Mapping[str, Any]] = []

    def add(self, **row: Any) -> None:
        self._pending.append(row)

    def flush(self) -> None:
        """Append the added rows to the file. If this raises an OSError, for example because the
        disk is full, the next flush tries again."""
        if not self._pending:
            return
        number = len(self._pending)
        rows = [dict(row) for row in self._pending]
        data = pa.RecordBatch.from_pylist(rows, self.schema).serialize().to_pybytes()
        if self._descriptor < 0:
            self._descriptor = self._disk.open(self.path)
            self._size = os.fstat(self._descriptor).st_size
        data = data if self._size else self.schema.serialize().to_pybytes() + data
        try:
            self._disk.write(self._descriptor, data)
        except OSError:
            # Readers stop at a partial message.
            self._disk.truncate(self._descriptor, self._size)
            raise
        self._size += len(data)
        # Another thread may have added more rows.
        del self._pending[:number]

    def read(self) -> pa.Table:
        """Return all rows, flushed or not. Thread-safe."""
        # Read the pending rows first, because a flush moves them to the file.
        pending = pa.Table.from_pylist([dict(row) for row in self._pending], self.schema)
        return pa.concat_tables([pa.Table.from_batches(batches(self.path), self.schema), pending])

    def close(self) -> None:
        try:
            self.flush()
        finally:
            if self._descriptor >= 0:
                self._disk.close(self._descriptor)
                self._descriptor = -1


def batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield a stream's complete messages; none if the file does not exist."""
    if not path.is_file():
        return
    with open_file(path) as file:
        try:
            yield from pa.ipc.open_stream(file)
        except (pa.ArrowException, OSError):
            return


# Metrics, one row per step


def by_step(table: pa.Table) -> list[dict[str, float]]:
    """Convert rows of `VALUES` to one mapping per step. Later values replace earlier ones.

    >>> table = pa.Table.from_pylist([{"step": s, "name": n, "value": v} for s, n, v in [(0, "a", 1), (1, "a", 2), (0, "b", 3)]], VALUES)
    >>> by_step(table)
    [{'step': 0.0, 'a': 1.0, 'b': 3.0}, {'step': 1.0, 'a': 2.0}]
    """
    rows: dict[float, dict[str, float]] = {}
    for step, name, value in zip(*(table[c].to_pylist() for c in VALUES.names), strict=True):
        rows.setdefault(step, {"step": step})[name] = value
    return list(rows.values())


def values_of(table: pa.Table, name: str) -> dict[int, float]:
    """Return the values of a metric, keyed by step."""
    own = table.filter(pc.field("name") == name)
    steps, values = own["step"].to_pylist(), own["value"].to_pylist()
    return {int(step): value for step, value in zip(steps, values, strict=True)}


def wide(rows: Sequence[Mapping[str, float]]) -> pa.Table:
    """Return a table with one row per step and one column per metric. Missing values are null."""
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: [row.get(name) for row in rows] for name in names})


# Readers


def read_metrics(run: Path) -> pa.Table | None:
    """Return a table with one row per step and one column per metric; None if there are no metrics.
    Raises an OSError or ArrowException if the file is damaged."""
    if (run / f"{METRICS}{STREAM}").is_file():
        return wide(by_step(_streamed(run / f"{METRICS}{STREAM}", VALUES)))
    return read_parquet(run / f"{METRICS}{PARQUET}")


def last_step(run: Path) -> int | None:
    """Return the last step with metrics; None if there are none or they cannot be read."""
    try:
        table = read_metrics(run)
    except (OSError, pa.ArrowException):
        return None
    if table is None or "step" not in table.column_names:
        return None
    return int(max((step for step in table["step"].to_pylist() if step is not None), default=0.0))


def read_timeline(run: Path) -> pa.Table | None:
    """Return the calls, in the order in which they ended; None if there is no timeline. Raises an
    OSError or ArrowException if the file is damaged."""
    if (run / f"{TIMELINE}{STREAM}").is_file():
        return _streamed(run / f"{TIMELINE}{STREAM}", CALLS)
    return read_parquet(run / f"{TIMELINE}{PARQUET}")


def calls_kept(table: pa.Table, until_s: float) -> pa.Table:
    """Return the calls that ended within `until_s` seconds of the start of the run. `table` may
    lack BY_RANK."""
    if BY_RANK not in table.column_names:
        table = table.append_column(BY_RANK, pa.nulls(len(table), CALLS.field(BY_RANK).type))
    return table.select(CALLS.names).filter(pc.field("end_s") <= until_s).cast(CALLS)


def _streamed(path: Path, schema: pa.Schema) -> pa.Table:
    """Return a stream's rows in its own schema; if there are none, an empty table with `schema`."""
    found = list(batches(path))
    return pa.Table.from_batches(found, found[0].schema if found else schema)


def read_parquet(path: Path) -> pa.Table | None:
    """Return the table in a Parquet file; None if there is no file."""
    if not path.is_file():
        return None
    with pq.ParquetFile(path) as file:  # `read_table` has heavy imports
        return file.read()


# End and resume


def to_parquet(run: Path) -> None:
    """Convert metrics and timeline to Parquet. One of the two forms is always complete."""
    for name in (METRICS, TIMELINE):
        stream, target = run / f"{name}{STREAM}", run / f"{name}{PARQUET}"
        if not stream.is_file():
            continue
        tables = (
            iter([wide(by_step(_streamed(stream, VALUES)))]) if name == METRICS else _row_groups(stream)
        )
        first = next(tables, None)
        if first is None:
            continue
        with replacing(target) as partial, pq.ParquetWriter(partial, first.schema) as writer:
            for table in itertools.chain([first], tables):
                writer.write_table(table)
        stream.unlink()


def _row_groups(stream: Path) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    for part in batches(stream):
        held.append(part)
        if sum(map(len, held)) >= ROW_GROUP:
            yield pa.Table.from_batches(held).combine_chunks()
            held = []
    if held:
        yield pa.Table.from_batches(held).combine_chunks()


def begin_again(run: Path, name: str, table: pa.Table) -> None:
    """Replace the rows of `METRICS` or `TIMELINE` by `table`, in the stream's schema."""
    stream = run / f"{name}{STREAM}"
    if len(table):
        parts = [table.schema, *table.combine_chunks().to_batches()]
        Disk().write_whole(stream, (part.serialize().to_pybytes() for part in parts))
    else:
        stream.unlink(missing_ok=True)
    # Last, because readers prefer the stream.
    (run / f"{name}{PARQUET}").unlink(missing_ok=True)


def values_from(row: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """Yield the metrics of a step as rows of `VALUES`."""
    step = float(row["step"])
    yield from ({"step": step, "name": name, "value": float(value)} for name, value in row.items())


def present(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without null values.

    >>> present({"step": 0.0, "loss": None})
    {'step': 0.0}
    """
    return {name: value for name, value in row.items() if value is not None}


# Text table


def render_table(table: pa.Table, *, limit: int = 20, width: int = 32) -> str:
    """Format the first `limit` rows of a table for a terminal, with values cut to `width`
    characters.

    >>> print(render_table(pa.table({"level": ["prompts", "generate"], "tokens": [3, None], "done": [["generate"], []]})))
    level     tokens  done
    prompts        3  generate
    generate       -
    """
    table = table.rename_columns(list(map(one_line, table.column_names)))
    shown = [
        {name: _plain(value, width) for name, value in row.items()}
        for row in table.slice(0, limit).to_pylist()
    ]
    widths = {name: max([len(name), *(len(row[name]) for row in shown)]) for name in table.column_names}
    right = {f.name for f in table.schema if pa.types.is_integer(f.type) or pa.types.is_floating(f.type)}
    lines: list[str] = []
    for row in [{name: name for name in table.column_names}, *shown]:
        cells = (f"{text:{'>' if name in right else '<'}{widths[name]}}" for name, text in row.items())
        lines.append("  ".join(cells).rstrip())
    if len(table) > limit:
        lines.append(f"... {len(table) - limit} more")
    return "\n".join(lines)


def _plain(value: Any, width: int) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        text = ", ".join(
            one_line(str(v["writer"])) if isinstance(v, dict) and "writer" in v else _plain(v, width)
            for v in value
        )
    elif isinstance(value, float):
        text = f"{value:.6g}"
    else:
        text = one_line(str(value))
    return beginning(text, width)
