"""Packed attention: causal attention over rows that are stored end to end.

All layers except attention look at one token at a time, so they process the [1, T] tokens of many
rows directly. Attention either uses torch's variable-length kernel or pads to [rows, longest],
which `plan_microbatches` limits to twice the tokens. A pass computes a prompt that several rows
share once (`SharedPrompts`); the responses attend to the prompt's keys and values and to their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .packed_sequences import PackedSequences, SharedPrompts

# Variable-length attention: torch's kernel for rows end to end, without padding or masks. It runs
# on GPUs in half precision. It supports windows, grouped-query heads, and queries that are the last
# tokens of longer rows of keys, but neither soft caps nor dropout.


Kernel = Callable[..., Any]
_ASKED = {"scale", "window_size", "enable_gqa"}
"""Arguments that the kernel must accept; early torch releases lack some."""
_HALF = (torch.bfloat16, torch.float16)


def find_kernel(device: torch.device) -> Kernel | None:
    """Return torch's `varlen_attn`, or None if the device or the torch version does not support
    it."""
    if device.type != "cuda":
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if inspect.signature(varlen_attn).parameters.keys() >= _ASKED else None


def takes(query: Tensor, softcap: float | None, dropout: float) -> bool:
    return query.dtype in _HALF and softcap is None and not dropout


NAME = "weft_packed"
"""This attention's name in the registry of `transformers`."""
VARLEN = "weft_packed_varlen"
"""The variant that uses torch's variable-length kernel for inputs that it supports."""
_ALIGNED = 8
"""Dimensions that a sink adds to the head size, because kernels want a multiple of 8."""
_ATTENDS = {"full_attention", "sliding_attention"}


def may_pack(causal_lm: Any) -> bool:
    """Return whether a model declares its attention replaceable, and its tokens interact nowhere
    else (unlike in Mamba or chunked attention). `agreement.py` checks the actual results."""
    kinds = set(getattr(causal_lm.config.get_text_config(), "layer_types", None) or _ATTENDS)
    return causal_lm._supports_attention_backend and not causal_lm._is_stateful and kinds <= _ATTENDS


def windows_reached_attention(causal_lm: Any, rows: PackedSequences) -> bool:
    """Return whether a model passed its windows to attention, and not only to its mask."""
    config = causal_lm.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or _ATTENDS)
    window = (
        getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    )
    return window is None or "sliding_attention" not in kinds or rows.windows != {None}


def caps_scores(causal_lm: Any) -> bool:
    """Return whether the model passes a soft cap to attention; torch's own attention silently
    ignores it."""
    if not (causal_lm._supports_attention_backend and causal_lm._supports_sdpa):
        return False
    rows = PackedSequences.of_lengths([1], causal_lm.device)
    before = causal_lm.config._attn_implementation
    causal_lm.set_attn_implementation(NAME)
    try:
        with torch.no_grad():
            causal_lm(
                input_ids=rows.positions[None],
                position_ids=rows.positions[None],
                rows=rows,
                use_cache=False,
            )
    except Exception:  # a model's remote code can raise anything
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
    s_aux: Tensor | None = None,
    kernel: Kernel | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each row. Returns ([1, T, heads, head size], None).

    Args:
        query, key, value: [1, heads, T, head size].
        rows: assignment of the T tokens to rows.
        sliding_window: number of tokens that each token sees, including itself; None for all tokens
            before it.
        kernel: the variable-length kernel; None pads the rows instead.
        softcap: replaces scores s by softcap * tanh(s / softcap) (arXiv:2408.00118, section 2).
        s_aux: [heads] attention sinks (GPT-OSS): per head, the score of an extra key without a
            value.
    """
    rows.windows.add(sliding_window)
    rows.softcaps.add(softcap)
    if s_aux is not None and rows.exchange is not None:
        s_aux = rows.exchange.own(s_aux)
    # `rounded` imitates a half-precision kernel, so do not widen then.
    widens = rows.device.type == "cpu" and not rows.rounded
    how = _Attend(scaling, softcap, dropout, sliding_window, kernel, widens, s_aux)
    of_tokens = [x[0].transpose(0, 1) for x in (query, key, value)]
    if rows.rounded:
        of_tokens = [x.bfloat16() for x in of_tokens]
    if rows.exchange is not None:
        of_tokens = [rows.exchange.to_heads(x, query.shape[1]) for x in of_tokens]
        found = rows.exchange.to_tokens(how.in_rows(of_tokens, rows))
    elif isinstance(rows, SharedPrompts) and len(rows.after):
        begins = int(rows.beginnings.lengths.sum())
        first, after = zip(*(x.split([begins, len(x) - begins]) for x in of_tokens), strict=True)
        found = torch.cat([how.in_rows(first, rows.beginnings), how.after_prompts(first, after, rows)])
    else:
        found = how.in_rows(of_tokens, rows)
    return found[None].to(query.dtype), None


@dataclass(frozen=True)
class _Attend:
    scaling: float | None
    softcap: float | None
    dropout: float
    window: int | None
    kernel: Kernel | None
    widens: bool
    """Whether to compute padded attention in float32; a CPU takes up to three times as long in
    bfloat16."""
    sinks: Tensor | None = None

    def in_rows(self, of_tokens: Sequence[Tensor], rows: PackedSequences) -> Tensor:
        """Compute attention within each row. Returns [T, heads, head size], the shape of the
        inputs."""
        if (kernel := self._kernel(of_tokens)) is not None:
            query, key, value = of_tokens
            return self._by_kernel(kernel, query, key, value, rows, rows)
        query, key, value = (_unpacked(x, rows).transpose(1, 2) for x in of_tokens)
        mask = None
        if self.window is not None and rows.longest > self.window:
            at = torch.arange(rows.longest, device=query.device)
            back = at[:, None] - at[None, :]
            mask = ((back >= 0) & (back < self.window))[None, None]
        return _packed(self._padded(query, key, value, mask), rows)

    def after_prompts(
        self, first: Sequence[Tensor], after: Sequence[Tensor], rows: SharedPrompts
    ) -> Tensor:
        """Compute attention of responses to their prompts and to themselves. Returns
        [tokens of responses, heads, head size]. `first` holds queries, keys and values of all rows
        that begin at position 0, prompts first; `after` holds those of the responses."""
        if (kernel := self._kernel(after)) is not None:
            of_tokens = (torch.cat(both) for both in zip(first[1:], after[1:], strict=True))
            key, value = (x.index_select(0, rows.tokens_of_complete) for x in of_tokens)
            return self._by_kernel(kernel, after[0], key, value, rows.responses, rows.complete)
        before, begins = int(rows.prompts.lengths.sum()), len(first[0])
        prompts = (_unpacked(x.split([before, begins - before])[0], rows.prompts) for x in first[1:])
        of_prompts = (_PromptOfEach.apply(x, rows.prompt_of_response) for x in prompts)
        query, *own = (_unpacked(x, rows.responses) for x in after)
        key, value = (torch.cat(both, 1).transpose(1, 2) for both in zip(of_prompts, own, strict=True))
        mask = rows.sees(self.window)[:, None]
        return _packed(self._padded(query.transpose(1, 2), key, value, mask), rows.responses)

    def _kernel(self, of_tokens: Sequence[Tensor]) -> Kernel | None:
        fits = self.sinks is None and takes(of_tokens[0], self.softcap, self.dropout)
        return self.kernel if fits else None

    def _by_kernel(
        self,
        kernel: Kernel,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: PackedSequences,
        of_keys: PackedSequences,
    ) -> Tensor:
        """Compute causal attention of [T] queries to [K] keys, assigned to rows by `rows` and
        `of_keys`. A row's queries belong to its last tokens."""
        return kernel(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            rows.starts,
            of_keys.starts,
            rows.longest,
            of_keys.longest,
            scale=self.scaling,
            # The kernel's window excludes the query itself; `sliding_window` includes it.
            window_size=(-1 if self.window is None else self.window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def _padded(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        dtype = query.dtype
        if self.widens and dtype.itemsize < torch.float32.itemsize:
            query, key, value = query.float(), key.float(), value.float()
        if self.sinks is not None:
            return self._with_sinks(self.sinks, query, key, value, mask).to(dtype)
        return _attention(query, key, value, mask, self.scaling, self.softcap, self.dropout).to(dtype)

    def _with_sinks(
        self, sinks: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Attend with a sink, represented as an extra first key that every query sees. One more
        dimension makes the product with this key equal to the sink, and adds 0 to all other
        products. The sink key's value is 0."""
        if self.softcap is not None or self.dropout:
            raise NotImplementedError("attention with sinks has neither a soft cap nor dropout")
        size = query.shape[-1]
        scaling = size**-0.5 if self.scaling is None else self.scaling
        more = (sinks / scaling).to(query.dtype)[:, None, None].expand(len(query), -1, query.shape[2], 1)
        query = torch.cat([query, F.pad(more, (0, _ALIGNED - 1))], -1)
        first = key.new_zeros(*key.shape[:2], 1, size + _ALIGNED)
        first[..., size] = 1
        key, value = torch.cat([first, F.pad(key, (0, _ALIGNED))], 2), F.pad(value, (0, _ALIGNED, 1, 0))
        if mask is not None:
            mask = F.pad(mask, (1, 0), value=True)
        else:  # causal: also add a query for the sink key, and drop its result
            query = F.pad(query, (0, 0, 1, 0))
        found = _attention(query, key, value, mask, scaling, None, 0.0)
        return found[:, int(mask is None) :, :, : value.shape[-1] - _ALIGNED]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    """Compute attention, [B, L, heads, head size], from inputs [B, heads, L, head size]. Causal
    without a mask. A formula computes soft caps, because torch has no kernel for them."""
    if softcap is None:
        # Stands in for the model's module, which does not know that ranks that share tokens repeat
        # keys.
        groups: Any = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1])
        return sdpa_attention_forward(
            groups, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=mask is None
        )[0]
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        mask = mask.tril()[None, None]
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~mask, -torch.inf)
    weights = F.dropout(scores.softmax(-1, dtype=torch.float32).to(query.dtype), dropout)
    return (weights @ value).transpose(1, 2)


def _unpacked(packed: Tensor, rows: PackedSequences) -> Tensor:
    """[T, ...] -> [B, longest, ...], with zeros after the end of each row."""
    return packed.unflatten(0, rows.shape) if rows.are_alike else _Unpack.apply(packed, rows)


def _packed(padded: Tensor, rows: PackedSequences) -> Tensor:
    """[B, longest, ...] -> [T, ...]"""
    return padded.flatten(0, 1) if rows.are_alike else _Pack.apply(padded, rows)


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, rows: PackedSequences) -> Tensor:
        ctx.rows = rows
        return _spread(packed, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].flatten(0, 1)[ctx.rows.slots], None


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: Tensor, rows: PackedSequences) -> Tensor:
        ctx.rows = rows
        return padded.flatten(0, 1)[rows.slots]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _spread(grads[0], ctx.rows), None


class _PromptOfEach(torch.autograd.Function):
    """[prompts, ...] -> [responses, ...]: repeat each prompt for its responses. The gradient of
    `index_select` would be slow on a CPU if tensors are not contiguous."""

    @staticmethod
    def forward(ctx: Any, prompts: Tensor, prompt_of_response: Tensor) -> Tensor:
        ctx.shape = prompts.shape
        ctx.save_for_backward(prompt_of_response)
        return prompts.index_select(0, prompt_of_response)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        [prompt_of_response] = ctx.saved_tensors
        of_prompts = grads[0].new_zeros(ctx.shape)
        return of_prompts.index_add_(0, prompt_of_response, grads[0].contiguous()), None


def _spread(packed: Tensor, rows: PackedSequences) -> Tensor:
    out = packed.new_zeros(rows.shape[0] * rows.shape[1], *packed.shape[1:])
    out[rows.slots] = packed
    return out.unflatten(0, rows.shape)


def _with_kernel(
    module: torch.nn.Module, query: Tensor, *others: Any, **named: Any
) -> tuple[Tensor, None]:
    return packed_attention(module, query, *others, kernel=find_kernel(query.device), **named)


# Lengths are Python numbers, so torch would recompile attention for each microbatch.
_AS_IT_IS: Any = torch.compiler.disable
AttentionInterface.register(NAME, _AS_IT_IS(packed_attention))
AttentionInterface.register(VARLEN, _AS_IT_IS(_with_kernel))
