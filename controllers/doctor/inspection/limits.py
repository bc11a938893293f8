"""Limits that the kernel sets to this process and its children: open files, processes, locked memory, CPUs."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from ....dataflow.byte_units import MIB
from .finding import Finding, fail, ok, warn

ABOUT = "limits"
FILES_WARN_BELOW, FILES_FAIL_BELOW = 4096, 256
"""Open files: Ray opens some for each worker, and the driver some for each rank."""
PROCESSES_WARN_BELOW, PROCESSES_FAIL_BELOW = 4096, 512
"""Processes and threads: a rank with torch and Ray has about a hundred threads."""


def look(root: Path = Path("/")) -> Iterator[Finding]:
    """Findings about limits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield open_files(soft, hard)
    yield processes(resource.getrlimit(resource.RLIMIT_NPROC)[0], pids_left(root))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield locked_memory(locked, fast_network=any((root / "dev/infiniband").glob("uverbs*")))
    yield cpus(len(os.sched_getaffinity(0)), cpu_quota(root))


def open_files(soft: int, hard: int) -> Finding:
    """Whether enough files may be open at once.

    >>> open_files(1024, 524288).todo
    'ulimit -n 65536 (up to 524288 without an administrator)'
    """
    most = "any number" if hard == resource.RLIM_INFINITY else str(hard)
    todo = f"ulimit -n {65536 if most == 'any number' else min(65536, hard)} (up to {most} without an administrator)"
    return _counted("open files (nofile)", soft, FILES_WARN_BELOW, FILES_FAIL_BELOW, todo)


def processes(limit: int, left: int | None) -> Finding:
    """Whether enough processes and threads may run.

    Args:
        limit: of this user.
        left: of this container; None: it has no limit.
    """
    todo = "ulimit -u, or the container's own limit (docker run --pids-limit, podPidsLimit)"
    limits = [number for number in (limit, left) if number not in (None, resource.RLIM_INFINITY)]
    return _counted(
        "processes (nproc)",
        min(limits, default=resource.RLIM_INFINITY),
        PROCESSES_WARN_BELOW,
        PROCESSES_FAIL_BELOW,
        todo,
    )


def _counted(name: str, limit: int, warn_below: int, fail_below: int, todo: str) -> Finding:
    if limit == resource.RLIM_INFINITY or limit >= warn_below:
        return ok(ABOUT, name, "unlimited" if limit == resource.RLIM_INFINITY else f"{limit}")
    return (fail if limit < fail_below else warn)(ABOUT, name, f"{limit}", todo)


def locked_memory(limit: int, *, fast_network: bool) -> Finding:
    """Whether memory may be locked; only networks with RDMA, such as InfiniBand, need it."""
    name, unlimited = "locked memory (memlock)", limit == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else f"{limit / MIB:.0f} MiB"
    if fast_network and not unlimited:
        return warn(
            ABOUT, name, f"{found}, and there is an RDMA network", "ulimit -l unlimited: NCCL locks its buffers"
        )
    return ok(ABOUT, name, found)


def cpus(there: int, quota: float | None) -> Finding:
    """CPUs that this process may use. torch takes a thread for each that it sees, also where a container may use fewer.

    >>> cpus(64, 4.0).outcome, cpus(64, None).outcome
    ('warn', 'ok')
    """
    if quota is None or quota >= there:
        return ok(ABOUT, "CPUs", f"{there}")
    found = f"{there} are seen, and this container may use {quota:g}: torch would start too many threads"
    return warn(ABOUT, "CPUs", found, f"export OMP_NUM_THREADS={max(1, round(quota))} for scripts on Local()")


def cpu_quota(root: Path) -> float | None:
    """CPUs that the container may use; None: all."""
    words = _words(root / "sys/fs/cgroup/cpu.max")
    if len(words) == 2 and words[0] != "max":
        return int(words[0]) / int(words[1])
    quota = _words(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    period = _words(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us")
    return int(quota[0]) / int(period[0]) if quota and period and int(quota[0]) > 0 else None


def pids_left(root: Path) -> int | None:
    """Processes and threads that the container may still start; None: it has no limit."""
    most, now = (_words(root / f"sys/fs/cgroup/pids.{name}") for name in ("max", "current"))
    return int(most[0]) - int(now[0]) if most and now and most[0] != "max" else None


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
