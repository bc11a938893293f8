"""Desk: the calls of one rank, carried out on one thread, in turns.

A call runs to its end, unless its method gives way (`@remote(gives_way=True)`): then the others have a turn each time it
yields. So weights go in between two steps of generation, and new prompts join those that are being answered.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..workers.worker import Worker
from .shell import DataAccess, Reply, Task, run

SAYING_S = 5.0
"""How long a call that gives way may go on without a reply, before it says that it does."""
Hear = Callable[[Reply], None]


@dataclass(eq=False)
class _Turn:
    task: Task
    replies: Iterator[Reply | None]
    hear: Hear
    begin: Callable[[], None]
    begun: bool = False


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
        first = next((k for k, other in enumerate(self._turns) if other.task.gives_way), len(self._turns))
        self._turns.insert(len(self._turns) if task.gives_way else first, turn)

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
        elif turn.task.gives_way:
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
