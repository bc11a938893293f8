"""Recovery: restore the ledgers from the log and its checkpoints."""

from __future__ import annotations

import json
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..column import ON_DEMAND, RESPONSE_LOGPROBS
from ..errors import LeaseError, RecoveryError, UserError, nearest
from ..graph import SOURCE, TRAIN, Graph, Node
from ..operation import Shape
from ..runs.files import LOG, Disk
from ..runs.log import LogReader, Position, Record, described_graph, has_position, line_of
from ..safe_files import open_file, parse_json
from .leases import Lease, Published, Spread
from .ledger import REQUEST, Ledger
from .live_rows import Readiness
from .rows import Group, Ids, LevelRows, StoredPart, Wiring
from .segments import Segment

# Ledger state
#
# A checkpoint stores rows, their masks and parts, and open leases. Loading computes counts and
# readiness. Rows are saved as columns, so that loading does no work per row.


GROUP_FIELDS = ("issued_in", "trained_in", "version", "offered", "closed")
ROW_COLUMNS = ("ids", "parents", "tokens", "versions")


def save(ledger: Ledger) -> Iterator[Record]:
    """Yield the records from which `load` restores the ledger: totals, then groups, then leases."""
    live, parts = ledger.live, ledger.parts
    yield {
        "do": "ledger",
        "graph": ledger.name,
        "source": ledger.source.to_json() if ledger.source else None,
        "prompts": ledger.prompts_issued,
        "issued": live.issued,
        "done": live.done,
        "dropped": dict(live.dropped),
        "stale": dict(ledger.stale),
        "largest": live.largest_group,
        "bytes": parts.published_bytes,
        "finished_bytes": parts.finished_bytes,
        "largest_bytes": parts.largest_group_bytes,
        "token": ledger.leases.next_token,
    }
    numbers: dict[StoredPart, int] = {}
    for group in live.groups.values():
        yield _group_record(ledger, group, numbers)
    for lease in ledger.leases:
        # Leave out finished groups.
        held = [[g.id, f"{mask:x}"] for g, _, mask, _ in lease.taken if g.id in live.groups]
        staged = [[ids, made.lists, where and where.to_json()] for ids, made, where in lease.staged]
        yield {
            "do": "lease",
            "graph": ledger.name,
            "token": lease.token,
            "node": lease.node.name,
            "held": held,
            "open": list(lease.open),
            "holder": lease.holder,
            "given_up": sorted(lease.given_up),
            "masked": sorted(lease.masked),
            "staged": staged,
        }


def _group_record(ledger: Ledger, group: Group, numbers: dict[StoredPart, int]) -> Record:
    """Return a group's record, with the parts not in `numbers` yet, and number these parts."""
    parts: list[Any] = []
    for rows in group.levels:
        for _, column in sorted(rows.parts.items()):
            for part in dict.fromkeys(column):
                if part is not None and part not in numbers:
                    numbers[part] = len(numbers)
                    parts.append([part.segment.to_json(), part.written])
    on_level = ledger.live.wiring.on_level
    return {
        "do": "group",
        "graph": ledger.name,
        **{name: getattr(group, name) for name in ("id", "position", "tokens", *GROUP_FIELDS)},
        "held": group.too_old,
        "order": [[i, places] for i, places in (group.order or {}).items()],
        "parts": parts,
        "levels": [
            _level_record(r, nodes, numbers) for r, nodes in zip(group.levels, on_level, strict=True)
        ],
    }


def _level_record(rows: LevelRows, nodes: Iterable[int], numbers: dict[StoredPart, int]) -> Record:
    return {
        **{name: getattr(rows, name) for name in ROW_COLUMNS},
        "states": [[i, *(f"{mask[i]:x}" for mask in _masks(rows))] for i in nodes],
        "parts": [
            [i, *(None if part is None else numbers[part] for part in column)]
            for i, column in sorted(rows.parts.items())
        ],
        "aside": [[*place, first] for place, first in sorted((rows.aside or {}).items())],
    }


def _masks(rows: LevelRows) -> tuple[list[int], ...]:
    """Return the masks that a checkpoint stores, in the order of its record."""
    return rows.done, rows.offered, rows.leased, rows.skipped, rows.cancelled


def load(ledger: Ledger, records: Iterable[Record]) -> None:
    """Restore a new ledger from the records of `save`. Leases lose their deadlines."""
    live, parts = ledger.live, list[StoredPart]()
    for record in records:
        match record["do"]:
            case "ledger":
                _load_totals(ledger, record)
            case "group":
                parts += [StoredPart(Segment.from_json(s), written, 0) for s, written in record["parts"]]
                _load_group(ledger, record, parts)
            case "lease":
                _load_lease(ledger, record)
    for part in parts:
        ledger.parts.restore(part)
    live.readiness = Readiness.of(live.wiring, live.groups.values())


def _load_totals(ledger: Ledger, record: Record) -> None:
    live, parts = ledger.live, ledger.parts
    ledger.source = Segment.from_json(record["source"]) if record["source"] else None
    ledger.prompts_issued = record["prompts"]
    live.issued, live.done = record["issued"], record["done"]
    live.dropped, ledger.stale = Counter(record["dropped"]), Counter(record["stale"])
    live.largest_group, parts.published_bytes = record["largest"], record["bytes"]
    parts.finished_bytes, parts.largest_group_bytes = record["finished_bytes"], record["largest_bytes"]
    ledger.leases.next_token = record["token"]


def _load_lease(ledger: Ledger, record: Record) -> None:
    node, groups = ledger.graph[record["node"]], ledger.live.groups
    held = [(groups[id], int(mask, 16)) for id, mask in record["held"]]
    # No deadline: holders are called again or are gone.
    lease = Lease.of(record["token"], node, held, holder=record["holder"])
    lease.masked, lease.given_up = frozenset(record["masked"]), set(record["given_up"])
    lease.open = dict.fromkeys(record["open"])
    lease.staged = [
        (ids, Published.of_lists(*lists), Segment.from_json(s) if s else None)
        for ids, lists, s in record["staged"]
    ]
    ledger.leases.grant(lease)


def _load_group(ledger: Ledger, record: Record, parts: list[StoredPart]) -> None:
    live, number = ledger.live, len(ledger.graph.nodes)
    ids = record["id"], record["position"], record["issued_in"]
    group = Group(*ids, record["tokens"], live.wiring.above, number)
    for name in GROUP_FIELDS:
        setattr(group, name, record[name])
    group.too_old = record["held"]
    for rows, saved in zip(group.levels, record["levels"], strict=True):
        for name in ROW_COLUMNS:
            setattr(rows, name, saved[name])
        for i, *masks in saved["states"]:
            for mask, value in zip(_masks(rows), masks, strict=True):
                mask[i] = int(value, 16)
        for i, *numbers in saved["parts"]:
            rows.parts[i] = [None if k is None else parts[k] for k in numbers]
            for k in numbers:
                if k is not None:
                    parts[k].in_flight += 1
        rows.aside = {(place, level): first for place, level, first in saved["aside"]} or None
        live.group_of.update(dict.fromkeys(rows.ids, group))
    group.order = dict(record["order"]) or None
    count(live.wiring, group)
    live.restore(group)


def count(wiring: Wiring, group: Group) -> None:
    """Set a group's counts from the states of its rows."""
    group.open = group.behind = group.claimed = 0
    for i, node in enumerate(wiring.graph.nodes):
        rows = group.levels[node.level]
        todo = rows.awaiting(i).bit_count()
        group.open += todo
        group.behind += todo * wiring.behind[i]
        if wiring.takes_groups[i] and rows.done[i] | rows.leased[i]:
            group.claimed |= 1 << i
    for level in range(wiring.num_levels):  # parents come before children
        above = wiring.above[level]
        group.complete[level] = level == SOURCE or (
            group.complete[above] and not group.levels[above].awaiting(wiring.maker[level])
        )
    group.rested = group.open == group.behind and all(group.complete)


# Checkpoint file


FORMAT = 2
"""Format of a checkpoint's records. Recovery skips checkpoints of other formats."""


def write_checkpoint(
    path: Path, position: Position, records: Iterable[Record], *, disk: Disk | None = None
) -> None:
    """Write a checkpoint file atomically, with the checksums of a log. The first line holds the log
    position of the state, the last line the number of records."""
    checksum, lines = 0, []
    for record in [_start(position), *records]:
        lines.append(line_of(record, checksum))
        checksum = int(lines[-1][:8], 16)
    lines.append(line_of({"do": "end", "records": len(lines) - 1}, checksum))
    (disk or Disk()).write_whole(path, b"".join(lines))


def read_checkpoint(path: Path) -> tuple[Position, list[dict[str, Any]]]:
    """Read the position and records of a checkpoint. Raises a ValueError that names the file if it
    is damaged or has another format."""
    reader = LogReader(path)
    records = list(reader)
    if reader.damage:
        raise ValueError(reader.damage)
    if len(records) < 2 or records[-1].get("do") != "end":
        raise ValueError(f"{path}: the checkpoint has no end after {reader.end.offset} bytes")
    first, *state, last = records
    position = _position_of(path, first)
    if last["records"] != len(state):
        raise ValueError(f"{path}: the checkpoint has {len(state)} records, not {last['records']}")
    return position, state


def is_sound_checkpoint(path: Path, position: Position) -> bool:
    """Return whether a file is a complete checkpoint of this position. Verifies all checksums, but
    only parses the first and last record."""
    first = last = b""
    checksum, number = 0, 0
    try:
        with open_file(path) as file:
            for line in file:
                checksum = zlib.crc32(line[9:-1], checksum)
                if not line.endswith(b"\n") or line[:9] != b"%08x " % checksum:
                    return False
                first, last, number = first or line, line, number + 1
    except OSError:
        return False
    ended = {"do": "end", "records": number - 2}
    return (
        number > 1
        and parse_json(first[9:], path) == _start(position)
        and parse_json(last[9:], path) == ended
    )


def checkpoint_position(path: Path) -> Position:
    """Read a checkpoint's position. Raises the errors of `read_checkpoint`."""
    return _position_of(path, next(iter(LogReader(path)), {}))


def _start(position: Position) -> Record:
    place = {"offset": position.offset, "checksum": position.checksum}
    return {"do": "checkpoint", **place, "format": FORMAT}


def _position_of(path: Path, first: Record) -> Position:
    if first.get("do") != "checkpoint":
        raise ValueError(f"{path} does not begin with a checkpoint record")
    found = first.get("format", 1)
    if found != FORMAT:
        which = "an earlier" if found < FORMAT else "a later"
        raise ValueError(
            f"{path} has format {found}, of {which} version of Weft; this version reads format {FORMAT}"
        )
    return Position(first["offset"], first["checksum"])


# Files of the sample buffer
#
# runs/NAME/buffer/ledger.log                       recent events, at least since a kept checkpoint
# runs/NAME/buffer/history/ledger-*.log.zst         earlier events
# runs/NAME/buffer/ledger-000000123456.checkpoint   the state at this position of the log
# runs/NAME/buffer/segments/NODE/                   columns of rows in flight, for each node


def ledger_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a buffer's folder, latest first."""
    return sorted(folder.glob("ledger-*.checkpoint"), reverse=True)


def checkpoint_path(folder: Path, position: Position) -> Path:
    return folder / f"ledger-{position.offset:012d}.checkpoint"


# Replay

_FIELDS = {
    "issue": ("first", "group", "step", "positions", "tokens"),
    "source": ("segment",),
    "claim": ("lease", "node", "ids", *REQUEST, "too_old", "holder"),
    "publish": ("lease", "ids", "tokens", "segment", "segments", "versions", "parents", "finished"),
    "finish": ("lease", "step"),
    "release": ("lease", "why", "ids"),
    "drop": ("node", "ids", "why"),
    "lose": ("group", "why", "again"),
    "offer": ("node", "group"),
}
"""Maps kinds of events to their fields besides `do` and `graph`."""


def replay(ledger: Ledger, record: Record) -> None:
    """Apply a log record to a ledger without logging it.

    Raises:
        ValueError: the ledger's state differs from when the record was written.
        LookupError: the record lacks a field, or another version of Weft wrote it.
    """
    do, later = record["do"], "a later version of Weft wrote it"
    if do not in _FIELDS:
        raise LookupError(f"unknown event {do!r}; {later}")
    # Ignoring unknown fields might change the event's effect.
    if unknown := record.keys() - {"do", "graph", *_FIELDS[do]}:
        raise LookupError(f"unknown field {min(unknown)!r}; {later}")
    log, ledger.log = ledger.log, None
    try:
        _apply(ledger, record)
    finally:
        ledger.log = log


def _apply(ledger: Ledger, record: Record) -> None:
    match record["do"]:
        case "issue":
            first, group, known = record["first"], record["group"], ledger.ids
            if (first, group) != (known.next_id, known.next_group):
                raise ValueError(f"rows were issued from id {first}, but {known.next_id} is next")
            ledger.issue(record["positions"], record["tokens"], step=record["step"])
        case "source":
            ledger.set_source(Segment.from_json(record["segment"]))
        case "claim":
            ledger.claim_again(record)
        case "publish":
            optional = (record.get(name) for name in ("versions", "parents", "finished"))
            made = Published.of_lists(record["ids"], record["tokens"], *optional)
            written = Segment.from_json(record["segment"]) if record.get("segment") else None
            if record.get("segments") is not None:
                written = Spread.from_json(record["segments"])
            ledger.publish(ledger.leases[record["lease"]], made, written)
        case "finish":
            ledger.finish(ledger.leases[record["lease"]], step=record.get("step"))
        case "release":
            ledger.release(ledger.leases[record["lease"]], record["why"], ids=record.get("ids"))
        case "drop":
            ledger.drop(ledger.graph[record["node"]], record["ids"], record["why"])
        case "lose":
            ledger.lose(record["group"], record["why"], issue_again=record.get("again", True))
        case "offer":
            ledger.offer(ledger.graph[record["node"]], ledger.live.groups[record["group"]])


# Recovery


@dataclass
class _RestoredState:
    """A run's state at a log position."""

    ledgers: dict[str, Ledger]
    ids: Ids
    notes: dict[str, Any]
    end: Position
    """Position after the last record read."""
    checkpoints: list[Path]
    """Valid checkpoints up to `end`, latest first."""
    damage: list[str]
    """Damage found and, for each, the state used instead."""
    unwritten: list[str] = field(default_factory=list)
    """Graphs missing in the log, because the run ended while it created the log."""
    pinned: set[Segment] = field(default_factory=set)
    """Segments of the checkpoint that was used."""


def restore(
    folder: Path,
    graphs: Mapping[str, Graph] | None = None,
    *,
    at: Position | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> _RestoredState:
    """Restore the ledgers of a run from its log. Only reads, so the run may be active.

    Args:
        graphs: graphs of the run. Evaluations that an earlier version of Weft started continue
            without optional maps that it did not have. With None, the buffer restores the graphs
            from their descriptions in the log, which have no code or data, so use it only to read.
        at: log position to go back to. Default: the end of the log's valid part.

    Raises:
        UserError: the graphs differ from the graphs in the log.
        RecoveryError: the log cannot be applied to the ledgers.
    """
    damage: list[str] = []
    start, state, sound = _latest_checkpoint(folder, at, damage)
    restored = _RestoredState({}, Ids(), {}, start, sound, damage)

    def take(record: Record) -> None:
        match record["do"]:
            case "graph":
                name = record["graph"]
                # The checkpoint and the log after it may both describe the graph.
                if name not in restored.ledgers:
                    graph = _same_graph(name, record, graphs)
                    restored.ledgers[name] = Ledger(graph, ids=restored.ids, name=name, clock=clock)
            case "ids":
                restored.ids.next_id, restored.ids.next_group = record["next_id"], record["next_group"]
            case "note":
                restored.notes[record["key"]] = record["value"]
            case "ledger" | "group" | "lease" | "epoch":
                pass  # `load` restores the first three together; only the log's writer needs epochs
            case _:
                replay(restored.ledgers[record["graph"]], record)

    for record in state:
        take(record)
    for name, ledger in restored.ledgers.items():
        load(ledger, [r for r in state if r.get("graph") == name])
    # Before the replay, which may free some of them.
    restored.pinned = segments_of(restored.ledgers.values())
    begun = bool(state)
    if start != at:  # otherwise, the checkpoint is the complete state
        begun |= _replay_log(restored, folder / LOG, at, take)
    if at is not None and restored.end != at:
        damage.append(
            f"{folder / LOG} is sound to byte {restored.end.offset}: the state at byte {at.offset} is not there"
        )
    if graphs is not None and not begun:
        restored.unwritten = [name for name in graphs if name not in restored.ledgers]
        for name in restored.unwritten:
            restored.ledgers[name] = Ledger(graphs[name], ids=restored.ids, name=name, clock=clock)
    if graphs is not None and set(graphs) != set(restored.ledgers):
        raise UserError(
            f"{folder} is of a run of the graphs {sorted(restored.ledgers)}, not {sorted(graphs)}"
        )
    return restored


def _replay_log(
    restored: _RestoredState, log: Path, at: Position | None, take: Callable[[Record], None]
) -> bool:
    """Replay the log up to a position. Return whether it has more than a start's records."""
    begun = False
    reader = LogReader(log, restored.end)
    for record in reader:
        if at is not None and reader.end.offset > at.offset:
            break
        restored.end = reader.end
        begun |= record["do"] not in ("epoch", "ids", "graph")
        try:
            take(record)
        except (AttributeError, LookupError, ValueError, TypeError, LeaseError) as error:
            raise RecoveryError(f"{log}, byte {restored.end.offset}: {record['do']}: {error}") from error
    if reader.damage:
        restored.damage.append(f"{reader.damage}; the state before it is used")
    return begun


def _same_graph(name: str, record: Record, graphs: Mapping[str, Graph] | None) -> Graph:
    then, outline = described_graph(record), record["outline"]
    if graphs is None:
        return then
    if name not in graphs:
        raise UserError(f"the run has a graph {name!r}, which is not given{nearest(name, list(graphs))}")
    earlier = {n["name"] for n in outline["nodes"]}
    graph = graphs[name] if name == TRAIN else _without_new_options(graphs[name], earlier)
    # Convert through JSON: the outline in the log has lists instead of tuples.
    now = json.loads(json.dumps(graph.outline()))
    # An evaluation that was running starts again, so its rows may have other columns.
    free = () if name == TRAIN else (str(RESPONSE_LOGPROBS), *ON_DEMAND)
    first, second = _required_parts(now, outline, free), _required_parts(outline, now, free)
    if first != second:
        nodes = first["nodes"]
        changed = [n["name"] for n in nodes if n["name"] not in earlier] or [
            n["name"] for n, m in zip(nodes, second["nodes"], strict=False) if n != m
        ]
        raise UserError(
            f"graph {name!r} differs from when the run was started; check {', '.join(changed) or 'its source'}"
        )
    return graph


def _without_new_options(graph: Graph, earlier: Collection[str]) -> Graph:
    """Return an evaluation's graph without maps that the run did not have `earlier`, if all readers
    of their columns can do without. A later version of Weft may add such maps."""
    read = {writer for node in graph.nodes for writer in node.writers.values()}
    needed = {node.writers.get(column) for node in graph.nodes for column in node.operation.reads}
    maps = {node.name for node in graph.nodes if node.operation.shape is Shape.MAP}
    new = (read & maps) - needed - {*earlier}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name not in new:
            writers = {column: name for column, name in node.writers.items() if name not in new}
            after = tuple(name for name in node.after if name not in new)
            nodes.append(replace(node, reads=tuple(writers), writers=writers, after=after))
    return replace(graph, nodes=tuple(nodes))


def _required_parts(
    outline: Mapping[str, Any], other: Mapping[str, Any], free: Collection[str]
) -> dict[str, Any]:
    """Return an outline without optional columns, for a comparison with `other`. A later version of
    Weft may read more optional columns, and must still resume the run. Nodes may write the columns
    `free` or not."""
    optional = {
        (node["name"], writer)
        for node in (*outline["nodes"], *other["nodes"])
        for column, writer in node["writers"].items()
        if column not in node["operation"]["reads"]
    }
    nodes: list[dict[str, Any]] = []
    for node in outline["nodes"]:
        operation = {name: value for name, value in node["operation"].items() if name != "may_read"}
        node, operation = (
            {**each, "writes": [c for c in each["writes"] if c not in free]}
            for each in (node, operation)
        )
        required = {
            name: writer for name, writer in node["writers"].items() if name in operation["reads"]
        }
        after = sorted(name for name in node["after"] if (node["name"], name) not in optional)
        nodes.append(
            node
            | {"operation": operation, "reads": sorted(required), "writers": required, "after": after}
        )
    return {**outline, "nodes": nodes}


def _latest_checkpoint(
    folder: Path, at: Position | None, damage: list[str]
) -> tuple[Position, list[dict[str, Any]], list[Path]]:
    """Return the latest valid checkpoint's position and records, and the paths of all valid
    ones."""
    best: tuple[Position, list[dict[str, Any]]] | None = None
    sound: list[Path] = []
    for path in ledger_checkpoints(folder):
        try:
            position = checkpoint_position(path)
            if at is not None and position.offset > at.offset:
                continue
            in_log = has_position(folder / LOG, position)
            # Parse the latest checkpoint, but only verify the checksums of the others.
            if best is None or not is_sound_checkpoint(path, position):
                state = read_checkpoint(path)
                best = best or (state if in_log else None)
        except (ValueError, OSError) as error:
            damage.append(f"{error}; the checkpoint before it is used")
            continue
        if in_log:
            sound.append(path)
        else:
            damage.append(
                f"{path} is at byte {position.offset} of the log, but the log has no record with its checksum there: "
                "part of the log is missing, or was replaced"
            )
    start, records = best or (Position(), [])
    return start, records, sound


def segments_of(ledgers: Iterable[Ledger]) -> set[Segment]:
    """Return the segments with columns of rows in flight or with sources."""
    sources = {ledger.source for ledger in ledgers if ledger.source is not None}
    return sources.union(*(ledger.parts.segments for ledger in ledgers))
