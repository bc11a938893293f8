"""A process that hangs in C while it holds the GIL."""

import ctypes
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from weft.controllers.backends import local
from weft.controllers.backends.local import _SilenceWatch


class _Clock:
    """Replaces the module `time` in the watch, and never moves."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def hang_holding_the_interpreter() -> tuple[int, str]:
    """Fork a process that hangs, and return its exit code and its standard error."""
    said = Path(tempfile.mkstemp()[1])
    if not (child := os.fork()):
        os.dup2(os.open(said, os.O_WRONLY), 2)
        try:
            clock: Any = _Clock()
            local.time = clock
            watch = _SilenceWatch()
            with watch.over(1.0):  # waited out: the process ends after twice as long
                clock.now_s = 0.6
                while not watch._armed:  # until the watch has noticed the silence
                    time.sleep(0.01)
                ctypes.PyDLL(None).sleep(60)
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    text = said.read_text()
    said.unlink()
    return os.waitstatus_to_exitcode(status), text
