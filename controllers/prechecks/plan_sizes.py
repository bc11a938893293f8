"""Sizes of a step: prompts, rows, tokens, microbatches, optimizer steps; and the bytes of its samples on the disk."""

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
from ...workers.training.lora import Lora
from ...workers.training.memory import CPU_TOKENS, GPU_TOKENS, ModelSize, TrainingMemory, training_memory
from ...workers.training.microbatch_plan import OptimizerSteps
from ...workers.training.pipeline_schedule import PipelineSchedule, interleaved
from ..loop.recording import RECORDED
from ..placement import ranks_of_a_replica
from ..run_spec import RunSpec
from .simulated_costs import CostModel

NUMBER = 4
"""Bytes of a token's id, of its log-probability, of its version, and of its advantage in a file of samples."""
ROW = 72
"""Bytes of a row besides: identity, reward, reason of the end, offsets of its lists and texts, its part of the file's own."""


@dataclass(frozen=True)
class UpdateSizes:
    """What an update trains on in a step."""

    node: str
    rows: int
    replicas: int
    rows_per_replica: int
    tokens: int
    """At most: with responses of the longest kind."""
    rows_per_microbatch: int
    microbatches_per_replica: int
    """At most."""
    optimizer_steps: int
    epochs: int = 1
    """Passes over the rows, each of equally many optimizer steps."""

    @property
    def steps(self) -> OptimizerSteps:
        """The optimizer steps, as costs take them."""
        return OptimizerSteps(self.epochs, self.optimizer_steps // self.epochs)


@dataclass(frozen=True)
class StepSizes:
    """What a graph has to do with in a step, or an evaluation."""

    prompts: int
    rows_of_level: Mapping[int, int]
    """Level of the graph -> rows of a step."""
    prompt_tokens: float
    """Of a prompt, on average; 0 where the source has none."""
    response_tokens: float
    """Of a response: the longest that may be sampled, or the mean of those in the data; 0 where there is neither."""
    sampled: bool
    """Whether responses are sampled."""

    @property
    def rows(self) -> int:
        """Of the last level: those that are trained on."""
        return list(self.rows_of_level.values())[-1]

    @property
    def tokens_a_row(self) -> float:
        return self.prompt_tokens + self.response_tokens

    def tokens(self, level: int) -> float:
        """Of a row on a level."""
        return self.prompt_tokens if level == SOURCE else self.tokens_a_row


def step_sizes(graph: Graph, prompts: int) -> StepSizes:
    """The sizes of so many rows of the source in this graph."""
    rows, sampling = {SOURCE: prompts}, None
    for node in graph.nodes:
        if node.operation.shape is Shape.EXPAND and node.makes_level is not None:
            number = node.arguments.get("n", 2 if str(PREFERRED) in node.writes else 1)
            rows[node.makes_level] = rows[node.level] * (number if isinstance(number, int) else 1)
        given = node.arguments.get("sampling")
        sampling = given if isinstance(given, Sampling) else sampling
    responses = [_mean(graph, str(column)) for column in (RESPONSE_IDS, CHOSEN_IDS, REJECTED_IDS)]
    present = [length for length in responses if length]
    longest = sampling.max_tokens if sampling is not None else float(np.mean(present)) if present else 0.0
    return StepSizes(prompts, rows, _mean(graph, str(PROMPT_IDS)), longest, sampling is not None)


def update_sizes(spec: RunSpec, node: Node, sizes: StepSizes) -> UpdateSizes:
    """The sizes of an update, or of another pass of a group with a model, in a step."""
    assert node.group is not None
    config: Any = spec.handles[node.group].config
    place = spec.placement[node.group]
    ranks = 1 if spec.backend.in_process else place.ranks
    replicas = max(1, ranks // ranks_of_a_replica(config))
    of_pass = getattr(config, "microbatch_tokens", None) or (
        GPU_TOKENS if place.pool.gpus else CPU_TOKENS
    )
    steps = OptimizerSteps.of(node)
    rows, each = sizes.rows, math.ceil(sizes.rows / replicas)
    of_step = math.ceil(each / steps.minibatches)
    read = max(1.0, sizes.tokens_a_row - 1)  # the last token of a row is only predicted
    fit = max(1, math.floor(of_pass / read)) if sizes.tokens_a_row else of_step
    return UpdateSizes(
        node=node.name,
        rows=rows,
        replicas=replicas,
        rows_per_replica=each,
        tokens=round(rows * sizes.tokens_a_row),
        rows_per_microbatch=min(fit, of_step),
        microbatches_per_replica=steps.number * math.ceil(of_step / fit),
        optimizer_steps=steps.number,
        epochs=steps.epochs,
    )


def sample_bytes(graph: Graph, sizes: StepSizes) -> int:
    """Bytes of the samples of a step, at most: with responses of the longest kind."""
    written = {c for node in graph.nodes for c in node.writes}
    made = {*graph.source.columns} - file_columns(graph.source)
    known = (written | made).intersection(str(column) for column in RECORDED)
    of_token = [
        c for c in (RESPONSE_IDS, RESPONSE_LOGPROBS, RESPONSE_VERSIONS, ADVANTAGES) if str(c) in known
    ]
    texts = sum(
        _mean(graph, str(column)) for column in (PROMPT, ANSWER) if str(column) in graph.source.columns
    )
    letters = texts / max(1.0, sizes.prompt_tokens) if sizes.prompt_tokens else 1.0
    row = (
        ROW
        + NUMBER * sizes.prompt_tokens
        + texts
        + sizes.response_tokens * (NUMBER * len(of_token) + letters)
    )
    return round(sizes.rows * row)


def _mean(graph: Graph, column: str) -> float:
    """Mean length of a column of the source: tokens of a list, bytes of a text; 0 where there is none."""
    if column not in graph.source.columns or not len(graph.source.table):
        return 0.0
    values = graph.source.table.select([column])
    if not is_ragged(values.schema.field(column).type):
        return float(np.mean([len(str(value or "")) for value in values[column].to_pylist()]))
    return float(np.mean(Batch.of_table(values).lengths(column)))


# Plan stages
#
# Stages of a pipeline in a plan: what each holds, and how long it is idle.


@dataclass(frozen=True)
class StageMemory:
    """What each rank of a stage holds."""

    layers: int
    """Of the model."""
    in_flight: float
    """Microbatches whose activations are kept at once; with chunks, parts of one count."""
    made: TrainingMemory
    activations: int
    """Bytes, of all microbatches in flight."""

    @property
    def peak(self) -> int:
        """Bytes in an update, with activations."""
        made = self.made
        exchanged = made.exchanged_beside(self.activations)
        return made.weights + made.gradients + made.moments + made.gathered + exchanged + self.activations


@dataclass(frozen=True)
class PipelinePlan:
    """How an update goes through a pipeline."""

    node: str
    stages: int
    chunks: int
    microbatches: int
    """Of an optimizer step, on each replica."""
    bubble: float
    """Time that a stage is idle over the time that it computes."""
    played: bool
    """With the costs that are known; otherwise with equal costs of all passes, and none of transfers."""


def schedule_of(config: ModelConfig, passes: UpdateSizes, chunks: int) -> PipelineSchedule:
    """The schedule of an optimizer step; interleaved microbatches are filled up to whole rounds."""
    stages = config.pipeline_parallel
    number = max(1, passes.microbatches_per_replica // max(1, passes.optimizer_steps))
    return interleaved(stages, number if chunks == 1 else -(-number // stages) * stages, chunks)


def pipeline_plan(
    config: ModelConfig, passes: UpdateSizes, costs: CostModel | None
) -> PipelinePlan | None:
    """How an update goes through a pipeline; None: its group is none.

    Raises:
        UserError: its cost is of another number of stages.
    """
    cost = costs.pipeline(passes.node, config) if costs is not None else None
    if config.pipeline_parallel == 1:
        return None
    if cost is None:
        schedule = schedule_of(config, passes, chunks=1)
        return PipelinePlan(
            passes.node, schedule.stages, 1, schedule.microbatches, schedule.bubble, played=False
        )
    of_step = passes.epochs / passes.optimizer_steps
    own = passes.rows_per_replica * of_step, passes.tokens / passes.replicas * of_step
    played = cost.played(*own)
    return PipelinePlan(
        passes.node, cost.stages, cost.chunks, cost.microbatches(*own), played.bubble, played=True
    )


def chunks_of(config: ModelConfig, node: str, costs: CostModel | None) -> int:
    """Chunks of a stage, as the costs of the node have them; 1: they say nothing of a pipeline.

    Raises:
        UserError: its cost is of another number of stages.
    """
    cost = costs.pipeline(node, config) if costs is not None else None
    return cost.chunks if cost is not None else 1


def stage_memory(
    size: ModelSize,
    config: ModelConfig,
    passes: UpdateSizes,
    *,
    chunks: int,
    ranks: int,
    activations: int,
    trains: bool,
    lora: Lora | None,
    saves: bool,
) -> tuple[StageMemory, ...]:
    """The memory of each stage. Layers are cut evenly, and the ranks of a stage share what it holds, as those of a group do.

    Args:
        size: of the model.
        config: of the group.
        passes: of its update in a step.
        chunks: of each stage.
        ranks: of the group.
        activations: bytes of one microbatch in the whole model, logits included, which are counted evenly over its layers.
        trains: whether the group is updated; otherwise a stage keeps the activations of one microbatch.
        lora: the adapter that is trained in the model's place.
        saves: whether the run makes checkpoints.
    """
    number = config.pipeline_parallel
    schedule = schedule_of(config, passes, chunks)
    found: list[StageMemory] = []
    for stage, own in enumerate(size.of_stages(number, chunks)):
        made = training_memory(
            own, config, ranks=max(1, ranks // number), trains=trains, lora=lora, saves=saves
        )
        in_flight = schedule.in_flight(stage) / chunks if trains else 1.0
        kept = round(activations * in_flight * own.layers / size.layers)
        found.append(StageMemory(own.layers, in_flight, made, kept))
    return tuple(found)
