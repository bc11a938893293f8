"""TRL's GRPO steps with colocated vLLM for `gpu.py`, in .venv-peers.

    python benchmarks/gpu/trl_gpu.py FOLDER SETTINGS      # SETTINGS is JSON; writes FOLDER/trl.json

With several GPUs, `torch.distributed.run` starts it once for each GPU.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).resolve().parents[1] / each) for each in ("", "steps")]
from trl_steps import ENVIRONMENT, grpo_trainer  # pyright: ignore[reportMissingImports]
from turns import WARM_UP, CountedSteps

FSDP: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "activation_checkpointing": True},
    "gradient_checkpointing": False,
}
"""Settings for several GPUs: shard parameters, gradients and moments by layer."""


def main(
    folder: Path, workload: Mapping[str, Any], gpus: int, steps: int, lora: int | None, microbatch: int
) -> None:
    more: dict[str, Any] = {"generation_kwargs": {"detokenize": False, "ignore_eos": True}}
    if gpus:
        more |= {
            "use_cpu": False,
            "bf16": True,
            "model_init_kwargs": {"dtype": "bfloat16" if lora else "float32"},
            "gradient_checkpointing": True,
            "vllm_gpu_memory_utilization": 0.5,
            "vllm_enable_sleep_mode": True,
            **(FSDP if gpus > 1 else {}),
        }
    adapter = None
    if lora is not None:
        from peft import LoraConfig  # pyright: ignore[reportMissingImports]

        adapter = LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear")
    turns = CountedSteps(WARM_UP + steps)
    made = grpo_trainer(
        turns, folder, dict(workload), True, microbatch, processes=max(1, gpus), adapter=adapter, **more
    )
    made.train()
    if int(os.environ.get("RANK", 0)) == 0:
        (folder / "trl.json").write_text(json.dumps(turns.said[1 + WARM_UP :]))


if __name__ == "__main__":
    os.environ |= ENVIRONMENT
    main(Path(sys.argv[1]), **json.loads(sys.argv[2]))
