"""Names of the files and folders in a run directory, `runs/NAME/`, and durable file operations."""

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
"""The graphs, as JSON and as a Mermaid diagram."""
STREAM, PARQUET = ".arrows", ".parquet"
"""Suffixes of tables, during the run and after it."""
METRICS, TIMELINE, PROCESSES = "metrics", "timeline", "processes"
"""Tables, without their suffixes; `processes` always stays a stream."""
SAMPLES = "samples"
SAMPLES_ARCHIVE = "samples.parquet"
"""All samples, if they were archived."""
ALERTS = "alerts.jsonl"
LIVE = "live.json"
"""Current state of the run."""
STOP, STACKS = "stop.json", "stacks.json"
"""Requests to the driver."""
LOCK = "lock"
"""Lock files of current and earlier drivers."""
CHECKPOINTS = "checkpoints"
SKIPPED = "skipped"
"""Rows of bad optimizer steps, by worker group."""
TRACKERS = "trackers"
"""State of each tracker: the metrics that it has sent."""
LOGS = "logs"
BUFFER = "buffer"
"""The sample buffer. It contains:"""
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
"""Files that identify a run directory. `config.json` does not, because model folders also have
one."""


def is_run(folder: Path) -> bool:
    """Return whether a folder has a run or a part of one; False if it is missing or not
    readable."""
    with suppress(OSError):
        return any(list(folder.glob(name)) for name in LEFT)
    return False


# Disk


PAUSE_S = 1.0
"""[s] Pause between two attempts to write to a full disk."""
MAX_PAUSE_S = 3600.0
"""[s] Longest wait for space on a disk."""
PARTIAL = ".partial"
"""Suffix of files that are being written."""


def is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, readable only by the owner."""
    if not path.is_dir():
        # `mkdir(parents=True)` would give the parents the default rights.
        make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def make_file(path: Path) -> None:
    """Make an empty file that only the owner can read, for a library that opens it by name."""
    remove(path)
    path.touch(mode=0o600)


def make_private(path: Path) -> None:
    """Remove all rights of other users from a file or folder that a library made."""
    with suppress(PermissionError):  # another user owns it and gave this process access
        path.chmod(0o700 if path.is_dir() else 0o600)


def set_aside(path: Path, why: str) -> Path:
    """Rename a file, folder or link to `NAME.WHY-1` (or -2, ...) in the same folder. Return its new
    path."""
    numbered = (path.with_name(f"{path.name}.{why}-{number}") for number in itertools.count(1))
    # `exists` is false for a link whose target is gone.
    aside = next(other for other in numbered if not other.is_symlink() and not other.exists())
    path.rename(aside)
    return aside


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace `path` atomically by a file that a library writes under the yielded, private name.

    Readers find either the old or the complete new file, even after a power loss. If writing fails,
    the new file is removed.
    """
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
    # `rmtree` refuses links, and the target of a link must stay.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class Disk:
    """The real disk. Durability depends on these operations; tests replace them with failing
    ones."""

    def open(self, path: Path) -> int:
        """Open a file for appending; create it if needed. Return its descriptor."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, descriptor: int, data: bytes) -> None:
        """Append all of the data to the file. It survives the death of this process."""
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    def sync(self, descriptor: int) -> None:
        """Make written data survive a power loss."""
        os.fdatasync(descriptor)

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def rename(self, source: Path, target: Path) -> None:
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

    def write_new(self, path: Path, chunks: Iterable[bytes]) -> None:
        """Write a new file and sync it. A file of that name is removed."""
        remove(path)
        descriptor = self.open(path)
        try:
            for data in chunks:
                self.write(descriptor, data)
            self.sync(descriptor)
        finally:
            self.close(descriptor)

    def write_whole(self, path: Path, data: bytes | Iterable[bytes]) -> None:
        """Replace the contents of a file atomically, and sync them. Raises OSError if, for example,
        the disk is full. The file keeps its previous contents."""
        partial = path.with_name(path.name + PARTIAL)
        try:
            self.write_new(partial, [data] if isinstance(data, bytes) else data)
            self.rename(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        self.sync_folder(path.parent)
