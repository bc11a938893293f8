"""With which code or signal a process has ended, also one that is no child of this: the kernel keeps it for whoever holds its pidfd.

Linux 6.15 and later answer this for any process. Earlier ones do not; then it is known of a process that nobody has waited for.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
from contextlib import suppress
from pathlib import Path

GET_INFO = 0xC040FF0B
"""PIDFD_GET_INFO of linux/pidfd.h, for its first 64 bytes."""
EXIT = 1 << 3
"""PIDFD_INFO_EXIT: the exit status is wanted, and is there."""
INFO = struct.Struct("=Q52xi")
"""The mask, and the exit status."""
POLL_S = 0.02


class HeldProcess:
    """A process that is held: its number is given to no other as long as this lives.

    Args:
        pid: of the process, on this machine.

    Raises:
        OSError: there is none.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._held = os.pidfd_open(pid)

    def send(self, number: int) -> bool:
        """Send it a signal; returns whether it is there to get it."""
        with suppress(OSError):
            signal.pidfd_send_signal(self._held, number)
            return True
        return False

    def exit_code(self, wait_s: float) -> int | None:
        """Its exit code, or minus the signal that ended it; None: it lives, or the kernel does not say.

        Args:
            wait_s: longest wait for its end, and for the process that started it to take notice.
        """
        if not select.select([self._held], [], [], wait_s)[0]:
            return None
        status = self._status()
        while status is None and wait_s > 0:  # its parent has not waited for it yet
            select.select([], [], [], POLL_S)
            wait_s -= POLL_S
            status = self._status()
        return None if status is None else os.waitstatus_to_exitcode(status)

    def _status(self) -> int | None:
        info = bytearray(INFO.size)
        INFO.pack_into(info, 0, EXIT, 0)
        with suppress(OSError):
            fcntl.ioctl(self._held, GET_INFO, info)
            mask, status = INFO.unpack(info)
            if mask & EXIT:
                return status
        with suppress(
            OSError, ValueError, IndexError
        ):  # nobody has waited for it: the last field but none is its status
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
            return int(fields[49]) if fields[0] in "ZX" else None
        return None

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._held)


def said_of(code: int | None) -> str:
    """An exit code, in words.

    >>> said_of(3), said_of(-9), said_of(None)
    ('exit code 3', 'signal SIGKILL', '')
    """
    if code is None:
        return ""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
