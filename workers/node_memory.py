"""Memory of this node as the kernel counts it, under the tightest limit."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..dataflow.byte_units import gib

NO_LIMIT = 1 << 60
"""[bytes] Limits from this size on mean unlimited, as in cgroups version 1."""


@dataclass(frozen=True)
class NodeMemory:
    used_bytes: int
    """Used memory, without memory that the kernel can reclaim."""
    limit_bytes: int
    by: str
    """Origin of the limit."""

    @property
    def share(self) -> float:
        return self.used_bytes / self.limit_bytes

    @property
    def free_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)

    def __str__(self) -> str:
        return f"{gib(self.used_bytes)} of {gib(self.limit_bytes)} ({self.by})"


def node_memory(root: Path = Path("/")) -> NodeMemory | None:
    """Return this node's memory, under the tightest limit of machine and cgroups."""
    found = [*_of_machine(root), *_of_cgroups(root)]
    return max(found, key=lambda memory: memory.share) if found else None


def cgroup_folders(root: Path = Path("/")) -> list[Path]:
    own = root / "proc/self/cgroup"
    lines = [line.split(":", 2) for line in _text(own).splitlines()]
    found: list[Path] = []
    for top, names in (("sys/fs/cgroup", ""), ("sys/fs/cgroup/memory", "memory")):
        paths = {parts[2] for parts in lines if len(parts) == 3 and parts[1] == names} or {"/"}
        for path in paths:  # in a container, this may be a path of the host
            at = root / top / path.strip("/")
            # The limits of all parent groups apply too.
            found += [at, *(p for p in at.parents if p.is_relative_to(root / top))]
    return list(dict.fromkeys(found))


def _of_machine(root: Path) -> Iterable[NodeMemory]:
    text = _text(root / "proc/meminfo")
    found = {
        name: int(kib) << 10 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    }
    if found.get("MemTotal") and "MemAvailable" in found:
        yield NodeMemory(found["MemTotal"] - found["MemAvailable"], found["MemTotal"], "the machine")


def _of_cgroups(root: Path) -> Iterable[NodeMemory]:
    for folder in cgroup_folders(root):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if not limit or used is None or limit >= NO_LIMIT:
            continue
        stat = _text(folder / "memory.stat")
        kept = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
        used = max(0, used - (int(kept[1]) if kept else 0))
        yield NodeMemory(used, limit, f"the limit of cgroup {folder.name}")


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
