"""Source: the input rows of a graph."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
import xxhash


class Source(Protocol):
    """The input of a graph: a name, column names, and a table with the rows."""

    @property
    def name(self) -> str: ...
    @property
    def columns(self) -> tuple[str, ...]: ...
    @property
    def table(self) -> pa.Table: ...


def file_columns(source: Source) -> frozenset[str]:
    """Return the columns that a source copied unchanged from the user's file.

    A node gets such a column if it names the column or asks for all. A column of the file never
    replaces a Weft column with the same name (`Declaration.weft_columns`).
    """
    return getattr(source, "file_columns", frozenset())


@dataclass(frozen=True)
class TableSource:
    """A source with the rows of an Arrow table that has Weft's column names.

    >>> TableSource("pairs", pa.table({"prompt_ids": [[1, 2]]})).columns
    ('prompt_ids',)
    """

    name: str
    table: pa.Table
    file_columns: frozenset[str] = frozenset()
    """Columns copied unchanged from the user's file."""

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.table.column_names)


def fingerprint(source: Source) -> str:
    """Return a hexadecimal checksum of a source's rows, independent of the table's chunks.

    >>> one, two = (pa.table({"prompt_ids": pa.chunked_array(chunks)}) for chunks in ([[[1], [2]]], [[[1]], [[2]]]))
    >>> fingerprint(TableSource("one", one)) == fingerprint(TableSource("two", two))
    True
    """
    sums = xxhash.xxh3_64()
    # The stream would contain the boundaries of chunks, so combine them first.
    table = source.table.combine_chunks()
    with pa.PythonFile(_Hashing(sums), "w") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sums.hexdigest()


class _Hashing:
    """A file-like object that hashes the bytes written to it."""

    closed = False

    def __init__(self, sums: xxhash.xxh3_64) -> None:
        self._sums = sums

    def write(self, data: bytes) -> int:
        self._sums.update(data)
        return len(data)

    def flush(self) -> None: ...
    def close(self) -> None: ...


# Cursor: the position of a run in its data.


CURSOR = "cursor"
"""Key of the log note with the cursor where the log starts, unless at the start of the data."""


def positions(size: int, seed: int, *, shuffle: bool) -> Iterator[int]:
    """Yield the indices of a source's rows in issue order, epoch after epoch, without end. With
    `shuffle`, each epoch has its own order, drawn from `seed`."""
    for epoch in itertools.count():
        drawn = np.random.default_rng((seed, epoch)).permutation(size).tolist() if shuffle else None
        yield from drawn or range(size)


@dataclass(frozen=True)
class Cursor:
    """Position in the data from which a run resumes without its rows in flight."""

    issued: int = 0
    """Number of source rows issued so far."""
    again: tuple[int, ...] = ()
    """Rows to issue again first, because no update used their responses."""

    def rest(self, order: Iterator[int], issued: int) -> Iterator[int]:
        """Return the rows that remain after `issued` rows. `order` is the result of `positions`."""
        rest = itertools.chain(self.again, itertools.islice(order, self.issued, None))
        return itertools.islice(rest, issued, None)

    def after(self, issued: int, untrained: Iterable[int]) -> Cursor:
        """Return the cursor after `issued` more rows, with the `untrained` rows to issue again."""
        # The rows of `again` are issued first and do not advance the position in the source.
        return Cursor(self.issued + max(0, issued - len(self.again)), (*untrained, *self.again[issued:]))
