"""Source: where the rows of a graph come from."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
import xxhash


class Source(Protocol):
    """A name, the columns that each row has, and the rows themselves."""

    @property
    def name(self) -> str: ...
    @property
    def columns(self) -> tuple[str, ...]: ...
    @property
    def table(self) -> pa.Table: ...


def file_columns(source: Source) -> frozenset[str]:
    """Columns that a source took over from the user's file as they were.

    They belong to the user. A node gets them if it names them or asks for all columns, but never in the place of a column of Weft's
    that happens to have the same name (`Declaration.weft_columns`).
    """
    return getattr(source, "file_columns", frozenset())


@dataclass(frozen=True)
class TableSource:
    """Rows of any Arrow table, in Weft's own columns; see `dataflow/prompts/prompts.py` for prompts from files.

    >>> TableSource("pairs", pa.table({"prompt_ids": [[1, 2]]})).columns
    ('prompt_ids',)
    """

    name: str
    table: pa.Table
    file_columns: frozenset[str] = frozenset()
    """Columns that belong to the user: see the function `file_columns`."""

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.table.column_names)


def fingerprint(source: Source) -> str:
    """A checksum of the rows of a source, in hexadecimal: the same wherever and however the table was made.

    >>> one, two = (pa.table({"prompt_ids": pa.chunked_array(chunks)}) for chunks in ([[[1], [2]]], [[[1]], [[2]]]))
    >>> fingerprint(TableSource("one", one)) == fingerprint(TableSource("two", two))
    True
    """
    sums = xxhash.xxh3_64()
    table = source.table.combine_chunks()
    with pa.PythonFile(_Hashing(sums), "w") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sums.hexdigest()


class _Hashing:
    """A file that only takes the checksum of what is written to it."""

    closed = False

    def __init__(self, sums: xxhash.xxh3_64) -> None:
        self._sums = sums

    def write(self, data: bytes) -> int:
        self._sums.update(data)
        return len(data)

    def flush(self) -> None: ...
    def close(self) -> None: ...


# Cursor
#
# Cursor: how far a run has come in its data.


CURSOR = "cursor"
"""Key of the note in a log that does not begin with the first row of the data: it says where the log begins."""


def positions(size: int, seed: int, *, shuffle: bool) -> Iterator[int]:
    """Rows of a source in the order in which they are issued, without end.

    Args:
        size: rows of the source.
        seed: of the run; each epoch has an order of its own, drawn from the seed.
        shuffle: False issues the rows as they stand.
    """
    for epoch in itertools.count():
        yield from (
            np.random.default_rng((seed, epoch)).permutation(size).tolist() if shuffle else range(size)
        )


@dataclass(frozen=True)
class Cursor:
    """The place in the data from which a run goes on without its rows in flight."""

    issued: int = 0
    """Rows of the source that were issued, in the order of the run."""
    again: tuple[int, ...] = ()
    """Rows among them that are issued once more, before all others, because no update was made with their responses."""

    def rest(self, order: Iterator[int], issued: int) -> Iterator[int]:
        """The rows that remain after `issued` rows were issued from this cursor."""
        return itertools.islice(
            itertools.chain(self.again, itertools.islice(order, self.issued, None)), issued, None
        )

    def after(self, issued: int, untrained: Iterable[int]) -> Cursor:
        """The cursor after `issued` rows from this one; the `untrained` rows among them have to be issued again."""
        return Cursor(self.issued + max(0, issued - len(self.again)), (*untrained, *self.again[issued:]))
