"""Out of memory: whether a process was ended because memory ran out, which it cannot say itself. The kernel counts the processes that it
ends; the error of Ray's memory monitor says so."""

from __future__ import annotations

import re
from pathlib import Path

COUNTERS = (
    "/sys/fs/cgroup{path}/memory.events",
    "/sys/fs/cgroup/memory.events",
    "/sys/fs/cgroup/memory{path}/memory.oom_control",
    "/proc/vmstat",
)
"""Files that count the processes ended because memory ran out: of a cgroup (versions 2 and 1), of the machine."""
ADVICE = "give the worker more memory, or smaller microbatches, shorter responses, fewer ranks on its node"


def kills(root: Path = Path("/")) -> dict[str, int]:
    """File -> processes that the kernel has ended because memory ran out, as far as this process can see.

    >>> all(number >= 0 for number in kills().values())
    True
    """
    own = root / "proc/self/cgroup"
    lines = [line.split(":", 2) for line in own.read_text().splitlines()] if own.exists() else []
    paths = {path for _, names, path in lines if names in ("", "memory")} or {"/"}
    found: dict[str, int] = {}
    for counter in COUNTERS:
        for path in paths:
            file = root / counter.format(path=path.rstrip("/")).lstrip("/")
            try:
                text = file.read_text()
            except OSError:
                continue
            if number := re.search(r"^oom_kill (\d+)$", text, re.MULTILINE):
                found[str(file)] = int(number[1])
    return found


def why_ended(error: BaseException, before: dict[str, int], now: dict[str, int]) -> str | None:
    """Why a process ended, if memory ran out; None otherwise.

    Args:
        error: Ray's.
        before: `kills()` when the processes were started.
        now: `kills()` after the end of this one.
    """
    said = str(error)
    if type(error).__name__ == "OutOfMemoryError" or "memory pressure" in said or "memory monitor" in said.lower():
        return f"out of memory: Ray's memory monitor ended it, because its node had too little left; {ADVICE}"
    if grown := [file for file, number in now.items() if number > before.get(file, number)]:
        return f"out of memory: the kernel has ended a process of this machine meanwhile ({grown[0]} counts them); {ADVICE}"
    return None
