"""Deltas: only the changed elements of a box, encoded as gaps and new bits.

    changed       .  .  .  X  .  .  .  X  X  .         at 3, 7 and 8
    gaps          3           3        0               unchanged elements before each: one byte, or 255 and more bytes
    values        bits        bits     bits

Positions count the box's elements, last dimension fastest. If 1% of the elements change, each
costs its own size plus about 1.1 bytes. Elements are compared bitwise: a zero that changes its
sign counts as changed.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from ..dataflow.errors import WeightSyncError
from .weights import Box

_MOST_CHANGED = 0.1
"""Largest changed share of elements for a delta. Above it, sending the whole box is faster."""
_ESCAPE = 255
"""Gap byte for 255 unchanged elements; the gap continues in the next byte."""


class Shadow:
    """The bits of each entry as last sent, in host memory, and their version."""

    def __init__(self) -> None:
        self.version: int | None = None
        """The version of all entries; None without any, or if they belong to several versions."""
        self.compared = 0
        """Number of the last version's elements that were compared with the previous one."""
        self.differed = 0
        self._bits: dict[int, np.ndarray] = {}

    def start_version(self) -> int | None:
        """Start a version, and return the previous one. The caller must then set `version`."""
        self.compared = self.differed = 0
        # If the transfer breaks off, the bits belong to two versions.
        base, self.version = self.version, None
        return base

    def forget(self) -> None:
        """Free the memory. The next version is then sent whole."""
        self.version = None
        self._bits.clear()

    def changed(self, number: int, bits: np.ndarray) -> np.ndarray | None:
        """Store an entry's new bits ([elements]). Return the ascending positions that changed, or
        None to send the whole entry because it is new or too much of it changed."""
        before = self._bits.get(number)
        if before is None or before.shape != bits.shape or before.dtype != bits.dtype:
            # `bits` may be a view of bucket memory, which the next bucket overwrites.
            self._bits[number] = bits.copy()
            return None
        differs = before != bits
        count = int(np.count_nonzero(differs))
        self.compared += len(bits)
        self.differed += count
        if count > _MOST_CHANGED * len(bits):
            np.copyto(before, bits)
            return None
        positions = np.flatnonzero(differs)
        before[positions] = bits[positions]
        return positions


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """Return a contiguous tensor's bits as flat unsigned integers, without a copy on the host."""
    return tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy().view(f"u{tensor.element_size()}")


def delta_of(bits: np.ndarray, changed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Encode the changed elements as gaps ([bytes] uint8) and values ([changed] unsigned integers
    of the elements' size). `bits` ([elements]) are the new bits; `changed` are ascending positions.

    >>> gaps, values = delta_of(np.arange(10, dtype=np.uint16), np.array([3, 7, 8]))
    >>> gaps.tolist(), values.tolist()
    ([3, 3, 0], [3, 7, 8])
    """
    escapes, last = np.divmod(np.diff(changed, prepend=-1) - 1, _ESCAPE)
    ends = np.cumsum(escapes + 1) - 1
    gaps = np.full(int(ends[-1]) + 1 if len(ends) else 0, _ESCAPE, np.uint8)
    gaps[ends] = last
    return gaps, bits[changed]


def apply_delta(bits: np.ndarray, gaps: np.ndarray, values: np.ndarray) -> None:
    """Overwrite the changed elements in `bits` ([elements]), the bits of the previous version.
    Raises WeightSyncError, and changes nothing, if gaps, values and box do not match."""
    ends = np.flatnonzero(gaps != _ESCAPE)
    positions = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(len(ends))
    if len(ends) != len(values) or (len(gaps) and (not len(ends) or ends[-1] != len(gaps) - 1)):
        raise WeightSyncError(f"a delta has {len(values)} values and positions for {len(ends)}")
    if len(positions) and positions[-1] >= len(bits):
        raise WeightSyncError(f"a delta changes element {positions[-1]} of a box that has {len(bits)}")
    bits[positions] = values


def within(positions: np.ndarray, outer: Box, inner: Box) -> np.ndarray:
    """Return the positions (ascending, in the box `outer`) that lie in the box `inner`, relative to
    `inner`.

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


# The receiver's side: the previous version, the base of deltas


class HeldBoxes:
    """The bits of the boxes that a receiver took last. The next deltas apply to them. Entry
    numbers are only valid for one publisher."""

    def __init__(self, publisher: str) -> None:
        self.publisher = publisher
        self.version: int | None = None
        """The version of all boxes; None without boxes, or if they belong to several versions."""
        self._bits: dict[tuple[int, Box], np.ndarray] = {}

    def start_version(self, wanted: Iterable[tuple[int, Box]]) -> int | None:
        """Start a version with these entry numbers and boxes. Return the version of all of them, or
        None if deltas do not apply. `version` is None until the caller sets it."""
        keys = set(wanted)
        # If the transfer breaks off, the bits belong to two versions.
        base, self.version = self.version, None
        if not keys <= self._bits.keys():
            base = None
        self._bits = {key: bits for key, bits in self._bits.items() if key in keys}
        return base

    def bits(self, number: int, box: Box, dtype: np.dtype) -> np.ndarray:
        """Return the held bits of an entry's box, or new memory for them: [elements] unsigned
        integers of the elements' size."""
        key = (number, box)
        if key not in self._bits:
            self._bits[key] = np.empty(box.numel, dtype)
        return self._bits[key]


_held: dict[tuple[str, int, int], HeldBoxes] = {}
"""Keyed by receiver name, part number, and rank of the publisher."""


def held_boxes(receiver: str, part: int, rank: int, publisher: str) -> HeldBoxes:
    """Return a trainer rank's boxes that this process (`part` of a receiver) holds. Discards those
    of an earlier publisher. Does not keep boxes of a receiver without a name."""
    found = _held.get((receiver, part, rank))
    if found is None or found.publisher != publisher:
        found = HeldBoxes(publisher)
        if receiver:
            _held[receiver, part, rank] = found
    return found
