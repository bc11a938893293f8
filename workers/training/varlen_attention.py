"""The kernel of torch for attention over rows of different lengths that stand one behind the other: nothing is padded, and no mask is made.

It is there on GPUs, computes in half precision, and knows windows, fewer heads of keys than of queries, and queries that are the last
tokens of longer rows of keys; no soft cap, and no dropout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .packed_sequences import PackedSequences

Kernel = Callable[..., Any]
_ASKED = {"scale", "window_size", "enable_gqa"}
"""Arguments that a kernel must have: the first releases of torch that brought it had not all of them."""
_HALF = (torch.bfloat16, torch.float16)


def find_kernel(device: torch.device) -> Kernel | None:
    """`torch.nn.attention.varlen.varlen_attn`; None: it is not for this device, or this torch has not the one that is needed."""
    if device.type != "cuda":
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if inspect.signature(varlen_attn).parameters.keys() >= _ASKED else None


def takes(query: Tensor, softcap: float | None, dropout: float) -> bool:
    """Whether the kernel has what is asked of it."""
    return query.dtype in _HALF and softcap is None and not dropout


def attend(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: PackedSequences,
    of_keys: PackedSequences,
    *,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Causal attention within each row.

    Args:
        query: [T, heads, head size].
        key, value: [K, heads of keys, head size].
        rows: how the T queries belong to rows.
        of_keys: how the K keys do. The queries of a row are its last tokens.
        window: tokens that each token sees, itself included; None: all before it.

    Returns:
        [T, heads, head size]
    """
    return kernel(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        rows.starts,
        of_keys.starts,
        rows.longest,
        of_keys.longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
