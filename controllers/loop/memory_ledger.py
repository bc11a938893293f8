"""MemoryLedger: who takes how much memory, as metrics of a step: worker groups, the driver, segments of rows, Ray's object store; and what
is left on the node that has least."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ...dataflow.buffer.sample_buffer import SampleBuffer
from ..backends.backend import Backend
from ..backends.witness.memory import Memory

READ_S = 1.0
"""Seconds for which a reading is good: short steps share one."""


class MemoryLedger:
    """Reads the memory of a run.

    Args:
        backend: knows the nodes and processes.
        buffer: the rows of the run.
    """

    def __init__(self, backend: Backend, buffer: SampleBuffer) -> None:
        self._backend, self._buffer = backend, buffer
        self._read_at = float("-inf")
        self._nodes: Mapping[str, Memory] = {}

    def metrics(self) -> dict[str, float]:
        """The last readings; none where no process takes any."""
        now = time.monotonic()
        if now - self._read_at >= READ_S:
            self._read_at, self._nodes = now, self._backend.memory()
        ledgers: Mapping[str, Any] = self._buffer.ledgers
        segment_bytes = sum(ledger.parts.num_bytes for ledger in ledgers.values())
        return memory_metrics(self._nodes, segment_bytes) if self._nodes else {}


def memory_metrics(nodes: Mapping[str, Memory], segment_bytes: float) -> dict[str, float]:
    """The metrics of these readings.

    Args:
        nodes: name -> its memory.
        segment_bytes: of the columns of all rows in flight.
    """
    processes = [(who.partition("[")[0], memory) for node in nodes.values() for who, memory in node.processes.items()]
    metrics: dict[str, float] = {}
    for group in dict.fromkeys(group for group, _ in processes):
        own = [memory for name, memory in processes if name == group]
        # Ranks on one node touch the same shared memory: their sum would count it again and again.
        metrics[f"{group}/resident_bytes"] = float(sum(memory.resident_bytes for memory in own))
        metrics[f"{group}/shared_bytes"] = float(max(memory.shared_bytes for memory in own))
    metrics["segment_bytes"] = float(segment_bytes)
    metrics["object_store_bytes"] = float(sum(node.object_store_bytes for node in nodes.values()))
    limits = [node.node for node in nodes.values() if node.node is not None]
    if limits:
        fullest = max(limits, key=lambda limit: limit.share)
        metrics["host_free_bytes"] = float(fullest.free_bytes)
        metrics["host_limit_bytes"] = float(fullest.limit_bytes)
    return metrics
