"""SharedMemory: host memory that other processes of this machine can map and read in place.

The memory is an anonymous file (`memfd_create`) that others open as `/proc/PID/fd/N`. It has no
name in any folder and no limit besides host memory. It is freed when the last process closes and
unmaps it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

_ALIGNMENT = 64
"""[bytes] A cache line: each tensor begins on one."""


class MemoryPlace(NamedTuple):
    """Position of a tensor in memory that other processes can map."""

    path: str
    """Path of the file, for processes of this machine and user."""
    num_bytes: int
    """Size of the whole file."""
    offset: int
    """[bytes] Offset of the tensor's first element."""


class SharedMemory:
    """Memory for consecutive tensors. It lives as long as this object or any of its tensors.

    Args:
        num_bytes: total size of all tensors, each rounded up (`room`).

    >>> memory = SharedMemory(SharedMemory.room([(2, 3)], torch.float32))
    >>> tensor = memory.empty((2, 3), torch.float32)
    >>> place = place_of(tensor[1:])
    >>> place.offset, place.num_bytes
    (12, 64)
    """

    def __init__(self, num_bytes: int) -> None:
        file = os.memfd_create("weft-parameters", os.MFD_CLOEXEC)
        self.num_bytes = max(num_bytes, _ALIGNMENT)
        os.ftruncate(file, self.num_bytes)
        self._memory = mmap.mmap(file, self.num_bytes)
        # Tensors keep the mapping alive, and readers open the file by its path.
        weakref.finalize(self._memory, os.close, file)
        self._taken = 0
        start = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        with _starts_lock:
            _starts[self._memory] = (
                start,
                MemoryPlace(f"/proc/{os.getpid()}/fd/{file}", self.num_bytes, 0),
            )

    @staticmethod
    def room(shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> int:
        """[bytes] Memory that tensors of these shapes take."""
        return sum(_rounded(torch.Size(shape).numel() * dtype.itemsize) for shape in shapes)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros in this memory. Each tensor has a separate storage.

        Raises:
            ValueError: there is not enough room left.
        """
        numel = torch.Size(shape).numel()
        if not numel:
            return torch.empty(tuple(shape), dtype=dtype)
        begin, self._taken = self._taken, self._taken + _rounded(numel * dtype.itemsize)
        if self._taken > self.num_bytes:
            raise ValueError(
                f"a memory of {self.num_bytes} bytes has no room for {tuple(shape)} of {dtype}"
            )
        buffer: Any = self._memory
        return torch.frombuffer(buffer, dtype=dtype, count=numel, offset=begin).view(tuple(shape))


def place_of(tensor: torch.Tensor) -> MemoryPlace | None:
    """Return the position of a contiguous tensor in a `SharedMemory` of this process, or None."""
    if tensor.device.type != "cpu" or not tensor.numel() or not tensor.is_contiguous():
        return None
    address = tensor.data_ptr()
    with _starts_lock:
        starts = list(_starts.values())
    for start, place in starts:
        if 0 <= address - start < place.num_bytes:
            return place._replace(offset=address - start)
    return None


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


_starts: weakref.WeakKeyDictionary[mmap.mmap, tuple[int, MemoryPlace]] = weakref.WeakKeyDictionary()
"""Address and place of each live mapping, including mappings that only tensors keep alive."""
_starts_lock = threading.Lock()
"""One thread may create memory while another calls `place_of`."""


# Copies in host memory, and the thread budget of a transfer.


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` over `target`, of the same shape. Host memory is copied by this thread alone.

    torch splits a copy over all cores and waits for each. Both sides of a transfer run at once, so
    a core that the other side occupies delays the whole copy. With two ranks publishing on two
    cores, a receiver with two threads took twice as long as with one.
    """
    if target.is_cpu and source.is_cpu and (dtype := target.dtype) == source.dtype:
        bits = _BITS.get(dtype.itemsize)
        if bits is not None:
            np.copyto(_array(target, bits), _array(source, bits))
            return
    target.copy_(source)


def _array(tensor: torch.Tensor, bits: torch.dtype) -> np.ndarray:
    if tensor.requires_grad:
        tensor = tensor.detach()
    return (tensor if tensor.dtype is bits else tensor.view(bits)).numpy()


@contextlib.contextmanager
def threads_beside(others: int) -> Iterator[None]:
    """Limit torch in this thread, so that each of `others` processes on this machine keeps a core.

    >>> before = torch.get_num_threads()
    >>> with threads_beside(10_000):
    ...     torch.get_num_threads()
    1
    >>> torch.get_num_threads() == before
    True
    """
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(before, len(os.sched_getaffinity(0)) - others)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
