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
from .host_memory import copy_elements
from .incoming import IncomingWeights
from .layout import Held, Layout, Piece, RankLayout, Where
from .plan import ReshardPlan
from .weights import CHECKSUM_MODULUS, Part

SumOverRanks = Callable[[np.ndarray], np.ndarray]
"""Adds up an int64 array over the ranks of the receiving group, modulo 2^64."""


@torch.no_grad()
def receive_parts(
    incoming: IncomingWeights,
    parts: Sequence[Part],
    counted: Sequence[bool] | None = None,
    sum_over_ranks: SumOverRanks | None = None,
) -> str:
    """Copy what this rank needs of a version into its own tensors as it comes, and check what has arrived.

    Args:
        incoming: the version; it is finished when this returns.
        parts: the rank's own tensors, which are overwritten; one box of each tensor that was published.
            Where they have another dtype, what was published is cast.
        counted: for each part, whether this rank counts it: of ranks that hold equal parts, one does. None: all.
        sum_over_ranks: where the group's ranks hold parts of tensors. None: each part is a whole tensor.

    Returns:
        The checksum of the version.

    Raises:
        WeightSyncError: the tensors are not those published, by name or shape, and nothing is overwritten; or one did not arrive as it was
            published, or not at all, and they are partly overwritten. The message names tensor, box and rank.
    """
    own = {part.name: part for part in parts}
    for name in incoming.layout.tensors:
        if name not in own:
            raise WeightSyncError(
                f"weights version {incoming.version}: tensor {name!r} was published, the model has none of that name{nearest(name, own)}"
            )
    plan = _plan(
        incoming.layout, tuple((p.name, p.shape, p.box, str(p.tensor.dtype).removeprefix("torch.")) for p in parts)
    )
    sums = dict.fromkeys(own, 0)
    for name, copy, source in incoming.slices(plan.received_by(0)):
        part = own[name]
        target = part.tensor[copy.box.within(part.box)]
        copy_elements(target, source)
        # Where the dtype changes, so do the bits: what came is compared.
        found = box_sum(target if target.dtype == source.dtype else source, copy.box, part.shape)
        incoming.check(name, copy, found)
        sums[name] += found
    found = [
        sums[p.name] % CHECKSUM_MODULUS if c else 0 for p, c in zip(parts, counted or [True] * len(parts), strict=True)
    ]
    totals = np.array(found, np.uint64)
    if sum_over_ranks is not None:
        totals = sum_over_ranks(totals.view(np.int64)).view(np.uint64)
    for part, total in zip(parts, totals.tolist(), strict=True):
        if total != incoming.published_sum(part.name):
            sources = sorted({copy.source for name, copy in plan.received_by(0) if name == part.name})
            raise WeightSyncError(
                f"weights version {incoming.version}: tensor {part.name!r} did not arrive as it was published: {part.box} at "
                f"{incoming.receiver}, from the ranks {sources} of the trainer, or what other ranks of the receiver have of it"
            )
    return incoming.finish()


@functools.lru_cache(maxsize=8)
def _plan(source: Layout, parts: tuple[tuple[object, ...], ...]) -> ReshardPlan:
    held = {name: Held(shape, dtype, (Piece(box),)) for name, shape, box, dtype in parts}  # pyright: ignore[reportArgumentType]
    return ReshardPlan(source, Layout.of_ranks([RankLayout(Where(), held)], "the receiver"))  # pyright: ignore[reportArgumentType]
