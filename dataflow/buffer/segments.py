"""Segments: the data plane of the sample buffer. Columns of rows in append-only Arrow files of a node.

A file holds messages of one schema and is, at every moment, a valid Arrow IPC stream that any Arrow tool opens:

    schema | message | message | end-of-stream marker | room for more

The kernel's page cache is the shared memory: a message is copied once, by `write`, and consumers map the file. The bytes
belong to the node: they outlive the process that wrote them. Write-back, and `spill`, move what is too much to disk.

Overwriting the pages of an existing file is twice as fast as filling a new one, so files are recycled: `SegmentStore`
moves a file that nobody refers to into the folder `free`, and a writer takes it over unless some process still maps it, which
the shared lock of the mapping tells. An array that was read never changes.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import re
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from ..batch import Batch
from ..errors import DamagedSegment, UserError, nearest
from .disk import make_folder
from .segment_files import (
    END_OF_STREAM,
    FETCHED,
    FREE,
    MAX_FREE_BYTES,
    NEW,
    StreamFile,
    chunks,
    new_file,
    recycle,
    room_named,
    spill,
    with_file,
    write_all,
)

logger = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9_-]+")
FILE = re.compile(r"([A-Za-z0-9_-]+)\.(\d+)\.(\d{6,})\.arrows")


@dataclass(frozen=True, slots=True)
class Segment:
    """Where the columns of some rows lie: one Arrow IPC message in a file of a node.

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
        """The reference as it stands in the ledger's log."""
        return [self.node, self.file, self.offset, self.num_bytes, self.checksum]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Segment:
        return cls(*fields)


class SegmentWriter:
    """Appends batches to files of this node's folder. One writer per name, ever: a restarted worker takes another.

    Args:
        folder: the node's folder, made when missing.
        node: the name that the references carry.
        name: of this writer, unique in the cluster: letters, digits, `_` and `-`.
        file_bytes: a file is left for the next one when it would grow beyond; a larger message has a file of its own.
        memory_bytes: `spill` keeps the folder to this each time a file is left; None leaves that to the kernel.

    Raises:
        UserError: the name is not one, or has been used in this folder.
    """

    def __init__(
        self, folder: Path, node: str, name: str, *, file_bytes: int = 64 << 20, memory_bytes: int | None = None
    ) -> None:
        if not NAME.fullmatch(name):
            raise UserError(f"a writer's name is letters, digits, '_' and '-', not {name!r}")
        make_folder(folder)
        if used := sorted(path.name for kind in (".", FREE) for path in (folder / kind).glob(f"{name}.*")):
            raise UserError(
                f"writer {name!r} has been here before, and {folder} has its {', '.join(used)}; take a new name"
            )
        self.folder, self.node, self.name = folder, node, name
        self.file_bytes, self.memory_bytes = file_bytes, memory_bytes
        self._streams: list[StreamFile] = []
        self._unsynced: set[Path] = set()
        self._lock = threading.Lock()

    def append(self, batch: Batch) -> Segment:
        """Write the rows of a batch; they survive the death of this process once this returns.

        Only the rows of a slice are written. Dictionary-encoded columns are decoded.

        Raises:
            OSError: the folder has no room. Nothing is published, and the next append overwrites what was written.
        """
        record = batch.record
        with self._lock:
            stream = self._stream(record.schema)
            if stream is None:  # a new schema, or one with dictionaries, which no stream has
                record = _decoded(record)
                stream = self._stream(record.schema)
            if stream is None:
                self._streams.append(stream := StreamFile(record.schema))
            pieces = stream.message(record)
            num_bytes = sum(map(len, pieces))
            with room_named(self.folder, f"writer {self.name!r}", num_bytes):
                return self._write(stream, pieces, num_bytes)

    def sync(self) -> None:
        """Bring everything written so far to the disk: from here on it survives a loss of power."""
        with self._lock:
            for path in self._unsynced:
                with_file(path, os.fdatasync)
            if self._unsynced:
                with_file(self.folder, os.fsync)  # the names of new files
            self._unsynced.clear()

    def close(self) -> None:
        """Cut the files that are open to what was written into them."""
        with self._lock:
            for stream in self._streams:
                stream.leave()

    def _stream(self, schema: pa.Schema) -> StreamFile | None:
        return next((s for s in self._streams if s.schema.equals(schema, check_metadata=True)), None)

    def _write(self, stream: StreamFile, pieces: list[Any], num_bytes: int) -> Segment:
        if stream.descriptor < 0 or stream.end + num_bytes + len(END_OF_STREAM) > stream.capacity:
            self._next_file(stream, num_bytes)
        # The first eight bytes come last: until then they are the marker that ends the stream.
        start = b"".join(pieces[:3])  # continuation marker, length, metadata
        digest = xxhash.xxh3_64(start[:8])
        position = stream.end + 8
        for chunk in chunks([start[8:], *pieces[3:], END_OF_STREAM]):
            for piece in chunk:
                if piece is not END_OF_STREAM:
                    digest.update(piece)
            position = write_all(stream.descriptor, chunk, position)
        write_all(stream.descriptor, [start[:8]], stream.end)
        segment = Segment(self.node, stream.path.name, stream.end, num_bytes, digest.intdigest())
        stream.end += num_bytes
        self._unsynced.add(stream.path)
        return segment

    def _next_file(self, stream: StreamFile, num_bytes: int) -> None:
        if stream.descriptor >= 0:
            stream.leave()
            if self.memory_bytes is not None:
                spill(self.folder, self.memory_bytes)
        start = stream.schema.serialize().to_pybytes()
        capacity = max(self.file_bytes, len(start) + num_bytes + len(END_OF_STREAM))
        stream.sequence += 1
        name = f"{self.name}.{self._streams.index(stream)}.{stream.sequence:06d}.arrows"
        stream.descriptor = new_file(self.folder / name, capacity, start + END_OF_STREAM)
        stream.path, stream.end, stream.capacity = self.folder / name, len(start), capacity


class SegmentReader:
    """Reads segments as batches over mapped files, without a copy; those of other nodes are fetched once per node.

    Args:
        folder: the folder of the node that this process runs on.
        node: the name of that node.
        peers: where the `SegmentServer` of each other node listens.
        token: the secret that those servers ask for.
        certificates: location of a server -> its certificate, of those that encrypt.
        timeout_s: how long a fetch may take.
    """

    MAX_MAPPINGS = 64

    def __init__(
        self,
        folder: Path,
        node: str,
        *,
        peers: Mapping[str, str] | None = None,
        token: str | None = None,
        certificates: Mapping[str, bytes] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.certificates = certificates or {}
        self.folder, self.node, self.peers, self.token, self.timeout_s = folder, node, peers or {}, token, timeout_s
        self._mappings: OrderedDict[Path, _Mapping] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, segment: Segment) -> Batch:
        """The batch that was appended; its arrays lie in the mapped file and stay as they are.

        Raises:
            DamagedSegment: the file is missing or too short, or the bytes are not those that were written. The checksum
                is compared the first time that this reader sees the message.
            TimeoutError: another node did not send the message in time.
            UserError: the segment is of a node that `peers` does not have.
        """
        message, schema = self.message(segment)
        return Batch(pa.ipc.read_record_batch(message, schema))

    def message(self, segment: Segment) -> tuple[pa.Buffer, pa.Schema]:
        """The bytes of the message, proved by the checksum, and the schema to read them with. Raises as `read`."""
        if segment.node == self.node:
            mapping = self._mapping(self.folder / segment.file, segment)
            return mapping.message(segment, segment.offset), mapping.schema
        if segment.node not in self.peers:
            hint = nearest(segment.node, self.peers) or f"; there are {', '.join([self.node, *self.peers])}"
            raise UserError(f"segment {segment.file} lies on node {segment.node!r}, which is not a peer{hint}")
        path = fetched_path(self.folder, segment)
        for attempt in (1, 2):
            self._fetch(segment, path)
            try:
                mapping = self._mapping(path, segment)
                return mapping.message(segment, mapping.start), mapping.schema
            except DamagedSegment:
                if attempt == 2:
                    raise
                with self._lock:
                    self._mappings.pop(path, None)
                path.unlink(missing_ok=True)
        raise AssertionError

    def close(self) -> None:
        """Let go of the mappings; each lives on while an array into it does."""
        with self._lock:
            self._mappings.clear()

    def _fetch(self, segment: Segment, path: Path) -> None:
        if path not in self._mappings and not path.exists():
            from .flight import fetch_into  # gRPC is loaded where there is a second node

            fetch_into(path, self.peers[segment.node], self.token or "", segment, self.timeout_s, self.certificates)

    def _mapping(self, path: Path, segment: Segment) -> _Mapping:
        with self._lock:
            if (mapping := self._mappings.get(path)) is None:
                for old in [p for p in self._mappings if not p.exists()]:  # let recycled files go
                    del self._mappings[old]
                mapping = self._mappings[path] = _Mapping(path, segment)
                if len(self._mappings) > self.MAX_MAPPINGS:
                    self._mappings.popitem(last=False)
            self._mappings.move_to_end(path)
            return mapping


class SegmentStore:
    """Which files may go: counts the live segments of each file, on the driver, and deletes or recycles files.

    The replies of a writer arrive in order, so that a segment in file k + 1 of a stream says that file k is complete.

    Args:
        folder: of the node that this process runs on.
        node: the name of that node.
        delete_remote: called as `(node, file)` for each file that goes, the local ones included, whose copies other
            nodes may hold; a `flight.Deletions` is one. None where there is one node.
        max_free_bytes: bound on the files that are kept for writers to overwrite; the oldest is deleted beyond.
    """

    def __init__(
        self,
        folder: Path,
        node: str,
        delete_remote: Callable[[str, str], None] | None = None,
        *,
        max_free_bytes: int = MAX_FREE_BYTES,
    ) -> None:
        self.folder, self.node, self.delete_remote, self.max_free_bytes = folder, node, delete_remote, max_free_bytes
        self._live: dict[tuple[str, str, int], _LiveFiles] = {}  # by node, writer and number of the stream
        self._ended: set[tuple[str, str]] = set()

    def published(self, segment: Segment) -> None:
        """A live row refers to this segment."""
        stream, sequence = _stream_of(segment)
        files = self._live.setdefault(stream, _LiveFiles())
        before, files.latest = files.latest, max(files.latest, sequence)
        files.offsets.setdefault(sequence, set()).add(segment.offset)
        if before < files.latest and not files.offsets.get(before, {0}):  # complete now, and empty already
            self._delete(stream, before)

    def freed(self, segments: Iterable[Segment]) -> None:
        """No live row refers to these any more.

        Raises:
            ValueError: a segment was never published, or has been freed before.
        """
        for segment in segments:
            stream, sequence = _stream_of(segment)
            files = self._live.get(stream, _LiveFiles())
            offsets = files.offsets.get(sequence, set())
            if segment.offset not in offsets:
                raise ValueError(f"{segment} is freed, but is not live: never published, or freed before")
            offsets.remove(segment.offset)
            if not offsets and (sequence < files.latest or stream[:2] in self._ended):
                self._delete(stream, sequence)

    def writer_ended(self, writer_name: str, node: str) -> None:
        """This writer appends nothing more, and every reply of it has been seen: all its files are complete."""
        self._ended.add((node, writer_name))
        streams = [s for s in self._live if s[:2] == (node, writer_name)]
        for stream in streams:
            for sequence in [k for k, offsets in self._live[stream].offsets.items() if not offsets]:
                self._delete(stream, sequence)
        if node == self.node:  # and those in which nothing was published
            self._sweep(f"{writer_name}.*.arrows")

    def sweep(self) -> int:
        """Recycle all files of this node that hold no live segment: at recovery, before any writer starts.

        Returns: how many files.
        """
        for unfinished in (self.folder / FREE).glob(f"*{NEW}"):  # its writer died while it made a file
            unfinished.unlink()
        return self._sweep("*.arrows")

    def _sweep(self, pattern: str) -> int:
        live = {_file_name(s, k) for s, files in self._live.items() if s[0] == self.node for k in files.offsets}
        dead = [p.name for p in self.folder.glob(pattern) if FILE.fullmatch(p.name) and p.name not in live]
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
            delete_local(self.folder, self.node, node, file, self.max_free_bytes)
        except OSError as error:  # the file stays, and takes room: no reason to end a run
            logger.warning("file %s of node %r cannot be let go: %s", file, node, error)
        if self.delete_remote is not None:
            self.delete_remote(node, file)


class _LiveFiles:
    """Files of a stream of a writer."""

    def __init__(self) -> None:
        self.offsets: dict[int, set[int]] = {}
        """Sequence number of a file -> offsets of the segments in it that a row refers to."""
        self.latest = -1
        """The file that may still be appended to: only it can be empty."""


def delete_local(folder: Path, here: str, node: str, file: str, max_free_bytes: int = MAX_FREE_BYTES) -> None:
    """Drop what `folder`, of node `here`, has of a file of `node`: the file itself goes to the free ones, or the copies
    of its messages that were fetched. What is missing already is no error."""
    if node != here:
        shutil.rmtree(folder / FETCHED / node / file, ignore_errors=True)
        return
    recycle(folder / file, max_free_bytes)


def verify(folder: Path, segment: Segment) -> None:
    """Read a message of this node and compare its checksum, without building a batch.

    Raises:
        DamagedSegment: what is wrong.
    """
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
    """Where a node keeps its copy of another node's message: itself an Arrow IPC stream."""
    return folder / FETCHED / segment.node / segment.file / str(segment.offset)


class _Mapping:
    """A file mapped into this process, under a shared lock that lasts as long as the mapping or an array into it."""

    def __init__(self, path: Path, segment: Segment) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH)
                if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    raise FileNotFoundError
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # duplicates the descriptor
        except FileNotFoundError:
            raise DamagedSegment(segment, path, "the file is missing") from None
        except ValueError:
            raise DamagedSegment(segment, path, "the file is too short: it is empty") from None
        self._buffer = pa.py_buffer(self._map)
        source = pa.BufferReader(self._buffer)
        try:
            self.schema = pa.ipc.read_schema(source)
        except (pa.ArrowInvalid, OSError) as error:
            raise DamagedSegment(segment, path, f"the schema at its start cannot be read: {error}") from None
        self.start = source.tell()
        self._verified: set[tuple[int, int, int]] = set()

    def message(self, segment: Segment, offset: int) -> pa.Buffer:
        if offset + segment.num_bytes > (size := self._map.size()):  # of the file; beyond it a mapping is deadly
            raise DamagedSegment(segment, self.path, f"the file is too short: it ends at {size}")
        if offset + segment.num_bytes > len(self._map):
            raise DamagedSegment(segment, self.path, f"the file was too short when it was mapped: {len(self._map)}")
        message = self._buffer.slice(offset, segment.num_bytes)
        if (key := (offset, segment.num_bytes, segment.checksum)) not in self._verified:
            _compare(segment, self.path, xxhash.xxh3_64_intdigest(message))
            self._verified.add(key)
        return message


def _compare(segment: Segment, path: Path, checksum: int) -> None:
    if checksum != segment.checksum:
        raise DamagedSegment(segment, path, f"the checksum differs: {checksum:#x}, not {segment.checksum:#x}")


def _decoded(record: pa.RecordBatch) -> pa.RecordBatch:
    """Without dictionaries, which would be messages of their own."""
    for i, field in enumerate(record.schema):
        if (plain := _plain(field.type)) != field.type:
            record = record.set_column(i, field.with_type(plain), record.column(i).cast(plain))
    return record


def _plain(type: Any) -> pa.DataType:
    if pa.types.is_dictionary(type):
        return type.value_type
    if pa.types.is_list(type):
        return pa.list_(type.value_field.with_type(_plain(type.value_type)))
    if pa.types.is_large_list(type):
        return pa.large_list(type.value_field.with_type(_plain(type.value_type)))
    return type


def _stream_of(segment: Segment) -> tuple[tuple[str, str, int], int]:
    match = FILE.fullmatch(segment.file)
    if match is None:
        raise ValueError(f"a segment's file is named writer.stream.sequence.arrows, not {segment.file!r}")
    return (segment.node, match[1], int(match[2])), int(match[3])


def _file_name(stream: tuple[str, str, int], sequence: int) -> str:
    return f"{stream[1]}.{stream[2]}.{sequence:06d}.arrows"
