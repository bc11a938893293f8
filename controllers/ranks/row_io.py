"""Rows on a rank: read a call's columns, check the results, and write them."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Container, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ...dataflow.batch import Batch
from ...dataflow.buffer.leases import Published
from ...dataflow.buffer.rows import MAX_CHILDREN
from ...dataflow.buffer.segments import Segment, SegmentReader, SegmentWriter
from ...dataflow.buffer.staleness import row_versions
from ...dataflow.column import (
    BEGUN_NUMBER,
    CHOSEN_IDS,
    DRAW_PATH,
    EXPECTED_TOKENS,
    GROUP_ID,
    MADE_BEFORE,
    PARENT_ID,
    PROMPT_IDS,
    REJECTED_IDS,
    RESPONSE_IDS,
    RESPONSE_MASK,
    RESPONSE_VERSIONS,
    SAMPLE_ID,
)
from ...dataflow.errors import UserError
from ...dataflow.metrics import Metric, Metrics, merge
from ...dataflow.operation import Shape
from ...dataflow.runs.files import MAX_PAUSE_S, PAUSE_S, is_full
from ...workers.worker import Children, Unfinished
from .tasks import HandedOver, Reply, RowTask, Task


@dataclass(frozen=True)
class Idle:
    """A call has nothing to do until the worker's `Context.wake`, or for this long."""

    seconds: float


Replies = Generator[Reply | Idle | None, None, None]

TOKEN_COLUMNS = (PROMPT_IDS, RESPONSE_IDS, CHOSEN_IDS, REJECTED_IDS)
"""Columns whose lengths add up to the tokens of a row."""


def num_tokens(batch: Batch, columns: Container[str] | None = None) -> np.ndarray:
    """Return the number of tokens of each row: [rows] int64.

    Args:
        columns: Token columns to count; None counts all in the batch.
    """
    tokens = np.zeros(len(batch), np.int64)
    for column in TOKEN_COLUMNS:
        if str(column) in (batch.columns if columns is None else columns):
            tokens += batch.lengths(column)
    return tokens


@dataclass(frozen=True)
class DataAccess:
    """A process's access to rows: it maps all files of its node, and appends to its own."""

    reader: SegmentReader
    writer: SegmentWriter

    def close(self) -> None:
        self.reader.close()
        self.writer.close()


def gather(rows: RowTask, reader: SegmentReader) -> Batch:
    """Return a call's columns as a batch of `len(rows.ids)` rows, without a copy if they are in
    order."""
    columns: dict[str, Any] = {
        str(SAMPLE_ID): rows.ids,
        str(GROUP_ID): rows.group_ids,
        str(PARENT_ID): rows.parent_ids,
    }
    if rows.draws is not None:
        columns[str(DRAW_PATH)] = rows.draws
    if rows.made is not None and str(MADE_BEFORE) in rows.operation.may_read:
        columns[str(MADE_BEFORE)] = rows.made
    if rows.expected is not None:
        columns[str(EXPECTED_TOKENS)] = rows.expected
    if rows.begun is not None:
        columns[str(BEGUN_NUMBER)] = rows.begun
    of_file: dict[str, Any] = {}
    for piece in rows.pieces:
        read = [reader.read(s) for s in piece.segments]
        if piece.by_position:
            part = read[0].select(piece.columns)
            where = piece.keys
        else:
            merged = Batch.concat([b.select((*piece.columns, SAMPLE_ID)) for b in read])
            present = merged.numpy(SAMPLE_ID)
            order = np.argsort(present, kind="stable")
            where = order[np.searchsorted(present, piece.keys, sorter=order)]
            part = merged.select(piece.columns)
        if len(where) != len(part) or not np.array_equal(where, np.arange(len(part))):
            part = part.take(where)
        (of_file if piece.of_file else columns).update({name: part[name] for name in part.columns})
    batch = Batch.of(**columns)
    if of_file:  # a column of a file may have the name of a Weft column, but another type
        record = batch.record
        names = [*record.schema.names, *of_file]
        batch = Batch(pa.RecordBatch.from_arrays([*record.columns, *of_file.values()], names=names))
    return _masked(batch, rows.masked) if rows.masked else batch


def _masked(batch: Batch, ids: frozenset[int]) -> Batch:
    lengths = batch.lengths(RESPONSE_IDS)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    has_mask = RESPONSE_MASK in batch
    mask = batch.ragged_numpy(RESPONSE_MASK)[0] if has_mask else np.ones(offsets[-1], np.uint8)
    trained = np.repeat(~np.isin(batch.numpy(SAMPLE_ID), list(ids)), lengths)
    return batch.with_columns(**{str(RESPONSE_MASK): (mask * trained.astype(np.uint8), offsets)})


class _Gathered:
    """Delays rows that an expansion yields one by one, to send several in a reply.

    When the call ends or fails, it publishes waiting rows. If the process dies, Weft generates them
    again.
    """

    def __init__(self, gather_s: float, clock: Callable[[], float]) -> None:
        self._gather_s = gather_s
        self._clock = clock
        self._children: list[Children] = []
        self._metrics: list[Metrics] = []
        self._until = math.inf

    def add_part(self, part: Any) -> list[Any]:
        """Add a part and return the parts to publish. Only `Children` wait."""
        children, metrics = part if isinstance(part, tuple) and len(part) == 2 else (part, {})
        if not self._gather_s or not isinstance(children, Children):
            return [*self.take_all(), part]
        if not self._children:
            self._until = self._clock() + self._gather_s
        self._children.append(children)
        self._metrics.append(metrics)
        return self.take_due()

    def take_due(self) -> list[Any]:
        return self.take_all() if self._clock() >= self._until else []

    @property
    def due_s(self) -> float:
        """[s] Time until the waiting parts are due; infinity without any."""
        return self._until - self._clock()

    def take_all(self) -> list[Any]:
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


class Publisher:
    """Checks and writes a call's results, at once or in parts.

    - A map or group returns each given row once; a filter, at most once.
    - An expansion returns new rows made from given rows (their parents): all rows of a parent in
      order, or `Children` with their numbers. Each new row gets the sample id reserved for its
      parent and number. The publisher skips rows that were published earlier. It may also give up
      rows that it has begun (`Unfinished`).
    """

    def __init__(self, task: Task, rows: RowTask, writer: SegmentWriter) -> None:
        self._keep, self._rows, self._writer = task.keep, rows, writer
        ids: list[int] = rows.ids.tolist()
        self._missing = dict.fromkeys(ids)
        first = rows.first_children if rows.first_children is not None else ids
        self._first = dict(zip(ids, first, strict=True))
        """Given id -> first sample id reserved for its children."""
        made = [frozenset(numbers) for numbers in rows.made or [()] * len(ids)]
        self._made_before = dict(zip(ids, made, strict=True))
        """Given id -> numbers of its children that were published earlier."""
        self._made: set[tuple[int, int]] = set()
        self._gathered = _Gathered(task.gather_s, time.monotonic)

    def publish(self, part: Any) -> Generator[Reply, None, Reply]:
        """Write a result to a segment and return the reply. While the disk is full, yield `paused`
        replies.

        Raises:
            TypeError: The result is not a batch or metrics, or lacks a column.
            UserError: The result breaks a rule of the operation's shape.
            OSError: The disk stayed full for MAX_PAUSE_S, or is broken.
        """
        operation = self._rows.operation
        # Ranks that publish nothing check the result too.
        rows, metrics = _taken_apart(operation.name, part)
        if not self._keep:
            return Reply()
        if isinstance(rows, Unfinished):
            handed_over, kept = self._handed_over(rows)
            segment = yield from self._write(kept)
            return Reply(segment=segment, metrics=metrics, handed_over=handed_over)
        if rows is None or not (self._rows.writes or operation.shape in (Shape.FILTER, Shape.EXPAND)):
            return Reply(metrics=metrics)  # such as an update
        published, kept = self._described(rows)
        segment = (yield from self._write(kept)) if self._rows.writes else None
        return Reply(published, segment, metrics=metrics)

    def _write(self, rows: Batch) -> Generator[Reply, None, Segment]:
        began = time.monotonic()
        while True:
            try:
                return self._writer.append(rows)
            except OSError as error:
                if not is_full(error) or time.monotonic() - began > MAX_PAUSE_S:
                    raise
                yield Reply(paused=str(error))
                time.sleep(PAUSE_S)

    def _handed_over(self, given: Unfinished) -> tuple[HandedOver, Batch]:
        parents = given.rows.numpy(PARENT_ID).astype(np.int64)
        first = np.array([self._first[parent] for parent in parents.tolist()], np.int64)
        ids = first + given.numbers
        kept = given.rows.select(self._rows.writes).with_columns(sample_id=ids)
        return HandedOver(ids, parents, given.numbers, given.left), kept

    def publish_part(self, part: Any) -> Replies:
        """Write a part of the results, unless it waits for more (`_Gathered`)."""
        return self._publish_parts(self._gathered.add_part(part))

    def publish_due(self) -> Replies:
        return self._publish_parts(self._gathered.take_due())

    @property
    def idle(self) -> Idle:
        return Idle(max(0.0, self._gathered.due_s))

    def publish_rest(self) -> Replies:
        return self._publish_parts(self._gathered.take_all())

    def _publish_parts(self, parts: Iterable[Any]) -> Replies:
        for part in parts:
            reply = yield from self.publish(part)
            if self._keep:
                yield reply

    def check_complete(self) -> None:
        """Raise `UserError` if a map or group operation lost rows."""
        rows, shape = self._rows, self._rows.operation.shape
        if not (self._keep and rows.writes and self._missing and shape in (Shape.MAP, Shape.GROUP)):
            return
        some = ", ".join(map(str, list(self._missing)[:4])) + ", ..." * (len(self._missing) > 4)
        raise UserError(
            f"{self._declared}: it must return every row that it was given, but lost {len(self._missing)} of {len(rows.ids)} "
            f"(samples {some}). Declare an operation that leaves rows out with shape=Shape.FILTER"
        )

    @property
    def _declared(self) -> str:
        operation = self._rows.operation
        return f"{operation.name} is declared with shape=Shape.{operation.shape.name}"

    def _described(self, rows: Batch | Children) -> tuple[Published, Batch]:
        name, writes = self._rows.operation.name, self._rows.writes
        batch = rows.rows if isinstance(rows, Children) else rows
        expands = self._rows.operation.shape is Shape.EXPAND
        if isinstance(rows, Children) and not expands:
            raise TypeError(f"{self._declared}: it must return a Batch, not Children")
        if missing := [c for c in writes if c not in batch]:
            has = ", ".join(batch.columns) or "no columns"
            raise TypeError(f"{name} must write column {missing[0]!r}, but returned {has}")
        if expands and PARENT_ID not in batch:
            raise TypeError(f"{name} expands rows, so its result needs a 'parent_id' column")
        parents, finished = None, None
        if expands:
            batch, ids, parents, finished = self._described_children(rows)
        else:
            ids = self._returned_ids(batch)
        kept = batch.select(writes).with_columns(sample_id=ids)
        versions, newest = None, -1
        if str(RESPONSE_VERSIONS) in writes:
            versions = row_versions(batch, self._rows.version_of)
            newest = int(batch.ragged_numpy(RESPONSE_VERSIONS)[0].max(initial=-1))
        return Published(ids, num_tokens(batch, writes), versions, parents, finished, newest), kept

    def _returned_ids(self, batch: Batch) -> np.ndarray:
        """Return the sample ids of returned rows, [rows] int64."""
        if SAMPLE_ID in batch:
            ids = batch.numpy(SAMPLE_ID).astype(np.int64)
        elif len(batch) == len(self._rows.ids):
            ids = self._rows.ids
        else:
            raise TypeError(
                f"{self._rows.operation.name} returned {len(batch)} rows without sample_id for the {len(self._rows.ids)} "
                "that it was given"
            )
        for id in ids.tolist():
            if id not in self._first:
                raise UserError(
                    f"{self._declared}: it must return rows that it was given, with their sample_id, but returned sample_id {id}"
                )
            if id not in self._missing:
                raise UserError(
                    f"{self._declared}: it must return each row once, but returned sample {id} twice"
                )
            del self._missing[id]
        return ids

    def _described_children(
        self, rows: Batch | Children
    ) -> tuple[Batch, np.ndarray, np.ndarray, np.ndarray]:
        """Return new rows, their sample and parent ids ([rows] int64), and finished parents."""
        if isinstance(rows, Children):
            batch, numbers, finished = rows.rows, rows.numbers.tolist(), rows.finished
            parents = batch.numpy(PARENT_ID).astype(np.int64)
        else:
            batch, parents = rows, rows.numpy(PARENT_ID).astype(np.int64)
            numbers, finished = _in_order(parents), np.unique(parents)
        strangers = (id for id in (*parents.tolist(), *finished.tolist()) if id not in self._first)
        if stranger := next(strangers, None):
            raise UserError(
                f"{self._declared}: the parent_id of a new row must be the sample_id of a row that it was given, "
                f"but it made a row of {stranger}"
            )
        places = list(zip(parents.tolist(), numbers, strict=True))
        ids = np.array([self._first[parent] + number for parent, number in places], np.int64)
        new = [k for k, place in enumerate(places) if self._is_new(*place)]
        if len(new) < len(ids):
            batch, ids, parents = batch.take(new), ids[new], parents[new]
        return batch, ids, parents, finished

    def _is_new(self, parent: int, number: int) -> bool:
        """Record a new row. Return False if an earlier worker published it."""
        if not 0 <= number < MAX_CHILDREN:
            raise UserError(
                f"{self._declared}: it may make at most {MAX_CHILDREN} rows from one row, but made more from {parent}"
            )
        if number in self._made_before[parent]:
            return False
        if (parent, number) in self._made:
            raise UserError(
                f"{self._declared}: it must make each row once, but made row {number} of {parent} twice"
            )
        self._made.add((parent, number))
        return True


def _taken_apart(name: str, part: Any) -> tuple[Batch | Children | Unfinished | None, Metrics]:
    batch, metrics = part if isinstance(part, tuple) and len(part) == 2 else (part, {})
    if isinstance(batch, Mapping):
        batch, metrics = None, batch
    if not isinstance(batch, Batch | Children | Unfinished | None) or not isinstance(metrics, Mapping):
        pair = f"({type(batch).__name__}, {type(metrics).__name__})"
        got = pair if isinstance(part, tuple) else type(part).__name__
        raise TypeError(f"{name} must return a Batch, metrics, or both as a pair, not {got}")
    for key, metric in metrics.items():
        if not isinstance(metric, Metric):
            raise TypeError(
                f"{name}: metric {key!r} must be a Mean, Max, Sum or Std, which can be merged, not {metric!r}"
            )
    return batch, metrics


def _in_order(parents: np.ndarray) -> list[int]:
    """Return the index of each row among the rows of its parent."""
    seen: Counter[int] = Counter()
    numbers: list[int] = []
    for parent in parents.tolist():
        numbers.append(seen[parent])
        seen[parent] += 1
    return numbers
