"""MetricLog: the metrics of a run as arrays. While the run goes on, each look reads what is new."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from ...dataflow.buffer.run_files import METRICS
from .followed_table import FollowedTable

Series: TypeAlias = tuple[np.ndarray, np.ndarray]
"""[points] steps, which only grow, and the value at each."""
MOST = 5000
"""Metrics of a run that are read, those that come first: a damaged file may have any number."""
MOST_LEFT_OUT = 5000
"""Names beyond MOST that are counted."""


class MetricLog:
    """The metrics of one run.

    Args:
        run: its directory, which need not have any yet.
    """

    def __init__(self, run: Path) -> None:
        self._table = FollowedTable(run, METRICS, MOST)
        self._columns: dict[str, tuple[array[float], array[float]]] = {}
        """Metric -> steps and values, in the order in which they were written."""
        self._series: dict[str, Series] = {}
        """The same sorted, of what was asked for since the last change."""
        self._left_out: set[str] = set()
        """Names beyond MOST, at most MOST_LEFT_OUT."""
        self._columns_left_out = 0
        self.damage: str | None = None
        """Why the file cannot be read."""

    def refresh(self) -> None:
        """Read what is new."""
        try:
            news = self._table.news()
            if news.anew:
                self._columns.clear()
                self._left_out.clear()
                self._columns_left_out = 0
                self._series.clear()
            for batch in news.batches:
                self._take(batch)
            if news.table is not None:
                self._take_wide(news.table)
                self._columns_left_out = news.left_out
            left_out = len(self._left_out) + self._columns_left_out
            least = "at least " if len(self._left_out) == MOST_LEFT_OUT else ""
            more = f"{self._table.path}: it has {least}{left_out:,} metrics more than the {MOST:,} that are shown"
            self.damage = more if left_out else None
        except (OSError, ValueError, pa.ArrowException) as error:
            self.damage = f"{self._table.path}: {error}"

    def _take(self, batch: pa.RecordBatch) -> None:
        steps, values = batch["step"].to_numpy(zero_copy_only=False), batch["value"].to_numpy(zero_copy_only=False)
        coded = batch["name"].dictionary_encode()
        codes = coded.indices.to_numpy(zero_copy_only=False)
        order = np.argsort(codes, kind="stable")
        ends = np.cumsum(np.bincount(codes, minlength=len(coded.dictionary)))
        for start, end, name in zip([0, *ends[:-1].tolist()], ends.tolist(), coded.dictionary.to_pylist(), strict=True):
            own = order[start:end]
            self._add(name, steps[own], values[own])

    def _add(self, name: str, steps: np.ndarray, values: np.ndarray) -> None:
        if name not in self._columns and len(self._columns) >= MOST:
            if len(self._left_out) < MOST_LEFT_OUT:
                self._left_out.add(name)
            return
        held = self._columns.setdefault(name, (array("d"), array("d")))
        held[0].frombytes(np.asarray(steps, np.float64).tobytes())
        held[1].frombytes(np.asarray(values, np.float64).tobytes())
        self._series.pop(name, None)

    def _take_wide(self, table: pa.Table) -> None:
        """Take a table with a row for each step and a column for each metric."""
        if "step" not in table.column_names:
            return
        steps = table["step"].to_numpy()
        for name in table.column_names:
            column = table[name].combine_chunks()
            if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
                continue
            there = column.is_valid().to_numpy(zero_copy_only=False)
            self._add(name, steps[there], column.to_numpy(zero_copy_only=False)[there])

    @property
    def names(self) -> list[str]:
        """Every metric that some step has measured, in the order in which they came first."""
        return list(self._columns)

    def series(self, name: str) -> Series:
        """The values of a metric by step; the one that was written last counts. Empty arrays where it was never measured."""
        if name not in self._series:
            held = self._columns.get(name)
            if held is None:
                return np.empty(0), np.empty(0)
            self._series[name] = _sorted(np.array(held[0]), np.array(held[1]))
        return self._series[name]

    @property
    def last(self) -> Mapping[str, float]:
        """The metrics of the last step that is over; empty before the first."""
        steps, _ = self.series("step")
        if not len(steps):
            return {}
        last = steps[-1]
        found: dict[str, float] = {}
        for name in self._columns:
            own, values = self.series(name)
            if len(own) and own[-1] == last:
                found[name] = float(values[-1])
        return found


def _sorted(steps: np.ndarray, values: np.ndarray) -> Series:
    """
    >>> [a.tolist() for a in _sorted(np.array([0.0, 2.0, 1.0, 2.0]), np.array([5.0, 6.0, 7.0, 8.0]))]
    [[0.0, 1.0, 2.0], [5.0, 7.0, 8.0]]
    """
    if len(steps) > 1 and not (np.diff(steps) > 0).all():
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
        last = np.append(np.diff(steps) > 0, True)
        steps, values = steps[last], values[last]
    return steps, values
