"""Executor: carries out the calls on one worker, on one thread, in turns (`turns.py`). All backends with workers use it."""

from __future__ import annotations

import sys
import time
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..dataflow.buffer.disk import is_full
from ..dataflow.errors import Ended, UserError
from ..workers.worker import Worker
from . import row_io
from .row_io import DataAccess, Publisher, gather
from .tasks import Failure, Reply, RowTask, Task
from .turns import Turns

OnReply = Callable[[Reply], None]
Replies = Generator[Reply | None, None, None]


def run(worker: Worker, task: Task, data: DataAccess, given_up: list[int]) -> Replies:
    """Carry out a call.

    Args:
        given_up: sample ids of the call's rows that nobody wants any more are put here meanwhile.

    Yields:
        Its replies, the last with `done` or `failure`; None: it made a step, and other calls may have their turn.
    """
    started = time.perf_counter()
    try:
        if task.rows is None:
            value = getattr(worker, task.method)(**task.arguments)
            last = Reply(value=value if task.keep else None)
        else:
            last = yield from _run_on_rows(worker, task, task.rows, data, given_up)
        yield replace(last, done=last.failure is None, seconds=time.perf_counter() - started)
    except Ended:  # the process was asked to end meanwhile
        raise
    except (Exception, SystemExit) as error:
        yield Reply(failure=failure_of(error))


def _run_on_rows(
    worker: Worker, task: Task, rows: RowTask, data: DataAccess, given_up: list[int]
) -> Generator[Reply | None, None, Reply]:
    """Gather the rows of a call, run its method on them, publish what comes back; returns the last reply."""
    method = getattr(worker, task.method)
    try:
        batch = gather(rows, data.reader)
    except Exception as error:
        return Reply(failure=replace(failure_of(error), unreadable=True))
    result = method(batch, **task.arguments)
    publisher = Publisher(task, rows, data.writer)
    last = Reply()
    if isinstance(result, Iterator):
        for part in _parts(result, given_up):
            if part is None and rows.operation.interruptible:
                yield None
                continue
            reply = yield from publisher.publish(part)
            if task.keep:
                yield reply
    else:
        last = yield from publisher.publish(result)
    publisher.check_complete()
    return last


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


def failure_of(error: Exception | SystemExit) -> Failure:
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
            message = (
                "breakpoint() found no terminal to stop at; run with backend=weft.Local() in a terminal, or take it out"
            )
    return Failure(
        message,
        text,
        user_error=isinstance(error, UserError | BdbQuit),
        sample_ids=tuple(getattr(error, "sample_ids", ())),
        sample=getattr(error, "sample", ""),
        disk_full=is_full(error),
    )


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
    started: bool = False

    @property
    def number(self) -> int:
        return self.task.number

    @property
    def interruptible(self) -> bool:
        return self.task.interruptible


class Executor:
    """The calls on one worker."""

    def __init__(self, worker: Worker, data: DataAccess) -> None:
        self._worker = worker
        self._data = data
        self._turns: Turns[_Running] = Turns(time.monotonic())

    @property
    def busy(self) -> bool:
        return len(self._turns) > 0

    def add(self, task: Task, on_reply: OnReply, on_start: Callable[[], None] = lambda: None) -> None:
        """Take a call in.

        Args:
            on_reply: told each reply; the last has `done` or `failure`.
            on_start: called when the call has its first turn.
        """
        given_up: list[int] = []
        replies = run(self._worker, task, self._data, given_up)
        if not self._turns.add(_Running(task, replies, on_reply, on_start, given_up)):
            on_reply(Reply(done=True))

    def take_turn(self) -> None:
        """Let the call whose turn it is go on until it replies or gives way. Nothing happens when there is none."""
        running = self._turns.next
        if running is None:
            return
        if not running.started:
            running.started = True
            running.on_start()
        reply = next(running.replies)
        now_s = time.monotonic()
        if reply is None and self._turns.is_silent(now_s):
            reply = Reply()  # the call goes on
        if reply is not None:
            self._turns.spoke(now_s)
        if reply is not None and reply.is_last:
            self._turns.finish(running)
        else:
            self._turns.give_way(running)
        if reply is not None:
            running.on_reply(reply)

    def give_up(self, number: int, sample_ids: Collection[int]) -> None:
        """Tell a call that nobody wants these of its rows any more. A method that does not listen makes them all the same, and they are
        let go."""
        running = self._turns.find(number)
        if running is not None:
            running.given_up += sample_ids

    def cancel(self, number: int) -> None:
        """End a call where it stands, or as soon as it comes; what it has published counts."""
        running = self._turns.cancel(number)
        if running is not None:
            running.replies.close()
            running.on_reply(Reply(done=True))
