"""Ray workers that are forked from a process with torch and the model's code. See
`tests/controllers/forked_workers.py`, whose place this takes."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "controllers"))

import forked_workers  # pyright: ignore[reportMissingImports]

MODULES = (
    "safetensors.torch",
    "torch.distributed.checkpoint.hf_storage",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.qwen3.modeling_qwen3",
    "weft.workers.actor",
    "weft.workers.rollout",
    "weft.workers.training.fsdp",
    "weft.workers.training.sharding",
)

if __name__ == "__main__":
    forked_workers.main(*MODULES)
