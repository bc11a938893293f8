"""Disk: the few operations on files that durability rests on, in one place, so that a test can fail each of them."""

from __future__ import annotations

import os
from pathlib import Path


class Disk:
    """The real disk. A test passes one that stops, or forgets what was not synced, after any of its operations."""

    def open(self, path: Path) -> int:
        """A descriptor that appends; the file is made when it is not there."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)

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
