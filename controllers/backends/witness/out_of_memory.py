"""Out of memory: whether a process was ended because memory ran out, which it cannot say itself. The kernel counts the processes that it
ends; the error of Ray's memory monitor says so."""

from __future__ import annotations

import re
from pathlib import Path

from ....workers.node_memory import cgroup_folders

FILES = ("memory.events", "memory.oom_control")
"""Files of a cgroup (versions 2 and 1) that count the processes ended because its memory ran out."""
ADVICE = "give the worker more memory, or smaller microbatches, shorter responses, fewer ranks on its node"


def kills(root: Path = Path("/")) -> dict[str, int]:
    """File -> processes that the kernel has ended because memory ran out, as far as this process can see.

    >>> all(number >= 0 for number in kills().values())
    True
    """
    found: dict[str, int] = {}
    for file in (*(folder / name for folder in cgroup_folders(root) for name in FILES), root / "proc/vmstat"):
        try:
            text = file.read_text()
        except OSError:
            continue
        if number := re.search(r"^oom_kill (\d+)$", text, re.MULTILINE):
            found[str(file)] = int(number[1])
    return found


def said_by_kernel(before: dict[str, int], now: dict[str, int]) -> str:
    """What the counts of the kernel say of a process that SIGKILL has ended; empty: nothing.

    Args:
        before: `kills()` when it was looked at last.
        now: `kills()` after the end of the process.
    """
    grown = [file for file, number in now.items() if number > before.get(file, number)]
    if not grown:
        return ""
    return f"out of memory: the kernel has ended a process of this machine meanwhile ({grown[0]} counts them); {ADVICE}"


def said_by_ray(error: str) -> str:
    """What Ray says of its memory monitor in an error; empty: nothing."""
    if "OutOfMemoryError" not in error and "memory pressure" not in error and "memory monitor" not in error.lower():
        return ""
    was = re.search(r"was ([\d.]+ ?GB / [\d.]+ ?GB)", error)
    had = f" ({was[1]} were in use)" if was else ""
    return f"out of memory: Ray's memory monitor ended it, because its node had too little left{had}; {ADVICE}"
