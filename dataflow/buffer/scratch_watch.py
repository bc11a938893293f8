"""Remove a run's scratch folder once no process has held it for a while: `scratch_watch.py FOLDER
GRACE_S`.

It watches a lock, because the kernel releases a process's locks however the process ends. It runs
as a daemon, imports nothing of Weft, and ends when the folder is gone.
"""

import fcntl
import os
import shutil
import sys
import time
from pathlib import Path

POLL_S = 0.5


def main(folder: Path, grace_s: float) -> None:
    """Wait until the folder is free for `grace_s`, and remove it."""
    try:
        own = os.open(folder / "watched", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        in_use = os.open(folder / "in_use", os.O_RDWR)
    except OSError:  # another program watches the folder, or the folder is gone
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
            # Rename first: a process that starts during the removal then creates a new folder.
            folder.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)
            return
        fcntl.flock(in_use, fcntl.LOCK_UN)


if __name__ == "__main__":
    # Fork twice, so that the daemon belongs to neither the parent's session nor the parent.
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            main(Path(sys.argv[1]), float(sys.argv[2]))
        os._exit(0)
    os.wait()
