"""Signals that end a run: SIGTERM from a batch system, SIGHUP from a terminal that is closed, SIGINT from the keyboard.

A handler only asks the run of its process to end (`ask_to_end`). The run saves itself when its loop comes to it. `launch` sets
handlers for a whole script, and each run for itself where nobody else has. While a cluster starts, an interruption would leave half of
its processes behind, and libraries install handlers of their own: a signal is deferred until the cluster is up.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from ..dataflow.errors import Ended

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
STREAMS = (0, 1, 2)


class _Ending:
    """What lies between a signal and the runs of this process."""

    runs = 0
    """Runs that can save themselves."""
    asked = 0
    """The signal that asked them to end; 0: none did."""


@dataclass(frozen=True)
class StopOnSignal:
    """The `stop` of a run that ends after the step in which a signal came. It looks at no metric, so no step waits for an evaluation."""

    noted: Callable[[], int]
    """The signal that has come; 0: none."""

    def __call__(self, metrics: Mapping[str, float]) -> bool:
        return bool(self.noted())


def ask_to_end(number: int) -> bool:
    """Have the run that goes on write a checkpoint and end; False when no run could, or it was asked already.

    Args:
        number: of the signal.
    """
    if _Ending.asked or not _Ending.runs:
        return False
    _Ending.asked = number
    return True


def asked_to_end() -> int:
    """The signal by which the run that goes on was asked to end; 0: it was not."""
    return _Ending.asked


@contextmanager
def can_be_ended(able: bool) -> Iterator[None]:
    """While a run goes on, it can be asked to end, if it is `able` to save itself."""
    _Ending.runs += able
    try:
        yield
    finally:
        _Ending.runs -= able
        _Ending.asked = 0


def write_line(line: str) -> None:
    """Write a line to standard error from within a handler; it is no error if the terminal is gone."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode())


def terminals() -> list[int]:
    """The standard streams that are terminals."""
    return [stream for stream in STREAMS if os.isatty(stream)]


def hold_streams() -> None:
    """Give the null device to standard streams that are closed: else a file that is opened next takes the place of one, and what a library
    prints goes into it."""
    for stream in STREAMS:
        try:
            os.fstat(stream)
        except OSError:
            redirect_to_null([stream])


def redirect_to_null(streams: list[int]) -> None:
    """Redirect streams to the null device, because writing to a terminal that is gone is an error."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in streams:
        os.dup2(nowhere, stream)
    if nowhere not in streams:
        os.close(nowhere)


@contextmanager
def endings_noted(said: str, *, of_systems: bool) -> Iterator[Callable[[], int]]:
    """Note the first signal that would end the process, and answer it with a line; a second one ends it, as does the first where somebody
    else has set a handler.

    Args:
        said: the line, behind the name of the signal.
        of_systems: note SIGTERM and SIGHUP, too; else Ctrl-C alone.

    Returns:
        Says which was noted; 0: none.
    """
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            _end_now(number)
        noted.append(number)
        write_line(f"{_name(number)}: {said}")

    with _handlers(dict.fromkeys(_UNSET if of_systems else [signal.SIGINT], note)):
        yield lambda: noted[0] if noted else 0


@contextmanager
def signals_end_runs(*, saves: bool) -> Iterator[None]:
    """Have signals end the run that goes on, where nobody else has set a handler: it saves itself, if it can, and a second signal
    ends it at once.

    Args:
        saves: whether it can. Else Ctrl-C interrupts, as always.
    """
    standing = terminals()

    def end(number: int, frame: FrameType | None) -> None:
        end_run(number, standing)

    with _handlers(dict.fromkeys(_UNSET if saves else [signal.SIGTERM, signal.SIGHUP], end)):
        yield


def end_run(number: int, terminal: list[int]) -> None:
    """Ask the run that goes on to save itself and end, or else leave the way an exception does, so that every `with` closes what it opened.

    Args:
        number: of the signal.
        terminal: streams that went to the terminal, which is gone at SIGHUP.
    """
    if number == signal.SIGHUP and terminal:
        redirect_to_null(terminal)
    if ask_to_end(number):
        again = "; a second Ctrl-C ends it at once" if number == signal.SIGINT else ""
        write_line(f"{_name(number)}: the run writes a checkpoint and ends{again}")
        return
    write_line(f"{_name(number)}: the run ends without a checkpoint")
    _end_now(number)


def _end_now(number: int) -> NoReturn:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Ended(128 + number)


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


_UNSET: Mapping[signal.Signals, object] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}
"""Signal -> its handler where nobody has set one."""


def _is_free(number: signal.Signals) -> bool:
    """Whether nobody has set a handler. Ray sets one for SIGTERM and leaves it behind when its cluster ends; it would end a later run
    of the process without a checkpoint."""
    handler = signal.getsignal(number)
    return handler is _UNSET[number] or str(getattr(handler, "__module__", "")).split(".")[0] == "ray"


@contextmanager
def _handlers(
    handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], None]],
) -> Iterator[None]:
    """Set handlers where nobody has, for as long as the block lasts; only the main thread may."""
    main = threading.current_thread() is threading.main_thread()
    free = [number for number in handlers if main and _is_free(number)]
    before = {number: signal.signal(number, handlers[number]) for number in free}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signals_deferred(until: str) -> Iterator[None]:
    """Defer signals that would end the process until the block is left; a second one is delivered at once.

    Args:
        until: what is waited for, for the line that says so.
    """
    if (
        threading.current_thread() is not threading.main_thread()
    ):  # no handler can be set, and none runs here
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
