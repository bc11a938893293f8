"""Restored state: what a log and its checkpoints say of a run, for recovery and for looking only."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import LeaseError, RecoveryError, UserError, nearest
from ..graph import Graph
from .checkpoint_file import checkpoint_position, is_sound_checkpoint, read_checkpoint
from .folder import ledger_checkpoints
from .ledger import Ledger
from .ledger_state import load
from .log import LogReader, Position, Record, described_graph, has_position
from .replay import replay
from .rows import Ids
from .run_files import LOG
from .segments import Segment


@dataclass
class RestoredState:
    """The state of a run at a position of its log."""

    ledgers: dict[str, Ledger]
    ids: Ids
    notes: dict[str, Any]
    end: Position
    """Behind the last record that was read."""
    checkpoints: list[Path]
    """The checkpoints that are sound and not behind the end, latest first."""
    damage: list[str]
    """What was found damaged, and what is used instead."""
    unwritten: list[str] = field(default_factory=list)
    """Graphs that the log does not name, because the run ended while it was being created."""
    pinned: set[Segment] = field(default_factory=set)
    """Segments that the latest checkpoint refers to."""


def restore(
    folder: Path,
    graphs: Mapping[str, Graph] | None = None,
    *,
    at: Position | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> RestoredState:
    """The ledgers of a run as its log says they were. Reads only, and may do so while the run goes on.

    Args:
        folder: the folder of the buffer, which holds the log.
        graphs: the graphs of the run; None takes their outlines from the log, for looking only.
        at: the position to go back to; None: the end of what is sound.
        clock: seconds since any moment, for deadlines.

    Raises:
        UserError: the graphs are not those of the run.
        RecoveryError: the log does not fit the ledgers.
    """
    damage: list[str] = []
    start, state, sound = _latest_checkpoint(folder, at, damage)
    restored = RestoredState({}, Ids(), {}, start, sound, damage)
    for record in state:
        _take(restored, record, graphs, clock)
    for name, ledger in restored.ledgers.items():
        load(ledger, [r for r in state if r.get("graph") == name])
    restored.pinned = segments_of(restored.ledgers.values())
    begun = bool(state)
    if start != at:  # a checkpoint of this position says everything
        begun |= _replay_log(restored, folder / LOG, at, graphs, clock)
    if at is not None and restored.end != at:
        damage.append(
            f"{folder / LOG} is sound to byte {restored.end.offset}: the state at byte {at.offset} is not there"
        )
    if graphs is not None and not begun:
        restored.unwritten = [name for name in graphs if name not in restored.ledgers]
        for name in restored.unwritten:
            restored.ledgers[name] = Ledger(graphs[name], ids=restored.ids, name=name, clock=clock)
    if graphs is not None and set(graphs) != set(restored.ledgers):
        raise UserError(f"{folder} is of a run of the graphs {sorted(restored.ledgers)}, not {sorted(graphs)}")
    return restored


def _replay_log(
    restored: RestoredState,
    log: Path,
    at: Position | None,
    graphs: Mapping[str, Graph] | None,
    clock: Callable[[], float],
) -> bool:
    """Replay the log from the end of the restored state to a position. Returns whether anything had begun there."""
    begun = False
    reader = LogReader(log, restored.end)
    for record in reader:
        if at is not None and reader.end.offset > at.offset:
            break
        restored.end = reader.end
        begun |= record["do"] not in ("epoch", "ids", "graph")
        try:
            _take(restored, record, graphs, clock)
        except (AttributeError, LookupError, ValueError, TypeError, LeaseError) as error:
            raise RecoveryError(f"{log}, byte {restored.end.offset}: {record['do']}: {error}") from error
    if reader.damage:
        restored.damage.append(f"{reader.damage}; the state before it is used")
    return begun


def _take(
    restored: RestoredState, record: Record, graphs: Mapping[str, Graph] | None, clock: Callable[[], float]
) -> None:
    match record["do"]:
        case "graph":
            name = record["graph"]
            if name not in restored.ledgers:
                graph = _same_graph(name, record, graphs)
                restored.ledgers[name] = Ledger(graph, ids=restored.ids, name=name, clock=clock)
        case "ids":
            restored.ids.next_id, restored.ids.next_group = record["next_id"], record["next_group"]
        case "note":
            restored.notes[record["key"]] = record["value"]
        case "ledger" | "group" | "lease":
            pass  # the state of a ledger: loaded together
        case "epoch":
            pass  # of a writer
        case _:
            replay(restored.ledgers[record["graph"]], record)


def _same_graph(name: str, record: Record, graphs: Mapping[str, Graph] | None) -> Graph:
    then, outline = described_graph(record), record["outline"]
    if graphs is None:
        return then
    if name not in graphs:
        raise UserError(f"the run has a graph {name!r}, which is not given{nearest(name, list(graphs))}")
    now = graphs[name]
    if json.loads(json.dumps(now.outline())) != outline:
        names = [n.name for n in then.nodes]
        changed = [n.name for n in now.nodes if n.name not in names] or [
            n["name"]
            for n, m in zip(json.loads(json.dumps(now.outline()["nodes"])), outline["nodes"], strict=False)
            if n != m
        ]
        raise UserError(
            f"graph {name!r} is not what it was when the run was started; see {', '.join(changed) or 'its source'}"
        )
    return now


def _latest_checkpoint(
    folder: Path, at: Position | None, damage: list[str]
) -> tuple[Position, list[dict[str, Any]], list[Path]]:
    best: tuple[Position, list[dict[str, Any]]] | None = None
    sound: list[Path] = []
    for path in ledger_checkpoints(folder):
        try:
            position = checkpoint_position(path)
            if at is not None and position.offset > at.offset:
                continue
            # Only the one that is used is parsed; of the others it is enough that they are sound.
            if best is None or not is_sound_checkpoint(path, position):
                position, state = read_checkpoint(path)
                best = best or ((position, state) if has_position(folder / LOG, position) else None)
        except (ValueError, OSError) as error:
            damage.append(f"{error}; the checkpoint before it is used")
            continue
        if not has_position(folder / LOG, position):
            damage.append(
                f"{path} is of byte {position.offset} of the log, which has no record with its checksum there: part of it "
                "is missing, or it went on otherwise"
            )
            continue
        sound.append(path)
    start, records = best or (Position(), [])
    return start, records, sound


def segments_of(ledgers: Iterable[Ledger]) -> set[Segment]:
    """The segments that rows in flight refer to, with those of the sources."""
    sources = {ledger.source for ledger in ledgers if ledger.source is not None}
    return sources.union(*(ledger.parts.segments for ledger in ledgers))
