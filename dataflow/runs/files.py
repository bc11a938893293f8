"""Names of files and folders in a run directory, `runs/NAME/`, and durable file operations."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CONFIG = "config.json"
GRAPH, MERMAID = "graph.json", "graph.mmd"
"""All graphs as JSON, and the training graph as a Mermaid diagram."""
STREAM, PARQUET = ".arrows", ".parquet"
"""Suffixes of tables during the run and after it."""
METRICS, TIMELINE, PROCESSES = "metrics", "timeline", "processes"
"""Names of tables without suffix. `processes` stays a stream after the run."""
SAMPLES = "samples"
SAMPLES_ARCHIVE = "samples.parquet"
ALERTS = "alerts.jsonl"
LIVE = "live.json"
"""Current state of the run, for watchers."""
STOP, STACKS = "stop.json", "stacks.json"
"""Requests to the driver."""
LOCK = "lock"
"""Folder with the lock files of drivers."""
CHECKPOINTS = "checkpoints"
SKIPPED = "skipped"
"""Folder with the rows of each worker group's bad optimizer steps."""
TRACKERS = "trackers"
"""Folder with the state of each tracker: which metrics it has sent."""
LOGS = "logs"
BUFFER = "buffer"
"""Folder of the sample buffer, which contains:"""
LOG = "ledger.log"
SEGMENTS = "segments"

LEFT = (
    LOCK,
    BUFFER,
    *(name + suffix for name in (METRICS, TIMELINE) for suffix in (STREAM, PARQUET)),
    ALERTS,
    SAMPLES_ARCHIVE,
    f"{SAMPLES}/*.arrow",
    f"{CHECKPOINTS}/step_*",
)
"""Patterns of files that identify a run directory. Model folders also contain `config.json`."""


def is_run(folder: Path) -> bool:
    """Return whether a folder contains a run or a part of one; False if it cannot be read."""
    with suppress(OSError):
        return any(list(folder.glob(name)) for name in LEFT)
    return False


# Disk


PAUSE_S = 1.0
"""[s] Pause between two attempts to write to a full disk."""
MAX_PAUSE_S = 3600.0
"""[s] Maximum wait for space on a disk."""
PARTIAL = ".partial"
"""Suffix of files that are being written."""


def is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, readable only by the owner."""
    if not path.is_dir():
        # `mkdir(parents=True)` would create the parents with default permissions.
        make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def make_file(path: Path) -> None:
    """Create an empty private file, for a library that opens it by name."""
    remove(path)
    path.touch(mode=0o600)


def make_private(path: Path) -> None:
    """Deny other users access to a file or folder."""
    with suppress(PermissionError):  # another user owns it
        path.chmod(0o700 if path.is_dir() else 0o600)


def set_aside(path: Path, why: str) -> Path:
    """Rename a file, folder or link to `NAME.WHY-1` (or -2, ...). Return the new path."""
    numbered = (path.with_name(f"{path.name}.{why}-{number}") for number in itertools.count(1))
    # `exists` is false for a link whose target is gone.
    aside = next(other for other in numbered if not other.is_symlink() and not other.exists())
    path.rename(aside)
    return aside


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace `path` atomically by a private file, which the caller writes to the yielded path.
    Readers find either the old or the complete new file, even after a power failure."""
    partial, disk = path.with_name(path.name + PARTIAL), Disk()
    make_file(partial)
    try:
        yield partial
        with partial.open("rb") as written:
            disk.sync(written.fileno())
        disk.rename(partial, path)
        disk.sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def remove(path: Path) -> None:
    # Remove a link, not its target.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class Disk:
    """Disk operations that durability depends on. Tests replace them by failing ones."""

    def open(self, path: Path) -> int:
        """Open or create a file for appending. Return its descriptor."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, descriptor: int, data: bytes) -> None:
        """Append data that survives the death of this process."""
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    def sync(self, descriptor: int) -> None:
        """Make written data survive a power failure."""
        os.fdatasync(descriptor)

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def sync_folder(self, folder: Path) -> None:
        """Make the file names in a folder survive a power failure."""
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def write_new(self, path: Path, chunks: Iterable[bytes]) -> None:
        """Write a new file and sync it. Removes an existing one first."""
        remove(path)
        descriptor = self.open(path)
        try:
            for data in chunks:
                self.write(descriptor, data)
            self.sync(descriptor)
        finally:
            self.close(descriptor)

    def write_whole(self, path: Path, data: bytes | Iterable[bytes]) -> None:
        """Replace the content of a file atomically, and sync it. If this raises an OSError, for
        example because the disk is full, the file keeps its content."""
        partial = path.with_name(path.name + PARTIAL)
        try:
            self.write_new(partial, [data] if isinstance(data, bytes) else data)
            self.rename(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        self.sync_folder(path.parent)
