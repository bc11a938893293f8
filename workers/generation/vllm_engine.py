"""vLLM in the worker's own process. Only the modules `vllm_*.py`, here and in `resharding`, import
vLLM."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import secrets
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ...algorithms.sampling import Sampling
from ...dataflow.errors import GenerationError, WeightSyncError
from ...dataflow.lazy import torch
from ...dataflow.metrics import Metrics
from ...resharding.weights import Weights
from ..kept_sets import KeptSets
from ..models.images import ImageReader, open_image
from ..models.model_folder import read_stop_tokens
from ..node_memory import node_memory
from .engine import GenerationRequest, Response, StopCheck, stable_hash, stop_check_of
from .policies import Policies
from .vllm_drafts import VllmDrafts
from .vllm_settings import VllmSettings, has_flashinfer_kernels

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

    from ..training.lora import Lora


class _SleepingEngine:
    """Frees and reclaims the memory of vLLM's `LLMEngine`, so that others can use the GPU. A call
    that asks for the current state does nothing.

        awake ──sleep──> asleep ──wake_weights──> weights ──wake──> awake

    New weights arrive in the state "weights". vLLM schedules nothing until all memory is back.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.on_device = {"weights", "kv_cache"}

    def sleep(self, *, discard_weights: bool) -> None:
        """Free the KV cache. Free the weights too, or move them to host memory."""
        if self.on_device:
            self._wake("kv_cache")  # vLLM's allocator can only free memory that is allocated
            self._engine.sleep(level=2 if discard_weights else 1)
            self.on_device.clear()

    def wake_weights(self) -> None:
        self._wake("weights")

    def wake(self) -> None:
        self._wake("weights")
        self._wake("kv_cache")

    def _wake(self, tag: str) -> None:
        if tag not in self.on_device:
            self._engine.wake_up(tags=[tag])
            self.on_device.add(tag)


class VllmEngine:
    """`GenerationEngine` for vLLM's `LLMEngine`. Takes the arguments of `TransformersEngine` and
    `VllmSettings`. Checks that vLLM's image processor gives an image the same tokens as Weft's. With
    `kept_sets`, vLLM's model runner V2 refuses greedy decoding and stop strings. Raises a
    GenerationError if vLLM could not start or cannot record routes."""

    def __init__(
        self,
        model: str,
        settings: VllmSettings = VllmSettings(),
        *,
        max_context: int | None = None,
        dtype: str = "auto",
        seed: int = 0,
        adapters: Mapping[str, Lora] = MappingProxyType({}),
        routes: bool = False,
        images: ImageReader | None = None,
        kept_sets: bool = False,
    ) -> None:
        self._policies = Policies(adapters)
        self._adapters = adapters
        self._tensor_parallel = settings.tensor_parallel
        self._identity = secrets.token_hex(8)
        """Distinguishes this engine from one that replaces it."""
        self._stop_tokens = read_stop_tokens(model)
        self._model_folder = model
        self._requests: dict[str, _Request] = {}
        """Requests that vLLM has not finished, keyed by their names in vLLM."""
        self._tickets = itertools.count()
        self._scored: dict[str, Any] = {}
        """Results of `top_logprobs` by name in vLLM; None until vLLM has finished them."""
        self._finished: list[Response] = []
        """Responses for the next `step` to return."""
        self._updates: Counter[str] = Counter()
        """Policy -> number of weight updates. Prompts share cached blocks only under equal salts,
        which contain it."""
        on_gpu = torch.cuda.is_available()
        self._routes = routes
        self._images = images
        self._kept_sets = kept_sets
        self._records_routes = routes and not on_gpu
        """Whether Weft's `weft_record_routes` records routes, rather than vLLM."""
        self._prefix_caching = settings.caches_prefixes(on_gpu, routes)
        if self._records_routes and self._prefix_caching:
            raise GenerationError(
                "routes=True and prefix_caching=True: on a CPU the routes of cached tokens "
                "are unknown; leave one out"
            )
        self._compile = settings.compiles(on_gpu)
        free, total = torch.cuda.mem_get_info() if on_gpu else (0, 1)
        if on_gpu:
            settings.check_memory(total, "the GPU")
        elif (memory := node_memory()) is not None:
            settings.check_memory(memory.free_bytes, "this machine")
        arguments = settings.engine_arguments(
            model,
            max_context=max_context,
            dtype=dtype,
            seed=seed,
            free_share=free / total if on_gpu else None,
            adapters=adapters,
            routes=routes,
            images=images is not None,
        )
        self._engine = _start(
            arguments,
            tensor_parallel=settings.tensor_parallel,
            on_gpu=on_gpu,
            compile=self._compile,
            kept_sets=kept_sets,
        )
        self._masks: bool = self._engine.model_config.return_sampling_mask
        """Whether vLLM returns the kept sets of all requests."""
        self._vocabulary = self._engine.model_config.get_vocab_size()
        drafts = settings.speculation
        self._drafts = None if drafts is None else VllmDrafts(self._engine, drafts)
        self._keeps_drafts = drafts is not None and drafts.has_weights
        self._sleeping = _SleepingEngine(self._engine) if on_gpu else None
        self._slots: dict[str, Any] = {}
        """Policy -> vLLM's name of the adapter's slot."""
        if adapters:
            from .vllm_worker import adapter_slot

            self._slots = {policy: adapter_slot(k, policy) for k, policy in enumerate(adapters, 1)}
        if settings.tensor_parallel > 1:
            self._engine.collective_rpc("weft_unlink_shared_memory")
        if kept_sets and not self._masks:
            self._engine.collective_rpc("weft_record_kept_sets")
        if self._records_routes:
            try:
                self._engine.collective_rpc("weft_record_routes")
            except Exception as error:
                raise GenerationError(
                    f"routes=True: vLLM cannot record the routes of {model}: {error}"
                ) from error

    @property
    def version(self) -> int:
        return self._policies.version

    @property
    def num_unfinished(self) -> int:
        return len(self._requests) + len(self._finished)

    def submit(self, request: GenerationRequest, sampling: Sampling) -> int:
        policy = self._policies.whole(request.policy)
        largest = int(request.prompt_ids.max(initial=0))
        if largest >= self._vocabulary:  # vLLM checks it only if it has a tokenizer
            raise GenerationError(
                f"request {request.request_id} has token id {largest}; the model has ids 0 to {self._vocabulary - 1}"
            )
        if self._masks and sampling.stop:
            raise GenerationError(
                f"request {request.request_id} has stop strings, and vLLM returns the kept sets of responses only if it ends them itself; "
                "sample without stop, or without top_p, top_k and min_p"
            )
        if self._drafts is not None and sampling.min_tokens and sampling.stop is not None:
            raise GenerationError(
                f"request {request.request_id} has min_tokens={sampling.min_tokens}, and with speculation, vLLM masks stop tokens for "
                "too long; leave one of them out"
            )
        if self._sleeping is not None:
            self._sleeping.wake()
        prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_ids.tolist()}
        if len(request.images):
            if self._images is None:
                raise GenerationError(
                    f"request {request.request_id} has images, but the model reads text alone"
                )
            prompt["multi_modal_data"] = {"image": [open_image(image) for image in request.images]}
        if self._prefix_caching:
            prompt["cache_salt"] = self._salt(policy)
        if request.structure is not None:
            self._prepare_structure(request, sampling)
        ticket = next(self._tickets)
        try:
            parameters, adapter = self._parameters(request, sampling), self._slots.get(policy)
            name = self._engine.add_request(str(ticket), prompt, parameters, lora_request=adapter)  # pyright: ignore[reportArgumentType]
            if request.structure is not None:
                self._check_grammar(name)
        except Exception as error:
            self._engine.abort_request([str(ticket)])
            raise GenerationError(f"vLLM refuses request {request.request_id}: {error}") from error
        seen = None
        if self._images is not None and len(request.images):
            seen = self._images.read(request.prompt_ids, request.images).ids
        ends = stop_check_of(sampling, self._model_folder)
        records = self._kept_sets and sampling.truncates
        before = request.prompt_ids[len(request.prompt_ids) - request.sampled :].tolist()
        self._requests[str(ticket)] = _Request(
            ticket, request.request_id, policy, seen, ends, sampling.min_tokens, records, before
        )
        return ticket

    def step(self) -> list[Response]:
        if not self._finished and self._requests:  # `_drain` may have finished some
            self._policies.check(request.policy for request in self._requests.values())
            self._step()
        finished, self._finished = self._finished, []
        return finished

    def top_logprobs(
        self, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the k likeliest tokens at each position of the responses, at temperature 1:
        (log-probabilities [T, k] float32 nats, largest first; token ids [T, k] int32). Raises a
        GenerationError if vLLM refuses a row: prompt and response need a context of one token more."""
        k = min(k, self._vocabulary)  # vLLM refuses more
        parts = [
            _likeliest(flat, len(response), k)
            for flat, response in zip(self._score(prompts, responses, k), responses, strict=True)
        ]
        if not parts:
            return np.zeros((0, k), np.float32), np.zeros((0, k), np.int32)
        logprobs, ids = (np.concatenate(each) for each in zip(*parts, strict=True))
        return logprobs, ids

    def logprobs(self, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]) -> np.ndarray:
        """Return the log-probability of each response token at temperature 1, [T] float32 nats.
        Raises the error of `top_logprobs`."""
        found = zip(self._score(prompts, responses, 1), responses, strict=True)
        own = [np.zeros(0, np.float32), *(_of_tokens(flat, len(response)) for flat, response in found)]
        return np.concatenate(own)

    def _score(
        self, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], k: int
    ) -> list[Any]:
        """Return vLLM's flat result for each row: the log-probabilities of each token, and of the k
        likeliest ones in its place."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        policy = self._policies.whole("")
        if self._sleeping is not None:
            self._sleeping.wake()
        wanted = SamplingParams(
            max_tokens=1,  # vLLM must sample; the token is discarded
            temperature=0,
            prompt_logprobs=k,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        names = [f"score-{next(self._tickets)}" for _ in prompts]
        self._scored |= dict.fromkeys(names)
        try:
            rows = zip(names, prompts, responses, strict=True)
            for row, (name, prompt, response) in enumerate(rows):
                ids = np.concatenate([prompt, response]).tolist()
                tokens: dict[str, Any] = {"prompt_token_ids": ids}
                if self._prefix_caching:
                    tokens["cache_salt"] = self._salt(policy)
                parameters, adapter = wanted.clone(), self._slots.get(policy)
                try:
                    self._engine.add_request(name, tokens, parameters, lora_request=adapter)  # pyright: ignore[reportArgumentType]
                except Exception as error:
                    raise GenerationError(f"vLLM cannot score row {row}: {error}") from error
            while any(self._scored[name] is None for name in names):
                if not self._engine.has_unfinished_requests():
                    raise GenerationError("vLLM dropped rows to score")
                self._step()
            return [self._scored[name].prompt_logprobs for name in names]
        except BaseException:
            self._engine.abort_request(names)
            raise
        finally:
            for name in names:
                del self._scored[name]

    def abort(self, tickets: Collection[int]) -> None:
        keys = [key for key in map(str, tickets) if key in self._requests]
        if keys:
            self._engine.abort_request(keys)
            # Recorders forget a request only when its notes are taken.
            self._take_routes(keys)
            self._take_kept_sets(keys)
        for key in keys:
            del self._requests[key]
        self._finished = [one for one in self._finished if one.ticket not in tickets]

    def take_unfinished(self, tickets: Collection[int]) -> list[Response]:
        from vllm.v1.engine import FinishReason

        self._drain()
        processor: Any = self._engine.output_processor
        found: list[Response] = []
        keys = [key for key in map(str, tickets) if key in self._requests]
        for key, kept in zip(keys, self._take_kept_sets(keys), strict=True):
            (name,) = processor.external_req_ids[key]
            # vLLM gives all tokens, with their versions, only to requests that have ended.
            ended = processor.request_states[name].make_request_output(
                [], None, FinishReason.LENGTH, None
            )
            response = self._without_routes(ended, self._requests[key], kept)
            found.append(replace(response, finish_reason="unfinished"))
        self.abort([response.ticket for response in found])
        return found

    def weight_bytes(self) -> int:
        return sum(self._engine.collective_rpc("weft_weight_bytes"))

    def stage_weights(self, weights: Weights) -> Iterator[None]:
        """See `GenerationEngine`. The ranks receive the version on background threads."""
        from ...resharding.buckets import threads_beside
        from .vllm_worker import to_update_info

        if self._adapters:  # adapters are small enough to load at once
            return
        # Waiting OpenMP threads spin: without a free core for the receiver, decoding would take
        # more than twice as long.
        threads = threads_beside(1) if self._tensor_parallel == 1 else contextlib.nullcontext()
        with self._as_weight_sync_error("stage weights", weights), threads:
            self._engine.collective_rpc("weft_stage_weights", args=(to_update_info(weights),))
            while not all(self._engine.collective_rpc("weft_is_staged")):
                yield

    def update_weights(self, weights: Weights, policy: str = "") -> str:
        """See `GenerationEngine`. The parts of all ranks must add up to the published version."""
        self._drain()
        with self._policies.update(policy, weights.version) as name:
            self._updates[name] += 1
            if weights.backend:
                checksum = self._take_by_vllm(weights)
            elif name in self._adapters:
                checksum = self._take_adapter(weights, name)
            else:
                checksum = self._take(weights)
        if self._images is not None:
            self._engine.reset_encoder_cache()  # features cached under the previous weights
        if self._prefix_caching:
            self._salt_waiting_requests(name)
        self._engine.set_weight_version(_version_name(self._policies.versions.values()))
        return checksum

    def _salt(self, policy: str) -> str:
        return f"{policy}:{self._updates[policy]}"

    def _salt_waiting_requests(self, policy: str) -> None:
        """Salt requests that have computed nothing for the new weights. The others keep their salt:
        they continue to fill blocks with keys of both versions, which no later request may find."""
        slot = self._slots.get(policy)
        for request in self._core.scheduler.requests.values():
            if not request.num_computed_tokens and request.lora_request == slot:
                request.cache_salt = self._salt(policy)
                request.block_hashes.clear()
                request.update_block_hashes()

    @contextlib.contextmanager
    def _as_weight_sync_error(self, what: str, weights: Weights) -> Iterator[None]:
        try:
            yield
        except WeightSyncError:
            raise
        except Exception as error:
            raise WeightSyncError(f"vLLM could not {what} version {weights.version}: {error}") from error

    def _take(self, weights: Weights) -> str:
        from .vllm_worker import check_received, to_update_info

        with self._as_weight_sync_error("load weights", weights):
            self._engine.collective_rpc("start_weight_update")
            self._engine.collective_rpc("update_weights", args=(to_update_info(weights),))
            self._engine.collective_rpc("finish_weight_update")
            held = self._engine.collective_rpc("weft_loaded_weights")
        for rank, found in enumerate(held):
            if found is None or found.version != weights.version:
                raise WeightSyncError(
                    f"vLLM's rank {rank} holds weights of version {found.version if found else 'none'}, not {weights.version}"
                )
        check_received(weights.version, [found.received for found in held])
        return held[0].checksum

    def _take_by_vllm(self, weights: Weights) -> str:
        from ...resharding.vllm_control import take_as_told

        def call(method: str, payload: Any) -> None:
            if method == "init_weight_transfer_engine":
                self._engine.collective_rpc("shutdown_weight_transfer_engine")
            self._engine.collective_rpc(method, args=() if payload is None else (payload,))

        def end(whole: bool) -> list[Any]:
            return self._engine.collective_rpc("weft_end_by_vllm", args=(whole,))

        with self._as_weight_sync_error("load weights", weights):
            try:
                self._engine.collective_rpc("weft_begin_by_vllm", args=(weights.backend,))
                return take_as_told(
                    weights, self._tensor_parallel, self._identity, call, lambda: end(True)
                )
            except BaseException:
                with contextlib.suppress(Exception):  # keep the original error
                    end(False)
                raise

    def _take_adapter(self, weights: Weights, policy: str) -> str:
        from .vllm_worker import to_update_info

        adapter, slot = self._adapters[policy], self._slots[policy].lora_int_id
        settings = {"r": adapter.rank, "lora_alpha": adapter.alpha}
        with self._as_weight_sync_error("take adapter", weights):
            return self._engine.collective_rpc(
                "weft_receive_adapter", args=(to_update_info(weights), slot, settings)
            )[0]

    def recompute(self) -> None:
        """Return unfinished requests to vLLM's queue, so that vLLM rebuilds their KV cache."""
        self._drain()
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def sleep(self, *, discard_weights: bool = False) -> None:
        """See `GenerationEngine`. Does nothing on CPUs. An adapter's base model and the weights of
        drafts never arrive again, so they move to host memory."""
        if self._sleeping is None:
            return
        self._drain()
        discard_weights = discard_weights and not self._adapters and not self._keeps_drafts
        self._sleeping.sleep(discard_weights=discard_weights)
        if discard_weights:
            self._policies.discard()
            # torch would keep the pinned memory of earlier copies.
            self._engine.collective_rpc("weft_free_host_cache")

    def wake_up(self) -> None:
        """Move the weights back. `generate` reclaims the KV cache after the next weight update."""
        if self._sleeping is not None:
            self._sleeping.wake_weights()

    def facts(self) -> dict[str, float | str]:
        """Return what vLLM chose: its model runner, and the room for keys and values."""
        runner: str = self._engine.collective_rpc("weft_model_runner")[0]
        cache: Any = self._engine.vllm_config.cache_config
        blocks = cache.num_gpu_blocks or 0
        return {"model runner": runner, "KV cache (tokens)": blocks * cache.block_size}

    @property
    def _core(self) -> Any:
        """vLLM's `EngineCore`, in this process."""
        client: Any = self._engine.engine_core
        return client.engine_core

    def take_metrics(self) -> Metrics:
        """Return the metrics of drafts since the last call; none without speculation."""
        return self._drafts.take_metrics() if self._drafts else {}

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def _check_grammar(self, name: str) -> None:
        grammar = self._core.scheduler.requests[name].structured_output_request.grammar
        if isinstance(grammar, Exception):
            raise grammar

    def _prepare_structure(self, request: GenerationRequest, sampling: Sampling) -> None:
        """Give vLLM the tokenizer in the model's folder, which it needs for structured output alone."""
        from vllm.tokenizers import cached_tokenizer_from_config

        if sampling.stop is None:
            raise GenerationError(
                f"request {request.request_id} asks for structured output, but Sampling(stop=None) ignores its end"
            )
        if self._engine.renderer.tokenizer is not None:
            return
        config: Any = self._engine.model_config
        config.skip_tokenizer_init = False
        try:
            tokenizer = cached_tokenizer_from_config(config)
        except Exception as error:
            raise GenerationError(
                f"request {request.request_id} asks for structured output, which needs the model's tokenizer: {error}"
            ) from error
        finally:
            config.skip_tokenizer_init = True
        manager = self._core.structured_output_manager
        # Compile grammars while requests are added: a grammar's error then belongs to its request.
        manager.tokenizer, manager._use_async_grammar_compilation = tokenizer, False
        # vLLM would add the tokenizer's end token to the stop tokens of all requests.
        renderer: Any = self._engine.renderer
        renderer.tokenizer, renderer.get_eos_token_id = tokenizer, lambda: None

    def _parameters(self, request: GenerationRequest, sampling: Sampling) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        from .vllm_worker import RECORDS_KEPT

        structure = request.structure
        stops = {*self._stop_tokens, *request.stop_token_ids}
        return SamplingParams(
            max_tokens=sampling.max_tokens,
            min_tokens=0 if sampling.stop is None else sampling.min_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            # With `return_sampling_mask`, vLLM wants a limit.
            top_k=sampling.top_k or (self._vocabulary if self._masks else 0),
            min_p=sampling.min_p,
            extra_args={RECORDS_KEPT: True} if self._kept_sets and sampling.truncates else None,
            seed=_seed(request),
            ignore_eos=True,  # stop_token_ids names the end tokens instead
            stop_token_ids=[] if sampling.stop is None else sorted(stops),
            structured_outputs=structure
            and StructuredOutputsParams(**{structure.kind: structure.value}),
            # Request no alternatives; vLLM still returns the log-probability of the sampled token.
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            # `_look_for_stop` needs all tokens so far. vLLM could find stop strings only with its
            # own tokenizer.
            output_kind=RequestOutputKind.CUMULATIVE if sampling.stop else RequestOutputKind.FINAL_ONLY,
        )

    def _step(self) -> None:
        # vLLM compiles its rank counting even in eager mode, which needs a C++ compiler and 20 s.
        eager = contextlib.nullcontext() if self._compile else torch.compiler.set_stance("force_eager")
        drafting = self._drafts.step() if self._drafts else contextlib.nullcontext()
        try:
            with eager, drafting:
                outputs = self._engine.step()
        except Exception as error:
            raise GenerationError(f"vLLM failed: {type(error).__name__}: {error}") from error
        for output in outputs:
            if output.request_id in self._scored:
                self._scored[output.request_id] = output
                continue
            self._look_for_stop(output)  # pyright: ignore[reportArgumentType]
        finished: list[Any] = [
            output for output in outputs if output.finished and output.request_id not in self._scored
        ]
        if not finished:
            return
        keys = [output.request_id for output in finished]
        taken, sets = self._take_routes(keys), self._take_kept_sets(keys)
        ended = [self._requests.pop(key, None) for key in keys]
        for output, request, recorded, kept in zip(finished, ended, taken, sets, strict=True):
            if request is not None:
                routes = recorded if self._records_routes else output.outputs[0].routed_experts
                self._finished.append(self._response(output, request, routes, kept))

    def _drain(self) -> None:
        """Finish the steps that vLLM has started but not returned, and start no other. Their tokens
        get the current version."""
        from vllm.v1.core.sched.interface import PauseState

        core = self._core
        if not core.batch_queue:
            return
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while core.batch_queue:
                self._step()
        finally:
            core.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _look_for_stop(self, output: RequestOutput) -> None:
        """End a request at the first token that completes a stop string. Counts versions itself,
        because vLLM reports them only for requests that vLLM ended."""
        request = self._requests.get(output.request_id)
        if request is None or request.ends is None:
            return
        token_ids = list(output.outputs[0].token_ids)
        new = range(len(request.versions) + 1, len(token_ids) + 1)  # several with speculation
        request.versions += [self._policies.versions[request.policy]] * len(new)
        ends, before = request.ends, request.sampled
        own = (n for n in new if n > request.min_tokens and ends([*before, *token_ids[:n]]))
        if (length := next(own, None)) is None:
            return
        if output.finished and length == len(token_ids):
            # vLLM ended the request at this token for its length; all engines report "stop" then.
            output.outputs[0].finish_reason = "stop"
            return
        if not output.finished:
            self._engine.abort_request([output.request_id])
        del self._requests[output.request_id]
        (kept,) = self._take_kept_sets([output.request_id])
        logprobs: Any = output.outputs[0].logprobs
        self._finished.append(
            Response(
                ticket=request.ticket,
                request_id=request.request_id,
                token_ids=np.asarray(token_ids[:length], dtype=np.int32),
                logprobs=np.asarray(logprobs.logprobs[:length], dtype=np.float32),
                versions=np.asarray(request.versions[:length], dtype=np.int32),
                finish_reason="stop",
                kept_sets=_checked_sets(kept, request, length),
            )
        )

    def _take_routes(self, keys: list[str]) -> list[np.ndarray | None]:
        """Return the recorded routes of these ending requests; None for one without routes."""
        if not self._records_routes:
            return [None] * len(keys)
        return self._engine.collective_rpc("weft_take_routes", args=(keys,))[0]

    def _take_kept_sets(self, keys: list[str]) -> list[KeptSets | None]:
        """Return the recorded kept sets of these ending requests; None for one without any."""
        if self._masks or not self._kept_sets:
            return [None] * len(keys)
        return self._engine.collective_rpc("weft_take_kept_sets", args=(keys,))[0]

    def _response(
        self,
        output: RequestOutput,
        request: _Request,
        routes: np.ndarray | None,
        kept: KeptSets | None,
    ) -> Response:
        response = self._without_routes(output, request, kept)
        if not self._routes:
            return response
        computed = len(output.prompt_token_ids or ()) + len(output.outputs[0].token_ids) - 1
        if routes is None or len(routes) != computed:
            found = "none" if routes is None else str(len(routes))
            raise GenerationError(
                f"request {request.request_id}: vLLM gave the routes of {found} of {computed} tokens"
            )
        return replace(response, routes=routes.astype(np.uint16))

    def _without_routes(
        self, output: RequestOutput, request: _Request, kept: KeptSets | None
    ) -> Response:
        own, request_id = request.seen_prompt, request.request_id
        if own is not None and not np.array_equal(own, output.prompt_token_ids or ()):
            raise GenerationError(
                f"request {request_id}: vLLM reads {len(output.prompt_token_ids or ())} "
                "tokens in a prompt with images, but the processor in the model's folder "
                f"makes {len(own)} different ones"
            )
        mask = output.outputs[0].sampling_mask
        if request.records_kept and mask is not None:
            kept = KeptSets.of_lists(mask.token_ids, self._vocabulary)
        return replace(
            _response(output, request, self._policies.names.index(request.policy)),
            kept_sets=_checked_sets(kept, request, len(output.outputs[0].token_ids)),
        )


@dataclass
class _Request:
    ticket: int
    request_id: int
    policy: str
    seen_prompt: np.ndarray | None
    """Prompt tokens including those of images; None if there are no images."""
    ends: StopCheck | None
    min_tokens: int
    records_kept: bool
    """Whether the response has kept sets."""
    sampled: list[int]
    """Tokens of the response that another engine has sampled."""
    versions: list[int] = field(default_factory=list)
    """The version that sampled each token; recorded only with stop strings."""


def _response(output: RequestOutput, request: _Request, place: int) -> Response:
    """Return the response to a request. `place` is the position of its policy among the engine's."""
    completion = output.outputs[0]
    if completion.finish_reason not in ("stop", "length"):
        raise GenerationError(
            f"vLLM ended request {request.request_id} with {completion.finish_reason!r}"
        )
    versions = np.full(len(completion.token_ids), -1, dtype=np.int32)
    for span in completion.weight_versions or ():
        versions[span.start : span.end] = (
            # "default" is vLLM's name for the weights that it started with.
            0 if span.version == "default" else _versions_of(span.version)[place]
        )
    if (versions < 0).any():
        raise GenerationError(
            f"vLLM did not report which weights sampled all tokens of request {request.request_id}"
        )
    return Response(
        ticket=request.ticket,
        request_id=request.request_id,
        token_ids=np.asarray(completion.token_ids, dtype=np.int32),
        logprobs=np.asarray(completion.logprobs.logprobs, dtype=np.float32),  # pyright: ignore
        versions=versions,
        finish_reason=completion.finish_reason,  # pyright: ignore[reportArgumentType]
    )


def _seed(request: GenerationRequest) -> int | None:
    """Return the seed of a request. vLLM counts random numbers from its first own token, so a
    continued response needs others than the ones that its first tokens have used."""
    if request.seed is None or not request.sampled:
        return request.seed
    return stable_hash(request.seed, request.sampled)


def _checked_sets(kept: KeptSets | None, request: _Request, length: int) -> KeptSets | None:
    """Return the kept sets of a response with `length` tokens, or None for a request without any.
    Raises a GenerationError if vLLM did not give one for each token."""
    if not request.records_kept:
        return None
    if kept is None and not length:  # an unfinished response
        return KeptSets.whole(0)
    if kept is None or len(kept.counts) != length:
        found = 0 if kept is None else len(kept.counts)
        raise GenerationError(
            f"request {request.request_id}: vLLM gave the kept sets of {found} of {length} tokens"
        )
    return kept


def _likeliest(flat: Any, number: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probabilities and ids of the k likeliest tokens, [number, k] each, at the last
    positions of vLLM's flat result."""
    logprobs, ids = np.zeros((number, k), np.float32), np.zeros((number, k), np.int32)
    for row, position in enumerate(range(len(flat) - number, len(flat))):
        # The prompt's own token comes first, then the likeliest in order.
        end = flat.end_indices[position]
        logprobs[row], ids[row] = flat.logprobs[end - k : end], flat.token_ids[end - k : end]
    return logprobs, ids


def _of_tokens(flat: Any, number: int) -> np.ndarray:
    """Return the log-probabilities of the tokens at the last positions of vLLM's flat result."""
    # Each position begins with the prompt's own token.
    starts = flat.start_indices[len(flat) - number :]
    return np.array([flat.logprobs[start] for start in starts], np.float32)


def _version_name(versions: Iterable[int]) -> str:
    """Return vLLM's name for the versions of all policies, in their order.

    >>> _version_name([3, 0]), _versions_of(_version_name([3, 0]))
    ('v3,0', [3, 0])
    """
    return f"v{','.join(map(str, versions))}"


def _versions_of(name: str) -> list[int]:
    return [int(version) for version in name.removeprefix("v").split(",")]


def _start(
    arguments: dict[str, Any], *, tensor_parallel: int, on_gpu: bool, compile: bool, kept_sets: bool
) -> LLMEngine:
    """Start vLLM's engine, then restore the process state that vLLM has changed."""
    import torch

    # vLLM may read these at any time, so they stay set. The first one makes the engine run in this
    # process and end with it. Values that the user has set take precedence over all others.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # On a CPU, every start logs a dozen warnings about settings that Weft chooses.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING" if on_gpu else "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    # A fork would copy OpenMP's locks, even held ones.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if tensor_parallel > 1 and not on_gpu:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", _cores(tensor_parallel))
    if on_gpu and not has_flashinfer_kernels():
        # FlashInfer would download and compile kernels for minutes, or fail without a network.
        for use in ("VLLM_USE_FLASHINFER_SAMPLER", "VLLM_ALLREDUCE_USE_FLASHINFER"):
            os.environ.setdefault(use, "0")
    for_children = {
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
    }
    if not compile:
        for_children["TORCH_COMPILE_DISABLE"] = "1"
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    try:
        quiet = contextlib.nullcontext() if on_gpu else _quiet()
        with _environment(for_children), quiet, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from vllm.engine.arg_utils import EngineArgs
            from vllm.triton_utils import HAS_TRITON
            from vllm.v1.engine.llm_engine import LLMEngine

            if "quantization" in arguments:
                importlib.import_module(".vllm_quantization", __package__)  # registers the methods
            chosen = EngineArgs(**arguments)
            # vLLM's model runner V2, which needs Triton, returns kept sets itself.
            if kept_sets and HAS_TRITON and chosen.create_engine_config().use_v2_model_runner:
                chosen.return_sampling_mask = True
            elif kept_sets:
                # With these, V1 samples tokens that it discards, and their sets would be recorded too.
                chosen.async_scheduling = chosen.enable_chunked_prefill = False
            return LLMEngine.from_engine_args(chosen)
    except Exception as error:
        raise GenerationError(f"vLLM could not start: {type(error).__name__}: {error}") from error
    finally:
        # vLLM on CPUs replaces torch's function by one that does nothing, but training in this
        # process needs torch's.
        torch.set_num_threads = set_num_threads
        set_num_threads(num_threads)


def _cores(parts: int) -> str:
    """Split the cores of this process over `parts` ranks, in vLLM's format: "0,1|2,3"."""
    cores = sorted(os.sched_getaffinity(0))
    size = len(cores) // parts
    if not size:
        raise GenerationError(
            f"tensor_parallel={parts} needs {parts} cores on CPU; this process may use {len(cores)}"
        )
    return "|".join(",".join(map(str, cores[rank * size : (rank + 1) * size])) for rank in range(parts))


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: value for name in variables if (value := os.environ.get(name)) is not None}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide stderr of C++ code during startup (NUMA binding, gloo); print it if the start fails."""
    sys.stderr.flush()
    keep = os.dup(2)
    notes = os.memfd_create("vllm-stderr")
    os.dup2(notes, 2)
    try:
        yield
    except BaseException:
        os.dup2(keep, 2)
        os.write(2, os.pread(notes, 1 << 20, 0))
        raise
    finally:
        os.dup2(keep, 2)
        os.close(keep)
        os.close(notes)
