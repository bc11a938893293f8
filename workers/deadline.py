"""deadline: a time limit on user code that runs in this process."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from types import FrameType

SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGVTALRM)
"""Interrupts the main thread. `SIGALRM` and its timer belong to user code: graders such as math-verify set and clear them."""
_DEBUGGERS = ("bdb", "pdb", "pydevd", "_pydevd_bundle")
"""Modules of debuggers: Python's own (and IPython's), and those of editors."""


class _Watch:
    """A thread that sends the main thread a signal when a deadline is over, and again each time the same number of seconds later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due_s = math.inf
        self._wakes_s = math.inf
        """When the thread looks again by itself."""
        self._thread: threading.Thread | None = None

    def set(self, due_s: float) -> None:
        """Set when the signal is due, by the monotonic clock; infinite: never."""
        self._due_s = due_s
        if due_s >= self._wakes_s and self._thread is not None and self._thread.is_alive():
            return  # it looks before that, so a call in time costs no switch of threads
        with self._changed:
            if self._thread is None or not self._thread.is_alive():  # a fork has no threads
                self._thread = threading.Thread(target=self._work, name="deadline", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _work(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while True:
            with self._changed:
                self._wakes_s = due_s = self._due_s
                left_s = due_s - time.monotonic()
                if left_s > 0:
                    self._changed.wait(None if left_s == math.inf else min(left_s, threading.TIMEOUT_MAX))
                    continue
                self._due_s = math.inf  # until the handler sets the next one
            signal.pthread_kill(main, SIGNAL)


_watch = _Watch()


@contextlib.contextmanager
def deadline(seconds: float | None, what: str) -> Iterator[None]:
    """Raise TimeoutError in the code of the `with` block after this many seconds, and again while it goes on; None: never.

    Code that catches the error still fails when it is done. The deadline uses another signal than `SIGALRM`, so the block may use
    `signal.alarm`; a handler and a timer that it leaves behind are removed. Deadlines work on the main thread only (other threads log a
    warning), and not inside a C function that does not return. A program stopped in a debugger is not interrupted.

    Args:
        what: name of the block, for the error.
    """
    if threading.current_thread() is not threading.main_thread():
        if seconds is not None:
            warnings.warn(f"{what} runs without a deadline: deadlines work only on the main thread", stacklevel=3)
        yield
        return
    with _own_alarm():
        if seconds is None:
            yield
            return
        too_late = f"{what} took longer than {seconds:g} s"
        armed, rung = True, False

        def ring(number: int, frame: FrameType | None) -> None:
            nonlocal rung
            if not armed:
                return
            _watch.set(time.monotonic() + seconds)
            if not _in_debugger(frame):
                rung = True
                raise TimeoutError(too_late)

        before = signal.signal(SIGNAL, ring)
        _watch.set(time.monotonic() + seconds)
        try:
            yield
        finally:
            armed = False
            _watch.set(math.inf)
            signal.signal(SIGNAL, before if before is not None and before != signal.SIG_DFL else _ignore)
        if rung:  # the code has caught it
            raise TimeoutError(too_late)


def _ignore(number: int, frame: FrameType | None) -> None:
    """The signal of a deadline that was met at the last moment."""


@contextlib.contextmanager
def _own_alarm() -> Iterator[None]:
    """Restore the handler and the timer of `SIGALRM` after the block."""
    handler, since_s = signal.getsignal(signal.SIGALRM), time.monotonic()
    left_s, each_s = signal.getitimer(signal.ITIMER_REAL)
    try:
        yield
    finally:
        if left_s:
            passed_s = time.monotonic() - since_s
            signal.setitimer(signal.ITIMER_REAL, max(left_s - passed_s, 1e-3), each_s)
        elif signal.getitimer(signal.ITIMER_REAL)[0]:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if handler is not None and signal.getsignal(signal.SIGALRM) is not handler:
            signal.signal(signal.SIGALRM, handler)


def _in_debugger(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__")).split(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False
