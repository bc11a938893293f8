"""Throughput: the tokens and floating-point operations of each group's calls in a step.

Counts the arithmetic that a call needs: it computes a shared prompt once and recomputes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...dataflow.batch import Batch
from ...dataflow.buffer.leases import Lease, Published
from ...dataflow.column import PROMPT_IDS
from ...dataflow.errors import WeftError
from ...dataflow.graph import Graph, Node
from ...dataflow.operation import Shape
from ...workers.models.model_folder import read_model_config
from ...workers.models.transformer import Transformer
from ...workers.training.microbatch_plan import OptimizerSteps
from ..group import Call, WorkerGroup
from ..planner.devices import Device


class _Pass(NamedTuple):
    """Rows that a group computes, as in `Transformer.forward_flops`."""

    tokens: np.ndarray
    after: np.ndarray
    predicted: np.ndarray
    epochs: int
    """Number of passes of an update, or 0 for a forward pass alone."""


@dataclass
class _Work:
    tokens: int = 0
    passes: list[_Pass] = field(default_factory=list)


class Throughput:
    """Counts the work of groups with a model, since the last `take`."""

    def __init__(self) -> None:
        self._work: dict[str, _Work] = {}
        self._models: dict[str, Transformer | None] = {}
        """Group -> sizes of its model, or None without a model whose settings tell them."""
        self._prompts: dict[str, np.ndarray] = {}
        """Graph -> [source rows] number of tokens of each prompt."""

    def count_children(self, call: Call, published: Published) -> None:
        """Count new rows of an expansion, and the prompts of parents that get no more rows."""
        lease, node = call.lease, call.node
        if lease is None or node is None or published.parents is None:
            return
        if self._model_of(call.group) is None:
            return
        tokens = published.num_tokens
        work = self._of(call.group)
        work.tokens += int(tokens.sum())
        # Rows of agents have their own prompts, which count as their tokens.
        alone = str(PROMPT_IDS) in node.writes
        before = 0 * tokens if alone else _tokens_of(lease, published.parents)
        work.passes.append(_Pass(tokens, before, tokens, epochs=0))
        if not alone and published.finished is not None and len(published.finished):
            prompts = _tokens_of(lease, published.finished)
            work.passes.append(_Pass(prompts, 0 * prompts, np.ones_like(prompts), epochs=0))

    def count_rows(self, call: Call) -> None:
        """Count the rows of a call that has ended, unless it made new ones."""
        lease, node = call.lease, call.node
        if lease is None or node is None or call.ledger is None:
            return
        if node.operation.shape is Shape.EXPAND or self._model_of(call.group) is None:
            return
        tokens, work = lease.num_tokens, self._of(call.group)
        work.tokens += int(tokens.sum())
        prompts = np.minimum(self._prompt_tokens(call.ledger.graph, lease, node), tokens)
        epochs = OptimizerSteps.of_node(node).epochs if node.operation.updates else 0
        responses = tokens - prompts
        if not call.group.shares_prompts_of(node):
            work.passes.append(_Pass(tokens, 0 * tokens, responses, epochs))
            return
        _, firsts = np.unique(lease.group_ids, return_index=True)
        work.passes.append(_Pass(prompts[firsts], 0 * firsts, 0 * firsts, epochs))
        work.passes.append(_Pass(responses, prompts, responses, epochs))

    def take(
        self,
        groups: Mapping[str, WorkerGroup],
        working_s: Mapping[str, float],
        devices: Mapping[str, Device],
    ) -> dict[str, float]:
        """Return the metrics of the groups that worked, and begin again.

        Args:
            working_s: group -> seconds with a running call on rows.
            devices: group -> its GPUs, if their peak is known.
        """
        found: dict[str, float] = {}
        work, self._work = self._work, {}
        for name, own in work.items():
            group, seconds = groups[name], working_s.get(name, 0.0)
            device_s = seconds * len(group.up) * max(1, group.place.gpus)
            if device_s <= 0:
                continue
            found[f"{name}/tokens_per_s_per_device"] = own.tokens / device_s
            peak = devices[name].flops.get(_dtype(group)) if name in devices else None
            if peak is not None:
                flops = _flops(self._models[name], own, group.handle.config)
                found[f"{name}/flops_utilisation"] = flops / (device_s * peak)
        return found

    def _model_of(self, group: WorkerGroup) -> Transformer | None:
        if group.name not in self._models:
            self._models[group.name] = None
            model = getattr(group.handle.config, "model", None)
            if isinstance(model, str | Path):
                # A model whose operations are not known, or that only the ranks can read.
                with suppress(ValueError, TypeError, OSError, WeftError):
                    self._models[group.name] = Transformer.of(read_model_config(model))
        return self._models[group.name]

    def _of(self, group: WorkerGroup) -> _Work:
        return self._work.setdefault(group.name, _Work())

    def _prompt_tokens(self, graph: Graph, lease: Lease, node: Node) -> np.ndarray:
        """Return [rows] tokens of each row that no response has; 0 if a node replaced the prompts."""
        if node.writers.get(str(PROMPT_IDS), "") != "":
            return 0 * lease.num_tokens
        if graph.name not in self._prompts:
            prompts = np.zeros(len(graph.source.table), np.int64)
            if str(PROMPT_IDS) in graph.source.columns and len(prompts):
                prompts = Batch.of_table(graph.source.table.select([str(PROMPT_IDS)])).lengths(
                    PROMPT_IDS
                )
            self._prompts[graph.name] = prompts
        return self._prompts[graph.name][lease.positions]


def _tokens_of(lease: Lease, parents: np.ndarray) -> np.ndarray:
    return lease.num_tokens[[lease.place_of[parent] for parent in parents.tolist()]]


def _dtype(group: WorkerGroup) -> str:
    """Return the dtype of passes on a GPU."""
    dtype = getattr(group.handle.config, "dtype", "auto")
    return "bfloat16" if dtype == "auto" else str(dtype)


def _flops(model: Transformer | None, work: _Work, config: Any) -> float:
    assert model is not None
    is_scalar = getattr(config, "head", "logprobs") != "logprobs"
    adapter = getattr(config, "lora", None) is not None
    total = 0.0
    for tokens, after, predicted, epochs in work.passes:
        rows: dict[str, Any] = {"after": after, "predicted": 0 if is_scalar else predicted}
        if epochs:
            total += epochs * model.training_flops(tokens, **rows, adapter=adapter)
        else:
            total += model.forward_flops(tokens, **rows)
    return total
