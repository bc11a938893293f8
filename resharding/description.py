"""What a publisher says of its memory: which parts lie where, as receivers read it.

data of each part  |  version and checksum of each part, 8 bytes each  |  description of the parts, JSON
"""

from __future__ import annotations

import functools
import json
import mmap
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..dataflow.errors import WeightSyncError
from .box import Box
from .layout import Held, Layout, Piece, Place, RankLayout, Where
from .weights import RankWeights


@dataclass(frozen=True)
class Entry:
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
class Description:
    """The parts of one publisher, in the order in which they lie. It is the same object for as long as they lie in the same places."""

    entries: tuple[Entry, ...]
    numbers: dict[str, list[int]]
    """For each tensor, the numbers of its entries: those of its pieces in the layout."""


def described(entries: Iterable[Entry]) -> bytes:
    fields = [[e.name, e.dtype, e.shape, e.box.starts, e.box.stops, e.offset] for e in entries]
    return json.dumps(fields, separators=(",", ":")).encode()


def checked_description(header: bytes, rank: RankWeights, where: str) -> Description:
    if f"{zlib.crc32(header):08x}" != rank.header_checksum:
        raise WeightSyncError(
            f"{where}: the description of its parts is not the one that was published; "
            "was a later version published before this one was received?"
        )
    return read_description(header)


@functools.lru_cache(maxsize=64)
def read_description(header: bytes) -> Description:
    entries = tuple(
        Entry(name, dtype, tuple(shape), Box(tuple(starts), tuple(stops)), offset)
        for name, dtype, shape, starts, stops, offset in json.loads(header)
    )
    numbers: dict[str, list[int]] = {}
    for number, entry in enumerate(entries):
        numbers.setdefault(entry.name, []).append(number)
    return Description(entries, numbers)


@functools.lru_cache(maxsize=8)
def layout_of(ranks: tuple[Description, ...]) -> Layout:
    return Layout.of_ranks([_rank_layout(parts.entries) for parts in ranks], "the trainer")


def _rank_layout(entries: Sequence[Entry]) -> RankLayout:
    held: dict[str, Held] = {}
    for entry in entries:
        before = held[entry.name].pieces if entry.name in held else ()
        item_bytes = getattr(torch, entry.dtype).itemsize
        place = Place("", entry.offset // item_bytes, torch.empty(entry.box.shape, device="meta").stride())
        held[entry.name] = Held(entry.shape, entry.dtype, (*before, Piece(entry.box, place)))
    return RankLayout(Where(), held)
