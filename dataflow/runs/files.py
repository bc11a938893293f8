"""Names of the files and folders in the directory of a run, `runs/NAME/`."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CONFIG = "config.json"
"""The resolved configuration."""
GRAPH, MERMAID = "graph.json", "graph.mmd"
"""The graphs, for programs and drawn."""
STREAM, PARQUET = ".arrows", ".parquet"
"""Suffixes of a table: while the run goes on, and once it is over."""
METRICS, TIMELINE, PROCESSES = "metrics", "timeline", "processes"
"""Tables, without their suffixes; the last one stays a stream."""
SAMPLES = "samples"
SAMPLES_ARCHIVE = "samples.parquet"
"""All samples, where somebody archived them."""
ALERTS = "alerts.jsonl"
LIVE = "live.json"
"""What the run looks like now."""
STOP, STACKS = "stop.json", "stacks.json"
"""What the driver is asked for."""
LOCK = "lock"
"""The driver that holds the run, and those before it."""
CHECKPOINTS = "checkpoints"
SKIPPED = "skipped"
"""Rows of bad optimizer steps, by worker group."""
TRACKERS = "trackers"
"""What each tracker has taken of the metrics."""
LOGS = "logs"
"""A log for each worker, tracker and dashboard."""
BUFFER = "buffer"
"""The sample buffer; in it:"""
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
"""What shows that a folder is a run's. The folder of a model has a `config.json`, too, so that one proves nothing."""


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run, or a part of one; False where it is not there, or may not be read."""
    with suppress(OSError):
        return any(list(folder.glob(name)) for name in LEFT)
    return False


# Disk
#
# Disk: the few file operations that durability depends on, in one place, so that a test can make
# each of them fail.


PAUSE_S = 1.0
"""Seconds between two attempts to write to a full disk."""
MAX_PAUSE_S = 3600.0
"""Longest wait for space on a disk, in seconds."""
PARTIAL = ".partial"
"""Suffix of the name of a file that is being written."""


def is_full(error: BaseException) -> bool:
    """Whether an error means that a disk or a quota is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def make_folder(path: Path) -> None:
    """Make a folder of a run, and missing folders above it, which only the owner may read. An existing folder is not changed."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def make_file(path: Path) -> None:
    """Make an empty file that only the owner may read, for a writer that opens it by its name."""
    remove(path)
    path.touch(mode=0o600)


def make_private(path: Path) -> None:
    """Take all rights of other users to a file or folder that a library has made."""
    with suppress(PermissionError):  # another user owns it, and has given this process access
        path.chmod(0o700 if path.is_dir() else 0o600)


def set_aside(path: Path, why: str) -> Path:
    """Rename a file, folder or link that is in the way to `NAME.WHY-1` (or -2, ...) in the same folder.

    Returns:
        Its new path.
    """
    numbered = (path.with_name(f"{path.name}.{why}-{number}") for number in itertools.count(1))
    aside = next(other for other in numbered if not other.is_symlink() and not other.exists())
    path.rename(aside)
    return aside


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a library a private file to write by its name. Afterwards the file is synced and replaces `path`, so that a reader finds a
    complete file or the previous one, also after a power loss. When the writing fails, the file is removed."""
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
    """Remove a file, folder or link, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class Disk:
    """The real disk. A test passes one that stops, or forgets what was not synced, after any of its operations."""

    def open(self, path: Path) -> int:
        """A descriptor that appends to a file, which is created if it does not exist."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, descriptor: int, data: bytes) -> None:
        """Append all of the data to the file. It survives the death of this process."""
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    def sync(self, descriptor: int) -> None:
        """Make what was written survive a power loss."""
        os.fdatasync(descriptor)

    def truncate(self, descriptor: int, size: int) -> None:
        """Cut a file to this many bytes."""
        os.ftruncate(descriptor, size)

    def rename(self, source: Path, target: Path) -> None:
        """Replace `target` by `source` atomically."""
        os.replace(source, target)

    def sync_folder(self, folder: Path) -> None:
        """Make the names in a folder survive a power loss."""
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def write_whole(self, path: Path, data: bytes) -> None:
        """Replace the contents of a file atomically, and sync them.

        Raises:
            OSError: for example, the disk is full. The file then keeps its previous contents.
        """
        partial = path.with_name(path.name + PARTIAL)
        remove(partial)
        descriptor = self.open(partial)
        try:
            try:
                self.write(descriptor, data)
                self.sync(descriptor)
            finally:
                self.close(descriptor)
            self.rename(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        self.sync_folder(path.parent)
