"""Log: the write-ahead log of a run. One JSON record a line, each with the checksum of everything up to it.

    1f0c5a33 {"do":"claim","graph":"train","lease":7,"node":"reward.score","ids":[4096,4097]}

The checksum is the CRC-32 of this record, started from the checksum of the record before. A torn, changed, missing or repeated
line is detected, and the lines before it are known to be sound. Records are written together (group commit): `append` makes no
system call, `commit` makes one. A position in the log is a number of bytes; a checkpoint names one.

A log has one writer. A new writer copies what it keeps into a new file, which replaces the old one. A previous writer that is still
alive then appends to a file without a name; a `Fence` tells it that it was replaced before it acts on its records.
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
"""An event: `do` names its kind, and the other fields depend on the kind. Values are those of JSON."""

FORMAT = 3
"""Format of the records of a log and of the graphs described in it. In format 1, all rows made of a parent came together. In format 2,
rows were issued in a `round`, which is a `step` now."""

_CHUNK_BYTES = 4 << 20
_encode = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True)
class Position:
    """A place between two records of a log, with the checksum that the next one starts from."""

    offset: int = 0
    checksum: int = 0


class Fence(Protocol):
    """Ensures that a run has only one writer."""

    def check(self) -> None:
        """Check that this process may write.

        Raises:
            TakenOverError: another process has taken the run over.
        """
        ...

    def record(self) -> Record:
        """The first record of this writer: `do` is "epoch", and `epoch` is larger than all earlier ones."""
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
        """Records after `at` are cut off, and kept beside the log as `NAME.cut-OFFSET`.

        Args:
            path: the file of the log.
            at: where the log goes on.
            sync_interval_s: at most this many seconds of the log are lost in a power loss. The death of a process loses nothing
                that was committed.
            disk: the disk that the log is written to; None: the real one.
            clock: seconds, for `sync_interval_s`.
            fence: checked by `commit`; its record is the first that this writer appends.
        """
        self.path = path
        self._disk = disk or Disk()
        self._clock = clock
        self._sync_interval_s = sync_interval_s
        self._pending: tuple[int, list[bytes]] = at.offset, []
        """The lines that are not written yet, and where they go: one value, so that an interrupt (Ctrl-C) cannot separate them."""
        self._torn = False
        """Part of a failed write may stand where the pending lines go."""
        self.position = at
        """The end of the appended records, committed or not."""
        self._unsynced = False
        self._fence = fence
        if path.exists():
            self._keep_what_is_cut(at.offset)
        self._descriptor = self._begin_file(at.offset)
        self._synced = clock()
        if fence is not None:
            self.append(fence.record())

    def _begin_file(self, size: int) -> int:
        """Replace the log, atomically, by a file of this writer that holds this many bytes of it."""
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
        """Add a record, which the next `commit` writes."""
        line = _line(record, self.position.checksum)
        self._pending[1].append(line)
        self.position = Position(self.position.offset + len(line), int(line[:8], 16))

    def commit(self, *, sync: bool = False, fenced: bool = True) -> None:
        """Write the appended records with one system call.

        Args:
            sync: sync the file as well; it is also synced when the last sync is longer ago than the interval.
            fenced: check first that this process still owns the log. Without it, nothing may act on the records before the next fenced
                commit: a writer that was taken over appends them to a file without a name.

        Raises:
            TakenOverError: another process has taken the log over.
            OSError: the disk is full, for example. The records are written by the next commit.
        """
        if fenced:
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
            except OSError:  # for example, the disk is full: the next commit writes all of it again
                self._disk.truncate(self._descriptor, offset)
                raise
            self._torn = False
        if self._unsynced and (sync or self._clock() - self._synced >= self._sync_interval_s):
            self._disk.sync(self._descriptor)
            self._synced = self._clock()
            self._unsynced = False

    def _check(self) -> None:
        if self._descriptor < 0:  # closed: nothing is pending
            return
        if self._fence is not None:
            self._fence.check()
        try:
            own = os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            own = False
        if not own:
            raise TakenOverError(
                f"{self.path} is not the file that this process writes any more: another process goes on with it"
            )

    def close(self) -> None:
        """Commit, sync, and close the file."""
        if self._descriptor >= 0:
            try:
                self.commit(sync=True)
            finally:
                self._disk.close(self._descriptor)
                self._descriptor = -1


class LogReader:
    """The sound records of a log, in order. The log may be written at the same time.

    After the iteration, `end` is the position after the last sound record, and `damage` describes what is wrong there.
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
    """The record that describes a graph of the run and gives the format of the log."""
    return {"do": "graph", "graph": name, "format": FORMAT, "outline": outline}


def described_graph(record: Record) -> Graph:
    """The graph that a record describes. A checker or a ledger can walk it, but it cannot be run.

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
    """Whether a record of the log ends at this position, with this checksum. The checksum differs if the log was cut and then went on."""
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
    """The largest epoch in a log; 0 if it has none."""
    try:
        return max((r["epoch"] for r in LogReader(path) if r.get("do") == "epoch"), default=0)
    except OSError:
        return 0


def find_fork(path: Path, damage: Position, *, look_back: int = 1000) -> int | None:
    """Find out whether two writers appended to a log.

    Args:
        path: the log.
        damage: the end of its sound records.
        look_back: how many of the last sound records are tried.

    Returns:
        Byte at which the earlier record ends that the damaged one follows, written by a process that did not know the records in
        between; None if there is none.
    """
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
    """Write a state as records; `path` is replaced atomically.

    The first line names the position in the log that the state belongs to, and the last one the number of records.
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
        ValueError: the checkpoint is damaged; the message names the file and the place.
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
