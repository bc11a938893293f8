"""MappedMemory: what a publisher on this machine lets be read, as this process maps it."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch

from .buckets import SLOTS, Description


class MappedMemory:
    """The memory of a publisher's buckets, and those in which its parameters lie, as this process maps them."""

    def __init__(self, memories: Sequence[torch.Tensor]) -> None:
        self.memories = memories
        """[bytes] uint8, each."""
        self._views: Views | None = None

    def views(self, parts: Description) -> Views:
        """Of the entries that lie there now: the same object for as long as they are the same."""
        views = self._views
        if views is None or views.parts is not parts:
            self._views = views = Views(self.memories, parts)
        return views


class Views:
    """The elements of entries in memories of a publisher."""

    def __init__(self, memories: Sequence[torch.Tensor], parts: Description) -> None:
        self.parts = parts
        self._memories = memories
        self._elements: dict[int, torch.Tensor] = {}

    def elements(self, number: int) -> torch.Tensor:
        """Of the entry of this number, while its bucket is the one that came last."""
        if (known := self._elements.get(number)) is not None:
            return known
        entry = self.parts.entries[number]
        memory = self._memories[entry.memory]
        start = 0 if entry.memory else entry.bucket % SLOTS * (len(memory) // SLOTS)
        self._elements[number] = found = entry.view(memory, start)
        return found


_lock = threading.Lock()
"""Several threads of a process may take weights at once."""

_maps: dict[tuple[tuple[str, int, int], ...], MappedMemory] = {}
"""By path, bytes and inode of their files: another publisher, or new memory of the same one, may come to have the same paths."""


def map_files(files: Sequence[tuple[str, int]]) -> MappedMemory:
    """The memories of a publisher, which stay mapped from version to version for as long as it has them.

    Raises:
        OSError: one of them is not there any more.
    """
    key = tuple((path, num_bytes, os.stat(path).st_ino) for path, num_bytes in files)
    with _lock:
        if (found := _maps.get(key)) is None:
            for known in list(_maps):
                if not all(_is_there(path, inode) for path, _, inode in known):
                    del _maps[known]
            _maps[key] = found = MappedMemory([_map_file(path, num_bytes) for path, num_bytes in files])
    return found


def _is_there(path: str, inode: int) -> bool:
    try:
        return os.stat(path).st_ino == inode
    except OSError:
        return False


def _map_file(path: str, num_bytes: int) -> torch.Tensor:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Private rather than read-only: torch wants writable memory, and no receiver may change what others read.
        mapping: Any = mmap.mmap(file, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return torch.frombuffer(mapping, dtype=torch.uint8)
    finally:
        os.close(file)
