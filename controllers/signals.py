"""Signals that end a run: SIGTERM from a batch system, SIGHUP from a terminal that is closed, SIGINT from the keyboard.

While a cluster starts, an interruption would leave half of its processes behind, and libraries install handlers of their own. There a
signal is deferred until the cluster is up.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
STREAMS = (0, 1, 2)


def say(line: str) -> None:
    """Write a line to standard error from within a handler; it is no error if the terminal is gone."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode())


def terminals() -> list[int]:
    """The standard streams that are terminals."""
    return [stream for stream in STREAMS if os.isatty(stream)]


def redirect_to_null(streams: list[int]) -> None:
    """Redirect streams to the null device, because writing to a terminal that is gone is an error."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in streams:
        os.dup2(nowhere, stream)
    os.close(nowhere)


@contextmanager
def signals_deferred(until: str) -> Iterator[None]:
    """Defer signals that would end the process until the block is left; a second one is delivered at once.

    Args:
        until: what is waited for, for the line that says so.
    """
    if threading.current_thread() is not threading.main_thread():  # no handler can be set, and none runs here
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        if len(noted) == 1:
            say(f"{signal.Signals(number).name}: the run ends when {until}")
            return
        restore()
        signal.raise_signal(number)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as `nohup` has it
            signal.signal(number, note)
    try:
        yield
    finally:
        restore()
        if len(noted) == 1:
            signal.raise_signal(noted[0])
