"""Settings of the vLLM engine, and the `EngineArgs` made from them, without importing vLLM or
torch."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from ...dataflow.byte_units import GIB
from ...dataflow.config import Config
from ...dataflow.errors import UserError
from ..models.model_folder import (
    complete_text_settings,
    find_model_config,
    head_dim,
    num_heads,
    text_settings,
)
from .quantization import Quantization, method_name
from .speculation import Speculation

if TYPE_CHECKING:
    from ..training.lora import Lora


LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM's kernels support; others take the memory of the next larger one."""
STEP_TOKENS = 16384
"""Prompt tokens per step, unless a full context is longer. With fewer, long prompts would wait
longer for their first token. On a CPU, all prompts that vLLM admits together must fit."""


def memory_share(free: float | None) -> float:
    """Return the share of a GPU's memory for the engine: 0.9, or if less is free, the free share
    minus 0.02 for other users of the GPU. `free` is None without a GPU.

    >>> memory_share(0.995), memory_share(0.7), memory_share(None)
    (0.9, 0.68, 0.9)
    """
    # The small term corrects for rounding: 100 * (0.31 - 0.02) is slightly below 29.
    return 0.9 if free is None else max(0.01, min(0.9, math.floor(100 * (free - 0.02) + 1e-6) / 100))


def has_flashinfer_kernels() -> bool:
    """Return whether the packages with FlashInfer's compiled kernels are installed."""
    packages = ("flashinfer_cubin", "flashinfer_jit_cache")
    return all(importlib.util.find_spec(package) is not None for package in packages)


class VllmSettings(Config):
    """Settings of the generation engine: batch size, devices and memory of vLLM."""

    tensor_parallel: int = Field(default=1, ge=1)
    """[devices] Number of devices that share one model; on a CPU, sets of cores. Raise it if a
    model does not fit on one device or generates too slowly."""
    max_num_seqs: int = Field(default=256, ge=1, le=100_000)
    """[responses] Maximum number of responses to sample at the same time; others wait. Lower it if
    the KV cache does not fit; raise it if a GPU is idle."""
    kv_cache_gib: float | None = Field(default=None, gt=0)
    """[GiB] Size of vLLM's KV cache. None selects, on a CPU, room for `max_num_seqs` full contexts,
    but at most 2 GiB; on a GPU, what `gpu_memory_utilization` leaves. Raise it on a CPU with long
    contexts; lower it if other processes need the memory."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """[share] Share of a GPU's memory for weights and KV cache. None selects 0.9, or the free share
    if that is less when the engine starts. Other groups on the GPU start before the engine and then
    free their memory. Lower it if groups take turns on a GPU and one runs out of memory."""
    prefix_caching: bool | None = None
    """Reuse the KV cache of prompt prefixes in later requests with the same weights, such as the
    other samples of a prompt. None enables it on GPUs. Set it on a CPU if prompts share prefixes of
    more than 128 tokens."""
    compile: bool | None = None
    """Compile the model (and capture CUDA graphs). None compiles only on GPUs. On a CPU,
    compilation takes 20 s and a C++ compiler, and gives 4 % more tokens per second. Set it to False
    for a quick start, or if compilation fails."""
    quantization: Quantization | None = None
    """Quantise the weights of linear layers as they arrive: "int8" and "fp8" (8 bits, activations
    too), or "w4a16" (4 bits). "fp8" needs a GPU. Set it, with a correction in the loss, if weights
    take too much memory or time; the alert `quantised_gap` reports a large gap to the trainer."""
    speculation: Speculation | None = None
    """Speculative decoding, such as `weft.Speculation(method="suffix")`. Set it if few responses
    decode at the same time and their text is predictable."""

    free_on_resume: ClassVar[frozenset[str]] = frozenset(
        (
            "tensor_parallel",
            "max_num_seqs",
            "kv_cache_gib",
            "gpu_memory_utilization",
            "prefix_caching",
            "compile",
            "speculation",
        )
    )

    retired: ClassVar[Mapping[str, str]] = {
        "max_batched_tokens": f"a step takes in {STEP_TOKENS:,} tokens, or one full context"
    }

    def engine_arguments(
        self,
        model: str,
        *,
        max_context: int | None,
        dtype: str,
        seed: int,
        free_share: float | None,
        adapters: Mapping[str, Lora] = MappingProxyType({}),
        routes: bool = False,
        images: bool = False,
    ) -> dict[str, Any]:
        """Return keyword arguments for vLLM's `EngineArgs`, given the arguments of `VllmEngine` and
        the free share of the GPU's memory (None on a CPU)."""
        on_gpu = free_share is not None
        context = max_context or complete_text_settings(model).max_position_embeddings
        if dtype == "auto":
            dtype = "bfloat16" if on_gpu else "float32"
        drafts = self.speculation
        arguments: dict[str, Any] = {
            "model": str(find_model_config(model).parent),
            "dtype": dtype,
            "seed": seed,
            "max_model_len": context,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": max(context, STEP_TOKENS),
            "gpu_memory_utilization": self.gpu_memory_utilization or memory_share(free_share),
            "tensor_parallel_size": self.tensor_parallel,
            # In a placement group, vLLM would choose Ray's executor, which needs bundles that this
            # worker lacks.
            "distributed_executor_backend": "mp" if self.tensor_parallel > 1 else None,
            "enable_prefix_caching": self.caches_prefixes(on_gpu, routes),
            # On a CPU, vLLM cannot combine seeds with chunked prompts, because it cannot rewind the
            # random generator.
            "enable_chunked_prefill": on_gpu,
            # The GPU computes a step while this process prepares the next one. vLLM's CPU platform
            # switches it off. Suffix drafts need the tokens of the step before.
            "async_scheduling": on_gpu and not (drafts and drafts.drafts_by_weft(on_gpu)),
            "enforce_eager": not self.compiles(on_gpu),
            # Trainers compare with the sampling distribution, which includes the temperature.
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": -1,  # teachers return any number; a request says how many
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # ignore the model's sampling defaults: `Sampling` is complete
            "enable_sleep_mode": on_gpu,
            "sleep_mode_offload_cudagraph": on_gpu,
            "enable_flashinfer_autotune": on_gpu and has_flashinfer_kernels(),
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "weight_transfer_config": {"backend": "weft"},
            "worker_extension_cls": "weft.workers.generation.vllm_worker.WorkerExtension",
        }
        if on_gpu and self.tensor_parallel > 1 and not has_flashinfer_kernels():
            # Otherwise, FlashInfer would compile this kernel at every first start.
            arguments["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
        if self.quantization is not None:
            arguments["quantization"] = method_name(self.quantization)
        if routes and on_gpu:
            arguments["enable_return_routed_experts"] = True
        if images:  # the image processor needs a tokenizer; videos would reserve much memory
            arguments |= {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"video": 0}}
        if adapters:
            room = next(r for r in LORA_RANKS if all(r >= lora.rank for lora in adapters.values()))
            slots = {"max_loras": len(adapters), "max_cpu_loras": len(adapters)}
            arguments |= {"enable_lora": True, "max_lora_rank": room, **slots}
        if drafts is not None:
            arguments["speculative_config"] = drafts.engine_arguments(self.max_num_seqs, on_gpu)
        kv_cache_gib = self.kv_cache_gib
        if kv_cache_gib is None and not on_gpu:
            caching = [model, *([drafts.model] if drafts and drafts.model else [])]
            sizes = (self._kv_cache_gib(complete_text_settings(m), dtype, context) for m in caching)
            kv_cache_gib = min(2.0, sum(sizes))
        if kv_cache_gib is not None:
            arguments["kv_cache_memory_bytes"] = int(kv_cache_gib * GIB)
        return arguments

    def check_memory(self, memory_bytes: int, where: str, ranks: int = 1) -> None:
        """Check that the KV caches of `ranks` engines fit into free memory. The message calls the
        memory `where`.

        >>> VllmSettings(kv_cache_gib=500).check_memory(8 << 30, "this machine", ranks=2)
        Traceback (most recent call last):
        weft.dataflow.errors.UserError: kv_cache_gib=500: 2 ranks take 1000 GiB for keys and values, and this machine has 8 GiB of \
memory free; lower it below 4
        """
        if self.kv_cache_gib is None or self.kv_cache_gib * ranks * GIB <= memory_bytes:
            return
        takes = f"{ranks} ranks take" if ranks > 1 else "the rank takes"
        raise UserError(
            f"kv_cache_gib={self.kv_cache_gib:g}: {takes} {self.kv_cache_gib * ranks:g} GiB for keys and values, and {where} has "
            f"{memory_bytes / GIB:.3g} GiB of memory free; lower it below {memory_bytes / GIB / ranks:.3g}"
        )

    def check_sizes(self, settings: Mapping[str, Any], max_context: int | None, dtype: str) -> None:
        """Check sizes that vLLM would reject only after loading the model with this `config.json`.
        `max_context` ([tokens]) is None if unknown. The dtype "auto" counts as half precision.
        Raises a UserError if a size does not fit."""
        largest = max(max_context or 0, STEP_TOKENS)
        if self.max_num_seqs > largest:
            raise UserError(
                f"max_num_seqs={self.max_num_seqs}: a step takes in at most {largest:,} "
                "tokens, at least one for each response; lower max_num_seqs"
            )
        text = text_settings(settings)
        layers, heads = text.get("num_hidden_layers"), text.get("num_key_value_heads") or num_heads(text)
        size = head_dim(text)
        # These models cache less than this formula says.
        special = any(text.get(name) for name in ("sliding_window", "layer_types", "kv_lora_rank"))
        if (
            self.kv_cache_gib is None
            or max_context is None
            or special
            or not (layers and heads and size)
        ):
            return
        token_bytes = self._token_bytes(layers, heads, size, dtype)
        room = int(self.kv_cache_gib * GIB) // token_bytes
        if room < max_context:
            raise UserError(
                f"kv_cache_gib={self.kv_cache_gib:g} holds the keys and values of {room:,} tokens, "
                f"but one response with its prompt may have {max_context:,}; raise it to "
                f"{token_bytes * (max_context + 128) / GIB:.2g} or more, or lower max_context"
            )

    def caches_prefixes(self, on_gpu: bool, routes: bool) -> bool:
        if routes and on_gpu:  # vLLM stores the routes with the cached blocks
            return True
        return on_gpu if self.prefix_caching is None else self.prefix_caching

    def compiles(self, on_gpu: bool) -> bool:
        return on_gpu if self.compile is None else self.compile

    def _kv_cache_gib(self, config: Any, dtype: str, context: int) -> float:
        """Return the GiB for `max_num_seqs` full contexts, with room for partly filled blocks."""
        settings = config.to_dict()
        heads, size = settings.get("num_key_value_heads") or num_heads(settings), head_dim(settings)
        assert heads is not None and size is not None
        token_bytes = self._token_bytes(config.num_hidden_layers, heads, size, dtype)
        tokens = (self.max_num_seqs + 1) * (math.ceil(context / 128) + 1) * 128
        return max(token_bytes * tokens / GIB, 1 / 64)

    def _token_bytes(self, layers: int, heads: int, size: int, dtype: str) -> int:
        """Return the bytes of a token's keys and values on one rank."""
        return (
            2
            * layers
            * math.ceil(heads / self.tensor_parallel)
            * size
            * (4 if dtype == "float32" else 2)
        )
