"""Backends whose clock runs ahead while a worker hangs, so that tests wait for no deadline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from weft.controllers.backends.local import Local
from weft.controllers.backends.ray_backend import RayBackend

if TYPE_CHECKING:
    from weft.controllers.backends.backend import Backend, Event

    Mixed = Backend
else:
    Mixed = object

AHEAD_S = 1000.0
"""How far the clock runs ahead: well past the default deadline of a call."""


class _RunsAhead(Mixed):
    """Each wait in which nobody answers takes 100 s, from when `hangs` is true until the clock is AHEAD_S ahead."""

    _hangs: Callable[[], bool]
    _ahead_s = 0.0

    def clock(self) -> float:
        return super().clock() + self._ahead_s

    def wait(self, timeout_s: float) -> Sequence[Event]:
        runs_ahead = self._ahead_s < AHEAD_S and self._hangs()
        events = super().wait(min(timeout_s, 0.1) if runs_ahead else timeout_s)
        if runs_ahead and not events:
            self._ahead_s += 100.0
        return events


class RayAhead(_RunsAhead, RayBackend):
    def __init__(self, hangs: Callable[[], bool]) -> None:
        super().__init__()
        self._hangs = hangs


class LocalAhead(_RunsAhead, Local):
    def __init__(self, hangs: Callable[[], bool]) -> None:
        super().__init__()
        self._hangs = hangs
