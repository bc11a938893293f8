"""Token sampling: one token for each row of logits, drawn with random numbers that depend on nothing but the request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...algorithms.sampling import Sampling
from ...dataflow.lazy import torch
from .engine import GenerationRequest

if TYPE_CHECKING:
    from torch import Tensor


def draw_tokens(logits: Tensor, sampling: Sampling, draws: np.ndarray) -> tuple[Tensor, Tensor]:
    """Draw one token for each row, with its log-probability under the distribution that it was drawn from.

    Args:
        logits: [B, V] of any float dtype.
        draws: [B] float32 uniform numbers in [0, 1), one for each row; not used when greedy.

    Returns:
        ([B] int64 tokens, [B] float32 nats)
    """
    logits = logits.float()
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    if sampling.top_k or sampling.top_p < 1:
        logits = _truncate(logits, sampling.top_k, sampling.top_p)
    logprobs = logits.log_softmax(-1)
    # Inverse of the cumulative distribution. The largest target stays below the total, whatever rounding does, so the
    # first cumulative value above it belongs to a token of positive probability.
    cumulative = logprobs.exp().cumsum(-1)
    total = cumulative[:, -1:]
    targets = torch.from_numpy(draws).to(logits)[:, None] * total
    targets = torch.minimum(targets, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, targets, right=True)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


def _truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits cut to the `top_k` likeliest, then to the smallest set that reaches `top_p`; all others become -inf."""
    ascending, index = logits.sort(-1)
    if top_k and top_k < logits.shape[-1]:
        threshold = ascending[:, -top_k, None]
        ascending = ascending.masked_fill(ascending < threshold, -torch.inf)
    if top_p < 1:
        outside = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        outside[:, -1] = False
        ascending = ascending.masked_fill(outside, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, index, ascending)


class RequestDraws:
    """Uniform numbers by request and position: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) of both.

    Args:
        seeds: [requests] uint64.
    """

    def __init__(self, seeds: np.ndarray) -> None:
        self._streams = _mix(seeds)

    @classmethod
    def of(cls, requests: Sequence[GenerationRequest], fallback: np.random.Generator) -> RequestDraws:
        """Numbers by the requests' own seeds; a request without one gets a seed from `fallback`."""
        own = fallback.integers(2**63, size=len(requests)).tolist()
        seeds = [mine if r.seed is None else r.seed for r, mine in zip(requests, own, strict=True)]
        return cls(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64))

    def at(self, position: int, rows: np.ndarray) -> np.ndarray:
        """[len(rows)] float32 in [0, 1): for these requests at this token of their responses."""
        bits = _mix(self._streams[rows] + np.uint64(position))
        return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def _mix(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
