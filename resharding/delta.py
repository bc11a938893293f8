"""Delta: the changed elements of a box, encoded as gaps and new bits.

    changed       .  .  .  X  .  .  .  X  X  .         at 3, 7 and 8
    gaps          3           3        0               unchanged elements before each: one byte, or 255 and more bytes
    values        bits        bits     bits

Positions count in the box's own order, last dimension fastest. If one element in a hundred changes,
each costs its own size plus about 1.1 bytes. The comparison is bitwise: a zero that changes its
sign counts as changed.
"""

from __future__ import annotations

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
    """Return the bits of a contiguous tensor as unsigned integers, flat; no copy on the host.

    >>> bits_of(torch.tensor([0.0, -0.0])).tolist()
    [0, 2147483648]
    """
    return tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy().view(f"u{tensor.element_size()}")


def delta_of(bits: np.ndarray, changed: np.ndarray) -> Delta:
    """Encode the changed elements.

    Args:
        bits: [elements] new bits.
        changed: positions of the changed elements, ascending.

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
    """Overwrite the changed elements of the previous version.

    Args:
        bits: [elements] of the previous version, overwritten.
        delta: the changes.

    Raises:
        WeightSyncError: gaps and values do not match, or reach beyond the box. The bits stay
            unchanged.
    """
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
    """Select the positions inside a part of a box, relative to that part.

    Args:
        positions: positions in `outer`, ascending.
        outer: the box.
        inner: a part of it.

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
        """Number of compared elements that differed."""
        self._bits: dict[int, np.ndarray] = {}

    def begin(self) -> int | None:
        """Start a version and return the previous one. `version` is None until it is set again."""
        self.compared = self.differed = 0
        base, self.version = self.version, None
        return base

    def forget(self) -> None:
        """Free the memory. The next version is sent whole."""
        self.version = None
        self._bits.clear()

    def changed(self, number: int, bits: np.ndarray) -> np.ndarray | None:
        """Return the positions of changed elements, and store the new bits.

        Args:
            number: index of the entry.
            bits: [elements] of the entry.

        Returns:
            Ascending positions, or None to send the whole entry because it is new or most of it
            changed.
        """
        before = self._bits.get(number)
        if before is None or before.shape != bits.shape or before.dtype != bits.dtype:
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

    @property
    def num_bytes(self) -> int:
        return sum(bits.nbytes for bits in self._bits.values())
