"""Layout: the box of each tensor that each rank holds, and its position in the rank's memory.

Both sides use the names and coordinates of the checkpoint. The trainer's layout comes from its
DTensors. vLLM's layout is recorded while its own loaders run, so no table lists fused projections
or replicated heads.

    "model.layers.0.self_attn.k_proj.weight", shape (64, 128), two ranks
        trainer, FSDP     rank 0: rows 0 to 32       rank 1: rows 32 to 64
        vLLM, TP          rank 0: rows 0 to 32       rank 1: rows 32 to 64     (in "qkv_proj.weight")
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from ..dataflow.errors import UserError, nearest

# Box: a rectangular part of a tensor. Resharding consists of intersections of boxes.


@dataclass(frozen=True, slots=True)
class Box:
    """The elements of a tensor with indices in [start, stop) along each dimension.

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
        """Return the box of all elements of a tensor.

        Args:
            shape: the tensor's extent along each dimension.
        """
        return cls((0,) * len(shape), shape)

    @classmethod
    def along(cls, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Self:
        """Return the box of the indices [start, stop) along one dimension."""
        starts, stops = [0] * len(shape), list(shape)
        starts[dim], stops[dim] = start, stop
        return cls(tuple(starts), tuple(stops))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of these elements in an array of the whole tensor."""
        return tuple(map(slice, self.starts, self.stops))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the index of these elements in an array that holds only the box `outer`."""
        return tuple(
            slice(start - origin, stop - origin)
            for start, stop, origin in zip(self.starts, self.stops, outer.starts, strict=True)
        )

    def intersection(self, other: Box) -> Box | None:
        """Return the common elements of both boxes; None if there are none."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        return Box(starts, stops) if all(map(int.__lt__, starts, stops)) else None

    def minus(self, other: Box) -> list[Box]:
        """Return the elements outside `other`, as disjoint boxes: at most two per dimension."""
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


# Layout

ITEM_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of one element, by torch's name of the dtype."""


@dataclass(frozen=True, slots=True)
class Where:
    """Location of a rank. Copies prefer a near source."""

    node: str = ""
    device: str = ""
    """Name of the memory on that node, such as "cuda:3". Ranks that share one need no transfer."""
    process: str = ""
    """Name of the process on that node; empty if each rank has its own."""

    def distance(self, other: Where) -> int:
        """0 within a process, 1 within one device's memory, 2 on one node, 3 between nodes."""
        if self.node != other.node:
            return 3
        if self.process and self.process == other.process:
            return 0
        return 1 if self.device and self.device == other.device else 2


IN_PLACE = 1
"""Largest distance without a transfer."""


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a box's elements in a rank's memory.

    The element at index `i`, relative to the start of the box, is the element `offset + sum(i *
    strides)` of the memory.
    """

    memory: str
    """Name of a contiguous part of the rank's memory, usually a parameter of the module."""
    offset: int
    """In elements."""
    strides: tuple[int, ...]
    """In elements, for each dimension of the tensor."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor that a rank holds."""

    box: Box
    place: Place | None = None
    """None in a layout that was computed from a formula, without memory."""


@dataclass(frozen=True)
class TensorLayout:
    """Distribution of one tensor over the ranks."""

    name: str
    """Name in the checkpoint."""
    shape: tuple[int, ...]
    """Shape in the checkpoint."""
    dtype: str
    """Name of the torch dtype, such as "bfloat16"."""
    pieces: tuple[tuple[Piece, ...], ...]
    """For each rank, the pieces that it holds; empty if it holds nothing."""

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise UserError(
                f"tensor {self.name!r}: dtype {self.dtype!r} is not known{nearest(self.dtype, ITEM_BYTES)}"
            )

    def check_boxes(self) -> None:
        """Check that each box is inside the tensor.

        Raises:
            UserError: a box is outside. The message names tensor, rank and box.
        """
        whole = Box.full(self.shape)
        for rank, pieces in enumerate(self.pieces):
            for piece in pieces:
                if len(piece.box.starts) != len(self.shape) or (
                    piece.box.numel and piece.box.intersection(whole) != piece.box
                ):
                    raise UserError(
                        f"tensor {self.name!r}, rank {rank}: {piece.box} is outside the shape {self.shape}"
                    )

    @cached_property
    def boxes(self) -> tuple[tuple[Box, ...], ...]:
        """Boxes of each rank's pieces. Equal tensors of different layers have equal boxes."""
        return tuple(tuple(piece.box for piece in pieces) for pieces in self.pieces)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Held:
    """One rank's report on one tensor."""

    shape: tuple[int, ...]
    """Shape in the checkpoint."""
    dtype: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class RankLayout:
    """The tensors that one rank holds, as plain data for the planner."""

    where: Where
    tensors: Mapping[str, Held]
    """By name in the checkpoint. Tensors that the rank does not hold may be missing."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Distribution of a model's tensors over the ranks of one side of a transfer."""

    tensors: Mapping[str, TensorLayout]
    """By name in the checkpoint, in the order of the transfer."""
    ranks: tuple[Where, ...]
    label: str = ""
    """Name of the layout in `explain`, such as "FSDP 4"."""

    def __post_init__(self) -> None:
        checked: set[tuple[int, tuple[int, ...]]] = set()
        for tensor in self.tensors.values():
            # Equal layers share pieces in layouts from formulas, so check each pair once.
            if (shared := (id(tensor.pieces), tensor.shape)) not in checked:
                checked.add(shared)
                tensor.check_boxes()
            if len(tensor.pieces) != len(self.ranks):
                raise UserError(
                    f"layout {self.label!r}: tensor {tensor.name!r} covers {len(tensor.pieces)} ranks, but the layout has {len(self.ranks)}"
                )

    @classmethod
    def of(cls, tensors: Iterable[TensorLayout], ranks: Sequence[Where], label: str = "") -> Layout:
        """Return a layout of these tensors, in this order.

        Raises:
            UserError: two tensors have the same name, or a tensor has a different number of ranks.
        """
        by_name: dict[str, TensorLayout] = {}
        for tensor in tensors:
            if by_name.setdefault(tensor.name, tensor) is not tensor:
                raise UserError(f"layout {label!r}: tensor {tensor.name!r} occurs twice")
        return cls(by_name, tuple(ranks), label)

    @classmethod
    def of_ranks(cls, reports: Sequence[RankLayout], label: str = "") -> Layout:
        """Return the layout of a group from the reports of its ranks, in rank order.

        Raises:
            UserError: two ranks report different shapes or dtypes of one tensor.
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
        """Return the bytes that a rank holds. Elements that it holds twice count twice."""
        return self._bytes_of_ranks[rank]

    @cached_property
    def _bytes_of_ranks(self) -> list[int]:
        """`num_bytes` of each rank. Equal layers are counted once and multiplied."""
        shared = {(id(t.pieces), t.item_bytes): t for t in self.tensors.values()}
        times = Counter((id(t.pieces), t.item_bytes) for t in self.tensors.values())
        found = [0] * len(self.ranks)
        for key, tensor in shared.items():
            for rank, pieces in enumerate(tensor.pieces):
                found[rank] += times[key] * tensor.item_bytes * sum(piece.box.numel for piece in pieces)
        return found
