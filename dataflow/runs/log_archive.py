"""Archive of the records before a log's cuts, in compressed files called parts.

    buffer/ledger.log     {"do":"cut","offset":16779311,…}, then the records from there on
    buffer/history/ledger-000000000000.00000000-000016779311.1f0c5a33.log.zst   the records from byte 0 to byte 16779311, unchanged

Offsets count from the beginning of the whole log. The name of a part contains the offsets and
checksums of its beginning and end. A run can continue without its parts, but commands that read the
whole log need them, such as `weft buffer check`. Unpack one with `zstd -d`.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from ..errors import UserError
from ..safe_files import open_file
from .files import Disk, make_folder, remove

HISTORY = "history"
"""Folder of the parts, next to the log."""
CHUNK_BYTES = 4 << 20
_NAME = re.compile(r".+-(\d{12,})\.([0-9a-f]{8})-(\d{12,})\.([0-9a-f]{8})\.log\.zst")


@dataclass(frozen=True)
class Position:
    """A place between two records of a log, with the checksum of all records before it."""

    offset: int = 0
    """[bytes] Distance from the beginning of the log, including its archive."""
    checksum: int = 0


@dataclass(frozen=True)
class _Part:
    """A file with records from before a cut."""

    path: Path
    begin: Position
    end: Position

    def chunks(self, start: int) -> Iterator[bytes]:
        """Yield the log's bytes from offset `start` to the end of the part. Raises an OSError if
        the file is damaged."""
        skip = start - self.begin.offset
        with pa.input_stream(str(self.path), compression="zstd") as file:
            while data := file.read(CHUNK_BYTES):
                if skip < len(data):
                    yield data[skip:]
                skip = max(0, skip - len(data))


def header(start: Position) -> bytes:
    """Return the header of a log's file that begins at `start`; empty at offset 0."""
    if not start.offset:
        return b""
    fields = {"do": "cut", "offset": start.offset, "checksum": start.checksum}
    payload = json.dumps(fields, separators=(",", ":")).encode()
    return b"%08x %b\n" % (zlib.crc32(payload), payload)


def place(start: Position, offset: int) -> int:
    """Convert an offset in the log to one in the log's file, which begins at `start`."""
    return offset - start.offset + len(header(start))


def file_start(file: BinaryIO) -> Position:
    """Return the position where a log's file begins, and seek to its first record."""
    # A header is short, but without one, the first line may be a long record.
    line = file.readline(1 << 10)
    is_header = line.endswith(b"\n") and line[9:20] == b'{"do":"cut"'
    if is_header and line[:9] == b"%08x " % zlib.crc32(line[9:-1]):
        fields = json.loads(line[9:])
        return Position(fields["offset"], fields["checksum"])
    file.seek(0)
    return Position()


def start_of(log: Path) -> Position:
    """Return the position where a log's file begins; offset 0 if there is no file."""
    try:
        with open_file(log) as file:
            return file_start(file)
    except FileNotFoundError:
        return Position()


def parts(log: Path, start: Position, since: int = 0) -> list[_Part]:
    """Return the parts with the records from offset `since` to `start`, where the log's file
    begins. Raises a UserError if a part is missing."""
    # Follow parts backwards by offset and checksum, to ignore parts of other logs.
    there = {part.end: part for part in _found(log)}
    chain: list[_Part] = []
    end = start
    while end.offset > since:
        if end not in there:
            raise UserError(
                f"{log} begins at byte {start.offset}; the part of its history that ends at byte {end.offset} is not in "
                f"{log.parent / HISTORY}. A run can resume without it, but the earlier records cannot be read"
            )
        chain.append(there[end])
        end = there[end].begin
    return chain[::-1]


def archive(log: Path, descriptor: int, start: Position, end: Position, disk: Disk) -> None:
    """Compress the records of a log's file from its `start` to `end` into a part. Leaves no part if
    it raises an OSError, for example because the disk is full."""
    _write_part(_part(log, start, end), records(descriptor, start, start.offset, end.offset), disk)


def part_before(log: Path, end: Position) -> tuple[str, Iterator[bytes]] | None:
    """Return the name and compressed bytes of a part with the records of the log's file before a
    position; None if there are none."""
    start = start_of(log)
    if start.offset >= end.offset:
        return None

    def chunks() -> Iterator[bytes]:
        with open_file(log) as file:
            # After a cut, the name would be wrong.
            if file_start(file) != start:
                raise OSError(f"{log} was cut while it was being packed")
            yield from records(file.fileno(), start, start.offset, end.offset)

    return _part(log, start, end).path.name, _compressed(chunks())


def drop_parts_behind(log: Path, start: Position) -> None:
    """Remove parts that a rollback or unfinished cut left after the beginning of the log's file."""
    for part in _found(log):
        if part.end.offset >= start.offset and part.end != start:
            remove(part.path)


def split(log: Path, at: Position, disk: Disk) -> None:
    """Create a part that ends inside an existing part, at `at`, where the log will continue. Raises
    a UserError if a part is missing, and an OSError if, for example, the disk is full."""
    for part in parts(log, start_of(log), at.offset):
        if part.begin.offset < at.offset < part.end.offset:
            chunks = _first_bytes(part.chunks(part.begin.offset), at.offset - part.begin.offset)
            _write_part(_part(log, part.begin, at), chunks, disk)


def records(descriptor: int, start: Position, begin: int, end: int) -> Iterator[bytes]:
    """Yield the bytes between two offsets in a log's file, which begins at `start`, in chunks."""
    at, last = place(start, begin), place(start, end)
    while at < last and (data := os.pread(descriptor, min(CHUNK_BYTES, last - at), at)):
        at += len(data)
        yield data


def raw(log: Path, since: int) -> Iterator[bytes]:
    """Yield the bytes of a log and its archive from an offset on, or raise a UserError if a part is
    missing."""
    with open_file(log) as file:
        start = file_start(file)
        for part in parts(log, start, since):
            yield from part.chunks(max(since, part.begin.offset))
        file.seek(place(start, max(since, start.offset)))
        while data := file.read(CHUNK_BYTES):
            yield data


def _found(log: Path) -> list[_Part]:
    paths = (log.parent / HISTORY).glob(f"{log.stem}-*")
    names = [(path, _NAME.fullmatch(path.name)) for path in paths]
    positions = [
        (path, Position(int(n[1]), int(n[2], 16)), Position(int(n[3]), int(n[4], 16)))
        for path, n in names
        if n
    ]
    return [_Part(*part) for part in positions]


def _part(log: Path, begin: Position, end: Position) -> _Part:
    first, last = (f"{at.offset:012d}.{at.checksum:08x}" for at in (begin, end))
    return _Part(log.parent / HISTORY / f"{log.stem}-{first}-{last}.log.zst", begin, end)


def _write_part(part: _Part, chunks: Iterator[bytes], disk: Disk) -> None:
    make_folder(part.path.parent)
    disk.write_whole(part.path, _compressed(chunks))


def _compressed(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Compress each chunk into a zstd frame. Concatenated frames are a valid zstd stream."""
    for data in chunks:
        yield pa.compress(data, codec="zstd", asbytes=True)


def _first_bytes(chunks: Iterator[bytes], size: int) -> Iterator[bytes]:
    for data in chunks:
        yield data[:size]
        size -= len(data)
        if size <= 0:
            return
