"""ReshardPlan: the copies that turn one layout into another. Pure arithmetic on boxes.

A plan has these invariants (`tests/resharding/test_plan.py` compares them with brute force):
- Exactly one copy to a destination rank covers each element that the rank holds.
- Elements that are already in a rank's device memory do not travel.
- Among equal sources, the nearest wins, then the one that has sent least so far.
- Equal tensors of different layers share their copies, so planning a large model takes seconds.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..dataflow.errors import WeightSyncError, nearest
from .layout import IN_PLACE, Box, Layout, TensorLayout, Where


@dataclass(frozen=True, slots=True)
class Copy:
    source: int
    source_piece: int
    """Index of the source's piece of this tensor that has the box."""
    destination: int
    box: Box
    travels: bool
    """False if both ranks hold it in the memory of one device."""


class ReshardPlan:
    """The copies of boxes from source ranks to destination ranks, in the destination's dtypes. The
    source may contain tensors that the destination does not need. Raises WeightSyncError if the
    source lacks a tensor or a box that the destination needs, or has it in another shape."""

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
        """Return the copies of the tensor of this name, ordered by destination rank."""
        return self._copies[tensor]

    def received_by(self, rank: int) -> Iterator[tuple[str, Copy]]:
        """Iterate over the copies to one destination rank, in the order of the transfer."""
        return (
            (name, copy)
            for name in self.destination.tensors
            for copy in self._copies[name]
            if copy.destination == rank
        )

    def redundant_bytes(self, rank: int) -> int:
        """Bytes that a destination rank's device holds only for the source layout. 0 for
        HybridFlow's layouts, whose training shards are parts of the generation shards
        (arXiv:2409.19256, table 2)."""
        owners = np.flatnonzero(self._distances[:, rank] <= IN_PLACE).tolist()
        return max(0, sum(map(self.source.num_bytes, owners)) - int(self.in_place_bytes[rank]))

    def explain(self, bucket_bytes: int = 256 << 20) -> str:
        """Return a table with one line per rank: bytes received, sent and held, and peak memory
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
        """Plan equal tensors. Ranks that hold the same box take turns over the tensors."""
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
            # A rank may hold a box in two places, but its elements arrive once.
            for box in dict.fromkeys(boxes):
                if not box.numel:
                    continue
                for owner, piece, part in self._cover(pieces, box, rank, destination.name):
                    travels = bool(self._distances[owner, rank] > IN_PLACE)
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
        # Cut a box into parts, each with its source rank and the index of that rank's piece.
        found, commons, once = pieces.overlapping(box)
        if once:  # no element has two sources, so the order does not matter
            for index, common in zip(found, commons, strict=True):
                yield int(pieces.ranks[index]), int(pieces.numbers[index]), common
            return
        owners = pieces.ranks[found]
        # `lexsort` sorts by its last key first.
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
        """Return the pieces that overlap a box, the overlaps, and whether they cover it exactly."""
        if box not in self._found:  # replicas request the same boxes
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
    """`Where.distance` of each source rank (row) to each destination rank (column)."""
    distance = functools.cache(Where.distance)
    found = [[distance(source, destination) for destination in destinations] for source in sources]
    return np.array(found, np.int8).reshape(len(sources), len(destinations))


def _equal_tensors(source: Layout, destination: Layout) -> list[list[str]]:
    """Group the destination's tensors by shape, dtype, and boxes on both sides."""
    numbers: dict[tuple[tuple[Box, ...], ...], int] = {}
    by_identity: dict[int, int] = {}

    def number(tensor: TensorLayout) -> int:
        # Layouts from formulas share pieces. Comparing identities avoids comparing the boxes of
        # 36,000 experts.
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
