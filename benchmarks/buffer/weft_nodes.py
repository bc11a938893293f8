"""Graphs for `weft_buffer.py`, which claims rows but runs no node, and processes that write and
read rows."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from rows import (
    DTYPES,
    GENERATED,
    GROUP,
    REWARDED,
    TrainerClock,
    dense,
    hashes,
    joined,
    ragged,
    rewards_of,
    sleep_until,
    touch,
)

import weft
from weft.controllers.backends.backend import Files
from weft.controllers.ranks.row_io import DataAccess, gather
from weft.controllers.ranks.tasks import RowTask
from weft.dataflow.batch import Batch
from weft.dataflow.buffer.leases import Published
from weft.dataflow.buffer.segments import Segment
from weft.dataflow.operation import Shape, node

NODE = "bench"
PROCESSES = multiprocessing.get_context("spawn")
Reply = tuple[int, Published, Segment | None]
"""Token of the lease, publication, and its segment."""


@node(shape=Shape.EXPAND, reads=("seed",), writes=tuple(DTYPES))
def put(rows: Batch) -> Batch: ...


@node(reads=tuple(DTYPES))
def get(rows: Batch) -> Batch: ...


@node(shape=Shape.EXPAND, reads=("seed",), writes=("numbers",))
def fill(rows: Batch) -> Batch: ...


@node(reads=("numbers",))
def consume(rows: Batch) -> Batch: ...


@node(shape=Shape.EXPAND, reads=("seed",), writes=GENERATED)
def generate(rows: Batch) -> Batch: ...


@node(reads=("response_ids",), writes=("reward",))
def score(rows: Batch) -> Batch: ...


@node(reads=REWARDED)
def update(rows: Batch) -> Batch: ...


@weft.graph
def queue(prompts: Any) -> Any:
    return get(put(prompts))


@weft.graph
def block(prompts: Any) -> Any:
    return consume(fill(prompts))


@weft.graph
def streaming(prompts: Any) -> Any:
    return update(score(generate(prompts)))


class RowProcess:
    """The worker's side: writes and reads rows in the node's folder on request."""

    def __init__(self, data: DataAccess) -> None:
        self._data = data
        self._made: list[Batch] = []
        self._got: list[Batch] = []
        self._clock = TrainerClock()

    def make(self, groups: int, per_put: int, columns: Sequence[str]) -> None:
        self._made = [
            Batch(part.select(list(columns))) for part in joined(ragged(groups * GROUP), per_put)
        ]

    def make_dense(self, bytes: int, rows: int) -> None:
        numbers = dense(bytes).reshape(-1)
        self._made = [
            Batch.of(numbers=(numbers, np.linspace(0, len(numbers), rows + 1).astype(np.int32)))
        ]

    def put(self, number: int, lease: int, published: Published, at: float) -> Reply:
        sleep_until(at)
        return (
            lease,
            published,
            self._data.writer.append(self._made[number].with_columns(sample_id=published.ids)),
        )

    def read(self, lease: int, task: RowTask) -> Reply:
        self._gather(task)
        return lease, _done(task), None

    def score(self, lease: int, task: RowTask) -> Reply:
        rewards = rewards_of(gather(task, self._data.reader)["response_ids"])
        return lease, _done(task), self._data.writer.append(Batch.of(reward=rewards, sample_id=task.ids))

    def train(self, lease: int, task: RowTask, seconds: float) -> Reply:
        self._gather(task)
        self._clock.begin()
        time.sleep(seconds)
        self._clock.end()
        return lease, _done(task), None

    def trained(self, start: float) -> dict[str, float]:
        return self._clock.figures(start)

    def hashes(self, names: Sequence[str]) -> list[str]:
        """Return the hashes of all rows that were read since the last call."""
        found = hashes([batch.record for batch in self._got], names)
        self._got.clear()
        return found

    def _gather(self, task: RowTask) -> None:
        """Fetch the rows and read every byte of them."""
        self._got.append(gather(task, self._data.reader))
        touch(self._got[-1].record, [name for piece in task.pieces for name in piece.columns])


def _done(task: RowTask) -> Published:
    return Published(task.ids, np.zeros(len(task.ids), np.int64))


def serve(connection: Connection, folder: Path, name: str) -> None:
    """Obey the connection until its other end is closed."""
    access = Files(folder).access(NODE, name)
    process = RowProcess(access)
    try:
        while True:
            do, message = connection.recv()
            connection.send(getattr(process, do)(**message))
    except EOFError:
        access.close()
