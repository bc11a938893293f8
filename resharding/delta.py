"""Delta: the changed elements of a box, encoded as gaps and new bits.

    changed       .  .  .  X  .  .  .  X  X  .         at 3, 7 and 8
    gaps          3           3        0               unchanged elements before each: one byte, or 255 and more bytes
    values        bits        bits     bits

Positions count in the box's own order, last dimension fastest. If one element in a hundred changes,
each costs its own size plus about 1.1 bytes. The comparison is bitwise: a zero that changes its
sign counts as changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from ..dataflow.errors import WeightSyncError
from .layout import Box

MOST_CHANGED = 0.1
"""Largest share of changed elements. Above it, encoding takes longer than sending the whole box."""

_ESCAPE = 255
"""Gap byte for this number of unchanged elements, when the gap continues in the next byte."""


@dataclass(frozen=True)
class Delta:
    gaps: np.ndarray
    """[bytes] uint8."""
    values: np.ndarray
    """[changed] bits of the changed elements, as unsigned integers of their size."""

    @property
    def num_bytes(self) -> int:
        return self.gaps.nbytes + self.values.nbytes


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the bits of a contiguous tensor as unsigned integers, flat; no copy on the host."""
    return tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy().view(f"u{tensor.element_size()}")


def delta_of(bits: np.ndarray, changed: np.ndarray) -> Delta:
    """Encode the elements at the positions `changed` (ascending) of the new bits ([elements]).

    >>> delta = delta_of(np.arange(10, dtype=np.uint16), np.array([3, 7, 8]))
    >>> delta.gaps.tolist(), delta.values.tolist()
    ([3, 3, 0], [3, 7, 8])
    """
    escapes, last = np.divmod(np.diff(changed, prepend=-1) - 1, _ESCAPE)
    ends = np.cumsum(escapes + 1) - 1
    gaps = np.full(int(ends[-1]) + 1 if len(ends) else 0, _ESCAPE, np.uint8)
    gaps[ends] = last
    return Delta(gaps, bits[changed])


def apply_delta(bits: np.ndarray, delta: Delta) -> None:
    """Overwrite the changed elements in the bits ([elements]) of the previous version. Raises
    WeightSyncError if gaps and values do not match, or reach beyond the box. The bits stay
    unchanged."""
    ends = np.flatnonzero(delta.gaps != _ESCAPE)
    positions = np.cumsum(delta.gaps, dtype=np.int64)[ends] + np.arange(len(ends))
    if len(ends) != len(delta.values) or (
        len(delta.gaps) and (not len(ends) or ends[-1] != len(delta.gaps) - 1)
    ):
        raise WeightSyncError(f"a delta has {len(delta.values)} values and positions for {len(ends)}")
    if len(positions) and positions[-1] >= len(bits):
        raise WeightSyncError(f"a delta changes element {positions[-1]} of a box that has {len(bits)}")
    bits[positions] = delta.values


def within(positions: np.ndarray, outer: Box, inner: Box) -> np.ndarray:
    """Select the positions in the box `outer` (ascending) that are inside a part of it, relative to
    that part.

    >>> within(np.array([1, 6, 7]), Box((0, 0), (2, 4)), Box((1, 2), (2, 4))).tolist()
    [0, 1]
    """
    if inner == outer:
        return positions
    origin = [start - first for start, first in zip(inner.starts, outer.starts, strict=True)]
    indices = [
        at - shift for at, shift in zip(np.unravel_index(positions, outer.shape), origin, strict=True)
    ]
    inside = np.ones(len(positions), bool)
    for at, extent in zip(indices, inner.shape, strict=True):
        inside &= (at >= 0) & (at < extent)
    return np.ravel_multi_index([at[inside] for at in indices], inner.shape)


class Shadow:
    """The bits that a publisher sent last, by entry, and their version. Held in host memory."""

    def __init__(self) -> None:
        self.version: int | None = None
        """Version of all entries; None if there are none or they belong to several versions."""
        self.compared = 0
        """Elements of the last version that were compared with the previous one."""
        self.differed = 0
        self._bits: dict[int, np.ndarray] = {}

    def start_version(self) -> int | None:
        """Start a version and return the previous one. `version` is None until it is set again."""
        self.compared = self.differed = 0
        # If the transfer breaks off, the bits belong to two versions.
        base, self.version = self.version, None
        return base

    def forget(self) -> None:
        """Free the memory. The next version is sent whole."""
        self.version = None
        self._bits.clear()

    def changed(self, number: int, bits: np.ndarray) -> np.ndarray | None:
        """Return the ascending positions of changed elements, and store the new bits of the entry
        ([elements]). None to send the whole entry, because it is new or most of it changed."""
        before = self._bits.get(number)
        if before is None or before.shape != bits.shape or before.dtype != bits.dtype:
            # `bits` may be a view of bucket memory, which the next bucket overwrites.
            self._bits[number] = bits.copy()
            return None
        differs = before != bits
        count = int(np.count_nonzero(differs))
        self.compared += len(bits)
        self.differed += count
        if count > MOST_CHANGED * len(bits):
            np.copyto(before, bits)
            return None
        positions = np.flatnonzero(differs)
        before[positions] = bits[positions]
        return positions


class HeldBoxes:
    """The bits of the boxes that a receiver took last, so that the next version can be deltas.
    Entry numbers depend on the identity of the publisher."""

    def __init__(self, publisher: str) -> None:
        self.publisher = publisher
        self.version: int | None = None
        """Version of all boxes; None if there are none or they belong to several versions."""
        self._bits: dict[tuple[int, Box], np.ndarray] = {}

    def start_version(self, wanted: Iterable[tuple[int, Box]]) -> int | None:
        """Start a version of these entry numbers and boxes, and return the version that is held of
        all of them; None if deltas do not apply. `version` is None until it is set again."""
        keys = set(wanted)
        # If the transfer breaks off, the bits belong to two versions.
        base, self.version = self.version, None
        if not keys <= self._bits.keys():
            base = None
        self._bits = {key: bits for key, bits in self._bits.items() if key in keys}
        return base

    def bits(self, number: int, box: Box, dtype: np.dtype) -> np.ndarray:
        """Return the held bits of a box of an entry, or new memory for them: [elements] unsigned
        integers of the elements' size."""
        key = (number, box)
        if key not in self._bits:
            self._bits[key] = np.empty(box.numel, dtype)
        return self._bits[key]


_held: dict[tuple[str, int, int], HeldBoxes] = {}
"""By receiver name, part number, and publisher rank."""


def held_boxes(receiver: str, part: int, rank: int, publisher: str) -> HeldBoxes:
    """Return the boxes that this process (`part` of a receiver) holds of a trainer rank. A new
    identity of the publisher or its entries (`publisher`) drops the held boxes. Without a name of
    the receiver, the boxes are not kept for the next version."""
    found = _held.get((receiver, part, rank))
    if found is None or found.publisher != publisher:
        found = HeldBoxes(publisher)
        if receiver:
            _held[receiver, part, rank] = found
    return found
