"""History of rows, read from the log: all rows that a run issued or made, and the state of a group.

This is `weft buffer table` and `weft buffer why`. It only reads, and also works during the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..errors import UserError, nearest
from ..runs.files import BUFFER, LOG
from .check import read_log
from .checked_rows import CheckedGroup, CheckedRow
from .checker import Checker
from .ledger import Ledger
from .recovery import restore
from .rows import RowState

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
        ("parent_id", pa.int64()),  # its own id if it was issued
        ("level", pa.string()),  # the source, or the node that made it
        ("step", pa.int64()),
        ("position", pa.int64()),  # row of the source that it comes from
        ("tokens", pa.int64()),
        ("version", pa.int64()),  # oldest policy version in it
        ("state", pa.string()),  # waiting, leased, done or dropped
        ("reason", pa.string()),  # why it was dropped
        ("done", pa.list_(pa.string())),  # nodes that have finished it
        ("leased", pa.list_(pa.string())),  # nodes that hold it
        ("columns", pa.list_(_PART)),  # segments of a row in flight
    ]
)
"""Columns of the table that `history` returns."""


def buffer_folder(run: Path) -> Path:
    """Return the folder with the log of a run, given the run directory or that folder itself.

    Raises:
        UserError: there is none.
    """
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
    """Return all rows that a run issued or made, including finished ones, from the log in a
    buffer's folder (see `HISTORY`).

    Args:
        folder: the folder of the buffer.
        notes: gets a line for each gap in the log.
    """
    listing = _Listing()
    checker = Checker(on_finished=listing.add_finished, keep_parts=True)
    read_log(folder, checker, [] if notes is None else notes)
    for row in checker.rows.in_flight.values():
        listing.add(row, row.group.graph.state(row))
    return pa.table(listing.columns, schema=HISTORY).sort_by("sample_id")


class _Listing:
    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {name: [] for name in HISTORY.names}

    def add_finished(self, group: CheckedGroup, rows: Mapping[int, CheckedRow]) -> None:
        dropped = group.graph.dropped_of(group)
        for id in set[int]().union(*group.levels):
            self.add(rows[id], "dropped" if id in dropped else "done")

    def add(self, row: CheckedRow, state: str) -> None:
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
        for column, value in zip(self.columns.values(), values, strict=True):
            column.append(value)


def why(folder: Path, group_id: int, graph: str | None = None) -> str:
    """Explain the state of a group: one line per node that has not finished it, or how it ended. A
    last line reports gaps in the log.

    Args:
        graph: the graph of the group; None searches all graphs (group ids are unique in the run).

    Raises:
        UserError: there is no such graph, or the group belongs to another graph.
    """
    ended: list[tuple[str, str]] = []

    def note_end(group: CheckedGroup, rows: Mapping[int, CheckedRow]) -> None:
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
    waits = waits_for(restore(folder).ledgers[of], group_id)
    return f"{_place(group)}, {sum(map(len, group.levels))} rows) is in flight\n{waits}"


def _place(group: CheckedGroup) -> str:
    return f"group {group.id} of graph {group.graph.name!r} (row {group.position} of the source, step {group.issued_in}"


def _end(group: CheckedGroup, rows: Mapping[int, CheckedRow], checker: Checker) -> str:
    step, dropped = checker.notes.get("step"), group.graph.dropped_of(group)
    after = f", after step {step}" if step is not None else ""
    ids = [id for level in group.levels for id in sorted(level)]
    fates = Counter(
        f"dropped: {group.lost or rows[id].reason}" if id in dropped else "done" for id in ids
    )
    became = ", ".join(f"{number} {fate}" for fate, number in fates.items())
    return f"was finished at byte {checker.at} of the log{after}: of {len(ids)} rows {became}"


def waits_for(ledger: Ledger, group_id: int) -> str:
    """Return what a group waits for, one line per node that has not finished it."""
    group = ledger.live.groups.get(group_id)
    if group is None:
        return f"group {group_id} is not in flight: it is finished, or it was never issued"
    lines: list[str] = []
    for i, node in enumerate(ledger.graph.nodes):
        rows = group.rows(node.level)
        left = [r for r in rows if r.state(i) not in (RowState.DONE, RowState.DROPPED)]
        if not left and group.complete[node.level]:
            continue
        leased = sum(1 for r in left if r.state(i) is RowState.LEASED)
        missing = sorted({a for r in left for a in node.after if not ledger.live.wiring.has_passed(r, a)})
        if not group.complete[node.level]:
            maker = ledger.graph.levels[node.level]
            missing.append(f"the rest of the group from {maker!r}")
        oldest = min((r.version for r in left if r.version is not None and r.version >= 0), default=None)
        if node.operation.behind and not group.rested:
            missing.append("all else to be done with the group")
        too_old = group.too_old >> i & 1 and f"too old, of version {oldest}; waits for a larger bound"
        state = too_old or (
            f"{leased} leased"
            if leased
            else f"waits for {', '.join(missing)}"
            if missing
            else "ready, not claimed"
        )
        lines.append(f"{node.name}: {len(left)} of {len(rows)} rows to do; {state}")
    return "\n".join(lines)
