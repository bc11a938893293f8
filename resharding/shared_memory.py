"""Weights through shared memory: each rank of the trainer writes the parts that it holds, and receivers of its node map them.

    data of each part  |  version and checksum of each part, 8 bytes each  |  description of the parts, JSON

The memory is an anonymous file (`memfd_create`) that others open as `/proc/PID/fd/N`. It has no name in any folder, so nothing is
left behind when the publisher is killed; it is gone with the last process that has it open.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..dataflow.errors import WeightSyncError
from .box import Box
from .checksum import box_sum, model_sum, tensor_factor
from .layout import Held, Layout, Piece, Place, RankLayout, Where
from .weights import CHECKSUM_MODULUS, Part, RankWeights, Weights

_ALIGNMENT = 64  # a view as any dtype needs its own size; a cache line is kinder to copies


@dataclass(frozen=True)
class _Entry:
    """Where one part lies in the published bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    offset: int
    """In bytes."""

    def view(self, memory: mmap.mmap) -> torch.Tensor:
        dtype = getattr(torch, self.dtype)
        if not self.box.numel:
            return torch.empty(self.box.shape, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype, count=self.box.numel, offset=self.offset).reshape(self.box.shape)


@dataclass(frozen=True, eq=False)
class _Description:
    """The parts of one publisher, in the order in which they lie. It is the same object for as long as they lie in the same places."""

    entries: tuple[_Entry, ...]
    numbers: dict[str, list[int]]
    """For each tensor, the numbers of its entries: those of its pieces in the layout."""


class WeightPublisher:
    """Writes versions of a rank's weights, each over the one before: receivers must be done before the next `publish`.

    Memory beyond the model's own: the published parts, and one part at a time where it is gathered or converted.
    """

    def __init__(self) -> None:
        self._file: int | None = os.memfd_create("weft-weights", os.MFD_CLOEXEC)
        self._memory: mmap.mmap | None = None

    def publish(self, parts: Iterable[Part], version: int) -> Weights:
        """Write the parts that this rank gives, one after another. Together the ranks of a group give each element once.

        Args:
            parts: on any device, of any dtype; may be a generator that gathers each when its turn comes.
            version: policy version of these weights, at least 0.

        Returns:
            The record that receivers need to map and check them; the records of several ranks add up.

        Raises:
            WeightSyncError: a part occurs twice, or this publisher is closed.
        """
        if self._file is None:
            raise WeightSyncError(f"weights version {version}: this publisher was closed")
        entries: dict[tuple[str, Box], _Entry] = {}
        sums: list[int] = []
        end, checksum = 0, 0
        for name, shape, box, tensor in parts:
            dtype = str(tensor.dtype).removeprefix("torch.")
            entry = _Entry(name, dtype, shape, box, _aligned(end))
            if entries.setdefault((name, box), entry) is not entry:
                raise WeightSyncError(f"weights version {version}: {box} of tensor {name!r} was published twice")
            end = entry.offset + box.numel * tensor.element_size()
            target = entry.view(self._memory_of(end))
            target.copy_(tensor.detach())
            sums.append(box_sum(target, box, shape))
            checksum += sums[-1] * tensor_factor(name, dtype, shape)
            del target, tensor  # a mapping with views on it cannot grow
        header = _description(entries.values())
        table = np.array([version, *sums], np.uint64).tobytes()
        start = _aligned(end)
        end = start + len(table) + len(header)
        self._memory_of(end)[start:end] = table + header
        location = f"/proc/{os.getpid()}/fd/{self._file}"
        rank = RankWeights(location, end, len(header), f"{zlib.crc32(header):08x}")
        return Weights(version, (rank,), f"{checksum % CHECKSUM_MODULUS:016x}")

    def close(self) -> None:
        """Free the memory as soon as no receiver has it mapped."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        self.close()

    def _memory_of(self, num_bytes: int) -> mmap.mmap:
        """The mapped memory, with at least so many bytes. Pages that were never written take no memory."""
        assert self._file is not None
        if self._memory is None:
            os.ftruncate(self._file, max(num_bytes, mmap.PAGESIZE))
            self._memory = mmap.mmap(self._file, 0)
        elif num_bytes > len(self._memory):
            self._memory.resize(max(num_bytes, 2 * len(self._memory)))
        return self._memory


class OpenWeights:
    """A published version of the weights, mapped into this process. It is valid until the publishers write their next version.

    Raises:
        WeightSyncError: a publisher has ended, has published a later version, or its description of the parts is damaged.
    """

    def __init__(self, weights: Weights) -> None:
        self.version = weights.version
        self._weights = weights
        self._memories: list[mmap.mmap] = []
        self._parts: list[_Description] = []
        self._sums: list[np.ndarray] = []
        for rank in weights.ranks:
            memory, parts, sums = _open(rank, weights.version)
            self._memories.append(memory)
            self._parts.append(parts)
            self._sums.append(sums)
        self.layout: Layout = _layout_of(tuple(self._parts))
        """Which rank published which boxes: the same object for all versions whose parts lie in the same places."""

    def part(self, name: str, rank: int, piece: int, box: Box) -> torch.Tensor:
        """Elements of a tensor in the shared memory itself, without a copy; nobody may write to them.

        Args:
            name: of the tensor.
            rank: who published them.
            piece: which of that rank's pieces in the layout.
            box: which elements of the piece.
        """
        parts = self._parts[rank]
        entry = parts.entries[parts.numbers[name][piece]]
        return entry.view(self._memories[rank])[box.within(entry.box)]

    def published_sum(self, name: str) -> int:
        """`box_sum` over all of a tensor, as the ranks that published it computed it."""
        pieces = self.layout.tensors[name].pieces
        return (
            sum(self.piece_sum(name, rank, n) for rank, own in enumerate(pieces) for n in range(len(own)))
            % CHECKSUM_MODULUS
        )

    def piece_sum(self, name: str, rank: int, piece: int) -> int:
        """`box_sum` of one piece, as the rank that published it computed it."""
        return int(self._sums[rank][self._parts[rank].numbers[name][piece]])

    def check(self) -> None:
        """Compare the sums that ranks wrote beside their parts with the checksum of the record.

        Raises:
            WeightSyncError: they differ, or the ranks' parts do not make up each tensor.
        """
        factors: dict[str, int] = {}
        for name, tensor in self.layout.tensors.items():
            given = sum(box.numel for boxes in tensor.boxes for box in boxes)
            if given != (whole := Box.full(tensor.shape).numel):
                raise WeightSyncError(
                    f"weights version {self.version}: the ranks published {given} elements of tensor {name!r}, which has {whole}"
                )
            factors[name] = tensor_factor(name, tensor.dtype, tensor.shape)
        found = model_sum({name: self.published_sum(name) for name in factors}, factors)
        if found != self._weights.checksum:
            raise WeightSyncError(
                f"weights version {self.version}: checksum {self._weights.checksum} was published, {found} was received"
            )


def open_weights(weights: Weights) -> OpenWeights:
    """Map published weights and check that they are complete; the elements themselves are checked as they are received.

    Raises:
        WeightSyncError: a publisher has ended or published a later version, or the parts are not those that were published.
    """
    opened = OpenWeights(weights)
    opened.check()
    return opened


def _description(entries: Iterable[_Entry]) -> bytes:
    fields = [[e.name, e.dtype, e.shape, e.box.starts, e.box.stops, e.offset] for e in entries]
    return json.dumps(fields, separators=(",", ":")).encode()


def _open(rank: RankWeights, version: int) -> tuple[mmap.mmap, _Description, np.ndarray]:
    """The memory of one publisher, its parts, and the checksum of each."""
    where = f"weights version {version} at {rank.location}"
    try:
        file = os.open(rank.location, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightSyncError(
            f"{where} cannot be opened ({error.strerror}): has the process that published them ended?"
        ) from None
    try:
        found_bytes = os.fstat(file).st_size
        if found_bytes < rank.num_bytes:
            raise WeightSyncError(f"{where}: {rank.num_bytes} bytes were published, {found_bytes} found")
        # Private rather than read-only: torch wants writable memory, and no receiver may change what others read.
        memory = mmap.mmap(file, rank.num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(file)
    header = memory[rank.num_bytes - rank.header_bytes : rank.num_bytes]
    if f"{zlib.crc32(header):08x}" != rank.header_checksum:
        raise WeightSyncError(
            f"{where}: the description of its parts is not the one that was published; "
            "was a later version published before this one was received?"
        )
    parts = _read_description(header)
    count = 1 + len(parts.entries)
    table_bytes = 8 * count
    table = np.frombuffer(memory, np.uint64, count, rank.num_bytes - rank.header_bytes - table_bytes)
    if int(table[0]) != version:
        raise WeightSyncError(f"{where}: version {int(table[0])} was published there before this one was received")
    return memory, parts, table[1:].copy()


@functools.lru_cache(maxsize=64)
def _read_description(header: bytes) -> _Description:
    entries = tuple(
        _Entry(name, dtype, tuple(shape), Box(tuple(starts), tuple(stops)), offset)
        for name, dtype, shape, starts, stops, offset in json.loads(header)
    )
    numbers: dict[str, list[int]] = {}
    for number, entry in enumerate(entries):
        numbers.setdefault(entry.name, []).append(number)
    return _Description(entries, numbers)


@functools.lru_cache(maxsize=8)
def _layout_of(ranks: tuple[_Description, ...]) -> Layout:
    return Layout.of_ranks([_rank_layout(parts.entries) for parts in ranks], "the trainer")


def _rank_layout(entries: Sequence[_Entry]) -> RankLayout:
    held: dict[str, Held] = {}
    for entry in entries:
        before = held[entry.name].pieces if entry.name in held else ()
        item_bytes = getattr(torch, entry.dtype).itemsize
        place = Place("", entry.offset // item_bytes, torch.empty(entry.box.shape, device="meta").stride())
        held[entry.name] = Held(entry.shape, entry.dtype, (*before, Piece(entry.box, place)))
    return RankLayout(Where(), held)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
