"""Room: disks, shared memory and memory, as a run needs them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ....dataflow.byte_units import GIB
from ....workers.node_memory import node_memory
from .finding import Finding, fail, ok, warn

ABOUT = "room"
DISK_WARN_BELOW, DISK_FAIL_BELOW = 20 * GIB, 1 * GIB
"""Bytes: a checkpoint of a small model with its moments; the log and the segments of a small run."""
FILES_WARN_BELOW = 10_000
"""Files that may still be made on a disk."""
MEMORY_WARN_BELOW, MEMORY_FAIL_BELOW = 4 * GIB, 1 * GIB
"""Bytes: a driver, Ray and a rank with torch take about 3 GiB."""
SHARED_WARN_BELOW = 1 * GIB
"""Bytes of /dev/shm: NCCL, vLLM's tensor parallelism and Ray's object store use it; containers often have 64 MiB."""
NETWORK = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "9p",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "fuse.sshfs",
    "fuse.gcsfuse",
    "fuse.s3fs",
}
"""File systems on other machines."""


def look(runs: Path) -> Iterator[Finding]:
    """Findings about room.

    Args:
        runs: the folder of runs; it need not be there.
    """
    yield disk("runs", runs, "remove old runs and checkpoints (weft runs), or give Driver(root=...) another disk")
    yield disk("temporary files", Path(tempfile.gettempdir()), "remove what is not used, or set TMPDIR to another disk")
    yield _segments(runs, Path("/proc/mounts"))
    yield shared_memory(Path("/dev/shm"))
    yield memory()


def disk(name: str, folder: Path, todo: str) -> Finding:
    """Whether there is a disk to write on, and how much of it is free."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK) or not there.is_dir():
        return fail(ABOUT, name, f"{there} cannot be written", todo)
    free = shutil.disk_usage(there).free
    found = f"{free / GIB:.1f} GiB free at {folder}"
    if free < DISK_WARN_BELOW:
        return (fail if free < DISK_FAIL_BELOW else warn)(ABOUT, name, found, todo)
    status = os.statvfs(there)
    if status.f_files and status.f_favail < FILES_WARN_BELOW:
        return warn(ABOUT, name, f"{status.f_favail} files may still be made at {folder}", todo)
    return ok(ABOUT, name, found)


def _segments(runs: Path, mounts: Path) -> Finding:
    """Rows lie in the folder of the run, where all processes are on one machine: it should be a disk of that machine."""
    kind = file_system(runs, mounts)
    if kind in NETWORK:
        found = f"{runs} is on another machine ({kind}), and rows in flight would lie there"
        return warn(ABOUT, "segments", found, "give BufferConfig(scratch=...) a folder on a disk of this machine")
    return ok(ABOUT, "segments", f"rows in flight lie at {runs} ({kind or 'file system unknown'})")


def file_system(folder: Path, mounts: Path) -> str:
    """The kind of file system that a folder lies on, such as ext4; empty: unknown."""
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return ""
    place = folder.resolve()
    over = [
        (len(Path(words[1]).parts), at, words[2]) for at, words in enumerate(lines) if place.is_relative_to(words[1])
    ]
    return max(over)[2] if over else ""


def shared_memory(folder: Path) -> Finding:
    """Whether /dev/shm is large enough."""
    name, todo = (
        str(folder),
        "enlarge it: mount -o remount,size=8G /dev/shm, docker run --shm-size=8g, an emptyDir of medium Memory",
    )
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return fail(ABOUT, name, "it cannot be written", todo)
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    return ok(ABOUT, name, found) if usage.free >= SHARED_WARN_BELOW else warn(ABOUT, name, found, todo)


def memory(root: Path = Path("/")) -> Finding:
    """How much memory is free, by the nearest limit."""
    found = node_memory(root)
    if found is None:
        return warn(
            ABOUT, "memory", "the kernel does not say how much there is", "look at the limits of this container"
        )
    said = f"{found.free_bytes / GIB:.1f} GiB free; {found} used"
    if found.free_bytes >= MEMORY_WARN_BELOW:
        return ok(ABOUT, "memory", said)
    todo = "end what uses it, or raise the limit; weft plan says what a run needs"
    return (fail if found.free_bytes < MEMORY_FAIL_BELOW else warn)(ABOUT, "memory", said, todo)
