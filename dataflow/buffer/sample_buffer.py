"""SampleBuffer: the ledgers of a run, their log, and the segment files of this node.

The driver owns the buffer. Workers write and read segments; the driver only passes references to
them. `recovery.py` lists the buffer's files.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from ..config import Config
from ..errors import DamagedSegment, UserError
from ..graph import Graph
from ..operation import Shape
from ..runs.files import LOG, SEGMENTS, Disk, is_full, make_folder, remove
from ..runs.lock import RunLock
from ..runs.log import SYNC_INTERVAL_S, Log, LogCutting, LogReader, Position, Record, graph_record
from .events import RESTARTED
from .leases import Lease, Published, Spread, Written
from .ledger import Ledger
from .recovery import (
    checkpoint_path,
    checkpoint_position,
    ledger_checkpoints,
    restore,
    save,
    segments_of,
    write_checkpoint,
)
from .rows import Ids
from .scratch import Scratch
from .segments import Segment, SegmentStore, verify_segment, with_file
from .staleness import Fate

KEEP_CHECKPOINTS = 2
CUT_BYTES = 4 << 20
"""[bytes] Size at which the log before the oldest kept checkpoint moves to the archive. A smaller
size creates many small files; a larger one makes the log slow to copy."""


class BufferConfig(Config):
    """Limits and storage of the sample buffer, and its handling of stale rows."""

    max_rows: int | None = Field(default=None, ge=1)
    """[rows] Maximum number of prompts and samples of one graph in flight. The driver issues more
    prompts as rows finish. None sets no limit. Set it if rows pile up before a slow node."""
    max_bytes: int | None = Field(default=None, ge=1)
    """[bytes] Maximum size of one graph's columns in flight. None sets no limit. Set it if
    `memory_low` warns, or if the disk for segments is small."""
    on_stale: Fate = "wait"
    """How to handle a group that exceeds the staleness bound. With "wait", updates wait for late
    groups, so no group exceeds the bound unless a run resumes with a lower one; Weft then requeues
    and reports such groups. "mask" masks the stale rows in the loss, "requeue" samples the prompt
    again, and "drop" discards the group, which favours short responses. Choose one of these three
    if late groups hold up training."""
    lease_deadline_s: float | None = Field(default=None, gt=0)
    """[s] Time after which Weft requeues claimed rows that a worker has not finished. None applies
    only the driver's deadlines. Set it if a rank is sometimes much slower than others."""
    memory_bytes: int | None = Field(default=None, ge=1)
    """[bytes] Maximum size of the segments kept in memory on each node. Weft evicts older segments
    to disk. None leaves this to the kernel. Set it if other programs need the page cache."""
    scratch: Path | None = None
    """Node-local folder for segments. Each run gets a subfolder, which Weft removes when the run
    ends or is killed. None stores segments in the run directory on a single machine, and in each
    node's temporary folder (`TMPDIR`) on a cluster. Set it if those are on a slow or small disk."""

    retired: ClassVar[Mapping[str, str]] = {
        "file_bytes": "segment files always have 16 MiB",
        "sync_interval_s": "the log is synced every half second",
        "keep_checkpoints": "rows are kept for as many checkpoints as CheckpointConfig(keep=...) says",
        "cut_bytes": "the log is archived in parts of 4 MiB",
    }


@dataclass
class SampleBuffer:
    """The ledgers of a run, keyed by graph name, with their log and segments."""

    folder: Path
    node: str
    config: BufferConfig
    ledgers: dict[str, Ledger]
    ids: Ids
    log: Log
    store: SegmentStore
    notes: dict[str, Any] = field(default_factory=dict)
    """Values that recovery restores with the rows, such as policy versions and the step."""
    damage: list[str] = field(default_factory=list)
    """Damage that recovery found, and how recovery handled it."""
    disk: Disk = field(default_factory=Disk)
    scratch: Scratch | None = None
    keep_checkpoints: int = KEEP_CHECKPOINTS
    """Number of ledger checkpoints to keep besides those that model checkpoints need."""

    def __post_init__(self) -> None:
        self.cutting = LogCutting(self.log, CUT_BYTES)
        self._saved_at = self.log.position.offset
        """Byte offset of the latest checkpoint in the log, or of the place where this process
        started writing."""

    @property
    def segments(self) -> Path:
        return self.store.folder

    # Create, recover, close

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
        fence: RunLock | None = None,
        ids: Ids | None = None,
        scratch: Scratch | None = None,
        sync_interval_s: float = SYNC_INTERVAL_S,
        keep_checkpoints: int = KEEP_CHECKPOINTS,
    ) -> SampleBuffer:
        """Create a buffer.

        Args:
            node: name of the driver's node.
            disk: disk to write the log to; tests pass one that fails.
            clock: returns the time in seconds, for deadlines.
            ids: id counters to continue from, if an earlier log used the ids before them.
            scratch: folder for segments. Default: a subfolder of `folder`.
            sync_interval_s: [s] at most this much of the log is lost at a power failure. If only
                the process is killed, nothing is lost.
            keep_checkpoints: see the attribute.

        Raises:
            UserError: the folder already has a log.
        """
        if (folder / LOG).exists() and any(True for _ in LogReader(folder / LOG)):
            raise UserError(
                f"{folder} already has the buffer of a run; resume it with SampleBuffer.recover()"
            )
        store, disk = _make_store(folder, node, scratch), disk or Disk()
        log = Log(folder / LOG, sync_interval_s=sync_interval_s, disk=disk, clock=clock, fence=fence)
        ids = ids or Ids()
        # A run resumed without its log continues with the ids after those in the old log.
        if ids.next_id:
            log.append({"do": "ids", "next_id": ids.next_id, "next_group": ids.next_group})
        ledgers = {
            name: Ledger(graph, ids=ids, name=name, log=log, clock=clock)
            for name, graph in graphs.items()
        }
        for name, graph in graphs.items():
            log.append(graph_record(name, graph.outline()))
        log.commit(sync=True)
        own: dict[str, Any] = {"disk": disk, "scratch": scratch, "keep_checkpoints": keep_checkpoints}
        return cls(folder, node, config, ledgers, ids, log, store, **own)

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
        fence: RunLock | None = None,
        scratch: Scratch | None = None,
        sync_interval_s: float = SYNC_INTERVAL_S,
        keep_checkpoints: int = KEEP_CHECKPOINTS,
    ) -> SampleBuffer:
        """Restore the buffer of an earlier run from its log, and release all leases.

        Moves an incomplete or damaged end of the log to a separate file, skips damaged checkpoints,
        and requeues groups whose columns cannot be read. `damage` lists all of these.

        Args:
            graphs: graphs of the run. With None, the buffer restores them from their descriptions
                in the log, which have no code or data, so use it only to read.
            config, node, disk, clock, fence, scratch, sync_interval_s, keep_checkpoints: see
                `create`.
            at: log position to go back to, from a model checkpoint. Default: the end.
            check: function that raises DamagedSegment for a segment that cannot be read. The
                default checks the folders of nodes that are visible here; call `drop_lost` for the
                others.

        Raises:
            UserError: the folder has no log, or the log belongs to other graphs.
            RecoveryError: the log cannot be applied to the ledgers.
        """
        if not (folder / LOG).exists():
            raise UserError(f"{folder} holds no log of a run ({LOG})")
        store, disk = _make_store(folder, node, scratch), disk or Disk()
        restored = restore(folder, graphs, at=at, clock=clock)
        end = restored.end
        log = Log(
            folder / LOG, at=end, sync_interval_s=sync_interval_s, disk=disk, clock=clock, fence=fence
        )
        state = restored.ledgers, restored.ids, log, store, restored.notes, restored.damage
        own: dict[str, Any] = {"disk": disk, "scratch": scratch, "keep_checkpoints": keep_checkpoints}
        buffer = cls(folder, node, config, *state, **own)
        # Remove checkpoints that are damaged, incomplete or later than the restored position.
        for path in folder.glob("*.checkpoint*"):
            if path not in restored.checkpoints:
                remove(path)
        for name in restored.unwritten:
            log.append(graph_record(name, buffer.ledgers[name].graph.outline()))
        # The ledgers now write to the log. The holders of all leases are gone.
        for ledger in buffer.ledgers.values():
            ledger.log = log
            for lease in ledger.leases:
                ledger.release(lease, RESTARTED)
        # Release first, because a group with leased rows cannot be lost.
        buffer._drop_damaged(check or buffer._verify)
        buffer._register_segments(restored.pinned)
        # The releases above must be on disk before any worker starts.
        buffer.commit(sync=True)
        return buffer

    def close(self, *, going_on: bool = False) -> None:
        """Sync the log, and delete the segments if no row is in flight. `going_on` keeps the
        segments that a checkpoint needs."""
        try:
            try:
                self.commit(sync=True)
                self.cutting.finish(wait=True)
            finally:
                self.cutting.close()
                self.log.close()
        except OSError as error:
            if not is_full(error):  # on a full disk, all complete records of the log are valid
                raise
        if self.scratch is not None:
            self.scratch.let_go(over=not going_on)
            return
        sources = {ledger.source for ledger in self.ledgers.values()}
        pinned = self.store.pinned - sources if going_on else ()
        if not pinned and not any(ledger.live.groups for ledger in self.ledgers.values()):
            shutil.rmtree(self.folder / SEGMENTS, ignore_errors=True)

    # Recovery

    def _drop_damaged(self, check: Callable[[Segment], None]) -> None:
        lost: dict[Segment, str] = {}
        for segment in segments_of(self.ledgers.values()):
            try:
                check(segment)
            except DamagedSegment as error:
                lost[segment] = str(error)
        for ledger in self.ledgers.values():
            if ledger.source in lost:  # the driver writes the source again from the graph
                ledger.source = None
        self.damage += self.drop_lost(lost)

    def _verify(self, segment: Segment) -> None:
        # Scratch folders of other nodes may be on other machines; see `elsewhere`.
        folder = self.segments.parent / segment.node
        if self.scratch is None or segment.node == self.node or folder.is_dir():
            verify_segment(folder, segment)

    def _register_segments(self, pinned: set[Segment]) -> None:
        """Register the segments that are still needed, and recycle all other files."""
        for ledger in self.ledgers.values():
            # Discard the lists of freed segments from the replay; `sweep` removes the files.
            ledger.parts.take_freed()
            ledger.leases.take_given_up()
        live = segments_of(self.ledgers.values())
        # `freed` below raises an error for segments that were never published.
        for segment in live | pinned:
            self.store.published(segment)
        for path in ledger_checkpoints(self.folder)[:1]:
            self.store.pin(path.name, pinned)
        # These are freed once their checkpoint is removed.
        self.store.freed(pinned - live)
        self.store.sweep()
        for node, writer in {(s.node, s.file.split(".")[0]) for s in live | pinned}:
            self.store.writer_ended(writer, node)

    # Lost rows

    def elsewhere(self) -> list[Segment]:
        """Return segments of rows in flight on other machines, which recovery could not check."""
        if self.scratch is None:
            return []
        root = self.segments.parent
        return [
            segment
            for ledger in self.ledgers.values()
            for segment in ledger.parts.segments
            if segment.node != self.node and not (root / segment.node).is_dir()
        ]

    def drop_lost(self, lost: Mapping[Segment, str]) -> list[str]:
        """Requeue the groups with columns in lost segments. `lost` maps each segment to the reason.
        Return a line about each group. Call this at recovery, before any worker call."""
        said: list[str] = []
        for ledger in self.ledgers.values():
            for group, segment in ledger.live.groups_in({s for s in ledger.parts.segments if s in lost}):
                again = ledger.lose(group, lost[segment])
                became = "is issued again" if again else "is done, but its samples cannot be recorded"
                said.append(f"group {group} of graph {ledger.name!r} {became}: {lost[segment]}")
        return said

    def unreachable(self, nodes: Collection[str], *, live: bool = True) -> dict[str, dict[int, Segment]]:
        """Return the groups in flight with columns on nodes other than `nodes`: for each graph, a
        mapping from group id to the first unreachable segment.

        Args:
            live: skip groups that an update has claimed, so that no group is trained on twice. The
                update either has their columns already or fails.
        """
        found: dict[str, dict[int, Segment]] = {}
        for name, ledger in self.ledgers.items():
            gone = {segment for segment in ledger.parts.segments if segment.node not in nodes}
            groups = ledger.live.groups_in(gone)
            kept = {id: s for id, s in groups if not (live and ledger.live.is_in_training(id))}
            if kept:
                found[name] = kept
        return found

    def drop_unreachable(self, nodes: Collection[str], *, live: bool = True) -> list[tuple[str, int]]:
        """Requeue the groups that `unreachable` returns, and return their (graph, group id). None
        of their rows may be leased."""
        return [
            (name, group)
            for name, groups in self.unreachable(nodes, live=live).items()
            for group, segment in groups.items()
            if self.ledgers[name].lose(group, f"node {segment.node} is gone")
        ]

    # During the run

    def set_source(self, name: str, segment: Segment) -> None:
        before = self.ledgers[name].source
        if segment == before:
            return
        self.ledgers[name].set_source(segment)
        self.store.published(segment)
        if before is not None:
            self.store.free_later(before)

    def publish(self, ledger: Ledger, lease: Lease, published: Published, written: Written) -> None:
        """Call `Ledger.publish`, and keep the segment files as long as rows need them."""
        ledger.publish(lease, published, written)
        for segment in written.segments if isinstance(written, Spread) else (written,):
            if segment is not None:
                self.store.published(segment)

    def note(self, key: str, value: Any) -> None:
        """Log a JSON value that recovery restores (see `notes`)."""
        self.notes[key] = value
        self.log.append({"do": "note", "key": key, "value": value})

    def commit(self, *, sync: bool = False) -> None:
        """Write all pending events to the log, then free segments that no row needs. `sync` makes
        the events survive a power failure."""
        self.log.commit(sync=sync)
        self.cutting.finish()
        for ledger in self.ledgers.values():
            # Free after writing, because the log on disk must not refer to free segments.
            self.store.freed(ledger.parts.take_freed())

    def checkpoint(self, kept: Collection[Position] = ()) -> Position:
        """Save the state of the ledgers as a starting point for recovery, and archive the part of
        the log that no checkpoint needs. Return the checkpoint's log position. The segments on this
        node that the checkpoint refers to are then on disk.

        Args:
            kept: positions of older checkpoints to keep for model checkpoints.
        """
        self.commit(sync=True)
        here = {s.file for g in self.ledgers.values() for s in g.parts.segments if s.node == self.node}
        # The checkpoint refers to these columns, so they must be on disk first.
        for file in sorted(here):
            with_file(self.segments / file, os.fdatasync)
        position = self.log.position
        records: list[Record] = [
            {"do": "ids", "next_id": self.ids.next_id, "next_group": self.ids.next_group},
            *({"do": "note", "key": key, "value": value} for key, value in self.notes.items()),
            *(graph_record(name, ledger.graph.outline()) for name, ledger in self.ledgers.items()),
            *(record for ledger in self.ledgers.values() for record in save(ledger)),
        ]
        path, self._saved_at = checkpoint_path(self.folder, position), position.offset
        write_checkpoint(path, position, records, disk=self.disk)
        self.store.pin(path.name, segments_of(self.ledgers.values()))
        stay = {checkpoint_path(self.folder, one) for one in kept}
        present = ledger_checkpoints(self.folder)
        dropped = [old for old in present[self.keep_checkpoints :] if old not in stay]
        for old in dropped:
            remove(old)
        self.store.unpin([old.name for old in dropped])
        with suppress(ValueError, OSError):  # a damaged checkpoint: keep the log before it
            self.cutting.begin(checkpoint_position(present[: self.keep_checkpoints][-1]))
        return position

    def shorten_log(self) -> None:
        """Write a checkpoint if the log has grown enough since the last one. Without this, runs
        without model checkpoints would keep their whole log."""
        # A checkpoint takes about 64 bytes per row. Limit it to a quarter of the log's growth.
        rows = sum(len(ledger.live.rows) for ledger in self.ledgers.values())
        if self.log.position.offset - self._saved_at >= max(CUT_BYTES, 4 * 64 * rows):
            self.checkpoint()

    def drop_checkpoint(self, position: Position) -> None:
        path = checkpoint_path(self.folder, position)
        path.unlink(missing_ok=True)
        self.store.unpin([path.name])

    def capacity(
        self,
        name: str,
        *,
        groups_per_update: int = 1,
        staleness: int | None = None,
        lag: int = 0,
        taken: int = 0,
    ) -> tuple[int, str]:
        """Return how many groups of a graph the driver may issue, and a description of the limit.
        Assumes that each group grows as large as the largest finished one. `max_bytes` has no
        effect until a group has finished.

        Args:
            groups_per_update: number of groups in an update. One update's groups are allowed even
                beyond `max_rows` and `max_bytes`, because rows are only freed after training.
            staleness: maximum number of updates by which a row's policy may be behind the weights
                that it trains. None sets no bound.
            lag: number of updates by which the generating weights are behind the trained ones.
            taken: number of groups that the current update has claimed so far, finished or not.
        """
        ledger, max_rows, max_bytes = self.ledgers[name], self.config.max_rows, self.config.max_bytes
        live, parts, groups = ledger.live, ledger.parts, len(ledger.live.groups)
        updates = [n for n in ledger.graph.nodes if n.operation.updates]
        too_old = max(map(ledger.readiness.too_old, updates), default=0)
        missing = groups_per_update - live.groups_at_work + too_old
        bounds: list[tuple[int, str]] = []
        if max_rows is not None:
            expected = expected_rows(ledger.graph)
            each = max(expected, live.largest_group)
            free = max_rows // each - groups
            free = max(free, missing) if live.largest_group > expected else free
            bounds.append(
                (free, f"{len(live.rows)} rows in flight, max_rows={max_rows}, {each} a group")
            )
        if max_bytes is not None:
            each, stored = parts.largest_group_bytes, parts.num_bytes
            written = round(parts.published_bytes - parts.finished_bytes)  # by groups in flight
            room = max_bytes - stored - max(0, each * groups - written)
            free = max(room // each if each else UNBOUNDED, missing)
            bounds.append(
                (free, f"{stored} bytes in flight, max_bytes={max_bytes}, up to {each} a group")
            )
        if staleness is not None and updates:
            ahead = max(
                ledger.readiness.unclaimed(n) + max(taken, ledger.leases.num_groups(n)) for n in updates
            )
            free = (staleness + 1 - lag) * groups_per_update - ahead
            bounds.append((free, f"{ahead} groups wait to be trained on, max_staleness={staleness}"))
        free, reason = min(bounds, default=(UNBOUNDED, ""))
        return max(0, free), reason


def _make_store(folder: Path, node: str, scratch: Scratch | None) -> SegmentStore:
    root = folder / SEGMENTS if scratch is None else scratch.hold()
    for made in (folder, root, root / node):
        make_folder(made)
    return SegmentStore(root / node, node)


# Capacity

UNBOUNDED = 1 << 30


def expected_rows(graph: Graph) -> int:
    """Estimate a group's number of rows from the argument `n` of EXPAND nodes."""
    sizes = {0: 1}
    for node in graph.nodes:
        if node.operation.shape is Shape.EXPAND and node.makes_level is not None:
            number = node.arguments.get("n", 1)
            number = number if isinstance(number, int) and number > 0 else 1
            sizes[node.makes_level] = sizes[node.level] * number
    return sum(sizes.values())
