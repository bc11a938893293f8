"""TransformersEngine: samples from a `transformers` model with Weft's own decoding loop. It serves
`Local()` runs, machines without vLLM, and debuggers.

    distinct prompts --prefill--> rows (one per request) --[forward, sample, drop finished]-->
    responses

Each random number is a hash of its request's seed and the token's position. So the other requests
in the batch affect a request's tokens only through the rounding of matrix products.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...algorithms.sampling import Sampling
from ...dataflow.errors import GenerationError, UserError
from ...dataflow.lazy import torch
from ...resharding.weights import mix_bits, whole
from ..models.images import ImageInputs, ImageReader, SeenPrompt, embed, positions
from ..models.model_folder import find_model_config, read_stop_tokens, refusals_named
from .engine import NOT_WHOLE, GenerationRequest, Response, Responses, stop_check_of

if TYPE_CHECKING:
    from torch import Tensor

    from ...resharding.incoming import IncomingWeights
    from ...resharding.weights import TensorPart, Weights
    from ..training.lora import Lora
    from ..training.routers import Routers
    from ..training.sharding import CheckpointNames


# Decoding


@dataclass
class _DecodingBatch:
    cache: Any
    length: int
    """Number of columns in the cache, including padding."""
    origin: Tensor
    """[B]: the column of position 0: the left padding, minus the positions that images skip."""
    inside: Tensor | None
    """[B, columns]: whether a column belongs to the row; None without padding."""

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows ([kept] int64, which may repeat rows)."""
        self.cache.batch_select_indices(rows)
        self.origin = self.origin[rows]
        if self.inside is not None:
            self.inside = self.inside[rows]


def _new_cache(capacity: int) -> Any:
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

    return Cache(layer_class_to_replicate=_PreallocatedLayer)


# Token sampling, with random numbers that depend only on the request


def _draw_tokens(logits: Tensor, sampling: Sampling, draws: np.ndarray) -> tuple[Tensor, Tensor]:
    """Draw one token per row from `logits` [B, V] of any float dtype. `draws` are [B] float32
    uniform numbers in [0, 1), unused by greedy sampling. Return [B] int64 tokens, and their
    log-probabilities under the sampling distribution, [B] float32 nats."""
    logits = logits.float()
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    if sampling.top_k or sampling.top_p < 1:
        logits = _truncate(logits, sampling.top_k, sampling.top_p)
    logprobs = logits.log_softmax(-1)
    # Invert the cumulative distribution. Every target is below the total, despite rounding, so the
    # first cumulative value above it belongs to a token with positive probability.
    cumulative = logprobs.exp().cumsum(-1)
    total = cumulative[:, -1:]
    targets = torch.from_numpy(draws).to(logits)[:, None] * total
    targets = torch.minimum(targets, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, targets, right=True)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


def _truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Keep the `top_k` largest logits, and of these the fewest whose probabilities reach `top_p`.
    Set the rest to -inf."""
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


class _RequestDraws:
    """Uniform random numbers for each request and position: a SplitMix64 hash (Steele, Lea and
    Flood, OOPSLA 2014) of both. `fallback` draws missing seeds."""

    def __init__(self, requests: Sequence[GenerationRequest], fallback: np.random.Generator) -> None:
        own = fallback.integers(2**63, size=len(requests)).tolist()
        seeds = [mine if r.seed is None else r.seed for r, mine in zip(requests, own, strict=True)]
        self._streams = mix_bits(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64))

    def at(self, position: int, rows: np.ndarray) -> np.ndarray:
        """Return the random numbers of these responses at this position, [len(rows)] float32 from
        [0, 1)."""
        bits = mix_bits(self._streams[rows] + np.uint64(position))
        # Use 24 bits, the precision of float32: with more, rounding could give 1.
        return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


class TransformersEngine:
    """`GenerationEngine` for a `transformers` causal language model.

    Args:
        model: folder or cached Hugging Face id.
        max_num_seqs: number of responses to sample at the same time. Others wait until the whole
            batch has finished.
        max_context: [tokens] maximum total length of prompt and response; None for the model's
            limit.
        dtype: dtype of the weights; "auto" selects float32 on CPUs and bfloat16 on GPUs.
        seed: seed for requests that have none.
        adapter: the adapter to serve, if updates carry only the adapter. Generation then waits for
            the first update.
        routes: whether to record the experts of each token.
        images: processor of a model that reads images; None for a text model.

    Raises:
        UserError: `transformers` rejects the model, or its experts cannot be recorded.
    """

    def __init__(
        self,
        model: str,
        *,
        max_num_seqs: int = 256,
        max_context: int | None = None,
        dtype: str = "auto",
        seed: int = 0,
        adapter: Lora | None = None,
        routes: bool = False,
        images: ImageReader | None = None,
    ) -> None:
        from transformers import AutoConfig
        from transformers.utils import logging

        from ..training.causal_lm import auto_class
        from ..training.packed_attention import caps_scores

        self.version = 0
        self._oldest_keys = 0
        """Recompute keys and values of versions before this one."""
        self._whole = adapter is None
        self._max_num_seqs = max_num_seqs
        self._device = torch.device("cpu")
        if torch.cuda.is_available():
            self._device = torch.device("cuda", torch.cuda.current_device())
        if dtype == "auto":
            dtype = "float32" if self._device.type == "cpu" else "bfloat16"
        # The switch is global, so restore the user's choice afterwards.
        shows_progress = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            with refusals_named(model, "cannot generate"):
                folder = find_model_config(model).parent
                kind = auto_class(AutoConfig.from_pretrained(folder, local_files_only=True))
                self.model: Any = kind.from_pretrained(folder, dtype=getattr(torch, dtype))
        finally:
            if shows_progress:
                logging.enable_progress_bar()
        self._serves_adapter = adapter is not None
        if adapter is not None:
            from ..training.adapter import serve_adapter

            serve_adapter(self.model, adapter)
        self.model.to(self._device).eval().requires_grad_(False)
        # torch's own attention ignores soft caps.
        if caps_scores(self.model):
            self.model.set_attn_implementation("eager")
        self._max_context = max_context or self.model.config.get_text_config().max_position_embeddings
        self._stop_tokens = np.asarray(read_stop_tokens(model), dtype=np.int64)
        self._model_folder = model
        self._seeds = np.random.default_rng(seed)
        self._routers = self._find_routers(model) if routes else None
        self._images = images
        self._names: CheckpointNames | None = None

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Responses:
        if not self._whole:
            raise GenerationError(NOT_WHOLE)
        for request in requests:
            length = len(self._read(request).ids)
            if length + sampling.max_tokens > self._max_context:
                raise GenerationError(
                    f"request {request.request_id}: {length} prompt tokens and max_tokens={sampling.max_tokens} exceed the context of "
                    f"{self._max_context}"
                )
        given_up: set[int] = set()
        for start in range(0, len(requests), self._max_num_seqs):
            wanted = [
                r for r in requests[start : start + self._max_num_seqs] if r.request_id not in given_up
            ]
            if wanted:
                yield from self._generate(wanted, sampling, given_up)

    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def stage_weights(self, weights: Weights) -> Iterator[None]:
        yield from ()

    def update_weights(self, weights: Weights) -> str:
        from ...resharding.incoming import IncomingWeights, receive_parts

        with IncomingWeights(weights) as incoming:
            # Set this late: if the connection fails before, the old weights can still be used.
            self._whole = False
            checksum = receive_parts(incoming, self._parts(incoming))
            self._whole = True
        self.version = weights.version
        return checksum

    def recompute(self) -> None:
        self._oldest_keys = self.version  # each batch recomputes before its next token

    def sleep(self, *, discard_weights: bool = False) -> None:
        self.model.to("cpu")

    def wake_up(self) -> None:
        self.model.to(self._device)

    def close(self) -> None:
        del self.model

    def _parts(self, incoming: IncomingWeights) -> list[TensorPart]:
        """Return the model's parameters by checkpoint name; tied parameters have the published
        name."""
        if self._serves_adapter:
            from ..training.adapter import adapter_of

            return list(whole(adapter_of(self.model)))
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        tied: dict[int, list[str]] = {}
        for name, parameter in parameters.items():
            tied.setdefault(id(parameter), []).append(name)
        if self._names is None:
            from ..training.sharding import CheckpointNames

            self._names = CheckpointNames(self.model, parameters)
        names, published = self._names, incoming.layout.tensors.keys()
        held_names: list[str] = []
        for each in tied.values():
            stored = [name for name in each if published & set(names.stored_names(name))]
            held_names += stored or each[:1]
        held = whole({name: parameters[name].data for name in held_names})
        return [part for tensor in held for part in names.parts(tensor)]

    def _read(self, request: GenerationRequest) -> SeenPrompt:
        if self._images is None:
            if len(request.images):
                raise GenerationError(
                    f"request {request.request_id} has images, but the model reads text alone"
                )
            return SeenPrompt(request.prompt_ids, np.zeros(len(request.prompt_ids), bool))
        return self._images.read(request.prompt_ids, request.images)

    def _find_routers(self, model: str) -> Routers:
        from ..training.routers import Routers, find_routers

        ids = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        with torch.inference_mode(), _no_warnings():
            found, _ = find_routers(self.model, lambda: self.model(input_ids=ids, use_cache=False))
        if not found:
            raise UserError(
                f"routes=True: model {model!r} has no routers whose choice can be recorded; leave it out"
            )
        return Routers(self.model, found)

    def _generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, given_up: set[int]
    ) -> Responses:
        request_ids = np.array([request.request_id for request in requests])
        stops = np.empty(0, dtype=np.int64) if sampling.stop is None else self._stop_tokens
        ends = stop_check_of(sampling, self._model_folder)
        draws = _RequestDraws(requests, self._seeds)
        shape = (len(requests), sampling.max_tokens)
        token_ids, versions = np.empty(shape, dtype=np.int32), np.empty(shape, dtype=np.int32)
        logprobs = np.empty(shape, dtype=np.float32)
        alive = np.arange(len(requests))  # request of each unfinished row
        routes: list[list[np.ndarray]] = [[] for _ in requests]
        batch, logits = self._prefill(requests, sampling.max_tokens, routes)
        computed_under = self.version
        for position in range(sampling.max_tokens):
            if position < sampling.min_tokens and len(stops):
                logits = logits.index_fill(-1, torch.from_numpy(stops).to(logits.device), -torch.inf)
            sampled, sampled_logprobs = _draw_tokens(logits, sampling, draws.at(position, alive))
            tokens = sampled.cpu().numpy()
            token_ids[alive, position] = tokens
            logprobs[alive, position] = sampled_logprobs.cpu().numpy()
            versions[alive, position] = self.version
            length = position + 1
            stopped = np.isin(tokens, stops)
            if ends is not None and length > sampling.min_tokens:
                stopped |= [ends(token_ids[row, :length]) for row in alive.tolist()]
            done = stopped | (length == sampling.max_tokens)
            sent = yield [
                Response(
                    request_id=requests[row].request_id,
                    # Copy, because a view would keep the arrays of the whole batch alive.
                    token_ids=token_ids[row, :length].copy(),
                    logprobs=logprobs[row, :length].copy(),
                    versions=versions[row, :length].copy(),
                    finish_reason="stop" if stop else "length",
                    routes=np.concatenate(routes[row]) if self._routers else None,
                )
                for row, stop in zip(alive[done].tolist(), stopped[done].tolist(), strict=True)
            ]
            if sent:
                given_up.update(sent)
                done |= np.isin(request_ids[alive], list(given_up))
            if done.all():
                return
            if done.any():
                alive = alive[~done]
                keep = torch.from_numpy(np.flatnonzero(~done)).to(self._device)
                batch.keep(keep)
                sampled = sampled[keep]
            # `recompute` was called, so prefill again with the current weights.
            if computed_under < self._oldest_keys:
                computed_under = self.version
                so_far: list[GenerationRequest] = []
                for row in alive.tolist():
                    # Exclude the token just sampled, which `_forward` appends below.
                    ids = np.concatenate([requests[row].prompt_ids, token_ids[row, :position]])
                    so_far.append(replace(requests[row], prompt_ids=ids))
                # The routes of these tokens are already known, so drop the new ones.
                batch, _ = self._prefill(so_far, sampling.max_tokens - position, [[] for _ in so_far])
            logits, taken = self._forward(batch, sampled)
            for row, own in zip(alive.tolist(), taken, strict=False):
                routes[row].append(own)

    def _prefill(
        self, requests: Sequence[GenerationRequest], max_tokens: int, routes: list[list[np.ndarray]]
    ) -> tuple[_DecodingBatch, Tensor]:
        """Run each distinct prompt once. Return the batch, and the logits [B, V] of each row's
        first token. Append each prompt's routes to those of its requests."""
        distinct: dict[tuple[bytes | int, ...], int] = {}
        prompts: list[SeenPrompt] = []
        row_prompts = np.empty(len(requests), dtype=np.int64)
        for row, request in enumerate(requests):
            prompt = self._read(request)
            # Equal images are the same object, because they are cached.
            key = (prompt.ids.tobytes(), *map(id, prompt.images))
            row_prompts[row] = distinct.setdefault(key, len(distinct))
            if len(distinct) > len(prompts):
                prompts.append(prompt)
        lengths = np.array([len(prompt.ids) for prompt in prompts])
        longest = int(lengths.max())
        # Pad on the left, so that all prompts end in the column from which logits are read.
        padded = np.zeros((len(prompts), longest), np.int64)
        is_image = np.zeros((len(prompts), longest), bool)
        for row, prompt in enumerate(prompts):
            padded[row, longest - len(prompt.ids) :] = prompt.ids
            is_image[row, longest - len(prompt.ids) :] = prompt.is_image
        pads = torch.from_numpy(longest - lengths).to(self._device)
        position_ids = (torch.arange(longest, device=self._device) - pads[:, None]).clamp(min=0)
        cache = _new_cache(longest + max_tokens)
        columns = torch.arange(longest + max_tokens, device=self._device)
        inside = columns >= pads[:, None]
        input_ids, origin = torch.from_numpy(padded).to(self._device), pads
        given: dict[str, Tensor] = {"input_ids": input_ids, "position_ids": position_ids}
        with torch.inference_mode(), _no_warnings(), self._recorded() as recorded:
            if images := [image for prompt in prompts for image in prompt.images]:
                shown = ImageInputs.of(torch.from_numpy(is_image).to(self._device), images)
                backbone = self.model.base_model
                own = positions(backbone, input_ids, shown, inside[:, :longest])
                own = position_ids if own is None else own
                given = {"inputs_embeds": embed(backbone, input_ids, shown), "position_ids": own}
                origin = longest - 1 - given["position_ids"][..., -1].view(-1, len(prompts)).amax(0)
            logits = self.model(
                **given,
                attention_mask=inside[:, :longest],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            if recorded is not None:
                taken = _numbers(recorded.routes).reshape(
                    len(prompts), longest, recorded.layers, recorded.chosen
                )
                for own, prompt in zip(routes, row_prompts.tolist(), strict=True):
                    own.append(taken[prompt, longest - lengths[prompt] :])
            rows = _DecodingBatch(cache, longest, origin, inside if bool(pads.any()) else None)
            if len(requests) > len(prompts):
                index = torch.from_numpy(row_prompts).to(self._device)
                rows.keep(index)
                logits = logits[index]
        return rows, logits

    def _forward(self, batch: _DecodingBatch, tokens: Tensor) -> tuple[Tensor, np.ndarray]:
        """Append one token [B] to each row. Return logits [B, V] for the next token, and routes
        [B, 1, layers, k], or [0] if the engine records none."""
        with torch.inference_mode(), _no_warnings(), self._recorded() as recorded:
            logits = self.model(
                input_ids=tokens[:, None],
                attention_mask=None if batch.inside is None else batch.inside[:, : batch.length + 1],
                position_ids=(batch.length - batch.origin)[:, None],
                past_key_values=batch.cache,
                use_cache=True,
            ).logits[:, -1]
            taken = np.empty(0) if recorded is None else _numbers(recorded.routes)[:, None]
        batch.length += 1
        return logits, taken

    def _recorded(self) -> AbstractContextManager[Routers | None]:
        return nullcontext() if self._routers is None else self._routers.recorded()


def _numbers(routes: Tensor) -> np.ndarray:
    return routes.to(torch.int32).cpu().numpy().astype(np.uint16)


def _no_warnings() -> Any:
    return warnings.catch_warnings(action="ignore")
