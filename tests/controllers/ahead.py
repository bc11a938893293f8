"""Backends with a clock that jumps ahead while a worker hangs, so that tests reach deadlines at
once."""

from collections.abc import Callable, Sequence

from weft.controllers.backends.backend import Event
from weft.controllers.backends.local import Local
from weft.controllers.backends.ray_backend import RayBackend

MAX_AHEAD_S = 1000.0
"""[s] How far a clock may run ahead: well past the default deadline of a call."""


class Ahead:
    """A clock for hanging workers.

    While `hangs` is true, each wait without an answer adds 100 s, up to MAX_AHEAD_S.
    """

    def __init__(self, hangs: Callable[[], bool]) -> None:
        self.seconds = 0.0
        self._hangs = hangs

    def waited(self, wait: Callable[[float], Sequence[Event]], timeout_s: float) -> Sequence[Event]:
        """Return the events of `wait`, and advance the clock if there are none."""
        if self.seconds >= MAX_AHEAD_S or not self._hangs():
            return wait(timeout_s)
        if not (events := wait(min(timeout_s, 0.1))):
            self.seconds += 100.0
        return events


class RayAhead(RayBackend):
    def __init__(self, hangs: Callable[[], bool]) -> None:
        super().__init__()
        self._ahead = Ahead(hangs)

    def clock(self) -> float:
        return super().clock() + self._ahead.seconds

    def wait(self, timeout_s: float) -> Sequence[Event]:
        return self._ahead.waited(super().wait, timeout_s)


class LocalAhead(Local):
    def __init__(self, hangs: Callable[[], bool]) -> None:
        super().__init__()
        self._ahead = Ahead(hangs)

    def clock(self) -> float:
        return super().clock() + self._ahead.seconds

    def wait(self, timeout_s: float) -> Sequence[Event]:
        return self._ahead.waited(super().wait, timeout_s)
