"""Packed attention: rows of unlike length one behind the other, with no padding but inside the attention.

All layers but attention look at one token at a time, so [1, T] tokens of many rows go through them as they are. Attention alone
is computed on [rows, longest], which `plan_microbatches` keeps to twice the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "weft_packed"
"""What `transformers` knows it by."""
_ATTENDS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class Rows:
    """How the tokens of a microbatch belong to rows."""

    lengths: Tensor
    """[B] int64, on the tokens' device; no row is empty."""
    longest: int
    windows: set[int | None] = field(default_factory=set)
    """Sliding windows that attention was asked for, so far."""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.lengths), self.longest

    @cached_property
    def positions(self) -> Tensor:
        """[T] int64 place of each token in its row."""
        starts = torch.cumsum(self.lengths, 0) - self.lengths
        return torch.arange(int(self.lengths.sum()), device=starts.device) - starts.repeat_interleave(self.lengths)

    @cached_property
    def slots(self) -> Tensor:
        """[T] int64 place of each token in the flattened [B * longest]."""
        before = torch.arange(len(self.lengths), device=self.lengths.device) * self.longest
        return before.repeat_interleave(self.lengths) + self.positions


def can_pack(causal_lm: Any) -> bool:
    """Whether the tokens of a model's rows meet in nothing but attention, and in that as it is computed here: seen by trying.

    Not so with a model whose layers have state (Mamba) or see in chunks, and for one that does not hand on to its attention
    what it does not know: those are padded.
    """
    config = causal_lm.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or _ATTENDS)
    if causal_lm._is_stateful or not kinds <= _ATTENDS:
        return False
    if not (causal_lm._supports_attention_backend and causal_lm._supports_sdpa):
        return False
    ids = torch.arange(5) % config.vocab_size
    rows = Rows(torch.tensor([3, 2]), 3)
    model, before = causal_lm.base_model, config._attn_implementation
    with torch.no_grad():
        alone = [model(input_ids=row[None], use_cache=False).last_hidden_state[0] for row in ids.split([3, 2])]
        causal_lm.set_attn_implementation(NAME)
        try:
            together = model(input_ids=ids[None], position_ids=rows.positions[None], rows=rows, use_cache=False)
        except Exception:  # code that comes with a model may do anything with what it does not know
            return False
        finally:
            causal_lm.set_attn_implementation(before)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is not None and "sliding_attention" in kinds and rows.windows == {None}:
        return False  # it is in the mask alone, which packed attention is not given
    return torch.allclose(together.last_hidden_state[0], torch.cat(alone), rtol=1e-3, atol=1e-3)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: Rows,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row.

    Args:
        query, key, value: [1, heads, T, head size].
        rows: of the T tokens.
        sliding_window: tokens that each sees, itself included; None: all before it.

    Returns:
        ([1, T, heads, head size], None)
    """
    rows.windows.add(sliding_window)
    query, key, value = (_Unpack.apply(x[0].transpose(0, 1), rows).transpose(1, 2) for x in (query, key, value))
    mask = None
    if sliding_window is not None and rows.longest > sliding_window:
        at = torch.arange(rows.longest, device=query.device)
        back = at[:, None] - at[None, :]
        mask = ((back >= 0) & (back < sliding_window))[None, None]
    out, _ = sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=mask is None
    )
    return _Pack.apply(out, rows)[None], None


class _Unpack(torch.autograd.Function):
    """[T, ...] -> [B, longest, ...], zeros behind each row."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return _spread(packed, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].flatten(0, 1)[ctx.rows.slots], None


class _Pack(torch.autograd.Function):
    """[B, longest, ...] -> [T, ...]"""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return padded.flatten(0, 1)[rows.slots]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _spread(grads[0], ctx.rows), None


def _spread(packed: Tensor, rows: Rows) -> Tensor:
    out = packed.new_zeros(rows.shape[0] * rows.shape[1], *packed.shape[1:])
    out[rows.slots] = packed
    return out.unflatten(0, rows.shape)


AttentionInterface.register(NAME, packed_attention)
