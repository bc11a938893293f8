"""The device of a rank: the one that it alone sees, or else that of its local rank; never one that another rank has."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..dataflow.config import gib
from ..dataflow.errors import UserError
from ..dataflow.lazy import torch
from .worker import Context


def device_index(context: Context, visible: int) -> int:
    """Which of the GPUs that a process sees is its own.

    >>> device_index(Context(local_rank=3, devices=("3",)), 1), device_index(Context(local_rank=3), 8)
    (0, 3)

    Args:
        context: of the rank.
        visible: GPUs that the process sees, at least one.

    Raises:
        UserError: the process sees its node's GPUs, and they are fewer than the ranks there.
    """
    if context.devices:
        return 0
    if context.local_rank >= visible:
        raise UserError(
            f"rank {context.rank} of {context.name!r} is number {context.local_rank} of its group on its node, counted from 0, and sees "
            f"only {visible} GPUs there: two ranks would share one; take fewer ranks on a node"
        )
    return context.local_rank


def peak_device_bytes() -> int:
    """Most bytes that PyTorch has held on the current GPU of this process; 0: it has used none."""
    loaded = sys.modules.get("torch")
    if loaded is None or not loaded.cuda.is_available() or not loaded.cuda.is_initialized():
        return 0
    return loaded.cuda.max_memory_reserved()


def rank_device(context: Context) -> torch.device:
    """The device of a rank, which becomes the current one of its process: `cuda` without a number means it, too.

    Raises:
        UserError: as `device_index`.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", device_index(context, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


# Node memory
#
# Memory of this node, as the kernel counts it, by the limit that is nearest.


NO_LIMIT = 1 << 60
"""Bytes from which on a limit is none; version 1 of cgroups writes such a number."""


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
        yield NodeMemory(
            max(0, used - (int(kept[1]) if kept else 0)), limit, f"the limit of cgroup {folder.name}"
        )


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
