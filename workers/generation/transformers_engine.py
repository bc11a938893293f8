"""The `transformers` engine: a plain causal language model with its keys and values kept, sampled by a loop of our own.

For `Local()` runs, for machines without vLLM, and for stepping through with a debugger.

    distinct prompts --prefill--> rows (one a request) --[forward, sample, drop the finished]--> responses

Every random number is a hash of its request's seed and its position, so a request's tokens do not depend on what else
is in the batch (beyond the rounding of matrix products).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from ...algorithms.sampling import Sampling
from ...dataflow.config import Config
from ...dataflow.errors import GenerationError, WeightSyncError
from ...dataflow.lazy import torch
from ...resharding.weights import Weights
from ..model_folder import find_model_config, read_stop_tokens, refusals_named
from .engine import Request, Response

if TYPE_CHECKING:
    from torch import Tensor


class TransformersSettings(Config):
    """Settings of the `transformers` engine."""

    max_num_seqs: int = Field(default=256, ge=1)
    """Responses sampled at the same time; further ones wait until these are finished."""


class TransformersEngine:
    """`GenerationEngine` on a `transformers` causal language model."""

    def __init__(
        self,
        model: str,
        settings: TransformersSettings = TransformersSettings(),
        *,
        max_context: int | None = None,
        dtype: str = "auto",
        seed: int = 0,
    ) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        from ..training.packed_attention import caps_scores

        self.version = 0
        self._max_num_seqs = settings.max_num_seqs
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if dtype == "auto":
            dtype = "float32" if self._device.type == "cpu" else "bfloat16"
        shows_progress = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            with refusals_named(model, "cannot generate"):
                folder = find_model_config(model).parent
                self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        finally:
            if shows_progress:
                logging.enable_progress_bar()
        self.model.to(self._device).eval().requires_grad_(False)
        if caps_scores(self.model):
            self.model.set_attn_implementation("eager")
        self._max_context = max_context or self.model.config.get_text_config().max_position_embeddings
        self._stop_tokens = np.asarray(read_stop_tokens(model), dtype=np.int64)
        self._seeds = np.random.default_rng(seed)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[list[Response]]:
        """Responses as they finish; see `GenerationEngine`."""
        for request in requests:
            if len(request.prompt_ids) + sampling.max_tokens > self._max_context:
                raise GenerationError(
                    f"request {request.request_id}: {len(request.prompt_ids)} prompt tokens and max_tokens="
                    f"{sampling.max_tokens} exceed the context of {self._max_context}"
                )
        for start in range(0, len(requests), self._max_num_seqs):
            yield from self._generate(requests[start : start + self._max_num_seqs], sampling)

    def update_weights(self, weights: Weights) -> str:
        """Copy a published version over the model's parameters.

        Raises:
            WeightSyncError: when the bytes are not those published, or names or shapes are not the model's.
        """
        from ...resharding.shared_memory import open_weights

        with torch.no_grad():
            self._copy(open_weights(weights), weights.version)
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)  # the memory is the sender's again when this returns
        self.version = weights.version
        return weights.checksum

    def sleep(self) -> None:
        """Move the model to host memory."""
        self.model.to("cpu")

    def wake_up(self) -> None:
        self.model.to(self._device)

    def close(self) -> None:
        """Give the model's memory up."""
        del self.model

    def _copy(self, tensors: dict[str, Tensor], version: int) -> None:
        parameters = dict(self.model.named_parameters(remove_duplicate=False))  # tied ones under each of their names
        written: set[int] = set()
        for name, tensor in tensors.items():
            parameter = parameters.get(name)
            if parameter is None or parameter.shape != tensor.shape:
                here = "no tensor of that name" if parameter is None else f"shape {tuple(parameter.shape)}"
                raise WeightSyncError(
                    f"weights version {version}: {name!r} of shape {tuple(tensor.shape)} was published, the model has {here}"
                )
            parameter.copy_(tensor)
            written.add(id(parameter))
        missing = [name for name, parameter in parameters.items() if id(parameter) not in written]
        if missing:
            raise WeightSyncError(f"weights version {version} lack what the model needs for: {', '.join(missing)}")

    def _generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[list[Response]]:
        """One batch of requests, from the prompts to the last finished response."""
        stops = np.empty(0, dtype=np.int64) if sampling.ignore_stop else self._stop_tokens
        draws = _Draws.of(requests, self._seeds)
        rows = len(requests)
        token_ids = np.empty((rows, sampling.max_tokens), dtype=np.int32)
        logprobs = np.empty((rows, sampling.max_tokens), dtype=np.float32)
        versions = np.empty((rows, sampling.max_tokens), dtype=np.int32)
        alive = np.arange(rows)  # the request of each row that is still in the batch
        batch, logits = self._prefill(requests, sampling.max_tokens)
        for position in range(sampling.max_tokens):
            if position < sampling.min_tokens and len(stops):
                logits = logits.index_fill(-1, torch.from_numpy(stops).to(logits.device), -torch.inf)
            sampled, sampled_logprobs = _sample(logits, sampling, draws.at(position, alive))
            tokens = sampled.cpu().numpy()
            token_ids[alive, position] = tokens
            logprobs[alive, position] = sampled_logprobs.cpu().numpy()
            versions[alive, position] = self.version
            stopped = np.isin(tokens, stops)
            last = position + 1 == sampling.max_tokens
            if last or stopped.any():
                done = np.ones_like(stopped) if last else stopped
                length = position + 1
                yield [
                    Response(
                        request_id=requests[row].request_id,
                        token_ids=token_ids[row, :length].copy(),
                        logprobs=logprobs[row, :length].copy(),
                        versions=versions[row, :length].copy(),
                        finish_reason="stop" if stop else "length",
                    )
                    for row, stop in zip(alive[done].tolist(), stopped[done].tolist(), strict=True)
                ]
                alive = alive[~done]
                if not len(alive):
                    return
                keep = torch.from_numpy(np.flatnonzero(~done)).to(self._device)
                batch.keep(keep)
                sampled = sampled[keep]
            else:
                yield []
            logits = self._forward(batch, sampled)

    def _prefill(self, requests: Sequence[Request], max_tokens: int) -> tuple[_Rows, Tensor]:
        """Read the prompts, each distinct one once; returns the rows, and their logits `[B, V]` for the first token."""
        distinct: dict[bytes, int] = {}
        prompts: list[np.ndarray] = []
        row_prompts = np.empty(len(requests), dtype=np.int64)
        for row, request in enumerate(requests):
            ids = np.ascontiguousarray(request.prompt_ids, dtype=np.int64)
            row_prompts[row] = distinct.setdefault(ids.tobytes(), len(distinct))
            if len(distinct) > len(prompts):
                prompts.append(ids)
        lengths = np.array([len(ids) for ids in prompts])
        longest = int(lengths.max())
        padded = np.zeros((len(prompts), longest), dtype=np.int64)
        for row, ids in enumerate(prompts):
            padded[row, longest - len(ids) :] = ids
        pads = torch.from_numpy(longest - lengths).to(self._device)
        position_ids = (torch.arange(longest, device=self._device) - pads[:, None]).clamp(min=0)
        cache = _new_cache(longest + max_tokens)
        columns = torch.arange(longest + max_tokens, device=self._device)
        inside = columns >= pads[:, None]
        with torch.inference_mode(), _no_warnings():
            logits = self.model(
                input_ids=torch.from_numpy(padded).to(self._device),
                attention_mask=inside[:, :longest],
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            rows = _Rows(cache, longest, pads, inside if bool(pads.any()) else None)
            if len(requests) > len(prompts):
                index = torch.from_numpy(row_prompts).to(self._device)
                rows.keep(index)
                logits = logits[index]
        return rows, logits

    def _forward(self, batch: _Rows, tokens: Tensor) -> Tensor:
        """Append one token `[B]` to each row; returns the logits `[B, V]` for the next."""
        with torch.inference_mode(), _no_warnings():
            logits = self.model(
                input_ids=tokens[:, None],
                attention_mask=batch.attention_mask(),
                position_ids=(batch.length - batch.pads)[:, None],
                past_key_values=batch.cache,
                use_cache=True,
            ).logits[:, -1]
        batch.length += 1
        return logits


@dataclass
class _Rows:
    """The rows of a batch: their keys and values, and where each begins."""

    cache: Any
    length: int
    """Columns in the cache, padding included."""
    pads: Tensor
    """[B] columns of padding at the left of each row."""
    inside: Tensor | None
    """[B, columns] whether a column belongs to the row; None when no row is padded."""

    def keep(self, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows)
        self.pads = self.pads[rows]
        if self.inside is not None:
            self.inside = self.inside[rows]

    def attention_mask(self) -> Tensor | None:
        """Mask of the next forward, which adds one column."""
        return None if self.inside is None else self.inside[:, : self.length + 1]


def _new_cache(capacity: int) -> Any:
    """A `transformers` cache whose layers write in place: `DynamicLayer` copies all of its keys for each new token."""
    from transformers.cache_utils import Cache, DynamicLayer

    class RoomyLayer(DynamicLayer):
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
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

    return Cache(layer_class_to_replicate=RoomyLayer)


def _sample(logits: Tensor, sampling: Sampling, draws: np.ndarray) -> tuple[Tensor, Tensor]:
    """One token for each row, and its log-probability under the distribution that it was drawn from.

    Args:
        logits: `[B, V]`.
        draws: `[B]` uniform numbers in [0, 1), one for each row; not used when greedy.
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
    """Logits with all but the `top_k` likeliest, then all but the smallest set that reaches `top_p`, at -inf."""
    ascending, index = logits.sort(-1)
    if top_k and top_k < logits.shape[-1]:
        threshold = ascending[:, -top_k, None]
        ascending = ascending.masked_fill(ascending < threshold, -torch.inf)
    if top_p < 1:
        outside = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        outside[:, -1] = False
        ascending = ascending.masked_fill(outside, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, index, ascending)


class _Draws:
    """Uniform numbers by request and position: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) of both."""

    def __init__(self, seeds: np.ndarray) -> None:
        self._streams = _mix(seeds)

    @classmethod
    def of(cls, requests: Sequence[Request], fallback: np.random.Generator) -> _Draws:
        own = fallback.integers(2**63, size=len(requests)).tolist()
        seeds = [mine if r.seed is None else r.seed for r, mine in zip(requests, own, strict=True)]
        return cls(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64))

    def at(self, position: int, rows: np.ndarray) -> np.ndarray:
        """`[len(rows)]` float32 in [0, 1)."""
        bits = _mix(self._streams[rows] + np.uint64(position))
        return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def _mix(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def _no_warnings() -> Any:
    return warnings.catch_warnings(action="ignore")
