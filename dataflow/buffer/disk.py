"""Disk: the few operations on files that durability rests on, in one place, so that a test can fail each of them."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PAUSE_S = 1.0
"""Seconds between two tries of what did not fit on a disk."""
MAX_PAUSE_S = 3600.0
"""Longest wait for room on a disk."""
PARTIAL = ".partial"
"""What the name of a file that is being written ends in."""


def is_full(error: BaseException) -> bool:
    """Whether it was for want of room on a disk."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def make_folder(path: Path) -> None:
    """Make a folder of a run, and those above it that are missing: nobody else may look into them. A folder that exists stays as it is."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def make_file(path: Path) -> None:
    """Make an empty file that nobody else may read; whoever writes it opens it by its name."""
    remove(path)
    path.touch(mode=0o600)


def make_private(path: Path) -> None:
    """Take all rights from others, of what a library has made."""
    with suppress(PermissionError):  # it is somebody else's, who has given this process a right to it
        path.chmod(0o700 if path.is_dir() else 0o600)


def set_aside(path: Path, why: str) -> Path:
    """Rename what stands in the way, of whatever kind, to `NAME.WHY-1` (or -2, ...) beside it; returns its new path."""
    numbered = (path.with_name(f"{path.name}.{why}-{number}") for number in itertools.count(1))
    aside = next(other for other in numbered if not other.is_symlink() and not other.exists())
    path.rename(aside)
    return aside


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A private file for a library to write by its name. In the end it is synced and takes the place of `path`, so that a reader, and a
    power loss, find a whole file or the one before; where the writing fails, it is removed."""
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
    """Remove what has this name, of whatever kind it is; nothing may be there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class Disk:
    """The real disk. A test passes one that stops, or forgets what was not synced, after any of its operations."""

    def open(self, path: Path) -> int:
        """A descriptor that appends; the file is made when it is not there."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, descriptor: int, data: bytes) -> None:
        """All of the data, at the end of the file: it survives the death of this process."""
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    def sync(self, descriptor: int) -> None:
        """What was written survives the loss of power."""
        os.fdatasync(descriptor)

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def rename(self, source: Path, target: Path) -> None:
        """`target` is the old file or the new one at every moment, whole."""
        os.replace(source, target)

    def sync_folder(self, folder: Path) -> None:
        """Names given in the folder survive the loss of power."""
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def write_whole(self, path: Path, data: bytes) -> None:
        """Give a file its contents, synced: at every moment it is whole, or what it was before.

        Raises:
            OSError: the disk is full, say; the file is what it was before.
        """
        partial = path.with_name(path.name + PARTIAL)
        remove(partial)
        descriptor = self.open(partial)
        try:
            self.write(descriptor, data)
            self.sync(descriptor)
        except OSError:
            partial.unlink()
            raise
        finally:
            self.close(descriptor)
        self.rename(partial, path)
        self.sync_folder(path.parent)
