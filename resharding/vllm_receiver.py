"""The receiving side of a weight update inside vLLM, through its public `WeightTransferEngine` interface.

vLLM imports this module in each of its processes because the engine names `WeightReport` as its worker extension
class; importing it registers the transfer engine, so tensor-parallel children need no plugin.
"""

from __future__ import annotations

import glob
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from ..dataflow.errors import WeightSyncError
from .shared_memory import open_weights
from .weights import TensorEntry, Weights

BACKEND = "weft"
"""Name of the transfer engine in vLLM's factory."""


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Shared memory needs no rendezvous."""


@dataclass
class WeightsUpdateInfo(WeightTransferUpdateInfo):
    """The fields of a `Weights` record as plain data: vLLM carries dictionaries between its processes."""

    version: int
    location: str
    tensors: list[dict[str, Any]]
    num_bytes: int
    checksum: str


def to_update_info(weights: Weights) -> dict[str, Any]:
    """The record as the dictionary that vLLM's `update_weights` takes."""
    return asdict(weights)


class SharedMemoryReceiver(WeightTransferEngine[NoInitInfo, WeightsUpdateInfo]):
    """Maps a published version, checks it, and loads this rank's part of it into vLLM's model in place."""

    init_info_cls = NoInitInfo
    update_info_cls = WeightsUpdateInfo

    loaded: tuple[int, str] | None = None
    """Version and checksum of the weights in the model, once an update is finished; None before the first."""
    _arriving: tuple[int, str] | None = None

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Nothing to prepare."""

    def start_weight_update(self) -> None:
        self._arriving = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)  # the memory is the sender's again when this returns

    def receive_weights(self, update_info: WeightsUpdateInfo) -> None:
        fields = dict(vars(update_info))
        entries = (TensorEntry(**entry | {"shape": tuple(entry["shape"])}) for entry in fields.pop("tensors"))
        weights = Weights(tensors=tuple(entries), **fields)
        tensors = open_weights(weights)  # checked before a byte of the model is touched
        wanted = {name for name, _ in self.model.named_parameters()}  # tied ones once; the next line unties them
        initialize_layerwise_reload(self.model)
        found = self.model.load_weights(tensors.items())  # pyright: ignore[reportCallIssue]
        finalize_layerwise_reload(self.model, self.model_config)
        _process_tied(self.model)
        if found is not None and wanted - found:
            missing = ", ".join(sorted(wanted - found))
            raise WeightSyncError(f"weights version {weights.version} lack what vLLM needs for: {missing}")
        self._arriving = (weights.version, weights.checksum)

    def finish_weight_update(self) -> None:
        self.loaded = self._arriving

    def shutdown(self) -> None:
        """Nothing is held."""


def _process_tied(model: torch.nn.Module) -> None:
    """Prepare anew what shares its weight with a layer that was loaded (an output head tied to the embedding).

    vLLM's layerwise reload does this for loaded layers only. On CPU the head multiplies by a packed copy of its
    weight, which would stay that of the old version.
    """
    seen: set[int] = set()
    for layer in model.modules():
        own = {id(parameter) for parameter in layer.parameters(recurse=False)}
        method = getattr(layer, "quant_method", None)
        if own & seen and hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(layer)  # pyright: ignore[reportOptionalMemberAccess]
        seen |= own


class WeightReport:
    """vLLM worker extension: what the engine asks of every rank besides vLLM's own calls."""

    weight_transfer_engine: WeightTransferEngine[Any, Any] | None

    def weft_loaded_weights(self) -> tuple[int, str] | None:
        """Version and checksum of this rank's last finished update, or None before the first."""
        engine = self.weight_transfer_engine
        return engine.loaded if isinstance(engine, SharedMemoryReceiver) else None

    def weft_unlink_shared_memory(self) -> None:
        """Take away the names under which ranks on CPU found each other's memory; it stays as long as they use it.

        vLLM leaves the files behind even when it is shut down in order.
        """
        if name := os.environ.get("VLLM_DIST_IDENT"):  # set by vLLM where ranks are processes on CPU
            for file in Path("/dev/shm").glob(f"{glob.escape(name)}-*"):
                file.unlink(missing_ok=True)


WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryReceiver)
