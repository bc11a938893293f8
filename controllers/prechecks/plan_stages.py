"""Stages of a pipeline in a plan: what each holds, and how long it is idle."""

from __future__ import annotations

from dataclasses import dataclass

from ...workers.training.engine import ModelConfig
from ...workers.training.lora import Lora
from ...workers.training.memory import ModelSize, TrainingMemory, training_memory
from ...workers.training.pipeline_schedule import PipelineSchedule, interleaved
from .plan_sizes import UpdateSizes
from .simulated_costs import CostModel


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


def pipeline_plan(config: ModelConfig, passes: UpdateSizes, costs: CostModel | None) -> PipelinePlan | None:
    """How an update goes through a pipeline; None: its group is none.

    Raises:
        UserError: its cost is of another number of stages.
    """
    cost = costs.pipeline(passes.node, config) if costs is not None else None
    if config.pipeline_parallel == 1:
        return None
    if cost is None:
        schedule = schedule_of(config, passes, chunks=1)
        return PipelinePlan(passes.node, schedule.stages, 1, schedule.microbatches, schedule.bubble, played=False)
    of_step = passes.epochs / passes.optimizer_steps
    own = passes.rows_per_replica * of_step, passes.tokens / passes.replicas * of_step
    played = cost.played(*own)
    return PipelinePlan(passes.node, cost.stages, cost.chunks, cost.microbatches(*own), played.bubble, played=True)


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
        made = training_memory(own, config, ranks=max(1, ranks // number), trains=trains, lora=lora, saves=saves)
        in_flight = schedule.in_flight(stage) / chunks if trains else 1.0
        kept = round(activations * in_flight * own.layers / size.layers)
        found.append(StageMemory(own.layers, in_flight, made, kept))
    return tuple(found)
