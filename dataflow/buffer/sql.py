"""SQL queries over the tables of a run, with DuckDB.

This is `weft buffer sql`. It only reads, and also works during the run.
"""

from __future__ import annotations

import atexit
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..child_process import ChildProcess
from ..errors import DamagedSegment, UserError
from ..runs.files import BUFFER, METRICS, PARQUET, SAMPLES, SAMPLES_ARCHIVE, SEGMENTS, TIMELINE, is_run
from ..runs.samples import samples as recorded_samples
from ..runs.tables import read_metrics, read_parquet, read_timeline
from .check import read_log
from .checked_rows import CheckedRow
from .checker import Checker
from .history import buffer_folder, history
from .scratch import noted_folder
from .segments import Segment, SegmentReader

# Query process
#
#     prepared ──ask──> asked ──> answered, or ended by the kernel
#         └── no query within PREPARED_S, or its parent ends: gone
#
# A process takes a third of a second to start, so `prepare` can start one in advance. It uses
# about 100 MB while it waits. Its program is `sql_process.py`.


PREPARED_S = 600
"""[s] Time that a process waits for a query."""
GRACE_S = 5.0
"""Seconds that the process of a query has to end after its time."""
TAKEN_S = 60.0
"""Seconds that a process has to read the query."""
_PROGRAM = Path(__file__).with_name("sql_process.py")


class QueryProcess:
    """A process that answers one query, then ends."""

    def __init__(self) -> None:
        self._child = ChildProcess(
            _PROGRAM, str(PREPARED_S), errors=subprocess.DEVNULL, environment={"MALLOC_ARENA_MAX": "2"}
        )

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        return self._child.exit_code is None

    def ask(
        self, asked: Mapping[str, Any], tables: Mapping[str, pa.Table], timeout_s: float
    ) -> tuple[dict[str, Any], pa.Table] | None:
        """Send a query, wait for the answer, and end the process.

        Args:
            asked: the query and its limits.
            tables: that the query may name.
            timeout_s: seconds that the query may take.

        Returns:
            The reply and the answer. None if the process ended before it had read the query.

        Raises:
            UserError: the query took too long, or too much memory.
        """
        child = self._child
        try:
            try:
                child.ask({**asked, "tables": list(tables)}, TAKEN_S)
            except (EOFError, TimeoutError):
                return None
            with suppress(BrokenPipeError):  # the reply below says why
                for table in tables.values():
                    with pa.ipc.new_stream(child.stdin, table.schema) as stream:
                        stream.write_table(table)
                child.stdin.flush()
            try:
                found = child.receive(timeout_s + GRACE_S)
                return found, pa.ipc.open_stream(child.stdout).read_all()
            except (EOFError, TimeoutError, pa.ArrowInvalid):  # the kernel ended it
                child.wait(GRACE_S)
        finally:
            child.kill()
        if child.exit_code in (-signal.SIGALRM, -signal.SIGKILL):
            raise UserError(
                f"the query was stopped after {timeout_s:g} s; ask for less (where ..., limit ...), or allow more time"
            )
        raise UserError(
            f"the query ended its process ({child.status}): most likely it takes too much memory; "
            "ask for less (where ..., limit ...)"
        )

    def close(self) -> None:
        """End the process, whatever it does."""
        self._child.kill()


def ask(
    asked: Mapping[str, Any], tables: Mapping[str, pa.Table], timeout_s: float
) -> tuple[dict[str, Any], pa.Table]:
    """Send a query to the prepared process, or to a new one (see `QueryProcess.ask`)."""
    waiting = _waiting.taken()
    answered = None if waiting is None else waiting.ask(asked, tables, timeout_s)
    if answered is None:
        answered = QueryProcess().ask(asked, tables, timeout_s)
    if answered is None:
        raise UserError(
            "the process of the query ended before it read the query; check that this machine has free memory"
        )
    return answered


def prepare() -> None:
    """Start a process for the next query, if DuckDB is installed and none waits. It ends by itself
    after PREPARED_S."""
    if find_spec("duckdb") is not None:
        _waiting.fill()


def end_prepared() -> None:
    """End the prepared process, if there is one."""
    waiting = _waiting.taken()
    if waiting is not None:
        waiting.close()


class _Waiting:
    """Holds at most one prepared process."""

    def __init__(self) -> None:
        self._lock, self._process = threading.Lock(), None

    _process: QueryProcess | None

    def fill(self) -> None:
        with self._lock:
            if self._process is not None and not self._process.is_alive:
                self._process.close()
                self._process = None
            if self._process is None:
                self._process = QueryProcess()

    def taken(self) -> QueryProcess | None:
        with self._lock:
            process, self._process = self._process, None
        return process


_waiting = _Waiting()
atexit.register(end_prepared)

# Sql

MAX_ROWS = 100_000
TIMEOUT_S = 60.0
MAX_TIMEOUT_S = 86400.0
AT_ONCE = 2
"""Most queries to run at the same time."""
_running = threading.BoundedSemaphore(AT_ONCE)


def query(
    run: Path,
    sql: str,
    notes: list[str] | None = None,
    *,
    max_rows: int = MAX_ROWS,
    timeout_s: float = TIMEOUT_S,
    memory_bytes: int | None = None,
    known: Mapping[str, Callable[[], pa.Table | None]] = MappingProxyType({}),
) -> pa.Table:
    """Answer a query over the tables of a run with DuckDB, in a separate process with a time limit.

    The tables are `rows` (see `HISTORY`), `columns` (columns of rows in flight), `samples`,
    `metrics` and `timeline`, if the run has them. DuckDB can access nothing else: the query cannot
    read or write files, load extensions, or change these limits.

    Args:
        run: the folder of the run, or of its buffer.
        sql: the query.
        notes: gets a line for each part that could not be read, and one if the answer is cut.
        max_rows: most rows of the answer; the rest is cut.
        timeout_s: time limit in seconds, at most a day.
        memory_bytes: memory limit of DuckDB; None is DuckDB's default.
        known: tables that the caller has already read, by name; they replace the tables of the run.

    Returns:
        The answer; an empty table for a statement without one.

    Raises:
        UserError: DuckDB is not installed, cannot answer, or takes too long, or AT_ONCE other
            queries are running.
    """
    if find_spec("duckdb") is None:
        raise UserError("SQL needs DuckDB, which is not installed: pip install 'weft[inspect]'")
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise UserError(
            f"a query may take more than 0 s, and at most {MAX_TIMEOUT_S:g} s, not {timeout_s:g}"
        )
    if not sql.strip():
        raise UserError("the query is empty; such as: select count(*) from samples")
    if not _running.acquire(blocking=False):
        raise UserError(f"{AT_ONCE} queries are under way already; ask again when one of them has ended")
    try:
        notes = [] if notes is None else notes
        readers = {**_tables(run, notes), **known}
        named = {
            name: read for name, read in readers.items() if re.search(rf"\b{name}\b", sql, re.IGNORECASE)
        }
        found = {
            name: table
            for name, read in named.items()
            if (table := read()) is not None and table.num_columns
        }
        asked = {"sql": sql, "max_rows": max_rows, "timeout_s": timeout_s, "memory_bytes": memory_bytes}
        said, answer = ask(asked, found, timeout_s)
    finally:
        _running.release()
    if "error" in said:
        missing = [name for name in named if name not in found]
        lacks = f"; this run has no {' and no '.join(missing)} yet" if missing else ""
        raise UserError(f"{said['error']}; a run's tables are {', '.join(readers)}{lacks}")
    if said["cut"]:
        notes.append(f"the answer has more than {max_rows} rows; the others are left out")
    return answer


def _tables(run: Path, notes: list[str]) -> dict[str, Callable[[], pa.Table | None]]:
    """Return name -> reader of each table. A reader returns None if the run has no such table."""
    try:
        folder = buffer_folder(run)
    except UserError:
        if not is_run(run):
            raise
        folder = None  # without a log, query the other tables
    except OSError as error:
        notes.append(f"left out: {error}")
        folder = None
    run = folder.parent if folder is not None and folder.name == BUFFER else run
    return {
        "rows": lambda: (
            None if folder is None else _readable(folder, lambda path: history(path, notes), notes)
        ),
        "columns": lambda: (
            None if folder is None else _readable(folder, lambda path: columns(path, notes), notes)
        ),
        "samples": lambda: _readable(
            run / SAMPLES, lambda path: _with_length(recorded_or_archived(path.parent, notes)), notes
        ),
        "metrics": lambda: _readable(
            run / f"{METRICS}{PARQUET}", lambda path: read_metrics(path.parent), notes
        ),
        "timeline": lambda: _readable(
            run / f"{TIMELINE}{PARQUET}", lambda path: read_timeline(path.parent), notes
        ),
    }


def columns(folder: Path, notes: list[str] | None = None) -> pa.Table:
    """Return the columns of rows in flight: graph, sample_id, and all readable columns of nodes and
    sources.

    Args:
        folder: the folder of the buffer.
        notes: gets a line for each segment that could not be read.
    """
    notes = [] if notes is None else notes
    checker = Checker(keep_parts=True)
    read_log(folder, checker, notes)
    by_level: dict[tuple[str, int], list[CheckedRow]] = {}
    for row in checker.rows.in_flight.values():
        by_level.setdefault((row.group.graph.name, row.level), []).append(row)
    reader = _Reader(folder, notes)
    made = [
        reader.table(graph, rows, checker.sources.get(graph) if level == 0 else None)
        for (graph, level), rows in by_level.items()
    ]
    reader.close()
    empty = pa.table({"graph": pa.array([], pa.string()), "sample_id": pa.array([], pa.int64())})
    return pa.concat_tables([empty, *made], promote_options="permissive")


class _Reader:
    def __init__(self, folder: Path, notes: list[str]) -> None:
        self._folder, self._notes = noted_folder(folder) or folder / SEGMENTS, notes
        self._readers: dict[str, SegmentReader] = {}

    def table(self, graph: str, rows: Sequence[CheckedRow], source: Sequence[Any] | None) -> pa.Table:
        """Return the columns of rows of one level, in this order; null if a node has not written
        yet."""
        ids = [row.id for row in rows]
        table = pa.table({"graph": pa.array([graph] * len(ids)), "sample_id": pa.array(ids, pa.int64())})
        if source is not None and (found := self._read(Segment.from_json(source))) is not None:
            table = _with_columns(table, found.take(pa.array([row.group.position for row in rows])))
        for writer in dict.fromkeys(writer for row in rows for writer in row.parts or {}):
            parts = {tuple(row.parts[writer]): None for row in rows if row.parts and writer in row.parts}
            read = [t for part in parts if (t := self._read(Segment.from_json(part))) is not None]
            if read:
                written = pa.concat_tables(read, promote_options="permissive")
                places = {id: place for place, id in enumerate(written["sample_id"].to_pylist())}
                table = _with_columns(
                    table, written.take(pa.array([places.get(id) for id in ids], pa.int64()))
                )
        return table

    def _read(self, segment: Segment) -> pa.Table | None:
        own = self._folder / segment.node
        reader = self._readers.get(segment.node)
        if reader is None:
            reader = self._readers[segment.node] = SegmentReader(
                own if own.is_dir() else self._folder, segment.node
            )
        try:
            return pa.Table.from_batches([reader.read(segment).record])
        except (DamagedSegment, OSError, UserError) as error:
            self._notes.append(f"left out: {error}")
            return None

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()


def _with_columns(table: pa.Table, other: pa.Table) -> pa.Table:
    """Add the columns that a node wrote. They replace columns of the file with the same name."""
    for name in other.column_names:
        if name not in table.column_names:
            table = table.append_column(name, other[name])
        elif name != "sample_id":
            table = table.set_column(table.column_names.index(name), name, other[name])
    return table


def recorded_or_archived(run: Path, notes: list[str] | None = None) -> pa.Table | None:
    """Return the recorded samples of a run, or its archived samples, with graph and step; None if
    there are neither."""
    notes = [] if notes is None else notes
    found = recorded_samples(run, notes)
    return _readable(run / SAMPLES_ARCHIVE, read_parquet, notes) if found is None else found


def _with_length(samples: pa.Table | None) -> pa.Table | None:
    """Add the `length` of each response, as in the dashboard, unless there is a column of that
    name."""
    if samples is None or "response_ids" not in samples.column_names or "length" in samples.column_names:
        return samples
    return samples.append_column(
        "length", pc.fill_null(pc.call_function("list_value_length", [samples["response_ids"]]), 0)
    )


def _readable(path: Path, read: Callable[[Path], pa.Table | None], notes: list[str]) -> pa.Table | None:
    try:
        return read(path)
    except (pa.ArrowException, OSError) as error:
        notes.append(f"left out: {path}: {error}")
        return None
