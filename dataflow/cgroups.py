"""Control groups of this process (cgroups version 1 and 2), and the CPUs that they allow it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def cgroup_folders(controller: str, root: Path = Path("/")) -> list[Path]:
    """Return the folders with the limits of a controller, such as "memory" or "cpu"."""
    lines = [line.split(":", 2) for line in text_of(root / "proc/self/cgroup").splitlines()]
    found: list[Path] = []
    for top, name in (("sys/fs/cgroup", ""), (f"sys/fs/cgroup/{controller}", controller)):
        own = (parts for parts in lines if len(parts) == 3)
        paths = {path for _, names, path in own if name in names.split(",")} or {"/"}
        for path in paths:  # in a container, this may be a path of the host
            at = root / top / path.strip("/")
            # The limits of all parent groups apply too.
            found += [at, *(p for p in at.parents if p.is_relative_to(root / top))]
    return list(dict.fromkeys(found))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the number of CPUs that the tightest limit allows, or None without a limit."""
    return min(
        (quota for folder in cgroup_folders("cpu", root) for quota in _quotas(folder)), default=None
    )


def usable_cpus(root: Path = Path("/")) -> int:
    """Return the number of CPUs that this process may use: its affinity, within its quota.

    Ray counts the same number. Like Ray, it rounds quotas down.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    return cpus if quota is None else max(1, min(cpus, int(quota)))


def _quotas(folder: Path) -> Iterator[float]:
    for words in (
        text_of(folder / "cpu.max").split(),
        [text_of(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")],
    ):
        # Without a limit, the quota is "max" or -1.
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            yield int(words[0]) / int(words[1])


def text_of(file: Path) -> str:
    """Return the text of a file, or "" if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
