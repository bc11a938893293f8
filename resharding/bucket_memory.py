"""The memory of a publisher's buckets: on the host, where every process of the machine can map it, or on a device.

    HostBuckets     an anonymous file (`memfd_create`), mapped as /proc/PID/fd/N; gone with the last process that has it open or mapped
    DeviceBuckets   memory of a CUDA device; where receivers are to map it, with the handle by which CUDA opens it in another process

What is said of either travels as JSON: nothing is pickled.
"""

from __future__ import annotations

import base64
import mmap
import os
from typing import Any, Protocol

import torch

from ..dataflow.errors import WeightSyncError
from .channel import Transport


class BucketMemory(Protocol):
    """Memory that grows with the largest version."""

    def of(self, num_bytes: int) -> torch.Tensor:
        """[bytes] uint8: at least so many. What `of` gave before stays what it is until nobody uses it."""
        ...

    def said(self) -> dict[str, Any]:
        """What a receiver has to know to map the present memory."""
        ...

    def close(self) -> None:
        """Free it, as soon as nobody has it mapped."""
        ...


class HostBuckets:
    """Memory of the host."""

    def __init__(self) -> None:
        self._file: int | None = os.memfd_create("weft-weights", os.MFD_CLOEXEC)
        self._memory: torch.Tensor | None = None

    def of(self, num_bytes: int) -> torch.Tensor:
        """[bytes] uint8, whole pages."""
        assert self._file is not None
        num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._memory is None or num_bytes > len(self._memory):
            os.ftruncate(self._file, num_bytes)
            mapping: Any = mmap.mmap(self._file, num_bytes)
            self._memory = torch.frombuffer(mapping, dtype=torch.uint8)
        return self._memory

    def said(self) -> dict[str, Any]:
        """Path and bytes of the file, for processes of this machine and user."""
        assert self._memory is not None
        return {"path": f"/proc/{os.getpid()}/fd/{self._file}", "num_bytes": len(self._memory)}

    def close(self) -> None:
        """Free it with the last view on it."""
        self._memory = None
        if self._file is not None:
            os.close(self._file)
            self._file = None


class DeviceBuckets:
    """Memory of a device.

    Args:
        device: on which.
        mapped: receivers map it.
    """

    def __init__(self, device: torch.device, *, mapped: bool) -> None:
        self._device = device
        self._mapped = mapped
        self._memory: torch.Tensor | None = None
        self._said: dict[str, Any] = {}

    def of(self, num_bytes: int) -> torch.Tensor:
        """[bytes] uint8."""
        if self._memory is None or num_bytes > len(self._memory):
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._said = _said_of(self._memory) if self._mapped else {}
        return self._memory

    def said(self) -> dict[str, Any]:
        """Identity of the device, and the fields by which torch opens its memory in another process."""
        return self._said

    def close(self) -> None:
        """Free it."""
        self._memory = None


def device_of(transport: Transport) -> torch.device | None:
    """Where this process has the buckets of a transport; None: on the host.

    Raises:
        WeightSyncError: they are to lie on a CUDA device, and torch sees none.
    """
    if transport in ("auto", "gloo"):
        return None
    if not torch.cuda.is_available():
        raise WeightSyncError(
            f'transport="{transport}" moves weights from GPU to GPU, and torch sees none; take "auto"'
        )
    return torch.device("cuda", torch.cuda.current_device())


def opened(said: dict[str, Any]) -> torch.Tensor:
    """[bytes] uint8: the device memory of a publisher, in this process. It is mapped until the last view on it is gone.

    Raises:
        OSError: this process does not see the device, or cannot open its memory.
    """
    seen = [str(torch.cuda.get_device_properties(n).uuid) for n in range(torch.cuda.device_count())]
    if said["device"] not in seen:
        raise OSError(
            None,
            f'this process does not see its GPU; choose transport="nccl" or "auto", GPUs here: {seen}',
            said["device"],
        )
    fields = [base64.b64decode(field["bytes"]) if isinstance(field, dict) else field for field in said["fields"]]
    torch.cuda.init()
    try:
        storage = torch.UntypedStorage._new_shared_cuda(seen.index(said["device"]), *fields[1:])
    except RuntimeError as error:
        raise OSError(None, str(error).partition("\n")[0], said["device"]) from None
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _said_of(memory: torch.Tensor) -> dict[str, Any]:
    """`torch.multiprocessing` pickles the same fields (`reductions.py`: `reduce_tensor`, `rebuild_cuda_tensor`)."""
    fields = [
        {"bytes": base64.b64encode(field).decode()} if isinstance(field, bytes) else field
        for field in memory.untyped_storage()._share_cuda_()
    ]
    return {"device": str(torch.cuda.get_device_properties(memory.device).uuid), "fields": fields}
