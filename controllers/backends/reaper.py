"""Reaper: a small process that cleans up a local Ray cluster after its driver was killed.

Run as a program without Weft's imports: `reaper.py FOLDER SESSION`. The driver keeps its standard
input open, and writes the cluster's process groups there, one per line. If the cluster's folder
still exists at the end of the input, the reaper kills the cluster's processes and removes the
folder.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GRACE_S = 3.0
"""[s] Time for the cluster's processes to notice that the driver is gone."""


def main(folder: Path, session: int) -> None:
    groups = {int(line) for line in sys.stdin}
    deadline = time.monotonic() + GRACE_S
    while folder.exists() and time.monotonic() < deadline:
        if not any(processes_of(folder, groups, session)):
            break
        time.sleep(0.1)
    if folder.exists():
        for process in processes_of(folder, groups, session):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def processes_of(folder: Path, groups: set[int], session: int) -> Iterator[int]:
    """Processes in one of these groups of the driver's session, or whose command or environment
    names the folder."""
    name = os.fsencode(folder)
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process is gone, or belongs to another user
            state, _, group, of_session = (entry / "stat").read_text().rpartition(") ")[2].split()[:4]
            ours = int(group) in groups and int(of_session) == session
            named = any(name in (entry / of).read_bytes() for of in ("cmdline", "environ"))
            if (ours or named) and state != "Z" and int(entry.name) != os.getpid():
                yield int(entry.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
