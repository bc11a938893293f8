"""The receiving side for modules whose parameters lie as they do in the checkpoint: whole, or cut over ranks by FSDP.

vLLM fuses, pads and repacks its parameters; `vllm_receiver.py` is its side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..dataflow.errors import WeightSyncError, nearest
from .checksum import box_sum
from .layout import Held, Layout, Piece, RankLayout, Where
from .open_weights import OpenWeights
from .plan import Copy, ReshardPlan
from .weights import CHECKSUM_MODULUS, Part

SumOverRanks = Callable[[np.ndarray], np.ndarray]
"""Adds up an int64 array over the ranks of the receiving group, modulo 2^64."""


@torch.no_grad()
def receive_parts(
    opened: OpenWeights,
    parts: Sequence[Part],
    counted: Sequence[bool] | None = None,
    sum_over_ranks: SumOverRanks | None = None,
) -> None:
    """Copy what this rank needs of a published version into its own tensors, and check what has arrived.

    Args:
        opened: the version, mapped.
        parts: the rank's own tensors, which are overwritten; one box of each tensor that was published.
            Where they have another dtype, what was published is cast.
        counted: for each part, whether this rank counts it: of ranks that hold equal parts, one does. None: all.
        sum_over_ranks: where the group's ranks hold parts of tensors. None: each part is a whole tensor.

    Raises:
        WeightSyncError: the tensors are not those published, by name or shape, and nothing is overwritten; or one did not arrive as it was
            published, and they are partly overwritten. The message names tensor, box and rank.
    """
    own = {part.name: part for part in parts}
    for name in opened.layout.tensors:
        if name not in own:
            raise WeightSyncError(
                f"weights version {opened.version}: tensor {name!r} was published, the model has none of that name{nearest(name, own)}"
            )
    plan = _plan(
        opened.layout, tuple((p.name, p.shape, p.box, str(p.tensor.dtype).removeprefix("torch.")) for p in parts)
    )
    copies: dict[str, list[Copy]] = {}
    read: dict[str, int] = {}
    for name, copy, source in opened.slices(plan.received_by(0)):
        target = _target(own[name], copy)
        target.copy_(source)
        copies.setdefault(name, []).append(copy)
        if source.dtype != target.dtype:  # the bits change: what was read is compared
            read[name] = read.get(name, 0) + box_sum(source, copy.box, own[name].shape)
    sums = [read[p.name] if p.name in read else box_sum(p.tensor, p.box, p.shape) for p in parts]
    found = np.array(
        [s % CHECKSUM_MODULUS if c else 0 for s, c in zip(sums, counted or [True] * len(parts), strict=True)], np.uint64
    )
    if sum_over_ranks is not None:
        found = sum_over_ranks(found.view(np.int64)).view(np.uint64)
    for part, total in zip(parts, found.tolist(), strict=True):
        if total != opened.published_sum(part.name):
            raise WeightSyncError(
                f"weights version {opened.version}: tensor {part.name!r} did not arrive as it was published"
                + what_differs(
                    opened, part.name, [(c, _source(opened, part.name, c), _target(part, c)) for c in copies[part.name]]
                )
            )


def what_differs(opened: OpenWeights, name: str, copies: Sequence[tuple[Copy, torch.Tensor, torch.Tensor]]) -> str:
    """The tail of an error message: which box of a tensor is another one, and between which ranks.

    Args:
        opened: the published version.
        name: of the tensor.
        copies: each copy of it with the elements at the publisher and those that arrived.
    """
    shape = opened.layout.tensors[name].shape
    for copy, source, target in copies:
        held = opened.layout.tensors[name].boxes[copy.source][copy.source_piece]
        here = opened.part(name, copy.source, copy.source_piece, held)
        if box_sum(here, held, shape) != opened.piece_sum(name, copy.source, copy.source_piece):
            return f": {held} has changed in the memory of rank {copy.source}, which published it"
        if source.dtype == target.dtype and box_sum(source, copy.box, shape) != box_sum(target, copy.box, shape):
            return f": {copy.box} from rank {copy.source} differs at rank {copy.destination}, which received it"
    return ": what this rank received is right, so another rank of its group has something else"


def _source(opened: OpenWeights, name: str, copy: Copy) -> torch.Tensor:
    return opened.part(name, copy.source, copy.source_piece, copy.box)


def _target(part: Part, copy: Copy) -> torch.Tensor:
    return part.tensor[copy.box.within(part.box)]


@functools.lru_cache(maxsize=8)
def _plan(source: Layout, parts: tuple[tuple[object, ...], ...]) -> ReshardPlan:
    held = {name: Held(shape, dtype, (Piece(box),)) for name, shape, box, dtype in parts}  # pyright: ignore[reportArgumentType]
    return ReshardPlan(source, Layout.of_ranks([RankLayout(Where(), held)], "the receiver"))  # pyright: ignore[reportArgumentType]
