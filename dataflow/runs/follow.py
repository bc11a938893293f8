"""Follow a run that another process writes: each read returns the data added since the last."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ..safe_files import open_file
from .files import (
    ALERTS,
    CHECKPOINTS,
    CONFIG,
    LIVE,
    LOCK,
    LOGS,
    METRICS,
    PARQUET,
    SAMPLES,
    STOP,
    STREAM,
    TIMELINE,
)

MOST_FOOTER = 64 << 20
"""[bytes] Maximum size of a Parquet file's footer to read; enough for 300,000 columns."""


class _StreamTail:
    """Reads new rows of a stream file, which another process writes and may not have created
    yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._file: tuple[int, int] | None = None
        """Device and inode of the file to which the offset belongs."""
        self.begun = 0
        """How many times reading has started over. When this grows, discard earlier rows."""
        self._schema: pa.Schema | None = None

    def new_batches(self) -> list[pa.RecordBatch]:
        """Return the complete new messages, or all messages if the file was replaced or truncated.
        Raises an ArrowException if the file is not a stream."""
        try:
            with open_file(self._path) as file:
                found = os.fstat(file.fileno())
                this = found.st_dev, found.st_ino
                # A resumed run replaces the file.
                if this != self._file or found.st_size < self._offset:
                    self._file, self._offset, self._schema = this, 0, None
                    self.begun += 1
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        batches: list[pa.RecordBatch] = []
        reader, start = pa.BufferReader(data), self._offset
        while True:
            try:
                message = pa.ipc.read_message(reader)
            except (EOFError, pa.ArrowInvalid, OSError):  # the message is still being written
                return batches
            if self._schema is None:
                self._schema = pa.ipc.read_schema(message)
            else:
                batches.append(pa.ipc.read_record_batch(message, self._schema))
            self._offset = start + reader.tell()


class _News(NamedTuple):
    """New rows since the last read."""

    anew: bool = False
    """Whether to discard all rows read before."""
    batches: Sequence[pa.RecordBatch] = ()
    """New rows of the stream."""
    table: pa.Table | None = None
    """All rows of the Parquet file."""
    left_out: int = 0
    """Number of columns of the Parquet file that were not read."""


class FollowedTable:
    """A table that a run writes or will write. Reads at most `most_columns` columns of Parquet."""

    def __init__(self, run: Path, name: str, most_columns: int | None = None) -> None:
        self._most_columns = most_columns
        self._stream, self._parquet = run / f"{name}{STREAM}", run / f"{name}{PARQUET}"
        self._tail = _StreamTail(self._stream)
        self._begun = 0
        self._damage: Exception | None = None
        self._read_from: object = None
        """Inode, size and modification time of the Parquet file that was read."""

    @property
    def path(self) -> Path:
        return self._stream if self._stream.is_file() else self._parquet

    def news(self) -> _News:
        """Return new rows, if any. Raises an OSError, ArrowException or ValueError if the file
        cannot be read."""
        if self._stream.is_file():
            batches = self._tail.new_batches()
            anew = self._tail.begun != self._begun
            if anew:
                self._begun, self._read_from = self._tail.begun, None
            return _News(anew, batches)
        try:
            found = os.stat(self._parquet)
        except FileNotFoundError:
            return _News()
        this = found.st_ino, found.st_size, found.st_mtime_ns
        if this == self._read_from:
            if self._damage is not None:
                # Drop the traceback, which would grow with each read.
                raise self._damage.with_traceback(None)
            return _News()
        self._read_from, self._damage = None, None
        try:
            news = self._read()
        except (OSError, ValueError, pa.ArrowException) as error:
            # An OSError with an errno may be temporary; other errors stay until the file changes.
            if not (isinstance(error, OSError) and error.errno):
                self._read_from, self._damage = this, error
            raise
        self._read_from = this
        return news

    def _read(self) -> _News:
        with open_file(self._parquet) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 8))
            footer, ending = int.from_bytes(file.read(4), "little"), file.read(4)
        if ending == b"PAR1" and footer > MOST_FOOTER:
            size, most = footer / 1e6, MOST_FOOTER / 1e6
            raise ValueError(
                f"its footer describes the columns in {size:.0f} MB; at most {most:.0f} MB are read"
            )
        with pq.ParquetFile(self._parquet) as file:
            names = file.schema_arrow.names
            kept = names[: self._most_columns]
            return _News(anew=True, table=file.read(kept), left_out=len(names) - len(kept))


PARTS: Mapping[str, tuple[str, ...]] = {
    "metrics": (f"{METRICS}{STREAM}", f"{METRICS}{PARQUET}"),
    "timeline": (f"{TIMELINE}{STREAM}", f"{TIMELINE}{PARQUET}"),
    "samples": (SAMPLES,),
    "live": (LIVE,),
    "alerts": (ALERTS,),
    "status": (LOCK, CONFIG, STOP),
    "checkpoints": (CHECKPOINTS,),
    "logs": (LOGS,),
}
"""Maps each part of a run to its files and folders. A folder changes when its entries do."""


def state_of(run: Path) -> dict[str, object]:
    """Map each part of a run to a value that changes whenever the part changes."""
    return {part: tuple(_stat(run / name) for name in names) for part, names in PARTS.items()}


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def changed(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return the parts that differ between two results of `state_of`.

    >>> changed({"metrics": 1, "live": 1}, {"metrics": 2, "live": 1})
    ['metrics']
    """
    return [part for part, value in now.items() if before.get(part) != value]
