"""Rows of a microbatch, stored end to end, with indexes from the host, so that nothing waits for
the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from ..models.images import ImageInputs
    from .routers import Routing


# Copies to the device that do not block the host. A plain CUDA `tensor.to(device)` returns only
# when the device has finished all earlier work. So the host would wait for the previous microbatch,
# and then the device for the host.


def to_device(known: Tensor | np.ndarray, device: torch.device) -> Tensor:
    """Copy host data to the device without blocking. On a CPU the result shares the data's memory,
    so do not write to it."""
    tensor = torch.from_numpy(known) if isinstance(known, np.ndarray) else known
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # CUDA copies pageable memory twice, and partly blocks
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """Rows stored end to end, and what attention and routers need to know about them."""

    lengths: np.ndarray
    """[B] int64 tokens per row; no row is empty."""
    device: torch.device
    first: np.ndarray | None = None
    """[B] int64: position of each row's first token; None means 0 for all rows."""
    windows: set[int | None] = field(default_factory=set)
    """Sliding windows that attention got from the model in this pass; None means no window."""
    softcaps: set[float | None] = field(default_factory=set)
    """Soft caps that attention got from the model in this pass; None means no cap."""
    exchange: Stretches | None = None
    """How ranks share the tokens of these rows; None if this rank has all tokens."""
    rounded: bool = False
    """Whether attention rounds queries, keys and values to bfloat16, as a reference for a
    half-precision kernel."""
    routing: Routing | None = None
    """Instructions for the routers of a mixture of experts."""
    shown: ImageInputs | None = None
    """Images of the rows, with their places among the T tokens."""

    @classmethod
    def of_lengths(cls, lengths: Sequence[int] | np.ndarray, device: torch.device | str = "cpu") -> Self:
        return cls(np.asarray(lengths, np.int64), torch.device(device))

    @cached_property
    def longest(self) -> int:
        return int(self.lengths.max())

    @property
    def shape(self) -> tuple[int, int]:
        """(B, longest): shape of the rows when padded."""
        return len(self.lengths), self.longest

    @cached_property
    def are_alike(self) -> bool:
        """Whether all rows have the same length, so that packed and padded layouts are equal."""
        return bool((self.lengths == self.longest).all())

    @cached_property
    def positions(self) -> Tensor:
        """[T] int64: position of each token, as the model counts."""
        return self._on_device(self._packed_positions)

    @cached_property
    def padded_positions(self) -> Tensor:
        """[B, longest] int64 positions; padding repeats the row's last position."""
        return self._on_device(self._padded_positions)

    def positions_by_row(self, *, padded: bool) -> list[Tensor]:
        """Return each row's positions on the host: [1, length] int64, or [1, longest]."""
        if padded:
            return list(torch.from_numpy(self._padded_positions).split(1))
        ends = np.cumsum(self.lengths)[:-1].tolist()
        return [row[None] for row in torch.from_numpy(self._packed_positions).tensor_split(ends)]

    @cached_property
    def slots(self) -> Tensor:
        """[T] int64: index of each token in the flattened [B * longest] layout."""
        return self._on_device(
            np.repeat(np.arange(len(self.lengths)) * self.longest, self.lengths) + self._places
        )

    @cached_property
    def starts(self) -> Tensor:
        """[B + 1] int32: start of each row, and the end of the last one."""
        return self._on_device(np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32))

    @property
    def _packed_positions(self) -> np.ndarray:
        return self._places + np.repeat(self._first, self.lengths)

    @property
    def _padded_positions(self) -> np.ndarray:
        return np.minimum(np.arange(self.longest), self.lengths[:, None] - 1) + self._first[:, None]

    @property
    def _first(self) -> np.ndarray:
        return np.zeros(len(self.lengths), np.int64) if self.first is None else self.first

    @cached_property
    def _places(self) -> np.ndarray:
        """[T] int64: index of each token within its row."""
        starts = np.cumsum(self.lengths) - self.lengths
        return np.arange(int(self.lengths.sum())) - np.repeat(starts, self.lengths)

    def _on_device(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.device)


@dataclass(frozen=True, eq=False)
class SharedPrompts(PackedSequences):
    num_prompts: int = 0
    after: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[responses] int64: index of each response's prompt."""

    @classmethod
    def among(
        cls,
        prompts: np.ndarray,
        others: np.ndarray,
        responses: np.ndarray,
        after: np.ndarray,
        device: torch.device,
    ) -> Self:
        """Create an instance from numbers of tokens: [prompts], [other rows] and [responses]
        int64."""
        lengths = np.concatenate([prompts, others, responses])
        first = np.concatenate([np.zeros(len(prompts) + len(others), np.int64), prompts[after]])
        return cls(lengths, device, first, num_prompts=len(prompts), after=after)

    @cached_property
    def beginnings(self) -> PackedSequences:
        """Prompts and complete rows, which begin at position 0."""
        return PackedSequences(self.lengths[: len(self.lengths) - len(self.after)], self.device)

    @cached_property
    def prompts(self) -> PackedSequences:
        return PackedSequences(self.lengths[: self.num_prompts], self.device)

    @cached_property
    def responses(self) -> PackedSequences:
        return PackedSequences(self.lengths[len(self.lengths) - len(self.after) :], self.device)

    @cached_property
    def complete(self) -> PackedSequences:
        """Each response together with its prompt."""
        return PackedSequences(self.prompts.lengths[self.after] + self.responses.lengths, self.device)

    @cached_property
    def tokens_of_complete(self) -> Tensor:
        """[sum of `complete`] int64: index of each token of `complete` among the stored tokens."""
        ends = np.cumsum(self.lengths)
        starts, of_prompts = ends - self.lengths, self.after
        of_responses = np.arange(len(self.lengths) - len(self.after), len(self.lengths))
        pieces = np.stack([of_prompts, of_responses], 1).reshape(-1)
        lengths = self.lengths[pieces]
        places = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return self._on_device(np.repeat(starts[pieces], lengths) + places)

    @cached_property
    def prompt_of_response(self) -> Tensor:
        """[responses] int64: index of each response's prompt, on the device."""
        return self._on_device(self.after)

    def sees(self, window: int | None) -> Tensor:
        """Return the tokens that each response token attends to: with a window, at most that many,
        including itself; with None, all tokens before it. Returns [responses, longest response,
        longest prompt + longest response] bool."""
        if window not in self._seen:
            own = torch.arange(self.responses.longest, device=self.device)
            before = torch.arange(self.prompts.longest, device=self.device)
            lengths = self._on_device(self.prompts.lengths)[self.prompt_of_response]
            back_own = (own[:, None] - own[None, :]).expand(len(self.after), -1, -1)
            back_before = lengths[:, None, None] + own[None, :, None] - before[None, None, :]
            seen_own = back_own >= 0
            seen_before = (before[None, :] < lengths[:, None])[:, None].expand_as(back_before)
            if window is not None:
                seen_own = seen_own & (back_own < window)
                seen_before = seen_before & (back_before < window)
            self._seen[window] = torch.cat([seen_before, seen_own], 2)
        return self._seen[window]

    @cached_property
    def _seen(self) -> dict[int | None, Tensor]:
        return {}


# Sequence parallelism: the ranks of a replica share the tokens of a microbatch (DeepSpeed Ulysses,
# arXiv:2309.14509).
#
#     layers      each rank has some tokens, all heads             [1, heads, T / ranks, head size]
#     exchange    an all-to-all gives each rank all tokens of some heads
#     attention   each rank has all tokens, some heads             [1, heads / ranks, T, head size]
#     exchange    an all-to-all restores the token split
#     head        ranks compute their tokens and gather the results, so all compute the same loss
#
# Weights are sharded over all ranks. A rank's gradient covers its own tokens. Through the
# exchanges, it also covers other ranks' results that depend on these tokens. So the gradient of the
# loss is the sum over the ranks of a replica, just as over replicas.


class Stretches:
    """Splits tokens over the ranks of a process group, one contiguous stretch each."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def share(self, input_ids: Tensor, rows: PackedSequences) -> tuple[Tensor, PackedSequences]:
        """Return this rank's share of the [N] tokens in these rows, [n] int64, padded to the same
        number on each rank. Also return the rows of all ranks, including the padding."""
        missing = -len(input_ids) % self.ranks
        input_ids = F.pad(input_ids, (0, missing)) if missing else input_ids
        lengths = np.append(rows.lengths, missing) if missing else rows.lengths
        routing = None if rows.routing is None else rows.routing.shard(self.own, missing)
        shared = replace(PackedSequences(lengths, rows.device), exchange=self, routing=routing)
        return self.own(input_ids), shared

    def own(self, of_tokens: Tensor) -> Tensor:
        """Return this rank's part of a [ranks * n, ...] tensor: [n, ...]."""
        return of_tokens.chunk(self.ranks)[self.rank]

    def to_heads(self, x: Tensor, heads: int) -> Tensor:
        """Turn [n, heads, size] of this rank's tokens into [ranks * n, heads / ranks, size]: all
        tokens, but only this rank's heads. Repeats grouped keys and values that the ranks cannot
        split evenly."""
        if x.shape[1] % self.ranks:
            x = x.repeat_interleave(heads // x.shape[1], 1)
        return _Exchange.apply(x, self.group, self.ranks, 1, 0)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Undo `to_heads`: turn [ranks * n, heads / ranks, size] into [n, heads, size]."""
        return _Exchange.apply(x, self.group, self.ranks, 0, 1)

    def gather(self, of_tokens: Tensor, counts: list[int]) -> Tensor:
        """Concatenate the results of all ranks, `counts[rank]` from each, on every rank. Gradients
        go to the rank that computed the result."""
        return _Gather.apply(of_tokens, self, counts)


def join_stretches(ranks: int, timeout: timedelta) -> Stretches:
    """Create process groups of `ranks` adjacent ranks each, and return this rank's. All ranks must
    call this function."""
    mine = None
    for first in range(0, dist.get_world_size(), ranks):
        members = list(range(first, first + ranks))
        # torch requires every rank to create every group, including other ranks' groups.
        group = dist.new_group(members, timeout=timeout)
        if dist.get_rank() in members:
            mine = Stretches(group)
    assert mine is not None
    return mine


class _Exchange(torch.autograd.Function):
    """Exchange the pieces of a tensor, cut along one dimension, between ranks, and join the
    received pieces along another."""

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
        others = (0, 0) * (of_tokens.ndim - 1)
        padded = F.pad(of_tokens, (*others, 0, max(counts) - len(of_tokens)))
        come = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(come, padded, group=stretches.group)
        return torch.cat([part[:count] for part, count in zip(come, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # Every rank computes the same loss, so adding other ranks' gradients would count it
        # repeatedly.
        return gradients[0][ctx.own], None, None
