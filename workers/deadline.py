"""deadline: a time limit on user code that runs in this process."""

from __future__ import annotations

import contextlib
import signal
import threading
import warnings
from collections.abc import Iterator
from types import FrameType

_DEBUGGERS = ("bdb", "pdb", "pydevd", "_pydevd_bundle")
"""Modules of debuggers: Python's own (and IPython's), and those of editors."""


@contextlib.contextmanager
def deadline(seconds: float | None, what: str) -> Iterator[None]:
    """Raise TimeoutError in the code of the `with` block after this many seconds, and again while it goes on; None: never.

    The block is interrupted by a signal, so this works on the main thread only (elsewhere it warns that there is no deadline),
    and not inside a C function that does not return. A program stopped in a debugger is not interrupted.

    Args:
        what: named in the error.
    """
    if seconds is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        warnings.warn(f"{what} has no deadline: one is kept on the main thread alone", stacklevel=3)
        yield
        return
    armed = True

    def ring(number: int, frame: FrameType | None) -> None:
        if armed and not _in_debugger(frame):
            raise TimeoutError(f"{what} took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _in_debugger(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__")).split(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False
