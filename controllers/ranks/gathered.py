"""Gathered: rows that an expansion yields one by one, kept on their rank for a moment so that one reply brings several of them.

A driver of many ranks is told of each of them once in a while and not of each row. Rows that are kept are published when the first of
them has waited for `gather_s`, and when the call ends in whatever way: only the death of the process loses them, and they are made again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ...dataflow.batch import Batch
from ...dataflow.metrics import Metrics, merge
from ...workers.children import Children


class Gathered:
    """What a call has yielded and not published.

    Args:
        gather_s: seconds for which rows may wait; 0: none waits.
        clock: in seconds.
    """

    def __init__(self, gather_s: float, clock: Callable[[], float]) -> None:
        self._gather_s = gather_s
        self._clock = clock
        self._children: list[Children] = []
        self._metrics: list[Metrics] = []
        self._until = math.inf

    def add(self, part: Any) -> list[Any]:
        """Take in what a method yielded; returns the parts that are to be published now. Only `Children` wait."""
        children, metrics = part if isinstance(part, tuple) and len(part) == 2 else (part, {})
        if not self._gather_s or not isinstance(children, Children):
            return [*self.take(), part]
        if not self._children:
            self._until = self._clock() + self._gather_s
        self._children.append(children)
        self._metrics.append(metrics)
        return self.take_due()

    def take_due(self) -> list[Any]:
        """The rows that have waited long enough, as one part; empty when there are none."""
        return self.take() if self._clock() >= self._until else []

    def take(self) -> list[Any]:
        """All rows that wait, as one part; empty when there are none."""
        children, metrics = self._children, self._metrics
        self._children, self._metrics, self._until = [], [], math.inf
        return [(_joined(children), merge(metrics))] if children else []


def _joined(parts: list[Children]) -> Children:
    if len(parts) == 1:
        return parts[0]
    columns = [name for name in parts[0].rows.columns if all(name in part.rows for part in parts)]
    rows = Batch.concat([part.rows.select(columns) for part in parts])
    numbers, finished = ([getattr(part, name) for part in parts] for name in ("numbers", "finished"))
    return Children(rows, np.concatenate(numbers), np.concatenate(finished))
