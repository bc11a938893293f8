"""Layout: which box of each tensor each rank holds, and where in its memory.

Names and coordinates are those of the checkpoint, on both sides: the trainer's layout is read from its DTensors, and vLLM's
is recorded while its own loaders run. So no table says which projections an engine fuses, or which heads it holds twice.

    "model.layers.0.self_attn.k_proj.weight", shape (64, 128), two ranks
        trainer, FSDP     rank 0: rows 0 to 32       rank 1: rows 32 to 64
        vLLM, TP          rank 0: rows 0 to 32       rank 1: rows 32 to 64     in "model.layers.0.self_attn.qkv_proj.weight"
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from ..dataflow.errors import UserError, nearest

# Box
#
# Box: a rectangular part of a tensor. Resharding is made of intersections of boxes.


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


ITEM_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of one element, by torch's name of the dtype."""


@dataclass(frozen=True, slots=True)
class Where:
    """Where a rank runs. Copies prefer a source that is near."""

    node: str = ""
    device: str = ""
    """Name of the memory on that node, as "cuda:3". What two ranks hold in one memory need not travel; empty: each rank has its own."""
    process: str = ""
    """Name of the process on that node; empty: each rank has its own."""

    def distance(self, other: Where) -> int:
        """0 in one process, 1 in one device's memory, 2 on one node, 3 between nodes."""
        if self.node != other.node:
            return 3
        if self.process and self.process == other.process:
            return 0
        return 1 if self.device and self.device == other.device else 2


IN_PLACE = 1
"""The largest distance over which nothing travels."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the elements of a box lie in the memory of a rank. The element at the index `i` (counted from the start of the box) is
    the element `offset + sum(i * strides)` of the memory."""

    memory: str
    """Name of a contiguous piece of the rank's memory: of a parameter of the module, in general."""
    offset: int
    """In elements."""
    strides: tuple[int, ...]
    """In elements, for each dimension of the tensor."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor that a rank holds."""

    box: Box
    place: Place | None = None
    """None in a layout that was computed from a formula, where there is no memory."""


@dataclass(frozen=True)
class TensorLayout:
    """How one tensor lies over the ranks."""

    name: str
    """Name in the checkpoint."""
    shape: tuple[int, ...]
    """Shape in the checkpoint."""
    dtype: str
    """torch's name for it, as "bfloat16"."""
    pieces: tuple[tuple[Piece, ...], ...]
    """For each rank, what it holds; empty where it holds nothing."""

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise UserError(
                f"tensor {self.name!r}: dtype {self.dtype!r} is not known{nearest(self.dtype, ITEM_BYTES)}"
            )

    def check_boxes(self) -> None:
        """See that each box lies inside of the tensor.

        Raises:
            UserError: naming tensor, rank and box.
        """
        whole = Box.full(self.shape)
        for rank, pieces in enumerate(self.pieces):
            for piece in pieces:
                if len(piece.box.starts) != len(self.shape) or (
                    piece.box.numel and piece.box.intersection(whole) != piece.box
                ):
                    raise UserError(
                        f"tensor {self.name!r}, rank {rank}: {piece.box} lies outside of the shape {self.shape}"
                    )

    @cached_property
    def boxes(self) -> tuple[tuple[Box, ...], ...]:
        """For each rank, the boxes of its pieces. Equal tensors of different layers have equal boxes."""
        return tuple(tuple(piece.box for piece in pieces) for pieces in self.pieces)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Held:
    """What one rank reports of one tensor."""

    shape: tuple[int, ...]
    """Shape in the checkpoint."""
    dtype: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class RankLayout:
    """What one rank holds: plain data that travels to whoever makes the plan."""

    where: Where
    tensors: Mapping[str, Held]
    """By name in the checkpoint. A tensor of which the rank holds nothing may be left out."""


@dataclass(frozen=True, eq=False)
class Layout:
    """How all tensors of a model lie over the ranks of one side of a transfer."""

    tensors: Mapping[str, TensorLayout]
    """By name in the checkpoint, in the order in which they are transferred."""
    ranks: tuple[Where, ...]
    """Where each rank runs."""
    label: str = ""
    """What `explain` calls this layout, as "FSDP 4"."""

    def __post_init__(self) -> None:
        checked: set[tuple[int, tuple[int, ...]]] = set()
        for tensor in self.tensors.values():
            if (
                shared := (id(tensor.pieces), tensor.shape)
            ) not in checked:  # equal layers share them in layouts from formulas
                checked.add(shared)
                tensor.check_boxes()
            if len(tensor.pieces) != len(self.ranks):
                raise UserError(
                    f"layout {self.label!r}: tensor {tensor.name!r} lies over {len(tensor.pieces)} ranks, the layout has {len(self.ranks)}"
                )

    @classmethod
    def of(cls, tensors: Iterable[TensorLayout], ranks: Sequence[Where], label: str = "") -> Layout:
        """A layout of these tensors, in this order.

        Raises:
            UserError: two tensors have one name, or one lies over another number of ranks.
        """
        by_name: dict[str, TensorLayout] = {}
        for tensor in tensors:
            if by_name.setdefault(tensor.name, tensor) is not tensor:
                raise UserError(f"layout {label!r}: tensor {tensor.name!r} occurs twice")
        return cls(by_name, tuple(ranks), label)

    @classmethod
    def of_ranks(cls, reports: Sequence[RankLayout], label: str = "") -> Layout:
        """The layout of a group, from what each of its ranks reports, in the order of the ranks.

        Raises:
            UserError: two ranks say different shapes or dtypes of one tensor.
        """
        known: dict[str, tuple[int, Held]] = {}
        for rank, report in enumerate(reports):
            for name, held in report.tensors.items():
                first_rank, first = known.setdefault(name, (rank, held))
                if (first.shape, first.dtype) != (held.shape, held.dtype):
                    raise UserError(
                        f"layout {label!r}: tensor {name!r} is {first.dtype} {first.shape} on rank {first_rank}, "
                        f"and {held.dtype} {held.shape} on rank {rank}"
                    )
        nothing = Held((), "", ())
        tensors = (
            TensorLayout(
                name, held.shape, held.dtype, tuple(r.tensors.get(name, nothing).pieces for r in reports)
            )
            for name, (_, held) in known.items()
        )
        return cls.of(tensors, [report.where for report in reports], label)

    def num_bytes(self, rank: int) -> int:
        """Bytes that a rank holds; elements that it holds twice count twice."""
        return self._bytes_of_ranks[rank]

    @cached_property
    def _bytes_of_ranks(self) -> list[int]:
        """`num_bytes` of each rank; what equal layers share is counted once, and multiplied."""
        shared = {(id(t.pieces), t.item_bytes): t for t in self.tensors.values()}
        times = Counter((id(t.pieces), t.item_bytes) for t in self.tensors.values())
        found = [0] * len(self.ranks)
        for key, tensor in shared.items():
            for rank, pieces in enumerate(tensor.pieces):
                found[rank] += times[key] * tensor.item_bytes * sum(piece.box.numel for piece in pieces)
        return found
