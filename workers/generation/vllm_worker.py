"""Weft's extension of vLLM's worker processes: receive weights and adapters, and record the experts
of tokens.

vLLM imports this module in each of its processes, because `VllmSettings` names `WorkerExtension`.
The import also registers the weight receiver, so ranks that share a model need no plugin.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)

from ...resharding.incoming import IncomingWeights
from ...resharding.vllm_control import TensorSum
from ...resharding.vllm_receiver import (
    BucketReceiver,
    Loaded,
    VllmBackends,
    WeightsUpdateInfo,
    receive_adapter,
)

# Routes on a CPU. On GPUs vLLM returns routed experts (`enable_return_routed_experts`) through its
# newer model runner, which needs Triton. Here vLLM's capturer watches the routers of the older
# runner, and the scheduler tells which tokens they processed.


@dataclass
class _Noted:
    """Recorded routes of an unfinished request."""

    chunks: list[np.ndarray] = field(default_factory=list)
    """One array per step, [tokens, layers, k]."""
    tokens: int = 0


class _RouteRecorder:
    """Records which experts a rank's routers chose for each request, by replacing `execute_model`
    of vLLM's model runner. Raises a ValueError if vLLM cannot capture some router."""

    def __init__(self, model_runner: Any) -> None:
        settings = model_runner.vllm_config
        self._runner, self._execute = model_runner, model_runner.execute_model
        self._capturer = RoutedExpertsCapturer(
            settings.scheduler_config.max_num_batched_tokens, settings
        )
        bind_routed_experts_capturer(model_runner.get_model(), self._capturer)
        self._noted: dict[str, _Noted] = {}
        model_runner.execute_model = self._execute_and_note

    def _execute_and_note(self, scheduled: Any, *others: Any, **named: Any) -> Any:
        found = self._execute(scheduled, *others, **named)
        if tokens := scheduled.total_num_scheduled_tokens:
            self._note(
                scheduled.num_scheduled_tokens, self._capturer.snapshot_routing_data(tokens).numpy()
            )
        return found

    def _note(self, counts: dict[str, int], rows: np.ndarray) -> None:
        """Split the routes of a step, [tokens, layers, k], by request."""
        batch, end = self._runner.input_batch, 0
        for number, request in enumerate(batch.req_ids):
            begin, end = end, end + counts[request]
            before = int(batch.num_computed_tokens_cpu[number])
            if before == 0:  # the first tokens, or all tokens again after a preemption
                self._noted[request] = _Noted()
            noted = self._noted.setdefault(request, _Noted())
            if noted.tokens != before:
                raise RuntimeError(
                    f"the routers did not see the first {before} tokens of request {request}"
                )
            noted.chunks.append(rows[begin:end].copy())
            noted.tokens += end - begin

    def take_routes(self, requests: Iterable[str]) -> list[np.ndarray | None]:
        """Return [tokens, layers, k] of each request by vLLM's name, or None for one without
        tokens, and forget these requests."""
        by_name = {name.rpartition("-")[0]: name for name in self._noted}  # vLLM adds a number
        found = [self._noted.pop(by_name.get(request, ""), _Noted()).chunks for request in requests]
        return [np.concatenate(chunks) if chunks else None for chunks in found]


class WorkerExtension:
    """Mixin for vLLM's worker class. `collective_rpc` calls its methods on every rank."""

    weight_transfer_engine: Any
    vllm_config: Any
    device: Any
    model_runner: Any
    parallel_config: Any
    rank: int
    _weight_update_active: bool
    _weft_backends: VllmBackends | None = None
    _weft_routes: _RouteRecorder | None = None

    @property
    def _weft_receiver(self) -> BucketReceiver:
        assert isinstance(self.weight_transfer_engine, BucketReceiver)
        return self.weight_transfer_engine

    def weft_loaded_weights(self) -> Loaded | None:
        """Return the record of this rank's last finished update; None before the first."""
        return self._weft_receiver.loaded

    def weft_stage_weights(self, update_info: dict[str, Any]) -> None:
        """Start receiving a version into separate memory."""
        self._weft_receiver.stage(WeightsUpdateInfo(**update_info).weights)

    def weft_is_staged(self) -> bool:
        return self._weft_receiver.is_staged()

    def weft_begin_by_vllm(self, backend: str) -> None:
        """Begin an update through one of vLLM's own backends; until it ends, vLLM's calls go to
        that backend."""
        if self._weft_backends is None:
            model = self.model_runner.get_model()
            self._weft_backends = VllmBackends(self._weft_receiver, self.vllm_config, self.device, model)
        self.weight_transfer_engine = self._weft_backends.begin_version(backend)

    def weft_end_by_vllm(self, whole: bool) -> dict[str, TensorSum]:
        """End such an update and return the tensors that the model's loaders received. If it is not
        `whole`, layers with missing weights keep their old ones."""
        if self._weft_backends is None:  # this rank, or another one, could not begin
            assert not whole
            return {}
        self.weight_transfer_engine = self._weft_backends.receiver
        if not whole:
            self._weight_update_active = False
        return self._weft_backends.end_version(whole)

    def weft_receive_adapter(self, update_info: dict[str, Any], settings: dict[str, Any]) -> str:
        """Load a version of an adapter into this rank's slot; return its checksum."""
        weights = WeightsUpdateInfo(**update_info).weights
        with IncomingWeights(weights, self.rank, self.parallel_config.world_size) as incoming:
            return receive_adapter(self.model_runner.lora_manager, incoming, settings)

    def weft_record_routes(self) -> None:
        self._weft_routes = _RouteRecorder(self.model_runner)

    def weft_take_routes(self, requests: Sequence[str]) -> list[np.ndarray | None]:
        assert self._weft_routes is not None
        return self._weft_routes.take_routes(requests)

    def weft_weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.model_runner.model.parameters())

    def weft_unlink_shared_memory(self) -> None:
        """Unlink the names of shared memory between ranks on a CPU; the memory stays while they use
        it. vLLM leaves the files behind even after an orderly shutdown."""
        if name := os.environ.get("VLLM_DIST_IDENT"):  # set by vLLM if ranks are CPU processes
            for file in Path("/dev/shm").glob(f"{glob.escape(name)}-*"):
                file.unlink(missing_ok=True)
