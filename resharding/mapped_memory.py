"""Memory that other processes map: host memory of this machine, and memory of a GPU."""

from __future__ import annotations

import base64
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..dataflow.errors import WeightSyncError
from .bucket_group import Transport

ALIGNMENT = 64
"""[bytes] The size of a cache line. Each tensor begins at a multiple of it."""


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


# Memory of a GPU


def device_of(transport: Transport) -> torch.device | None:
    """Return the device where this process keeps buckets for a transport; None for the host."""
    if transport in ("auto", "gloo"):
        return None
    if not torch.cuda.is_available():
        raise WeightSyncError(
            f'transport="{transport}" moves weights from GPU to GPU, and torch finds none; use "auto"'
        )
    return torch.device("cuda", torch.cuda.current_device())


def release_device_memory(device: torch.device) -> None:
    """Return memory that torch keeps for reuse to the device, where other processes may need it."""
    if device.type == "cuda":
        torch.cuda.ipc_collect()  # memory that receivers have unmapped
        # A workspace of cuBLAS may lie in a segment as large as an embedding, and keep all of it.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def seen_devices() -> list[str]:
    """Return the UUIDs of the GPUs that this process sees."""
    count = torch.cuda.device_count()
    return [str(torch.cuda.get_device_properties(number).uuid) for number in range(count)]


def open_device_memory(said: dict[str, Any]) -> torch.Tensor:
    """Map a publisher's device memory, as [bytes] uint8. It stays mapped while views of it exist.
    Raises OSError if this process does not see the device or cannot map its memory."""
    seen = seen_devices()
    if said["device"] not in seen:
        raise OSError(
            None,
            f"this process does not see its GPU; GPUs here: {seen}",
            said["device"],
        )
    fields = [
        base64.b64decode(field["bytes"]) if isinstance(field, dict) else field
        for field in said["fields"]
    ]
    # `_new_shared_cuda` does not initialize CUDA by itself.
    torch.cuda.init()
    try:
        # The first field is the device number in the publisher's process, which may differ here.
        storage = torch.UntypedStorage._new_shared_cuda(seen.index(said["device"]), *fields[1:])
    except RuntimeError as error:
        raise OSError(None, str(error).partition("\n")[0], said["device"]) from None
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def device_mapping(memory: torch.Tensor) -> dict[str, Any]:
    # The fields that `torch.multiprocessing` pickles (`reductions.py`: `reduce_tensor`,
    # `rebuild_cuda_tensor`).
    fields = [
        {"bytes": base64.b64encode(field).decode()} if isinstance(field, bytes) else field
        for field in memory.untyped_storage()._share_cuda_()
    ]
    return {"device": str(torch.cuda.get_device_properties(memory.device).uuid), "fields": fields}


# Shared memory: host memory that other processes on this machine can map and read in place. It is
# an anonymous file (`memfd_create`) that other processes open as `/proc/PID/fd/N`. No folder lists
# it, and only host memory limits its size. The kernel frees it when the last process closes and
# unmaps it.


class MemoryPlace(NamedTuple):
    """Position of a tensor in memory that other processes of this user on this machine can map."""

    path: str
    num_bytes: int
    offset: int


class SharedMemory:
    """Memory for several consecutive tensors; `room` computes its size. It lives as long as this
    object or any of its tensors.

    >>> memory = SharedMemory(SharedMemory.room([(2, 3)], torch.float32))
    >>> tensor = memory.empty((2, 3), torch.float32)
    >>> place = place_of(tensor[1:])
    >>> place.offset, place.num_bytes
    (12, 64)
    """

    def __init__(self, num_bytes: int) -> None:
        file = os.memfd_create("weft-parameters", os.MFD_CLOEXEC)
        # An empty file cannot be mapped.
        self.num_bytes = max(num_bytes, ALIGNMENT)
        os.ftruncate(file, self.num_bytes)
        self._memory = mmap.mmap(file, self.num_bytes)
        # Tensors keep the mapping alive, and readers open the file by its path.
        weakref.finalize(self._memory, os.close, file)
        self._taken = 0
        start = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        place = MemoryPlace(f"/proc/{os.getpid()}/fd/{file}", self.num_bytes, 0)
        self.place = place
        with _starts_lock:
            _starts[self._memory] = start, place

    @property
    def content(self) -> torch.Tensor:
        """All of this memory, as [bytes] uint8."""
        return torch.frombuffer(self._memory, dtype=torch.uint8)

    @staticmethod
    def room(shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> int:
        """[bytes] Return the memory that tensors of these shapes take."""
        return sum(aligned(torch.Size(shape).numel() * dtype.itemsize) for shape in shapes)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros in this memory, with its own storage."""
        numel = torch.Size(shape).numel()
        # `frombuffer` rejects a count of 0.
        if not numel:
            return torch.empty(tuple(shape), dtype=dtype)
        begin, self._taken = self._taken, self._taken + aligned(numel * dtype.itemsize)
        if self._taken > self.num_bytes:
            raise ValueError(
                f"a memory of {self.num_bytes} bytes has no room for {tuple(shape)} of {dtype}"
            )
        buffer: Any = self._memory
        return torch.frombuffer(buffer, dtype=dtype, count=numel, offset=begin).view(tuple(shape))


def place_of(tensor: torch.Tensor) -> MemoryPlace | None:
    """Return the place of a contiguous tensor in a `SharedMemory` of this process, or None."""
    if tensor.device.type != "cpu" or not tensor.numel() or not tensor.is_contiguous():
        return None
    address = tensor.data_ptr()
    with _starts_lock:
        starts = list(_starts.values())
    for start, place in starts:
        if 0 <= address - start < place.num_bytes:
            return place._replace(offset=address - start)
    return None


_starts: weakref.WeakKeyDictionary[mmap.mmap, tuple[int, MemoryPlace]] = weakref.WeakKeyDictionary()
"""For each live mapping, its address and place. Includes mappings that only tensors keep alive."""
_starts_lock = threading.Lock()
"""One thread may create memory while another calls `place_of`."""
