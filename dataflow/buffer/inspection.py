"""Inspection: what a person asks the sample buffer of a run, while it goes on or afterwards.

It reads files only: the log, the segments of rows in flight, the samples, metrics and timeline that a run leaves behind.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..errors import DamagedSegment, UserError, nearest
from .journal import read_metrics, read_parquet, read_timeline
from .log import LogReader, Position
from .proof import Group, LogVerifier, Row, state_of
from .sample_buffer import BUFFER, LOG, SEGMENTS, restore
from .samples import samples as samples_of
from .segments import Segment, SegmentReader

"""The folder of the sample buffer in that of a run."""

_PART = pa.struct(
    [
        ("writer", pa.string()),
        ("node", pa.string()),
        ("file", pa.string()),
        ("offset", pa.int64()),
        ("num_bytes", pa.int64()),
        ("checksum", pa.uint64()),
    ]
)

HISTORY = pa.schema(
    [
        ("graph", pa.string()),
        ("sample_id", pa.int64()),
        ("group_id", pa.int64()),
        ("parent_id", pa.int64()),  # its own id where it was issued
        ("level", pa.string()),  # the source, or the node that made it
        ("round", pa.int64()),
        ("position", pa.int64()),  # of the source's row that it comes from
        ("tokens", pa.int64()),
        ("version", pa.int64()),  # oldest policy version in it
        ("state", pa.string()),  # waiting, leased, done or dropped
        ("reason", pa.string()),  # why it was dropped
        ("done", pa.list_(pa.string())),  # nodes that are through with it
        ("leased", pa.list_(pa.string())),  # nodes that hold it
        ("columns", pa.list_(_PART)),  # where the columns of a row in flight lie
    ]
)
"""What `history` says of each row."""


def buffer_folder(run: Path) -> Path:
    """The folder with the log of a run, given its directory or that folder itself.

    Raises:
        UserError: when there is none.
    """
    for folder in (run / BUFFER, run):
        if (folder / LOG).is_file():
            return folder
    if not run.is_dir():
        others = [p.name for p in run.parent.iterdir() if p.is_dir()] if run.parent.is_dir() else []
        raise UserError(f"there is no run {run}{nearest(run.name, others)}")
    raise UserError(f"{run} has no {BUFFER}/{LOG}: it is not the directory of a run, or of one without a sample buffer")


def history(folder: Path) -> pa.Table:
    """Every row that was ever issued or made, finished ones too, from the log in a buffer's folder; see `HISTORY`."""
    listing = _Listing()
    witness = LogVerifier(folder, on_retired=lambda group: listing.add_group(group, retired=True), keep_parts=True)
    for _ in witness.read():
        pass
    for group in witness.groups.values():
        listing.add_group(group, retired=False)
    return pa.table(listing.columns, schema=HISTORY).sort_by("sample_id")


class _Listing:
    """Rows of the log as columns."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {name: [] for name in HISTORY.names}
        self._names: dict[tuple[str, int], list[str]] = {}

    def add_group(self, group: Group, *, retired: bool) -> None:
        for row in (row for level in group.levels for row in level):
            if retired:
                self._add(group, row, "dropped" if row.away else "done")
            else:
                self._add(group, row, state_of(row))

    def _add(self, group: Group, row: Row, state: str) -> None:
        graph = group.graph
        in_flight = state in ("waiting", "leased")
        values = (
            graph.name,
            row.id,
            group.id,
            row.parent.id if row.parent else row.id,
            graph.level_names[row.level],
            group.round,
            row.position,
            row.tokens,
            row.version,
            state,
            row.reason or None,
            self._nodes(group, row.done),
            self._nodes(group, row.held),
            [(writer, *segment) for writer, segment in (row.parts or {}).items()] if in_flight else [],
        )
        for column, value in zip(self.columns.values(), values, strict=True):
            column.append(value)

    def _nodes(self, group: Group, mask: int) -> list[str]:
        graph = group.graph
        names = self._names.get((graph.name, mask))
        if names is None:
            names = self._names[graph.name, mask] = [n.name for n in graph.nodes if n.bit & mask]
        return names


def why(folder: Path, group_id: int, graph: str | None = None) -> str:
    """What a group waits for, a line per node that is not through with it; or when it was finished, and what became of it.

    Args:
        graph: where the group must be; None looks in all graphs (group ids are those of the run).
    """
    retired: list[tuple[Group, int, Any]] = []

    def remember(group: Group) -> None:
        if group.id == group_id:
            retired.append((group, witness.offset, witness.notes.get("step")))

    witness = LogVerifier(folder, on_retired=remember)
    for _ in witness.read():
        pass
    if graph is not None and graph not in witness.graphs:
        raise UserError(f"the run has no graph {graph!r}{nearest(graph, witness.graphs) or _choice(witness.graphs)}")
    group = witness.groups.get(group_id) or next((g for g, _, _ in retired), None)
    if group is None:
        number = witness.groups_issued
        those = f"groups 0 to {number - 1} were" if number else "none was"
        return f"group {group_id} was never issued; {those}"
    if graph not in (None, group.graph.name):
        raise UserError(f"group {group_id} is of graph {group.graph.name!r}, not {graph!r}")
    rows = [row for level in group.levels for row in level]
    root = rows[0]
    where = f"group {group_id} of graph {group.graph.name!r} (row {root.position} of the source, round {group.round}"
    for finished, offset, step in retired:
        after = f", after step {step}" if step is not None else ""
        fates = Counter(row.reason if row.away else "done" for row in (r for lv in finished.levels for r in lv))
        became = ", ".join(f"{n} {fate if fate == 'done' else f'dropped: {fate}'}" for fate, n in fates.items())
        return f"{where}) was finished at byte {offset} of the log{after}: of {len(rows)} rows {became}"
    ledger = restore(folder).ledgers[group.graph.name]
    return f"{where}, {len(rows)} rows) is in flight\n{ledger.why(group_id)}"


def steps_in_log(folder: Path, last: int, end: Position) -> list[dict[str, float]]:
    """What the log up to `end` still says of the steps 0 to `last` when their metrics are lost: how many samples each trained on.
    Where the log cannot be read, a row says its step alone."""
    rows: list[dict[str, float]] = [{"step": float(step)} for step in range(last + 1)]
    updates: set[tuple[str, str]] = set()
    leases: dict[tuple[str, int], tuple[str, int]] = {}
    trained: Counter[str] = Counter()
    reader = LogReader(folder / LOG)
    try:
        for record in reader:
            if reader.end.offset > end.offset:
                break
            match record["do"]:
                case "graph":
                    updates |= {
                        (record["graph"], n["name"])
                        for n in record["outline"]["nodes"]
                        if n["operation"]["takes"]["kind"] == "training batch"
                    }
                case "claim" if (record["graph"], record["node"]) in updates:
                    leases[record["graph"], record["lease"]] = record["node"], len(record["ids"])
                case "finish" if lease := leases.pop((record["graph"], record["lease"]), None):
                    trained[lease[0]] += lease[1]
                case "note" if record["key"] == "step" and record["value"] <= last:
                    rows[record["value"]]["samples"] = float(max(trained.values(), default=0))
                    trained.clear()
    except (OSError, LookupError, TypeError):  # without it
        pass
    return rows


# SQL

MAX_ROWS = 100_000
TIMEOUT_S = 60.0
_LOCKED = (
    "python_enable_replacements = false",  # else a name in the question may be a variable of this program
    "enable_external_access = false",  # files, other databases, extensions
    "lock_configuration = true",
)


def query(
    run: Path, sql: str, notes: list[str] | None = None, *, max_rows: int = MAX_ROWS, timeout_s: float = TIMEOUT_S
) -> pa.Table:
    """The answer of DuckDB to a question about a run.

    Its tables are `rows` (see `HISTORY`), `columns` (of rows in flight: what nodes wrote of them), `samples`, `metrics` and
    `timeline`, each where the run has it. DuckDB sees nothing else: it can neither read nor write a file, nor load an extension, nor
    be told otherwise by the question.

    Args:
        notes: gets a line for each part that could not be read, and one when the answer is cut.
        max_rows: the answer is cut after so many rows.
        timeout_s: the question is given up after so many seconds.

    Raises:
        UserError: when DuckDB is missing, cannot answer, or takes too long.
    """
    try:
        import duckdb
    except ImportError:
        raise UserError("SQL needs DuckDB, which is not installed: pip install 'weft[inspect]'") from None
    notes = [] if notes is None else notes
    folder = buffer_folder(run)
    run = folder.parent if folder.name == BUFFER else run
    tables: dict[str, Callable[[], pa.Table | None]] = {
        "rows": lambda: history(folder),
        "columns": lambda: columns(folder, notes),
        "samples": lambda: samples(run, notes),
        "metrics": lambda: _readable(run / "metrics.parquet", lambda path: read_metrics(path.parent), notes),
        "timeline": lambda: _readable(run / "timeline.parquet", lambda path: read_timeline(path.parent), notes),
    }
    with duckdb.connect(config={"temp_directory": ""}) as connection:
        known: list[str] = []
        for name, read in tables.items():
            if re.search(rf"\b{name}\b", sql, re.IGNORECASE) and (table := read()) is not None:
                connection.register(name, table)
                known.append(name)
        for setting in _LOCKED:
            connection.execute(f"SET {setting}")
        clock = threading.Timer(timeout_s, connection.interrupt)
        clock.start()
        try:
            answer = connection.sql(sql)
            if answer is None:  # it was no question
                return pa.table({})
            table = answer.limit(max_rows + 1).to_arrow_table()
            if len(table) > max_rows:
                notes.append(f"the answer has more than {max_rows} rows; the others are left out")
            return table.slice(0, max_rows)
        except duckdb.InterruptException:
            raise UserError(
                f"the question was given up after {timeout_s:g} s; ask for less (where ..., limit ...), or allow more time"
            ) from None
        except duckdb.Error as error:
            there = _choice(tables, "a run's tables are")
            missing = [n for n in tables if n not in known and re.search(rf"\b{n}\b", sql, re.IGNORECASE)]
            lacks = f"; this run has no {' and no '.join(missing)} yet" if missing else ""
            raise UserError(f"{error}{there}{lacks}") from None
        finally:
            clock.cancel()


def columns(folder: Path, notes: list[str] | None = None) -> pa.Table:
    """What nodes (and the source) wrote of the rows in flight: graph, sample_id, and every column that can be read."""
    notes = [] if notes is None else notes
    witness = LogVerifier(folder, keep_parts=True)
    for _ in witness.read():
        pass
    by_level: dict[tuple[str, int], list[Row]] = {}
    for row in witness.rows.values():
        by_level.setdefault((row.group.graph.name, row.level), []).append(row)
    reader = _Reader(folder, notes)
    made = [
        reader.table(graph, rows, witness.sources.get(graph) if level == 0 else None)
        for (graph, level), rows in by_level.items()
    ]
    reader.close()
    empty = pa.table({"graph": pa.array([], pa.string()), "sample_id": pa.array([], pa.int64())})
    return pa.concat_tables([empty, *made], promote_options="permissive")


class _Reader:
    """Segments as tables, wherever on this machine they lie."""

    def __init__(self, folder: Path, notes: list[str]) -> None:
        self._folder, self._notes = folder / SEGMENTS, notes
        self._readers: dict[str, SegmentReader] = {}

    def table(self, graph: str, rows: Sequence[Row], source: Sequence[Any] | None) -> pa.Table:
        """The columns of rows of one level, in their order; null where a node has not written yet."""
        ids = [row.id for row in rows]
        table = pa.table({"graph": pa.array([graph] * len(ids)), "sample_id": pa.array(ids, pa.int64())})
        if source is not None and (found := self._read(Segment.from_json(source))) is not None:
            table = _with_columns(table, found.take(pa.array([row.position for row in rows])))
        for writer in dict.fromkeys(writer for row in rows for writer in row.parts or {}):
            parts = {tuple(row.parts[writer]): None for row in rows if row.parts and writer in row.parts}
            read = [t for part in parts if (t := self._read(Segment.from_json(part))) is not None]
            if read:
                written = pa.concat_tables(read, promote_options="permissive")
                places = {id: place for place, id in enumerate(written["sample_id"].to_pylist())}
                table = _with_columns(table, written.take(pa.array([places.get(id) for id in ids], pa.int64())))
        return table

    def _read(self, segment: Segment) -> pa.Table | None:
        own = self._folder / segment.node
        reader = self._readers.get(segment.node)
        if reader is None:
            reader = self._readers[segment.node] = SegmentReader(own if own.is_dir() else self._folder, segment.node)
        try:
            return pa.Table.from_batches([reader.read(segment).record])
        except (DamagedSegment, OSError, UserError) as error:
            self._notes.append(f"left out: {error}")
            return None

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()


def _with_columns(table: pa.Table, other: pa.Table) -> pa.Table:
    for name in other.column_names:
        if name not in table.column_names:
            table = table.append_column(name, other[name])
    return table


def samples(run: Path, notes: list[str] | None = None) -> pa.Table | None:
    """The samples that a run recorded, with the graph and step of each, or its archive; None where it recorded none."""
    notes = [] if notes is None else notes
    found = samples_of(run, notes)
    return _readable(run / "samples.parquet", read_parquet, notes) if found is None else found


def _readable(path: Path, read: Callable[[Path], pa.Table | None], notes: list[str]) -> pa.Table | None:
    try:
        return read(path)
    except (pa.ArrowException, OSError) as error:
        notes.append(f"left out: {path}: {error}")
        return None


def _choice(names: Iterable[str], verb: str = "there are") -> str:
    return f"; {verb} {', '.join(names) or 'none'}"


# As text


def as_text(table: pa.Table, *, limit: int = 20, width: int = 32) -> str:
    """The first rows of a table for a terminal, long values cut.

    >>> print(as_text(pa.table({"level": ["prompts", "generate"], "tokens": [3, None], "done": [["generate"], []]})))
    level     tokens  done
    prompts        3  generate
    generate       -
    """
    shown = [{name: _plain(value, width) for name, value in row.items()} for row in table.slice(0, limit).to_pylist()]
    widths = {name: max([len(name), *(len(row[name]) for row in shown)]) for name in table.column_names}
    right = {f.name for f in table.schema if pa.types.is_integer(f.type) or pa.types.is_floating(f.type)}
    lines = [
        "  ".join(text.rjust(widths[name]) if name in right else text.ljust(widths[name]) for name, text in row.items())
        for row in [{name: name for name in table.column_names}, *shown]
    ]
    if len(table) > limit:
        lines.append(f"... {len(table) - limit} more")
    return "\n".join(line.rstrip() for line in lines)


def _plain(value: Any, width: int) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        text = ", ".join(v["writer"] if isinstance(v, dict) and "writer" in v else _plain(v, width) for v in value)
    elif isinstance(value, float):
        text = f"{value:.6g}"
    else:
        text = str(value).replace("\n", "\\n")
    return text if len(text) <= width else f"{text[: width - 3]}..."
