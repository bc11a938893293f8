"""CallLog: the timeline of a run as arrays. While the run goes on, each look reads what is new."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ...dataflow.runs.files import TIMELINE
from ...dataflow.runs.follow import FollowedTable
from ...dataflow.runs.tables import BY_RANK, CALLS

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
