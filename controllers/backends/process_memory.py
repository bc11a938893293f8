"""Memory of processes, as the kernel counts it. Reading a process costs about 30 us. That of the node is in `workers/node_memory.py`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...dataflow.byte_units import gib
from ...workers.node_memory import NodeMemory

ENDS = 4
"""Readings that are shown of a course, evenly spread."""


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of a process that is in RAM."""

    resident_bytes: int
    """Its own: the heap, and files that it has mapped."""
    shared_bytes: int
    """Shared memory that it has touched: segments of rows, weights on their way, Ray's object store. Others may count it, too."""


@dataclass(frozen=True)
class Memory:
    """The memory of a node, and of what of the run is on it."""

    processes: dict[str, ProcessMemory]
    """Worker, such as `rollout[0]` -> its memory."""
    node: NodeMemory | None = None
    object_store_bytes: int = 0
    """What Ray's object store takes of it."""


def memory_of(process: int | str, root: Path = Path("/")) -> ProcessMemory | None:
    """Memory of a process of this machine; None: it is gone.

    >>> memory_of("self").resident_bytes > 1 << 20, memory_of(-1)
    (True, None)

    Args:
        process: its number, or "self".
    """
    try:
        text = (root / f"proc/{process}/status").read_text()
    except OSError:
        return None
    found = {name: int(kib) << 10 for name, kib in re.findall(r"^(Rss\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    if "RssAnon" not in found:  # it has ended, and nobody has taken notice
        return None
    return ProcessMemory(found["RssAnon"] + found.get("RssFile", 0), found.get("RssShmem", 0))


def object_store(root: Path = Path("/")) -> int:
    """Bytes that the object stores of the Ray nodes of this machine hold, as far as this user may see them."""
    total = 0
    for entry in (root / "proc").glob("[0-9]*"):
        try:
            is_raylet = (entry / "comm").read_text() == "raylet\n"
        except OSError:
            continue
        memory = memory_of(entry.name, root) if is_raylet else None
        total += memory.shared_bytes if memory else 0
    return total


def course(readings: Sequence[tuple[float, int]]) -> str:
    """How memory went over time, in words; empty where there are no two readings.

    >>> course([(0.0, 1 << 30), (10.0, 2 << 30), (20.0, 4 << 30)])
    'its own memory in the last 20 s: 1.0 GiB, 2.0 GiB, 4.0 GiB'

    Args:
        readings: seconds and bytes, oldest first.
    """
    if len(readings) < 2:
        return ""
    last = len(readings) - 1
    shown = sorted({round(k * last / (ENDS - 1)) for k in range(ENDS)})
    return f"its own memory in the last {readings[-1][0] - readings[0][0]:.0f} s: " + ", ".join(
        gib(readings[k][1]) for k in shown
    )
