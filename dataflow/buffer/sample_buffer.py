"""The sample buffer: ledgers, the log that they write, and the segment files of this node.

It lives in the driver. Workers write and read segments; the driver only passes references to them.
`runs/files.py` has the file layout.
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
from .leases import Fate, Lease, Published, Spread, Written
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

KEEP_CHECKPOINTS = 2
"""Checkpoints of the ledgers to keep if the caller does not say."""
CUT_BYTES = 4 << 20
"""[bytes] Compress the log before the oldest kept checkpoint into `history` once it has this size.
Fewer bytes would make many small parts; more would leave a large log to copy."""


class BufferConfig(Config):
    """Limits and storage of the sample buffer, and its handling of stale rows."""

    max_rows: int | None = Field(default=None, ge=1)
    """[rows] Maximum number of rows of one graph in flight, prompts and samples together. The
    driver issues more prompts as rows finish. None sets no limit. Set it if rows pile up before a
    slow node."""
    max_bytes: int | None = Field(default=None, ge=1)
    """[bytes] Maximum size of the columns in flight of one graph. None sets no limit. Set it if
    `memory_low` warns, or if the disk for segments is small."""
    on_stale: Fate = "wait"
    """How to handle a group that exceeds the staleness bound when an update could take it. With
    "wait", updates wait for late groups; only a resume with a lower bound makes groups too stale,
    and Weft then requeues and reports them. "mask" masks the stale rows in the loss, "requeue"
    samples the prompt again, and "drop" discards the group, which favours short responses. Choose
    one of these three if late groups hold up training."""
    lease_deadline_s: float | None = Field(default=None, gt=0)
    """[s] Maximum time that a worker may hold claimed rows; unfinished rows are then requeued. None
    applies only the driver's deadlines. Set it if a rank is sometimes much slower than others."""
    memory_bytes: int | None = Field(default=None, ge=1)
    """[bytes] Maximum size of the segments kept in memory on each node. Weft writes older segments
    to disk and reads them back on demand. With None, the kernel decides. Set it if other programs
    need the page cache."""
    scratch: Path | None = None
    """Node-local folder for segments. Each run gets a subfolder, which is removed when the run
    ends, even if it was killed. None stores segments in the run directory on a single machine, and
    in each node's temporary folder (`TMPDIR`) on a cluster. Set it if those are on a slow or small
    disk."""

    retired: ClassVar[Mapping[str, str]] = {
        "file_bytes": "segment files always have 16 MiB",
        "sync_interval_s": "the log is synced every half second",
        "keep_checkpoints": "rows are kept for as many checkpoints as CheckpointConfig(keep=...) says",
        "cut_bytes": "the log is archived in parts of 4 MiB",
    }


@dataclass
class SampleBuffer:
    """Ledgers by graph name, with their log and segments."""

    folder: Path
    node: str
    config: BufferConfig
    ledgers: dict[str, Ledger]
    ids: Ids
    log: Log
    store: SegmentStore
    notes: dict[str, Any] = field(default_factory=dict)
    """Small values that recovery restores together with the rows: policy versions, the step."""
    damage: list[str] = field(default_factory=list)
    """Damage found at recovery, and how it was handled."""
    disk: Disk = field(default_factory=Disk)
    scratch: Scratch | None = None
    keep_checkpoints: int = KEEP_CHECKPOINTS
    """Ledger checkpoints to keep besides the ones that model checkpoints need."""

    def __post_init__(self) -> None:
        self.cutting = LogCutting(self.log, CUT_BYTES)
        self._saved_at = self.log.position.offset
        """Byte offset in the log of the latest checkpoint, or where this process started to
        write."""

    @property
    def segments(self) -> Path:
        """Folder with the segments of this node."""
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
        """Create a buffer in a folder that has none.

        Args:
            node: name of the driver's node.
            disk: where to write the log; a test passes one that fails.
            clock: seconds since any moment, for deadlines.
            ids: first ids to assign, if an earlier log used the ones before.
            scratch: where to store segments; None stores them in `folder`.
            sync_interval_s: seconds of the log that a power loss may cost. A kill costs nothing.
            keep_checkpoints: ledger checkpoints to keep besides the ones that model checkpoints need.

        Raises a UserError if the folder already has a log.
        """
        if (folder / LOG).exists() and any(True for _ in LogReader(folder / LOG)):
            raise UserError(
                f"{folder} already has the buffer of a run; resume it with SampleBuffer.recover()"
            )
        store, disk = _make_store(folder, node, scratch), disk or Disk()
        log = Log(folder / LOG, sync_interval_s=sync_interval_s, disk=disk, clock=clock, fence=fence)
        ids = ids or Ids()
        # A resumed run without its log continues the ids of the old one.
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

        A torn or damaged end of the log is cut off and kept in a separate file. Damaged checkpoints
        are skipped. Groups whose columns cannot be read are requeued. `damage` lists each of these.

        Args:
            graphs: graphs of the run; None takes their outlines from the log, for read-only use.
            config, node, disk, clock, fence, scratch, sync_interval_s, keep_checkpoints: as in `create`.
            at: log position to go back to, from the checkpoint of a saved model; None is the end.
            check: raises DamagedSegment for columns that cannot be read. None reads the folders of
                all nodes that are visible here; call `drop_lost` later for other nodes.

        Raises:
            UserError: the folder has no log, or the log has other graphs.
            RecoveryError: the log does not fit the ledgers.
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
        # Checkpoints that are damaged, incomplete, or later than the restored position.
        for path in folder.glob("*.checkpoint*"):
            if path not in restored.checkpoints:
                remove(path)
        for name in restored.unwritten:
            log.append(graph_record(name, buffer.ledgers[name].graph.outline()))
        # The holders of all leases are gone. From here on, the ledgers write to the log.
        for ledger in buffer.ledgers.values():
            ledger.log = log
            for lease in ledger.leases:
                ledger.release(lease, RESTARTED)
        # After the releases, because a group with leased rows cannot be lost.
        buffer._drop_damaged(check or buffer._verify)
        buffer._register_segments(restored.pinned)
        # The releases above must be on disk before any worker starts.
        buffer.commit(sync=True)
        return buffer

    def close(self, *, going_on: bool = False) -> None:
        """Sync the log to disk. Delete the segments if no row is in flight, except those that a
        checkpoint needs if the run is `going_on` from it."""
        try:
            try:
                self.commit(sync=True)
                self.cutting.finish(wait=True)
            finally:
                self.cutting.close()
                self.log.close()
        except OSError as error:
            if not is_full(error):  # on a full disk, the log is valid up to its last complete record
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
            if ledger.source in lost:  # the driver writes it again from the graph
                ledger.source = None
        self.damage += self.drop_lost(lost)

    def _verify(self, segment: Segment) -> None:
        # Scratch folders of other nodes are on other machines; see `elsewhere`.
        folder = self.segments.parent / segment.node
        if self.scratch is None or segment.node == self.node or folder.is_dir():
            verify_segment(folder, segment)

    def _register_segments(self, pinned: set[Segment]) -> None:
        """Register the segments that are still needed, and recycle all other files."""
        for ledger in self.ledgers.values():
            # Replay freed these already; `sweep` removes their files.
            ledger.parts.take_freed()
            ledger.leases.take_given_up()
        live = segments_of(self.ledgers.values())
        # `freed` below refuses segments that were never published.
        for segment in live | pinned:
            self.store.published(segment)
        for path in ledger_checkpoints(self.folder)[:1]:
            self.store.pin(path.name, pinned)
        # Freed once their checkpoint is removed.
        self.store.freed(pinned - live)
        self.store.sweep()
        for node, writer in {(s.node, s.file.split(".")[0]) for s in live | pinned}:
            self.store.writer_ended(writer, node)

    # Lost rows

    def elsewhere(self) -> list[Segment]:
        """Return segments of rows in flight that recovery could not check: on other machines."""
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
        """Requeue the groups that have columns in lost segments, given with the reason. Call it at
        recovery, before any worker call. Return a line for each group, saying how it was
        handled."""
        said: list[str] = []
        for ledger in self.ledgers.values():
            for group, segment in ledger.live.groups_in({s for s in ledger.parts.segments if s in lost}):
                again = ledger.lose(group, lost[segment])
                became = "is issued again" if again else "is done, but its samples cannot be recorded"
                said.append(f"group {group} of graph {ledger.name!r} {became}: {lost[segment]}")
        return said

    def unreachable(self, nodes: Collection[str], *, live: bool = True) -> dict[str, dict[int, Segment]]:
        """Return the groups in flight that have columns on nodes other than the given ones: graph
        -> group -> its first segment that cannot be read.

        Args:
            live: skip groups that an update has begun to train on, because training on them twice
                would be wrong. The update either has their columns or fails by itself.
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
        """Requeue the `unreachable` groups, without leased rows. Return (graph, group)."""
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
        """Publish rows as `Ledger.publish` does, and keep their segment files while rows need
        them."""
        ledger.publish(lease, published, written)
        for segment in written.segments if isinstance(written, Spread) else (written,):
            if segment is not None:
                self.store.published(segment)

    def note(self, key: str, value: Any) -> None:
        """Write a JSON value to the log, so that recovery restores it (see `notes`)."""
        self.notes[key] = value
        self.log.append({"do": "note", "key": key, "value": value})

    def commit(self, *, sync: bool = False) -> None:
        """Write all pending events to the log, then free segments that no row needs. With `sync`,
        the events survive a power loss once this returns."""
        self.log.commit(sync=sync)
        self.cutting.finish()
        for ledger in self.ledgers.values():
            # After the write: the log on disk must not need segments that are already free.
            self.store.freed(ledger.parts.take_freed())

    def checkpoint(self, kept: Collection[Position] = ()) -> Position:
        """Save the state of the ledgers as a starting point for recovery, and archive the log that
        no checkpoint needs. Return the log position of the checkpoint.

        When this returns, everything on this node that the checkpoint refers to is on disk.

        Args:
            kept: positions whose checkpoints must stay, because model checkpoints refer to them.
        """
        self.commit(sync=True)
        here = {s.file for g in self.ledgers.values() for s in g.parts.segments if s.node == self.node}
        # The log refers to these columns, so they must be on disk first.
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
        """Make a checkpoint if the log has grown by CUT_BYTES since the last one, or by more if many
        rows are in flight."""
        # Runs without model checkpoints would otherwise keep their whole log. A checkpoint takes
        # about 64 bytes a row, so with this bound it costs a quarter of what the log does.
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
        """Return how many groups of a graph may be issued, and the limit that allows no more.

        Assumes that each group is as large as the largest finished one; `max_bytes` has no effect
        before a group is finished.

        Args:
            groups_per_update: groups in an update. One update's groups are always admitted, even
                beyond the limits, because rows are only freed after training.
            staleness: most updates that a row may lag the weights that it trains; None sets no bound.
                Only groups that will be trained on within it are admitted.
            lag: number of updates that the generating weights are behind the trained ones.
            taken: groups that the current update has claimed so far, finished or not.
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
    """Estimate the rows of a group on all levels together, from the argument `n` of its
    expansions."""
    sizes = {0: 1}
    for node in graph.nodes:
        if node.operation.shape is Shape.EXPAND and node.makes_level is not None:
            number = node.arguments.get("n", 1)
            number = number if isinstance(number, int) and number > 0 else 1
            sizes[node.makes_level] = sizes[node.level] * number
    return sum(sizes.values())
