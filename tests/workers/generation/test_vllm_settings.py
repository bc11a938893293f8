"""Arguments that vLLM receives."""

from pathlib import Path
from typing import Any

import pytest

from weft.workers.generation.vllm_settings import VllmSettings, memory_share


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
