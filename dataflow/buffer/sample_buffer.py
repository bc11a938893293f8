"""SampleBuffer: the ledgers of a run's graphs, the log that they write, and the files of this node's segments.

It lives in the driver. Worker processes write and read segments; their references to them pass through here.
`folder.py` says where its files are.
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
from ..runs.files import LOG, SEGMENTS, Disk, is_full, make_folder, remove
from ..runs.log import SYNC_INTERVAL_S, Fence, Log, LogCutting, LogReader, Position, Record, graph_record
from .leases import Fate, Lease, Published, Spread, Written
from .ledger import Capacity, Ledger, capacity
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
from .segment_store import Pins, SegmentStore
from .segments import Segment, verify_segment, with_file

KEEP_CHECKPOINTS = 2
"""Checkpoints of the ledgers that are kept where nobody says how many checkpoints of models there will be."""
CUT_BYTES = 4 << 20
"""When so many bytes of the log lie before all checkpoints that are kept, they are compressed into the folder `history`: fewer would make
many small parts, more would leave a large log to be copied."""


class BufferConfig(Config):
    """How much the sample buffer may hold, and how durable it is."""

    max_rows: int | None = Field(default=None, ge=1)
    """[rows] How many of one graph may be in flight, prompts and samples together; more prompts are issued when some are finished. None:
    no bound. Set it where rows pile up before a slow node."""
    max_bytes: int | None = Field(default=None, ge=1)
    """[bytes] Columns of rows in flight of one graph, at most. None: no bound. Set it where `memory_low` warns, or the disk of segments
    is small."""
    on_stale: Fate = "wait"
    """The fate of a group that is too old for the schedule when an update could take it: `wait`, `mask`, `requeue` or `drop`. With
    `wait`, updates wait for late groups. A group that is too old nevertheless, because a resume lowered the bound, is requeued and
    reported. Choose another where late groups hold up training; to drop them favours short responses."""
    lease_deadline_s: float | None = Field(default=None, gt=0)
    """[s] Time after which rows are requeued that a worker claimed and did not finish. None: only the driver's deadlines apply. Set it
    where a rank is at times much slower than others."""
    memory_bytes: int | None = Field(default=None, ge=1)
    """[bytes] Segments that stay in memory on a node, at most. Older ones are written to disk and read back when they are needed. None
    leaves that to the kernel. Set it where the page cache is wanted by others."""
    scratch: Path | None = None
    """A folder that is local to each node. The segments of a run lie in a folder of its own there, which is removed when the run is over
    or was killed. None: where all processes are on one machine, segments lie in the directory of the run; on a cluster, among the
    temporary files of each node (`TMPDIR`). Set it where these lie on a slow or small disk."""

    retired: ClassVar[Mapping[str, str]] = {
        "file_bytes": "files of segments have 16 MiB",
        "sync_interval_s": "the log is synced every half second",
        "keep_checkpoints": "rows are kept for as many checkpoints as CheckpointConfig(keep=...) says",
        "cut_bytes": "the log is cut by 4 MiB",
    }


@dataclass
class SampleBuffer:
    """Ledgers by the name of their graph. `create` makes the buffer of a new run, `recover` that of a run that goes on."""

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
    """What was found damaged at recovery, and what was done about it."""
    disk: Disk = field(default_factory=Disk)
    scratch: Scratch | None = None
    """Where segments lie, if not in the folder of the buffer."""
    keep_checkpoints: int = KEEP_CHECKPOINTS
    """How many checkpoints of the ledgers are kept, beside those that a model's checkpoint needs."""

    def __post_init__(self) -> None:
        self._pins = Pins(self.store)
        self.cutting = LogCutting(self.log, CUT_BYTES)
        self._saved_at = self.log.position.offset
        """Byte of the log of the latest checkpoint, or where the log began to be written by this process."""

    @property
    def segments(self) -> Path:
        """The folder of this node's segments."""
        return _root(self.folder, self.scratch) / self.node

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
        scratch: Scratch | None = None,
        sync_interval_s: float = SYNC_INTERVAL_S,
        keep_checkpoints: int = KEEP_CHECKPOINTS,
    ) -> SampleBuffer:
        """A new buffer in a folder that has none.

        Args:
            folder: the folder of the buffer, made when missing.
            graphs: by their names in the run.
            config: the bounds and durability of the buffer.
            node: the name of the driver's node.
            disk: where the log is written; a test passes one that fails.
            clock: seconds since any moment, for deadlines.
            fence: keeps the log to one writer.
            ids: the first ids to give out, where an earlier log gave out those before.
            scratch: where segments lie; None: in the folder of the buffer.
            sync_interval_s: seconds of the log that a loss of power may cost. The death of a process costs nothing.
            keep_checkpoints: how many checkpoints of the ledgers are kept, beside those that a model's checkpoint needs.

        Raises:
            UserError: the folder has a log already.
        """
        if (folder / LOG).exists() and any(True for _ in LogReader(folder / LOG)):
            raise UserError(
                f"{folder} holds the buffer of a run already; SampleBuffer.recover() goes on with it"
            )
        root = _root(folder, scratch) if scratch is None else scratch.hold()
        _make_folders(folder, root, node)
        disk = disk or Disk()
        log = Log(folder / LOG, sync_interval_s=sync_interval_s, disk=disk, clock=clock, fence=fence)
        ids = ids or Ids()
        if ids.next_id:
            log.append({"do": "ids", "next_id": ids.next_id, "next_group": ids.next_group})
        ledgers = {
            name: Ledger(graph, ids=ids, name=name, log=log, clock=clock)
            for name, graph in graphs.items()
        }
        for name, graph in graphs.items():
            log.append(graph_record(name, graph.outline()))
        log.commit(sync=True)
        store = SegmentStore(root / node, node)
        kept = keep_checkpoints
        return cls(
            folder,
            node,
            config,
            ledgers,
            ids,
            log,
            store,
            disk=disk,
            scratch=scratch,
            keep_checkpoints=kept,
        )

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
        scratch: Scratch | None = None,
        sync_interval_s: float = SYNC_INTERVAL_S,
        keep_checkpoints: int = KEEP_CHECKPOINTS,
    ) -> SampleBuffer:
        """The buffer of a run that ended, in the state that its log describes. Leases are released: their holders are gone.

        A torn or damaged tail of the log is cut off and kept beside it. A damaged checkpoint is passed over. A group whose
        columns cannot be read any more is issued again. `damage` names each of these.

        Args:
            folder: the folder of the buffer.
            graphs: the graphs of the run; None takes their outlines from the log, for looking only.
            config, node, disk, clock, scratch, sync_interval_s, keep_checkpoints: as in `create`.
            at: the position to go back to, of a checkpoint that belongs to a saved model; None: the end.
            check: raises DamagedSegment for columns that cannot be read; None reads the folders of all nodes that can be here. Of other
                nodes, `drop_lost` is told later.
            fence: keeps the log to one writer.

        Raises:
            UserError: there is no log, or the graphs are not those of the run.
            RecoveryError: the log does not fit the ledgers.
        """
        if not (folder / LOG).exists():
            raise UserError(f"{folder} holds no log of a run ({LOG})")
        root = _root(folder, scratch) if scratch is None else scratch.hold()
        _make_folders(folder, root, node)
        disk = disk or Disk()
        restored = restore(folder, graphs, at=at, clock=clock)
        log = Log(
            folder / LOG,
            at=restored.end,
            sync_interval_s=sync_interval_s,
            disk=disk,
            clock=clock,
            fence=fence,
        )
        store = SegmentStore(root / node, node)
        buffer = cls(
            folder, node, config, restored.ledgers, restored.ids, log, store, disk=disk, scratch=scratch
        )
        buffer.keep_checkpoints = keep_checkpoints
        buffer.notes, buffer.damage = restored.notes, restored.damage
        buffer._remove_checkpoints_but(restored.checkpoints)
        buffer._log_graphs(restored.unwritten)
        buffer._release_leases()
        buffer._drop_damaged(check or buffer._verify)
        buffer._register_segments(restored.pinned)
        buffer.commit(sync=True)
        return buffer

    def close(self, *, going_on: bool = False) -> None:
        """Sync the log to disk. Where no row is left in flight, delete the folder of segments.

        Args:
            going_on: whether a run will go on from a checkpoint. Then segments that it refers to are kept, too.
        """
        try:
            try:
                self.commit(sync=True)
                self.cutting.finish(wait=True)
            finally:
                self.cutting.close()
                self.log.close()
        except OSError as error:
            if not is_full(error):  # the log is sound as far as it goes, and no more was promised
                raise
        if self.scratch is not None:
            self.scratch.release(over=not going_on)
            return
        pinned = (
            self._pins.segments - {ledger.source for ledger in self.ledgers.values()} if going_on else ()
        )
        if not pinned and not any(ledger.live.groups for ledger in self.ledgers.values()):
            shutil.rmtree(self.folder / SEGMENTS, ignore_errors=True)

    # The steps of recovery

    def _remove_checkpoints_but(self, kept: Collection[Path]) -> None:
        """Remove those of a future that was given up, damaged ones, and those that were never completed."""
        for path in self.folder.glob("*.checkpoint*"):
            if path not in kept:
                remove(path)

    def _log_graphs(self, names: Collection[str]) -> None:
        for name in names:
            self.log.append(graph_record(name, self.ledgers[name].graph.outline()))

    def _release_leases(self) -> None:
        """Release all leases, since their holders are gone. The ledgers write to the log from here on."""
        for ledger in self.ledgers.values():
            ledger.log = self.log
            for lease in ledger.leases:
                ledger.release(lease, "the run was started again")

    def _drop_damaged(self, check: Callable[[Segment], None]) -> None:
        """Issue the groups again whose segments cannot be read."""
        lost: dict[Segment, str] = {}
        for segment in segments_of(self.ledgers.values()):
            try:
                check(segment)
            except DamagedSegment as error:
                lost[segment] = str(error)
        for ledger in self.ledgers.values():
            if ledger.source in lost:  # the driver, which has the graphs, writes it again
                ledger.source = None
        self.damage += self.drop_lost(lost)

    def _verify(self, segment: Segment) -> None:
        folder = self.segments.parent / segment.node
        if self.scratch is None or segment.node == self.node or folder.is_dir():
            verify_segment(folder, segment)

    def _register_segments(self, pinned: set[Segment]) -> None:
        """Tell the store which segments are needed, by rows or by the latest checkpoint, and recycle all other files."""
        for ledger in self.ledgers.values():
            ledger.parts.take_freed()
            ledger.leases.take_given_up()
        live = segments_of(self.ledgers.values())
        for segment in live | pinned:
            self.store.published(segment)
        for path in ledger_checkpoints(self.folder)[:1]:
            self._pins.add(path.name, pinned)
        self._pins.free(pinned - live)
        self.store.sweep()
        for node, writer in {(s.node, s.file.split(".")[0]) for s in live | pinned}:
            self.store.writer_ended(writer, node)

    # Rows that are lost

    def elsewhere(self) -> list[Segment]:
        """The segments of rows in flight that recovery could not look at, since they lie on other machines."""
        if self.scratch is None:
            return []
        root, here = self.segments.parent, self.node
        all_parts = (segment for ledger in self.ledgers.values() for segment in ledger.parts.segments)
        return [
            segment
            for segment in all_parts
            if segment.node != here and not (root / segment.node).is_dir()
        ]

    def drop_lost(self, lost: Mapping[Segment, str]) -> list[str]:
        """Issue the groups again that have columns in these segments. For recovery, before any call is made.

        Args:
            lost: segment -> why it cannot be read.

        Returns:
            What became of each group, a line each.
        """
        said: list[str] = []
        for ledger in self.ledgers.values():
            for group, segment in ledger.live.groups_in(
                {s: lost[s] for s in ledger.parts.segments if s in lost}
            ):
                again = ledger.lose(group, lost[segment])
                became = "is issued again" if again else "is done, but its samples cannot be recorded"
                said.append(f"group {group} of graph {ledger.name!r} {became}: {lost[segment]}")
        return said

    def unreachable(self, nodes: Collection[str], *, live: bool = True) -> dict[str, dict[int, Segment]]:
        """The groups in flight that have columns on other nodes than these.

        Args:
            nodes: the names of those on which segments can be read.
            live: the run goes on as it is: a group that an update has begun with stays, since to train on it once more would be wrong.
                The update has read it, or fails by itself.

        Returns:
            Graph -> group -> the first of its segments there.
        """
        found: dict[str, dict[int, Segment]] = {}
        for name, ledger in self.ledgers.items():
            gone = {segment for segment in ledger.parts.segments if segment.node not in nodes}
            groups = dict(ledger.live.groups_in(gone)) if gone else {}
            if live:
                groups = {
                    id: segment for id, segment in groups.items() if not ledger.live.is_in_training(id)
                }
            if groups:
                found[name] = groups
        return found

    def drop_unreachable(self, nodes: Collection[str], *, live: bool = True) -> list[tuple[str, int]]:
        """Issue the `unreachable` groups again. Nobody may hold rows of them.

        Returns:
            (graph, group) of each group that is issued again.
        """
        return [
            (name, group)
            for name, groups in self.unreachable(nodes, live=live).items()
            for group, segment in groups.items()
            if self.ledgers[name].lose(group, f"node {segment.node} is gone")
        ]

    # While the run goes on

    def set_source(self, name: str, segment: Segment) -> None:
        """Say where the rows of a graph's source lie."""
        before = self.ledgers[name].source
        if segment == before:
            return
        self.ledgers[name].set_source(segment)
        self.store.published(segment)
        if before is not None:
            self._pins.free_later(before)

    def publish(self, ledger: Ledger, lease: Lease, published: Published, written: Written) -> None:
        """Publish rows as `Ledger.publish` does, and keep the files of their segments as long as rows lie in them."""
        ledger.publish(lease, published, written)
        for segment in written.segments if isinstance(written, Spread) else (written,):
            if segment is not None:
                self.store.published(segment)

    def note(self, key: str, value: Any) -> None:
        """Write a value to the log that recovery restores (see `notes`).

        Args:
            key: its name.
            value: anything that JSON has.
        """
        self.notes[key] = value
        self.log.append({"do": "note", "key": key, "value": value})

    def commit(self, *, sync: bool = False) -> None:
        """Write all events so far to the log, then free the segments that no row needs any more.

        Args:
            sync: whether the events must survive a loss of power when this returns.
        """
        self.log.commit(sync=sync)
        self.cutting.finish()
        self._pins.free(
            segment for ledger in self.ledgers.values() for segment in ledger.parts.take_freed()
        )

    def checkpoint(self, kept: Collection[Position] = ()) -> Position:
        """Save the state of the ledgers, so that recovery starts from here. What no checkpoint needs of the log any more is archived.

        Everything on this node that the checkpoint refers to is on disk when this returns.

        Args:
            kept: positions whose checkpoints stay, however old, since those of models refer to them.

        Returns:
            The position of the log that it belongs to.
        """
        self.commit(sync=True)
        here = {s.file for g in self.ledgers.values() for s in g.parts.segments if s.node == self.node}
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
        self._pins.add(path.name, segments_of(self.ledgers.values()))
        stay = {checkpoint_path(self.folder, one) for one in kept}
        present = ledger_checkpoints(self.folder)
        dropped = [old for old in present[self.keep_checkpoints :] if old not in stay]
        for old in dropped:
            remove(old)
        self._pins.drop(*(old.name for old in dropped))
        with suppress(ValueError, OSError):  # a damaged one: what lies before it stays
            self.cutting.begin(checkpoint_position(present[: self.keep_checkpoints][-1]))
        return position

    def shorten_log(self) -> None:
        """Make a checkpoint when the log has grown by CUT_BYTES since the last one, for a run that makes none of its models: without
        checkpoints the file of the log would grow with the age of the run."""
        if self.log.position.offset - self._saved_at >= CUT_BYTES:
            self.checkpoint()

    def drop_checkpoint(self, position: Position) -> None:
        """Delete the checkpoint of this position, where there is one: no run will go back to it."""
        path = checkpoint_path(self.folder, position)
        path.unlink(missing_ok=True)
        self._pins.drop(path.name)

    def capacity(
        self,
        name: str,
        *,
        groups_per_update: int = 1,
        staleness: int | None = None,
        lag: int = 0,
        taken: int = 0,
    ) -> Capacity:
        """How many groups of this graph may be issued now, under the bounds of the configuration: see `capacity`."""
        return capacity(
            self.ledgers[name],
            max_rows=self.config.max_rows,
            max_bytes=self.config.max_bytes,
            groups_per_update=groups_per_update,
            staleness=staleness,
            lag=lag,
            taken=taken,
        )


def _root(folder: Path, scratch: Scratch | None) -> Path:
    """The folder that has a folder for the segments of each node."""
    return folder / SEGMENTS if scratch is None else scratch.path


def _make_folders(folder: Path, root: Path, node: str) -> None:
    for made in (folder, root, root / node):
        make_folder(made)
