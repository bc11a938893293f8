"""Arguments that vLLM receives."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from weft.workers.generation.vllm_settings import VllmSettings, memory_share
from weft.workers.training.lora import Lora


def arguments(model: Path, free_share: float | None, **settings: Any) -> dict[str, Any]:
    made = VllmSettings(**settings)
    return made.engine_arguments(str(model), max_context=64, dtype="auto", seed=0, free_share=free_share)


@pytest.mark.parametrize(
    ("free", "share"), [(1.0, 0.9), (0.92, 0.9), (0.9, 0.88), (0.555, 0.53), (0.0, 0.01)]
)
def test_the_engine_takes_memory_that_others_leave_but_never_all(free: float, share: float):
    assert memory_share(free) == share


def test_a_share_that_the_user_sets_is_taken(tiny_model: Path):
    assert arguments(tiny_model, 0.5)["gpu_memory_utilization"] == 0.48
    assert arguments(tiny_model, 0.5, gpu_memory_utilization=0.7)["gpu_memory_utilization"] == 0.7


def test_whether_there_is_a_gpu_decides_about_dtype_and_sleep(tiny_model: Path):
    on_gpu, on_cpu = arguments(tiny_model, 1.0), arguments(tiny_model, None)
    assert (on_gpu["dtype"], on_gpu["enable_sleep_mode"], on_gpu["enforce_eager"]) == (
        "bfloat16",
        True,
        False,
    )
    assert (on_cpu["dtype"], on_cpu["enable_sleep_mode"], on_cpu["enforce_eager"]) == (
        "float32",
        False,
        True,
    )
    assert "kv_cache_memory_bytes" in on_cpu and "kv_cache_memory_bytes" not in on_gpu


def test_gpus_share_prompts_and_overlap_steps_and_cpus_do_neither(tiny_model: Path):
    on_gpu, on_cpu = arguments(tiny_model, 1.0), arguments(tiny_model, None)
    for name in ("enable_prefix_caching", "async_scheduling", "sleep_mode_offload_cudagraph"):
        assert (on_gpu[name], on_cpu[name]) == (True, False), name
    assert not arguments(tiny_model, 1.0, prefix_caching=False)["enable_prefix_caching"]
    assert arguments(tiny_model, None, prefix_caching=True)["enable_prefix_caching"]
    made = VllmSettings(prefix_caching=False)
    assert made.caches_prefixes(on_gpu=True, routes=True), "vLLM stores routes with cached blocks"


def test_vllm_compiles_no_flashinfer_kernels_where_none_are_installed(tiny_model: Path):
    two = arguments(tiny_model, 1.0, tensor_parallel=2)
    assert two["enable_flashinfer_autotune"] is False
    assert two["compilation_config"] == {"pass_config": {"fuse_allreduce_rms": False}}
    assert "compilation_config" not in arguments(tiny_model, 1.0)


@pytest.mark.vllm
def test_the_installed_vllm_has_every_argument(tiny_model: Path):
    from vllm.config.compilation import PassConfig
    from vllm.engine.arg_utils import EngineArgs

    names = {field.name for field in fields(EngineArgs)}
    for free_share in (1.0, None):
        for more in (
            {},
            {"adapters": {"a": Lora(rank=8), "b": Lora(rank=9)}, "routes": True, "images": True},
        ):
            settings = VllmSettings(tensor_parallel=2, kv_cache_gib=1, quantization="int8")
            made = settings.engine_arguments(
                str(tiny_model), max_context=64, dtype="auto", seed=0, free_share=free_share, **more
            )
            assert made.keys() <= names, made.keys() - names
            passes = made.get("compilation_config", {}).get("pass_config", {})
            assert passes.keys() <= {field.name for field in fields(PassConfig)}
