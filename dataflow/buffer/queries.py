"""`weft buffer table`, `weft buffer why` and `weft buffer sql`: list all rows of a run, explain why
a group waits, and query a run in SQL with DuckDB. They only read, so the run may be active."""

from __future__ import annotations

import atexit
import re
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..child_process import ChildProcess
from ..errors import DamagedSegment, UserError, nearest
from ..runs.files import (
    BUFFER,
    LOG,
    METRICS,
    PARQUET,
    SAMPLES,
    SAMPLES_ARCHIVE,
    SEGMENTS,
    TIMELINE,
    is_run,
)
from ..runs.samples import samples as recorded_samples
from ..runs.tables import read_metrics, read_parquet, read_timeline
from .check import read_log
from .log_rules import Checker
from .logged_rows import LoggedGroup, LoggedRow
from .recovery import restore
from .scratch import noted_folder
from .segments import Segment, SegmentReader

# Table and why

_SEGMENT = pa.struct(
    {
        "writer": pa.string(),
        "node": pa.string(),
        "file": pa.string(),
        "offset": pa.int64(),
        "num_bytes": pa.int64(),
        "checksum": pa.uint64(),
    }
)
HISTORY = pa.schema(
    [
        ("graph", pa.string()),
        ("sample_id", pa.int64()),
        ("group_id", pa.int64()),
        ("parent_id", pa.int64()),  # the row's own id if it is a row of the source
        ("level", pa.string()),  # the source, or the node that created the row
        ("step", pa.int64()),
        ("position", pa.int64()),  # of the source row that it descends from
        ("tokens", pa.int64()),
        ("version", pa.int64()),  # policy version of the row
        ("state", pa.string()),  # waiting, leased, done or dropped
        ("reason", pa.string()),  # why it was dropped
        ("done", pa.list_(pa.string())),  # nodes that have finished the row
        ("leased", pa.list_(pa.string())),  # nodes that lease the row
        ("columns", pa.list_(_SEGMENT)),  # segments with its columns, while it is in flight
    ]
)
"""Columns of the table that `history` returns."""


def buffer_folder(run: Path) -> Path:
    """Return the folder with a run's log, given that folder or the run's. Raises a UserError if
    there is no log."""
    for folder in (run / BUFFER, run):
        if (folder / LOG).is_file():
            return folder
    if not run.is_dir():
        others = [p.name for p in run.parent.iterdir() if p.is_dir()] if run.parent.is_dir() else []
        raise UserError(f"there is no run {run}{nearest(run.name, others)}")
    raise UserError(
        f"{run} has no {BUFFER}/{LOG}: it is not the directory of a run, or of one without a sample buffer"
    )


def history(folder: Path, notes: list[str] | None = None) -> pa.Table:
    """Return all rows of a run, including finished ones, with the columns `HISTORY`. Adds a line to
    `notes` for each gap in the log."""
    columns: dict[str, list[Any]] = {name: [] for name in HISTORY.names}

    def list_finished(group: LoggedGroup, rows: Mapping[int, LoggedRow]) -> None:
        dropped = group.graph.dropped_of(group)
        for id in set[int]().union(*group.levels):
            list_row(rows[id], "dropped" if id in dropped else "done")

    def list_row(row: LoggedRow, state: str) -> None:
        group, graph = row.group, row.group.graph
        nodes = graph.on_level[row.level]
        in_flight = state in ("waiting", "leased")
        values = (
            graph.name,
            row.id,
            group.id,
            row.parent.id if row.parent else row.id,
            graph.level_names[row.level],
            group.issued_in,
            group.position,
            row.tokens,
            row.version,
            state,
            group.lost or row.reason or None,
            [node.name for node in nodes if row.id in node.done],
            [node.name for node in nodes if row.id in node.leased],
            [(writer, *segment) for writer, segment in (row.parts or {}).items()] if in_flight else [],
        )
        for column, value in zip(columns.values(), values, strict=True):
            column.append(value)

    checker = Checker(on_finished=list_finished, keep_parts=True)
    read_log(folder, checker, [] if notes is None else notes)
    for row in checker.rows.in_flight.values():
        list_row(row, row.group.graph.state(row))
    return pa.table(columns, schema=HISTORY).sort_by("sample_id")


def why(folder: Path, group_id: int, graph: str | None = None) -> str:
    """Explain how a group ended or, with one line per unfinished node, what it waits for. Lines
    about gaps in the log follow. Raises a UserError if the graph is unknown or not the group's."""
    ended: list[tuple[str, str]] = []

    def note_end(group: LoggedGroup, rows: Mapping[int, LoggedRow]) -> None:
        if group.id == group_id:
            ended.append((group.graph.name, f"{_place(group)}) {_end(group, rows, checker)}"))

    checker = Checker(on_finished=note_end)
    notes: list[str] = []
    read_log(folder, checker, notes)
    return "\n".join([_why(folder, checker, ended, group_id, graph), *notes])


def _why(
    folder: Path, checker: Checker, ended: list[tuple[str, str]], group_id: int, graph: str | None
) -> str:
    if graph is not None and graph not in checker.graphs:
        there = nearest(graph, checker.graphs) or f"; there are {', '.join(checker.graphs) or 'none'}"
        raise UserError(f"the run has no graph {graph!r}{there}")
    group = checker.rows.groups.get(group_id)
    if group is None and not ended:
        number = checker.rows.next_group
        return f"group {group_id} was never issued; {f'groups 0 to {number - 1} were' if number else 'none was'}"
    of = group.graph.name if group is not None else ended[0][0]
    if graph not in (None, of):
        raise UserError(f"group {group_id} is of graph {of!r}, not {graph!r}")
    if group is None:
        return ended[0][1]
    # Only a ledger knows why rows wait, so restore it.
    waits = restore(folder).ledgers[of].live.waits_for(group_id)
    return f"{_place(group)}, {sum(map(len, group.levels))} rows) is in flight\n{waits}"


def _place(group: LoggedGroup) -> str:
    return f"group {group.id} of graph {group.graph.name!r} (row {group.position} of the source, step {group.issued_in}"


def _end(group: LoggedGroup, rows: Mapping[int, LoggedRow], checker: Checker) -> str:
    step, dropped = checker.notes.get("step"), group.graph.dropped_of(group)
    after = f", after step {step}" if step is not None else ""
    ids = [id for level in group.levels for id in sorted(level)]
    fates = Counter(
        f"dropped: {group.lost or rows[id].reason}" if id in dropped else "done" for id in ids
    )
    became = ", ".join(f"{number} {fate}" for fate, number in fates.items())
    return f"was finished at byte {checker.at} of the log{after}: of {len(ids)} rows {became}"


# Query process
#
#     prepared ──run──> asked ──> answered, or ended by the kernel
#         └── no query within PREPARED_S, or its parent ends: gone
#
# A process (`sql_process.py`) takes about 0.3 s to start, so `prepare` can start one in advance,
# which uses about 100 MB while it waits.

PREPARED_S = 600
"""[s] How long a prepared process waits for a query."""
GRACE_S = 5.0
"""[s] How long a process may take to end after the query's time limit."""
TAKEN_S = 60.0
"""[s] How long a process may take to read the query."""
_PROGRAM = Path(__file__).with_name("sql_process.py")


class _QueryProcess(ChildProcess):
    """A process that answers one query."""

    def __init__(self) -> None:
        # Each malloc arena reserves address space, which is limited (`SPARE_BYTES`).
        environment = {"MALLOC_ARENA_MAX": "2"}
        super().__init__(_PROGRAM, str(PREPARED_S), errors=subprocess.DEVNULL, environment=environment)

    def run_query(
        self, asked: Mapping[str, Any], tables: Mapping[str, pa.Table], timeout_s: float
    ) -> tuple[dict[str, Any], pa.Table] | None:
        """Answer a query over these tables, and end the process. Return None if the process ended
        before it read the query. Raises a UserError if the query takes too much time or memory."""
        try:
            try:
                self.ask({**asked, "tables": list(tables)}, TAKEN_S)
            except (EOFError, TimeoutError):
                return None
            with suppress(BrokenPipeError):  # the reply below gives the reason
                for table in tables.values():
                    with pa.ipc.new_stream(self.stdin, table.schema) as stream:
                        stream.write_table(table)
                self.stdin.flush()
            try:
                found = self.receive(timeout_s + GRACE_S)
                return found, pa.ipc.open_stream(self.stdout).read_all()
            except (EOFError, TimeoutError, pa.ArrowInvalid):  # the kernel ended the process
                self.wait(GRACE_S)
        finally:
            self.kill()
        if self.exit_code in (-signal.SIGALRM, -signal.SIGKILL):
            raise UserError(
                f"the query was stopped after {timeout_s:g} s; ask for less (where ..., limit ...), or allow more time"
            )
        raise UserError(
            f"the query ended its process ({self.status}): most likely it takes too much memory; "
            "ask for less (where ..., limit ...)"
        )


def ask(
    asked: Mapping[str, Any], tables: Mapping[str, pa.Table], timeout_s: float
) -> tuple[dict[str, Any], pa.Table]:
    """Answer a query in the prepared process or a new one (see `_QueryProcess.run_query`)."""
    waiting = _take_prepared()
    answered = None if waiting is None else waiting.run_query(asked, tables, timeout_s)
    # The prepared process may have ended after PREPARED_S.
    if answered is None:
        answered = _QueryProcess().run_query(asked, tables, timeout_s)
    if answered is None:
        raise UserError(
            "the process of the query ended before it read the query; check that this machine has free memory"
        )
    return answered


_lock = threading.Lock()
_prepared: list[_QueryProcess] = []
"""The process that waits for a query, if there is one."""


def prepare() -> None:
    """Start a process for the next query, if none waits and DuckDB is installed."""
    if find_spec("duckdb") is None:
        return
    with _lock:
        # Release the pipes of a process that ended by itself.
        if _prepared and _prepared[0].exit_code is not None:
            _prepared.pop().kill()
        if not _prepared:
            _prepared.append(_QueryProcess())


def _take_prepared() -> _QueryProcess | None:
    with _lock:
        return _prepared.pop() if _prepared else None


def end_prepared() -> None:
    waiting = _take_prepared()
    if waiting is not None:
        waiting.kill()


atexit.register(end_prepared)

# SQL

MAX_ROWS = 100_000
TIMEOUT_S = 60.0
MAX_TIMEOUT_S = 86400.0
AT_ONCE = 2
"""Maximum number of concurrent queries."""
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
    """Run an SQL query over a run's tables with DuckDB, in a separate process. The tables are
    `rows` (see `HISTORY`), `columns` (columns of rows in flight), `samples`, `metrics` and
    `timeline`, as far as the run has them. The query cannot read or write files, load extensions,
    or change its limits.

    Args:
        run: folder of the run or its buffer.
        notes: list to which to add a line for each unreadable part, and if the answer is cut.
        max_rows: maximum number of rows in the answer. Further rows are cut.
        timeout_s: [s] time limit, at most a day.
        memory_bytes: [bytes] memory limit of DuckDB. Default: DuckDB's own.
        known: readers of tables that replace the run's tables, keyed by table name.

    Raises:
        UserError: DuckDB is not installed, the query fails or takes too long, or AT_ONCE other
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
        # A match in a string or comment only costs reading a table.
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
    """Map table names to readers, which return None if there is no table."""
    try:
        folder = buffer_folder(run)
    except UserError:
        if not is_run(run):
            raise
        folder = None  # the run has no log, so only the other tables can be queried
    except OSError as error:
        notes.append(f"left out: {error}")
        folder = None
    run = folder.parent if folder is not None and folder.name == BUFFER else run

    def of_log(read: Callable[[Path, list[str]], pa.Table]) -> pa.Table | None:
        return None if folder is None else _readable(folder, lambda path: read(path, notes), notes)

    def of_run(name: str, read: Callable[[Path], pa.Table | None]) -> pa.Table | None:
        return _readable(run / name, lambda path: read(path.parent), notes)

    return {
        "rows": lambda: of_log(history),
        "columns": lambda: of_log(columns),
        "samples": lambda: of_run(SAMPLES, lambda run: _with_length(recorded_or_archived(run, notes))),
        "metrics": lambda: of_run(f"{METRICS}{PARQUET}", read_metrics),
        "timeline": lambda: of_run(f"{TIMELINE}{PARQUET}", read_timeline),
    }


def columns(folder: Path, notes: list[str] | None = None) -> pa.Table:
    """Return the columns of rows in flight. Adds a line to `notes` for each unreadable segment."""
    notes = [] if notes is None else notes
    checker = Checker(keep_parts=True)
    read_log(folder, checker, notes)
    by_level: dict[tuple[str, int], list[LoggedRow]] = {}
    for row in checker.rows.in_flight.values():
        by_level.setdefault((row.group.graph.name, row.level), []).append(row)
    reader = _Reader(folder, notes)
    made = [
        reader.table(graph, rows, checker.sources.get(graph) if level == 0 else None)
        for (graph, level), rows in by_level.items()
    ]
    empty = pa.table({"graph": pa.array([], pa.string()), "sample_id": pa.array([], pa.int64())})
    return pa.concat_tables([empty, *made], promote_options="permissive")


class _Reader:
    def __init__(self, folder: Path, notes: list[str]) -> None:
        self._folder, self._notes = noted_folder(folder) or folder / SEGMENTS, notes
        self._readers: dict[str, SegmentReader] = {}

    def table(self, graph: str, rows: Sequence[LoggedRow], source: Sequence[Any] | None) -> pa.Table:
        """Return the columns of rows on one level. Values that are not written yet are null."""
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
                own = written.take(pa.array([places.get(id) for id in ids], pa.int64()))
                table = _with_columns(table, own)
        return table

    def _read(self, segment: Segment) -> pa.Table | None:
        own = self._folder / segment.node
        if segment.node not in self._readers:
            folder = own if own.is_dir() else self._folder
            self._readers[segment.node] = SegmentReader(folder, segment.node)
        try:
            return pa.Table.from_batches([self._readers[segment.node].read(segment).record])
        except (DamagedSegment, OSError, UserError) as error:
            self._notes.append(f"left out: {error}")
            return None


def _with_columns(table: pa.Table, other: pa.Table) -> pa.Table:
    """Add a node's columns, which replace the file's columns with the same name."""
    for name in other.column_names:
        if name not in table.column_names:
            table = table.append_column(name, other[name])
        elif name != "sample_id":
            table = table.set_column(table.column_names.index(name), name, other[name])
    return table


def recorded_or_archived(run: Path, notes: list[str] | None = None) -> pa.Table | None:
    """Return a run's recorded or archived samples, with graph and step, if there are any."""
    notes = [] if notes is None else notes
    found = recorded_samples(run, notes)
    return _readable(run / SAMPLES_ARCHIVE, read_parquet, notes) if found is None else found


def _with_length(samples: pa.Table | None) -> pa.Table | None:
    """Add the column `length`, the number of tokens in each response, unless it exists."""
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
