"""What one process of a node does for all of them: the others wait for it, and learn how far it is."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..dataflow.errors import RunError

WAIT_S = 7200.0
"""Longest wait for another process of the node."""
_POLL_S = 0.5
_LOOK_S = 2.0
"""Seconds between two looks at how much there is."""


@contextmanager
def once_a_node(lock: Path, what: str, *, wait_s: float = WAIT_S) -> Iterator[None]:
    """Held by one process of the node at a time; a process that dies gives it up.

    Args:
        lock: the file that is locked. It is made with its folder, and several users may share it.
        what: is done, for messages: "model 'x': process 17 of this node {downloads it}".
        wait_s: longest wait for the process that holds it.

    Raises:
        OSError: the file can be neither made nor read.
        RunError: the process that holds it did not give it up in time.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _open(lock)
    try:
        end = time.monotonic() + wait_s
        while not _is_locked(descriptor):
            if time.monotonic() > end:
                holder = os.pread(descriptor, 20, 0).decode() or "unknown"
                raise RunError(f"process {holder} of this node {what}, and did not end in {wait_s:g} s")
            time.sleep(min(_POLL_S, wait_s))
        with suppress(OSError):  # another user's, who has kept it from others: nobody learns the process then
            lock.write_text(str(os.getpid()))
        yield
    finally:
        os.close(descriptor)


@contextmanager
def growth_told(folder: Path, advance: Callable[[], None]) -> Iterator[None]:
    """Within it, a thread calls `advance` whenever there is more in a folder than before, whoever puts it there."""
    over = threading.Event()

    def look() -> None:
        before = _bytes_in(folder)
        while not over.wait(_LOOK_S):
            now = _bytes_in(folder)
            if now != before:
                advance()
            before = now

    thread = threading.Thread(target=look, name="growth", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _bytes_in(folder: Path) -> int:
    """Bytes of the files in a folder, which need not exist, nor keep its name."""
    total = 0
    for path, _, names in os.walk(folder):  # it passes over a folder that is gone
        for name in names:
            with suppress(OSError):  # it has another name now
                file = Path(path, name)
                total += 0 if file.is_symlink() else file.stat().st_size
    return total


def _open(lock: Path) -> int:
    """Open a lock file; whoever makes it lets all others write to it."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        return os.open(lock, os.O_RDONLY)  # to lock it takes no right to write
    if os.fstat(descriptor).st_uid == os.geteuid():
        os.fchmod(descriptor, 0o666)  # whatever the umask
    return descriptor


def _is_locked(descriptor: int) -> bool:
    """Whether this process holds the lock now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True
