"""Desk: the calls of one rank, carried out on one thread, in turns.

A call runs to its end, unless its method gives way (`@remote(gives_way=True)`): then the others have a turn each time it
yields. So weights go in between two steps of generation, and new prompts join those that are being answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..workers.worker import Worker
from .shell import DataAccess, Reply, Task, run

Hear = Callable[[Reply], None]


@dataclass
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

    @property
    def busy(self) -> bool:
        return bool(self._turns)

    def add(self, task: Task, hear: Hear, begin: Callable[[], None] = lambda: None) -> None:
        """A call that takes its turn when those before it have had theirs; `begin` is called when it does."""
        self._turns.append(_Turn(task, run(self._worker, task, self._data), hear, begin))

    def turn(self) -> None:
        """Let the call whose turn it is go on until it says something, or gives way."""
        turn = self._turns[0]
        if not turn.begun:
            turn.begun = True
            turn.begin()
        reply = next(turn.replies)
        if reply is not None and (reply.done or reply.failure is not None):
            self._turns.popleft()
        elif turn.task.gives_way:
            self._turns.rotate(-1)
        if reply is not None:
            turn.hear(reply)

    def cancel(self, number: int) -> None:
        """End a call where it stands; what it has published counts. Nothing happens when it has ended already."""
        for turn in list(self._turns):
            if turn.task.number == number:
                self._turns.remove(turn)
                turn.replies.close()  # pyright: ignore[reportAttributeAccessIssue]
                turn.hear(Reply(done=True))
