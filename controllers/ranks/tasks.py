"""Tasks and replies between the driver and a rank. They carry row ids, never columns."""

from __future__ import annotations

import pickle
import sys
import threading
import traceback
from bdb import BdbQuit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

import numpy as np

from ...dataflow.buffer.leases import ColumnPiece, Published
from ...dataflow.buffer.segments import Segment
from ...dataflow.buffer.staleness import VersionOf
from ...dataflow.errors import ResultError, UserError
from ...dataflow.metrics import Metrics
from ...dataflow.operation import Operation
from ...dataflow.runs.files import is_full
from ...dataflow.untrusted_text import readable, redacted


@dataclass(frozen=True)
class RowTask:
    """Row ids of a call on one rank, and the places of their columns."""

    operation: Operation
    writes: tuple[str, ...]
    ids: np.ndarray
    group_ids: np.ndarray
    parent_ids: np.ndarray
    pieces: Sequence[ColumnPiece] = ()
    first_children: np.ndarray | None = None
    """For each row, the first of MAX_CHILDREN ids for its new rows (EXPAND only)."""
    masked: frozenset[int] = frozenset()
    """Rows whose tokens are not trained on."""
    draws: Sequence[Sequence[int]] | None = None
    """The column `draw_path`, for operations that read it."""
    made: Sequence[Sequence[int]] | None = None
    """For each row, numbers of rows made from it earlier (EXPAND only), or None."""
    expected: np.ndarray | None = None
    """The column `expected_tokens`, for operations that read it, or None."""
    begun: np.ndarray | None = None
    """The column `begun_number`, in a call that continues rows of another replica, or None."""
    version_of: VersionOf = "oldest_token"
    """How to compute the versions of generated rows."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The task holds no user objects, so the plain pickler is enough. Ray's is slower: it checks
        # each object for functions and classes of scripts.
        return _row_task, (pickle.dumps(self.__dict__, protocol=5),)


def _row_task(state: bytes) -> RowTask:
    return RowTask(**pickle.loads(state))


@dataclass(frozen=True)
class Task:
    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    rows: RowTask | None = None
    keep: bool = True
    """Whether this rank publishes the results, as one rank of each replica does."""
    number: int = 0
    gather_s: float = 0.0
    """[s] Batching delay of yielded rows."""

    @property
    def interruptible(self) -> bool:
        return self.rows is not None and self.rows.operation.interruptible


@dataclass(frozen=True)
class HandedOver:
    """Children that a rank gives up, for another rank to continue. The reply's segment has their
    columns so far."""

    ids: np.ndarray
    """[children] int64 sample ids that the children will have."""
    parents: np.ndarray
    """[children] int64 sample ids of their parents."""
    numbers: np.ndarray
    """[children] int64: number of each child among its parent's rows."""
    left: np.ndarray
    """int64 sample ids of the input rows that get no more children from this rank."""


@dataclass(frozen=True)
class Reply:
    """A reply to a call. The last has `done` or `failure`; an empty one says the rank is alive."""

    published: Published | None = None
    segment: Segment | None = None
    """Columns of the published rows, or None."""
    metrics: Metrics = field(default_factory=dict)
    value: Any = None
    done: bool = False
    seconds: float = 0.0
    """[s] Duration of the call in the worker; only in the last reply."""
    failure: Failure | None = None
    paused: str = ""
    """Error of the failed write, while the rank waits for space on a full disk."""
    handed_over: HandedOver | None = None
    """Rows that the rank gives up, with their columns so far in `segment`."""

    def __reduce__(self) -> tuple[Any, ...]:
        # As in `RowTask`. The other fields may hold user objects, which need Ray's pickler.
        plain = (self.published, self.segment, self.done, self.seconds, self.handed_over)
        plain = pickle.dumps(plain, protocol=5)
        return _reply, (plain, self.metrics, self.value, self.failure, self.paused)

    @property
    def is_last(self) -> bool:
        return self.done or self.failure is not None


def _reply(plain: bytes, metrics: Metrics, value: Any, failure: Failure | None, paused: str) -> Reply:
    published, segment, done, seconds, handed_over = pickle.loads(plain)
    return Reply(published, segment, metrics, value, done, seconds, failure, paused, handed_over)


class FailureKind(Enum):
    """Decides how the driver handles a failure."""

    EXCEPTION = auto()
    USER_ERROR = auto()
    """An exception that the user can fix."""
    DISK_FULL = auto()
    UNREADABLE = auto()
    """The call's rows could not be read. Their node may be gone."""
    DIED = auto()


@dataclass(frozen=True)
class Failure:
    """A worker's failure as text, because not every exception can be pickled."""

    message: str
    traceback: str = ""
    kind: FailureKind = FailureKind.EXCEPTION
    sample_ids: tuple[int, ...] = ()
    """Samples that caused the failure."""
    sample: str = ""
    """Description of the first of these, such as its prompt and response."""


def failure_of(error: BaseException) -> Failure:
    """Convert an exception to text, with the samples in `error.sample_ids` and `error.sample`."""
    message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        message = f"it called sys.exit({error.code!r}), which does not end a run"
    elif isinstance(error, BdbQuit):
        message = "the debugger was quit, so the run ends"
        if sys.stdin is None or not sys.stdin.isatty():
            is_local = threading.current_thread() is threading.main_thread()
            how = "" if is_local else " with backend=weft.Local()"
            message = f"breakpoint() found no terminal to stop at; run{how} in a terminal, or remove it"
    kind = FailureKind.USER_ERROR if isinstance(error, UserError | BdbQuit) else FailureKind.EXCEPTION
    kind = FailureKind.DISK_FULL if is_full(error) else kind
    ids, sample = tuple(getattr(error, "sample_ids", ())), getattr(error, "sample", "")
    if isinstance(error, ResultError):  # the error is not caused by one sample
        ids, message, sample = (), f"{message} ({sample})" if sample else message, ""
    message, text, sample = (readable(redacted(part)) for part in (message, _traceback(error), sample))
    return Failure(message, text, kind, ids, sample)


def _traceback(error: BaseException) -> str:
    """Return the traceback from the worker's method on, without this folder's frames."""
    # A UserError's message is enough, unless user code caused it.
    if isinstance(error, UserError) and error.__cause__ is None:
        return ""
    trace, ours = error.__traceback__, Path(__file__).parent
    while (
        trace is not None
        and trace.tb_next is not None
        and Path(trace.tb_frame.f_code.co_filename).parent == ours
    ):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))
