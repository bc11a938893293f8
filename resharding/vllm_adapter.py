"""Adapters (LoRA) inside vLLM: a published version of an adapter, served from tensors, without files.

An engine has one slot, and requests name the one adapter in it. A version takes the place of the one before between two steps, as
complete weights do: unfinished requests go on under it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from ..dataflow.errors import WeightSyncError, nearest
from .incoming import IncomingWeights
from .tensor_receiver import receive_parts
from .weights import whole

_SLOT = 1
"""vLLM's number of the adapter."""


def adapter_request() -> LoRARequest:
    """What a request says so that the adapter is added to its weights."""
    return LoRARequest("weft", _SLOT, "received, not read")


def receive_adapter(manager: Any, incoming: IncomingWeights, settings: Mapping[str, Any]) -> str:
    """Take a version of an adapter, check it, and put it into vLLM's slot; returns its checksum. vLLM cuts it for this rank by itself.

    Args:
        manager: vLLM's `WorkerLoRAManager`.
        incoming: the version, in the names of `peft`.
        settings: "r", "lora_alpha" and "use_rslora", as `peft` has them.

    Raises:
        WeightSyncError: something did not arrive as it was published, or vLLM has no layer for it. The slot keeps what it had.
    """
    tensors = {
        name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
        for name, tensor in incoming.layout.tensors.items()
    }
    checksum = receive_parts(incoming, list(whole(tensors)))
    slots = manager._adapter_manager
    mapper = getattr(slots.model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        _SLOT,
        tensors,
        PEFTHelper(target_modules=[], **settings),
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
    )
    served = {part for name in slots.modules for part in slots.packed_modules.get(name, [name])}
    if unserved := [name for name in adapter.loras if name not in served]:
        raise WeightSyncError(
            f"weights version {incoming.version}: vLLM's {type(slots.model).__name__} serves no adapter of layer {unserved[0]!r}"
            f"{nearest(unserved[0], served)}; Lora(targets=...) without it, or Lora(published='merged'), needs none"
        )
    before = slots.get_adapter(_SLOT)
    try:
        _exchange(slots, adapter)
    except Exception:
        if before is not None:
            _exchange(slots, before)
        raise
    return checksum


def _exchange(slots: Any, adapter: LoRAModel) -> None:
    slots.remove_adapter(_SLOT)
    slots.add_adapter(adapter)
    slots.activate_adapter(_SLOT)
