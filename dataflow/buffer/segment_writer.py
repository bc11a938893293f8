"""SegmentWriter: appends batches to the segment files of this process. `segments.py` says what is in a file."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from ..batch import Batch
from ..errors import UserError
from .disk import make_folder
from .segment_files import END_OF_STREAM, FREE, StreamFile, chunks, full_disk_named, new_file, spill, write_all
from .segments import Segment

NAME = re.compile(r"[A-Za-z0-9_-]+")


class SegmentWriter:
    """Appends batches to files in this node's folder. A name is used once, ever: a restarted worker takes another.

    Args:
        folder: the node's folder, made when missing.
        node: the name that the references carry.
        name: the name of this writer, unique in the cluster: letters, digits, `_` and `-`.
        file_bytes: the size of a file. A message that does not fit begins the next one; a larger message has its own.
        memory_bytes: how much of the folder stays in memory; the rest is spilled each time a file is full. None leaves
            that to the kernel.

    Raises:
        UserError: the name has other characters, or was used in this folder before.
    """

    def __init__(
        self, folder: Path, node: str, name: str, *, file_bytes: int = 64 << 20, memory_bytes: int | None = None
    ) -> None:
        if not NAME.fullmatch(name):
            raise UserError(f"a writer's name is letters, digits, '_' and '-', not {name!r}")
        make_folder(folder)
        if used := sorted(path.name for kind in (".", FREE) for path in (folder / kind).glob(f"{name}.*")):
            raise UserError(
                f"the name {name!r} was used before: {folder} has {', '.join(used)} of that writer; take a new name"
            )
        self.folder, self.node, self.name = folder, node, name
        self.file_bytes, self.memory_bytes = file_bytes, memory_bytes
        self._streams: list[StreamFile] = []
        self._lock = threading.Lock()

    def append(self, batch: Batch) -> Segment:
        """Write the rows of a batch. Once this returns, they survive the death of this process.

        Only the rows of a slice are written. Dictionary-encoded columns are decoded.

        Args:
            batch: [rows], of any columns.

        Returns:
            Where the rows lie.

        Raises:
            OSError: the disk is full. Nothing is published, and the next append overwrites what was written.
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
            with full_disk_named(self.folder, f"writer {self.name!r}", num_bytes):
                return self._write(stream, pieces, num_bytes)

    def close(self) -> None:
        """Truncate the open files to what was written into them."""
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
