"""Delta: the elements of a box that differ from those of the version before, coded as gaps and new bits.

    changed       .  .  .  X  .  .  .  X  X  .         at 3, 7 and 8
    gaps          3           3        0               unchanged elements before each: one byte, or 255 and more bytes
    values        bits        bits     bits

Positions count in the box's own order, the last dimension first. With one element in a hundred changed this is about 1.1 bytes and
the element's own for each changed one. Bits are compared, not numbers: a zero that changes its sign has changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..dataflow.errors import WeightSyncError
from .layout import Box

MOST_CHANGED = 0.1
"""Share of changed elements above which a box is given whole: coding more takes longer than sending them."""

_ESCAPE = 255
"""A byte that stands for so many unchanged elements, with more to come."""


@dataclass(frozen=True)
class Delta:
    """What has changed in a box."""

    gaps: np.ndarray
    """[bytes] uint8."""
    values: np.ndarray
    """[changed] bits of the changed elements, as unsigned integers of their size."""

    @property
    def num_bytes(self) -> int:
        """That travel."""
        return self.gaps.nbytes + self.values.nbytes


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """The bits of a contiguous tensor as unsigned integers, in one dimension; on the host without a copy.

    >>> bits_of(torch.tensor([0.0, -0.0])).tolist()
    [0, 2147483648]
    """
    return tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy().view(f"u{tensor.element_size()}")


def delta_of(bits: np.ndarray, changed: np.ndarray) -> Delta:
    """Code the elements that have changed.

    Args:
        bits: [elements] new bits.
        changed: positions of those that have changed, ascending.

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
    """Write the changed elements over those of the version before.

    Args:
        bits: [elements] of the version before, overwritten.
        delta: of the version after it.

    Raises:
        WeightSyncError: gaps and values are not those of one delta, or reach beyond the box; nothing is written.
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
    """Of the positions in a box those that lie in a part of it, as positions in the part.

    Args:
        positions: ascending.
        outer: the box that they count in.
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
    """What a publisher gave last, in host memory: the bits of each of its entries, and their version."""

    def __init__(self) -> None:
        self.version: int | None = None
        """Of all entries; None: they are of several versions, or there are none."""
        self.compared = 0
        """Elements of the last version that were compared with the one before."""
        self.differed = 0
        """Those of them that differed."""
        self._bits: dict[int, np.ndarray] = {}

    def begin(self) -> int | None:
        """A version comes. Until `version` is set again, it says None; returns what it was."""
        self.compared = self.differed = 0
        base, self.version = self.version, None
        return base

    def forget(self) -> None:
        """Free the memory; the next version is given whole."""
        self.version = None
        self._bits.clear()

    def changed(self, number: int, bits: np.ndarray) -> np.ndarray | None:
        """Positions of the elements that differ from those given last. These are what was given last from now on.

        Args:
            number: of the entry.
            bits: [elements] of the entry.

        Returns:
            Ascending positions; None: the entry is to be given whole, since most has changed or it was not given before.
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
        """Of host memory."""
        return sum(bits.nbytes for bits in self._bits.values())
