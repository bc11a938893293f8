"""Executor: executes the calls on one worker, in turns on one thread.

    ExecutorThread.replies_to(task) ──> Executor.add_task ──> CallOrder ──next──> Executor.take_turn
          ^                                                                             │
          └─────────────────────────────── replies <── run(task) <──────────────────────┘

`Local` uses an `Executor` directly.
"""

from __future__ import annotations

import itertools
import math
import os
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from ...dataflow.errors import Cancelled, Ended, Planned, Silent
from ...dataflow.graph import declared
from ...dataflow.metrics import Max, Metrics
from ...dataflow.runs.files import is_full
from ...workers.worker import IDLE, Worker, peak_device_bytes
from .row_io import DataAccess, Idle, Publisher, Replies, gather
from .tasks import Failure, FailureKind, Reply, RowTask, Task, failure_of

# CallOrder: the order of calls on one rank, as a state machine. Generating calls are interruptible
# (`@remote(interruptible=True)`): after each step other calls may run, such as a weight transfer.
# All other calls are exclusive.
#
#     expected ──add──> waiting ──next──> at work ──finish──> over
#         │                ^                 │
#       cancel             └────give_way─────┘                 waiting, at work ──cancel──> over
#         v
#     cancelled ──add──> over
#
# - The next call is the first exclusive one, else the first interruptible one.
# - Exclusive calls run to their end, in order of arrival.
# - An interruptible call that gives way goes behind the others.
# - An exclusive call waits for at most one step of an interruptible one.


class _TakesTurns(Protocol):
    @property
    def number(self) -> int: ...

    @property
    def interruptible(self) -> bool: ...


C = TypeVar("C", bound=_TakesTurns)


class CallOrder(Generic[C]):
    def __init__(self) -> None:
        self._exclusive: deque[C] = deque()
        self._interruptible: deque[C] = deque()
        self._cancelled: set[int] = set()

    def __len__(self) -> int:
        return len(self._exclusive) + len(self._interruptible)

    def __iter__(self) -> Iterator[C]:
        return itertools.chain(self._exclusive, self._interruptible)

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
        """Move an interruptible call behind the others."""
        if call.interruptible:
            self._interruptible.remove(call)
            self._interruptible.append(call)

    def finish(self, call: C) -> None:
        self._queue(call).remove(call)

    def cancel(self, number: int) -> C | None:
        """Remove and return a call. If it has not arrived, return None and drop it on arrival."""
        call = self.find(number)
        if call is None:
            self._cancelled.add(number)
        else:
            self.finish(call)
        return call

    def find(self, number: int) -> C | None:
        """Return the call with this number, or None if it has not arrived or has ended."""
        return next((call for call in self if call.number == number), None)

    def _queue(self, call: C) -> deque[C]:
        return self._interruptible if call.interruptible else self._exclusive


# Execution of one task

OURS = (Ended, Cancelled, Silent, Planned, GeneratorExit, KeyboardInterrupt)
"""Exceptions that Weft or the user raises to end a call or process. They are not failures."""


def run(worker: Worker, task: Task, data: DataAccess, given_up: list[int]) -> Replies:
    """Execute a call and yield its replies, or None or Idle to let other calls take a turn. The
    executor appends the ids of samples that are no longer needed to `given_up`."""
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
    except OURS:
        raise
    except BaseException as error:  # user code may raise asyncio.CancelledError
        yield Reply(failure=failure_of(error))


def _run_on_rows(
    worker: Worker, task: Task, rows: RowTask, data: DataAccess, given_up: list[int]
) -> Generator[Reply | Idle | None, None, Reply]:
    try:
        batch = gather(rows, data.reader)
    except Exception as error:
        failure = failure_of(error)
        return Reply(
            failure=failure if is_full(error) else replace(failure, kind=FailureKind.UNREADABLE)
        )
    result = getattr(worker, task.method)(batch, **task.arguments)
    publisher = Publisher(task, rows, data.writer)
    last = Reply()
    if isinstance(result, Iterator):
        try:
            yield from _publish_parts(result, publisher, rows, given_up)
        except Ended:
            raise
        except (Exception, SystemExit, Cancelled):  # publish finished rows before the call ends
            yield from publisher.publish_rest()
            raise
        yield from publisher.publish_rest()
    else:
        last = yield from publisher.publish(result)
    publisher.check_complete()
    return last


def _publish_parts(
    result: Iterator[Any], publisher: Publisher, rows: RowTask, given_up: list[int]
) -> Replies:
    for part in _parts(result, given_up):
        if (part is None or part is IDLE) and rows.operation.interruptible:
            yield from publisher.publish_due()
            yield None if part is None else publisher.idle
        else:
            yield from publisher.publish_part(part)


def _parts(result: Iterator[Any], given_up: list[int]) -> Iterator[Any]:
    """Yield the parts of a method's result. Send a generator the ids of samples that were given up
    since its last part."""
    if not isinstance(result, Generator):
        yield from result
        return
    try:
        part = next(result)
        while True:
            yield part
            # The executor appends to this list.
            said, given_up[:] = list(given_up), []
            part = result.send(said)
    except StopIteration:
        return


# Executor

KEEPALIVE_S = 5.0
"""[s] A worker that advances sends a reply at least this often."""
IDLE_S = 1.0
"""[s] A call that waits for something gets a turn, and the worker advances, at least this often."""
OnReply = Callable[[Reply], None]


@dataclass(eq=False)
class _Running:
    task: Task
    replies: Replies
    on_reply: OnReply
    on_start: Callable[[], None]
    given_up: list[int]
    interruptible: bool
    started: bool = False
    idle_until: float = -math.inf
    """[s] When the call needs its next turn if nothing wakes it."""

    @property
    def number(self) -> int:
        return self.task.number


class Executor:
    def __init__(
        self, worker: Worker, data: DataAccess, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.worker = worker
        self._data = data
        self._clock = clock
        self._order: CallOrder[_Running] = CallOrder()
        self._spoke_s = clock()
        """[s] Time of the last reply."""

    @property
    def busy(self) -> bool:
        return len(self._order) > 0

    @property
    def idle_s(self) -> float:
        """[s] Time until a call needs its next turn if nothing wakes it; 0 if one has work to do."""
        until = min((call.idle_until for call in self._order), default=-math.inf)
        return max(0.0, until - self._clock())

    def rouse(self) -> None:
        """Give every call a turn, because something that they wait for may have come."""
        for call in self._order:
            call.idle_until = -math.inf

    def add_task(
        self, task: Task, on_reply: OnReply, on_start: Callable[[], None] = lambda: None
    ) -> None:
        """Add a call. The executor calls `on_start` before its first turn."""
        given_up: list[int] = []
        replies = run(self.worker, task, self._data, given_up)
        declaration = declared(type(self.worker), task.method) if task.rows is None else None
        interruptible = task.interruptible or (declaration is not None and declaration.interruptible)
        if not self._order.add(_Running(task, replies, on_reply, on_start, given_up, interruptible)):
            # The driver still waits for the last reply of the cancelled call.
            on_reply(Reply(done=True))

    def take_turn(self) -> None:
        """Continue the next call, if any, until it replies or gives way."""
        running = self._order.next
        if running is None:
            return
        if not running.started:
            running.started = True
            running.on_start()
        reply = next(running.replies)
        now_s = self._clock()
        running.idle_until = -math.inf
        if isinstance(reply, Idle):
            running.idle_until, reply = now_s + min(reply.seconds, IDLE_S), None
        if reply is None and now_s - self._spoke_s > KEEPALIVE_S:
            reply = Reply()  # a sign of life
        if reply is not None and reply.is_last:
            self._order.finish(running)
        else:
            self._order.give_way(running)
        if reply is not None:
            self._spoke_s = now_s
            running.on_reply(reply)

    def give_up_rows(self, number: int, sample_ids: Collection[int]) -> None:
        """Tell a call that these rows are no longer needed, which its method may ignore."""
        running = self._order.find(number)
        if running is not None:
            running.given_up += sample_ids
            running.idle_until = -math.inf

    def cancel_call(self, number: int) -> None:
        """Cancel a call, now or on arrival. It still publishes finished rows."""
        running = self._order.cancel(number)
        if running is None:
            return
        if running.started:
            try:
                reply = running.replies.throw(Cancelled())
                while True:
                    if isinstance(reply, Reply) and not reply.is_last:
                        running.on_reply(reply)
                    reply = next(running.replies)
            except (Cancelled, StopIteration):
                pass
        running.replies.close()
        running.on_reply(Reply(done=True))


# ExecutorThread: a worker on its own thread; the process receives calls on other threads


POLL_S = 1.0
"""[s] Without a reply, check the worker's activity this often."""


def replies_of(
    coming: queue.SimpleQueue[Reply], has_advanced: Callable[[], bool], poll_s: float = POLL_S
) -> Iterator[Reply]:
    """Yield replies; while none comes, an empty one whenever the worker has advanced."""
    while True:
        try:
            reply = coming.get(timeout=poll_s)
        except queue.Empty:
            if has_advanced():
                yield Reply()
            continue
        yield reply
        if reply.is_last:
            return


class ExecutorThread:
    """A thread that makes the worker, executes its calls, and closes it.

    begin ──> starting ──the worker is made──> up ──────close──> closed
                  └────────an exception──────> failed ──close──> closed

    Tasks and actions that come before `begin` wait.
    """

    def __init__(self, data: DataAccess) -> None:
        self._data = data
        self._steps = self._seen = 0
        self._requests: queue.SimpleQueue[Callable[[Executor], None] | None] = queue.SimpleQueue()
        """Actions between two turns; None ends the thread."""
        self._awake = threading.Event()
        self._up = threading.Event()
        self._worker: Worker | None = None
        self._failure: Failure | None = None
        self._thread: threading.Thread | None = None

    def begin(self, make_worker: Callable[[], Worker]) -> Worker | Failure:
        """Make the worker on the thread, and wait until it is up."""
        self._thread = threading.Thread(target=self._work, args=(make_worker,), daemon=True)
        self._thread.start()
        return self._made()

    def advance(self) -> None:
        """Count a step of the worker. Unlike a heartbeat, this stops when the worker hangs."""
        self._steps += 1

    def has_advanced(self) -> bool:
        """Whether the worker has made a step since the last check."""
        before, self._seen = self._seen, self._steps
        return self._seen != before

    def _made(self) -> Worker | Failure:
        self._up.wait()
        if self._failure is not None:
            return self._failure
        assert self._worker is not None
        return self._worker

    def replies_to(self, task: Task) -> Iterator[Reply]:
        """Yield the replies to a task; while the worker starts, yield empty replies."""
        while not self._up.wait(POLL_S):
            if self.has_advanced():
                yield Reply()
        worker = self._made()
        if isinstance(worker, Failure):
            yield Reply(failure=worker)
            return
        replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self.between_turns(lambda executor: executor.add_task(task, replies.put))
        yield from replies_of(replies, self.has_advanced)

    def between_turns(self, action: Callable[[Executor], None]) -> None:
        self._requests.put(action)
        self.wake()

    def wake(self) -> None:
        """End the sleep of a worker whose calls are all idle."""
        self._awake.set()

    def close(self) -> None:
        """Close the worker after its current turn, and end the thread."""
        self._requests.put(None)
        self.wake()
        if self._thread is not None:
            self._thread.join()

    def _work(self, make_worker: Callable[[], Worker]) -> None:
        executor = None
        try:
            self._worker = make_worker()
            executor = Executor(self._worker, self._data)
        except BaseException as error:
            self._failure = failure_of(error)
        self._up.set()
        try:
            self._serve(executor)
        except BaseException:  # otherwise callers would wait forever
            traceback.print_exc()
            os._exit(1)
        if self._worker is not None:
            self._worker.close()

    def _serve(self, executor: Executor | None) -> None:
        while True:
            # A request, such as a cancellation, must not wait for calls to end.
            while executor is not None and executor.busy and self._requests.empty():
                executor.take_turn()
                if idle_s := executor.idle_s:
                    self._awake.wait(idle_s)
                    self._awake.clear()
                    executor.rouse()
            request = self._requests.get()
            if request is None:
                return
            if executor is not None:
                request(executor)
