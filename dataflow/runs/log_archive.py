"""Archive of the part of a log before a cut, as compressed files.

    buffer/ledger.log     {"do":"cut","offset":16779311,…}, then the records from there on
    buffer/history/ledger-000000000000.00000000-000016779311.1f0c5a33.log.zst   the records from byte 0 to byte 16779311, unchanged

Positions are byte offsets in the whole log, including its archive. The name of a part has the
offsets and checksums of its begin and end. A run does not need these parts; `weft buffer check`,
`table` and `why` read them. `zstd -d` unpacks one.
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
    """A place between two records of a log, with the checksum that the next record starts from."""

    offset: int = 0
    """Bytes from the beginning of the log, including its archive."""
    checksum: int = 0


@dataclass(frozen=True)
class _Part:
    """Records that were cut off a log."""

    path: Path
    begin: Position
    end: Position

    def chunks(self, start: int) -> Iterator[bytes]:
        """Yield the log's bytes from `start` to the part's end. Raises OSError if damaged."""
        skip = start - self.begin.offset
        with pa.input_stream(str(self.path), compression="zstd") as file:
            while data := file.read(CHUNK_BYTES):
                if skip < len(data):
                    yield data[skip:]
                skip = max(0, skip - len(data))


def header(start: Position) -> bytes:
    """Return the first line of a file that begins at this position of its log; empty at offset
    0."""
    if not start.offset:
        return b""
    fields = {"do": "cut", "offset": start.offset, "checksum": start.checksum}
    payload = json.dumps(fields, separators=(",", ":")).encode()
    return b"%08x %b\n" % (zlib.crc32(payload), payload)


def place(start: Position, offset: int) -> int:
    """Return the place of an offset in a log's file that begins at `start`."""
    return offset - start.offset + len(header(start))


def file_start(file: BinaryIO) -> Position:
    """Read where the file of a log begins, and seek to its first record."""
    # A header is short, but without one, the first line may be a long record.
    line = file.readline(1 << 10)
    is_header = line.endswith(b"\n") and line[9:20] == b'{"do":"cut"'
    if is_header and line[:9] == b"%08x " % zlib.crc32(line[9:-1]):
        fields = json.loads(line[9:])
        return Position(fields["offset"], fields["checksum"])
    # No header: the file begins at offset 0.
    file.seek(0)
    return Position()


def start_of(log: Path) -> Position:
    """Return where the file of a log begins; offset 0 if there is no such file."""
    try:
        with open_file(log) as file:
            return file_start(file)
    except FileNotFoundError:
        return Position()


def parts(log: Path, start: Position, since: int = 0) -> list[_Part]:
    """Return the parts from an offset to the log's file. Raises UserError if one is missing."""
    # Follow the parts backwards by offset and checksum, so that parts of other logs are ignored.
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
    """Compress the records from the start of a log's file to a position into a part. Raises an
    OSError, for example on a full disk. No part is left."""
    _write_part(_part(log, start, end), records(descriptor, start, start.offset, end.offset), disk)


def part_before(log: Path, end: Position) -> tuple[str, Iterator[bytes]] | None:
    """Return name and compressed bytes of a part with the records before a position, or None."""
    start = start_of(log)
    if start.offset >= end.offset:
        return None

    def chunks() -> Iterator[bytes]:
        with open_file(log) as file:
            # The caller would store a part under the wrong name.
            if file_start(file) != start:
                raise OSError(f"{log} was cut while it was being packed")
            yield from records(file.fileno(), start, start.offset, end.offset)

    return _part(log, start, end).path.name, _compressed(chunks())


def drop_parts_behind(log: Path, start: Position) -> None:
    """Remove parts that a rollback or an unfinished cut left behind the file's start."""
    for part in _found(log):
        if part.end.offset >= start.offset and part.end != start:
            remove(part.path)


def split(log: Path, at: Position, disk: Disk) -> None:
    """Split the part that has a position there, for a log that will continue from it. Raises
    UserError without such a part, OSError for example on a full disk."""
    for part in parts(log, start_of(log), at.offset):
        if part.begin.offset < at.offset < part.end.offset:
            chunks = _first_bytes(part.chunks(part.begin.offset), at.offset - part.begin.offset)
            _write_part(_part(log, part.begin, at), chunks, disk)


def records(descriptor: int, start: Position, begin: int, end: int) -> Iterator[bytes]:
    """Yield the records between two offsets of a log, both in its file that begins at `start`, in
    chunks."""
    at, last = place(start, begin), place(start, end)
    while at < last and (data := os.pread(descriptor, min(CHUNK_BYTES, last - at), at)):
        at += len(data)
        yield data


def raw(log: Path, since: int) -> Iterator[bytes]:
    """Yield a log's bytes from an offset on, with its archive. Raises UserError if some are
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
    """Compress each chunk into a zstd frame; concatenated frames are a valid stream."""
    for data in chunks:
        yield pa.compress(data, codec="zstd", asbytes=True)


def _first_bytes(chunks: Iterator[bytes], size: int) -> Iterator[bytes]:
    for data in chunks:
        yield data[:size]
        size -= len(data)
        if size <= 0:
            return
