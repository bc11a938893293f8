"""FollowedTable: a table of a run, which is a stream while the run goes on and a Parquet file afterwards; each look reads what is new."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ...dataflow.buffer.run_files import PARQUET, STREAM
from ...dataflow.buffer.run_tables import read_parquet
from ...dataflow.buffer.stream_tail import StreamTail


@dataclass(frozen=True)
class News:
    """What has come since the last look."""

    anew: bool = False
    """What was read before counts no more."""
    batches: Sequence[pa.RecordBatch] = ()
    """New rows of the stream."""
    table: pa.Table | None = None
    """All rows, as the Parquet file has them."""


class FollowedTable:
    """A table that a run writes.

    Args:
        run: its directory, which need not have the table yet.
        name: of the table, without the ending of a file.
    """

    def __init__(self, run: Path, name: str) -> None:
        self._stream, self._parquet = run / f"{name}{STREAM}", run / f"{name}{PARQUET}"
        self._tail = StreamTail(self._stream)
        self._begun = 0
        self._read_from: object = None
        """Which Parquet file was read, by its number, size and time."""

    @property
    def path(self) -> Path:
        """The file that it is read from."""
        return self._stream if self._stream.is_file() else self._parquet

    def news(self) -> News:
        """What is new; nothing where there is no file.

        Raises:
            OSError: the file cannot be read.
            pyarrow.ArrowException: it is no table.
        """
        if self._stream.is_file():
            batches = self._tail.read()
            anew = self._tail.begun != self._begun
            if anew:
                self._begun, self._read_from = self._tail.begun, None
            return News(anew, batches)
        try:
            found = os.stat(self._parquet)
        except FileNotFoundError:
            return News()
        this = found.st_ino, found.st_size, found.st_mtime_ns
        if this == self._read_from:
            return News()
        table = read_parquet(self._parquet)
        self._read_from = this
        return News(anew=True, table=table)
