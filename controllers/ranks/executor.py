"""Executor: execute the calls on one worker, in turns on one thread. All backends with workers use
it."""

from __future__ import annotations

import math
import os
import queue
import sys
import threading
import time
import traceback
from bdb import BdbQuit
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from ...dataflow.batch import Batch
from ...dataflow.errors import Cancelled, Ended, Planned, ResultError, Silent, UserError
from ...dataflow.graph import declared
from ...dataflow.metrics import Max, Metrics, merge
from ...dataflow.runs.files import is_full
from ...dataflow.untrusted_text import readable, redacted
from ...workers.worker import Children, Worker, peak_device_bytes
from . import row_io
from .row_io import DataAccess, Publisher, gather
from .tasks import Failure, FailureKind, Reply, RowTask, Task

# CallOrder: the order of calls on one rank, as a state machine without a worker, thread or clock.
# Generating calls are interruptible (`@remote(interruptible=True)`): after each step other calls
# may run, such as a weight transfer. All other calls are exclusive.
#
#     expected ──add──> waiting ──next──> at work ──finish──> over
#         │                ^                 │
#       cancel             └────give_way─────┘                 waiting, at work ──cancel──> over
#         v
#     cancelled ──add──> over
#
# - The next call is the first exclusive one, or else the first interruptible one.
# - Exclusive calls run to their end, in order of arrival.
# - An interruptible call that gives way goes behind the other interruptible ones.
# - An exclusive call waits at most for the current step of an interruptible one.


class TakesTurns(Protocol):
    @property
    def number(self) -> int: ...

    @property
    def interruptible(self) -> bool: ...


C = TypeVar("C", bound=TakesTurns)


class CallOrder(Generic[C]):
    """The unfinished calls on one rank."""

    def __init__(self) -> None:
        self._exclusive: deque[C] = deque()
        self._interruptible: deque[C] = deque()
        self._cancelled: set[int] = set()
        """Numbers of calls that were cancelled before they arrived."""

    def __len__(self) -> int:
        return len(self._exclusive) + len(self._interruptible)

    @property
    def next(self) -> C | None:
        return next(iter(self._exclusive or self._interruptible), None)

    def add(self, call: C) -> bool:
        """Add a call. Return False if it was cancelled before it arrived."""
        if call.number in self._cancelled:
            self._cancelled.discard(call.number)
            return False
        self._queue(call).append(call)
        return True

    def give_way(self, call: C) -> None:
        """Move an interruptible call behind the others after a step. An exclusive call keeps its
        place."""
        if call.interruptible:
            self._interruptible.remove(call)
            self._interruptible.append(call)

    def finish(self, call: C) -> None:
        self._queue(call).remove(call)

    def cancel(self, number: int) -> C | None:
        """Cancel a call.

        Returns:
            The removed call, or None if it has not arrived yet; it is then dropped on arrival.
        """
        call = self.find(number)
        if call is None:
            self._cancelled.add(number)
        else:
            self.finish(call)
        return call

    def find(self, number: int) -> C | None:
        """The call with this number, or None if it has not arrived or is finished."""
        return next(
            (c for queue in (self._exclusive, self._interruptible) for c in queue if c.number == number),
            None,
        )

    def _queue(self, call: C) -> deque[C]:
        return self._interruptible if call.interruptible else self._exclusive


# Gathered: a batching delay for rows that an expansion yields one by one, so that a reply carries
# several. The rows are published after `gather_s`, and however the call ends. Only the death of the
# process loses them, and then they are made again.


class Gathered:
    """Rows that a call has yielded but not published."""

    def __init__(self, gather_s: float, clock: Callable[[], float]) -> None:
        self._gather_s = gather_s
        self._clock = clock
        self._children: list[Children] = []
        self._metrics: list[Metrics] = []
        self._until = math.inf

    def add(self, part: Any) -> list[Any]:
        """Add a part that a method yielded, and return the parts to publish. Only `Children`
        wait."""
        children, metrics = part if isinstance(part, tuple) and len(part) == 2 else (part, {})
        if not self._gather_s or not isinstance(children, Children):
            return [*self.take(), part]
        if not self._children:
            self._until = self._clock() + self._gather_s
        self._children.append(children)
        self._metrics.append(metrics)
        return self.take_due()

    def take_due(self) -> list[Any]:
        """Return the waiting rows as one part if their time is over, else an empty list."""
        return self.take() if self._clock() >= self._until else []

    def take(self) -> list[Any]:
        """Return all waiting rows as one part, or an empty list."""
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


# Executor

KEEPALIVE_S = 5.0
"""[s] A worker that makes steps sends a reply at least this often."""
OURS = (Ended, Cancelled, Silent, Planned, GeneratorExit, KeyboardInterrupt)
"""Exceptions that Weft or the user raises to end a call or process. They are not failures of the
code that runs."""
OnReply = Callable[[Reply], None]
Replies = Generator[Reply | None, None, None]


def run(worker: Worker, task: Task, data: DataAccess, given_up: list[int]) -> Replies:
    """Execute a call.

    Args:
        given_up: Receives sample ids of the call that are no longer needed.

    Yields:
        Replies, the last with `done` or `failure`. None after a step, so that other calls can take
        a turn.
    """
    started = time.perf_counter()
    try:
        if task.rows is None:
            value = getattr(worker, task.method)(**task.arguments)
            measured: Metrics = {}
            if isinstance(value, Generator):
                value, measured = yield from value
            last = Reply(value=value if task.keep else None, metrics=measured)
        else:
            last = yield from _run_on_rows(worker, task, task.rows, data, given_up)
        held = peak_device_bytes() if task.rows is not None and last.failure is None else 0
        if held:
            last = replace(last, metrics={**last.metrics, "device_bytes": Max(float(held))})
        yield replace(last, done=last.failure is None, seconds=time.perf_counter() - started)
    except OURS:  # not a failure
        raise
    except BaseException as error:  # user code may raise anything, such as asyncio.CancelledError
        yield Reply(failure=failure_of(error))


def _run_on_rows(
    worker: Worker, task: Task, rows: RowTask, data: DataAccess, given_up: list[int]
) -> Generator[Reply | None, None, Reply]:
    """Gather the rows of a call, run its method, publish the results, and return the last reply."""
    method = getattr(worker, task.method)
    try:
        batch = gather(rows, data.reader)
    except Exception as error:
        failure = failure_of(error)
        return Reply(failure=failure if is_full(error) else replace(failure, kind=FailureKind.UNREADABLE))
    result = method(batch, **task.arguments)
    publisher = Publisher(task, rows, data.writer)
    last = Reply()
    if isinstance(result, Iterator):
        yield from _publish_parts(task, result, publisher, given_up)
    else:
        last = yield from publisher.publish(result)
    publisher.check_complete()
    return last


def _publish_parts(
    task: Task, result: Iterator[Any], publisher: Publisher, given_up: list[int]
) -> Replies:
    assert task.rows is not None
    gathered = Gathered(task.gather_s, time.monotonic)
    try:
        for part in _parts(result, given_up):
            gives_way = part is None and task.rows.operation.interruptible
            yield from _published(
                task, publisher, gathered.take_due() if gives_way else gathered.add(part)
            )
            if gives_way:
                yield None
    except (Exception, SystemExit, Cancelled) as error:  # publish finished rows before the call ends
        if not isinstance(error, Ended):
            yield from _published(task, publisher, gathered.take())
        raise
    yield from _published(task, publisher, gathered.take())


def _published(task: Task, publisher: Publisher, parts: Sequence[Any]) -> Replies:
    for part in parts:
        reply = yield from publisher.publish(part)
        if task.keep:
            yield reply


def _parts(result: Iterator[Any], given_up: list[int]) -> Iterator[Any]:
    """Parts that a method yields. A generator receives the sample ids that were given up since its
    last part."""
    if not isinstance(result, Generator):
        yield from result
        return
    try:
        part = next(result)
        while True:
            yield part
            said, given_up[:] = list(given_up), []
            part = result.send(said)
    except StopIteration:
        return


def failure_of(error: BaseException) -> Failure:
    """Convert an exception to text, with the samples in `error.sample_ids` and `error.sample`."""
    # The message of a UserError is enough, unless an exception of the user's code caused it.
    explained = isinstance(error, UserError) and error.__cause__ is None
    text = (
        ""
        if explained
        else "".join(traceback.format_exception(type(error), error, _below_executor(error)))
    )
    message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        message = f"it called sys.exit({error.code!r}), which does not end a run"
    elif isinstance(error, BdbQuit):
        message = "the debugger was quit, so the run ends"
        if sys.stdin is None or not sys.stdin.isatty():
            # `Local` runs workers on the main thread.
            how = (
                ""
                if threading.current_thread() is threading.main_thread()
                else " with backend=weft.Local()"
            )
            message = f"breakpoint() found no terminal to stop at; run{how} in a terminal, or remove it"
    kind = FailureKind.USER_ERROR if isinstance(error, UserError | BdbQuit) else FailureKind.EXCEPTION
    kind = FailureKind.DISK_FULL if is_full(error) else kind
    ids, sample = tuple(getattr(error, "sample_ids", ())), getattr(error, "sample", "")
    if isinstance(error, ResultError):  # the error is not caused by one sample
        ids, message, sample = (), f"{message} ({sample})" if sample else message, ""
    message, text, sample = (readable(redacted(part)) for part in (message, text, sample))
    return Failure(message, text, kind, ids, sample)


def _below_executor(error: BaseException) -> Any:
    """The traceback without Weft's frames above the worker's method."""
    trace = error.__traceback__
    ours = (__file__, row_io.__file__)
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


@dataclass(eq=False)
class _Running:
    task: Task
    replies: Replies
    on_reply: OnReply
    on_start: Callable[[], None]
    given_up: list[int]
    interruptible: bool
    started: bool = False

    @property
    def number(self) -> int:
        return self.task.number


def _cancelled(replies: Replies) -> Iterator[Reply]:
    """Cancel a started call and return its last replies."""
    try:
        reply = replies.throw(Cancelled())
        while True:
            if reply is not None:
                yield reply
            reply = next(replies)
    except (Cancelled, StopIteration):
        return


class Executor:
    """Executes the calls on one worker."""

    def __init__(
        self, worker: Worker, data: DataAccess, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._worker = worker
        self._data = data
        self._clock = clock
        self._order: CallOrder[_Running] = CallOrder()
        self._spoke_s = clock()
        """[s] Time of the last reply of any call."""

    @property
    def busy(self) -> bool:
        return len(self._order) > 0

    def add(self, task: Task, on_reply: OnReply, on_start: Callable[[], None] = lambda: None) -> None:
        """Add a call.

        Args:
            on_reply: Receives each reply; the last has `done` or `failure`.
            on_start: Called before the first turn of the call.
        """
        given_up: list[int] = []
        replies = run(self._worker, task, self._data, given_up)
        declaration = declared(type(self._worker), task.method) if task.rows is None else None
        interruptible = task.interruptible or (declaration is not None and declaration.interruptible)
        if not self._order.add(_Running(task, replies, on_reply, on_start, given_up, interruptible)):
            on_reply(Reply(done=True))

    def take_turn(self) -> None:
        """Continue the next call until it replies or gives way. Do nothing if there is none."""
        running = self._order.next
        if running is None:
            return
        if not running.started:
            running.started = True
            running.on_start()
        reply = next(running.replies)
        now_s = self._clock()
        if reply is None and now_s - self._spoke_s > KEEPALIVE_S:
            reply = Reply()  # a sign of life
        if reply is not None:
            self._spoke_s = now_s
        if reply is not None and reply.is_last:
            self._order.finish(running)
        else:
            self._order.give_way(running)
        if reply is not None:
            running.on_reply(reply)

    def give_up(self, number: int, sample_ids: Collection[int]) -> None:
        """Tell a call that these rows are no longer needed. A method that ignores it still makes
        them, and they are dropped."""
        running = self._order.find(number)
        if running is not None:
            running.given_up += sample_ids

    def cancel(self, number: int) -> None:
        """Cancel a call, now or on arrival. Rows that are finished are still published."""
        running = self._order.cancel(number)
        if running is None:
            return
        for reply in _cancelled(running.replies) if running.started else ():
            if not reply.is_last:
                running.on_reply(reply)
        running.replies.close()
        running.on_reply(Reply(done=True))


# ExecutorThread: a worker on a separate thread, in a process that receives calls on other threads


POLL_S = 1.0
"""[s] Longest wait for a reply before checking the worker's activity."""


class Activity:
    """Counter that a worker advances (`Context.advance`), to distinguish work from a hang. A
    heartbeat thread could not, because it keeps running during a hang."""

    def __init__(self) -> None:
        self._count = self._seen = 0

    def __call__(self) -> None:
        self._count += 1

    def is_new(self) -> bool:
        """Whether the worker has advanced since the last call of this method."""
        before, self._seen = self._seen, self._count
        return self._seen != before


def replies_of(
    coming: queue.SimpleQueue[Reply], activity: Activity, poll_s: float = POLL_S
) -> Iterator[Reply]:
    """Yield the replies of a call, and an empty one when the worker has advanced without
    replying."""
    while True:
        try:
            reply = coming.get(timeout=poll_s)
        except queue.Empty:
            if activity.is_new():
                yield Reply()
            continue
        yield reply
        if reply.is_last:
            return


class ExecutorThread:
    """A thread that makes the worker, executes its calls, and closes it.

        starting ──the worker is made──> up ──────close──> closed
            └────────an exception──────> failed ──close──> closed

    Args:
        make_worker: Called on the thread.
        activity: Counter that the worker advances.
    """

    def __init__(self, make_worker: Callable[[], Worker], data: DataAccess, activity: Activity) -> None:
        self._data = data
        self._activity = activity
        self._requests: queue.SimpleQueue[Callable[[Executor], None] | None] = queue.SimpleQueue()
        """Actions for other threads to run between two turns; None ends the thread."""
        self._up = threading.Event()
        self._worker: Worker | None = None
        self._failure: Failure | None = None
        self._thread = threading.Thread(target=self._work, args=(make_worker,), daemon=True)
        self._thread.start()

    def worker(self) -> Worker | Failure:
        """Wait until the worker is constructed. Return it, or the `Failure` if construction
        failed."""
        self._up.wait()
        if self._failure is not None:
            return self._failure
        assert self._worker is not None
        return self._worker

    def call(self, task: Task) -> Iterator[Reply]:
        """Yield the replies to a task; the last has `done` or `failure`.

        While the worker is being made and advances (such as downloading a model), empty replies are
        sent.
        """
        while not self._up.wait(POLL_S):
            if self._activity.is_new():
                yield Reply()
        worker = self.worker()
        if isinstance(worker, Failure):
            yield Reply(failure=worker)
            return
        replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._requests.put(lambda executor: executor.add(task, replies.put))
        yield from replies_of(replies, self._activity)

    def cancel(self, number: int) -> None:
        """Cancel a call without waiting, also if it has not arrived yet."""
        self._requests.put(lambda executor: executor.cancel(number))

    def give_up(self, number: int, sample_ids: Sequence[int]) -> None:
        """Tell a call that these rows are no longer needed, without waiting."""
        self._requests.put(lambda executor: executor.give_up(number, sample_ids))

    def close(self) -> None:
        """Close the worker after its current turn, and end the thread."""
        self._requests.put(None)
        self._thread.join()

    def _work(self, make_worker: Callable[[], Worker]) -> None:
        executor = None
        try:
            self._worker = make_worker()
            executor = Executor(self._worker, self._data)
        except BaseException as error:  # sent as text, because not every exception can be pickled
            self._failure = failure_of(error)
        self._up.set()
        try:
            self._serve(executor)
        except BaseException:  # exit, so that callers see a dead process instead of waiting forever
            traceback.print_exc()
            os._exit(1)
        if self._worker is not None:
            self._worker.close()

    def _serve(self, executor: Executor | None) -> None:
        while True:
            while executor is not None and executor.busy and self._requests.empty():
                executor.take_turn()
            request = self._requests.get()
            if request is None:
                return
            if executor is not None:
                request(executor)
