"""CallLog: the timeline of a run as arrays. While the run goes on, each look reads what is new."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from ...dataflow.buffer.run_files import TIMELINE
from ...dataflow.buffer.run_tables import CALLS
from .followed_table import FollowedTable

NUMBERS = ("step", "start_s", "end_s", "worker_s", "rows", "tokens")
WORDS = ("graph", "group", "node")


class CallLog:
    """The calls of one run, in the order in which they ended.

    Args:
        run: its directory, which need not have any yet.
    """

    def __init__(self, run: Path) -> None:
        self._table = FollowedTable(run, TIMELINE)
        self._parts: list[dict[str, np.ndarray]] = []
        self._words: dict[str, dict[str, int]] = {name: {} for name in WORDS}
        """Column -> word -> its number."""
        self.damage: str | None = None
        """Why the file cannot be read."""

    def refresh(self) -> None:
        """Read what is new."""
        try:
            news = self._table.news()
            if news.anew:
                self._parts = []
            for batch in news.batches:
                self._add(pa.Table.from_batches([batch]))
            if news.table is not None:
                self._add(news.table.select([name for name in CALLS.names if name in news.table.column_names]))
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
        self._parts.append(part)

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """[calls] of each column; `graph`, `group` and `node` are numbers of `words`."""
        if len(self._parts) > 1:
            self._parts = [{name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]}]
        if not self._parts:
            return {name: np.empty(0, np.int32 if name in WORDS else np.float64) for name in (*NUMBERS, *WORDS)}
        return self._parts[0]

    def words(self, column: str) -> Sequence[str]:
        """The words of `graph`, `group` or `node` by their numbers."""
        return list(self._words[column])
