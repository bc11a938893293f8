"""Segments: the data plane of the sample buffer. Columns of rows in append-only Arrow files of a node.

A file holds messages of one schema and is, at every moment, a valid Arrow IPC stream that any Arrow tool opens:

    schema | message | message | end-of-stream marker | free space

The kernel's page cache is the shared memory: a message is copied once, by `write`, and consumers map the file. The bytes
belong to the node: they outlive the process that wrote them. The kernel's write-back, and `spill`, move the excess to disk.

Overwriting the pages of an existing file is twice as fast as filling a new one, so files are recycled. `SegmentStore`
(`segment_store.py`) moves a file without live rows into the folder `free`. A writer (`segment_writer.py`) takes it over
unless a process still maps it: each mapping holds a shared lock on its file. So an array that was read never changes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from ..batch import Batch
from ..errors import DamagedSegment, UserError
from .segment_files import FETCHED

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


RETRY_PAUSE_S = 0.5
"""Seconds between two attempts to fetch a message from a node that does not answer."""
Fetch = Callable[[Segment, Path], None]
"""Copies a message of another node to a file, as an Arrow IPC stream, unless the file exists; `Peers.fetch` does it."""


class SegmentReader:
    """Reads segments as batches over mapped files, without a copy. Segments of other nodes are fetched once per node.

    Args:
        folder: the folder of the node that this process runs on.
        node: the name of that node.
        fetch: fetches messages from other nodes. None: there is one node, or the others are not known yet.
        retry_s: for so long a message is asked for again whose node does not answer, since its server may be started again. `fetch` may
            be replaced meanwhile.
    """

    MAX_MAPPINGS = 64

    def __init__(self, folder: Path, node: str, *, fetch: Fetch | None = None, retry_s: float = 0.0) -> None:
        self.folder, self.node, self.fetch, self.retry_s = folder, node, fetch, retry_s
        self._mappings: OrderedDict[Path, _Mapping] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, segment: Segment) -> Batch:
        """The batch that was appended; its arrays lie in the mapped file and never change.

        Raises:
            DamagedSegment: the file is missing or too short, or the bytes are not those that were written. The checksum
                is compared the first time that this reader sees the message.
            TimeoutError: another node did not send the message in time.
            UserError: the segment lies on a node that is not a peer.
        """
        message, schema = self.message(segment)
        return Batch(pa.ipc.read_record_batch(message, schema))

    def message(self, segment: Segment) -> tuple[pa.Buffer, pa.Schema]:
        """The bytes of a message, proved by its checksum, and the schema to read them with. Raises as `read`."""
        if segment.node == self.node:
            mapping = self._mapping(self.folder / segment.file, segment)
            return mapping.message(segment, segment.offset), mapping.schema
        if self.fetch is None:
            raise UserError(
                f"segment {segment.file} lies on node {segment.node!r}; this reader is on {self.node!r} and has no peers"
            )
        path = fetched_path(self.folder, segment)
        for attempt in (1, 2):
            if path not in self._mappings and not path.exists():
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

    def _fetch(self, segment: Segment, path: Path) -> None:
        deadline = time.monotonic() + self.retry_s
        while True:
            try:
                assert self.fetch is not None
                self.fetch(segment, path)
                return
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(min(RETRY_PAUSE_S, self.retry_s))

    def close(self) -> None:
        """Drop the mappings; each lives on as long as an array into it does."""
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
    """Where a node keeps its copy of another node's message; the copy is an Arrow IPC stream."""
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
