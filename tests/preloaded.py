"""Imports for the server of `forked.py`, frozen so that forked processes never scan them for
garbage."""

import gc
from importlib import import_module

MODULES = (
    "matplotlib.pyplot",
    "peft",
    "safetensors.torch",
    "torch.distributed.checkpoint.hf_storage",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.qwen2.modeling_qwen2",
    "weft.controllers.driver",
    "weft.workers.actor",
    "weft.workers.critic",
    "weft.workers.reward",
    "weft.workers.rollout",
    "weft.workers.training.fsdp",
    "weft.workers.training.sharding",
)

gc.disable()
for name in MODULES:
    import_module(name)
gc.freeze()
gc.enable()
