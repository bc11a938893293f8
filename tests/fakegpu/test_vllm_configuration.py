"""vLLM's CUDA platform accepts what Weft passes, and makes of it what Weft expects."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.fakegpu
@pytest.mark.vllm
def test_vllm_configures_an_engine_for_gpus_as_weft_asks(
    run_on_fake_gpu: Callable[..., dict[str, Any]], tmp_path: Path
):
    from transformers import Qwen3Config, Qwen3MoeConfig

    model, experts = tmp_path / "model", tmp_path / "experts"
    Qwen3Config(architectures=["Qwen3ForCausalLM"], **SIZES).save_pretrained(model)
    named = ["Qwen3MoeForCausalLM"]
    Qwen3MoeConfig(architectures=named, **SIZES, **EXPERTS).save_pretrained(experts)
    found = run_on_fake_gpu("vllm_configuration.py", MODEL=model, EXPERTS=experts, SHIM_GPUS=2)
    assert found.pop("platform") == "NvmlCudaPlatform"
    plain = {
        "executor": "UniProcExecutor",
        "worker": "vllm.v1.worker.gpu_worker.Worker",
        "v2": True,
        "overlap": True,
        "in_flight": 2,
        "chunked_prefill": True,
        "prefix_caching": True,
        "sleep": True,
        "graphs_asleep": True,
        "graphs": "FULL_AND_PIECEWISE",
        "autotune": False,
        "fuse_allreduce_rms": False,
        "routes": False,
        "lora": False,
        "logprobs": "processed_logprobs",
        "dtype": "torch.bfloat16",
    }
    assert found["plain"] == plain
    assert found["eager"] == plain | {"prefix_caching": False, "graphs_asleep": False, "graphs": "NONE"}
    assert found["parallel"] == plain | {"executor": "MultiprocExecutor"}
    assert found["adapter"] == plain | {"lora": True}
    assert found["routes"] == plain | {"routes": True}
