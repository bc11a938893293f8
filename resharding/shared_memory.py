"""Full tensors through shared memory: one process writes a version of the weights, others of its node map it.

The memory is an anonymous file (`memfd_create`) that others open as `/proc/PID/fd/N`. It has no name in any folder, so
nothing is left behind when the publisher is killed; it is gone with the last process that has it open.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Iterable

import torch

from ..dataflow.errors import WeightSyncError
from .weights import TensorEntry, Weights

_ALIGNMENT = 64  # a view as any dtype needs its own size; a cache line is kinder to copies


class WeightPublisher:
    """Writes versions of the weights, each over the one before: receivers must be done before the next `publish`.

    Memory beyond the model's own: the published bytes, and one tensor at a time (none where it already lies
    contiguous in host memory).
    """

    def __init__(self) -> None:
        self._file: int | None = os.memfd_create("weft-weights", os.MFD_CLOEXEC)

    def publish(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> Weights:
        """Write full tensors, one after another, under their Hugging Face names; tied ones once.

        Args:
            named_tensors: on any device, of any dtype; may be a generator that gathers each tensor when its turn comes.
            version: policy version of these weights.

        Returns:
            The record that receivers need to map and check them.

        Raises:
            WeightSyncError: a name occurs twice, or this publisher is closed.
        """
        if self._file is None:
            raise WeightSyncError(f"weights version {version}: this publisher was closed")
        tensors: list[TensorEntry] = []
        names: set[str] = set()
        end, checksum = 0, 0
        for name, tensor in named_tensors:
            if name in names:
                raise WeightSyncError(f"weights version {version}: tensor {name!r} was published twice")
            names.add(name)
            entry = TensorEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _aligned(end))
            content = _host_bytes(tensor)
            _write(self._file, content, entry.offset)
            checksum = zlib.crc32(content, zlib.crc32(_header(entry), checksum))
            tensors.append(entry)
            end = entry.offset + len(content)
        os.ftruncate(self._file, end)
        location = f"/proc/{os.getpid()}/fd/{self._file}"
        return Weights(version, location, tuple(tensors), end, f"{checksum:08x}")

    def close(self) -> None:
        """Free the memory as soon as no receiver has it mapped."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        self.close()


def open_weights(weights: Weights) -> dict[str, torch.Tensor]:
    """Map published weights: tensors by name that lie in the shared memory itself, without a copy.

    Writes to them stay in this process. They are valid until the publisher writes its next version.

    Raises:
        WeightSyncError: the publisher has ended, or the bytes are not those that it published.
    """
    try:
        file = os.open(weights.location, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightSyncError(
            f"weights version {weights.version} cannot be opened at {weights.location} "
            f"({error.strerror}): has the process that published them ended?"
        ) from None
    try:
        found_bytes = os.fstat(file).st_size
        if found_bytes != weights.num_bytes:
            raise WeightSyncError(
                f"weights version {weights.version}: {weights.num_bytes} bytes were published, {found_bytes} found; "
                "was a later version published before this one was received?"
            )
        if not found_bytes:
            return {entry.name: _empty(entry) for entry in weights.tensors}
        # Private rather than read-only: torch wants writable memory, and no receiver may change what others read.
        memory = mmap.mmap(file, found_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(file)
    tensors = {entry.name: _view(memory, entry) for entry in weights.tensors}
    checksum = 0
    for entry in weights.tensors:
        checksum = zlib.crc32(_host_bytes(tensors[entry.name]), zlib.crc32(_header(entry), checksum))
    if f"{checksum:08x}" != weights.checksum:
        raise WeightSyncError(
            f"weights version {weights.version}: checksum {weights.checksum} was published, {checksum:08x} was received"
        )
    return tensors


def _header(entry: TensorEntry) -> bytes:
    """The checksum covers this, too: the same bytes under another name or shape are different weights."""
    return f"{entry.name}|{entry.dtype}|{entry.shape}".encode()


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _host_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, in host memory; copied only from a device or when they are not contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]


def _write(file: int, content: memoryview, offset: int) -> None:
    while content:  # one call writes at most 2 GiB
        written = os.pwrite(file, content, offset)
        content, offset = content[written:], offset + written


def _view(memory: mmap.mmap, entry: TensorEntry) -> torch.Tensor:
    count = torch.Size(entry.shape).numel()
    if not count:
        return _empty(entry)
    dtype = getattr(torch, entry.dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=entry.offset).reshape(entry.shape)


def _empty(entry: TensorEntry) -> torch.Tensor:
    return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
