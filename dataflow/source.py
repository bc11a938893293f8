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
    """A name, the columns of each row, and the rows."""

    @property
    def name(self) -> str: ...
    @property
    def columns(self) -> tuple[str, ...]: ...
    @property
    def table(self) -> pa.Table: ...


def file_columns(source: Source) -> frozenset[str]:
    """Return the columns that a source copied unchanged from the user's file.

    A node gets them if it names them or asks for all columns, but never instead of a Weft column
    with the same name (`Declaration.weft_columns`).
    """
    return getattr(source, "file_columns", frozenset())


@dataclass(frozen=True)
class TableSource:
    """Rows of any Arrow table, in Weft's columns. For files, see `dataflow/prompts/prompts.py`.

    >>> TableSource("pairs", pa.table({"prompt_ids": [[1, 2]]})).columns
    ('prompt_ids',)
    """

    name: str
    table: pa.Table
    file_columns: frozenset[str] = frozenset()
    """Columns that belong to the user (see the function `file_columns`)."""

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.table.column_names)


def fingerprint(source: Source) -> str:
    """Return a checksum of a source's rows, in hexadecimal, for any chunking of the table.

    >>> one, two = (pa.table({"prompt_ids": pa.chunked_array(chunks)}) for chunks in ([[[1], [2]]], [[[1]], [[2]]]))
    >>> fingerprint(TableSource("one", one)) == fingerprint(TableSource("two", two))
    True
    """
    sums = xxhash.xxh3_64()
    # Chunks are visible in the stream, so combine them first.
    table = source.table.combine_chunks()
    with pa.PythonFile(_Hashing(sums), "w") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sums.hexdigest()


class _Hashing:
    """A file that computes a checksum of the bytes written to it."""

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
"""Key of a note in the log: where the log begins, if not at the first row of the data."""


def positions(size: int, seed: int, *, shuffle: bool) -> Iterator[int]:
    """Yield the `size` rows of a source in issue order, without end. Each epoch draws another order
    from `seed`, or keeps the order of the source without `shuffle`."""
    for epoch in itertools.count():
        drawn = np.random.default_rng((seed, epoch)).permutation(size).tolist() if shuffle else None
        yield from drawn or range(size)


@dataclass(frozen=True)
class Cursor:
    """Position in the data for a run that continues without its rows in flight."""

    issued: int = 0
    """Rows of the source that were issued, in the order of the run."""
    again: tuple[int, ...] = ()
    """Issued rows that must be issued again first, because no update used their responses."""

    def rest(self, order: Iterator[int], issued: int) -> Iterator[int]:
        """Return the rows that remain after `issued` rows were issued from this cursor."""
        rest = itertools.chain(self.again, itertools.islice(order, self.issued, None))
        return itertools.islice(rest, issued, None)

    def after(self, issued: int, untrained: Iterable[int]) -> Cursor:
        """Return the cursor after `issued` more rows; the `untrained` ones will be issued again."""
        # Rows of `again` are issued first, and do not advance the position in the source.
        return Cursor(self.issued + max(0, issued - len(self.again)), (*untrained, *self.again[issued:]))
