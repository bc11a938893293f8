"""Buckets: the parts of a version in transfer order, cut to fit into fixed-size memory.

    parts of a rank      | embed_tokens 80 MB                    | q_proj 2 MB | k_proj 2 MB | ...
    buckets of 16 MB     | rows 0-5461 | rows 5461-10922 | ...   | rest of the rows, q_proj, ...

A bucket is a list of entries. An entry states a box of a tensor, its dtype, and the position of its
bytes. A receiver that can map a part's memory reads the part in place (`SharedMemory`). The
publisher copies all other parts into bucket memory, which later buckets reuse.

This module also computes the checksum of a version.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

import numpy as np
import torch

from ..dataflow.cgroups import usable_cpus
from ..dataflow.errors import WeightSyncError
from .mapped_memory import MemoryPlace, aligned, place_of
from .weights import CHECKSUM_MODULUS, Box, Layout, Piece, TensorLayout, TensorPart, Where, mix_bits

BUCKET_BYTES = 16 << 20
"""[bytes] Default size of a bucket."""

SLOTS = 2
"""Number of buckets in memory: the publisher fills one while receivers read the other."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A box of a tensor, and the position of its elements in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    bucket: int
    offset: int
    """[bytes] Offset from the start of the bucket, or of the mapped memory if read in place."""
    memory: int = 0
    """0 for bucket memory; otherwise the number of the mapped memory."""

    @property
    def num_bytes(self) -> int:
        return self.box.numel * getattr(torch, self.dtype).itemsize

    def view(self, memory: torch.Tensor, start: int) -> torch.Tensor:
        """Return the elements as a view of `memory` ([bytes] uint8). The bucket begins at `start`
        [bytes]; 0 for elements read in place."""
        first = start + self.offset
        own_bytes = memory[first : first + self.num_bytes]
        return own_bytes.view(getattr(torch, self.dtype)).view(self.box.shape)


class Cutter:
    """Cuts versions into buckets. Consecutive versions with the same parts get the same entries. An
    element larger than `bucket_bytes` gets its own bucket. Unless `in_place`, all parts are copied
    into buckets."""

    def __init__(self, bucket_bytes: int, *, in_place: bool = True) -> None:
        self._bucket_bytes = bucket_bytes
        self._in_place = in_place
        self._forms: list[_Form] = []
        self._entries: list[tuple[Entry, int, tuple[slice, ...] | None]] = []
        """Entry, number of its part, and index into the part (None for the whole part)."""
        self.description = described(())

    def cut(self, parts: Iterable[TensorPart]) -> list[tuple[Entry, torch.Tensor]]:
        """Return the entries in bucket order, each with its elements. Cuts large parts into several
        entries. Raises WeightSyncError if a part occurs twice."""
        given = list(parts)
        forms = [_form_of(part, in_place=self._in_place) for part in given]
        # Keep the entries of unchanged parts, because receivers plan again for a new description.
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
    name: str
    box: Box
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: MemoryPlace | None
    """Where other processes can read the part as it is sent; None if they cannot."""

    def offset_of(self, box: Box) -> int:
        """[bytes] Offset of a box, contiguous within the part, in the part's memory."""
        assert self.place is not None
        starts = [start - first for start, first in zip(box.starts, self.box.starts, strict=True)]
        rows = [math.prod(self.box.shape[dim + 1 :]) for dim in range(len(starts))]
        return self.place.offset + self.dtype.itemsize * sum(map(mul, starts, rows))


def _form_of(part: TensorPart, *, in_place: bool) -> _Form:
    dtype = part.dtype or part.tensor.dtype
    # A part that needs a cast is copied, so it cannot be read in place.
    place = place_of(part.tensor) if in_place and dtype == part.tensor.dtype else None
    return _Form(part.name, part.box, part.shape, dtype, place)


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
            # Do not leave an empty bucket before an entry that is larger than a bucket.
            if end and aligned(end) + num_bytes > bucket_bytes:
                bucket, end = bucket + 1, 0
            start = aligned(end)
            memory = 0 if place is None else memories[place.path, place.num_bytes]
            offset = start if place is None else form.offset_of(box)
            entry = Entry(name, str(dtype).removeprefix("torch."), shape, box, bucket, offset, memory)
            yield entry, number, None if box == whole else box.within(whole)
            end = start + num_bytes


def _boxes_of(box: Box, max_elements: int) -> Iterator[Box]:
    """Cut a box along its first dimensions into contiguous boxes of at most `max_elements`."""
    if box.numel <= max_elements:
        yield box
        return
    # Cutting along a later dimension would not give contiguous boxes.
    dim = next(d for d, extent in enumerate(box.shape) if extent > 1)
    row = box.numel // box.shape[dim]
    step = max(1, max_elements // row)
    for start in range(box.starts[dim], box.stops[dim], step):
        starts, stops = list(box.starts), list(box.stops)
        starts[dim], stops[dim] = start, min(start + step, box.stops[dim])
        yield from _boxes_of(Box(tuple(starts), tuple(stops)), max_elements)


# Descriptions, as receivers read them


@dataclass(frozen=True, eq=False)
class Description:
    """The entries of one publisher. Unchanged entries give one object, so receivers plan once."""

    entries: tuple[Entry, ...]
    numbers: dict[str, list[int]]
    """Maps each tensor name to the indexes of its entries, in the order of its pieces."""
    buckets: tuple[tuple[int, ...], ...]
    bucket_bytes: tuple[int, ...]
    memories: tuple[tuple[str, int], ...]
    """Path and size in bytes of each memory that holds entries in place."""


@functools.lru_cache(maxsize=64)
def read_description(description: bytes) -> Description:
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
    bucket_bytes = [0] * len(buckets)
    for entry in entries:
        bucket_bytes[entry.bucket] = max(bucket_bytes[entry.bucket], entry.offset + entry.num_bytes)
    return Description(
        entries, numbers, tuple(map(tuple, buckets)), tuple(bucket_bytes), tuple(map(tuple, memories))
    )


@functools.lru_cache(maxsize=64)
def packed(parts: Description) -> Description:
    """Return the same entries, all of them copied into buckets."""
    entries = list(parts.entries)
    ends = [0] * len(parts.buckets)
    for numbers in parts.buckets:
        for number in numbers:
            entry = entries[number]
            entries[number] = dataclasses.replace(entry, offset=ends[entry.bucket], memory=0)
            ends[entry.bucket] = aligned(ends[entry.bucket] + entry.num_bytes)
    return dataclasses.replace(parts, entries=tuple(entries), bucket_bytes=tuple(ends), memories=())


@functools.lru_cache(maxsize=8)
def layout_of(ranks: tuple[Description, ...]) -> Layout:
    """Return the trainer's layout, given its ranks' descriptions. Raises WeightSyncError unless the
    ranks together publish each element of each tensor exactly once."""
    layout = Layout.of_ranks([_rank_layout(rank.entries) for rank in ranks], "the trainer")
    for name, tensor in layout.tensors.items():
        given = sum(box.numel for boxes in tensor.boxes for box in boxes)
        if given != (whole := Box.full(tensor.shape).numel):
            raise WeightSyncError(
                f"the ranks publish {given} elements of tensor {name!r}, which has {whole}"
            )
    return layout


def _rank_layout(entries: Sequence[Entry]) -> Layout:
    pieces: dict[str, list[Piece]] = {}
    first: dict[str, Entry] = {}
    for entry in entries:
        first.setdefault(entry.name, entry)
        pieces.setdefault(entry.name, []).append(Piece(entry.box))
    tensors = [TensorLayout(n, e.shape, e.dtype, (tuple(pieces[n]),)) for n, e in first.items()]
    return Layout.of(tensors, [Where()])


# Checksum
#
#     sum(tensor)  =  sum over elements of  value(element) * row_factor(row) * column_factor(column)
#
# modulo 2^64. The column is the index along the last dimension; the row is the flat index over all
# others. Both refer to the whole tensor, so the sum does not depend on how a tensor is cut. All
# factors are odd pseudo-random numbers. A slice that is missing, swapped, shifted or from another
# version changes the sum, except with a chance of about 2^-64.
#
# An element's value reads its bytes as digits from -128 to 127, lowest first, so elements
# with different bits have different values. These digits make the sum over a row a product of int8
# matrices, which is the fastest integer arithmetic of a CPU:
#
#     digits of the elements   [rows, columns * itemsize]
#     digits of the factors    [columns * itemsize, 8]       byte i of an element counts 256^i times


SIGNED_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> signed integer dtype of that width, to read its bits."""
_DIGIT_OFFSETS = 0x8080808080808080
"""Adding 128 to each digit gives the bytes: `bits ^ offsets == value + offsets`."""
_FEW_ROWS = 8
"""Below this number of rows, reading the digits of the factors would take longer than the sum."""
_PRODUCT_BYTES = 1 << 16
"""[bytes] Longest row of a product: its int32 sums stay below 2^30."""
_DEVICE_BLOCK_ELEMENTS = 1 << 20
"""Elements that a device sums at once, because the products take 8 bytes each."""


def box_sum(tensor: torch.Tensor, box: Box, shape: tuple[int, ...]) -> int:
    """Return the checksum of one box of a tensor with this shape, in [0, 2^64); 0 for an empty box.
    `tensor` contains the box's elements, of any dtype and strides and on any device. Sums of
    disjoint boxes add up modulo 2^64.

    >>> whole = torch.arange(12.0).view(3, 4)
    >>> parts = [Box((0, 0), (3, 1)), Box((0, 1), (3, 4))]
    >>> sum(box_sum(whole[part.slices], part, (3, 4)) for part in parts) % 2**64 == box_sum(whole, Box.full((3, 4)), (3, 4))
    True
    """
    (found,) = read_sums([start_sum(tensor, box, shape)])
    return found


def start_sum(tensor: torch.Tensor, box: Box, shape: tuple[int, ...]) -> int | torch.Tensor:
    """Return the same as `box_sum`, but for `read_sums` if the tensor is on a device."""
    if not tensor.numel():
        return 0
    elements = tensor.detach()
    elements = elements.reshape(-1, elements.shape[-1]) if elements.ndim else elements.reshape(1, 1)
    start, stop = (box.starts[-1], box.stops[-1]) if shape else (0, 1)
    columns = shape[-1] if shape else 1
    if elements.device.type != "cpu":
        return _device_sum(elements, box, shape)
    if len(elements) < _FEW_ROWS or not _multiplies_exactly():
        sums = _row_sums(elements, _factors(1, columns)[start:stop])
    else:
        sums = _row_products(elements, _factor_digits(start, stop, columns, elements.element_size()))
    with np.errstate(over="ignore"):
        return int((sums * _row_factors_of(box, shape)).sum(dtype=np.int64)) % CHECKSUM_MODULUS


def read_sums(sums: Sequence[int | torch.Tensor]) -> list[int]:
    """Return the sums that `start_sum` gave. Waits for a device only once."""
    started = [found for found in sums if isinstance(found, torch.Tensor)]
    values = iter(torch.stack(started).tolist() if started else ())
    return [
        (next(values) if isinstance(found, torch.Tensor) else found) % CHECKSUM_MODULUS for found in sums
    ]


def _row_products(elements: torch.Tensor, digits: torch.Tensor) -> np.ndarray:
    """Return the sums of values times column factors, for each row of a matrix: [rows] int64."""
    # Via one dimension, because torch calls a single column contiguous whatever its stride.
    content = elements.contiguous().view(-1).view(torch.int8).view(len(elements), -1)
    with np.errstate(over="ignore"):
        total = np.zeros(len(content), np.int64)
        for first in range(0, content.shape[1], _PRODUCT_BYTES):
            piece = slice(first, first + _PRODUCT_BYTES)
            # [rows, 8]: the factors' digits, each with the weight of its place
            found = _multiplied(content[:, piece], digits[piece])
            for place in range(8):
                total += found[:, place].astype(np.int64) << (8 * place)
    return total


def _row_sums(elements: torch.Tensor, factors: np.ndarray) -> np.ndarray:
    """Return the same as `_row_products`, given the factors of the columns."""
    width = elements.element_size()
    bits = elements.view(SIGNED_BITS[width]).numpy().view(f"u{width}")
    offsets = bits.dtype.type(_DIGIT_OFFSETS & (1 << 8 * width) - 1)
    unsigned = factors.view(np.uint64)
    with np.errstate(over="ignore"):
        sums = np.einsum("rc,c->r", bits ^ offsets, unsigned)
        return (sums - np.uint64(offsets) * unsigned.sum(dtype=np.uint64)).view(np.int64)


def _device_sum(elements: torch.Tensor, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    width = elements.element_size()
    bits = elements.view(SIGNED_BITS[width])
    # Signed 64-bit integers, whose products wrap like unsigned ones.
    offsets = int(np.uint64(_DIGIT_OFFSETS & (1 << 8 * width) - 1).astype(np.int64))
    mask = -1 if width == 8 else (1 << 8 * width) - 1
    columns, rows = _device_factors_of(box, shape, bits.device)
    step = max(1, _DEVICE_BLOCK_ELEMENTS // bits.shape[1])
    sums: list[torch.Tensor] = []
    for first in range(0, len(bits), step):
        # `to` does not copy 64-bit elements, so change only the result of `&` in place.
        values = bits[first : first + step].to(torch.int64) & mask
        sums.append(values.bitwise_xor_(offsets).sub_(offsets).mul_(columns).sum(1))
    return (torch.cat(sums) * rows).sum()


def _multiplied(left: torch.Tensor, right: torch.Tensor) -> np.ndarray:
    """Return the product of int8 matrices, as int32."""
    return torch._int_mm(left, right).numpy()  # pyright: ignore[reportPrivateImportUsage]


@functools.cache
def _multiplies_exactly() -> bool:
    """Return whether torch multiplies int8 matrices exactly here. Without VNNI instructions, oneDNN
    adds pairs of products in 16 bits, where they saturate."""
    extremes = torch.tensor([-128, 127], dtype=torch.int8)
    left, right = extremes.repeat(8)[:, None].repeat(1, 256), extremes.repeat(4).repeat(256, 1)
    try:
        found = _multiplied(left, right)
    except (AttributeError, RuntimeError):
        return False
    return np.array_equal(found, left.numpy().astype(np.int32) @ right.numpy().astype(np.int32))


@functools.lru_cache(maxsize=1 << 16)
def tensor_factor(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Return a tensor's odd factor in a model's checksum, which thereby depends on names."""
    # A CRC is equal in all processes, unlike `hash`.
    header = f"{name}|{dtype}|{tuple(shape)}".encode()
    return (
        int(mix_bits(np.array([zlib.crc32(header) << 32 | zlib.crc32(header[::-1])], np.uint64))[0]) | 1
    )


@functools.lru_cache(maxsize=256)
def _factors(kind: int, count: int) -> np.ndarray:
    """Return odd factors for the indexes below `count` of rows (kind 0) or columns (kind 1)."""
    with np.errstate(over="ignore"):
        mixed = mix_bits(np.arange(count, dtype=np.uint64) * np.uint64(2) + np.uint64(kind))
    odd = (mixed | np.uint64(1)).view(np.int64)
    # The cache returns this same array to every caller.
    odd.flags.writeable = False
    return odd


@functools.lru_cache(maxsize=64)
def _factor_digits(start: int, stop: int, count: int, width: int) -> torch.Tensor:
    """Return the digits of some columns' factors: [columns * width, 8] int8."""
    shifts = 8 * np.arange(width, dtype=np.uint64)
    factors = _factors(1, count)[start:stop].view(np.uint64)[:, None] << shifts
    offsets = np.uint64(_DIGIT_OFFSETS)
    with np.errstate(over="ignore"):
        digits = ((factors + offsets) ^ offsets).astype("<u8")
    return torch.from_numpy(digits.view(np.int8).reshape(-1, 8))


def _row_factors_of(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    # For three or more dimensions, the factors are copies, not views, and too large to cache.
    return (_row_factors if len(shape) < 3 else _row_factors.__wrapped__)(box, shape)


@functools.lru_cache(maxsize=256)
def _device_factors_of(
    box: Box, shape: tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of a box's columns and rows on a device."""
    start, stop = (box.starts[-1], box.stops[-1]) if shape else (0, 1)
    columns = _factors(1, shape[-1] if shape else 1)[start:stop]
    # Copy, because torch warns about read-only arrays.
    found = [torch.from_numpy(own.copy()).to(device) for own in (columns, _row_factors_of(box, shape))]
    return found[0], found[1]


@functools.lru_cache(maxsize=1 << 15)
def _row_factors(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    leading = shape[:-1]
    if not leading:
        return _factors(0, 1)
    total = int(np.prod(leading))
    if len(leading) == 1:
        return _factors(0, total)[box.starts[0] : box.stops[0]]
    ranges = [
        np.arange(start, stop) for start, stop in zip(box.starts[:-1], box.stops[:-1], strict=True)
    ]
    return _factors(0, total)[
        np.ravel_multi_index(np.meshgrid(*ranges, indexing="ij"), leading).reshape(-1)
    ]


def checksum_of(entries: Iterable[Entry], sums: Iterable[int]) -> int:
    """Return the checksum over one rank's entries, in [0, 2^64), given the `box_sum` of each. It
    depends on names, dtypes, shapes and bits. Checksums of ranks add up modulo 2^64."""
    found = (
        value * tensor_factor(e.name, e.dtype, e.shape) for e, value in zip(entries, sums, strict=True)
    )
    return sum(found) % CHECKSUM_MODULUS


def described(entries: Iterable[Entry], memories: Iterable[tuple[str, int]] = ()) -> bytes:
    """Serialize entries as JSON, with the shared-memory files that hold some of their elements."""
    fields = [
        [e.name, e.dtype, e.shape, e.box.starts, e.box.stops, e.bucket, e.offset, e.memory]
        for e in entries
    ]
    return json.dumps([fields, [*memories]], separators=(",", ":")).encode()


def fingerprint(description: bytes) -> str:
    """Return an identifier by which a receiver recognizes a description that it already has."""
    return f"{zlib.crc32(description):08x}{len(description):x}"


# Copies in host memory, and the number of threads for a transfer


def copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` over `target`, which has the same shape. In host memory, only the calling
    thread copies.

    torch would split the copy over all cores, including those that the other side keeps busy.
    """
    if target.is_cpu and source.is_cpu and (dtype := target.dtype) == source.dtype:
        # numpy has no bfloat16 and no float8, so copy their bits.
        bits = SIGNED_BITS.get(dtype.itemsize)
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
    """Limit torch's threads in this context, so that `others` processes here keep a core each."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(before, usable_cpus() - others)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
