"""IncomingWeights: the receiving side of a transfer, connected to every trainer rank.

connect ──> layout ──> slices, written on arrival ──> confirm: checks completeness

with IncomingWeights(weights) as incoming:
    plan = ReshardPlan(incoming.layout, mine)
    for name, copy, elements in incoming.slices(plan.received_by(0)):
        ...                          # write the elements, and sum them in their destination
        incoming.check(name, copy, found)
    incoming.confirm()
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import selectors
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Self

import numpy as np
import torch

from ..dataflow.errors import GroupBroken, WeightSyncError, nearest
from .bucket_group import (
    BucketGroup,
    leave_group,
)
from .buckets import (
    checksum_of,
    copy_elements,
    layout_of,
    read_sums,
    start_sum,
)
from .connection import SILENCE_S
from .sources import RankSource, map_chunks
from .transfer import GRACE_S
from .weights import (
    CHECKSUM_MODULUS,
    Copy,
    Layout,
    Piece,
    ReshardPlan,
    TensorLayout,
    TensorPart,
    Weights,
    Where,
)

PATIENCE_S = 2 * SILENCE_S + GRACE_S
"""[s] Longest wait for a bucket. The publisher may itself wait for another receiver."""
MOST_PASSES = 4
"""Limit on the passes of one version, of which each but the last broke because a receiver died."""


class IncomingWeights:
    """One version on its way to process `part` of a receiver with `parts` processes. Closing it
    tells the publishers that this receiver is done. Raises WeightSyncError if a publisher is gone
    or has another version, or if the ranks' parts do not make up each tensor."""

    def __init__(self, weights: Weights, part: int = 0, parts: int = 1) -> None:
        self.version = weights.version
        self.receiver = weights.receiver or "a receiver"
        self._of = weights, part, parts
        self._hung_up = False
        self._connect()
        try:
            self.layout: Layout = layout_of(tuple(source.parts for source in self._sources))
            """The boxes that each rank publishes. Equal versions share one object."""
        except WeightSyncError as error:
            self.close()
            raise WeightSyncError(f"weights version {weights.version}: {error}") from None

    def _connect(self) -> None:
        weights, part, parts = self._of
        self._group: BucketGroup | None = None
        self._sources: list[RankSource] = []
        try:
            for number, rank in enumerate(weights.ranks):
                where = f"weights version {weights.version}, rank {number} of the trainer"
                self._sources.append(RankSource(rank, where, weights, part, parts))
            if self._sources[0].is_together:
                map_chunks(self._sources)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def neighbours(self) -> int:
        """Number of trainer ranks on this machine, which publish at the same time."""
        return sum(source.is_near for source in self._sources)

    def slices(self, copies: Iterable[tuple[str, Copy]]) -> Iterator[tuple[str, Copy, torch.Tensor]]:
        """Yield each copy with its elements, valid until the next copy, as they arrive. `copies`
        are tensor names and copies from a plan whose source is this layout. Raises WeightSyncError
        if a publisher is gone, has given up, or did not answer in time."""
        wanted: list[dict[int, list[tuple[str, Copy, int]]]] = [{} for _ in self._sources]
        for name, copy in copies:
            number = self._sources[copy.source].parts.numbers[name][copy.source_piece]
            bucket = self._sources[copy.source].parts.entries[number].bucket
            wanted[copy.source].setdefault(bucket, []).append((name, copy, number))
        if self._sources[0].is_together:
            yield from self._slices_together(wanted)
            return
        # Send all requests first: a publisher fills its buckets once its receivers have asked.
        for source, of in zip(self._sources, wanted, strict=True):
            source.ask([(number, copy) for bucket in sorted(of) for _, copy, number in of[bucket]])
        with selectors.DefaultSelector() as selector:
            for number, source in enumerate(self._sources):
                if not source.is_through:
                    selector.register(source.connection, selectors.EVENT_READ, number)
            while selector.get_map():
                for number in self._ready(selector):
                    source = self._sources[number]
                    if (bucket := source.next_bucket()) is None:
                        continue
                    for name, copy, entry in wanted[number].get(bucket, ()):
                        yield name, copy, source.elements(entry, copy)
                    source.release_bucket(bucket)
                    if source.is_through:
                        selector.unregister(source.connection)

    def _slices_together(
        self, wanted: Sequence[dict[int, list[tuple[str, Copy, int]]]]
    ) -> Iterator[tuple[str, Copy, torch.Tensor]]:
        """The same as `slices`, for buckets that all ranks of the trainer complete together. If
        another receiver dies, all buckets are sent again; the copies that came are not repeated."""
        taken = 0
        for attempt in itertools.count(1):
            try:
                for bucket in self._buckets_together():
                    if bucket >= taken:
                        for source, of in zip(self._sources, wanted, strict=True):
                            for name, copy, entry in of.get(bucket, ()):
                                yield name, copy, source.elements(entry, copy)
                        taken = bucket + 1
                return
            except GroupBroken:
                if self._hung_up or attempt == MOST_PASSES:
                    raise
            self.close()
            self._connect()

    def _buckets_together(self) -> Iterator[int]:
        """Take part in a pass. Yield the number of each bucket while it is in memory."""
        first = self._sources[0]
        chunks = [source.parts.bucket_bytes for source in self._sources]
        sizes = [max(each) for each in itertools.zip_longest(*chunks, fillvalue=0)]
        invitation = first.ask_for_invitation(sizes)
        for source in self._sources[1:]:
            source.pass_invitation(sizes, invitation)
        memory = first.own_memory
        if memory is not None:
            with _broken_by_others():
                self._group = first.join(invitation, len(self._sources))
        for bucket, num_bytes in enumerate(sizes):
            if self._group is not None and memory is not None and num_bytes:
                starts = range(0, len(memory), first.chunk_bytes)
                with _broken_by_others(), first.named():
                    self._group.complete([memory[start : start + num_bytes] for start in starts])
            for source in self._sources:
                while source.next_bucket() is None:
                    pass
            yield bucket
            for source in self._sources:
                source.release_bucket(bucket)
        self._group = None  # complete, so it can be kept

    def _ready(self, selector: selectors.BaseSelector) -> list[int]:
        # PATIENCE_S has the timeout twice, so add the extension for a large version twice.
        patience_s = PATIENCE_S + 2 * max(s.connection.silence_s - SILENCE_S for s in self._sources)
        ready = [key.data for key, _ in selector.select(patience_s)]
        if not ready:
            silent = [self._sources[key.data] for key in selector.get_map().values()]
            raise WeightSyncError(
                "; ".join(f"{s.where}: nothing came for {patience_s:.0f} s, {s.at}" for s in silent)
            )
        return ready

    def piece_sum(self, name: str, rank: int, piece: int) -> int:
        source = self._sources[rank]
        return source.sums[source.parts.numbers[name][piece]]

    def published_sum(self, name: str) -> int:
        pieces = self.layout.tensors[name].pieces
        sums = (
            self.piece_sum(name, rank, n) for rank, own in enumerate(pieces) for n in range(len(own))
        )
        return sum(sums) % CHECKSUM_MODULUS

    def check(self, name: str, copy: Copy, found: int) -> None:
        """Compare a received copy with the published elements, if the copy is a whole piece.
        `found` is the `box_sum` of the received elements, in the publisher's dtype."""
        whole = copy.box == self.layout.tensors[name].boxes[copy.source][copy.source_piece]
        if whole and found != self.piece_sum(name, copy.source, copy.source_piece):
            raise WeightSyncError(
                f"weights version {self.version}: tensor {name!r} did not arrive as it was published: {copy.box} from rank "
                f"{copy.source} of the trainer differs at {self.receiver}"
            )

    def confirm(self) -> str:
        """Check and acknowledge the complete version. Return its checksum."""
        total = 0
        for source in self._sources:
            own = checksum_of(source.parts.entries, source.sums)
            if (found := source.checksum()) != own:
                raise WeightSyncError(
                    f"{source.where}: checksum {found:016x} was published, but {own:016x} arrived"
                )
            total += own
        # Not earlier: the acknowledgement makes a publisher count this receiver as served.
        for source in self._sources:
            source.thank()
        return f"{total % CHECKSUM_MODULUS:016x}"

    def hang_up(self) -> None:
        """End the connections, from any thread. Iterating over slices then raises an error."""
        self._hung_up = True
        for source in self._sources:
            source.connection.hang_up()
        if (group := self._group) is not None:
            leave_group(group)

    def close(self) -> None:
        if (group := self._group) is not None:
            leave_group(group)  # the other members are at another bucket
        # After an error, the device may still be reading memory that the publisher then reuses.
        if any(source.is_on_device for source in self._sources):
            torch.accelerator.synchronize()
        for source in self._sources:
            source.close()


@contextlib.contextmanager
def _broken_by_others() -> Iterator[None]:
    """Raise errors of the group as GroupBroken."""
    try:
        yield
    except WeightSyncError as error:
        raise GroupBroken(str(error)) from None


# Receiver for modules whose parameters match the checkpoint, whole or sharded by FSDP. vLLM fuses,
# pads and repacks its parameters, so it uses `vllm_writer.py` instead.


@torch.no_grad()
def receive_parts(
    incoming: IncomingWeights,
    parts: Sequence[TensorPart],
    counted: Sequence[bool] | None = None,
    sum_over_ranks: Callable[[np.ndarray], np.ndarray] | None = None,
) -> str:
    """Copy this rank's parts of a version into its tensors as they arrive, check them, confirm the
    version, and return its checksum. `parts` are the tensors to overwrite, each one box of a
    published tensor. The copy casts elements to the dtype of the part.

    Args:
        counted: for each part, whether this rank adds it to the checksum. Exactly one of the ranks
            with equal parts must. None counts all parts.
        sum_over_ranks: sums an int64 array over the group, modulo 2^64. None if each part is a
            whole tensor.

    Raises:
        WeightSyncError: either names or shapes differ from the published tensors, and no part is
            overwritten; or a tensor arrived damaged or incomplete, and parts are partly
            overwritten. The message names the tensor, the box and the rank.
    """
    own = {part.name: part for part in parts}
    for name in incoming.layout.tensors:
        if name not in own:
            raise WeightSyncError(
                f"weights version {incoming.version}: tensor {name!r} was published, "
                f"but the model has no tensor of that name{nearest(name, own)}"
            )
    plan = _plan(
        incoming.layout,
        tuple((p.name, p.shape, p.box, str(p.tensor.dtype).removeprefix("torch.")) for p in parts),
    )
    started: list[tuple[str, Copy, torch.Tensor]] = []
    sums = dict.fromkeys(own, 0)

    def add(name: str, copy: Copy, found: int) -> None:
        incoming.check(name, copy, found)
        sums[name] += found

    for name, copy, source in incoming.slices(plan.received_by(0)):
        part = own[name]
        target = part.tensor[copy.box.within(part.box)]
        copy_elements(target, source)
        # A cast changes the bits, so check the elements as received.
        found = start_sum(target if target.dtype == source.dtype else source, copy.box, part.shape)
        if isinstance(found, torch.Tensor):
            started.append((name, copy, found))
        else:
            add(name, copy, found)
    for (name, copy, _), found in zip(started, read_sums([each[2] for each in started]), strict=True):
        add(name, copy, found)
    found = [
        sums[p.name] % CHECKSUM_MODULUS if c else 0
        for p, c in zip(parts, counted or [True] * len(parts), strict=True)
    ]
    totals = np.array(found, np.uint64)
    if sum_over_ranks is not None:
        totals = sum_over_ranks(totals.view(np.int64)).view(np.uint64)
    for part, total in zip(parts, totals.tolist(), strict=True):
        if total != incoming.published_sum(part.name):
            sources = sorted({copy.source for name, copy in plan.received_by(0) if name == part.name})
            raise WeightSyncError(
                f"weights version {incoming.version}: tensor {part.name!r} did not arrive as it was published: {part.box} at "
                f"{incoming.receiver}, from the trainer's ranks {sources}, or a part on another rank of the receiver"
            )
    return incoming.confirm()


@functools.lru_cache(maxsize=8)
def _plan(source: Layout, parts: tuple[tuple[object, ...], ...]) -> ReshardPlan:
    tensors = [TensorLayout(n, s, d, ((Piece(box),),)) for n, s, box, d in parts]  # pyright: ignore[reportArgumentType]
    return ReshardPlan(source, Layout.of(tensors, [Where()], "the receiver"))
