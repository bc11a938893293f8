"""Weights as plain data: the boxes of tensors that each rank holds, the copies between two layouts,
and the records of a version.

Both sides of a transfer use the names and coordinates of the checkpoint. The trainer's layout comes
from its DTensors. Weft records vLLM's layout while vLLM's loaders run, so it needs no table of
fused projections or replicated heads.

    "model.layers.0.self_attn.k_proj.weight", shape (64, 128), two ranks
        trainer, FSDP     rank 0: rows 0 to 32       rank 1: rows 32 to 64
        vLLM, TP          rank 0: rows 0 to 32       rank 1: rows 32 to 64     (in "qkv_proj.weight")
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np

from ..dataflow.errors import UserError, WeightSyncError, nearest
from ..dataflow.lazy import torch

# Box: a rectangular part of a tensor. Resharding computes intersections of boxes.


@dataclass(frozen=True, slots=True)
class Box:
    """The elements of a tensor with indexes in [start, stop) along each dimension.

    >>> Box((0, 0), (4, 8)).intersection(Box((0, 6), (10, 8)))
    Box([0:4, 6:8])
    """

    starts: tuple[int, ...]
    """First index along each dimension; empty for a scalar."""
    stops: tuple[int, ...]
    """One past the last index along each dimension."""

    @classmethod
    def full(cls, shape: tuple[int, ...]) -> Self:
        return cls((0,) * len(shape), shape)

    @classmethod
    def along(cls, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Self:
        """Return the box with indexes [start, stop) along one dimension, and all along others."""
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
        """Return the elements in both boxes, or None if there are none."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        return Box(starts, stops) if all(map(int.__lt__, starts, stops)) else None

    def minus(self, other: Box) -> list[Box]:
        """Return the elements outside `other` as disjoint boxes, at most two per dimension."""
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
            # Later dimensions cut only the remaining elements, so the boxes are disjoint.
            starts[dim], stops[dim] = common.starts[dim], common.stops[dim]
        return left

    def __repr__(self) -> str:
        return f"Box([{', '.join(f'{start}:{stop}' for start, stop in zip(self.starts, self.stops, strict=True))}])"


# Layout

ITEM_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes per element, keyed by torch's name of the dtype."""


@dataclass(frozen=True, slots=True)
class Where:
    """Location of a rank. Copies prefer a close source."""

    node: str = ""
    device: str = ""
    """Name of the memory on that node, such as "cuda:3"."""

    def distance(self, other: Where) -> int:
        """Return 0 within one device's memory (no transfer), 1 within a node, 2 between nodes."""
        if self.node != other.node:
            return 2
        return 0 if self.device and self.device == other.device else 1


@dataclass(frozen=True, slots=True)
class View:
    """The elements `offset + sum(i * strides)` of a memory, for each index `i` below `shape`."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A box of a tensor that a rank holds. Pieces of a layout from a formula have no memory."""

    box: Box
    memory: str = ""
    """Name of a contiguous part of the rank's memory, usually a module parameter."""
    view: View | None = None
    """Position of the elements in that memory, in the shape of the box."""


@dataclass(frozen=True)
class TensorLayout:
    """How one tensor is distributed over the ranks, with its name and shape in the checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name of the torch dtype, such as "bfloat16"."""
    pieces: tuple[tuple[Piece, ...], ...]
    """For each rank, the pieces that it holds; may be empty."""

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise UserError(
                f"tensor {self.name!r}: dtype {self.dtype!r} is not known{nearest(self.dtype, ITEM_BYTES)}"
            )

    def check_boxes(self) -> None:
        """Raise UserError if a box is outside the tensor."""
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
        """The boxes of each rank's pieces. Equal tensors of different layers have equal boxes."""
        return tuple(tuple(piece.box for piece in pieces) for pieces in self.pieces)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


@dataclass(frozen=True, eq=False)
class Layout:
    """How a model's tensors are distributed over the ranks of one side of a transfer."""

    tensors: Mapping[str, TensorLayout]
    """Tensors by checkpoint name, in transfer order."""
    ranks: tuple[Where, ...]
    label: str = ""
    """Name of the layout in `explain`, such as "FSDP 4"."""

    def __post_init__(self) -> None:
        checked: set[tuple[int, tuple[int, ...]]] = set()
        for tensor in self.tensors.values():
            # Equal layers of formula layouts share their pieces, so check each pair only once.
            if (shared := (id(tensor.pieces), tensor.shape)) not in checked:
                checked.add(shared)
                tensor.check_boxes()
            if len(tensor.pieces) != len(self.ranks):
                raise UserError(
                    f"layout {self.label!r}: tensor {tensor.name!r} covers {len(tensor.pieces)} ranks, but the layout has {len(self.ranks)}"
                )

    @classmethod
    def of(cls, tensors: Iterable[TensorLayout], ranks: Sequence[Where], label: str = "") -> Layout:
        """Return a layout of these tensors, in this order. Raises UserError if two tensors have the
        same name, or if a tensor has a different number of ranks."""
        by_name: dict[str, TensorLayout] = {}
        for tensor in tensors:
            if by_name.setdefault(tensor.name, tensor) is not tensor:
                raise UserError(f"layout {label!r}: tensor {tensor.name!r} occurs twice")
        return cls(by_name, tuple(ranks), label)

    @classmethod
    def of_ranks(cls, layouts: Sequence[Layout], label: str = "") -> Layout:
        """Return the layout of a group, given layouts of one rank each, which may leave out
        tensors. Raises UserError if two ranks disagree on the shape or dtype of a tensor."""
        known: dict[str, tuple[int, TensorLayout]] = {}
        for rank, layout in enumerate(layouts):
            for name, own in layout.tensors.items():
                first_rank, first = known.setdefault(name, (rank, own))
                if (first.shape, first.dtype) != (own.shape, own.dtype):
                    raise UserError(
                        f"layout {label!r}: tensor {name!r} is {first.dtype} {first.shape} on rank {first_rank}, "
                        f"and {own.dtype} {own.shape} on rank {rank}"
                    )
        tensors: list[TensorLayout] = []
        for name, (_, first) in known.items():
            pieces = (one.tensors[name].pieces[0] if name in one.tensors else () for one in layouts)
            tensors.append(TensorLayout(name, first.shape, first.dtype, tuple(pieces)))
        return cls.of(tensors, [layout.ranks[0] for layout in layouts], label)

    def num_bytes(self, rank: int) -> int:
        """Return the bytes that a rank holds. Elements in two places count twice."""
        return self._bytes_of_ranks[rank]

    @cached_property
    def _bytes_of_ranks(self) -> list[int]:
        shared = {(id(t.pieces), t.item_bytes): t for t in self.tensors.values()}
        times = Counter((id(t.pieces), t.item_bytes) for t in self.tensors.values())
        found = [0] * len(self.ranks)
        for key, tensor in shared.items():
            for rank, pieces in enumerate(tensor.pieces):
                found[rank] += times[key] * tensor.item_bytes * sum(piece.box.numel for piece in pieces)
        return found


# Strided views as boxes of a contiguous tensor. A loader may narrow, transpose, split or flatten a
# tensor before it copies elements.

MAX_BOXES = 1 << 16
"""Reject views of more boxes than this, such as every second element of a long row."""


class _Axis(NamedTuple):
    length: int
    step: int
    """Step in indexes of the tensor's dimension."""
    stride: int
    """Stride in the other memory."""


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def paired_boxes(shape: tuple[int, ...], view: View, other: View) -> list[tuple[Box, View]]:
    """Return the boxes of a contiguous tensor that `view` covers, each with its position in another
    memory, as a view in the shape of the box. `other` is the view of that memory, in the shape of
    `view`. Raises ValueError if `view` repeats an element (stride 0), or does not consist of at
    most `MAX_BOXES` boxes.

    >>> rows = View(offset=8, shape=(2, 4), strides=(4, 1))  # rows 2 and 3 of a tensor (4, 4)
    >>> paired_boxes((4, 4), rows, View(100, (2, 4), (16, 1)))
    [(Box([2:4, 0:4]), View(offset=100, shape=(2, 4), strides=(16, 1)))]
    """
    if math.prod(view.shape) == 0:
        return []
    starts = _index(shape, view.offset)
    spans: list[_Axis] = []
    outer: list[tuple[int, _Axis]] = []
    for dim, axes in enumerate(_axes(shape, view, other)):
        last = starts[dim] + sum((axis.length - 1) * axis.step for axis in axes)
        if last >= shape[dim]:
            raise ValueError(f"the view wraps around the end of dimension {dim}")
        merged = _merged(axes)
        # Only consecutive indexes form one box. Other axes get a box for each index.
        spans.append(merged.pop(0) if merged and merged[0].step == 1 else _Axis(1, 1, 0))
        outer += [(dim, axis) for axis in merged]
    if (count := math.prod(axis.length for _, axis in outer)) > MAX_BOXES:
        raise ValueError(f"the view falls into {count} boxes, which is more than {MAX_BOXES}")
    return list(_boxes(starts, spans, outer, other.offset))


def _boxes(
    starts: tuple[int, ...], spans: list[_Axis], outer: list[tuple[int, _Axis]], offset: int
) -> Iterator[tuple[Box, View]]:
    """Yield one box for each index along the axes that a box cannot span."""
    lengths = tuple(axis.length for axis in spans)
    strides = tuple(axis.stride for axis in spans)
    for index in itertools.product(*(range(axis.length) for _, axis in outer)):
        moved, there = list(starts), offset
        for position, (dim, axis) in zip(index, outer, strict=True):
            moved[dim] += position * axis.step
            there += position * axis.stride
        stops = tuple(start + length for start, length in zip(moved, lengths, strict=True))
        yield Box(tuple(moved), stops), View(there, lengths, strides)


def _index(shape: tuple[int, ...], offset: int) -> tuple[int, ...]:
    if not 0 <= offset < math.prod(shape):
        raise ValueError(f"the view starts at element {offset} of {math.prod(shape)}")
    index = []
    for stride in contiguous_strides(shape):
        index.append(offset // stride)
        offset %= stride
    return tuple(index)


def _axes(shape: tuple[int, ...], view: View, other: View) -> list[list[_Axis]]:
    """Return, for each dimension of the tensor, the dimensions of the view that run along it."""
    tensor_strides = contiguous_strides(shape)
    # Skip dimensions of extent 1: they have a neighbor's stride, and would match in its place.
    dims = [dim for dim, extent in enumerate(shape) if extent > 1]
    found: list[list[_Axis]] = [[] for _ in shape]
    for count, stride, there in zip(view.shape, view.strides, other.strides, strict=True):
        if count > 1 and stride == 0:
            raise ValueError("the view shows one element several times")
        while count > 1:
            dim = next((dim for dim in dims if tensor_strides[dim] <= stride), None)
            if dim is None or stride % tensor_strides[dim]:
                raise ValueError(f"a stride of {stride} runs along no dimension of the shape {shape}")
            step = stride // tensor_strides[dim]
            length = -(-shape[dim] // step)
            if count <= length:
                found[dim].append(_Axis(count, step, there))
                break
            # One dimension of the view spans several dimensions of the tensor.
            if shape[dim] % step or count % length:
                raise ValueError(
                    f"a dimension of {count} elements ends inside of dimension {dim} of the shape {shape}"
                )
            found[dim].append(_Axis(length, step, there))
            count, stride, there = count // length, stride * length, there * length
    return found


def _merged(axes: list[_Axis]) -> list[_Axis]:
    """Sort axes by step, and join those that continue each other in both memories."""
    merged: list[_Axis] = []
    for axis in sorted(axes, key=lambda axis: axis.step):
        if merged:
            inner = merged[-1]
            if axis.step == inner.length * inner.step and axis.stride == inner.length * inner.stride:
                merged[-1] = _Axis(inner.length * axis.length, inner.step, inner.stride)
                continue
        merged.append(axis)
    return merged


# Plan: the copies that turn one layout into another. Invariants, which
# `tests/resharding/test_plan.py` checks by brute force:
#
# - Exactly one copy to a destination rank covers each element that the rank holds.
# - The plan transfers no elements that are already in a rank's device memory.
# - Each copy uses the closest source; among equally close ones, the one that has sent least.
# - Equal tensors of different layers share their copies: planning a large model takes only seconds.


@dataclass(frozen=True, slots=True)
class Copy:
    source: int
    source_piece: int
    """Index of the source's piece that contains the box."""
    destination: int
    box: Box
    travels: bool
    """Whether a transfer is needed; False if both ranks use one device's memory."""


class ReshardPlan:
    """The copies of boxes from source ranks to destination ranks, in the destination's dtypes.
    Raises WeightSyncError if the source lacks a tensor or a box, or if shapes differ."""

    def __init__(self, source: Layout, destination: Layout) -> None:
        self.source = source
        self.destination = destination
        self._copies: dict[str, tuple[Copy, ...]] = {}
        self.sent_bytes = np.zeros(len(source.ranks), np.int64)
        """Bytes that each source rank sends to other devices."""
        self.received_bytes = np.zeros(len(destination.ranks), np.int64)
        """Bytes that each destination rank receives from other devices."""
        self.in_place_bytes = np.zeros(len(destination.ranks), np.int64)
        """Bytes that each destination rank takes from its own device."""
        self._distances = _distances(source.ranks, destination.ranks)
        for tensors in _equal_tensors(source, destination):
            self._plan_equal(tensors)

    def copies(self, tensor: str) -> tuple[Copy, ...]:
        """Return the copies of this tensor, ordered by destination rank."""
        return self._copies[tensor]

    def received_by(self, rank: int) -> Iterator[tuple[str, Copy]]:
        """Yield the copies to one destination rank, in transfer order."""
        return (
            (name, copy)
            for name in self.destination.tensors
            for copy in self._copies[name]
            if copy.destination == rank
        )

    def redundant_bytes(self, rank: int) -> int:
        """Return the bytes that a destination rank's device holds only for the source layout. For
        HybridFlow's layouts, this is 0 (arXiv:2409.19256, table 2)."""
        owners = np.flatnonzero(self._distances[:, rank] == 0).tolist()
        return max(0, sum(map(self.source.num_bytes, owners)) - int(self.in_place_bytes[rank]))

    def explain(self, bucket_bytes: int = 256 << 20) -> str:
        """Return a table with one line per rank: bytes received, sent and held, and the peak memory
        with at most `bucket_bytes` in flight."""
        source, destination = self.source, self.destination
        model_bytes = sum(Box.full(t.shape).numel * t.item_bytes for t in destination.tensors.values())
        num_copies = sum(copy.travels for copies in self._copies.values() for copy in copies)
        lines = [
            f"from {source.label or 'source'} ({len(source.ranks)} ranks) to {destination.label or 'destination'} "
            f"({len(destination.ranks)} ranks)",
            f"{len(destination.tensors)} tensors, {_gb(model_bytes)}; {num_copies} copies travel, {_gb(self.received_bytes.sum())} in all",
            f"{'rank':>6} {'receives':>12} {'of the model':>12} {'in place':>12} {'peak':>12} {'redundant':>12}",
        ]
        for rank in range(len(destination.ranks)):
            received = int(self.received_bytes[rank])
            peak = destination.num_bytes(rank) + min(bucket_bytes, received)
            lines.append(
                f"{rank:>6} {_gb(received):>12} {received / max(model_bytes, 1):>12.4f} {_gb(self.in_place_bytes[rank]):>12} "
                f"{_gb(peak):>12} {_gb(self.redundant_bytes(rank)):>12}"
            )
        lines += [f"{'rank':>6} {'sends':>12} {'copies':>12} {'to ranks':>12}"]
        given, receivers = self._given()
        for rank, num_bytes in enumerate(self.sent_bytes.tolist()):
            lines.append(f"{rank:>6} {_gb(num_bytes):>12} {given[rank]:>12} {len(receivers[rank]):>12}")
        return "\n".join(lines)

    def _given(self) -> tuple[Counter[int], dict[int, set[int]]]:
        given, receivers = Counter[int](), defaultdict[int, set[int]](set)
        equal = Counter(map(id, self._copies.values()))
        for copies in {id(copies): copies for copies in self._copies.values()}.values():
            for copy in copies:
                if copy.travels:
                    given[copy.source] += equal[id(copies)]
                    receivers[copy.source].add(copy.destination)
        return given, receivers

    def _plan_equal(self, names: Sequence[str]) -> None:
        """Plan equal tensors. Ranks that hold the same box take turns as its source."""
        source, destination = self.source.tensors[names[0]], self.destination.tensors[names[0]]
        equal_sources = max(Counter(box for boxes in source.boxes for box in boxes).values(), default=1)
        num_variants = min(len(names), equal_sources)
        for variant in range(num_variants):
            served = names[variant::num_variants]
            copies = tuple(self._plan_tensor(source, destination, len(served)))
            self._copies.update((name, copies) for name in served)

    def _plan_tensor(
        self, source: TensorLayout, destination: TensorLayout, weight: int
    ) -> Iterator[Copy]:
        pieces = _SourcePieces(source)
        item_bytes = destination.item_bytes
        for rank, boxes in enumerate(destination.boxes):
            # A rank may hold a box twice, but receives it only once.
            for box in dict.fromkeys(boxes):
                if not box.numel:
                    continue
                for owner, piece, part in self._cover(pieces, box, rank, destination.name):
                    travels = bool(self._distances[owner, rank])
                    num_bytes = part.numel * item_bytes * weight
                    if travels:
                        self.sent_bytes[owner] += num_bytes
                        self.received_bytes[rank] += num_bytes
                    else:
                        self.in_place_bytes[rank] += num_bytes
                    yield Copy(owner, piece, rank, part, travels)

    def _cover(
        self, pieces: _SourcePieces, box: Box, rank: int, name: str
    ) -> Iterator[tuple[int, int, Box]]:
        # Cut a box into parts, each with a source rank and the index of that rank's piece.
        found, commons, once = pieces.overlapping(box)
        if once:  # no element has two sources, so the order does not matter
            for index, common in zip(found, commons, strict=True):
                yield int(pieces.ranks[index]), int(pieces.numbers[index]), common
            return
        owners = pieces.ranks[found]
        # The last key of `lexsort` is the most significant.
        order = np.lexsort((owners, self.sent_bytes[owners], self._distances[owners, rank]))
        missing = [box]
        for position in order:
            index, held = found[position], commons[position]
            rest: list[Box] = []
            for part in missing:
                common = part.intersection(held)
                if common is None:
                    rest.append(part)
                else:
                    yield int(pieces.ranks[index]), int(pieces.numbers[index]), common
                    rest += part.minus(common)
            missing = rest
            if not missing:
                return
        raise WeightSyncError(
            f"tensor {name!r}: no rank of {self.source.label or 'the source'} has {missing[0]}, "
            f"which rank {rank} of {self.destination.label or 'the destination'} needs"
        )


class _SourcePieces:
    def __init__(self, tensor: TensorLayout) -> None:
        held = [
            (rank, n, box)
            for rank, boxes in enumerate(tensor.boxes)
            for n, box in enumerate(boxes)
            if box.numel
        ]
        self.boxes = [box for _, _, box in held]
        self.ranks = np.array([rank for rank, _, _ in held], np.int64)
        self.numbers = np.array([number for _, number, _ in held], np.int64)
        dims = len(tensor.shape)
        self._starts = np.array([box.starts for box in self.boxes], np.int64).reshape(len(held), dims)
        self._stops = np.array([box.stops for box in self.boxes], np.int64).reshape(len(held), dims)
        self._found: dict[Box, tuple[np.ndarray, list[Box], bool]] = {}

    def overlapping(self, box: Box) -> tuple[np.ndarray, list[Box], bool]:
        """Return the overlapping pieces, the overlaps, and whether these cover the box once."""
        if box not in self._found:
            overlap = (self._starts < np.array(box.stops, np.int64)) & (
                self._stops > np.array(box.starts, np.int64)
            )
            found = np.flatnonzero(overlap.all(axis=1))
            commons = [common for index in found if (common := box.intersection(self.boxes[index]))]
            self._found[box] = found, commons, self._once(box, found, commons)
        return self._found[box]

    def _once(self, box: Box, found: np.ndarray, commons: list[Box]) -> bool:
        if sum(common.numel for common in commons) != box.numel:
            return False
        # Equal sizes are not enough: two pieces may overlap while an element is missing.
        starts = np.maximum(self._starts[found], box.starts)
        stops = np.minimum(self._stops[found], box.stops)
        return int(((starts[:, None] < stops) & (stops[:, None] > starts)).all(axis=2).sum()) == len(
            found
        )


def _distances(sources: Sequence[Where], destinations: Sequence[Where]) -> np.ndarray:
    """Return `Where.distance` from each source rank (rows) to each destination rank (columns)."""
    distance = functools.cache(Where.distance)
    found = [[distance(source, destination) for destination in destinations] for source in sources]
    return np.array(found, np.int8).reshape(len(sources), len(destinations))


def _equal_tensors(source: Layout, destination: Layout) -> list[list[str]]:
    """Group the destination's tensors by shape, dtype, and their boxes on both sides."""
    numbers: dict[tuple[tuple[Box, ...], ...], int] = {}
    by_identity: dict[int, int] = {}

    def number(tensor: TensorLayout) -> int:
        # Formula layouts share pieces: compare identities, not the boxes of 36,000 experts.
        key = id(tensor.pieces)
        if key not in by_identity:
            by_identity[key] = numbers.setdefault(tensor.boxes, len(numbers))
        return by_identity[key]

    equal: dict[tuple[object, ...], list[str]] = {}
    for name, wanted in destination.tensors.items():
        held = source.tensors.get(name)
        if held is None:
            raise WeightSyncError(
                f"tensor {name!r} is needed by {destination.label or 'the destination'}, and "
                f"{source.label or 'the source'} has none of that name{nearest(name, source.tensors)}"
            )
        if held.shape != wanted.shape:
            raise WeightSyncError(
                f"tensor {name!r} has the shape {held.shape} in {source.label or 'the source'}, "
                f"and {wanted.shape} in {destination.label or 'the destination'}"
            )
        equal.setdefault((wanted.shape, wanted.dtype, number(held), number(wanted)), []).append(name)
    return list(equal.values())


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3f} GB"


# Records of a published version

BY_VLLM = "vllm:"
"""Prefix of the transports that are vLLM's own backends."""

CHECKSUM_MODULUS = 1 << 64


class TensorPart(NamedTuple):
    """A box of a checkpoint tensor with this name and shape, and its elements."""

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor
    dtype: torch.dtype | None = None
    """Dtype of the transfer; None for the tensor's own dtype. The copy casts the elements."""


def whole(named_tensors: Mapping[str, torch.Tensor]) -> Iterator[TensorPart]:
    for name, tensor in named_tensors.items():
        yield TensorPart(name, tuple(tensor.shape), Box.full(tuple(tensor.shape)), tensor)


LOOPBACK = "127.0.0.1"
"""Address for a rank to listen on if no other machine needs to reach it."""


@dataclass(frozen=True)
class RankWeights:
    """The endpoint that publishes one rank's parts. Receivers prove that they know the token."""

    host: str
    """Address for receivers on other machines; empty to listen on LOOPBACK only."""
    port: int
    machine: str
    """The machine whose processes can map the rank's memory (see `this_machine`)."""
    token: str = field(default="", repr=False)


@dataclass(frozen=True)
class Weights:
    """A published version. Adding the ranks' records gives the group's record."""

    version: int
    ranks: tuple[RankWeights, ...]
    receiver: str = ""
    """Name of the receiver in messages, such as "rollout[0]"."""
    backend: str = ""
    """The vLLM backend that transfers the weights; empty for Weft's own transfer."""

    def __add__(self, other: Weights) -> Weights:
        if other.version != self.version:
            raise ValueError(f"cannot add weights of versions {self.version} and {other.version}")
        return replace(self, ranks=self.ranks + other.ranks)

    def to(self, receiver: str) -> Weights:
        return replace(self, receiver=receiver)


@dataclass(frozen=True)
class Given:
    """Summary of a published version. Adding the ranks' summaries gives the group's summary."""

    version: int
    checksum: str | None
    """Sum over all elements, as 16 hexadecimal digits; None if no receiver took everything."""
    num_bytes: int
    """Bytes sent to a receiver that takes all elements."""

    def __add__(self, other: Given) -> Given:
        num_bytes = self.num_bytes + other.num_bytes
        if self.checksum is None or other.checksum is None:
            return Given(self.version, None, num_bytes)
        checksum = f"{(int(self.checksum, 16) + int(other.checksum, 16)) % CHECKSUM_MODULUS:016x}"
        return Given(self.version, checksum, num_bytes)


def mix_bits(numbers: np.ndarray) -> np.ndarray:
    """Finalizer of SplitMix64 (Steele, Lea and Flood, 2014): a pseudo-random function in which each
    result bit depends on all input bits."""
    with np.errstate(over="ignore"):
        numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
        numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return numbers ^ (numbers >> np.uint64(31))
