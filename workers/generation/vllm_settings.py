"""VllmSettings: what a user sets of the vLLM engine, and the arguments that vLLM gets. Read without vLLM or torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from ...dataflow.config import GIB, Config
from ...dataflow.errors import UserError
from ..models.model_folder import (
    complete_text_settings,
    find_model_config,
    head_dim,
    num_heads,
    text_settings,
)

if TYPE_CHECKING:
    from ..training.lora import Lora


LARGEST_SHARE = 0.9
"""Of a GPU's memory, which the engine takes where all of it is free."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM's kernels are made for; others take the room of the next."""
STEP_TOKENS = 16384
"""Prompt tokens that one step takes in, or one full context where that is longer. Fewer delay the first tokens of long prompts; on CPU all
prompts that are admitted at once have to fit."""
MARGIN = 0.02
"""Share of a GPU's memory that stays free beside it, where others have theirs: they may take a little more later."""


def memory_share(free: float | None) -> float:
    """Share of a GPU's memory that the engine takes, of what is free.

    >>> memory_share(0.995), memory_share(0.7), memory_share(None)
    (0.9, 0.68, 0.9)

    Args:
        free: share that is free; None: there is no GPU, and the engine does not look.
    """
    if free is None:
        return LARGEST_SHARE
    return max(0.01, min(LARGEST_SHARE, math.floor(100 * (free - MARGIN) + 1e-6) / 100))


class VllmSettings(Config):
    """Settings of the engine that generates: how many responses at once, and how vLLM takes devices and memory."""

    tensor_parallel: int = Field(default=1, ge=1)
    """[devices] How many (on CPU: sets of cores) vLLM splits one model over. Raise it for a model that does not fit on one, or answers
    too slowly."""
    max_num_seqs: int = Field(default=256, ge=1, le=100_000)
    """[responses] How many are sampled at the same time; further ones wait for their turn. Lower it where keys and values do not fit,
    raise it where a GPU is not busy."""
    kv_cache_gib: float | None = Field(default=None, gt=0)
    """[GiB] Memory of vLLM for keys and values; None: on CPU what `max_num_seqs` full contexts need, but at most 2; on a GPU what
    `gpu_memory_utilization` leaves. Raise it on a CPU with long contexts, lower it beside others."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """[share] What vLLM takes of a GPU's memory for weights, keys and values; None: 0.9, or what is free when the engine starts, where
    that is less (groups that share the GPU have started before it, and given their memory back). Lower it where groups take turns on a
    GPU and one of them runs out of memory."""
    prefix_caching: bool = False
    """Keep the keys and values of prompts for later requests under the same weights. Set it where prompts share long beginnings."""
    compile: bool | None = None
    """Compile the model (and record CUDA graphs); None: on GPUs only. Set it to False for a quick start, or where compiling fails. On CPU
    it takes 20 s and a C++ compiler, and gives 4 % more tokens."""

    free_on_resume: ClassVar[frozenset[str]] = frozenset(
        (
            "tensor_parallel",
            "max_num_seqs",
            "kv_cache_gib",
            "gpu_memory_utilization",
            "prefix_caching",
            "compile",
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
        adapter: Lora | None = None,
        routes: bool = False,
        images: bool = False,
    ) -> dict[str, Any]:
        """The keyword arguments of vLLM's `EngineArgs`.

        Args:
            model: folder or cached Hugging Face id.
            max_context: longest prompt and response together, in tokens; None: what the model was made for.
            dtype: of the weights; "auto": float32 on CPU, bfloat16 on GPUs.
            seed: of requests that bring none.
            free_share: share of the GPU's memory that is free; None: the engine runs on CPU.
            adapter: that is served; None: none is.
            routes: record the experts that each token is sent to.
            images: prompts may have some.
        """
        on_gpu = free_share is not None
        context = max_context or complete_text_settings(model).max_position_embeddings
        if dtype == "auto":
            dtype = "bfloat16" if on_gpu else "float32"
        arguments: dict[str, Any] = {
            "model": str(find_model_config(model).parent),
            "dtype": dtype,
            "seed": seed,
            "max_model_len": context,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": max(context, STEP_TOKENS),
            "gpu_memory_utilization": self.gpu_memory_utilization or memory_share(free_share),
            "tensor_parallel_size": self.tensor_parallel,
            # Ray's own executor, vLLM's choice inside a placement group, wants bundles that this worker does not have.
            "distributed_executor_backend": "mp" if self.tensor_parallel > 1 else None,
            "enable_prefix_caching": self.prefix_caching,
            # A request's seed on CPU and its prompt in chunks do not go together: the generator cannot be rewound.
            "enable_chunked_prefill": on_gpu,
            # A step must be over when it returns, or tokens of the old weights would carry the new version.
            "async_scheduling": False,
            "enforce_eager": not self.compiles(on_gpu),
            "logprobs_mode": "processed_logprobs",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # none of the model's own sampling defaults: `Sampling` says it all
            "enable_sleep_mode": on_gpu,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "weight_transfer_config": {"backend": "weft"},
            "worker_extension_cls": "weft.workers.generation.vllm_worker.WorkerExtension",
        }
        if routes and on_gpu:  # vLLM wants both or neither; on a CPU `vllm_routes.py` records
            arguments |= {"enable_return_routed_experts": True, "enable_prefix_caching": True}
        if (
            images
        ):  # vLLM's own processor of images wants a tokenizer; of videos it reserves room for the longest
            arguments |= {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"video": 0}}
        if adapter is not None:
            room = next(rank for rank in LORA_RANKS if rank >= adapter.rank)
            arguments |= {"enable_lora": True, "max_lora_rank": room, "max_loras": 1, "max_cpu_loras": 1}
        kv_cache_gib = self.kv_cache_gib
        if kv_cache_gib is None and not on_gpu:
            kv_cache_gib = min(2.0, self._kv_cache_gib(complete_text_settings(model), dtype, context))
        if kv_cache_gib is not None:
            arguments["kv_cache_memory_bytes"] = int(kv_cache_gib * GIB)
        return arguments

    def check_memory(self, memory_bytes: int, where: str, ranks: int = 1) -> None:
        """Check that keys and values fit into memory.

        Args:
            memory_bytes: free memory.
            where: names it in the message.
            ranks: engines that share it.

        Raises:
            UserError: they do not fit.

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
        """Check sizes that vLLM would refuse only after it has loaded the model.

        Args:
            settings: the model's `config.json`.
            max_context: longest prompt and response together, or None if not known.
            dtype: type of the weights. "auto" counts as half precision.

        Raises:
            UserError: naming the setting, and the nearest value that fits.
        """
        largest = max(max_context or 0, STEP_TOKENS)
        if self.max_num_seqs > largest:
            raise UserError(
                f"max_num_seqs={self.max_num_seqs}: a step takes in {largest:,} tokens, and so as many responses at most"
            )
        text = text_settings(settings)
        layers, heads, size = (
            text.get("num_hidden_layers"),
            text.get("num_key_value_heads") or num_heads(text),
            head_dim(text),
        )
        special = any(
            text.get(name) for name in ("sliding_window", "layer_types", "kv_lora_rank")
        )  # these keep less
        if self.kv_cache_gib is None or max_context is None or special or not (layers and heads and size):
            return
        token_bytes = (
            2 * layers * math.ceil(heads / self.tensor_parallel) * size * (4 if dtype == "float32" else 2)
        )
        room = int(self.kv_cache_gib * GIB) // token_bytes
        if room < max_context:
            raise UserError(
                f"kv_cache_gib={self.kv_cache_gib:g} holds the keys and values of {room:,} tokens, and one response may have "
                f"{max_context:,} with its prompt; raise it to {token_bytes * (max_context + 128) / GIB:.2g} or more, or lower max_context"
            )

    def compiles(self, on_gpu: bool) -> bool:
        """Whether vLLM compiles the model."""
        return on_gpu if self.compile is None else self.compile

    def _kv_cache_gib(self, config: Any, dtype: str, context: int) -> float:
        """Memory that `max_num_seqs` full contexts need on one rank, half-filled blocks included."""
        settings = config.to_dict()
        heads, size = settings.get("num_key_value_heads") or num_heads(settings), head_dim(settings)
        assert (
            heads is not None and size is not None
        )  # `transformers` filled in what the folder leaves out
        heads = math.ceil(heads / self.tensor_parallel)
        token_bytes = 2 * config.num_hidden_layers * heads * size * (4 if dtype == "float32" else 2)
        tokens = (self.max_num_seqs + 1) * (math.ceil(context / 128) + 1) * 128
        return max(token_bytes * tokens / GIB, 1 / 64)
