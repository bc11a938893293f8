"""Desk: the calls of one rank, carried out on one thread, in turns.

A call runs to its end, unless its method gives way (`@remote(interruptible=True)`): then the others have a turn each time it
yields. So weights go in between two steps of generation, and new prompts join those that are being answered.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..workers.worker import Worker
from .shell import DataAccess, Reply, Task, run

SAYING_S = 5.0
"""How long a call that gives way may go on without a reply, before it says that it does."""
LISTEN_S = 1.0
"""How long whoever waits for the reply of a call waits before it asks whether the worker does anything."""
Hear = Callable[[Reply], None]


@dataclass(eq=False)
class _Turn:
    task: Task
    replies: Iterator[Reply | None]
    hear: Hear
    begin: Callable[[], None]
    begun: bool = False


class Pulse:
    """Counts what a worker has done, as it says itself (`Context.advance`), so that whoever waits for it can tell work from silence. A
    thread of its own that merely says that the process lives would not tell them apart."""

    def __init__(self) -> None:
        self._count = self._told = 0

    def __call__(self) -> None:
        self._count += 1

    @property
    def moved(self) -> bool:
        """Whether it has done anything since somebody asked last."""
        before, self._told = self._told, self._count
        return self._told != before


def as_they_come(replies: queue.SimpleQueue[Reply], pulse: Pulse, listen_s: float = LISTEN_S) -> Iterator[Reply]:
    """Yield the replies of a call, to the last, and an empty one whenever the worker has had none for a while and has done something."""
    while True:
        try:
            reply = replies.get(timeout=listen_s)
        except queue.Empty:
            if pulse.moved:
                yield Reply()
            continue
        yield reply
        if reply.done or reply.failure is not None:
            return


class Desk:
    """Calls on a worker. `hear` is told every reply of a call; the last has `done` or `failure`."""

    def __init__(self, worker: Worker, data: DataAccess) -> None:
        self._worker = worker
        self._data = data
        self._turns: deque[_Turn] = deque()
        self._said = time.monotonic()
        """When somebody was last told something."""
        self._cancelled: set[int] = set()
        """Numbers of calls that were cancelled before they came."""

    @property
    def busy(self) -> bool:
        return bool(self._turns)

    def add(self, task: Task, hear: Hear, begin: Callable[[], None] = lambda: None) -> None:
        """A call that takes its turn when those before it have had theirs; `begin` is called when it does."""
        if task.number in self._cancelled:
            self._cancelled.discard(task.number)
            hear(Reply(done=True))
            return
        turn = _Turn(task, run(self._worker, task, self._data), hear, begin)
        # What does not give way goes before what does, and after those like it: weights do not wait for a round of turns.
        first = next((k for k, other in enumerate(self._turns) if other.task.interruptible), len(self._turns))
        self._turns.insert(len(self._turns) if task.interruptible else first, turn)

    def turn(self) -> None:
        """Let the call whose turn it is go on until it says something, or gives way."""
        turn = self._turns[0]
        if not turn.begun:
            turn.begun = True
            turn.begin()
        reply = next(turn.replies)
        now = time.monotonic()
        if reply is None and now - self._said > SAYING_S:
            reply = Reply()  # nothing has come of it yet, but it goes on
        if reply is not None:
            self._said = now
        if reply is not None and (reply.done or reply.failure is not None):
            self._turns.popleft()
        elif turn.task.interruptible:
            self._turns.rotate(-1)
        if reply is not None:
            turn.hear(reply)

    def cancel(self, number: int) -> None:
        """End a call where it stands, or when it comes; what it has published counts."""
        turn = next((t for t in self._turns if t.task.number == number), None)
        if turn is None:
            self._cancelled.add(number)
            return
        self._turns.remove(turn)
        turn.replies.close()  # pyright: ignore[reportAttributeAccessIssue]
        turn.hear(Reply(done=True))
