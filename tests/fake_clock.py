"""An asyncio event loop with a fake clock: while all tasks wait, it jumps to the end of the next wait."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """Run a coroutine, and return its result and the seconds that passed on the fake clock.

    >>> run(asyncio.sleep(3600, "done"))
    ('done', 3600.0)
    """
    loop = _Loop()
    try:
        return loop.run_until_complete(main), loop.time()
    finally:
        loop.close()


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self._now_s

    def jump(self, seconds: float) -> None:
        self._now_s += seconds


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: _Loop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "all tasks wait for ever"
            self._loop.jump(timeout)
        return events
