"""Sizes of a step: rows, tokens, microbatches, bytes of its samples, and update pipelines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...algorithms.sampling import Sampling
from ...dataflow.batch import Batch, is_ragged
from ...dataflow.column import (
    ADVANTAGES,
    ANSWER,
    CHOSEN_IDS,
    EPISODE_ID,
    PREFERRED,
    PROMPT,
    PROMPT_IDS,
    REJECTED_IDS,
    RESPONSE_IDS,
    RESPONSE_LOGPROBS,
    RESPONSE_VERSIONS,
)
from ...dataflow.graph import SOURCE, Graph, Node
from ...dataflow.operation import Shape
from ...dataflow.source import file_columns
from ...workers.training.engine import ModelConfig
from ...workers.training.memory import CPU_TOKENS, GPU_TOKENS
from ...workers.training.microbatch_plan import OptimizerSteps
from ...workers.training.pipeline_schedule import PipelineSchedule, interleaved
from ..loop.recording import RECORDED
from ..placement import ranks_of_a_replica
from ..run_spec import RunSpec
from ..simulation.costs import CostModel


@dataclass(frozen=True)
class UpdateSizes:
    node: str
    rows: int
    replicas: int
    rows_per_replica: int
    tokens: int
    """Upper bound, with responses of the maximum length."""
    rows_per_microbatch: int
    microbatches_per_replica: int
    """Upper bound."""
    optimizer_steps: int
    epochs: int = 1
    """Number of passes over the rows, each with the same number of optimizer steps."""

    @property
    def steps(self) -> OptimizerSteps:
        return OptimizerSteps(self.epochs, self.optimizer_steps // self.epochs)


@dataclass(frozen=True)
class StepSizes:
    """Sizes of a graph's work in a training step or an evaluation."""

    prompts: int
    rows_of_level: Mapping[int, int]
    """Level of the graph -> number of rows in a step."""
    prompt_tokens: float
    """Mean number of tokens of a prompt, or 0 if the source has none."""
    response_tokens: float
    """Tokens of a response: the largest sampling limit, or the mean length in the data, or 0."""
    sampled: bool

    @property
    def rows(self) -> int:
        """Number of rows on the last level, which the model trains on."""
        return list(self.rows_of_level.values())[-1]

    @property
    def tokens_a_row(self) -> float:
        return self.prompt_tokens + self.response_tokens

    def tokens(self, level: int) -> float:
        return self.prompt_tokens if level == SOURCE else self.tokens_a_row


def step_sizes(graph: Graph, prompts: int) -> StepSizes:
    """Return the sizes of a graph's work on `prompts` source rows."""
    rows, limits = {SOURCE: prompts}, list[int]()
    for node in graph.nodes:
        if node.operation.shape is Shape.EXPAND and node.makes_level is not None:
            number = node.arguments.get("n", 2 if str(PREFERRED) in node.writes else 1)
            rows[node.makes_level] = rows[node.level] * (number if isinstance(number, int) else 1)
        if isinstance(sampling := node.arguments.get("sampling"), Sampling):
            limit = sampling.max_tokens
            if str(EPISODE_ID) in node.writes and node.group is not None:  # a row has several turns
                limit = getattr(graph.handles[node.group].config, "max_context", None) or limit
            limits.append(limit)
    responses = [_mean(graph, str(column)) for column in (RESPONSE_IDS, CHOSEN_IDS, REJECTED_IDS)]
    present = [length for length in responses if length]
    longest = max(limits) if limits else float(np.mean(present)) if present else 0.0
    return StepSizes(prompts, rows, _mean(graph, str(PROMPT_IDS)), longest, bool(limits))


def update_sizes(spec: RunSpec, node: Node, sizes: StepSizes) -> UpdateSizes:
    """Return the sizes of an update in a step, or of another pass by a group with a model."""
    assert node.group is not None
    config: Any = spec.handles[node.group].config
    place = spec.placement[node.group]
    ranks = 1 if spec.backend.in_process else place.ranks
    replicas = max(1, ranks // ranks_of_a_replica(config))
    of_pass = getattr(config, "microbatch_tokens", None) or (
        GPU_TOKENS if place.pool.gpus else CPU_TOKENS
    )
    steps = OptimizerSteps.of_node(node)
    each = math.ceil(sizes.rows / replicas)
    of_step = math.ceil(each / steps.minibatches)
    read = max(1.0, sizes.tokens_a_row - 1)  # the last token of a row is only predicted
    fit = max(1, math.floor(of_pass / read)) if sizes.tokens_a_row else of_step
    return UpdateSizes(
        node=node.name,
        rows=sizes.rows,
        replicas=replicas,
        rows_per_replica=each,
        tokens=round(sizes.rows * sizes.tokens_a_row),
        rows_per_microbatch=min(fit, of_step),
        microbatches_per_replica=steps.number * math.ceil(of_step / fit),
        optimizer_steps=steps.number,
        epochs=steps.epochs,
    )


def sample_bytes(graph: Graph, sizes: StepSizes) -> int:
    """Return an upper bound on the bytes of a step's samples, with the longest responses."""
    number = 4  # [bytes] of a token's id, log-probability, version or advantage
    plain = 72  # [bytes] of a row's identity, reward, finish reason, offsets and share of the metadata
    written = {c for node in graph.nodes for c in node.writes}
    made = {*graph.source.columns} - file_columns(graph.source)
    known = (written | made).intersection(map(str, RECORDED))
    by_token = (RESPONSE_IDS, RESPONSE_LOGPROBS, RESPONSE_VERSIONS, ADVANTAGES)
    of_token = number * sum(str(column) in known for column in by_token)
    texts = _mean(graph, str(PROMPT)) + _mean(graph, str(ANSWER))
    letters = texts / max(1.0, sizes.prompt_tokens) if sizes.prompt_tokens else 1.0
    tokens = number * sizes.prompt_tokens + sizes.response_tokens * (of_token + letters)
    return round(sizes.rows * (plain + texts + tokens))


def _mean(graph: Graph, column: str) -> float:
    """Return a source column's mean number of items or characters; 0 without the column."""
    if column not in graph.source.columns or not len(graph.source.table):
        return 0.0
    values = graph.source.table.select([column])
    if not is_ragged(values.schema.field(column).type):
        return float(np.mean([len(str(value or "")) for value in values[column].to_pylist()]))
    return float(np.mean(Batch.of_table(values).lengths(column)))


# The pipelines of updates


@dataclass(frozen=True)
class PipelinePlan:
    node: str
    stages: int
    chunks: int
    microbatches: int
    """Number of microbatches of an optimizer step on each replica."""
    bubble: float
    """Idle time of a stage, divided by its compute time."""
    played: bool
    """Whether the costs are known. Otherwise, all passes cost the same, and transfers are free."""


def schedule_of(config: ModelConfig, passes: UpdateSizes, chunks: int) -> PipelineSchedule:
    """Return the schedule of an optimizer step. Pads an interleaved schedule to whole rounds."""
    stages = config.pipeline_parallel
    number = max(1, passes.microbatches_per_replica // max(1, passes.optimizer_steps))
    return interleaved(stages, number if chunks == 1 else -(-number // stages) * stages, chunks)


def pipeline_plan(
    config: ModelConfig, passes: UpdateSizes, costs: CostModel | None
) -> PipelinePlan | None:
    """Return the pipeline schedule of an update, or None if its group is not a pipeline. Raises a
    `UserError` if the update's cost has a different number of stages."""
    cost = costs.pipeline(passes.node, config) if costs is not None else None
    if config.pipeline_parallel == 1:
        return None
    if cost is None:
        plain = schedule_of(config, passes, chunks=1)
        return PipelinePlan(passes.node, plain.stages, 1, plain.microbatches, plain.bubble, played=False)
    of_step = passes.epochs / passes.optimizer_steps
    own = passes.rows_per_replica * of_step, passes.tokens / passes.replicas * of_step
    bubble = cost.played(*own).bubble
    return PipelinePlan(
        passes.node, cost.stages, cost.chunks, cost.microbatches(*own), bubble, played=True
    )
