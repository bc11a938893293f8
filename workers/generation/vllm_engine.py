"""The vLLM engine, in the worker's own process: add requests, step, hand over what finished; new weights go in between
two steps. The only module besides `resharding/vllm_receiver.py` that imports vLLM."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from ...algorithms.sampling import Sampling
from ...dataflow.config import Config
from ...dataflow.errors import GenerationError, WeightSyncError
from ...dataflow.lazy import torch
from ...resharding.weights import Weights
from ..model_folder import complete_text_settings, find_model_config, read_stop_tokens
from .engine import Request, Response

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

GIB = 1 << 30


class VllmSettings(Config):
    """Settings of the vLLM engine."""

    tensor_parallel: int = Field(default=1, ge=1)
    """Devices (on CPU: sets of cores) that one model is split over."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Responses sampled at the same time; further ones wait for their turn."""
    max_batched_tokens: int | None = Field(default=None, ge=1)
    """Prompt tokens taken in by one step; None: 16,384, or one whole context where that is longer."""
    kv_cache_gib: float | None = Field(default=None, gt=0)
    """Memory for keys and values; None: on CPU what `max_num_seqs` full contexts need, 2 GiB at most; on a GPU what
    `gpu_memory_utilization` leaves."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory for weights, keys and values."""
    prefix_caching: bool = False
    """Keep the keys and values of prompts for later requests under the same weights."""
    compile: bool | None = None
    """Compile the model (and record CUDA graphs); None: on GPUs only. On CPU it takes 20 s and a C++ compiler, and gives
    4 % more tokens."""


class VllmEngine:
    """`GenerationEngine` on vLLM's `LLMEngine`."""

    def __init__(
        self,
        model: str,
        settings: VllmSettings = VllmSettings(),
        *,
        max_context: int | None = None,
        dtype: str = "auto",
        seed: int = 0,
    ) -> None:
        self.version = 0
        self._stop_tokens = read_stop_tokens(model)
        self._numbers = itertools.count()
        self._finished: dict[str, Response] = {}
        self._request_ids: dict[str, int] = {}
        self._prefix_caching = settings.prefix_caching
        on_gpu = torch.cuda.is_available()
        self._compile = on_gpu if settings.compile is None else settings.compile
        context = max_context or complete_text_settings(model).max_position_embeddings
        if dtype == "auto":
            dtype = "bfloat16" if on_gpu else "float32"
        kv_cache_gib = settings.kv_cache_gib
        if kv_cache_gib is None and not on_gpu:
            kv_cache_gib = min(2.0, _kv_cache_gib(complete_text_settings(model), dtype, settings, context))
        arguments: dict[str, Any] = {
            "model": str(find_model_config(model).parent),
            "dtype": dtype,
            "seed": seed,
            "max_model_len": context,
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_batched_tokens or max(context, 16384),
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "tensor_parallel_size": settings.tensor_parallel,
            # Ray's own executor, vLLM's choice inside a placement group, wants bundles that this worker does not have.
            "distributed_executor_backend": "mp" if settings.tensor_parallel > 1 else None,
            "enable_prefix_caching": settings.prefix_caching,
            # A request's seed on CPU and its prompt in chunks do not go together: the generator cannot be rewound.
            "enable_chunked_prefill": on_gpu,
            # A step must be over when it returns, or tokens of the old weights would carry the new version.
            "async_scheduling": False,
            "enforce_eager": not self._compile,
            "logprobs_mode": "processed_logprobs",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # none of the model's own sampling defaults: `Sampling` says it all
            "enable_sleep_mode": on_gpu,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "weight_transfer_config": {"backend": "weft"},
            "worker_extension_cls": "weft.resharding.vllm_receiver.WeightReport",
        }
        if kv_cache_gib is not None:
            arguments["kv_cache_memory_bytes"] = int(kv_cache_gib * GIB)
        self._engine = _start(arguments, tensor_parallel=settings.tensor_parallel, on_gpu=on_gpu, compile=self._compile)
        if settings.tensor_parallel > 1:
            self._engine.collective_rpc("weft_unlink_shared_memory")

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[list[Response]]:
        """Responses as they finish; see `GenerationEngine`. Several iterators may be open at once."""
        waiting: set[str] = set()
        try:
            for request in requests:
                waiting.add(self._add(request, sampling))
            while waiting:
                done = waiting & self._finished.keys()
                if not done:
                    self._step()
                    done = waiting & self._finished.keys()
                waiting -= done
                yield [self._finished.pop(key) for key in sorted(done, key=int)]
        finally:
            if waiting:
                self._engine.abort_request(list(waiting))
                for key in waiting:
                    self._request_ids.pop(key, None)
                    self._finished.pop(key, None)

    def update_weights(self, weights: Weights) -> str:
        """Load a published version into every rank, and make sure that every rank arrived at its checksum.

        Raises:
            WeightSyncError: when the bytes are not those published, or a rank holds anything else afterwards.
        """
        from ...resharding.vllm_receiver import to_update_info

        try:
            self._engine.collective_rpc("start_weight_update")
            self._engine.collective_rpc("update_weights", args=(to_update_info(weights),))
            self._engine.collective_rpc("finish_weight_update")
            held = self._engine.collective_rpc("weft_loaded_weights")
        except WeightSyncError:
            raise
        except Exception as error:
            raise WeightSyncError(f"vLLM could not take over weights version {weights.version}: {error}") from error
        wanted = (weights.version, weights.checksum)
        for rank, found in enumerate(held):
            if found is None or tuple(found) != wanted:
                raise WeightSyncError(f"vLLM rank {rank} holds weights (version, checksum) {found}, not {wanted}")
        self._engine.set_weight_version(_version_name(weights.version))
        self.version = weights.version
        return weights.checksum

    def sleep(self) -> None:
        """Move the weights to host memory and give up keys and values (on CPU there is nothing to give)."""
        if torch.cuda.is_available() and not self._engine.is_sleeping():
            self._engine.sleep(level=1)

    def wake_up(self) -> None:
        if torch.cuda.is_available() and self._engine.is_sleeping():
            self._engine.wake_up()

    @property
    def num_unfinished(self) -> int:
        """Requests that the engine still works on."""
        return self._engine.get_num_unfinished_requests()

    def close(self) -> None:
        """End vLLM's processes and give its memory up."""
        self._engine.engine_core.shutdown()

    def _add(self, request: Request, sampling: Sampling) -> str:
        key = str(next(self._numbers))
        prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_ids.tolist()}
        if self._prefix_caching:
            prompt["cache_salt"] = _version_name(self.version)  # never another version's keys and values
        try:
            self._engine.add_request(key, prompt, self._parameters(sampling, request.seed))  # pyright: ignore[reportArgumentType]
        except Exception as error:
            raise GenerationError(f"vLLM refuses request {request.request_id}: {error}") from error
        self._request_ids[key] = request.request_id
        return key

    def _parameters(self, sampling: Sampling, seed: int | None) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=sampling.max_tokens,
            min_tokens=0 if sampling.ignore_stop else sampling.min_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed,
            ignore_eos=True,  # the stop tokens are named instead
            stop_token_ids=[] if sampling.ignore_stop else list(self._stop_tokens),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _step(self) -> None:
        # vLLM compiles the counting of ranks even in eager mode: 20 s for the first step, and a C++ compiler.
        eager = contextlib.nullcontext() if self._compile else torch.compiler.set_stance("force_eager")
        try:
            with eager:
                outputs = self._engine.step()
        except Exception as error:
            raise GenerationError(f"vLLM failed: {type(error).__name__}: {error}") from error
        for output in outputs:
            if output.finished:
                request_id = self._request_ids.pop(output.request_id, None)
                if request_id is not None:
                    self._finished[output.request_id] = _response(output, request_id)  # pyright: ignore[reportArgumentType]


def _response(output: RequestOutput, request_id: int) -> Response:
    completion = output.outputs[0]
    if completion.finish_reason not in ("stop", "length"):
        raise GenerationError(f"vLLM ended request {request_id} with {completion.finish_reason!r}")
    versions = np.full(len(completion.token_ids), -1, dtype=np.int32)
    for span in completion.weight_versions or ():
        versions[span.start : span.end] = 0 if span.version == "default" else int(span.version.removeprefix("v"))
    if (versions < 0).any():
        raise GenerationError(f"vLLM did not say which weights sampled all tokens of request {request_id}")
    return Response(
        request_id=request_id,
        token_ids=np.asarray(completion.token_ids, dtype=np.int32),
        logprobs=np.asarray(completion.logprobs.logprobs, dtype=np.float32),  # pyright: ignore
        versions=versions,
        finish_reason=completion.finish_reason,  # pyright: ignore[reportArgumentType]
    )


def _version_name(version: int) -> str:
    return f"v{version}"


def _kv_cache_gib(config: Any, dtype: str, settings: VllmSettings, context: int) -> float:
    """What `max_num_seqs` full contexts need on one rank, with room for half-filled blocks."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = math.ceil(heads / settings.tensor_parallel)
    token_bytes = 2 * config.num_hidden_layers * heads * size * (4 if dtype == "float32" else 2)
    tokens = (settings.max_num_seqs + 1) * (math.ceil(context / 128) + 1) * 128
    return max(token_bytes * tokens / GIB, 1 / 64)


def _start(arguments: dict[str, Any], *, tensor_parallel: int, on_gpu: bool, compile: bool) -> LLMEngine:
    """Import vLLM and start its engine, with what it changes in the process around it put back."""
    import torch

    # Read by vLLM whenever it pleases, so these stay; a user's own values win.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives here, and dies with this process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a fork would copy OpenMP's locks, held or not
    if tensor_parallel > 1 and not on_gpu:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", _cores(tensor_parallel))
    for_children = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
    if not compile:
        for_children["TORCH_COMPILE_DISABLE"] = "1"
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    try:
        with _environment(for_children), _quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            return LLMEngine.from_engine_args(EngineArgs(**arguments))
    except Exception as error:
        raise GenerationError(f"vLLM could not start: {type(error).__name__}: {error}") from error
    finally:
        # vLLM on CPU replaces torch's function by one that does nothing; training in this process needs it.
        torch.set_num_threads = set_num_threads
        set_num_threads(num_threads)


def _cores(parts: int) -> str:
    """The cores of this process, dealt out to `parts` ranks as vLLM wants to be told: "0,1|2,3"."""
    cores = sorted(os.sched_getaffinity(0))
    size = len(cores) // parts
    if not size:
        raise GenerationError(f"tensor_parallel={parts} needs {parts} cores on CPU; this process may use {len(cores)}")
    return "|".join(",".join(map(str, cores[rank * size : (rank + 1) * size])) for rank in range(parts))


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep start-up notes that C++ code writes to stderr (NUMA binding, gloo) from the user; show them if it fails."""
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
