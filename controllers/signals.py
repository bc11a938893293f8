"""Signals that end a run: SIGTERM from a batch system, SIGHUP from a terminal that is closed, SIGINT from the keyboard.

A handler only asks the run of its process to end (`ask_to_end`). The run saves itself when its loop comes to it. While a cluster starts,
an interruption would leave half of its processes behind, and libraries install handlers of their own: a signal is deferred until the
cluster is up.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
STREAMS = (0, 1, 2)


class _Ending:
    """What lies between a signal and the runs of this process."""

    runs = 0
    """Runs that can save themselves."""
    asked = False


def ask_to_end() -> bool:
    """Have the run that goes on write a checkpoint and end; False when no run could, or it was asked already."""
    if _Ending.asked or not _Ending.runs:
        return False
    _Ending.asked = True
    return True


def asked_to_end() -> bool:
    """Whether the run that goes on was asked to end."""
    return _Ending.asked


@contextmanager
def can_be_ended(able: bool) -> Iterator[None]:
    """While a run goes on, it can be asked to end, if it is `able` to save itself."""
    _Ending.runs += able
    try:
        yield
    finally:
        _Ending.runs -= able
        _Ending.asked = False


def write_line(line: str) -> None:
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
def interrupt_noted(said: str) -> Iterator[Callable[[], bool]]:
    """Note the first Ctrl-C, and answer it with a line; a second one interrupts, as does the first where Python's own handler is not set.

    Args:
        said: the line.

    Returns:
        Says whether one was noted.
    """
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)
        write_line(said)

    before = signal.getsignal(signal.SIGINT)
    heeded = threading.current_thread() is threading.main_thread() and before is signal.default_int_handler
    if heeded:
        signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(noted)
    finally:
        if heeded:
            signal.signal(signal.SIGINT, before)


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
            write_line(f"{signal.Signals(number).name}: the run ends when {until}")
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
