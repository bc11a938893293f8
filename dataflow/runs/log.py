"""The write-ahead log of a run: one JSON record per line, with a checksum of all records so far.

    1f0c5a33 {"do":"claim","graph":"train","lease":7,"node":"reward.score","ids":[4096,4097]}

The checksum is the CRC-32 of the record, started from the previous record's checksum. It detects
incomplete, changed, missing and repeated lines, so a valid line shows that all lines before it are
valid. `append` makes no system call; `commit` writes all appended records with one. A log position
is a byte offset with a checksum.

A cut (`Log.cut`) moves the earlier records to an archive (`log_archive.py`). `LogReader` reads
both.

A log has one writer. A new writer replaces the file by a new one with the records to keep. If the
previous writer is still alive, it appends to the unlinked file, and the run's lock (`lock.py`)
stops it before it acts on its records.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ..errors import FormatError, TakenOverError, UserError
from ..graph import Graph
from ..safe_files import open_file
from .files import PARTIAL, Disk, remove
from .lock import RunLock
from .log_archive import (
    HISTORY,
    Position,
    archive,
    drop_parts_behind,
    file_start,
    header,
    parts,
    place,
    raw,
    records,
    split,
    start_of,
)

Record = Mapping[str, Any]
"""An event, with JSON values. Its kind, `do`, determines the other fields."""

FORMAT = 6
"""Format of the records. The reader also accepts older formats, which differ as follows:

- 5: claims have no `too_old`.
- 4: all numbers are written separately (see `unpacked`).
- 3: all rows of a record are in one segment.
"""
OLDEST = 3

_CHUNK_BYTES = 1 << 20
_CUT = ".cutting"
"""Suffix of the file that replaces a log after a cut."""
_encode = json.JSONEncoder(separators=(",", ":")).encode


SYNC_INTERVAL_S = 0.5
"""[s] At most this much of the log is lost at a power failure. A sync takes milliseconds, and a run
quickly generates the rows of half a second again."""


@dataclass(frozen=True)
class _PreparedCut:
    """The new file for a log after a cut, open until `Log.cut` or `drop`."""

    path: Path
    descriptor: int
    start: Position
    """Log position where the file begins."""
    copied: int
    """[bytes] Log offset of the end of the last copied record."""
    disk: Disk

    def drop(self) -> None:
        """Close the file, and remove it unless another writer's file has its name."""
        with suppress(FileNotFoundError):
            if os.path.samestat(self.path.stat(), os.fstat(self.descriptor)):
                self.path.unlink()
        self.disk.close(self.descriptor)


class Log:
    """The log of a run, open for appending."""

    def __init__(
        self,
        path: Path,
        *,
        at: Position = Position(),
        sync_interval_s: float = SYNC_INTERVAL_S,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.monotonic,
        fence: RunLock | None = None,
    ) -> None:
        """Open the log. Records after `at` are cut off and kept as `NAME.cut-OFFSET`.

        Args:
            at: position to append at. The default begins a new log.
            sync_interval_s: [s] at most this much of the log is lost at a power failure. If only
                the process dies, no committed record is lost.
            fence: lock that `commit` checks. This writer's first record is the lock's.
        """
        self.path = path
        self._disk = disk or Disk()
        self._clock = clock
        self._sync_interval_s = sync_interval_s
        self._pending: tuple[int, list[bytes]] = at.offset, []
        """Offset of the unwritten lines, and the lines. A single value, so that an interrupt
        (Ctrl-C) cannot separate them."""
        self._torn = False
        """Whether the file may contain a part of the pending lines after a failed write."""
        self._end = at.offset, at.checksum
        self._unsynced = False
        self._fence = fence
        remove(path.with_name(path.name + _CUT))
        if path.exists():
            self._keep_what_is_cut(at.offset)
        self.start = self._start_after(at)
        self._descriptor = self._begin_file(at.offset)
        # Drop parts only now: the old file may have needed them.
        drop_parts_behind(path, self.start)
        self._synced = clock()
        if fence is not None:
            self.append(fence.record())

    def _start_after(self, at: Position) -> Position:
        """Return the position where the file begins if the log continues at `at`."""
        start = start_of(self.path)
        if start.offset <= at.offset:
            return start
        with suppress(UserError):  # the archived part is lost; continue without it
            split(self.path, at, self._disk)
        return at if at.offset else Position()

    def _begin_file(self, end: int) -> int:
        """Atomically replace the log's file by a new one, with the records up to offset `end`."""
        unnamed = self.path.with_name(self.path.name + PARTIAL)
        remove(unnamed)
        descriptor = self._disk.open(unnamed)
        try:
            if self.start.offset:
                self._disk.write(descriptor, header(self.start))
            if end > self.start.offset:
                with open_file(self.path) as before:
                    for data in records(before.fileno(), self.start, self.start.offset, end):
                        self._disk.write(descriptor, data)
            # Sync first: the name must never refer to incomplete records.
            self._disk.sync(descriptor)
            self._disk.rename(unnamed, self.path)
            self._disk.sync_folder(self.path.parent)
        except OSError:
            self._disk.close(descriptor)
            unnamed.unlink(missing_ok=True)
            raise
        return descriptor

    def _keep_what_is_cut(self, offset: int) -> None:
        """Keep the records after an offset in a separate file, for inspection."""
        chunks = raw(self.path, offset)
        try:
            first = next(chunks, b"")
        except UserError:  # the archived part with this offset is lost
            chunks = raw(self.path, start_of(self.path).offset)
            first = next(chunks, b"")
        if not first:
            return
        number, name = 1, f"{self.path.name}.cut-{offset}"
        unnamed, kept = self.path.with_name(name + PARTIAL), self.path.with_name(name)
        try:
            self._disk.write_new(unnamed, chain([first], chunks))
            # An earlier cut at the same offset may have kept other records.
            while kept.exists() and not _begins_with(unnamed, kept):
                number += 1
                kept = self.path.with_name(f"{name}-{number}")
            self._disk.rename(unnamed, kept)
        finally:
            unnamed.unlink(missing_ok=True)
        self._disk.sync_folder(self.path.parent)

    @property
    def position(self) -> Position:
        """Position after all appended records, committed or not."""
        return Position(*self._end)

    def append(self, record: Record) -> None:
        self.append_json(_encode(record))

    def append_json(self, record: str) -> None:
        offset, checksum = self._end
        payload = record.encode()
        checksum = zlib.crc32(payload, checksum)
        line = b"%08x %b\n" % (checksum, payload)
        self._pending[1].append(line)
        self._end = offset + len(line), checksum

    def commit(self, *, sync: bool = False, fenced: bool = True) -> None:
        """Write the appended records with one system call.

        Args:
            sync: sync the file even if `sync_interval_s` has not passed.
            fenced: first check that this process still owns the log. After a commit without this
                check, do not act on the records until the next commit with the check, because a
                replaced writer appends to an unlinked file.

        Raises:
            TakenOverError: another process took over the log.
            OSError: for example, the disk is full. The next commit writes the records again.
        """
        if fenced:
            self._check()
        offset, lines = self._pending
        if self._torn:
            self._disk.truncate(self._descriptor, place(self.start, offset))
            self._torn = False
        if lines:
            data = b"".join(lines)
            # Set these first, so that the state is right after an interrupt.
            self._torn = self._unsynced = True
            try:
                self._disk.write(self._descriptor, data)
                self._pending = offset + len(data), []
            except OSError:  # such as a full disk; the next commit writes all lines again
                self._disk.truncate(self._descriptor, place(self.start, offset))
                raise
            self._torn = False
        if self._unsynced and (sync or self._clock() - self._synced >= self._sync_interval_s):
            self._disk.sync(self._descriptor)
            self._synced = self._clock()
            self._unsynced = False

    def prepare_cut(self, at: Position) -> Callable[[], _PreparedCut]:
        """Return a function that archives the committed records before a position and returns the
        file to pass to `cut`. It may run in any thread, and leaves no files if it raises an
        OSError."""
        # The log may close its own descriptor while the thread works.
        start, end, descriptor = self.start, self.position.offset, os.dup(self._descriptor)
        unnamed = self.path.with_name(self.path.name + _CUT)

        def work() -> _PreparedCut:
            cut: _PreparedCut | None = None
            try:
                archive(self.path, descriptor, start, at, self._disk)
                remove(unnamed)
                cut = _PreparedCut(unnamed, self._disk.open(unnamed), at, end, self._disk)
                for data in chain([header(at)], records(descriptor, start, at.offset, end)):
                    self._disk.write(cut.descriptor, data)
                self._disk.sync(cut.descriptor)
                return cut
            except Exception:
                if cut is not None:
                    cut.drop()
                raise
            finally:
                os.close(descriptor)

        return work

    def cut(self, cut: _PreparedCut) -> None:
        """Switch to a file from `prepare_cut`, or drop it if this fails. Commit all records first.

        Raises:
            TakenOverError: another process took over the log.
            OSError: for example, the disk is full. The log keeps its current file.
        """
        new = cut.descriptor
        try:
            for data in records(self._descriptor, self.start, cut.copied, self.position.offset):
                self._disk.write(new, data)
            self._disk.sync(new)
            # `sure`, because the rename cannot be undone.
            self._check(sure=True)
            self._disk.rename(cut.path, self.path)
        except Exception:
            cut.drop()
            raise
        before, self._descriptor, self.start = self._descriptor, new, cut.start
        self._disk.close(before)
        self._disk.sync_folder(self.path.parent)

    def _check(self, *, sure: bool = False) -> None:
        if self._descriptor < 0:  # closed: nothing is pending
            return
        if self._fence is not None:
            self._fence.check(sure=sure)
        try:
            own = os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            own = False
        if not own:
            raise TakenOverError(f"{self.path} cannot be written any more: another process took it over")

    def close(self) -> None:
        if self._descriptor >= 0:
            try:
                self.commit(sync=True)
            finally:
                self._disk.close(self._descriptor)
                self._descriptor = -1


class LogReader:
    """Iterates over the valid records of a log, including archived ones. Another process may write
    to the log meanwhile. Raises a UserError if a part of the archive is missing. After the
    iteration, `end` is the position after the last valid record, and `damage` describes the problem
    there, if any."""

    def __init__(self, path: Path, start: Position = Position()) -> None:
        self.path = path
        self.end = start
        self.damage: str | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.damage = None
        with open_file(self.path) as file:
            start = file_start(file)
            for part in parts(self.path, start, self.end.offset):
                yield from self._sound(lines(part.chunks(self.end.offset)))
                if self.damage is None and self.end != part.end:
                    self.damage = f"{part.path} ends at byte {self.end.offset}"
                if self.damage:
                    return
            file.seek(place(start, self.end.offset))
            yield from self._sound(file)

    def _sound(self, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
        for line in lines:
            checksum, record = zlib.crc32(line[9:-1], self.end.checksum), None
            if not line.endswith(b"\n"):
                problem = f"the last record is torn after {len(line)} bytes"
            # Stop at the first mismatch: later checksums depend on this record.
            elif line[:9] != b"%08x " % checksum:
                named = line[:8].decode(errors="replace")
                problem = f"a record's checksum is {named!r}, not {checksum:08x}"
            else:
                problem = "a record is no object of JSON"
                with suppress(ValueError, RecursionError):
                    record = json.loads(line[9:])
            if not isinstance(record, dict):
                self.damage = f"{self.path}, byte {self.end.offset}: {problem}"
                return
            self.end = Position(self.end.offset + len(line), checksum)
            yield unpacked(record)


DAMAGED = "damaged: "
"""Prefix of messages about lost records or files."""


def lost_records(path: Path, end: Position) -> str:
    """Describe the complete lines after a log's valid part; empty if there are none. A killed
    process leaves at most one incomplete line. Complete lines show that the log was changed, or
    that the disk lost a part of it."""
    behind = sum(line.endswith(b"\n") for line in lines(raw(path, end.offset)))
    if not behind:
        return ""
    found = f"{behind} complete lines from there on are not read"
    fork = find_fork(path, end)
    if fork is not None:
        found += (
            f"; the log continues from byte {fork}: two processes appended to this log at the same time"
        )
    return found


def damage_note(reader: LogReader) -> list[str]:
    """Return a list with a message about lost records, or an empty list if none were lost."""
    lost = lost_records(reader.path, reader.end) if reader.damage else ""
    return [f"{DAMAGED}{reader.damage}; {lost}"] if lost else []


def unpacked(record: dict[str, Any]) -> dict[str, Any]:
    """Expand a compressed record: replace [first, number] by consecutive ids, and repeat a single
    value of `tokens` or `versions` for each id.

    >>> unpacked({"ids": [3, [8, 4]], "tokens": 0})
    {'ids': [3, 8, 9, 10, 11], 'tokens': [0, 0, 0, 0, 0]}
    """
    ids = record.get("ids")
    if not isinstance(ids, list):
        return record
    if any(type(one) is list for one in ids):
        runs = (range(one[0], one[0] + one[1]) if type(one) is list else (one,) for one in ids)
        record["ids"] = ids = list(chain.from_iterable(runs))
    for name in ("tokens", "versions"):
        if isinstance(record.get(name), int):
            record[name] = [record[name]] * len(ids)
    return record


def graph_record(name: str, outline: Record) -> Record:
    return {"do": "graph", "graph": name, "format": FORMAT, "outline": outline}


def described_graph(record: Record) -> Graph:
    """Return the graph that a record describes, which cannot run. Raises a FormatError if this
    version of Weft cannot read the record's format."""
    found = record.get("format", 1)
    if not OLDEST <= found <= FORMAT:
        which = "an earlier" if found < FORMAT else "a later"
        where = f"graph {record['graph']!r} is described in format {found}, by {which} version of Weft"
        raise FormatError(
            f"the log cannot be read: {where}; this version reads formats {OLDEST} to {FORMAT}"
        )
    return Graph.from_outline(record["outline"])


def has_position(path: Path, position: Position) -> bool:
    """Return whether a record of the log ends at this position with this checksum. Return True for
    positions before the beginning of the file, which cannot be checked. The checksum differs if a
    rollback replaced the records before this position."""
    with open_file(path) as file:
        start = file_start(file)
        if position.offset <= start.offset:
            return position.offset < start.offset or position.checksum == start.checksum
        at = place(start, position.offset)
        if file.seek(0, 2) < at:
            return False
        # Read backwards to the beginning of the last complete line.
        size, tail = 1 << 12, b""
        while tail.count(b"\n", 0, -1) == 0 and len(tail) < at:
            begin = max(0, at - size)
            file.seek(begin)
            tail, size = file.read(at - begin), 4 * size
    return tail.endswith(b"\n") and tail[tail.rfind(b"\n", 0, -1) + 1 :].startswith(
        b"%08x " % position.checksum
    )


def damage_before(path: Path, end: Position) -> str | None:
    """Describe the damage to a log's file before a position; None if there is none."""
    with open_file(path) as file:
        start = file_start(file)
        offset, checksum = start.offset, start.checksum
        # Compare only checksums, which is much faster than parsing records.
        for line in file:
            if offset >= end.offset:
                break
            checksum = zlib.crc32(line[9:-1], checksum)
            if line[:9] != b"%08x " % checksum:
                break
            offset += len(line)
    if Position(offset, checksum) == end:
        return None
    reader = LogReader(path, start)
    for _ in reader:
        if reader.end.offset >= end.offset:
            break
    return reader.damage


def lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Split chunks of bytes into lines. Lines keep their line end."""
    rest = b""
    for data in chunks:
        *whole, rest = (rest + data).split(b"\n")
        yield from (line + b"\n" for line in whole)
    if rest:
        yield rest


def last_epoch(path: Path) -> int:
    """Return the largest epoch in a log; 0 if there is none."""
    try:
        return max((r["epoch"] for r in LogReader(path) if r.get("do") == "epoch"), default=0)
    except OSError:
        return 0


def find_fork(path: Path, damage: Position, *, look_back: int = 1000) -> int | None:
    """Find out whether two writers appended to a log. Return the end of the record that the invalid
    record at `damage` follows, according to its checksum; None if it is not one of the last
    `look_back` records."""
    reader = LogReader(path)
    places = deque([reader.end], look_back)
    for _ in reader:
        places.append(reader.end)
    line = next(lines(raw(path, damage.offset)), b"")
    for at in reversed(places):
        if line[:9] == b"%08x " % zlib.crc32(line[9:-1], at.checksum):
            return at.offset
    return None


def _begins_with(path: Path, beginning: Path) -> bool:
    with open_file(path) as file, open_file(beginning) as first:
        while data := first.read(_CHUNK_BYTES):
            if file.read(len(data)) != data:
                return False
    return True


def line_of(record: Record, checksum: int) -> bytes:
    payload = _encode(record).encode()
    return b"%08x %b\n" % (zlib.crc32(payload, checksum), payload)


# Log cutting


Work = Callable[[], _PreparedCut]

logger = logging.getLogger(__name__)


class LogCutting:
    """Moves records that no checkpoint needs to the log's archive, once they have `min_bytes`.

        IDLE ──begin──> ARCHIVING, in a thread ──finish──> IDLE

    The driver can append to the log meanwhile. A failure only costs disk space: `LogCutting` logs a
    warning, and the next checkpoint tries again.

    Args:
        min_bytes: cut the log once this many bytes precede the oldest kept checkpoint.
        run: function that starts the work and returns its future. Default: start a thread.
        timeout_s: [s] maximum wait for the archive in `finish(wait=True)` and `close`.
    """

    def __init__(
        self,
        log: Log,
        min_bytes: int,
        run: Callable[[Work], Future[_PreparedCut]] | None = None,
        *,
        timeout_s: float = 60.0,
    ) -> None:
        self._log = log
        self._min_bytes = min_bytes
        self._run = run or _in_thread
        self._timeout_s = timeout_s
        self._work: Future[_PreparedCut] | None = None

    def begin(self, needed: Position) -> None:
        """Start archiving the records before `needed`, the position of the oldest kept checkpoint,
        if they have `min_bytes`. Commit all records first."""
        if self._work is None and needed.offset - self._log.start.offset >= self._min_bytes:
            self._work = self._run(self._log.prepare_cut(needed))

    def finish(self, *, wait: bool = False) -> None:
        """Switch the log to its shorter file if that file is ready. Commit all records first.

        Args:
            wait: wait for the file. After the timeout, warn and leave the log unchanged.

        Raises:
            TakenOverError: another process took over the log.
        """
        if self._work is None or not (wait or self._work.done()):
            return
        work, self._work = self._work, None
        if not self._ends_in_time(work):
            # If the thread ends later, its file is useless.
            work.add_done_callback(_drop)
            return
        try:
            self._log.cut(work.result())
        except OSError as error:
            logger.warning("the log %s cannot be cut for now: %s", self._log.path, error)

    def close(self) -> None:
        """Wait for the archiving, up to the timeout, and drop its file."""
        work, self._work = self._work, None
        if work is not None:
            self._ends_in_time(work)
            work.add_done_callback(_drop)

    def _ends_in_time(self, work: Future[_PreparedCut]) -> bool:
        if wait_for([work], self._timeout_s).done:
            return True
        log, text = (
            self._log.path,
            "the log %s is not cut: the thread that archives it in %s did not end within %g s",
        )
        logger.warning(text, log, log.parent / HISTORY, self._timeout_s)
        return False


def _drop(work: Future[_PreparedCut]) -> None:
    if work.exception() is None:
        work.result().drop()


def _in_thread(work: Work) -> Future[_PreparedCut]:
    """Run `work` in a daemon thread."""
    future: Future[_PreparedCut] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="log-cutting", daemon=True).start()
    return future
