"""The experts that vLLM sends each token to, recorded on a CPU.

On GPUs vLLM returns them itself (`enable_return_routed_experts`), by its newer model runner, which needs Triton. Here its own capturer sees
the routers of the older one, and the scheduler says whose tokens they had.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)


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
            self._note(scheduled.num_scheduled_tokens, self._capturer.snapshot_routing_data(tokens).numpy())
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
                raise RuntimeError(f"the first {before} tokens of request {request} went past the routers")
            noted.chunks.append(rows[begin:end].copy())
            noted.tokens += end - begin

    def take(self, requests: Iterable[str]) -> list[np.ndarray | None]:
        """[tokens, layers, k] of each of these requests, by the names that vLLM was given; None: it had no token. They are forgotten."""
        by_name = {name.rpartition("-")[0]: name for name in self._noted}  # vLLM adds a number
        found = [self._noted.pop(by_name.get(request, ""), _Noted()).chunks for request in requests]
        return [np.concatenate(chunks) if chunks else None for chunks in found]
