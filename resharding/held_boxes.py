"""HeldBoxes: what a receiver took of a publisher last, in host memory, so that the next version can come as deltas."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .box import Box


class HeldBoxes:
    """The bits of the boxes that a receiver took, and their version.

    Args:
        publisher: who gives them; the numbers of entries are its own.
    """

    def __init__(self, publisher: str) -> None:
        self.publisher = publisher
        self.version: int | None = None
        """Of all boxes; None: they are of several versions, or there are none."""
        self._bits: dict[tuple[int, Box], np.ndarray] = {}

    def begin(self, wanted: Iterable[tuple[int, Box]]) -> int | None:
        """A version comes. Until `version` is set again, it says None.

        Args:
            wanted: number of the entry, and box, of all that will be taken.

        Returns:
            The version that is held of all of these; None: deltas are of no use.
        """
        keys = set(wanted)
        base, self.version = self.version, None
        if not keys <= self._bits.keys():
            base = None
        self._bits = {key: bits for key, bits in self._bits.items() if key in keys}
        return base

    def box(self, number: int, box: Box, dtype: np.dtype) -> np.ndarray:
        """The bits of a box, [elements]: those held, or memory for them.

        Args:
            number: of its entry.
            dtype: unsigned integers of the elements' size.
        """
        key = (number, box)
        if key not in self._bits:
            self._bits[key] = np.empty(box.numel, dtype)
        return self._bits[key]

    @property
    def num_bytes(self) -> int:
        """Of host memory."""
        return sum(bits.nbytes for bits in self._bits.values())


_held: dict[tuple[str, int, int], HeldBoxes] = {}
"""By name of the receiver, number of its part, and rank of the publisher."""


def held_boxes(receiver: str, part: int, rank: int, publisher: str) -> HeldBoxes:
    """What this process holds of a rank of the trainer.

    Args:
        receiver: its name; of one without a name nothing is held for the next version.
        part: number of this process of the receiver.
        rank: of the publisher.
        publisher: what tells apart publishers, and their descriptions of entries. What another one gave is dropped.
    """
    found = _held.get((receiver, part, rank))
    if found is None or found.publisher != publisher:
        found = HeldBoxes(publisher)
        if receiver:
            _held[receiver, part, rank] = found
    return found
