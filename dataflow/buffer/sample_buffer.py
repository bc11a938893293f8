"""SampleBuffer: the ledgers of a run's graphs, the log that they write, and the files of this node's segments.

    runs/NAME/buffer/ledger.log                       every event, from the first
    runs/NAME/buffer/ledger-000000123456.checkpoint   the state at that position of the log
    runs/NAME/buffer/segments/NODE/                   the columns of rows in flight, on each node

It lives in the driver. Worker processes write segments and read them; what they say of them passes through here.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from ..config import Config
from ..errors import DamagedSegment, LeaseError, RecoveryError, UserError, nearest
from ..graph import Graph
from ..operation import Shape
from .disk import Disk, is_full, make_folder, remove
from .ledger import Ledger
from .ledger_state import load, save
from .log import (
    Fence,
    Log,
    LogReader,
    Position,
    Record,
    described_graph,
    graph_record,
    has_position,
    read_checkpoint,
    write_checkpoint,
)
from .rows import Fate, Ids, Lease, Published
from .segment_files import with_file
from .segments import Segment, SegmentStore, verify

BUFFER = "buffer"
"""The folder of the buffer in the directory of a run."""
LOG = "ledger.log"
SEGMENTS = "segments"
UNBOUNDED = 1 << 30


class BufferConfig(Config):
    """How much the sample buffer may hold, and how it keeps it."""

    max_rows: int | None = Field(default=None, ge=1)
    """Rows in flight of one graph, prompts and samples together; more prompts are issued when some are finished."""
    max_bytes: int | None = Field(default=None, ge=1)
    """Bytes of the columns of rows in flight of one graph."""
    on_stale: Fate = "wait"
    """What becomes of a group that is older than the schedule allows when an update claims it."""
    lease_deadline_s: float | None = Field(default=None, gt=0)
    """Seconds after which rows go back that a worker has claimed and not finished; None: the driver's own deadlines alone."""
    memory_bytes: int | None = Field(default=None, ge=1)
    """Bytes of segments that stay in memory on a node; older ones are written to disk and read back from there when they are
    needed. None leaves that to the kernel."""
    file_bytes: int = Field(default=16 << 20, ge=1 << 10)
    """Size of a segment file. It is given free as a whole, when no row in flight lies in it."""
    sync_interval_s: float = Field(default=0.5, ge=0)
    """How much of the log a loss of power may cost; the death of a process costs nothing."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Checkpoints of the ledgers that are kept."""


@dataclass(frozen=True)
class Capacity:
    """How many groups may be issued now, and what stands against more."""

    groups: int
    reason: str = ""


@dataclass
class SampleBuffer:
    """Ledgers by the name of their graph in the run. Made by `create` for a new run, by `recover` for one that goes on."""

    folder: Path
    node: str
    config: BufferConfig
    ledgers: dict[str, Ledger]
    ids: Ids
    log: Log
    store: SegmentStore
    notes: dict[str, Any] = field(default_factory=dict)
    """Small facts that must come back with the rows: policy versions, the step."""
    damage: list[str] = field(default_factory=list)
    """What was found damaged at recovery, and what was done about it."""
    disk: Disk = field(default_factory=Disk)
    _pins: dict[str, set[Segment]] = field(default_factory=dict)
    """Checkpoint -> the segments that it refers to: they outlive their rows as long as it is kept."""
    _pinned: set[Segment] = field(default_factory=set)
    """All of these."""
    _unpinned: list[Segment] = field(default_factory=list)
    """Segments that no row needs any more, and a checkpoint does."""

    @property
    def segments(self) -> Path:
        """The folder of this node's segments."""
        return self.folder / SEGMENTS / self.node

    # Life

    @classmethod
    def create(
        cls,
        folder: Path,
        graphs: Mapping[str, Graph],
        *,
        config: BufferConfig = BufferConfig(),
        node: str = "driver",
        disk: Disk | None = None,
        clock: Callable[[], float] = time.monotonic,
        fence: Fence | None = None,
        ids: Ids | None = None,
    ) -> SampleBuffer:
        """A new buffer in a folder that has none.

        Args:
            fence: keeps the log to one writer.
            ids: what comes after those that were given out in a log before this one.

        Raises:
            UserError: when the folder has a log already.
        """
        if (folder / LOG).exists() and any(True for _ in LogReader(folder / LOG)):
            raise UserError(f"{folder} holds the buffer of a run already; SampleBuffer.recover() goes on with it")
        _make_folders(folder, node)
        disk = disk or Disk()
        log = Log(folder / LOG, sync_interval_s=config.sync_interval_s, disk=disk, clock=clock, fence=fence)
        ids = ids or Ids()
        if ids.next_id:
            log.append({"do": "ids", "next_id": ids.next_id, "next_group": ids.next_group})
        ledgers = {name: Ledger(graph, ids=ids, name=name, log=log, clock=clock) for name, graph in graphs.items()}
        for name, graph in graphs.items():
            log.append(graph_record(name, graph.outline()))
        log.commit(sync=True)
        return cls(folder, node, config, ledgers, ids, log, SegmentStore(folder / SEGMENTS / node, node), disk=disk)

    @classmethod
    def recover(
        cls,
        folder: Path,
        graphs: Mapping[str, Graph] | None = None,
        *,
        config: BufferConfig = BufferConfig(),
        node: str = "driver",
        at: Position | None = None,
        check: Callable[[Segment], None] | None = None,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.monotonic,
        fence: Fence | None = None,
    ) -> SampleBuffer:
        """The buffer of a run that was ended, as its log says it stood; who held leases is gone, so their rows are free.

        A torn or damaged tail of the log is cut off (and kept beside it), a damaged checkpoint passed over, a group whose
        columns cannot be read any more is issued again: all of that is said in `damage`.

        Args:
            graphs: those of the run; None takes their outlines from the log, for looking only.
            at: go back to this position (of a checkpoint that belongs to a saved model); None: the end.
            check: raises DamagedSegment for columns that cannot be read; None reads the folders of all nodes here.
            fence: keeps the log to one writer.

        Raises:
            UserError: when there is no log, or the graphs are not those of the run.
            RecoveryError: when the log does not fit the ledger.
        """
        if not (folder / LOG).exists():
            raise UserError(f"{folder} holds no log of a run ({LOG})")
        _make_folders(folder, node)
        disk = disk or Disk()
        history = restore(folder, graphs, at=at, clock=clock)
        log = Log(
            folder / LOG, at=history.end, sync_interval_s=config.sync_interval_s, disk=disk, clock=clock, fence=fence
        )
        for path in folder.glob("*.checkpoint*"):  # of a future that was given up, damaged, or never completed
            if path not in history.checkpoints:
                remove(path)
        for name in history.unwritten:
            log.append(graph_record(name, history.ledgers[name].graph.outline()))
        buffer = cls(
            folder,
            node,
            config,
            history.ledgers,
            history.ids,
            log,
            SegmentStore(folder / SEGMENTS / node, node),
            history.notes,
            history.damage,
            disk,
        )
        for ledger in buffer.ledgers.values():
            ledger.log = log
            for lease in ledger.leases:
                ledger.release(lease, "the run was started again")
            buffer._drop_what_is_lost(
                ledger, check or (lambda segment: verify(folder / SEGMENTS / segment.node, segment))
            )
        buffer._take_stock(history.pinned)
        buffer.commit(sync=True)
        return buffer

    def _drop_what_is_lost(self, ledger: Ledger, check: Callable[[Segment], None]) -> None:
        lost: dict[Segment, str] = {}
        for segment in [*ledger.live_segments(), *([ledger.source] if ledger.source else [])]:
            try:
                check(segment)
            except DamagedSegment as error:
                lost[segment] = str(error)
        if ledger.source in lost:  # whoever has the graphs has it, and writes it again
            ledger.source = None
        for group, segment in ledger.groups_in(lost):
            again = ledger.lose(group, lost[segment])
            became = "is issued again" if again else "is done, but its samples cannot be recorded"
            self.damage.append(f"group {group} of graph {ledger.name!r} {became}: {lost[segment]}")

    def drop_unreachable(self, nodes: Collection[str]) -> list[tuple[str, int]]:
        """Issue the groups again that lie on none of these nodes, before anybody works; returns graph and group of each."""
        found: list[tuple[str, int]] = []
        for name, ledger in self.ledgers.items():
            gone = {segment for segment in ledger.live_segments() if segment.node not in nodes}
            for group, segment in ledger.groups_in(gone):
                if ledger.lose(group, f"node {segment.node} is gone"):
                    found.append((name, group))
        return found

    def _take_stock(self, pinned: set[Segment]) -> None:
        """Tell the store which files hold rows, now or at the latest checkpoint, so that the others may go."""
        for ledger in self.ledgers.values():
            ledger.take_freed()
            ledger.take_given_up()
        live = self._live_segments()
        self._pins = {path.name: pinned for path in checkpoints(self.folder)[:1]}
        self._pinned = pinned
        self._unpinned = [s for s in pinned if s not in live]
        for segment in live | pinned:
            self.store.published(segment)
        self.store.sweep()
        for node, writer in {(s.node, s.file.split(".")[0]) for s in live | pinned}:
            self.store.writer_ended(writer, node)

    def _live_segments(self) -> set[Segment]:
        return _segments_of(self.ledgers.values())

    def close(self, *, going_on: bool = False) -> None:
        """Bring the log to the disk. When no row is left in flight, the folder of segments goes.

        Args:
            going_on: a run will go on from a checkpoint, so rows that were in flight there stay, too.
        """
        try:
            try:
                self.commit(sync=True)
            finally:
                self.log.close()
        except OSError as error:
            if not is_full(error):  # what is in the log is whole; what is not was not promised
                raise
        pinned = self._pinned - {ledger.source for ledger in self.ledgers.values()} if going_on else ()
        if not pinned and not any(ledger.groups_in_flight for ledger in self.ledgers.values()):
            shutil.rmtree(self.folder / SEGMENTS, ignore_errors=True)

    # What passes through

    def set_source(self, name: str, segment: Segment) -> None:
        """Where the rows of a graph's source lie."""
        before = self.ledgers[name].source
        if segment == before:
            return
        self.ledgers[name].set_source(segment)
        self.store.published(segment)
        if before is not None:
            self._unpinned.append(before)

    def publish(self, ledger: Ledger, lease: Lease, published: Published, segment: Segment | None) -> None:
        """`Ledger.publish`, and the segment's file is kept as long as rows lie in it."""
        ledger.publish(lease, published, segment)
        if segment is not None:
            self.store.published(segment)

    def note(self, key: str, value: Any) -> None:
        """Remember a small fact, as a value of JSON, that must come back with the rows (see `notes`)."""
        self.notes[key] = value
        self.log.append({"do": "note", "key": key, "value": value})

    def commit(self, *, sync: bool = False) -> None:
        """Write what happened to the log, then let go of the segments that no row needs."""
        self.log.commit(sync=sync)
        freed = [segment for ledger in self.ledgers.values() for segment in ledger.take_freed()]
        self._let_go(freed)

    def _let_go(self, segments: Iterable[Segment]) -> None:
        """Give segments free that no checkpoint refers to; the others when none does any more."""
        freed = list(segments)
        self._unpinned += [s for s in freed if s in self._pinned]
        self.store.freed(s for s in freed if s not in self._pinned)

    def checkpoint(self) -> Position:
        """Save the state at this position of the log, so that recovery starts from here; returns the position.

        Everything that it refers to on this node is on disk when this returns.
        """
        self.commit(sync=True)
        here = {s.file for g in self.ledgers.values() for s in g.live_segments() if s.node == self.node}
        for file in sorted(here):
            with_file(self.segments / file, os.fdatasync)
        position = self.log.position
        records: list[Record] = [
            {"do": "ids", "next_id": self.ids.next_id, "next_group": self.ids.next_group},
            *({"do": "note", "key": key, "value": value} for key, value in self.notes.items()),
            *(graph_record(name, ledger.graph.outline()) for name, ledger in self.ledgers.items()),
            *(record for ledger in self.ledgers.values() for record in save(ledger)),
        ]
        name = _checkpoint_name(position)
        write_checkpoint(self.folder / name, position, records, disk=self.disk)
        self._pins[name] = self._live_segments()
        for old in checkpoints(self.folder)[self.config.keep_checkpoints :]:
            remove(old)
            self._pins.pop(old.name, None)
        self._release_unpinned()
        return position

    def drop_checkpoint(self, position: Position) -> None:
        """Nobody will go back to this one: it counts no more among those that are kept."""
        name = _checkpoint_name(position)
        (self.folder / name).unlink(missing_ok=True)
        self._pins.pop(name, None)
        self._release_unpinned()

    def _release_unpinned(self) -> None:
        self._pinned = set().union(*self._pins.values())
        before, self._unpinned = self._unpinned, []
        self._let_go(before)

    def capacity(
        self, name: str, *, groups_per_update: int = 1, staleness: int | None = None, lag: int = 0, taken: int = 0
    ) -> Capacity:
        """How many groups of this graph may be issued now, by rows, bytes and optimizer steps, and which of them binds.

        Args:
            staleness: updates that a row may lag, when it is trained, the weights that generated it: as many groups as
                will be trained within that are let in, so that the bound is kept by waiting, not by discarding.
            lag: updates that the weights which generate now are behind those that are trained.
            taken: groups that the update under way has claimed so far, finished or not.
            groups_per_update: how many groups an update takes: so many are let in even if they prove larger than there
                is room for, since nothing becomes free before they are trained on.

        Groups are taken to be as large as the largest that was finished; bytes are no bound before the first is.
        """
        ledger, config = self.ledgers[name], self.config
        updates = [n for n in ledger.graph.nodes if n.operation.updates]
        missing = groups_per_update - ledger.groups_at_work + max(map(ledger.held, updates), default=0)
        bounds: list[tuple[int, str]] = []
        if config.max_rows is not None:
            each = max(expected_rows(ledger.graph), ledger.largest_group)
            free = config.max_rows // each - ledger.groups_in_flight
            free = max(free, missing) if ledger.largest_group > expected_rows(ledger.graph) else free
            bounds.append((free, f"{ledger.rows_in_flight} rows in flight, max_rows={config.max_rows}, {each} a group"))
        if config.max_bytes is not None:
            each_bytes = ledger.largest_group_bytes
            written = round(ledger.published_bytes - ledger.finished_bytes)  # by groups in flight
            expected = ledger.num_bytes + max(0, each_bytes * ledger.groups_in_flight - written)
            free = (config.max_bytes - expected) // each_bytes if each_bytes else UNBOUNDED
            free = max(free, missing)
            reason = f"{ledger.num_bytes} bytes in flight, max_bytes={config.max_bytes}, up to {each_bytes} a group"
            bounds.append((free, reason))
        if staleness is not None and updates:
            ahead = max(ledger.unclaimed(n) + max(taken, ledger.leased_groups(n)) for n in updates)
            free = (staleness + 1 - lag) * groups_per_update - ahead
            bounds.append((free, f"{ahead} groups wait to be trained on, max_staleness={staleness}"))
        free, reason = min(bounds, default=(UNBOUNDED, ""))
        return Capacity(max(0, free), reason)


def expected_rows(graph: Graph) -> int:
    """Rows that a group will have on all levels, as far as the graph says (the argument `n` of its expansions)."""
    sizes = {0: 1}
    for node in graph.nodes:
        if node.operation.shape is Shape.EXPAND and node.makes_level is not None:
            number = node.arguments.get("n", 1)
            sizes[node.makes_level] = sizes[node.level] * (number if isinstance(number, int) and number > 0 else 1)
    return sum(sizes.values())


# Recovery


@dataclass
class History:
    """What a log and its checkpoints say of a run."""

    ledgers: dict[str, Ledger]
    ids: Ids
    notes: dict[str, Any]
    end: Position
    """Behind the last record that was taken."""
    checkpoints: list[Path]
    """Those that are sound and not behind the end, latest first."""
    damage: list[str]
    unwritten: list[str] = field(default_factory=list)
    """Graphs that the log does not name: the run was ended while it was being created."""
    pinned: set[Segment] = field(default_factory=set)
    """Segments that the latest checkpoint refers to."""


def restore(
    folder: Path,
    graphs: Mapping[str, Graph] | None = None,
    *,
    at: Position | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> History:
    """The ledgers of a run as its log says they stood; reads only, also while the run goes on. Raises as `recover`."""
    damage: list[str] = []
    start, state, sound = _latest_checkpoint(folder, at, damage)
    history = History({}, Ids(), {}, start, sound, damage)
    for record in state:
        _take(history, record, graphs, clock)
    for name, ledger in history.ledgers.items():
        load(ledger, [r for r in state if r.get("graph") == name])
    history.pinned = _segments_of(history.ledgers.values())
    begun = bool(state)
    reader = LogReader(folder / LOG, start)
    for record in reader:
        if at is not None and reader.end.offset > at.offset:
            break
        history.end = reader.end
        begun |= record["do"] not in ("epoch", "ids", "graph")
        try:
            _take(history, record, graphs, clock)
        except (AttributeError, LookupError, ValueError, TypeError, LeaseError) as error:
            raise RecoveryError(f"{folder / LOG}, byte {history.end.offset}: {record['do']}: {error}") from error
    if reader.damage:
        damage.append(f"{reader.damage}; the state before it is used")
    if at is not None and history.end != at:
        damage.append(
            f"{folder / LOG} is sound to byte {history.end.offset}: the state at byte {at.offset} is not there"
        )
    if graphs is not None and not begun:
        history.unwritten = [name for name in graphs if name not in history.ledgers]
        for name in history.unwritten:
            history.ledgers[name] = Ledger(graphs[name], ids=history.ids, name=name, clock=clock)
    if graphs is not None and set(graphs) != set(history.ledgers):
        raise UserError(f"{folder} is of a run of the graphs {sorted(history.ledgers)}, not {sorted(graphs)}")
    return history


def _take(history: History, record: Record, graphs: Mapping[str, Graph] | None, clock: Callable[[], float]) -> None:
    match record["do"]:
        case "graph":
            name = record["graph"]
            if name not in history.ledgers:
                graph = _same_graph(name, record, graphs)
                history.ledgers[name] = Ledger(graph, ids=history.ids, name=name, clock=clock)
        case "ids":
            history.ids.next_id, history.ids.next_group = record["next_id"], record["next_group"]
        case "note":
            history.notes[record["key"]] = record["value"]
        case "ledger" | "group" | "lease":
            pass  # the state of a ledger: loaded together
        case "epoch":
            pass  # of a writer
        case _:
            history.ledgers[record["graph"]].replay(record)


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
    for path in checkpoints(folder):
        try:
            position, state = read_checkpoint(path)
        except (ValueError, OSError) as error:
            damage.append(f"{error}; the checkpoint before it is used")
            continue
        if at is not None and position.offset > at.offset:
            continue
        if not has_position(folder / LOG, position):
            damage.append(
                f"{path} is of byte {position.offset} of the log, which has no record with its checksum there: part of it "
                "is missing, or it went on otherwise"
            )
            continue
        sound.append(path)
        best = best or (position, state)
    start, records = best or (Position(), [])
    return start, records, sound


def _make_folders(folder: Path, node: str) -> None:
    for made in (folder, folder / SEGMENTS, folder / SEGMENTS / node):
        make_folder(made)


def _segments_of(ledgers: Iterable[Ledger]) -> set[Segment]:
    """What rows in flight refer to, their sources among it."""
    sources = {ledger.source for ledger in ledgers if ledger.source is not None}
    return sources.union(*(ledger.live_segments() for ledger in ledgers))


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of the ledgers, latest first."""
    return sorted(folder.glob("ledger-*.checkpoint"), reverse=True)


def _checkpoint_name(position: Position) -> str:
    return f"ledger-{position.offset:012d}.checkpoint"
