"""Buckets: the parts of a version in transfer order, cut so that each bucket fits into its memory.

    parts of a rank      | embed_tokens 80 MB                    | q_proj 2 MB | k_proj 2 MB | ...
    buckets of 16 MB     | rows 0-5461 | rows 5461-10922 | ...   | rest of the rows, q_proj, ...

A bucket is a list of entries. An entry names a box of a tensor, its dtype, and the position of its
bytes. Both sides walk the same list. Receivers read a part in place if they can map its memory
(`memory.py`). All other parts are copied into the bucket memory, which successive buckets reuse.

Code that transforms the bytes of an entry, such as a delta, belongs in two places:
`Transfer._fill`, where the publisher writes an entry into its bucket, and
`IncomingWeights._elements`, where the receiver reads it.
"""

from __future__ import annotations

import base64
import functools
import json
import math
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any, NamedTuple, Protocol

import torch

from ..dataflow.errors import WeightSyncError
from .connection import Transport
from .layout import Box, Held, Layout, Piece, Place, RankLayout, Where
from .memory import MemoryPlace, place_of
from .weights import CHECKSUM_MODULUS, Part, tensor_factor

BUCKET_BYTES = 16 << 20
"""[bytes] Default size of a bucket."""

SLOTS = 2
"""Buckets in memory at the same time: the publisher writes one while receivers read the other."""

_ALIGNMENT = 64  # one cache line; a view as any dtype needs at least the size of its element


@dataclass(frozen=True, slots=True)
class Entry:
    """A box of a tensor, and the position of its elements in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Box
    bucket: int
    """Index of the bucket."""
    offset: int
    """[bytes] Offset from the start of the bucket, or of the mapped memory."""
    memory: int = 0
    """0 for bucket memory; otherwise the number of the memory that holds the elements in place."""

    @property
    def num_bytes(self) -> int:
        return self.box.numel * getattr(torch, self.dtype).itemsize

    def view(self, memory: torch.Tensor, start: int) -> torch.Tensor:
        """Return the elements as a view of `memory`.

        Args:
            memory: [bytes] uint8, the bucket memory or the memory that holds the elements in place.
            start: [bytes] where the bucket begins; 0 for elements held in place.
        """
        first = start + self.offset
        return (
            memory[first : first + self.num_bytes].view(getattr(torch, self.dtype)).view(self.box.shape)
        )


class Cutter:
    """Cut versions into buckets. Consecutive versions with the same parts get the same entries.

    Args:
        bucket_bytes: bucket size. A larger element gets a bucket to itself.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._forms: list[_Form] = []
        self._entries: list[tuple[Entry, int, tuple[slice, ...] | None]] = []
        """Entry, number of its part, and index into the part (None for all of it)."""
        self.description = described(())
        """Description of the last version's entries."""

    def cut(self, parts: Iterable[Part]) -> list[tuple[Entry, torch.Tensor]]:
        """Return the entries in bucket order with their elements. Large parts are cut into several.

        Raises:
            WeightSyncError: a part occurs twice.
        """
        given = list(parts)
        forms = [_Form.of(part) for part in given]
        if forms != self._forms:
            memories = {(f.place.path, f.place.num_bytes): None for f in forms if f.place is not None}
            numbers = {memory: number for number, memory in enumerate(memories, 1)}
            self._entries = list(_entries_of(forms, self._bucket_bytes, numbers))
            self._forms = forms
            self.description = described((entry for entry, _, _ in self._entries), memories)
        tensors = [part.tensor.detach() for part in given]
        return [
            (entry, tensors[number] if index is None else tensors[number][index])
            for entry, number, index in self._entries
        ]


class _Form(NamedTuple):
    """A part without its elements."""

    name: str
    box: Box
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: MemoryPlace | None
    """Where other processes can read the part as it travels."""

    @classmethod
    def of(cls, part: Part) -> _Form:
        dtype = part.dtype or part.tensor.dtype
        place = place_of(part.tensor) if dtype == part.tensor.dtype else None
        return cls(part.name, part.box, part.shape, dtype, place)

    def offset_of(self, box: Box) -> int:
        """[bytes] Offset in the part's memory of a box that is contiguous in the part."""
        assert self.place is not None
        starts = [start - first for start, first in zip(box.starts, self.box.starts, strict=True)]
        rows = [math.prod(self.box.shape[dim + 1 :]) for dim in range(len(starts))]
        return self.place.offset + self.dtype.itemsize * sum(map(mul, starts, rows))


def _entries_of(
    forms: Iterable[_Form], bucket_bytes: int, memories: Mapping[tuple[str, int], int]
) -> Iterator[tuple[Entry, int, tuple[slice, ...] | None]]:
    seen: set[tuple[str, Box]] = set()
    bucket = end = 0
    for number, form in enumerate(forms):
        name, whole, shape, dtype, place = form
        if (name, whole) in seen:
            raise WeightSyncError(f"{whole} of tensor {name!r} was published twice")
        seen.add((name, whole))
        for box in _boxes_of(whole, max(1, bucket_bytes // dtype.itemsize)):
            num_bytes = box.numel * dtype.itemsize
            if end and _aligned(end) + num_bytes > bucket_bytes:
                bucket, end = bucket + 1, 0
            start = _aligned(end)
            memory = 0 if place is None else memories[place.path, place.num_bytes]
            offset = start if place is None else form.offset_of(box)
            entry = Entry(name, str(dtype).removeprefix("torch."), shape, box, bucket, offset, memory)
            yield entry, number, None if box == whole else box.within(whole)
            end = start + num_bytes


def _boxes_of(box: Box, max_elements: int) -> Iterator[Box]:
    """Cut a box along its first dimensions into contiguous boxes of limited size."""
    if box.numel <= max_elements:
        yield box
        return
    dim = next(d for d, extent in enumerate(box.shape) if extent > 1)
    row = box.numel // box.shape[dim]
    step = max(1, max_elements // row)
    for start in range(box.starts[dim], box.stops[dim], step):
        starts, stops = list(box.starts), list(box.stops)
        starts[dim], stops[dim] = start, min(start + step, box.stops[dim])
        yield from _boxes_of(Box(tuple(starts), tuple(stops)), max_elements)


@dataclass(frozen=True, eq=False)
class Description:
    """The entries of one publisher. Unchanged entries keep their object, so receivers plan once."""

    entries: tuple[Entry, ...]
    numbers: dict[str, list[int]]
    """Tensor name -> indices of its entries, in the order of its pieces in the layout."""
    buckets: tuple[tuple[int, ...], ...]
    """Indices of the entries of each bucket."""
    memories: tuple[tuple[str, int], ...]
    """Path and bytes of each memory that holds entries in place."""


def checksum_of(entries: Iterable[Entry], sums: Iterable[int]) -> int:
    """Return the checksum over one rank's entries. It depends on names, dtypes, shapes and bits.

    Args:
        entries: entries of one rank.
        sums: `box_sum` of each entry.

    Returns:
        A number in [0, 2^64). Checksums of ranks add up modulo 2^64.
    """
    found = (
        value * tensor_factor(e.name, e.dtype, e.shape) for e, value in zip(entries, sums, strict=True)
    )
    return sum(found) % CHECKSUM_MODULUS


def described(entries: Iterable[Entry], memories: Iterable[tuple[str, int]] = ()) -> bytes:
    """Serialize entries as JSON, with the shared-memory files that hold some of their data."""
    fields = [
        [e.name, e.dtype, e.shape, e.box.starts, e.box.stops, e.bucket, e.offset, e.memory]
        for e in entries
    ]
    return json.dumps([fields, [*memories]], separators=(",", ":")).encode()


def fingerprint(description: bytes) -> str:
    """Return an identifier, so that a receiver can recognize a description that it already has."""
    return f"{zlib.crc32(description):08x}{len(description):x}"


@functools.lru_cache(maxsize=64)
def read_description(description: bytes) -> Description:
    """Parse the output of `described`."""
    fields, memories = json.loads(description)
    entries = tuple(
        Entry(name, dtype, tuple(shape), Box(tuple(starts), tuple(stops)), bucket, offset, memory)
        for name, dtype, shape, starts, stops, bucket, offset, memory in fields
    )
    numbers: dict[str, list[int]] = {}
    buckets: list[list[int]] = [[] for _ in range(1 + max((e.bucket for e in entries), default=-1))]
    for number, entry in enumerate(entries):
        numbers.setdefault(entry.name, []).append(number)
        buckets[entry.bucket].append(number)
    return Description(
        entries,
        numbers,
        tuple(map(tuple, buckets)),
        tuple((path, num_bytes) for path, num_bytes in memories),
    )


@functools.lru_cache(maxsize=8)
def layout_of(ranks: tuple[Description, ...]) -> Layout:
    """Return the trainer's layout, from the descriptions of its ranks.

    Raises:
        WeightSyncError: the ranks together do not publish each element of each tensor exactly once.
    """
    layout = Layout.of_ranks([_rank_layout(rank.entries) for rank in ranks], "the trainer")
    for name, tensor in layout.tensors.items():
        given = sum(box.numel for boxes in tensor.boxes for box in boxes)
        if given != (whole := Box.full(tensor.shape).numel):
            raise WeightSyncError(
                f"the ranks publish {given} elements of tensor {name!r}, which has {whole}"
            )
    return layout


def _rank_layout(entries: Sequence[Entry]) -> RankLayout:
    pieces: dict[str, list[Piece]] = {}
    first: dict[str, Entry] = {}
    for entry in entries:
        first.setdefault(entry.name, entry)
        strides = torch.empty(entry.box.shape, device="meta").stride()
        place = Place("", entry.offset // getattr(torch, entry.dtype).itemsize, strides)
        pieces.setdefault(entry.name, []).append(Piece(entry.box, place))
    held = {name: Held(e.shape, e.dtype, tuple(pieces[name])) for name, e in first.items()}
    return RankLayout(Where(), held)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


# Bucket memory
#
#     HostBuckets     an anonymous file (`memfd_create`), mapped as /proc/PID/fd/N
#     DeviceBuckets   memory of a CUDA device, with the IPC handle if receivers map it
#
# Receivers learn about either as JSON; nothing is pickled.


class BucketMemory(Protocol):
    """Memory that grows to fit the largest version."""

    def of(self, num_bytes: int) -> torch.Tensor:
        """[bytes] uint8, at least `num_bytes`. Earlier memory stays valid while it is used."""
        ...

    def said(self) -> dict[str, Any]:
        """Return the information that a receiver needs to map the current memory."""
        ...

    def close(self) -> None:
        """Free the memory once no process maps it."""
        ...


class HostBuckets:
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
        """Path and size of the file, for processes of this machine and user."""
        assert self._memory is not None
        return {"path": f"/proc/{os.getpid()}/fd/{self._file}", "num_bytes": len(self._memory)}

    def close(self) -> None:
        """Free the memory with the last view of it."""
        self._memory = None
        if self._file is not None:
            os.close(self._file)
            self._file = None


class DeviceBuckets:
    """Memory of a device.

    Args:
        device: device that holds the buckets.
        mapped: receivers map the memory.
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
        """Identity of the device, and the fields with which torch maps its memory elsewhere."""
        return self._said

    def close(self) -> None:
        self._memory = None


def device_of(transport: Transport) -> torch.device | None:
    """Return the device of a transport's buckets in this process, or None for the host.

    Raises:
        WeightSyncError: the transport needs a CUDA device, and torch finds none.
    """
    if transport in ("auto", "gloo"):
        return None
    if not torch.cuda.is_available():
        raise WeightSyncError(
            f'transport="{transport}" moves weights from GPU to GPU, and torch finds none; use "auto"'
        )
    return torch.device("cuda", torch.cuda.current_device())


def opened(said: dict[str, Any]) -> torch.Tensor:
    """Open a publisher's device memory, as [bytes] uint8. Views keep it mapped.

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
    fields = [
        base64.b64decode(field["bytes"]) if isinstance(field, dict) else field for field in said["fields"]
    ]
    torch.cuda.init()
    try:
        storage = torch.UntypedStorage._new_shared_cuda(seen.index(said["device"]), *fields[1:])
    except RuntimeError as error:
        raise OSError(None, str(error).partition("\n")[0], said["device"]) from None
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _said_of(memory: torch.Tensor) -> dict[str, Any]:
    # The same fields that `torch.multiprocessing` pickles (`reductions.py`: `reduce_tensor`,
    # `rebuild_cuda_tensor`).
    fields = [
        {"bytes": base64.b64encode(field).decode()} if isinstance(field, bytes) else field
        for field in memory.untyped_storage()._share_cuda_()
    ]
    return {"device": str(torch.cuda.get_device_properties(memory.device).uuid), "fields": fields}
