"""CallOrder: the order in which one rank carries out its calls, as a state machine without a worker, a thread or a clock.

A generating call is interruptible (`@remote(interruptible=True)`): it makes a step and gives way. So weights go in between two steps
of generation, and new prompts join those that are being answered. Every other call is exclusive.

    expected ──add──> waiting ──next──> at work ──finish──> over
        │                ^                 │
      cancel             └────give_way─────┘                 waiting, at work ──cancel──> over
        v
    cancelled ──add──> over

- The call at work is the first exclusive call; if there is none, the first interruptible one.
- Exclusive calls run in the order in which they came, each to its end.
- An interruptible call that gives way goes behind the other interruptible ones.
- An exclusive call waits for no more than the step that is being made.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar


class TakesTurns(Protocol):
    """A call, as far as its turns depend on it."""

    @property
    def number(self) -> int: ...

    @property
    def interruptible(self) -> bool: ...


C = TypeVar("C", bound=TakesTurns)


class CallOrder(Generic[C]):
    """The calls on one rank that are not over."""

    def __init__(self) -> None:
        self._exclusive: deque[C] = deque()
        self._interruptible: deque[C] = deque()
        self._cancelled: set[int] = set()
        """Numbers of calls that were cancelled before they came."""

    def __len__(self) -> int:
        return len(self._exclusive) + len(self._interruptible)

    @property
    def next(self) -> C | None:
        """The call whose turn it is; None: there is none."""
        return next(iter(self._exclusive or self._interruptible), None)

    def add(self, call: C) -> bool:
        """Take a call in. False: it was cancelled before it came, and is over."""
        if call.number in self._cancelled:
            self._cancelled.discard(call.number)
            return False
        self._queue(call).append(call)
        return True

    def give_way(self, call: C) -> None:
        """Note that a call made a step and is not over; an exclusive one keeps its place."""
        if call.interruptible:
            self._interruptible.remove(call)
            self._interruptible.append(call)

    def finish(self, call: C) -> None:
        """Note that a call is over."""
        self._queue(call).remove(call)

    def cancel(self, number: int) -> C | None:
        """End a call.

        Returns:
            The call, which is over; None: it has not come, and is over as soon as it does.
        """
        call = self.find(number)
        if call is None:
            self._cancelled.add(number)
        else:
            self.finish(call)
        return call

    def find(self, number: int) -> C | None:
        """The call of this number; None: it has not come, or is over."""
        return next((c for queue in (self._exclusive, self._interruptible) for c in queue if c.number == number), None)

    def _queue(self, call: C) -> deque[C]:
        return self._interruptible if call.interruptible else self._exclusive
