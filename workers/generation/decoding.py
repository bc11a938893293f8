"""The batch of `TransformersEngine`: requests that decode together, their KV cache, and sampling.

Requests join the batch at any step. Left padding makes all rows end in the same column:

    .  .  p1 p2 r1 r2      p: prompt, r: response
    p1 p2 p3 p4 p5 r1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...dataflow.lazy import torch
from ...resharding.weights import mix_bits
from ..kept_sets import KeptSetsRecord, record_kept_sets
from .engine import GenerationRequest, Response, StopCheck

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class SamplingKind:
    """Settings of requests that are sampled together."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    min_tokens: int
    stops: np.ndarray
    """Stop tokens."""
    ends: StopCheck | None
    records_kept: bool
    """Whether to record the kept set of each token."""


@dataclass(frozen=True, eq=False)
class DecodingRow:
    """A request and what its response needs."""

    ticket: int
    request: GenerationRequest
    kind: SamplingKind
    max_tokens: int
    stream: int
    """Stream of random numbers."""
    routes: list[np.ndarray] = field(default_factory=list)
    kept_sets: KeptSetsRecord = field(default_factory=KeptSetsRecord)

    @property
    def given(self) -> np.ndarray:
        """Tokens of the response that another engine has sampled."""
        ids = self.request.prompt_ids
        return ids[len(ids) - self.request.sampled :]

    def response(
        self, sampled: np.ndarray, finish_reason: Literal["stop", "length", "unfinished"]
    ) -> Response:
        """Return the response of these tokens, [L] `SAMPLED`."""
        return Response(
            ticket=self.ticket,
            request_id=self.request.request_id,
            # Copy, because a view would keep the arrays of the whole batch alive.
            token_ids=sampled["token"].copy(),
            logprobs=sampled["logprob"].copy(),
            versions=sampled["version"].copy(),
            finish_reason=finish_reason,
            routes=np.concatenate(self.routes) if self.routes else None,
            kept_sets=self.kept_sets.sets if self.kind.records_kept else None,
        )


SAMPLED = np.dtype([("token", np.int32), ("logprob", np.float32), ("version", np.int32)])


@dataclass(eq=False)
class DecodingBatch:
    """Requests that decode together. All rows end in the same column of the cache."""

    rows: list[DecodingRow]
    sampled: np.ndarray
    """[B, max_tokens] `SAMPLED`."""
    lengths: np.ndarray
    """[B] int64: number of sampled tokens."""
    tokens: Tensor
    """[B] int64: the last sampled tokens, which the cache lacks."""
    cache: Any
    length: int
    """Number of columns in the cache, including padding."""
    origin: Tensor
    """[B]: the column of position 0: the left padding, minus the positions that images skip."""
    inside: Tensor | None
    """[B, columns]: whether a column belongs to the row; None without padding."""

    def __post_init__(self) -> None:
        self.ended = np.zeros(len(self.rows), bool)
        """[B]: whether a response has finished or was aborted."""
        self.streams = np.array([row.stream for row in self.rows], np.uint64)
        self.max_tokens = np.array([row.max_tokens for row in self.rows])
        self.sampled_before = np.array([row.request.sampled for row in self.rows], np.int64)

    @cached_property
    def kinds(self) -> list[tuple[SamplingKind, slice | np.ndarray]]:
        """Each kind with its rows."""
        found: dict[SamplingKind, list[int]] = {}
        for index, row in enumerate(self.rows):
            found.setdefault(row.kind, []).append(index)
        if len(found) == 1:
            return [(kind, slice(None)) for kind in found]
        return [(kind, np.array(index)) for kind, index in found.items()]

    def unfinished(self) -> DecodingBatch:
        """Return the batch of the rows that have not ended."""
        kept = np.flatnonzero(~self.ended)
        index = torch.from_numpy(kept).to(self.tokens.device)
        self.cache.batch_select_indices(index)
        return replace(
            self,
            rows=[self.rows[row] for row in kept],
            sampled=self.sampled[kept],
            lengths=self.lengths[kept],
            tokens=self.tokens[index],
            origin=self.origin[index],
            inside=None if self.inside is None else self.inside[index],
        )

    def join(self, other: DecodingBatch) -> DecodingBatch:
        """Return the batch of the rows of both. Drops leading columns that no row uses."""
        parts = (self, other)
        pads = [torch.zeros_like(b.origin) if b.inside is None else (~b.inside).sum(1) for b in parts]
        length = max(b.length - int(p.min()) for b, p in zip(parts, pads, strict=True))
        shifts = [length - b.length for b in parts]
        left = max(int((b.max_tokens - b.lengths).max()) for b in parts)
        rows = [*self.rows, *other.rows]
        sampled = np.empty((len(rows), max(b.sampled.shape[1] for b in parts)), SAMPLED)
        for part, place in zip(parts, (slice(len(self.rows)), slice(len(self.rows), None)), strict=True):
            sampled[place, : part.sampled.shape[1]] = part.sampled
        pad = torch.cat([p + shift for p, shift in zip(pads, shifts, strict=True)])
        inside = torch.arange(length + left, device=pad.device) >= pad[:, None]
        for layer, further in zip(self.cache.layers, other.cache.layers, strict=True):
            layer.append(further, length, length + left)
        return DecodingBatch(
            rows,
            sampled,
            np.concatenate([self.lengths, other.lengths]),
            torch.cat([self.tokens, other.tokens]),
            self.cache,
            length,
            torch.cat([b.origin + shift for b, shift in zip(parts, shifts, strict=True)]),
            inside if bool(pad.any()) else None,
        )

    def sample(self, logits: Tensor, version: int) -> list[Response]:
        """Sample a token for each row from logits [B, V] of this policy version. Return the
        finished responses, and mark their rows as ended."""
        draws = _uniform(self.streams, self.sampled_before + self.lengths)
        tokens = logits.new_empty(len(self.rows), dtype=torch.int64)
        logprobs = logits.new_empty(len(self.rows), dtype=torch.float32)
        for kind, rows in self.kinds:
            own = logits[rows]
            early = np.flatnonzero(self.lengths[rows] < kind.min_tokens)
            if len(early) and len(kind.stops):
                own[early[:, None], kind.stops] = -torch.inf
            tokens[rows], logprobs[rows], left = _draw_tokens(own, kind, draws[rows])
            if kind.records_kept:
                of_kind = (self.rows[row].kept_sets for row in np.arange(len(self.rows))[rows])
                record_kept_sets(left > -torch.inf, of_kind)
        self.tokens = tokens
        at = np.arange(len(self.rows)), self.lengths
        self.sampled["token"][at] = found = tokens.cpu().numpy()
        self.sampled["logprob"][at] = logprobs.cpu().numpy()
        self.sampled["version"][at] = version
        self.lengths += 1
        stopped = np.zeros(len(self.rows), bool)
        for kind, rows in self.kinds:
            stopped[rows] = np.isin(found[rows], kind.stops)
            if kind.ends is not None:
                for row in at[0][rows][self.lengths[rows] > kind.min_tokens].tolist():
                    own = self.sampled["token"][row, : self.lengths[row]]
                    stopped[row] |= kind.ends(np.concatenate([self.rows[row].given, own]))
        self.ended = stopped | (self.lengths == self.max_tokens)
        return [
            self.response(row, "stop" if stopped[row] else "length")
            for row in np.flatnonzero(self.ended).tolist()
        ]

    def response(self, index: int, finish_reason: Literal["stop", "length", "unfinished"]) -> Response:
        """Return the response of a row so far."""
        return self.rows[index].response(self.sampled[index, : self.lengths[index]], finish_reason)


def new_cache(capacity: int) -> Any:
    """Create a KV cache for `capacity` tokens per row that its layers fill in place; `DynamicLayer`
    of `transformers` copies all keys for each new token."""
    from transformers.cache_utils import Cache, DynamicLayer

    class _PreallocatedLayer(DynamicLayer):
        def update(
            self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
                rows, heads, _, size = key_states.shape
                self.all_keys = key_states.new_empty(rows, heads, capacity, size)
                self.all_values = value_states.new_empty(rows, heads, capacity, value_states.shape[-1])
                self.used = 0
            end = self.used + key_states.shape[2]
            self.all_keys[:, :, self.used : end] = key_states
            self.all_values[:, :, self.used : end] = value_states
            self.used = end
            self.keys, self.values = self.all_keys[:, :, :end], self.all_values[:, :, :end]
            return self.keys, self.values

        def batch_select_indices(self, indices: Tensor) -> None:
            self.all_keys, self.all_values = self.all_keys[indices], self.all_values[indices]
            self.keys, self.values = self.all_keys[:, :, : self.used], self.all_values[:, :, : self.used]

        def append(self, other: Any, used: int, capacity: int) -> None:
            """Append the rows of another layer, and align the last columns of both to `used`."""
            own: Any = self
            self.all_keys = _aligned((own.keys, other.keys), used, capacity)
            self.all_values = _aligned((own.values, other.values), used, capacity)
            self.used = used
            self.keys, self.values = self.all_keys[:, :, :used], self.all_values[:, :, :used]

    return Cache(layer_class_to_replicate=_PreallocatedLayer)


def _aligned(parts: Sequence[Tensor], used: int, capacity: int) -> Tensor:
    """Stack rows [rows, heads, columns, size] that end in column `used`, with zeros before."""
    _, heads, _, size = parts[0].shape
    found = parts[0].new_empty(sum(map(len, parts)), heads, capacity, size)
    first = 0
    for part in parts:
        place, columns = found[first : first + len(part)], min(used, part.shape[2])
        # Attention multiplies padding by zero, so it must be finite.
        place[:, :, : used - columns] = 0
        place[:, :, used - columns : used] = part[:, :, part.shape[2] - columns :]
        first += len(part)
    return found


# Token sampling, with random numbers that depend only on the request


def _draw_tokens(
    logits: Tensor, sampling: SamplingKind, draws: np.ndarray
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row from `logits` [B, V] of any float dtype. `draws` are [B] float32
    uniform numbers in [0, 1), unused by greedy sampling. Return [B] int64 tokens, their
    log-probabilities under the sampling distribution, [B] float32 nats, and the [B, V] logits of this
    distribution, -inf outside the kept sets."""
    logits = logits.float()
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0], logits
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    logits = _truncate(logits, sampling.top_k, sampling.top_p, sampling.min_p)
    logprobs = logits.log_softmax(-1)
    # Invert the cumulative distribution. Every target is below the total, despite rounding, so the
    # first cumulative value above it belongs to a token with positive probability.
    cumulative = logprobs.exp().cumsum(-1)
    total = cumulative[:, -1:]
    targets = torch.from_numpy(draws).to(logits)[:, None] * total
    targets = torch.minimum(targets, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, targets, right=True)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0], logits


def _truncate(logits: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Set the logits outside the kept sets to -inf. Like vLLM, keep the tokens with at least `min_p` of
    the likeliest one's probability, then the `top_k` largest logits, and of these the fewest whose
    probabilities reach `top_p`."""
    if min_p > 0:
        probabilities = logits.softmax(-1)
        unlikely = probabilities < min_p * probabilities.amax(-1, keepdim=True)
        logits = logits.masked_fill(unlikely, -torch.inf)
    if not top_k and top_p == 1:
        return logits
    ascending, index = logits.sort(-1)
    if top_k and top_k < logits.shape[-1]:
        threshold = ascending[:, -top_k, None]
        ascending = ascending.masked_fill(ascending < threshold, -torch.inf)
    if top_p < 1:
        outside = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        # Rounding of the sum must not exclude the most likely token.
        outside[:, -1] = False
        ascending = ascending.masked_fill(outside, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, index, ascending)


def _uniform(streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return a random number for each stream and position, [B] float32 from [0, 1): a SplitMix64
    hash (Steele, Lea and Flood, OOPSLA 2014) of both."""
    bits = mix_bits(streams + positions.astype(np.uint64))
    # Use 24 bits, the precision of float32: with more, rounding could give 1.
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
