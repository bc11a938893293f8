"""SilenceWatch: ends a call that is carried out in this process and is silent for too long. Nobody else could, since the driver waits in
the same thread.

    limit_s over ──> `Silent` is raised in the thread that carries out the call, where it stands
    as long again ──> it hangs where Python does not get control: all stacks are written to standard error, and the process ends

A thread looks each second; a call costs two assignments. A call that a debugger holds is not silent.
"""

from __future__ import annotations

import ctypes
import faulthandler
import math
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ...dataflow.errors import Silent
from .witness.stacks import SIGNAL, shown

LOOK_S = 1.0
"""Longest time between two looks."""
ASLEEP_S = 5.0
"""A look that comes so much too late was not the call's fault: the process was stopped, or the machine."""
DEBUGGERS = {"pdb.py", "bdb.py", "pydevd.py", "pydevd_bundle"}


class SilenceWatch:
    """Watches the calls of one thread: that in which it is made."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._limit_s = math.inf
        self._spoke = math.inf
        """When the call under way said something last; infinite: there is none."""
        self._closed = threading.Event()
        self._armed = False
        self._interrupts = threading.current_thread() is threading.main_thread()
        """A signal reaches the thread also while it waits in the kernel."""
        self._before = signal.signal(SIGNAL, self._interrupted) if self._interrupts else None
        self._looker: threading.Thread | None = None

    @contextmanager
    def over(self, limit_s: float) -> Iterator[None]:
        """Watch what this thread does within.

        Args:
            limit_s: how long it may be silent.

        Raises:
            Silent: it was silent for longer.
        """
        self._limit_s, self._spoke = limit_s, time.monotonic()
        if self._looker is None and limit_s < math.inf:
            self._looker = threading.Thread(target=self._look, name="silence", daemon=True)
            self._looker.start()
        try:
            yield
        finally:
            self._spoke = math.inf

    def advance(self) -> None:
        """The call under way goes on."""
        if self._spoke < math.inf:
            self._spoke = time.monotonic()

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()
        self._disarm()
        if self._interrupts and signal.getsignal(SIGNAL) == self._interrupted:
            signal.signal(SIGNAL, self._before)

    @property
    def _silent_s(self) -> float:
        return time.monotonic() - self._spoke

    def _look(self) -> None:
        looked = time.monotonic()
        while not self._closed.wait(each_s := min(LOOK_S, self._limit_s / 4)):
            late_s, looked = time.monotonic() - looked - each_s, time.monotonic()
            if late_s > ASLEEP_S or self._is_debugged():
                self.advance()
            silent_s = self._silent_s
            if silent_s < self._limit_s / 2:
                self._disarm()
            elif not self._armed:
                self._arm(max(self._limit_s / 2, 2 * self._limit_s - silent_s))
            if silent_s > self._limit_s:
                self._interrupt()

    def _interrupt(self) -> None:
        if self._interrupts:
            signal.pthread_kill(self._thread, SIGNAL)
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(Silent))

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self._silent_s > self._limit_s:
            raise Silent(_where(frame))

    def _is_debugged(self) -> bool:
        """Whether a debugger stands in the call."""
        frame = sys._current_frames().get(self._thread)
        while frame is not None:
            if DEBUGGERS.intersection(Path(frame.f_code.co_filename).parts):
                return True
            frame = frame.f_back
        return False

    def _arm(self, seconds: float) -> None:
        """Have the process end, from outside of Python, unless the call says something meanwhile."""
        self._armed = True
        faulthandler.dump_traceback_later(seconds, exit=not hasattr(sys, "ps1"), file=sys.__stderr__ or 2)

    def _disarm(self) -> None:
        if self._armed:
            self._armed = False
            faulthandler.cancel_dump_traceback_later()


def _where(frame: FrameType | None) -> str:
    stack = traceback.extract_stack(frame) if frame is not None else []
    return shown([(each.filename, str(each.lineno), each.name) for each in reversed(stack)])
