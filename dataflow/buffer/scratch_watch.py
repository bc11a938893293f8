"""Removes the scratch folder of a run when no process has held it for a while: `scratch_watch.py FOLDER GRACE_S`.

This program imports nothing of Weft. It runs in a process of its own, which has left the session and the parent that started it. It ends
when the folder is gone. It watches a lock, because the kernel releases a process's locks however the process ends.
"""

import fcntl
import os
import shutil
import sys
import time
from pathlib import Path

POLL_S = 0.5


def main(folder: Path, grace_s: float) -> None:
    """Wait until the folder is free and stays so, and remove it."""
    try:
        own = os.open(folder / "watched", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        in_use = os.open(folder / "in_use", os.O_RDWR)
    except OSError:  # another program watches the folder, or it is gone
        return
    free_since: float | None = None
    while folder.exists():
        time.sleep(POLL_S)
        try:
            fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free_since = None
            continue
        free_since = free_since or time.monotonic()
        if (folder / "over").exists() or time.monotonic() - free_since >= grace_s:
            removed = folder.with_name(f"{folder.name}.removed-{os.getpid()}")
            folder.rename(removed)  # at once: a process that begins meanwhile makes a folder of its own
            shutil.rmtree(removed, ignore_errors=True)
            return
        fcntl.flock(in_use, fcntl.LOCK_UN)


if __name__ == "__main__":
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            main(Path(sys.argv[1]), float(sys.argv[2]))
        os._exit(0)
    os.wait()
