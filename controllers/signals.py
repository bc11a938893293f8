"""Signals that end a run: SIGTERM (batch system), SIGHUP (closed terminal), SIGINT (keyboard).

A handler only asks the run to end (`ask_to_end`); the loop then saves a checkpoint and stops.
`launch` sets handlers for a whole script; otherwise each run does, unless the script has its own.

Weft defers signals while a cluster starts, because an interrupted start would leave processes
behind, and libraries install handlers during the start.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from ..dataflow.errors import Ended

OF_SYSTEMS = (signal.SIGTERM, signal.SIGHUP)
ENDING = (*OF_SYSTEMS, signal.SIGINT)
STREAMS = (0, 1, 2)


class _Ending:
    """State shared by signal handlers and the runs of this process."""

    runs = 0
    """Number of runs that can save themselves."""
    asked = 0
    """Number of the signal that asked the runs to end, or 0."""


@dataclass(frozen=True)
class StopOnSignal:
    """A `stop` function that ends the run after the current step if a signal has come. It ignores
    the metrics, so steps need not wait for evaluations."""

    noted: Callable[[], int]

    def __call__(self, metrics: Mapping[str, float]) -> bool:
        return bool(self.noted())


def ask_to_end(number: int) -> bool:
    """Ask the current run to save itself and end. Return False if none can, or if already asked."""
    if _Ending.asked or not _Ending.runs:
        return False
    _Ending.asked = number
    return True


def asked_to_end() -> int:
    return _Ending.asked


@contextmanager
def can_be_ended(able: bool) -> Iterator[None]:
    """Mark a run as active; if `able`, `ask_to_end` can end it."""
    _Ending.runs += able
    try:
        yield
    finally:
        _Ending.runs -= able
        _Ending.asked = 0


def write_line(line: str) -> None:
    """Write a line to standard error in a signal handler, even if the terminal is gone."""
    with suppress(OSError):
        # Not `print`: handlers cannot re-enter a buffered stream.
        os.write(2, f"{line}\n".encode())


def hold_streams() -> None:
    """Open the null device for closed standard streams, so that no file gets their descriptors."""
    for stream in STREAMS:
        try:
            os.fstat(stream)
        except OSError:
            redirect_to_null([stream])


def redirect_to_null(streams: list[int]) -> None:
    """Redirect streams to the null device, because writing to a closed terminal fails."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in streams:
        os.dup2(nowhere, stream)
    # The kernel gives out the lowest free descriptor, which may be a closed stream itself.
    if nowhere not in streams:
        os.close(nowhere)


@contextmanager
def endings_noted(said: str, *, of_systems: bool) -> Iterator[Callable[[], int]]:
    """Record the first ending signal and print a line; the second ends the process. Signals with a
    handler keep it. Yield a function that returns the recorded signal's number, or 0.

    Args:
        said: Text after the signal's name.
        of_systems: Handle SIGTERM and SIGHUP too.
    """
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            _end_now(number)
        noted.append(number)
        write_line(f"{_name(number)}: {said}")

    with _handled(filter(_is_free, ENDING if of_systems else [signal.SIGINT]), note):
        yield lambda: noted[0] if noted else 0


@contextmanager
def signals_end_runs(*, saves: bool) -> Iterator[None]:
    """Let signals without a handler end the current run. The run saves itself if it can; a second
    signal ends it at once.

    Args:
        saves: Whether the run can save itself. If not, Ctrl-C interrupts as usual.
    """
    # Check now: after SIGHUP, a stream is no longer recognized as a terminal.
    standing = _terminals()
    with _handled(
        filter(_is_free, ENDING if saves else OF_SYSTEMS), lambda number, _: _end_run(number, standing)
    ):
        yield


@contextmanager
def signals_end_script() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a script and its runs, unless ignored, as under `nohup`."""
    standing = _terminals()
    heeded = [number for number in OF_SYSTEMS if signal.getsignal(number) is not signal.SIG_IGN]
    with _handled(heeded, lambda number, _: _end_run(number, standing)):
        yield


@contextmanager
def signals_deferred(until: str) -> Iterator[None]:
    """Defer ending signals until the block ends. A second signal is delivered at once."""
    noted: list[int] = []
    handlers = ExitStack()

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        if len(noted) == 1:
            write_line(f"{signal.Signals(number).name}: the run ends when {until}")
            return
        # The earlier handlers should receive the signal.
        handlers.close()
        signal.raise_signal(number)

    # An ignored signal stays ignored, as under `nohup`.
    heeded = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    handlers.enter_context(_handled(heeded, note))
    try:
        yield
    finally:
        handlers.close()
        if len(noted) == 1:
            signal.raise_signal(noted[0])


@contextmanager
def _handled(
    numbers: Iterable[signal.Signals], handle: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Set a handler for the block. Only the main thread can set handlers."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handle) for number in numbers if main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_free(number: signal.Signals) -> bool:
    """Whether a signal has no handler or Ray's, which would end a run without a checkpoint."""
    handler = signal.getsignal(number)
    unset = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    return handler is unset or str(getattr(handler, "__module__", "")).split(".")[0] == "ray"


def _end_run(number: int, terminal: list[int]) -> None:
    """Ask the current run to save itself and end. If it cannot, raise, so that `with` blocks clean
    up.

    Args:
        terminal: Standard streams on a terminal, which is gone after SIGHUP.
    """
    if number == signal.SIGHUP and terminal:
        redirect_to_null(terminal)
    # A second signal ends the run at once, as does the first if the run cannot save itself.
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


def _terminals() -> list[int]:
    return [stream for stream in STREAMS if os.isatty(stream)]
