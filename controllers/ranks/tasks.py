"""Messages between the driver and a rank: a task there, replies back. No message holds the columns of a row."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np

from ...dataflow.buffer.leases import Piece, Published
from ...dataflow.buffer.segments import Segment
from ...dataflow.metrics import Metrics
from ...dataflow.operation import Operation


@dataclass(frozen=True)
class RowTask:
    """The rows of one call on one rank: their ids and where their columns are."""

    operation: Operation
    writes: tuple[str, ...]
    ids: np.ndarray
    group_ids: np.ndarray
    parent_ids: np.ndarray
    pieces: Sequence[Piece] = ()
    first_children: np.ndarray | None = None
    """For each row, the first of the MAX_CHILDREN sample ids that are reserved for rows made of it (EXPAND only)."""
    masked: frozenset[int] = frozenset()
    """Rows whose tokens are not trained on."""
    draws: Sequence[Sequence[int]] | None = None
    """The column `draw_path`, for an operation that names it."""
    made: Sequence[Sequence[int]] | None = None
    """For each row, the numbers of the rows that were made of it before (EXPAND only); None: none was made of any."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Nothing in it is the user's, so the plain pickler will do. Ray's own asks Python about each object, to find functions
        # and classes that are defined in a script.
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
    """Whether this rank publishes the rows that come back: one rank of each replica does."""
    number: int = 0
    """The call's number in the run."""
    gather_s: float = 0.0
    """Seconds for which rows that the call yields one by one may wait on the rank for others (`gathered.py`)."""

    @property
    def interruptible(self) -> bool:
        """Whether other calls on the worker take turns with this one."""
        return self.rows is not None and self.rows.operation.interruptible


@dataclass(frozen=True)
class Reply:
    """One reply to a call. The last has `done` or `failure`; an empty one says that the call goes on."""

    published: Published | None = None
    segment: Segment | None = None
    """Where the columns of the published rows lie; None: nothing was written."""
    metrics: Metrics = field(default_factory=dict)
    value: Any = None
    """The result of a method without rows."""
    done: bool = False
    seconds: float = 0.0
    """Time spent in the worker; set in the last reply."""
    failure: Failure | None = None
    paused: str = ""
    """Why nothing can be written at present: the disk is full. The rows are written when there is space."""

    def __reduce__(self) -> tuple[Any, ...]:
        plain = pickle.dumps((self.published, self.segment, self.done, self.seconds), protocol=5)
        return _reply, (plain, self.metrics, self.value, self.failure, self.paused)

    @property
    def is_last(self) -> bool:
        return self.done or self.failure is not None


def _reply(plain: bytes, metrics: Metrics, value: Any, failure: Failure | None, paused: str) -> Reply:
    published, segment, done, seconds = pickle.loads(plain)
    return Reply(published, segment, metrics, value, done, seconds, failure, paused)


class FailureKind(Enum):
    """What has failed; it decides what can be done about it."""

    EXCEPTION = auto()
    """The worker raised an exception."""
    USER_ERROR = auto()
    """The worker raised an exception that the user can mend."""
    DISK_FULL = auto()
    """The worker found no room on a disk."""
    UNREADABLE = auto()
    """The rows of the call could not be read: their node may be gone."""
    DIED = auto()
    """The process is gone."""


@dataclass(frozen=True)
class Failure:
    """What went wrong in a worker, as text, because not every exception survives a pickle."""

    message: str
    traceback: str = ""
    kind: FailureKind = FailureKind.EXCEPTION
    sample_ids: tuple[int, ...] = ()
    """The samples at fault, where the worker knows them."""
    sample: str = ""
    """The first of them in words (its prompt and response, say), where the worker knows it."""
