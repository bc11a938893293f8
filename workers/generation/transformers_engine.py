"""TransformersEngine: samples from a `transformers` model with Weft's own decoding loop. It serves
`Local()` runs, machines without vLLM, and debuggers.

    submit --> waiting --prefill of distinct prompts--> batch --[forward, sample]--> responses

Each random number is a hash of its request's seed and the token's position. So the other requests
in the batch affect a request's tokens only through the rounding of matrix products. Each served
adapter has its own batch, so requests to the other adapters do not affect its tokens at all.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ...algorithms.sampling import Sampling
from ...dataflow.errors import GenerationError, UserError
from ...dataflow.lazy import torch
from ...resharding.weights import mix_bits, whole
from ..models.images import ImageInputs, ImageReader, SeenPrompt, embed, positions
from ..models.model_folder import find_model_config, read_stop_tokens, refusals_named
from .decoding import SAMPLED, DecodingBatch, DecodingRow, SamplingKind, new_cache
from .engine import GenerationRequest, Response, stop_check_of
from .policies import Policies

if TYPE_CHECKING:
    from torch import Tensor

    from ...resharding.incoming import IncomingWeights
    from ...resharding.weights import TensorPart, Weights
    from ..training.adapter import ServedAdapter
    from ..training.lora import Lora
    from ..training.routers import Routers
    from ..training.sharding import CheckpointNames


class TransformersEngine:
    """`GenerationEngine` for a `transformers` causal language model.

    Args:
        model: folder or cached Hugging Face id.
        max_num_seqs: number of responses to sample at the same time, over all adapters. Others wait.
        max_context: [tokens] maximum total length of prompt and response; None for the model's
            limit.
        dtype: dtype of the weights; "auto" selects float32 on CPUs and bfloat16 on GPUs.
        seed: seed for requests that have none.
        adapters: actor -> the adapter to serve, if updates carry only adapters. Generation then
            waits for the first update of each.
        routes: whether to record the experts of each token.
        images: processor of a model that reads images; None for a text model.
        kept_sets: whether to record the kept sets of truncated samples.

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
        adapters: Mapping[str, Lora] = MappingProxyType({}),
        routes: bool = False,
        images: ImageReader | None = None,
        kept_sets: bool = False,
    ) -> None:
        from transformers import AutoConfig
        from transformers.utils import logging

        from ..training.causal_lm import auto_class
        from ..training.packed_attention import caps_scores

        self._policies = Policies(adapters)
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
        self._adapters: Mapping[str, ServedAdapter] = {}
        if adapters:
            from ..training.adapter import serve_adapters

            self._adapters = dict(
                zip(adapters, serve_adapters(self.model, [*adapters.values()]), strict=True)
            )
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
        self._kept_sets = kept_sets
        self._names: CheckpointNames | None = None
        self._tickets = itertools.count()
        self._kinds: dict[tuple[Any, ...], SamplingKind] = {}
        self._waiting: list[DecodingRow] = []
        self._running: dict[str, DecodingBatch] = {}
        """Policy -> its batch."""
        self._stale = False
        """Whether to recompute the cache of the running batches."""

    @property
    def version(self) -> int:
        return self._policies.version

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + sum(int((~b.ended).sum()) for b in self._running.values())

    def submit(self, request: GenerationRequest, sampling: Sampling) -> int:
        self._policies.whole(request.policy)
        if request.structure is not None:
            raise GenerationError(
                f"request {request.request_id} asks for structured output ({request.structure.kind}), "
                "which engine='transformers' cannot enforce; choose engine='vllm'"
            )
        ids = self._read(request).ids
        length, size = len(ids), self.model.get_input_embeddings().weight.shape[0]
        if (largest := int(np.max(ids, initial=-1))) >= size:
            raise GenerationError(
                f"request {request.request_id}: the prompt has token id {largest}, and the model has ids 0 to {size - 1}"
            )
        if length + sampling.max_tokens > self._max_context:
            raise GenerationError(
                f"request {request.request_id}: {length} prompt tokens and max_tokens={sampling.max_tokens} exceed the context of "
                f"{self._max_context}"
            )
        fallback = int(self._seeds.integers(2**63))
        seed = (fallback if request.seed is None else request.seed) % 2**64
        stream = int(mix_bits(np.array([seed], np.uint64))[0])
        ticket = next(self._tickets)
        kind = self._kind(sampling, request.stop_token_ids)
        self._waiting.append(DecodingRow(ticket, request, kind, sampling.max_tokens, stream))
        return ticket

    def step(self) -> list[Response]:
        if not self.num_unfinished:
            return []
        batches = self._running.values()
        rows = itertools.chain(self._waiting, *(batch.rows for batch in batches))
        self._policies.check(row.request.policy for row in rows)
        # After an error, the requests of this step are gone.
        running, self._running = self._running, {}
        stale, self._stale = self._stale, False
        room = self._max_num_seqs - sum(int((~batch.ended).sum()) for batch in running.values())
        admitted: dict[str, list[DecodingRow]] = {}
        for row in self._waiting[:room]:
            admitted.setdefault(self._policies.named(row.request.policy), []).append(row)
        self._waiting = self._waiting[room:]
        found: list[Response] = []
        with torch.inference_mode(), _no_warnings():
            for policy in self._policies.names:
                if policy in running or policy in admitted:
                    found += self._step(policy, running.get(policy), admitted.get(policy, []), stale)
        return found

    def _step(
        self, policy: str, batch: DecodingBatch | None, admitted: list[DecodingRow], stale: bool
    ) -> list[Response]:
        """Decode a token of each request to one policy."""
        if len(self._adapters) > 1:
            self._adapters[policy].activate()
        logits: list[Tensor] = []
        if batch is not None:
            batch = batch.unfinished() if batch.ended.any() else batch
            batch = self._recompute(batch) if stale else batch
            logits.append(self._forward(batch))
        if admitted:
            new, first = self._prefill(admitted)
            batch = new if batch is None else batch.join(new)
            logits.append(first)
        assert batch is not None
        together = logits[0] if len(logits) == 1 else torch.cat(logits)
        found = batch.sample(together, self._policies.versions[policy])
        if not batch.ended.all():
            self._running[policy] = batch
        return found

    def abort(self, tickets: Collection[int]) -> None:
        self._waiting = [row for row in self._waiting if row.ticket not in tickets]
        for policy, batch in [*self._running.items()]:
            batch.ended |= [row.ticket in tickets for row in batch.rows]
            if batch.ended.all():
                del self._running[policy]

    def take_unfinished(self, tickets: Collection[int]) -> list[Response]:
        nothing = np.zeros(0, SAMPLED)
        waiting = [row for row in self._waiting if row.ticket in tickets]
        found = [row.response(nothing, "unfinished") for row in waiting]
        for batch in self._running.values():
            own = (row.ticket in tickets for row in batch.rows)
            running = np.flatnonzero(np.fromiter(own, bool, len(batch.rows)) & ~batch.ended).tolist()
            found += [batch.response(k, "unfinished") for k in running]
        self.abort([response.ticket for response in found])
        return found

    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def stage_weights(self, weights: Weights) -> Iterator[None]:
        yield from ()

    def update_weights(self, weights: Weights, policy: str = "") -> str:
        from ...resharding.incoming import IncomingWeights, receive_parts

        # If the connection fails, the old weights can still be used.
        with (
            IncomingWeights(weights) as incoming,
            self._policies.update(policy, weights.version) as name,
        ):
            return receive_parts(incoming, self._parts(incoming, name))

    def recompute(self) -> None:
        self._stale = True

    def sleep(self, *, discard_weights: bool = False) -> None:
        self.model.to("cpu")

    def wake_up(self) -> None:
        self.model.to(self._device)

    def close(self) -> None:
        del self.model

    def _parts(self, incoming: IncomingWeights, policy: str) -> list[TensorPart]:
        """Return the parameters of a policy by checkpoint name; tied parameters have the published
        name."""
        if self._adapters:
            return list(whole(self._adapters[policy].tensors()))
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

    def _kind(self, sampling: Sampling, stop_token_ids: tuple[int, ...]) -> SamplingKind:
        """Return the kind of a request, the same object for equal settings."""
        chosen = (
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.min_tokens,
        )
        key = (*chosen, sampling.stop, stop_token_ids)
        if key not in self._kinds:
            stops = np.union1d(self._stop_tokens, np.array(stop_token_ids, np.int64))
            stops = stops[:0] if sampling.stop is None else stops
            ends = stop_check_of(sampling, self._model_folder)
            records_kept = self._kept_sets and sampling.truncates
            self._kinds[key] = SamplingKind(*chosen, stops, ends, records_kept)
        return self._kinds[key]

    def _recompute(self, batch: DecodingBatch) -> DecodingBatch:
        """Prefill a batch again with the current weights."""
        rows: list[DecodingRow] = []
        for index, row in enumerate(batch.rows):
            # Exclude the token just sampled, which `_forward` appends.
            before = batch.sampled["token"][index, : batch.lengths[index] - 1]
            ids = np.concatenate([row.request.prompt_ids, before])
            # The routes of these tokens are already known, so drop the new ones.
            left = row.max_tokens - len(before)
            rows.append(
                replace(row, request=replace(row.request, prompt_ids=ids), max_tokens=left, routes=[])
            )
        new, _ = self._prefill(rows)
        return replace(
            new, rows=batch.rows, sampled=batch.sampled, lengths=batch.lengths, tokens=batch.tokens
        )

    def _prefill(self, rows: list[DecodingRow]) -> tuple[DecodingBatch, Tensor]:
        """Run each distinct prompt once. Return the batch, and the logits [B, V] of each row's
        first token."""
        max_tokens = max(row.max_tokens for row in rows)
        distinct: dict[tuple[bytes | int, ...], int] = {}
        prompts: list[SeenPrompt] = []
        row_prompts = np.empty(len(rows), dtype=np.int64)
        for index, row in enumerate(rows):
            prompt = self._read(row.request)
            # Equal images are the same object, because they are cached.
            key = (prompt.ids.tobytes(), *map(id, prompt.images))
            row_prompts[index] = distinct.setdefault(key, len(distinct))
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
        cache = new_cache(longest + max_tokens)
        columns = torch.arange(longest + max_tokens, device=self._device)
        inside = columns >= pads[:, None]
        input_ids, origin = torch.from_numpy(padded).to(self._device), pads
        given: dict[str, Tensor] = {"input_ids": input_ids, "position_ids": position_ids}
        with self._recorded() as recorded:
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
                for row, prompt in zip(rows, row_prompts.tolist(), strict=True):
                    row.routes.append(taken[prompt, longest - lengths[prompt] :])
        inside = inside if bool(pads.any()) else None
        if len(rows) > len(prompts):
            index = torch.from_numpy(row_prompts).to(self._device)
            cache.batch_select_indices(index)
            origin, logits = origin[index], logits[index]
            inside = None if inside is None else inside[index]
        sampled = np.empty((len(rows), max_tokens), SAMPLED)
        counts, tokens = np.zeros(len(rows), np.int64), logits.new_empty(len(rows), dtype=torch.int64)
        return DecodingBatch(rows, sampled, counts, tokens, cache, longest, origin, inside), logits

    def _forward(self, batch: DecodingBatch) -> Tensor:
        """Append the last sampled tokens to the cache, and return logits [B, V] for the next."""
        with self._recorded() as recorded:
            logits = self.model(
                input_ids=batch.tokens[:, None],
                attention_mask=None if batch.inside is None else batch.inside[:, : batch.length + 1],
                position_ids=(batch.length - batch.origin)[:, None],
                past_key_values=batch.cache,
                use_cache=True,
            ).logits[:, -1]
            if recorded is not None:
                for row, taken in zip(batch.rows, _numbers(recorded.routes)[:, None], strict=True):
                    row.routes.append(taken)
        batch.length += 1
        return logits

    def _recorded(self) -> AbstractContextManager[Routers | None]:
        return nullcontext() if self._routers is None else self._routers.recorded()


def _numbers(routes: Tensor) -> np.ndarray:
    return routes.to(torch.int32).cpu().numpy().astype(np.uint16)


def _no_warnings() -> Any:
    return warnings.catch_warnings(action="ignore")
