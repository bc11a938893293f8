"""Segments: each node stores columns of rows in append-only Arrow files. A file contains messages
with one schema, and is always a valid Arrow IPC stream:

    schema | message | message | end-of-stream marker | free space

The page cache serves as shared memory: `append` copies a message once, and consumers map the file.
Files survive the process that wrote them. The kernel and `spill` move data that does not fit in
memory to disk.

Overwriting the pages of an existing file is twice as fast as filling a new one. Therefore,
`SegmentStore` moves files without live rows to the folder `free`, and a `SegmentWriter` reuses
them. Each mapping of a file holds a shared lock, and writers skip locked files, so that arrays that
a process has read never change.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import re
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from ..batch import Batch
from ..errors import DamagedSegment, UserError
from ..runs.files import make_folder

# Segment files

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
CHUNK_BYTES = 1 << 20  # small enough to be hashed and written while it is in the CPU cache
FETCHED = "fetched"  # subfolder of a node's folder with messages fetched from other nodes
FREE = "free"  # subfolder of a node's folder with files without live rows, for writers to overwrite
NEW = ".new"  # suffix of a file that is being created
MAX_FREE_BYTES = 4 * (64 << 20)
MAX_FREE_FILES = 64

_libc = ctypes.CDLL(None)
logger = logging.getLogger(__name__)


class _StreamFile:
    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.descriptor, self.path, self.sequence, self.end, self.capacity = -1, Path(), -1, 0, 0
        self._sink = _Sink()
        self._writer = pa.ipc.new_stream(pa.PythonFile(self._sink, "w"), schema)
        # Arrow writes the schema with the first message.
        self.message(pa.RecordBatch.from_pylist([], schema=schema))

    def message(self, record: pa.RecordBatch) -> list[Any]:
        """Encode a message as pieces, without copying the columns' buffers."""
        self._writer.write_batch(record)
        pieces, self._sink.pieces = self._sink.pieces, []
        return pieces

    def leave(self) -> None:
        if self.descriptor >= 0:
            os.ftruncate(self.descriptor, self.end + len(END_OF_STREAM))
            os.close(self.descriptor)
            self.descriptor = -1


class _Sink:
    """A file-like object that collects the pieces that Arrow writes."""

    closed = False

    def __init__(self) -> None:
        self.pieces: list[Any] = []

    def write(self, piece: Any) -> int:
        self.pieces.append(piece)
        return len(piece)

    def flush(self) -> None: ...

    def close(self) -> None: ...


def _chunks(pieces: Iterable[Any]) -> Iterator[list[Any]]:
    """Split pieces into chunks of at most CHUNK_BYTES, each for one system call."""
    chunk, left = [], CHUNK_BYTES
    for piece in pieces:
        start, size = 0, len(piece)
        while start < size:
            part = piece if start == 0 and size <= left else memoryview(piece)[start : start + left]
            chunk.append(part)
            start, left = start + len(part), left - len(part)
            if not left or len(chunk) == 512:
                yield chunk
                chunk, left = [], CHUNK_BYTES
    if chunk:
        yield chunk


def write_all(descriptor: int, chunk: list[Any], position: int) -> int:
    """Write a whole chunk at a position. Return the position after the chunk."""
    end = position + sum(map(len, chunk))
    while (position := position + os.pwritev(descriptor, chunk, position)) < end:
        chunk = [memoryview(b"".join(chunk))[position - end :]]
    return position


def _new_file(path: Path, capacity: int, start: bytes) -> int:
    """Open a free file that no process maps, or a new one, with `capacity` bytes and the beginning
    `start`. Return its descriptor, which holds a shared lock. The file gets its name last, so that
    readers never see other contents. Raises an OSError if the disk is full."""
    make_folder(path.parent / FREE)
    for _, _, free in sorted(_free_files(path.parent), key=lambda f: abs(f[1] - capacity)):
        try:
            descriptor = os.open(free, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), free.stat()):  # not taken by another writer
                os.ftruncate(descriptor, capacity)
                write_all(descriptor, [start], 0)
                os.rename(free, path)
                fcntl.flock(descriptor, fcntl.LOCK_SH)  # prevents other writers from taking it
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    fresh = path.parent / FREE / f"{path.name}{NEW}"
    descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        os.ftruncate(descriptor, capacity)
        write_all(descriptor, [start], 0)
        os.rename(fresh, path)
    except BaseException:
        os.close(descriptor)
        fresh.unlink(missing_ok=True)
        raise
    return descriptor


@contextmanager
def full_disk_named(folder: Path, who: str, num_bytes: int) -> Iterator[None]:
    """Add to a full disk's `OSError` who needs how many bytes in which folder."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        free = shutil.disk_usage(folder).free
        raise OSError(
            error.errno,
            f"{error.strerror}: {who} needs {num_bytes} bytes in folder {folder}, where {free} bytes are free",
        ) from None


def delete_local(folder: Path, here: str, node: str, file: str) -> None:
    """Remove a segment file of any node from the folder of node `here`. For another node's file,
    this deletes the copies of its messages. A file of node `here` becomes a free file; the oldest
    free files beyond `MAX_FREE_BYTES` and `MAX_FREE_FILES` are deleted."""
    if node != here:
        shutil.rmtree(folder / FETCHED / node / file, ignore_errors=True)
        return
    path = folder / file
    try:
        make_folder(path.parent / FREE)
        os.rename(path, path.parent / FREE / path.name)
    except FileNotFoundError:
        return
    free = sorted(_free_files(folder))
    num_bytes = sum(size for _, size, _ in free)
    for left, (_, size, oldest) in zip(range(len(free), 0, -1), free, strict=True):
        if num_bytes <= MAX_FREE_BYTES and left <= MAX_FREE_FILES:
            break
        oldest.unlink(missing_ok=True)
        num_bytes -= size


def spill(folder: Path, memory_bytes: int) -> int:
    """Evict the oldest files in a node's folder from memory until the rest fits in `memory_bytes`.
    Return the number of evicted bytes. Files on tmpfs and mapped pages stay in memory."""
    resident = []
    for path in [*folder.glob("*.arrows"), *(folder / FETCHED).glob("*/*/*")]:
        if found := with_file(path, _resident_since):
            resident.append((*found, path))
    excess = sum(size for _, size, _ in resident) - memory_bytes
    evicted = 0
    for _, size, path in sorted(resident):
        if evicted >= excess:
            break
        with_file(path, _evict)
        evicted += size
    return evicted


def _free_files(folder: Path) -> list[tuple[int, int, Path]]:
    """Return (last write in ns, size in bytes, path) of each free file in a node's folder."""
    found = []
    with os.scandir(folder / FREE) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if not entry.name.endswith(NEW):
                    status = entry.stat()
                    found.append((status.st_mtime_ns, status.st_size, Path(entry.path)))
    return found


def with_file(path: Path, do: Callable[[int], Any]) -> Any:
    """Return `do(descriptor)` for a file; None if the file is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return do(descriptor)
    finally:
        os.close(descriptor)


def _resident_since(descriptor: int) -> tuple[int, int] | None:
    """Return (last write in ns, size in bytes without holes); None if not in memory."""
    status = os.fstat(descriptor)
    size = min(status.st_size, status.st_blocks * 512)
    return (status.st_mtime_ns, size) if is_resident(descriptor) else None


def is_resident(descriptor: int) -> bool:
    """Return whether the first page of a file, which every reader needs, is in memory."""
    if not os.fstat(descriptor).st_size:
        return False
    with mmap.mmap(descriptor, 1, access=mmap.ACCESS_READ) as page:
        view = np.frombuffer(page, np.uint8)
        found = ctypes.c_ubyte()
        # Reading with `RWF_NOWAIT` would load the page.
        failed = _libc.mincore(
            ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(1), ctypes.byref(found)
        )
        # A map cannot be closed while a view exists.
        del view
    return bool(failed or found.value & 1)


def _evict(descriptor: int) -> None:
    # The kernel only evicts pages that are on disk.
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


# Segments

FILE = re.compile(r"([A-Za-z0-9_-]+)\.(\d+)\.(\d{6,})\.arrows")


@dataclass(frozen=True, slots=True)
class Segment:
    """Reference to stored columns of rows: one Arrow IPC message in a file of a node.

    >>> Segment.from_json(["n0", "rollout-0.0.000001.arrows", 712, 4096, 17]).num_bytes
    4096
    """

    node: str
    file: str
    offset: int
    num_bytes: int
    checksum: int
    """xxh3_64 of the message's bytes."""

    def to_json(self) -> list[Any]:
        return [self.node, self.file, self.offset, self.num_bytes, self.checksum]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Segment:
        return cls(*fields)


RETRY_PAUSE_S = 0.5
"""[s] Pause before fetching again from a node that did not answer."""
Fetch = Callable[[Segment, Path], None]
"""Function that copies another node's message to a file (see `Peers.fetch`)."""


class SegmentReader:
    """Reads segments as batches over mapped files, without a copy. Each node fetches another node's
    segment only once.

    Args:
        fetch: function that fetches messages from other nodes. None if there are none.
        retry_s: [s] how long to retry fetching from a node that does not answer, for example while
            its server restarts. The caller may replace `fetch` meanwhile.
    """

    MAX_MAPPINGS = 64

    def __init__(
        self, folder: Path, node: str, *, fetch: Fetch | None = None, retry_s: float = 0.0
    ) -> None:
        self.folder, self.node, self.fetch, self.retry_s = folder, node, fetch, retry_s
        self._mappings: OrderedDict[Path, _Mapping] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, segment: Segment) -> Batch:
        """Read a batch. Its arrays are views of the mapped file and never change.

        Raises:
            DamagedSegment: the file is missing, too short or damaged. The reader verifies a
                message's checksum only once.
            TimeoutError: another node did not send the message in time.
            UserError: the segment is on a node that is not a peer.
        """
        message, schema = self.message(segment)
        return Batch(pa.ipc.read_record_batch(message, schema))

    def message(self, segment: Segment) -> tuple[pa.Buffer, pa.Schema]:
        """Return the verified bytes and schema of a message. Raises the errors of `read`."""
        if segment.node == self.node:
            mapping = self._mapping(self.folder / segment.file, segment)
            return mapping.message(segment, segment.offset), mapping.schema
        if self.fetch is None:
            raise UserError(
                f"segment {segment.file} is on node {segment.node!r}; this reader is on {self.node!r} and has no peers"
            )
        path = fetched_path(self.folder, segment)
        self._fetch_if_missing(segment, path)
        try:
            return self._read_copy(segment, path)
        except DamagedSegment:  # fetch the message again, once
            with self._lock:
                self._mappings.pop(path, None)
            path.unlink(missing_ok=True)
        self._fetch_if_missing(segment, path)
        return self._read_copy(segment, path)

    def _fetch_if_missing(self, segment: Segment, path: Path) -> None:
        deadline = time.monotonic() + self.retry_s
        while path not in self._mappings and not path.exists():
            try:
                assert self.fetch is not None
                self.fetch(segment, path)
                return
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(min(RETRY_PAUSE_S, self.retry_s))

    def _read_copy(self, segment: Segment, path: Path) -> tuple[pa.Buffer, pa.Schema]:
        mapping = self._mapping(path, segment)
        return mapping.message(segment, mapping.start), mapping.schema

    def close(self) -> None:
        """Release the mappings, except those that an array still uses."""
        with self._lock:
            self._mappings.clear()

    def _mapping(self, path: Path, segment: Segment) -> _Mapping:
        with self._lock:
            if (mapping := self._mappings.get(path)) is None:
                for old in [p for p in self._mappings if not p.exists()]:  # recycled files
                    del self._mappings[old]
                mapping = self._mappings[path] = _Mapping(path, segment)
                if len(self._mappings) > self.MAX_MAPPINGS:
                    self._mappings.popitem(last=False)
            self._mappings.move_to_end(path)
            return mapping


def verify_segment(folder: Path, segment: Segment) -> None:
    """Verify the checksum of a message of this node. Raises a DamagedSegment if the message is
    missing or damaged."""
    path, left, position = folder / segment.file, segment.num_bytes, segment.offset
    digest = xxhash.xxh3_64()
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise DamagedSegment(segment, path, "the file is missing") from None
    except OSError as error:
        raise DamagedSegment(segment, path, f"it cannot be opened: {error}") from None
    try:
        while left and (data := os.pread(descriptor, min(left, 1 << 20), position)):
            digest.update(data)
            left, position = left - len(data), position + len(data)
    except OSError as error:
        raise DamagedSegment(segment, path, f"reading it fails: {error}") from None
    finally:
        os.close(descriptor)
    if left:
        raise DamagedSegment(segment, path, f"the file is too short: it ends at {position}")
    _compare(segment, path, digest.intdigest())


def fetched_path(folder: Path, segment: Segment) -> Path:
    """Return the path of the copy of another node's message, an Arrow IPC stream."""
    return folder / FETCHED / segment.node / segment.file / str(segment.offset)


class _Mapping:
    """A mapped file, with a shared lock while the mapping or an array in it exists."""

    def __init__(self, path: Path, segment: Segment) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH)
                # A writer may have taken the file before this process got the lock.
                if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    raise FileNotFoundError
                # mmap duplicates the descriptor, which keeps the lock.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise DamagedSegment(segment, path, "the file is missing") from None
        except ValueError:
            raise DamagedSegment(segment, path, "the file is too short: it is empty") from None
        self._buffer = pa.py_buffer(self._map)
        source = pa.BufferReader(self._buffer)
        try:
            self.schema = pa.ipc.read_schema(source)
        except (pa.ArrowInvalid, OSError) as error:
            raise DamagedSegment(
                segment, path, f"the schema at its start cannot be read: {error}"
            ) from None
        self.start = source.tell()
        self._verified: set[tuple[int, int, int]] = set()

    def message(self, segment: Segment, offset: int) -> pa.Buffer:
        # Reading beyond the end of a mapped file would kill the process.
        if offset + segment.num_bytes > (size := self._map.size()):
            raise DamagedSegment(segment, self.path, f"the file is too short: it ends at {size}")
        if offset + segment.num_bytes > len(self._map):
            raise DamagedSegment(
                segment, self.path, f"the file was too short when it was mapped: {len(self._map)}"
            )
        message = self._buffer.slice(offset, segment.num_bytes)
        if (key := (offset, segment.num_bytes, segment.checksum)) not in self._verified:
            _compare(segment, self.path, xxhash.xxh3_64_intdigest(message))
            self._verified.add(key)
        return message


def _compare(segment: Segment, path: Path, checksum: int) -> None:
    if checksum != segment.checksum:
        raise DamagedSegment(
            segment, path, f"the checksum differs: {checksum:#x}, not {segment.checksum:#x}"
        )


# Segment writer

NAME = re.compile(r"[A-Za-z0-9_-]+")


class SegmentWriter:
    """Appends batches to files in this node's folder.

    Args:
        folder: folder of the node, created if missing.
        node: name of the node.
        name: name of the writer, unique in the cluster: letters, digits, `_` and `-`. A restarted
            worker needs a new name.
        file_bytes: size of a file. A message that does not fit starts the next file; a larger
            message gets its own file.
        memory_bytes: maximum size of the folder's files in memory. The writer spills the rest each
            time a file is full. None leaves this to the kernel.

    Raises:
        UserError: the name has other characters, or was used in this folder before.
    """

    def __init__(
        self,
        folder: Path,
        node: str,
        name: str,
        *,
        file_bytes: int = 64 << 20,
        memory_bytes: int | None = None,
    ) -> None:
        if not NAME.fullmatch(name):
            raise UserError(f"a writer's name is letters, digits, '_' and '-', not {name!r}")
        make_folder(folder)
        if used := sorted(p.name for kind in (".", FREE) for p in (folder / kind).glob(f"{name}.*")):
            raise UserError(
                f"the name {name!r} was used before: {folder} has {', '.join(used)} of that writer; take a new name"
            )
        self.folder, self.node, self.name = folder, node, name
        self.file_bytes, self.memory_bytes = file_bytes, memory_bytes
        self._streams: list[_StreamFile] = []
        self._lock = threading.Lock()

    def append(self, batch: Batch) -> Segment:
        """Write the rows of a batch, which then survive the death of this process. Decodes
        dictionary-encoded columns.

        Raises:
            OSError: the disk is full. The next append overwrites the incomplete message.
        """
        record = batch.record
        with self._lock:
            stream = self._stream(record.schema)
            if stream is None:  # a new schema, or a schema with dictionaries
                record = _decoded(record)
                stream = self._stream(record.schema)
            if stream is None:
                self._streams.append(stream := _StreamFile(record.schema))
            pieces = stream.message(record)
            num_bytes = sum(map(len, pieces))
            with full_disk_named(self.folder, f"writer {self.name!r}", num_bytes):
                return self._write(stream, pieces, num_bytes)

    def close(self) -> None:
        """Truncate the open files to their contents."""
        with self._lock:
            for stream in self._streams:
                stream.leave()

    def _stream(self, schema: pa.Schema) -> _StreamFile | None:
        return next((s for s in self._streams if s.schema.equals(schema, check_metadata=True)), None)

    def _write(self, stream: _StreamFile, pieces: list[Any], num_bytes: int) -> Segment:
        if stream.descriptor < 0 or stream.end + num_bytes + len(END_OF_STREAM) > stream.capacity:
            self._next_file(stream, num_bytes)
        # Write the first eight bytes last: they replace the end-of-stream marker.
        start = b"".join(pieces[:3])  # continuation marker, length, metadata
        digest = xxhash.xxh3_64(start[:8])
        position = stream.end + 8
        for chunk in _chunks([start[8:], *pieces[3:], END_OF_STREAM]):
            for piece in chunk:
                if piece is not END_OF_STREAM:
                    digest.update(piece)
            position = write_all(stream.descriptor, chunk, position)
        write_all(stream.descriptor, [start[:8]], stream.end)
        segment = Segment(self.node, stream.path.name, stream.end, num_bytes, digest.intdigest())
        stream.end += num_bytes
        return segment

    def _next_file(self, stream: _StreamFile, num_bytes: int) -> None:
        if stream.descriptor >= 0:
            stream.leave()
            if self.memory_bytes is not None:
                spill(self.folder, self.memory_bytes)
        start = stream.schema.serialize().to_pybytes()
        capacity = max(self.file_bytes, len(start) + num_bytes + len(END_OF_STREAM))
        stream.sequence += 1
        name = f"{self.name}.{self._streams.index(stream)}.{stream.sequence:06d}.arrows"
        stream.descriptor = _new_file(self.folder / name, capacity, start + END_OF_STREAM)
        stream.path, stream.end, stream.capacity = self.folder / name, len(start), capacity


def _decoded(record: pa.RecordBatch) -> pa.RecordBatch:
    """Decode dictionary-encoded columns: dictionaries would be separate messages."""
    for i, kind in enumerate(record.schema):
        if (plain := _plain(kind.type)) != kind.type:
            record = record.set_column(i, kind.with_type(plain), record.column(i).cast(plain))
    return record


def _plain(type: Any) -> pa.DataType:
    if pa.types.is_dictionary(type):
        return type.value_type
    if pa.types.is_list(type):
        return pa.list_(type.value_field.with_type(_plain(type.value_type)))
    if pa.types.is_large_list(type):
        return pa.large_list(type.value_field.with_type(_plain(type.value_type)))
    return type


# Segment store


class SegmentStore:
    """Tracks the live segments of each file, in the driver. Recycles or deletes complete files
    without live segments. A writer's replies arrive in order, so a segment in file k + 1 of a
    stream shows that file k is complete. Segments that a checkpoint pins outlive their rows.

    Args:
        folder: folder of this process's node.
        node: name of this process's node.
        delete_remote: function of (node, file) that deletes other nodes' copies of a file's
            messages (see `Deletions`). None on a single node.
    """

    def __init__(
        self, folder: Path, node: str, delete_remote: Callable[[str, str], None] | None = None
    ) -> None:
        self.folder, self.node, self.delete_remote = folder, node, delete_remote
        self._live: dict[tuple[str, str, int], _LiveFiles] = {}  # by node, writer and stream number
        self._ended: set[tuple[str, str]] = set()
        self._pins: dict[str, set[Segment]] = {}
        """Maps each checkpoint to the segments that it pins."""
        self.pinned: set[Segment] = set()
        self._waiting: list[Segment] = []
        """Segments that no row needs, to be freed once no checkpoint pins them."""

    def published(self, segment: Segment) -> None:
        stream, sequence = _stream(segment.node, segment.file)
        files = self._live.get(stream)
        if files is None:
            files = self._live[stream] = _LiveFiles()
        before = files.latest
        if sequence == before and sequence in files.offsets:
            files.offsets[sequence].add(segment.offset)
            return
        files.latest = max(before, sequence)
        files.offsets.setdefault(sequence, set()).add(segment.offset)
        if before < files.latest and not files.offsets.get(before, {0}):  # complete and empty
            self._delete(stream, before)

    def freed(self, segments: Iterable[Segment]) -> None:
        """Free segments that no live row needs. Raises a ValueError if a segment was never
        published or was freed before."""
        for segment in segments:
            if segment in self.pinned:
                self._waiting.append(segment)
                continue
            stream, sequence = _stream(segment.node, segment.file)
            files = self._live.get(stream)
            offsets = files.offsets.get(sequence) if files is not None else None
            if files is None or offsets is None or segment.offset not in offsets:
                raise ValueError(
                    f"{segment} is freed, but is not live: never published, or freed before"
                )
            offsets.remove(segment.offset)
            if not offsets and (sequence < files.latest or stream[:2] in self._ended):
                self._delete(stream, sequence)

    def free_later(self, segment: Segment) -> None:
        """Free a segment after the next checkpoint, when the current log is on disk."""
        self._waiting.append(segment)

    def pin(self, checkpoint: str, segments: Iterable[Segment]) -> None:
        """Keep the segments of a checkpoint until `unpin`."""
        self._pins[checkpoint] = set(segments)
        self.pinned |= self._pins[checkpoint]

    def unpin(self, checkpoints: Iterable[str]) -> None:
        """Free the segments that only these checkpoints pin. Ignores unknown checkpoints."""
        for checkpoint in checkpoints:
            self._pins.pop(checkpoint, None)
        self.pinned = set().union(*self._pins.values())
        waiting, self._waiting = self._waiting, []
        # `freed` puts pinned segments back into `_waiting`.
        self.freed(waiting)

    def writer_ended(self, writer_name: str, node: str) -> None:
        """Mark all files of a writer as complete. Call this once all its replies have arrived."""
        self._ended.add((node, writer_name))
        for stream in [s for s in self._live if s[:2] == (node, writer_name)]:
            for sequence in [k for k, offsets in self._live[stream].offsets.items() if not offsets]:
                self._delete(stream, sequence)
        if node == self.node:  # also recycle files without published segments
            self._sweep(f"{writer_name}.*.arrows")

    def sweep(self) -> int:
        """Recycle this node's files without live segments. Call this before any writer starts."""
        for unfinished in (self.folder / FREE).glob(f"*{NEW}"):  # the writer died creating it
            unfinished.unlink()
        return self._sweep("*.arrows")

    def _sweep(self, pattern: str) -> int:
        own = [(stream, files) for stream, files in self._live.items() if stream[0] == self.node]
        live = {_file_name(stream, k) for stream, files in own for k in files.offsets}
        found = [path.name for path in self.folder.glob(pattern) if FILE.fullmatch(path.name)]
        dead = [name for name in found if name not in live]
        for file in dead:
            self._recycle(self.node, file)
        return len(dead)

    def _delete(self, stream: tuple[str, str, int], sequence: int) -> None:
        del self._live[stream].offsets[sequence]
        if not self._live[stream].offsets:
            del self._live[stream]
        self._recycle(stream[0], _file_name(stream, sequence))

    def _recycle(self, node: str, file: str) -> None:
        try:
            delete_local(self.folder, self.node, node, file)
        except OSError as error:  # the file only costs disk space
            logger.warning("file %s of node %r cannot be recycled: %s", file, node, error)
        if self.delete_remote is not None:
            self.delete_remote(node, file)


@dataclass
class _LiveFiles:
    offsets: dict[int, set[int]] = field(default_factory=dict)
    """Maps each file's sequence number to the offsets of its live segments."""
    latest: int = -1
    """Sequence number of the file that may still grow, the only one that may have no segments."""


@lru_cache(maxsize=1 << 14)  # the driver gets segments for each row, but they are in few files
def _stream(node: str, file: str) -> tuple[tuple[str, str, int], int]:
    match = FILE.fullmatch(file)
    if match is None:
        raise ValueError(f"a segment's file is named writer.stream.sequence.arrows, not {file!r}")
    return (node, match[1], int(match[2])), int(match[3])


def _file_name(stream: tuple[str, str, int], sequence: int) -> str:
    return f"{stream[1]}.{stream[2]}.{sequence:06d}.arrows"
