"""FollowedTable: a table of a run. Each look reads only new rows.

The table is a stream while the run is alive, and a Parquet file afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from ...dataflow.runs.files import (
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
from ...dataflow.runs.tables import BY_RANK, CALLS, StreamTail

MOST_FOOTER = 64 << 20
"""[bytes] Largest footer of a Parquet file to read; enough for 300,000 columns."""


@dataclass(frozen=True)
class News:
    """New rows since the last look."""

    anew: bool = False
    """Whether to discard all rows that were read before."""
    batches: Sequence[pa.RecordBatch] = ()
    """New rows of the stream."""
    table: pa.Table | None = None
    """All rows of the Parquet file."""
    left_out: int = 0
    """Columns of the Parquet file that were not read."""


class FollowedTable:
    """A table that a run writes.

    Args:
        run: the directory of the run, which need not have the table yet.
        name: the name of the table, without a file suffix.
        most_columns: most columns of a Parquet file to read, or None for all.
    """

    def __init__(self, run: Path, name: str, most_columns: int | None = None) -> None:
        self._most_columns = most_columns
        self._stream, self._parquet = run / f"{name}{STREAM}", run / f"{name}{PARQUET}"
        self._tail = StreamTail(self._stream)
        self._begun = 0
        self._damage: Exception | None = None
        self._read_from: object = None
        """Inode, size and time of the Parquet file that was read."""

    @property
    def path(self) -> Path:
        """The file to read."""
        return self._stream if self._stream.is_file() else self._parquet

    def news(self) -> News:
        """Return new rows, or empty news without a file.

        Raises:
            OSError: the file cannot be read.
            pyarrow.ArrowException: the file is damaged.
            ValueError: the footer is larger than MOST_FOOTER.
        """
        if self._stream.is_file():
            batches = self._tail.read()
            # The writer may have started the stream over.
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
            if self._damage is not None:
                # Drop the traceback, which would grow and keep frames alive with each look.
                raise self._damage.with_traceback(None)
            return News()
        self._read_from, self._damage = None, None
        try:
            news = self._read()
        except (OSError, ValueError, pa.ArrowException) as error:
            # An OSError with a number may be temporary; other errors stay until the file changes.
            if not (isinstance(error, OSError) and error.errno):
                self._read_from, self._damage = this, error
            raise
        self._read_from = this
        return news

    def _read(self) -> News:
        with self._parquet.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 8))
            footer, ending = int.from_bytes(file.read(4), "little"), file.read(4)
        if ending == b"PAR1" and footer > MOST_FOOTER:
            raise ValueError(
                f"its footer describes the columns in {footer / 1e6:.0f} MB; at most {MOST_FOOTER / 1e6:.0f} MB are read"
            )
        with pq.ParquetFile(self._parquet) as file:
            names = file.schema_arrow.names
            kept = names[: self._most_columns]
            return News(anew=True, table=file.read(kept), left_out=len(names) - len(kept))


# The parts of a run's directory that have changed since the last look, by file times and sizes.


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
"""Part of a run -> its files and folders. A folder changes with its entries."""


def state_of(run: Path) -> dict[str, object]:
    """Return part -> a value that changes whenever the part changes."""
    return {part: tuple(_stat(run / name) for name in names) for part, names in PARTS.items()}


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def changed(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return the parts that differ.


    >>> changed({"metrics": 1, "live": 1}, {"metrics": 2, "live": 1})
    ['metrics']
    """
    return [part for part, value in now.items() if before.get(part) != value]


# The timeline of a run as arrays.


compute: Any = pyarrow.compute  # its functions are created on import, so type checkers do not see them
NUMBERS = ("step", "start_s", "end_s", "worker_s", "rows", "tokens")
WORDS = ("graph", "group", "node")
RANKS = {"call": np.int64, "rank": np.int32, "end_s": np.float64, "worker_s": np.float32}
"""Columns for the ranks of calls with several ranks: index of the call, rank, time of its answer,
and seconds in the worker."""


class CallLog:
    """The calls of one run, in the order of their ends.

    Args:
        run: the directory of the run, which need not have a timeline yet.
    """

    def __init__(self, run: Path) -> None:
        self._table = FollowedTable(run, TIMELINE)
        self._parts: list[dict[str, np.ndarray]] = []
        self._rank_parts: list[dict[str, np.ndarray]] = []
        self._length = 0
        self._words: dict[str, dict[str, int]] = {name: {} for name in WORDS}
        """Column -> word -> its number."""
        self.damage: str | None = None
        """Error if the file cannot be read."""

    def refresh(self) -> None:
        """Read new calls."""
        try:
            news = self._table.news()
            if news.anew:
                self._parts, self._rank_parts, self._length = [], [], 0
            for batch in news.batches:
                self._add(pa.Table.from_batches([batch]))
            if news.table is not None:
                self._add(
                    news.table.select([name for name in CALLS.names if name in news.table.column_names])
                )
            self.damage = None
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            self.damage = f"{self._table.path}: {error}"

    def _add(self, table: pa.Table) -> None:
        part = {name: table[name].to_numpy() for name in NUMBERS}
        for name in WORDS:
            coded = table[name].combine_chunks().dictionary_encode()
            known = self._words[name]
            numbers = [known.setdefault(str(word), len(known)) for word in coded.dictionary.to_pylist()]
            part[name] = np.array(numbers, np.int32)[coded.indices.to_numpy(zero_copy_only=False)]
        if BY_RANK in table.column_names and (
            ranks := _ranks(table[BY_RANK].combine_chunks(), self._length)
        ):
            self._rank_parts.append(ranks)
        self._parts.append(part)
        self._length += len(table)

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The columns: [calls] each. `graph`, `group` and `node` are indexes into `words`."""
        if len(self._parts) > 1:
            self._parts = [
                {name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]}
            ]
        if not self._parts:
            return {
                name: np.empty(0, np.int32 if name in WORDS else np.float64)
                for name in (*NUMBERS, *WORDS)
            }
        return self._parts[0]

    @property
    def ranks(self) -> dict[str, np.ndarray]:
        """The columns of RANKS: [ranks of calls] each, in the order of the calls."""
        if len(self._rank_parts) > 1:
            self._rank_parts = [
                {name: np.concatenate([part[name] for part in self._rank_parts]) for name in RANKS}
            ]
        return (
            self._rank_parts[0]
            if self._rank_parts
            else {name: np.empty(0, kind) for name, kind in RANKS.items()}
        )

    def words(self, column: str) -> Sequence[str]:
        """Return the words of `graph`, `group` or `node`, in the order of their numbers."""
        return list(self._words[column])


def _ranks(column: pa.ListArray, before: int) -> dict[str, np.ndarray]:
    """Return the ranks of some calls, or nothing if none had several.

    Args:
        column: [calls] BY_RANK.
        before: number of calls before these.
    """
    inner = column.flatten()
    if not len(inner):
        return {}
    numbers = compute.fill_null(compute.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    found = {name: np.asarray(inner.field(name), kind) for name, kind in RANKS.items() if name != "call"}
    return {"call": np.repeat(before + np.arange(len(column)), numbers), **found}
