"""The files that segments lie in: made, overwritten, recycled, evicted. `segments.py` says what is in them and why."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from .disk import make_folder

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
CHUNK_BYTES = 1 << 20  # hashed and then written while it is in the core's cache
FETCHED = "fetched"  # the folder, inside a node's own, of the messages that were fetched from other nodes
FREE = "free"  # the folder, inside a node's own, of the files that nobody needs, for writers to overwrite
NEW = ".new"  # ends the name of a file that is being made
MAX_FREE_BYTES = 4 * (64 << 20)
MAX_FREE_FILES = 64

_libc = ctypes.CDLL(None)


class StreamFile:
    """The open file of one schema of a writer, and what Arrow needs to make its messages."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.descriptor, self.path, self.sequence, self.end, self.capacity = -1, Path(), -1, 0, 0
        self._pieces = _Pieces()
        self._writer = pa.ipc.new_stream(pa.PythonFile(self._pieces, "w"), schema)
        self.message(pa.RecordBatch.from_pylist([], schema=schema))  # Arrow writes the schema with the first message

    def message(self, record: pa.RecordBatch) -> list[Any]:
        """The message in pieces: its columns' own buffers, not copied, between small pieces of metadata and padding."""
        self._writer.write_batch(record)
        return self._pieces.take()

    def leave(self) -> None:
        if self.descriptor >= 0:
            os.ftruncate(self.descriptor, self.end + len(END_OF_STREAM))
            os.close(self.descriptor)
            self.descriptor = -1


class _Pieces:
    """A file object that keeps what Arrow writes."""

    closed = False

    def __init__(self) -> None:
        self._pieces: list[Any] = []

    def write(self, piece: Any) -> int:
        self._pieces.append(piece)
        return len(piece)

    def take(self) -> list[Any]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def flush(self) -> None: ...

    def close(self) -> None: ...


def chunks(pieces: Iterable[Any]) -> Iterator[list[Any]]:
    """The pieces in order, cut and gathered to at most `CHUNK_BYTES` and 512 pieces for one call of the kernel."""
    chunk, room = [], CHUNK_BYTES
    for piece in pieces:
        start, size = 0, len(piece)
        while start < size:
            part = piece if start == 0 and size <= room else memoryview(piece)[start : start + room]
            chunk.append(part)
            start, room = start + len(part), room - len(part)
            if not room or len(chunk) == 512:
                yield chunk
                chunk, room = [], CHUNK_BYTES
    if chunk:
        yield chunk


def write_all(descriptor: int, chunk: list[Any], position: int) -> int:
    """Write at `position`; returns where it ends. (`pwritev` may write less than it was given.)"""
    end = position + sum(map(len, chunk))
    while (position := position + os.pwritev(descriptor, chunk, position)) < end:
        chunk = [memoryview(b"".join(chunk))[position - end :]]
    return position


def new_file(path: Path, capacity: int, start: bytes) -> int:
    """Open a file of this size that begins with `start`: a free one when there is one that nobody maps, or a fresh one.

    It comes to its name when its start is written: at no moment does a reader find a file of another meaning there.
    """
    make_folder(path.parent / FREE)
    for _, _, free in sorted(_free_files(path.parent), key=lambda f: abs(f[1] - capacity)):
        try:
            descriptor = os.open(free, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), free.stat()):  # else another writer was quicker
                os.ftruncate(descriptor, capacity)
                write_all(descriptor, [start], 0)
                os.rename(free, path)
                fcntl.flock(descriptor, fcntl.LOCK_SH)  # as long as this writer may write, nobody takes it over
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    fresh = path.parent / FREE / f"{path.name}{NEW}"
    descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        os.ftruncate(descriptor, capacity)
        write_all(descriptor, [start], 0)
        os.rename(fresh, path)
    except BaseException:
        os.close(descriptor)
        fresh.unlink(missing_ok=True)
        raise
    return descriptor


@contextmanager
def room_named(folder: Path, who: str, num_bytes: int) -> Iterator[None]:
    """An `OSError` for want of room says who needed how much, and where."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        free = shutil.disk_usage(folder).free
        raise OSError(
            error.errno,
            f"{error.strerror}: {who} needs {num_bytes} bytes in folder {folder}, where {free} bytes are free",
        ) from None


def recycle(path: Path, max_free_bytes: int) -> None:
    """Leave a file to whoever needs one next, and delete the oldest free files beyond the bounds."""
    try:
        make_folder(path.parent / FREE)
        os.rename(path, path.parent / FREE / path.name)
    except FileNotFoundError:
        return
    free = sorted(_free_files(path.parent))
    num_bytes = sum(size for _, size, _ in free)
    for left, (_, size, oldest) in zip(range(len(free), 0, -1), free, strict=True):
        if num_bytes <= max_free_bytes and left <= MAX_FREE_FILES:
            break
        oldest.unlink(missing_ok=True)
        num_bytes -= size


def spill(folder: Path, memory_bytes: int) -> int:
    """Evict the oldest files of a node's folder from memory, until the others fit `memory_bytes`; they stay readable.

    Pages that a process maps at the moment stay. A file in memory (tmpfs) cannot be evicted.

    Returns: bytes of the files evicted; 0 when nothing had to go.
    """
    resident = []
    for path in [*folder.glob("*.arrows"), *(folder / FETCHED).glob("*/*/*")]:
        if found := with_file(path, _resident_since):
            resident.append((*found, path))
    excess = sum(size for _, size, _ in resident) - memory_bytes
    evicted = 0
    for _, size, path in sorted(resident):
        if evicted >= excess:
            break
        with_file(path, _evict)
        evicted += size
    return evicted


def _free_files(folder: Path) -> list[tuple[int, int, Path]]:
    """When each free file of a node's folder was last written to, its size, its path."""
    found = []
    with os.scandir(folder / FREE) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if not entry.name.endswith(NEW):
                    status = entry.stat()
                    found.append((status.st_mtime_ns, status.st_size, Path(entry.path)))
    return found


def with_file(path: Path, do: Callable[[int], Any]) -> Any:
    """`do(descriptor)`, or None when the file is gone, which means that nobody needs it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return do(descriptor)
    finally:
        os.close(descriptor)


def _resident_since(descriptor: int) -> tuple[int, int] | None:
    """When a file that is in memory was last written to, and the bytes of it that are not holes."""
    status = os.fstat(descriptor)
    return (status.st_mtime_ns, min(status.st_size, status.st_blocks * 512)) if is_resident(descriptor) else None


def is_resident(descriptor: int) -> bool:
    """Whether the first page of a file, which every reader needs, is in memory. (`RWF_NOWAIT` would bring it in.)"""
    if not os.fstat(descriptor).st_size:
        return False
    with mmap.mmap(descriptor, 1, access=mmap.ACCESS_READ) as page:
        view = np.frombuffer(page, np.uint8)
        found = ctypes.c_ubyte()
        failed = _libc.mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(1), ctypes.byref(found))
        del view
    return bool(failed or found.value & 1)


def _evict(descriptor: int) -> None:
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
