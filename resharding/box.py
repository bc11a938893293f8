"""Box: a rectangular part of a tensor. Resharding is made of intersections of boxes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Box:
    """The elements of a tensor whose index lies in [start, stop) along each dimension.

    >>> rows = Box((0, 0), (4, 8))
    >>> columns = Box((0, 6), (10, 8))
    >>> rows.intersection(columns)
    Box([0:4, 6:8])
    """

    starts: tuple[int, ...]
    """First index along each dimension; empty for a scalar."""
    stops: tuple[int, ...]
    """One past the last index along each dimension."""

    @classmethod
    def full(cls, shape: tuple[int, ...]) -> Self:
        """The box of all elements of a tensor.

        Args:
            shape: the tensor's extent along each dimension.
        """
        return cls((0,) * len(shape), shape)

    @classmethod
    def along(cls, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Self:
        """The box of the indices [start, stop) along one dimension, and of all along the others."""
        starts, stops = [0] * len(shape), list(shape)
        starts[dim], stops[dim] = start, stop
        return cls(tuple(starts), tuple(stops))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent along each dimension."""
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that selects these elements from an array of the whole tensor."""
        return tuple(map(slice, self.starts, self.stops))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The index that selects these elements from an array that holds the box `outer` alone."""
        return tuple(
            slice(start - origin, stop - origin)
            for start, stop, origin in zip(self.starts, self.stops, outer.starts, strict=True)
        )

    def intersection(self, other: Box) -> Box | None:
        """The elements that both boxes have; None where there is none."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        return Box(starts, stops) if all(map(int.__lt__, starts, stops)) else None

    def minus(self, other: Box) -> list[Box]:
        """The elements that `other` does not have, as disjoint boxes: at most two for each dimension."""
        common = self.intersection(other)
        if common is None:
            return [self]
        left: list[Box] = []
        starts, stops = list(self.starts), list(self.stops)
        for dim in range(len(starts)):
            for start, stop in ((starts[dim], common.starts[dim]), (common.stops[dim], stops[dim])):
                if start < stop:
                    cut_starts, cut_stops = starts.copy(), stops.copy()
                    cut_starts[dim], cut_stops[dim] = start, stop
                    left.append(Box(tuple(cut_starts), tuple(cut_stops)))
            starts[dim], stops[dim] = common.starts[dim], common.stops[dim]
        return left

    def __repr__(self) -> str:
        return f"Box([{', '.join(f'{start}:{stop}' for start, stop in zip(self.starts, self.stops, strict=True))}])"
