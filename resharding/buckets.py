"""Buckets: the parts of a version in the order in which they travel, cut so that each bucket fits into its memory.

    parts of a rank      | embed_tokens 80 MB                    | q_proj 2 MB | k_proj 2 MB | ...
    buckets of 16 MB     | rows 0-5461 | rows 5461-10922 | ...   | rest of the rows, q_proj, k_proj, ...

A bucket is a list of entries: a box of a tensor, its dtype, and where its bytes lie. Both sides go through the same list. Parts that lie in
memory that others can map, as they travel (`shared_memory.py`), are read there; all others are copied into the memory of the buckets, which
one bucket after the other uses. Whatever changes the bytes of an entry on their way (a delta, say)
does so in two places: where the publisher writes an entry into its bucket (`Transfer._fill`), and where a receiver reads it
(`IncomingWeights._elements`).
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
"""Of one bucket, where nothing else is asked for."""

SLOTS = 2
"""Buckets that have memory at the same time: one is written while the other is read."""

_ALIGNMENT = 64  # a view as any dtype needs its own size; a cache line is kinder to copies


@dataclass(frozen=True, slots=True)
class Entry:
    """A box of a tensor, and where its elements lie in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    bucket: int
    """Number of its bucket."""
    offset: int
    """In bytes, from the start of the bucket, or of its memory."""
    memory: int = 0
    """0: that of the buckets; else the number, from 1, of a memory in which the elements lie already."""

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return self.box.numel * getattr(torch, self.dtype).itemsize

    def view(self, memory: torch.Tensor, start: int) -> torch.Tensor:
        """Its elements in the memory of a bucket that starts there, or in the memory in which they lie already, from 0.

        Args:
            memory: [bytes] uint8.
        """
        first = start + self.offset
        return (
            memory[first : first + self.num_bytes].view(getattr(torch, self.dtype)).view(self.box.shape)
        )


class Cutter:
    """Cuts versions into buckets. A version whose parts are those of the one before has the same entries.

    Args:
        bucket_bytes: what a bucket holds; one element takes more only if it is alone in it.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._forms: list[_Form] = []
        self._entries: list[tuple[Entry, int, tuple[slice, ...] | None]] = []
        """With the number of the part, and the index that selects the elements from it; None: all of it."""
        self.description = described(())
        """Of the entries of the last version, and of the memories in which some of them lie."""

    def cut(self, parts: Iterable[Part]) -> list[tuple[Entry, torch.Tensor]]:
        """Entries in the order of their buckets, each with its elements. A part that is larger than a bucket is cut into several.

        Args:
            parts: what a rank gives.

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
    """Where others can read it as it travels."""

    @classmethod
    def of(cls, part: Part) -> _Form:
        dtype = part.dtype or part.tensor.dtype
        place = place_of(part.tensor) if dtype == part.tensor.dtype else None
        return cls(part.name, part.box, part.shape, dtype, place)

    def offset_of(self, box: Box) -> int:
        """[bytes] Of the first element of a box, which is contiguous in this part, in the memory in which the part lies."""
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
    """Boxes of at most so many elements that make up a box: cut along its first dimensions, so that each is contiguous in it."""
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
    """The entries of one publisher. It is the same object for as long as they are the same, so that receivers plan once."""

    entries: tuple[Entry, ...]
    numbers: dict[str, list[int]]
    """For each tensor, the numbers of its entries: those of its pieces in the layout."""
    buckets: tuple[tuple[int, ...], ...]
    """For each bucket, the numbers of its entries."""
    memories: tuple[tuple[str, int], ...]
    """Path and bytes of each memory in which entries lie already."""


def checksum_of(entries: Iterable[Entry], sums: Iterable[int]) -> int:
    """The checksum over all elements of entries: it also differs where the same bits have another name, dtype or shape.

    Args:
        entries: of one rank.
        sums: `box_sum` of each.

    Returns:
        A number in [0, 2^64). Those of several ranks add up, modulo 2^64.
    """
    found = (
        value * tensor_factor(e.name, e.dtype, e.shape) for e, value in zip(entries, sums, strict=True)
    )
    return sum(found) % CHECKSUM_MODULUS


def described(entries: Iterable[Entry], memories: Iterable[tuple[str, int]] = ()) -> bytes:
    """Entries, and the memories in which some of them lie, as JSON."""
    fields = [
        [e.name, e.dtype, e.shape, e.box.starts, e.box.stops, e.bucket, e.offset, e.memory]
        for e in entries
    ]
    return json.dumps([fields, [*memories]], separators=(",", ":")).encode()


def fingerprint(description: bytes) -> str:
    """By which a receiver knows a description that it has."""
    return f"{zlib.crc32(description):08x}{len(description):x}"


@functools.lru_cache(maxsize=64)
def read_description(description: bytes) -> Description:
    """What `described` has written."""
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
    """The layout of a trainer, from the descriptions of its ranks.

    Raises:
        WeightSyncError: together they do not have each element of each tensor once.
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
# The memory of a publisher's buckets: on the host, where every process of the machine can map it,
# or on a device.
#
#     HostBuckets     an anonymous file (`memfd_create`), mapped as /proc/PID/fd/N; gone with the last process that has it open or mapped
#     DeviceBuckets   memory of a CUDA device; where receivers are to map it, with the handle by which CUDA opens it in another process
#
# What is said of either travels as JSON: nothing is pickled.


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
    """`torch.multiprocessing` pickles the same fields (`reductions.py`: `reduce_tensor`, `rebuild_cuda_tensor`)."""
    fields = [
        {"bytes": base64.b64encode(field).decode()} if isinstance(field, bytes) else field
        for field in memory.untyped_storage()._share_cuda_()
    ]
    return {"device": str(torch.cuda.get_device_properties(memory.device).uuid), "fields": fields}
