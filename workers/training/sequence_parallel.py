"""Sequence parallelism: the ranks of a replica share the tokens of a microbatch (DeepSpeed Ulysses,
arXiv:2309.14509).

    tokens      all layers but attention, each rank its tokens   [1, heads, T / ranks, head size]
    exchange    each rank sends every other its tokens of the other's heads
    attention   all tokens, each rank its heads                  [1, heads / ranks, T, head size]
    exchange    and back
    head        each rank its tokens; results are gathered, so every rank computes the same loss

Weights are sharded over all ranks. A rank's gradient covers its tokens, and through the
exchanges also of other ranks' results that depend on them. So the loss gradient is the sum over the
ranks of a replica, as over replicas.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from .packed_sequences import PackedSequences


class Stretches:
    """Splits tokens over the ranks of a replica, one contiguous stretch each.

    Args:
        group: the process group of these ranks.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def share(self, input_ids: Tensor, rows: PackedSequences) -> tuple[Tensor, PackedSequences]:
        """Return this rank's tokens.

        Args:
            input_ids: [N] int64, of all ranks.
            rows: assignment of the N tokens to rows.

        Returns:
            ([n] int64, the same number on each rank, padded with an unused row; rows of all ranks,
            including the padding)
        """
        # Pad, so that all ranks have the same number of tokens.
        missing = -len(input_ids) % self.ranks
        if missing:
            input_ids = F.pad(input_ids, (0, missing))
        lengths = np.append(rows.lengths, missing) if missing else rows.lengths
        routing = None if rows.routing is None else rows.routing.shard(self.own, missing)
        return self.own(input_ids), replace(
            PackedSequences(lengths, rows.device), exchange=self, routing=routing
        )

    def own(self, of_tokens: Tensor) -> Tensor:
        """Return this rank's part of [ranks * n, ...]: [n, ...]."""
        return of_tokens.chunk(self.ranks)[self.rank]

    def to_heads(self, x: Tensor, heads: int) -> Tensor:
        """Turn [n, heads, size] of this rank's tokens into [ranks * n, heads / ranks, size]: its
        heads of all tokens.

        Args:
            heads: heads of queries. Fewer heads of keys and values are repeated if ranks cannot
                split them.
        """
        if x.shape[1] % self.ranks:
            # Repeat grouped keys and values, as attention would.
            x = x.repeat_interleave(heads // x.shape[1], 1)
        return _Exchange.apply(x, self.group, self.ranks, 1, 0)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Turn [ranks * n, heads / ranks, size] into [n, heads, size]."""
        return _Exchange.apply(x, self.group, self.ranks, 0, 1)

    def gather(self, of_tokens: Tensor, counts: list[int]) -> Tensor:
        """Concatenate each rank's results for its tokens; gradients go to the rank that computed
        the result.

        Args:
            of_tokens: [t], this rank's results.
            counts: t of each rank.

        Returns:
            [sum of t], the same on all ranks.
        """
        return _Gather.apply(of_tokens, self, counts)


def join_stretches(ranks: int) -> Stretches:
    """Create process groups of `ranks` adjacent ranks and return this rank's. Collective."""
    mine = None
    for first in range(0, dist.get_world_size(), ranks):
        members = list(range(first, first + ranks))
        group = dist.new_group(members)
        if dist.get_rank() in members:
            mine = Stretches(group)
    assert mine is not None
    return mine


class _Exchange(torch.autograd.Function):
    """Cut along one dimension, send each rank its piece, and concatenate the received pieces along
    another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, ranks: int, cut: int, join: int) -> Tensor:
        ctx.about = group, ranks, cut, join
        return _exchanged(x, group, ranks, cut, join)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        group, ranks, cut, join = ctx.about
        return _exchanged(gradients[0], group, ranks, join, cut), None, None, None, None


def _exchanged(x: Tensor, group: Any, ranks: int, cut: int, join: int) -> Tensor:
    sent = torch.stack([piece.contiguous() for piece in x.chunk(ranks, cut)])
    come = torch.empty_like(sent)
    dist.all_to_all_single(come, sent, group=group)
    return torch.cat(come.unbind(), join)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, of_tokens: Tensor, stretches: Stretches, counts: list[int]) -> Tensor:
        ctx.own = slice(sum(counts[: stretches.rank]), sum(counts[: stretches.rank + 1]))
        padded = F.pad(of_tokens, (0, max(counts) - len(of_tokens)))
        come = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(come, padded, group=stretches.group)
        return torch.cat([part[:count] for part, count in zip(come, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0][ctx.own], None, None
