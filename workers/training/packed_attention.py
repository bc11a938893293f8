"""Packed attention: rows of different lengths stand one behind the other, and only attention pads them.

All layers but attention look at one token at a time, so [1, T] tokens of many rows go through them as they are. Attention
is computed on [rows, longest], which `plan_microbatches` keeps to at most twice the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "weft_packed"
"""Name of this attention in `transformers`."""
_ATTENDS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class PackedSequences:
    """How the tokens of a microbatch belong to rows."""

    lengths: Tensor
    """[B] int64, on the tokens' device; no row is empty."""
    longest: int
    """Tokens of the longest row."""
    first: Tensor | int = 0
    """[B] int64 position of the first token of each row."""
    windows: set[int | None] = field(default_factory=set)
    """Sliding windows that the model has passed to attention."""
    softcaps: set[float | None] = field(default_factory=set)
    """Soft caps that the model has passed to attention."""

    @property
    def shape(self) -> tuple[int, int]:
        """(B, longest): of the rows when they are padded."""
        return len(self.lengths), self.longest

    @cached_property
    def are_alike(self) -> bool:
        """Whether all rows have one length, so that packed and padded tokens lie alike."""
        return bool((self.lengths == self.longest).all())

    @cached_property
    def places(self) -> Tensor:
        """[T] int64 place of each token in its row."""
        starts = torch.cumsum(self.lengths, 0) - self.lengths
        return torch.arange(int(self.lengths.sum()), device=starts.device) - starts.repeat_interleave(self.lengths)

    @property
    def positions(self) -> Tensor:
        """[T] int64 position of each token, as the model counts positions."""
        first = torch.as_tensor(self.first, device=self.lengths.device).expand_as(self.lengths)
        return self.places + first.repeat_interleave(self.lengths)

    @property
    def padded_positions(self) -> Tensor:
        """[B, longest] int64 positions; padding repeats the last position of its row, so no row seems longer than it is."""
        places = torch.arange(self.longest, device=self.lengths.device).expand(self.shape)
        first = torch.as_tensor(self.first, device=self.lengths.device).expand_as(self.lengths)
        return torch.minimum(places, self.lengths[:, None] - 1) + first[:, None]

    @cached_property
    def slots(self) -> Tensor:
        """[T] int64 place of each token in the flattened [B * longest]."""
        before = torch.arange(len(self.lengths), device=self.lengths.device) * self.longest
        return before.repeat_interleave(self.lengths) + self.places


def may_pack(causal_lm: Any) -> bool:
    """Whether a model declares that its attention can be exchanged, and that tokens interact nowhere else.

    Models whose layers have state (Mamba) or attend in chunks cannot be packed. `agreement.py` checks the results.
    """
    kinds = set(getattr(causal_lm.config.get_text_config(), "layer_types", None) or _ATTENDS)
    exchanges = causal_lm._supports_attention_backend and causal_lm._supports_sdpa
    return exchanges and not causal_lm._is_stateful and kinds <= _ATTENDS


def windows_reached_attention(causal_lm: Any, rows: PackedSequences) -> bool:
    """Whether a model with sliding windows passed them to its attention, and not only to its mask, which packed attention ignores."""
    config = causal_lm.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or _ATTENDS)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return window is None or "sliding_attention" not in kinds or rows.windows != {None}


def caps_scores(causal_lm: Any) -> bool:
    """Whether a model passes its attention a soft cap, which torch's own attention silently ignores."""
    if not (causal_lm._supports_attention_backend and causal_lm._supports_sdpa):
        return False
    rows, before = (
        PackedSequences(torch.ones(1, dtype=torch.long, device=causal_lm.device), 1),
        causal_lm.config._attn_implementation,
    )
    causal_lm.set_attn_implementation(NAME)
    try:
        with torch.no_grad():
            causal_lm(input_ids=rows.lengths[None], position_ids=rows.positions[None], rows=rows, use_cache=False)
    except Exception:  # code that comes with a model may fail in any way
        return False
    finally:
        causal_lm.set_attn_implementation(before)
    return bool(rows.softcaps - {None})


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: PackedSequences,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row.

    Args:
        query, key, value: [1, heads, T, head size].
        rows: how the T tokens belong to rows.
        sliding_window: tokens that each token sees, itself included; None: all before it.
        softcap: scores s become softcap * tanh(s / softcap); None: they stay (arXiv:2408.00118, section 2).

    Returns:
        ([1, T, heads, head size], None)
    """
    rows.windows.add(sliding_window)
    rows.softcaps.add(softcap)
    query, key, value = (_unpacked(x[0].transpose(0, 1), rows).transpose(1, 2) for x in (query, key, value))
    mask = None
    if softcap is not None or (sliding_window is not None and rows.longest > sliding_window):
        at = torch.arange(rows.longest, device=query.device)
        back = at[:, None] - at[None, :]
        mask = ((back >= 0) & (back < (sliding_window or rows.longest)))[None, None]
    if softcap is not None:
        assert mask is not None
        return _packed(_capped_attention(query, key, value, mask, scaling, softcap, dropout), rows)[None], None
    out, _ = sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=mask is None
    )
    return _packed(out, rows)[None], None


def _capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, softcap: float, dropout: float
) -> Tensor:
    """[B, L, heads, head size]: attention with a soft cap on its scores, by its formula, because torch has no kernel for it."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~mask, -torch.inf)
    weights = F.dropout(scores.softmax(-1, dtype=torch.float32).to(query.dtype), dropout)
    return (weights @ value).transpose(1, 2)


def _unpacked(packed: Tensor, rows: PackedSequences) -> Tensor:
    """[T, ...] -> [B, longest, ...], zeros behind each row."""
    return packed.unflatten(0, rows.shape) if rows.are_alike else _Unpack.apply(packed, rows)


def _packed(padded: Tensor, rows: PackedSequences) -> Tensor:
    """[B, longest, ...] -> [T, ...]"""
    return padded.flatten(0, 1) if rows.are_alike else _Pack.apply(padded, rows)


class _Unpack(torch.autograd.Function):
    """`_unpacked` for rows of different lengths."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, rows: PackedSequences) -> Tensor:
        ctx.rows = rows
        return _spread(packed, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].flatten(0, 1)[ctx.rows.slots], None


class _Pack(torch.autograd.Function):
    """`_packed` for rows of different lengths."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, rows: PackedSequences) -> Tensor:
        ctx.rows = rows
        return padded.flatten(0, 1)[rows.slots]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _spread(grads[0], ctx.rows), None


def _spread(packed: Tensor, rows: PackedSequences) -> Tensor:
    out = packed.new_zeros(rows.shape[0] * rows.shape[1], *packed.shape[1:])
    out[rows.slots] = packed
    return out.unflatten(0, rows.shape)


AttentionInterface.register(NAME, packed_attention)
