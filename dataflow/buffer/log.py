"""Log: the write-ahead log of a run. One JSON record a line, each with the checksum of everything up to it.

    1f0c5a33 {"do":"claim","graph":"train","lease":7,"node":"reward.score","ids":[4096,4097]}

The checksum is the CRC-32 of this record, started from that of the record before: a torn, changed, missing or repeated
line shows, and what stands before it is still proven. Records are written together (group commit): `append` costs no
system call, `commit` one. A position in the log is a number of bytes; a checkpoint names one.

A log has one writer. Whoever goes on with it copies what it keeps into a new file, and gives that the name of the old one: a
writer that was taken for dead and still lives appends to a file without a name. A `Fence` tells it so before each commit.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..errors import FormatError, TakenOverError
from ..graph import Graph
from .disk import PARTIAL, Disk, remove

Record = Mapping[str, Any]
"""What happened: `do` says what, the rest depends on it. Values are those of JSON."""

FORMAT = 2
"""Of the records of a log and of the graphs described in it. In format 1, all rows made of a parent came together."""

_CHUNK_BYTES = 4 << 20
_encode = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True)
class Position:
    """A place between two records of a log, with the checksum that the next one starts from."""

    offset: int = 0
    checksum: int = 0


class Fence(Protocol):
    """What keeps a run to one writer."""

    def check(self) -> None:
        """See that this process may write; raises TakenOverError when another one does."""
        ...

    def record(self) -> Record:
        """What the log says of the writer that begins here: `do` is "epoch", and `epoch` is larger than all before it."""
        ...


class Log:
    """The log of a run, open for writing at its end (`Log(path)` of a new run, `Log(path, at=end)` of one that goes on)."""

    def __init__(
        self,
        path: Path,
        *,
        at: Position = Position(),
        sync_interval_s: float = 0.5,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.monotonic,
        fence: Fence | None = None,
    ) -> None:
        """Whatever stands behind `at` is cut off, and kept beside the log as `NAME.cut-OFFSET`.

        Args:
            sync_interval_s: how much of the log the loss of power may cost at most; the death of a process costs nothing
                that was committed.
            fence: asked before each commit; its record is the first that this writer appends.
        """
        self.path = path
        self._disk = disk or Disk()
        self._clock = clock
        self._sync_interval_s = sync_interval_s
        self._pending: tuple[int, list[bytes]] = at.offset, []
        """What is not written yet, and where it goes: one value, so that an interrupt (Ctrl-C) finds it whole."""
        self._torn = False
        """Something may stand behind the place where what is pending goes."""
        self.position = at
        """The end of what was appended, committed or not."""
        self._unsynced = False
        self._fence = fence
        if path.exists():
            self._keep_what_is_cut(at.offset)
        self._descriptor = self._begin_file(at.offset)
        self._synced = clock()
        if fence is not None:
            self.append(fence.record())

    def _begin_file(self, size: int) -> int:
        """A file of this writer's own in the place of the log, with so much of what is there; whole at every moment."""
        unnamed = self.path.with_name(self.path.name + PARTIAL)
        remove(unnamed)
        descriptor = self._disk.open(unnamed)
        try:
            if size:
                with self.path.open("rb") as before:
                    for start in range(0, size, _CHUNK_BYTES):
                        self._disk.write(descriptor, before.read(min(_CHUNK_BYTES, size - start)))
            self._disk.sync(descriptor)
            self._disk.rename(unnamed, self.path)
            self._disk.sync_folder(self.path.parent)
        except OSError:
            self._disk.close(descriptor)
            unnamed.unlink(missing_ok=True)
            raise
        return descriptor

    def _keep_what_is_cut(self, offset: int) -> None:
        with self.path.open("rb") as file:
            file.seek(offset)
            cut = file.read()
        number, name = 1, f"{self.path.name}.cut-{offset}"
        kept = self.path.with_name(name)
        while kept.exists() and not cut.startswith(kept.read_bytes()):  # of another cut at the same place
            number += 1
            kept = self.path.with_name(f"{name}-{number}")
        if cut:
            self._disk.write_whole(kept, cut)

    def append(self, record: Record) -> None:
        """Note what happened; it is on disk after the next `commit`."""
        line = _line(record, self.position.checksum)
        self._pending[1].append(line)
        self.position = Position(self.position.offset + len(line), int(line[:8], 16))

    def commit(self, *, sync: bool = False) -> None:
        """Write what was appended, all at once; `sync` it, or when the last time is longer ago than the interval.

        Raises:
            TakenOverError: another process writes the log by now.
        """
        self._check()
        offset, lines = self._pending
        if self._torn:
            self._disk.truncate(self._descriptor, offset)
            self._torn = False
        if lines:
            data = b"".join(lines)
            self._torn = self._unsynced = True
            try:
                self._disk.write(self._descriptor, data)
                self._pending = offset + len(data), []
            except OSError:  # the disk is full, say: what was written of it goes, and is written again next time
                self._disk.truncate(self._descriptor, offset)
                raise
            self._torn = False
        if self._unsynced and (sync or self._clock() - self._synced >= self._sync_interval_s):
            self._disk.sync(self._descriptor)
            self._synced = self._clock()
            self._unsynced = False

    def _check(self) -> None:
        if self._descriptor < 0:  # closed: there is nothing to write
            return
        if self._fence is not None:
            self._fence.check()
        try:
            own = os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            own = False
        if not own:
            raise TakenOverError(
                f"{self.path} is not the file any more that this process writes: another one goes on with it"
            )

    def close(self) -> None:
        """Commit, sync, and let go of the file."""
        if self._descriptor >= 0:
            try:
                self.commit(sync=True)
            finally:
                self._disk.close(self._descriptor)
                self._descriptor = -1


class LogReader:
    """The records of a log, in order, as far as they are sound; safe to use on a log that is being written.

    After the iteration, `end` is the position behind the last sound record, and `damage` says what is wrong there.
    """

    def __init__(self, path: Path, start: Position = Position()) -> None:
        self.path = path
        self.end = start
        self.damage: str | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.damage = None
        with self.path.open("rb") as file:
            file.seek(self.end.offset)
            for line in file:
                checksum = self._checksum(line)
                if checksum is None:
                    return
                self.end = Position(self.end.offset + len(line), checksum)
                yield json.loads(line[9:])

    def _checksum(self, line: bytes) -> int | None:
        where = f"{self.path}, byte {self.end.offset}"
        if not line.endswith(b"\n"):
            self.damage = f"{where}: the last record is torn after {len(line)} bytes"
            return None
        checksum = zlib.crc32(line[9:-1], self.end.checksum)
        if line[:9] != b"%08x " % checksum:
            self.damage = f"{where}: a record's checksum is {line[:8].decode(errors='replace')!r}, not {checksum:08x}"
            return None
        return checksum


def graph_record(name: str, outline: Record) -> Record:
    """The record with which a log describes a graph of its run, and says of which format it is."""
    return {"do": "graph", "graph": name, "format": FORMAT, "outline": outline}


def described_graph(record: Record) -> Graph:
    """The graph that a record describes: a checker or a ledger can walk it, and nobody can run it.

    Raises:
        FormatError: another version of Weft wrote the log.
    """
    found = record.get("format", 1)
    if found != FORMAT:
        which = "an earlier" if found < FORMAT else "a later"
        where = f"graph {record['graph']!r} is described in format {found}, by {which} version of Weft"
        raise FormatError(f"the log cannot be read: {where}; this version reads format {FORMAT}")
    return Graph.from_outline(record["outline"])


def has_position(path: Path, position: Position) -> bool:
    """Whether a record of the log ends there, with this checksum: a log that was cut and went on otherwise has another."""
    if not position.offset:
        return not position.checksum
    with path.open("rb") as file:
        file.seek(0, 2)
        if file.tell() < position.offset:
            return False
        size, tail = 1 << 12, b""
        while tail.count(b"\n", 0, -1) == 0 and len(tail) < position.offset:
            start = max(0, position.offset - size)
            file.seek(start)
            tail, size = file.read(position.offset - start), 4 * size
    return tail.endswith(b"\n") and tail[tail.rfind(b"\n", 0, -1) + 1 :].startswith(b"%08x " % position.checksum)


def last_epoch(path: Path) -> int:
    """The largest epoch that a log knows of; 0 without any."""
    try:
        return max((r["epoch"] for r in LogReader(path) if r.get("do") == "epoch"), default=0)
    except OSError:
        return 0


def find_fork(path: Path, damage: Position, *, look_back: int = 1000) -> int | None:
    """Where the record that cannot follow at `damage` goes on from: the place of an earlier record, if it was written by somebody who
    did not know of what stands between."""
    reader = LogReader(path)
    places = deque([reader.end], look_back)
    for _ in reader:
        places.append(reader.end)
    with path.open("rb") as file:
        file.seek(damage.offset)
        line = file.readline()
    after = (p.offset for p in reversed(places) if line[:9] == b"%08x " % zlib.crc32(line[9:-1], p.checksum))
    return next(after, None)


def write_checkpoint(path: Path, position: Position, records: Iterable[Record], *, disk: Disk | None = None) -> None:
    """Write a state as records, atomically: `path` is whole or what it was before, at every moment.

    The first line names the position in the log that the state belongs to, the last one counts the records.
    """
    checksum, lines = 0, []
    start = {"do": "checkpoint", "offset": position.offset, "checksum": position.checksum}
    for record in [start, *records]:
        lines.append(_line(record, checksum))
        checksum = int(lines[-1][:8], 16)
    lines.append(_line({"do": "end", "records": len(lines) - 1}, checksum))
    (disk or Disk()).write_whole(path, b"".join(lines))


def read_checkpoint(path: Path) -> tuple[Position, list[dict[str, Any]]]:
    """The position and the records of a checkpoint.

    Raises:
        ValueError: naming the file, the place and what is wrong there.
    """
    reader = LogReader(path)
    records = list(reader)
    if reader.damage:
        raise ValueError(reader.damage)
    if len(records) < 2 or records[0].get("do") != "checkpoint" or records[-1].get("do") != "end":
        raise ValueError(f"{path}: the checkpoint has no end after {reader.end.offset} bytes")
    first, *state, last = records
    if last["records"] != len(state):
        raise ValueError(f"{path}: the checkpoint has {len(state)} records, not {last['records']}")
    return Position(first["offset"], first["checksum"]), state


def _line(record: Record, checksum: int) -> bytes:
    payload = _encode(record).encode()
    return b"%08x %b\n" % (zlib.crc32(payload, checksum), payload)
