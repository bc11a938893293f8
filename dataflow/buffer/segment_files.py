"""The files that hold segments: how they are made, overwritten, recycled and evicted. `segments.py` says what they contain."""

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
FETCHED = "fetched"  # subfolder of a node's folder: messages fetched from other nodes
FREE = "free"  # subfolder of a node's folder: files without live rows, for writers to overwrite
NEW = ".new"  # suffix of a file that is being made
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
        """The pieces of a message: the buffers of its columns, not copied, between small pieces of metadata and padding."""
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
    """The pieces in order, in chunks for one system call each: at most `CHUNK_BYTES` bytes and 512 pieces."""
    chunk, left = [], CHUNK_BYTES
    for piece in pieces:
        start, size = 0, len(piece)
        while start < size:
            part = piece if start == 0 and size <= left else memoryview(piece)[start : start + left]
            chunk.append(part)
            start, left = start + len(part), left - len(part)
            if not left or len(chunk) == 512:
                yield chunk
                chunk, left = [], CHUNK_BYTES
    if chunk:
        yield chunk


def write_all(descriptor: int, chunk: list[Any], position: int) -> int:
    """Write a chunk at `position`; returns the position behind it. (`pwritev` may write less than it was given.)"""
    end = position + sum(map(len, chunk))
    while (position := position + os.pwritev(descriptor, chunk, position)) < end:
        chunk = [memoryview(b"".join(chunk))[position - end :]]
    return position


def new_file(path: Path, capacity: int, start: bytes) -> int:
    """Open a file of this size that begins with `start`: a free file that no process maps, or a fresh one.

    It gets its name after its start was written, so a reader never finds the contents of another file under the name.

    Args:
        path: its name.
        capacity: its size in bytes.
        start: the bytes of the schema and the marker that ends the stream.

    Returns:
        An open descriptor, which holds a shared lock.

    Raises:
        OSError: the disk is full.
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
                fcntl.flock(descriptor, fcntl.LOCK_SH)  # while this writer may write, no other takes it over
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
def full_disk_named(folder: Path, who: str, num_bytes: int) -> Iterator[None]:
    """Make the `OSError` of a full disk say who needed how many bytes, and where."""
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
    """Move a file to the free ones, and delete the oldest free files beyond `max_free_bytes` and `MAX_FREE_FILES`."""
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
    """Evict the oldest files of a node's folder from memory until the others fit `memory_bytes`. All stay readable.

    Pages that a process maps at the moment stay in memory, and so do files on tmpfs.

    Returns:
        Bytes of the files evicted; 0 when all fit.
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
    """The free files of a node's folder: last written (ns), size (bytes), path."""
    found = []
    with os.scandir(folder / FREE) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if not entry.name.endswith(NEW):
                    status = entry.stat()
                    found.append((status.st_mtime_ns, status.st_size, Path(entry.path)))
    return found


def with_file(path: Path, do: Callable[[int], Any]) -> Any:
    """`do(descriptor)`, or None when the file is gone: then nothing refers to it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return do(descriptor)
    finally:
        os.close(descriptor)


def _resident_since(descriptor: int) -> tuple[int, int] | None:
    """When a file was last written (ns), and its bytes without holes; None when it is not in memory."""
    status = os.fstat(descriptor)
    return (status.st_mtime_ns, min(status.st_size, status.st_blocks * 512)) if is_resident(descriptor) else None


def is_resident(descriptor: int) -> bool:
    """Whether the first page of a file, which every reader needs, is in memory. (`RWF_NOWAIT` would load it.)"""
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
