"""Memory of this node as the kernel counts it, under the tightest limit."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..dataflow.byte_units import gib
from ..dataflow.cgroups import cgroup_folders, text_of

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


def _of_machine(root: Path) -> Iterable[NodeMemory]:
    text = text_of(root / "proc/meminfo")
    found = {
        name: int(kib) << 10 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    }
    if found.get("MemTotal") and "MemAvailable" in found:
        yield NodeMemory(found["MemTotal"] - found["MemAvailable"], found["MemTotal"], "the machine")


def _of_cgroups(root: Path) -> Iterable[NodeMemory]:
    for folder in cgroup_folders("memory", root):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if not limit or used is None or limit >= NO_LIMIT:
            continue
        stat = text_of(folder / "memory.stat")
        kept = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
        used = max(0, used - (int(kept[1]) if kept else 0))
        yield NodeMemory(used, limit, f"the limit of cgroup {folder.name}")


def _number(file: Path) -> int | None:
    text = text_of(file).strip()
    return int(text) if text.isdigit() else None
