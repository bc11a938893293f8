"""Shell: what stands around a worker in its process. It reads the rows of a call from segments, runs the method, and
writes what comes back. The same shell serves the in-process backend and Ray."""

from __future__ import annotations

import pickle
import sys
import time
import traceback
from bdb import BdbQuit
from collections.abc import Container, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..dataflow.batch import Batch
from ..dataflow.buffer.disk import MAX_PAUSE_S, PAUSE_S, is_full
from ..dataflow.buffer.rows import MAX_CHILDREN, Piece, Published
from ..dataflow.buffer.segments import Segment, SegmentReader, SegmentWriter
from ..dataflow.column import (
    CHOSEN_IDS,
    DRAW_PATH,
    GROUP_ID,
    PARENT_ID,
    PROMPT_IDS,
    REJECTED_IDS,
    RESPONSE_IDS,
    RESPONSE_MASK,
    RESPONSE_VERSIONS,
    SAMPLE_ID,
)
from ..dataflow.errors import Ended, UserError
from ..dataflow.metrics import Metric, Metrics
from ..dataflow.operation import Operation, Shape
from ..workers.worker import Worker

TOKEN_COLUMNS = (PROMPT_IDS, RESPONSE_IDS, CHOSEN_IDS, REJECTED_IDS)
"""Columns whose lengths add up to the tokens of a row."""


def num_tokens(batch: Batch, columns: Container[str] | None = None) -> np.ndarray:
    """[rows] int64 tokens of each row, in those of the token columns that are among `columns` (None: that the batch has)."""
    tokens = np.zeros(len(batch), np.int64)
    for column in TOKEN_COLUMNS:
        if str(column) in (batch.columns if columns is None else columns):
            tokens += batch.lengths(column)
    return tokens


@dataclass(frozen=True)
class DataAccess:
    """How a process gets at rows: it maps the files of its node, and appends to some of its own."""

    reader: SegmentReader
    writer: SegmentWriter

    def close(self) -> None:
        self.reader.close()
        self.writer.close()


@dataclass(frozen=True)
class RowTask:
    """The rows of one call on one rank: identities and where their columns are, never the columns themselves."""

    operation: Operation
    writes: tuple[str, ...]
    ids: np.ndarray
    group_ids: np.ndarray
    parent_ids: np.ndarray
    pieces: Sequence[Piece] = ()
    first_children: np.ndarray | None = None
    """For each row, where the MAX_CHILDREN sample ids begin that are set aside for the rows made of it (EXPAND only)."""
    masked: frozenset[int] = frozenset()
    """Rows of which no token is to be trained on."""
    draws: Sequence[Sequence[int]] | None = None
    """The column `draw_path`, for an operation that names it."""

    def __reduce__(self) -> tuple[Any, ...]:
        # By the plain pickler, as nothing in it is the user's. Ray's own asks Python about each object, for the sake of
        # functions and classes that are defined in a script.
        return _row_task, (pickle.dumps(self.__dict__, protocol=5),)


def _row_task(state: bytes) -> RowTask:
    return RowTask(**pickle.loads(state))


@dataclass(frozen=True)
class Task:
    """One call on one rank."""

    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    rows: RowTask | None = None
    keep: bool = True
    """Publish the rows that come back (one rank per replica does)."""
    number: int = 0
    """Of the call, in the run."""

    @property
    def interruptible(self) -> bool:
        """Whether other calls on the worker have a turn while this one goes on."""
        return self.rows is not None and self.rows.operation.interruptible


@dataclass(frozen=True)
class Reply:
    """One thing that a call gave back."""

    published: Published | None = None
    segment: Segment | None = None
    """Where the columns of the published rows lie; None: nothing was written."""
    metrics: Metrics = field(default_factory=dict)
    value: Any = None
    """What a method without rows returned."""
    done: bool = False
    seconds: float = 0.0
    """Time spent in the worker, on the last reply."""
    failure: Failure | None = None
    paused: str = ""
    """The disk has no room for what was made; it is written when there is."""

    def __reduce__(self) -> tuple[Any, ...]:
        plain = pickle.dumps((self.published, self.segment, self.done, self.seconds), protocol=5)
        return _reply, (plain, self.metrics, self.value, self.failure, self.paused)


def _reply(plain: bytes, metrics: Metrics, value: Any, failure: Failure | None, paused: str) -> Reply:
    published, segment, done, seconds = pickle.loads(plain)
    return Reply(published, segment, metrics, value, done, seconds, failure, paused)


@dataclass(frozen=True)
class Failure:
    """An exception in a worker, as text: it must survive any pickle."""

    message: str
    traceback: str
    user_error: bool
    sample_ids: tuple[int, ...] = ()
    """The samples at fault, where the worker knows them."""
    sample: str = ""
    """The first of them in words, where the worker knows them: its prompt and response, say."""
    died: bool = False
    """It was not an exception: the process is gone."""
    disk_full: bool = False
    unreadable: bool = False
    """Rows that it was given could not be read: their node may be gone."""


def run(worker: Worker, task: Task, data: DataAccess) -> Iterator[Reply | None]:
    """Carry out a call; the last reply has `done` or `failure`. None: nothing to say, somebody else may have a turn."""
    started = time.perf_counter()
    try:
        method = getattr(worker, task.method)
        if task.rows is None:
            value = method(**task.arguments)
            yield Reply(value=value if task.keep else None, done=True, seconds=time.perf_counter() - started)
            return
        rows = task.rows
        try:
            batch = gather(rows, data.reader)
        except Exception as error:
            yield Reply(failure=replace(failure_of(error), unreadable=True))
            return
        result = method(batch, **task.arguments)
        returned = _Returned(rows)
        if not isinstance(result, Iterator):
            reply = yield from _answer(task, rows, result, returned, data)
            returned.check_none_is_missing(task)
            yield replace(reply, done=True, seconds=time.perf_counter() - started)
            return
        for part in result:
            if part is None and rows.operation.interruptible:
                yield None
                continue
            reply = yield from _answer(task, rows, part, returned, data)
            if task.keep:
                yield reply
        returned.check_none_is_missing(task)
        yield Reply(done=True, seconds=time.perf_counter() - started)
    except Ended:  # the process was asked to end while it was at this
        raise
    except (Exception, SystemExit) as error:
        yield Reply(failure=failure_of(error))


def _answer(
    task: Task, rows: RowTask, part: Any, returned: _Returned, data: DataAccess
) -> Generator[Reply, None, Reply]:
    """What a method returned, or yielded, written to a segment; yields that it waits, while there is no room on the disk."""
    batch, metrics = _checked(rows.operation.name, part)
    if not task.keep:
        return Reply()
    if batch is None or not (rows.writes or rows.operation.shape in (Shape.FILTER, Shape.EXPAND)):
        return Reply(metrics=metrics)  # an update, say: nothing was written
    published, kept = _publish(rows, batch, returned)
    began = time.monotonic()
    while rows.writes:
        try:
            return Reply(published, data.writer.append(kept), metrics)
        except OSError as error:
            if not is_full(error) or time.monotonic() - began > MAX_PAUSE_S:
                raise
            yield Reply(paused=str(error))
            time.sleep(PAUSE_S)
    return Reply(published, metrics=metrics)


def failure_of(error: Exception | SystemExit) -> Failure:
    """An exception as text, with the samples that it names itself (`error.sample_ids`, and of the first `error.sample` in words)."""
    explained = (
        isinstance(error, UserError) and error.__cause__ is None
    )  # its message says all: no code of the user's raised
    text = "" if explained else "".join(traceback.format_exception(type(error), error, _below_shell(error)))
    name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    message = f"{name}{error}"
    if isinstance(error, SystemExit):
        message = f"it called sys.exit({error.code!r}), which ends no run"
    elif isinstance(error, BdbQuit):
        message = "a debugger was left, and the run ends"
        if sys.stdin is None or not sys.stdin.isatty():
            message = (
                "breakpoint() found no terminal to stop at; run with backend=weft.Local() in a terminal, or take it out"
            )
    return Failure(
        message,
        text,
        isinstance(error, UserError | BdbQuit),
        tuple(getattr(error, "sample_ids", ())),
        getattr(error, "sample", ""),
        disk_full=is_full(error),
    )


def _checked(name: str, part: Any) -> tuple[Batch | None, Metrics]:
    """What a method returned (or yielded), taken apart."""
    batch, metrics = part if isinstance(part, tuple) and len(part) == 2 else (part, {})
    if isinstance(batch, Mapping):
        batch, metrics = None, batch
    if not isinstance(batch, Batch | None) or not isinstance(metrics, Mapping):
        got = f"({type(batch).__name__}, {type(metrics).__name__})" if isinstance(part, tuple) else type(part).__name__
        raise TypeError(f"{name} must return a Batch, metrics, or both as a pair, not {got}")
    for key, metric in metrics.items():
        if not isinstance(metric, Metric):
            raise TypeError(
                f"{name}: metric {key!r} must be a Mean, Max or Sum, which know how to be merged, not {metric!r}"
            )
    return batch, metrics


def gather(rows: RowTask, reader: SegmentReader) -> Batch:
    """The columns of a call's rows, in the order of its rows; without a copy where the data already stands so."""
    columns: dict[str, Any] = {str(SAMPLE_ID): rows.ids, str(GROUP_ID): rows.group_ids, str(PARENT_ID): rows.parent_ids}
    if rows.draws is not None:
        columns[str(DRAW_PATH)] = rows.draws
    for piece in rows.pieces:
        found = [reader.read(s) for s in piece.segments]
        if piece.by_position:
            part = found[0].select(piece.columns)
            where = piece.keys
        else:
            merged = Batch.concat([b.select((*piece.columns, SAMPLE_ID)) for b in found])
            present = merged.numpy(SAMPLE_ID)
            order = np.argsort(present, kind="stable")
            where = order[np.searchsorted(present, piece.keys, sorter=order)]
            part = merged.select(piece.columns)
        if len(where) != len(part) or not np.array_equal(where, np.arange(len(part))):
            part = part.take(where)
        columns.update({name: part[name] for name in part.columns})
    batch = Batch.of(**columns)
    return _masked(batch, rows.masked) if rows.masked else batch


def _masked(batch: Batch, ids: frozenset[int]) -> Batch:
    """The batch with no token of these rows trained on."""
    lengths = batch.lengths(RESPONSE_IDS)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask = batch.ragged_numpy(RESPONSE_MASK)[0] if RESPONSE_MASK in batch else np.ones(offsets[-1], np.uint8)
    trained = np.repeat(~np.isin(batch.numpy(SAMPLE_ID), list(ids)), lengths)
    return batch.with_columns(**{str(RESPONSE_MASK): (mask * trained.astype(np.uint8), offsets)})


class _Returned:
    """What a call has returned of the rows that it was given.

    - A map, a group or a filter returns a row that it was given, and each once; a map and a group return all of them.
    - An expansion returns rows of parents that it was given. They get the sample ids set aside for each parent, in order.
    """

    def __init__(self, rows: RowTask) -> None:
        self._rows = rows
        self._given = frozenset(rows.ids.tolist())
        self._missing = dict.fromkeys(rows.ids.tolist())
        firsts = rows.first_children if rows.first_children is not None else ()
        self._next = {int(parent): int(first) for parent, first in zip(rows.ids, firsts, strict=False)}
        self._end = {parent: first + MAX_CHILDREN for parent, first in self._next.items()}

    @property
    def _who(self) -> str:
        return f"{self._rows.operation.name} is declared with shape=Shape.{self._rows.operation.shape.name}"

    def note(self, ids: np.ndarray) -> None:
        """Note rows that come back.

        Raises:
            UserError: one of them was not given to it, or came back before.
        """
        for id in ids.tolist():
            if id not in self._given:
                raise UserError(
                    f"{self._who}: it returns rows that it was given, with their sample_id; it returned sample_id {id}"
                )
            if id not in self._missing:
                raise UserError(f"{self._who}: it returns a row once; it returned sample {id} twice")
            del self._missing[id]

    def children(self, parents: np.ndarray) -> np.ndarray:
        """Sample ids for rows that were made of these parents.

        Raises:
            UserError: a parent was not given to it, or has more children than a row may have.
        """
        ids = np.empty(len(parents), np.int64)
        for k, parent in enumerate(parents.tolist()):
            if parent not in self._next:
                raise UserError(
                    f"{self._who}: the parent_id of a row that it makes is the sample_id of a row that it was given; "
                    f"it made a row of {parent}"
                )
            if self._next[parent] == self._end[parent]:
                raise UserError(
                    f"{self._who}: it makes at most {MAX_CHILDREN} rows of one row; it made more of {parent}"
                )
            ids[k] = self._next[parent]
            self._next[parent] += 1
        return ids

    def check_none_is_missing(self, task: Task) -> None:
        """See, when the call is over, that no row is missing.

        Raises:
            UserError: a map or a group has not returned all rows.
        """
        operation = self._rows.operation
        if not (task.keep and self._rows.writes and self._missing and operation.shape in (Shape.MAP, Shape.GROUP)):
            return
        some = ", ".join(map(str, list(self._missing)[:4])) + ", ..." * (len(self._missing) > 4)
        raise UserError(
            f"{self._who}: it returns every row that it was given; it lost {len(self._missing)} of {len(self._rows.ids)} "
            f"(samples {some}). An operation that may leave rows out is declared with shape=Shape.FILTER"
        )


def _publish(rows: RowTask, batch: Batch, returned: _Returned) -> tuple[Published, Batch]:
    """What the ledger is told of a result, and the columns that are kept of it."""
    expands = rows.operation.shape is Shape.EXPAND
    missing = [c for c in rows.writes if c not in batch]
    if missing:
        raise TypeError(
            f"{rows.operation.name} must write column {missing[0]!r}, but returned {', '.join(batch.columns) or 'no columns'}"
        )
    if expands and PARENT_ID not in batch:
        raise TypeError(f"{rows.operation.name} expands rows: what it returns needs a 'parent_id' column")
    parents = batch.numpy(PARENT_ID).astype(np.int64) if expands else None
    if parents is None:
        ids = _ids(rows, batch)
        returned.note(ids)
    else:
        ids = returned.children(parents)
    kept = batch.select(rows.writes).with_columns(sample_id=ids)
    versions, newest = None, -1
    if str(RESPONSE_VERSIONS) in rows.writes:
        values, offsets = batch.ragged_numpy(RESPONSE_VERSIONS)
        versions, newest = _minimum_per_row(values, offsets), int(values.max(initial=-1))
    return Published(ids, num_tokens(batch, rows.writes), versions, parents, newest), kept


def _ids(rows: RowTask, batch: Batch) -> np.ndarray:
    if SAMPLE_ID in batch:
        return batch.numpy(SAMPLE_ID).astype(np.int64)
    if len(batch) != len(rows.ids):
        raise TypeError(
            f"{rows.operation.name} returned {len(batch)} rows without sample_id for the {len(rows.ids)} that it was given"
        )
    return rows.ids


def _minimum_per_row(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Smallest value of each row of a ragged column; -1 for an empty row."""
    lengths = np.diff(offsets)
    out = np.full(len(lengths), -1, np.int64)
    if len(values):
        filled = lengths > 0
        out[filled] = np.minimum.reduceat(values, offsets[:-1][filled])
    return out


def _below_shell(error: BaseException) -> Any:
    """The traceback from the worker's own method on: the frames of this file help nobody."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace
