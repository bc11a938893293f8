"""Executor: carries out the calls on one worker, on one thread, in turns (`call_order.py`). All backends with workers use it."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...dataflow.buffer.disk import is_full
from ...dataflow.errors import Cancelled, Ended, Planned, ResultError, Silent, UserError
from ...dataflow.handle import declared
from ...dataflow.metrics import Max, Metrics
from ...dataflow.readable import readable
from ...dataflow.redaction import redacted
from ...workers.device import peak_device_bytes
from ...workers.worker import Worker
from . import row_io
from .call_order import CallOrder
from .gathered import Gathered
from .row_io import DataAccess, Publisher, gather
from .tasks import Failure, FailureKind, Reply, RowTask, Task

KEEPALIVE_S = 5.0
"""Longest time for which a worker that makes steps says nothing."""
OURS = (Ended, Cancelled, Silent, Planned, GeneratorExit, KeyboardInterrupt)
"""Exceptions that Weft or the user raises to end a call or a process. The code that runs has not failed."""
OnReply = Callable[[Reply], None]
Replies = Generator[Reply | None, None, None]


def run(worker: Worker, task: Task, data: DataAccess, given_up: list[int]) -> Replies:
    """Carry out a call.

    Args:
        given_up: receives the sample ids of the call's rows that are no longer wanted.

    Yields:
        Its replies, the last with `done` or `failure`; None: it made a step, and other calls may have their turn.
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
    except OURS:  # Weft or the user ends the process or the call
        raise
    except (
        BaseException
    ) as error:  # the user's code may raise anything (`asyncio.CancelledError`), and ends no process by it
        yield Reply(failure=failure_of(error))


def _run_on_rows(
    worker: Worker, task: Task, rows: RowTask, data: DataAccess, given_up: list[int]
) -> Generator[Reply | None, None, Reply]:
    """Gather the rows of a call, run its method on them, publish what comes back; returns the last reply."""
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


def _publish_parts(task: Task, result: Iterator[Any], publisher: Publisher, given_up: list[int]) -> Replies:
    """Publish what a method yields, part by part."""
    assert task.rows is not None
    gathered = Gathered(task.gather_s, time.monotonic)
    try:
        for part in _parts(result, given_up):
            gives_way = part is None and task.rows.operation.interruptible
            yield from _published(task, publisher, gathered.take_due() if gives_way else gathered.add(part))
            if gives_way:
                yield None
    except (Exception, SystemExit, Cancelled) as error:  # these rows are finished, whatever ends the call
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
    """What a method yields. A generator is sent the sample ids that were given up since it yielded last."""
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
    """An exception as text, with the samples that it names: `error.sample_ids`, and the first in words, `error.sample`."""
    # The message of a UserError says it all, unless an exception of the user's code is behind it.
    explained = isinstance(error, UserError) and error.__cause__ is None
    text = "" if explained else "".join(traceback.format_exception(type(error), error, _below_executor(error)))
    message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        message = f"it called sys.exit({error.code!r}), which ends no run"
    elif isinstance(error, BdbQuit):
        message = "a debugger was left, and the run ends"
        if sys.stdin is None or not sys.stdin.isatty():
            # On the main thread it is `Local` already.
            how = "" if threading.current_thread() is threading.main_thread() else " with backend=weft.Local()"
            message = f"breakpoint() found no terminal to stop at; run{how} in a terminal, or take it out"
    kind = FailureKind.USER_ERROR if isinstance(error, UserError | BdbQuit) else FailureKind.EXCEPTION
    kind = FailureKind.DISK_FULL if is_full(error) else kind
    ids, sample = tuple(getattr(error, "sample_ids", ())), getattr(error, "sample", "")
    if isinstance(error, ResultError):  # no sample is to blame
        ids, message, sample = (), f"{message} ({sample})" if sample else message, ""
    message, text, sample = (readable(redacted(part)) for part in (message, text, sample))
    return Failure(message, text, kind, ids, sample)


def _below_executor(error: BaseException) -> Any:
    """The traceback from the worker's own method on: the frames above it help nobody."""
    trace = error.__traceback__
    ours = (__file__, row_io.__file__)
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


@dataclass(eq=False)
class _Running:
    """A call on the worker."""

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
    """End a call that was begun; returns its last replies."""
    try:
        reply = replies.throw(Cancelled())
        while True:
            if reply is not None:
                yield reply
            reply = next(replies)
    except (Cancelled, StopIteration):
        return


class Executor:
    """The calls on one worker.

    Args:
        worker: carries out one call at a time.
        data: reads and writes the rows of calls.
        clock: in seconds.
    """

    def __init__(self, worker: Worker, data: DataAccess, clock: Callable[[], float] = time.monotonic) -> None:
        self._worker = worker
        self._data = data
        self._clock = clock
        self._order: CallOrder[_Running] = CallOrder()
        self._spoke_s = clock()
        """When a call replied last."""

    @property
    def busy(self) -> bool:
        return len(self._order) > 0

    def add(self, task: Task, on_reply: OnReply, on_start: Callable[[], None] = lambda: None) -> None:
        """Take a call in.

        Args:
            on_reply: told each reply; the last has `done` or `failure`.
            on_start: called when the call has its first turn.
        """
        given_up: list[int] = []
        replies = run(self._worker, task, self._data, given_up)
        declaration = declared(type(self._worker), task.method) if task.rows is None else None
        interruptible = task.interruptible or (declaration is not None and declaration.interruptible)
        if not self._order.add(_Running(task, replies, on_reply, on_start, given_up, interruptible)):
            on_reply(Reply(done=True))

    def take_turn(self) -> None:
        """Let the call whose turn it is go on until it replies or gives way. Nothing happens when there is none."""
        running = self._order.next
        if running is None:
            return
        if not running.started:
            running.started = True
            running.on_start()
        reply = next(running.replies)
        now_s = self._clock()
        if reply is None and now_s - self._spoke_s > KEEPALIVE_S:
            reply = Reply()  # the call goes on
        if reply is not None:
            self._spoke_s = now_s
        if reply is not None and reply.is_last:
            self._order.finish(running)
        else:
            self._order.give_way(running)
        if reply is not None:
            running.on_reply(reply)

    def give_up(self, number: int, sample_ids: Collection[int]) -> None:
        """Tell a call that nobody wants these of its rows any more. A method that does not listen makes them all the same, and they are
        let go."""
        running = self._order.find(number)
        if running is not None:
            running.given_up += sample_ids

    def cancel(self, number: int) -> None:
        """End a call where it stands, or as soon as it comes; what it has published counts, and rows that are finished are published."""
        running = self._order.cancel(number)
        if running is None:
            return
        for reply in _cancelled(running.replies) if running.started else ():
            if not reply.is_last:
                running.on_reply(reply)
        running.replies.close()
        running.on_reply(Reply(done=True))
