"""Memory of processes and of this node, as the kernel counts it. Reading a process costs about 30 us."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....dataflow.byte_units import GIB, MIB

NO_LIMIT = 1 << 60
"""Bytes from which on a limit is none; version 1 of cgroups writes such a number."""
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
class NodeMemory:
    """Memory of a node."""

    used_bytes: int
    """Without what the kernel can take back."""
    limit_bytes: int
    by: str
    """Who sets the limit."""

    @property
    def share(self) -> float:
        return self.used_bytes / self.limit_bytes

    @property
    def free_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)

    def __str__(self) -> str:
        return f"{gib(self.used_bytes)} of {gib(self.limit_bytes)} ({self.by})"


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


def node_memory(root: Path = Path("/")) -> NodeMemory | None:
    """Memory of this node, by the limit that is nearest: the machine's, or that of a cgroup which this process is in."""
    found = [*_of_machine(root), *_of_cgroups(root)]
    return max(found, key=lambda memory: memory.share) if found else None


def cgroup_folders(root: Path = Path("/")) -> list[Path]:
    """Folders of the memory of the cgroups that this process is in, the innermost first: of versions 2 and 1."""
    own = root / "proc/self/cgroup"
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        lines = []
    found: list[Path] = []
    for top, names in (("sys/fs/cgroup", ""), ("sys/fs/cgroup/memory", "memory")):
        paths = {parts[2] for parts in lines if len(parts) == 3 and parts[1] == names} or {"/"}
        for path in paths:  # in a container it may be the host's, which is not there
            at = root / top / path.strip("/")
            found += [at, *(p for p in at.parents if p.is_relative_to(root / top))]
    return list(dict.fromkeys(found))


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


def gib(num_bytes: float) -> str:
    """Bytes in words.

    >>> gib(1.5 * GIB), gib(3 << 20)
    ('1.5 GiB', '3 MiB')
    """
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 2 else f"{num_bytes / MIB:.0f} MiB"


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


def _of_machine(root: Path) -> Iterable[NodeMemory]:
    try:
        text = (root / "proc/meminfo").read_text()
    except OSError:
        return
    found = {name: int(kib) << 10 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    if found.get("MemTotal") and "MemAvailable" in found:
        yield NodeMemory(found["MemTotal"] - found["MemAvailable"], found["MemTotal"], "the machine")


def _of_cgroups(root: Path) -> Iterable[NodeMemory]:
    for folder in cgroup_folders(root):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if not limit or used is None or limit >= NO_LIMIT:
            continue
        try:
            stat = (folder / "memory.stat").read_text()
        except OSError:
            stat = ""
        kept = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
        yield NodeMemory(max(0, used - (int(kept[1]) if kept else 0)), limit, f"the limit of cgroup {folder.name}")


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
