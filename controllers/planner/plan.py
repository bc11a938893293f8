"""Plan: what a run will be, from its checked description: sizes of a step, groups, memory, bytes on the disk."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...algorithms.sampling import Sampling
from ...dataflow.column import PROMPT_IDS
from ...dataflow.graph import Graph
from ...dataflow.node import Node
from ...dataflow.operation import Shape
from ...workers.training.memory import CPU_TOKENS, GPU_TOKENS
from ..graph_run import TRAIN
from ..placement import machine_cpus, machine_gpus
from ..ranks.row_io import num_tokens
from ..run_spec import RunSpec
from .memory import GroupMemory, group_memory


@dataclass(frozen=True)
class UpdateSizes:
    """What an update trains on in a step."""

    node: str
    rows: int
    rows_per_replica: int
    tokens: int
    """At most: with responses of the longest kind; responses that are read from data are not counted."""
    microbatches_per_replica: int
    """At most."""
    optimizer_steps: int


@dataclass(frozen=True)
class Plan:
    """A run before it starts."""

    spec: RunSpec
    prompts: int
    """Of a step."""
    samples: int
    """Responses to each."""
    prompt_tokens: float
    """On average; 0 where the source has none."""
    max_tokens: int
    """Longest response; 0: none is sampled."""
    updates: tuple[UpdateSizes, ...]
    groups: tuple[GroupMemory, ...]

    @property
    def checkpoint_bytes(self) -> int:
        """Of one checkpoint: models, optimizers, without rows in flight."""
        return sum(group.checkpoint for group in self.groups)

    @property
    def disk_bytes(self) -> int:
        """Of the checkpoints of a run, with the one that is being written, and the best one if that is kept."""
        config = self.spec.checkpoint
        return self.checkpoint_bytes * (config.keep + 1 + (config.best is not None)) if config.writes else 0

    @property
    def needed(self) -> Mapping[str, int]:
        """Pool -> bytes of all ranks of all groups on it, each in its largest phase."""
        found: dict[str, int] = {}
        for group in self.groups:
            found[group.pool] = found.get(group.pool, 0) + group.ranks * group.peak
        return found

    @property
    def machine(self) -> Mapping[str, int]:
        """What this machine has."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return {"cpus": machine_cpus(), "gpus": machine_gpus(), "memory_bytes": memory}


def plan_of(spec: RunSpec) -> Plan:
    """Plan a run.

    Args:
        spec: as the driver has checked it.
    """
    train = spec.graphs[TRAIN]
    prompts = spec.schedule.prompts_per_step
    samples, sampling = _expansion(train)
    tokens = _prompt_tokens(train)
    longest = sampling.max_tokens if sampling is not None else 0
    groups = tuple(group_memory(spec, n, h, spec.placement[n]) for n, h in spec.handles.items())
    updates = tuple(
        _update(spec, node, prompts * samples, tokens + longest) for node in train.nodes if node.operation.updates
    )
    return Plan(spec, prompts, samples, tokens, longest, updates, groups)


def _expansion(graph: Graph) -> tuple[int, Sampling | None]:
    """(rows that each row of the source becomes, how responses are sampled)."""
    rows, sampling = 1, None
    for node in graph.nodes:
        if node.operation.shape is Shape.EXPAND and node.makes_level is not None:
            number = node.arguments.get("n", 1)
            rows *= number if isinstance(number, int) else 1
        given = node.arguments.get("sampling")
        sampling = given if isinstance(given, Sampling) else sampling
    return rows, sampling


def _prompt_tokens(graph: Graph) -> float:
    from ...dataflow.batch import Batch

    columns = {str(PROMPT_IDS)}.intersection(graph.source.columns)
    return float(np.mean(num_tokens(Batch.of_table(graph.source.table), columns))) if columns else 0.0


def _update(spec: RunSpec, node: Node, rows: int, tokens_a_row: float) -> UpdateSizes:
    assert node.group is not None
    config: Any = spec.handles[node.group].config
    place = spec.placement[node.group]
    ranks = 1 if spec.backend.in_process else place.ranks
    replicas = max(1, ranks // getattr(config, "tensor_parallel", 1))
    of_pass = getattr(config, "microbatch_tokens", None) or (GPU_TOKENS if place.pool.gpus else CPU_TOKENS)
    epochs, minibatches = (node.arguments.get(name, 1) for name in ("epochs", "minibatches"))
    each = math.ceil(rows / replicas)
    per_pass = max(1, math.floor(of_pass / tokens_a_row)) if tokens_a_row else each
    return UpdateSizes(
        node=node.name,
        rows=rows,
        rows_per_replica=each,
        tokens=round(rows * tokens_a_row),
        microbatches_per_replica=epochs * minibatches * math.ceil(math.ceil(each / minibatches) / per_pass),
        optimizer_steps=epochs * minibatches,
    )
