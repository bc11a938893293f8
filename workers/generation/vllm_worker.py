"""What a worker process of vLLM does for Weft besides vLLM's own calls: it takes weights and adapters, and records the experts of tokens.

vLLM imports this module in each of its processes, because `VllmSettings` names `WorkerExtension`, of which vLLM takes one. With it comes
the receiver of weights, which registers itself: the processes of ranks that share a model need no plugin.
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

from ...resharding.incoming import open_weights
from ...resharding.vllm_control import TensorSum
from ...resharding.vllm_receiver import (
    BucketReceiver,
    Loaded,
    VllmBackends,
    WeightsUpdateInfo,
    receive_adapter,
)

# Vllm routes
#
# The experts that vLLM sends each token to, recorded on a CPU.
#
# On GPUs vLLM returns them itself (`enable_return_routed_experts`), by its newer model runner,
# which needs Triton. Here its own capturer sees the routers of the older one, and the scheduler
# says whose tokens they had.


@dataclass
class _Noted:
    """What the routers chose for a request so far."""

    chunks: list[np.ndarray] = field(default_factory=list)
    """One for each step, [tokens, layers, k]."""
    tokens: int = 0
    """Of all chunks."""


class RouteRecorder:
    """What the routers of a rank chose for the tokens of each request.

    Args:
        model_runner: of vLLM's worker; its `execute_model` is replaced.

    Raises:
        ValueError: vLLM does not see the choice of some router.
    """

    def __init__(self, model_runner: Any) -> None:
        settings = model_runner.vllm_config
        self._runner, self._execute = model_runner, model_runner.execute_model
        self._capturer = RoutedExpertsCapturer(settings.scheduler_config.max_num_batched_tokens, settings)
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
        """Share the tokens of a step, [tokens, layers, k], among its requests."""
        batch, end = self._runner.input_batch, 0
        for number, request in enumerate(batch.req_ids):
            begin, end = end, end + counts[request]
            before = int(batch.num_computed_tokens_cpu[number])
            if before == 0:  # its first tokens, or all of them once more, because it was preempted
                self._noted[request] = _Noted()
            noted = self._noted.setdefault(request, _Noted())
            if noted.tokens != before:
                raise RuntimeError(
                    f"the first {before} tokens of request {request} went past the routers"
                )
            noted.chunks.append(rows[begin:end].copy())
            noted.tokens += end - begin

    def take(self, requests: Iterable[str]) -> list[np.ndarray | None]:
        """[tokens, layers, k] of each of these requests, by the names that vLLM was given; None: it had no token. They are forgotten."""
        by_name = {name.rpartition("-")[0]: name for name in self._noted}  # vLLM adds a number
        found = [self._noted.pop(by_name.get(request, ""), _Noted()).chunks for request in requests]
        return [np.concatenate(chunks) if chunks else None for chunks in found]


class WorkerExtension:
    """Parent that vLLM gives its worker class. Its methods are called by `collective_rpc`, on every rank."""

    weight_transfer_engine: Any
    vllm_config: Any
    device: Any
    model_runner: Any
    parallel_config: Any
    rank: int
    _weight_update_active: bool
    _weft_backends: VllmBackends | None = None
    _weft_routes: RouteRecorder | None = None

    @property
    def _weft_receiver(self) -> BucketReceiver:
        assert isinstance(self.weight_transfer_engine, BucketReceiver)
        return self.weight_transfer_engine

    def weft_loaded_weights(self) -> Loaded | None:
        """What this rank has taken in its last finished update; None before the first."""
        return self._weft_receiver.loaded

    def weft_stage_weights(self, update_info: dict[str, Any]) -> None:
        """Begin to take a version into memory beside the model."""
        self._weft_receiver.stage(WeightsUpdateInfo(**update_info).weights)

    def weft_is_staged(self) -> bool:
        """Whether it has come."""
        return self._weft_receiver.is_staged()

    def weft_begin_by_vllm(self, backend: str) -> None:
        """A version comes by one of vLLM's own backends: until it has, vLLM's calls are that backend's."""
        if self._weft_backends is None:
            model = self.model_runner.get_model()
            self._weft_backends = VllmBackends(self._weft_receiver, self.vllm_config, self.device, model)
        self.weight_transfer_engine = self._weft_backends.begin(backend)

    def weft_end_by_vllm(self, whole: bool) -> dict[str, TensorSum]:
        """It has come, or nothing more comes of it; returns what the model's loaders were given.

        Args:
            whole: it has come. Otherwise layers whose weights have not all come keep those that they had.
        """
        if self._weft_backends is None:  # this rank, or another one, could not begin
            assert not whole
            return {}
        self.weight_transfer_engine = self._weft_backends.receiver
        if not whole:
            self._weight_update_active = False
        return self._weft_backends.end(whole)

    def weft_receive_adapter(self, update_info: dict[str, Any], settings: dict[str, Any]) -> str:
        """Put a version of an adapter into this rank's slot; returns its checksum."""
        weights = WeightsUpdateInfo(**update_info).weights
        with open_weights(weights, self.rank, self.parallel_config.world_size) as incoming:
            return receive_adapter(self.model_runner.lora_manager, incoming, settings)

    def weft_record_routes(self) -> None:
        """Record the experts of all tokens from now on."""
        self._weft_routes = RouteRecorder(self.model_runner)

    def weft_take_routes(self, requests: Sequence[str]) -> list[np.ndarray | None]:
        """See `RouteRecorder.take`."""
        assert self._weft_routes is not None
        return self._weft_routes.take(requests)

    def weft_weight_bytes(self) -> int:
        """Of this rank's parameters."""
        return sum(parameter.nbytes for parameter in self.model_runner.model.parameters())

    def weft_unlink_shared_memory(self) -> None:
        """Take away the names under which ranks on CPU found each other's memory; it stays as long as they use it.

        vLLM leaves the files behind even when it is shut down in order.
        """
        if name := os.environ.get("VLLM_DIST_IDENT"):  # set by vLLM where ranks are processes on CPU
            for file in Path("/dev/shm").glob(f"{glob.escape(name)}-*"):
                file.unlink(missing_ok=True)
