"""Pipelines in a plan: memory and idle time of each stage."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.controllers.prechecks.plan import sequence_plan
from weft.controllers.prechecks.plan_memory import stage_memory
from weft.controllers.prechecks.plan_sizes import StepSizes, UpdateSizes, pipeline_plan
from weft.controllers.simulation.costs import (
    CostModel,
    Generation,
    LinearCost,
    PipelineCost,
    SequenceParallelCost,
)
from weft.dataflow.errors import UserError
from weft.workers.actor import ActorConfig
from weft.workers.training.memory import ModelSize
from weft.workers.training.microbatch_plan import OptimizerSteps

LAYER = {"self_attn.q_proj.weight": (8, 8), "mlp.up_proj.weight": (16, 8), "norm.weight": (8,)}
OF_LAYER = 8 * 8 + 16 * 8 + 8


def a_model(layers: int, *, tied: bool = False) -> ModelSize:
    shapes = {f"model.layers.{n}.{name}": shape for n in range(layers) for name, shape in LAYER.items()}
    shapes |= {"model.embed_tokens.weight": (100, 8), "model.norm.weight": (8,)}
    return ModelSize(shapes | ({} if tied else {"lm_head.weight": (100, 8)}), 100, layers, tied)


def a_pipeline(stages: int, **settings: Any) -> ActorConfig:
    return ActorConfig(model="m", pipeline_parallel=stages, gather="once", **settings)


UPDATE = UpdateSizes("actor.update", 64, 2, 32, 6400, 4, 8, 1)
"""8 microbatches per replica."""
ABOUT: dict[str, Any] = {"ranks": 4, "activations": 1200, "trains": True, "lora": None, "saves": False}


def test_each_stage_has_its_layers_and_the_ends_of_the_model():
    for tied in (False, True):
        first, last = a_model(3, tied=tied).of_stages(2)
        assert (first.layers, last.layers) == (2, 1)
        assert first.parameters == 800 + 2 * OF_LAYER
        assert last.parameters == OF_LAYER + 8 + 800  # an untied head, or a copy of the embedding
        assert ("model.embed_tokens.weight" in last.shapes) is tied


def test_memory_of_stages_by_hand():
    found = stage_memory(a_model(4), a_pipeline(2), UPDATE, chunks=1, **ABOUT)
    # 1F1B keeps two microbatches on the first stage and one on the second, each with half of the
    # model. Two ranks share a stage.
    assert [stage.in_flight for stage in found] == [2, 1]
    assert [stage.activations for stage in found] == [1200, 600]
    held = [800 + 2 * OF_LAYER, 800 + 8 + 2 * OF_LAYER]
    assert [stage.made.weights for stage in found] == [4 * number // 2 for number in held]
    assert [stage.made.moments for stage in found] == [8 * number // 2 for number in held]
    made = found[0].made
    assert (
        found[0].peak
        == made.weights + made.gradients + made.moments + made.gathered + made.exchanged + 1200
    )
    # Interleaved, the first stage keeps 2 (p - 1) + (v - 1) p + 1 = 5 chunks of a quarter of the
    # model.
    interleaved = stage_memory(a_model(4), a_pipeline(2), UPDATE, chunks=2, **ABOUT)
    assert [stage.in_flight for stage in interleaved] == [2.5, 1.5]
    # A fifth microbatch completes a third round of two. That makes six, with no more in flight.
    odd = stage_memory(
        a_model(4), a_pipeline(2), replace(UPDATE, microbatches_per_replica=5), chunks=2, **ABOUT
    )
    few = stage_memory(
        a_model(4), a_pipeline(2), replace(UPDATE, microbatches_per_replica=1), chunks=2, **ABOUT
    )
    assert [stage.in_flight for stage in odd] == [2.5, 1.5] and [stage.in_flight for stage in few] == [
        2,
        1.5,
    ]
    frozen = stage_memory(a_model(4), a_pipeline(2), UPDATE, chunks=1, **{**ABOUT, "trains": False})
    assert [stage.activations for stage in frozen] == [600, 600] and frozen[0].made.moments == 0


def test_the_bubble_is_megatrons_unless_costs_are_known():
    plain = pipeline_plan(a_pipeline(4), UPDATE, None)
    assert plain is not None and (plain.microbatches, plain.bubble, plain.played) == (8, 3 / 8, False)
    assert plain.chunks == 1
    halves = pipeline_plan(a_pipeline(4), replace(UPDATE, optimizer_steps=2), None)
    assert halves is not None and (halves.microbatches, halves.bubble) == (4, 3 / 4), (
        "each step drains the pipeline"
    )
    assert pipeline_plan(ActorConfig(model="m"), UPDATE, None) is None
    linear = pipeline_plan(
        a_pipeline(4), UPDATE, CostModel(nodes={"actor.update": LinearCost(per_token_s=1)})
    )
    assert linear == plain
    cost = PipelineCost(stages=4, chunks=2, microbatch_tokens=400, per_token_s=0.01, transfer_s=0.01)
    played = pipeline_plan(a_pipeline(4), UPDATE, CostModel(nodes={"actor.update": cost}))
    assert played is not None and played.played and (played.chunks, played.microbatches) == (2, 8)
    assert played.bubble == pytest.approx(cost.played(32, 3200).bubble) and played.bubble > 3 / 16


def test_groups_for_random_rows_are_compared_with_groups_of_one_size():
    shared = SequenceParallelCost(
        ranks=8, memory_tokens=100, per_token_s=0.01, exchange_s={2: 0.01, 4: 0.02, 8: 0.05}
    )
    lengths = ((380, 20, 20, 20),)
    nodes = {"actor.update": shared, "rollout.generate": Generation(lengths=lengths, decode_step_s=0.1)}
    sizes = StepSizes(2, {0: 2, 1: 8}, 20.0, 400.0, sampled=True)
    update = UpdateSizes("actor.update", 8, 1, 8, 3360, 1, 8, 1)
    found = sequence_plan(update, sizes, CostModel(nodes=nodes), ranks=8)
    assert found is not None and (found.equal_degree, found.degrees) == (4, (7, 1))
    # seven ranks for two rows of 400 tokens, one for six short rows
    assert found.seconds < found.equal_s
    assert sequence_plan(update, sizes, None, ranks=8) is None
    assert (
        sequence_plan(replace(update, node="reward.score"), sizes, CostModel(nodes=nodes), ranks=8)
        is None
    )
    several = sequence_plan(
        replace(update, optimizer_steps=4, epochs=2), sizes, CostModel(nodes=nodes), ranks=8
    )
    cuts = OptimizerSteps(2, 2).cut(np.arange(8), (0, 0))
    rows = [np.tile([400, 40, 40, 40], 2)[cut] for cut in cuts]
    assert several is not None and several.optimizer_steps == 4
    assert several.seconds == pytest.approx(sum(shared.groups(of_step).seconds for of_step in rows))
    assert several.degrees in [shared.groups(of_step).degrees for of_step in rows]
    # Each of two replicas has one of the long rows.
    halves = sequence_plan(update, sizes, CostModel(nodes=nodes), ranks=16)
    assert (
        halves is not None
        and halves.seconds == shared.groups(np.array([400, 40, 40, 40])).seconds < found.seconds
    )
    alike = sequence_plan(update, sizes, CostModel(nodes={"actor.update": shared}), ranks=8)
    assert (
        alike is not None
        and alike.seconds == pytest.approx(shared.seconds(8, 8 * 420))
        and alike.equal_degree == 8
    )
    small = shared.model_copy(update={"memory_tokens": 40})
    with pytest.raises(UserError, match="a row of 400 tokens does not fit on 8 ranks of 40 tokens each"):
        sequence_plan(update, sizes, CostModel(nodes=nodes | {"actor.update": small}), ranks=8)
    six = shared.model_copy(update={"ranks": 6})
    thirds = ((280, 20, 20, 20),)
    of_three = sequence_plan(
        update,
        sizes,
        CostModel(
            nodes=nodes
            | {"actor.update": six, "rollout.generate": Generation(lengths=thirds, decode_step_s=0.1)}
        ),
        ranks=6,
    )
    assert of_three is not None and of_three.equal_degree == 3


def test_a_cost_of_another_pipeline_is_refused():
    cost = PipelineCost(stages=2, microbatch_tokens=400, per_token_s=0.01)
    for stages in (1, 4):
        with pytest.raises(
            UserError, match=f"of 2 stages, but its group has pipeline_parallel={stages}"
        ):
            pipeline_plan(a_pipeline(stages), UPDATE, CostModel(nodes={"actor.update": cost}))


def test_ranks_that_do_not_make_whole_pipelines_are_refused(tmp_path: Path):
    from weft.controllers.node_layout import _replica
    from weft.controllers.placement import Place, ResourcePool
    from weft.dataflow.graph import group
    from weft.workers.actor import ActorWorker

    handle: Any = group(ActorWorker, model="m", pipeline_parallel=2, tensor_parallel=2)
    assert _replica(handle, "actor", Place(ResourcePool("a", cpus=4), ranks=4)) == 4
    with pytest.raises(UserError, match="pipeline_parallel=2 does not divide the 3 ranks of 'actor'"):
        _replica(
            group(ActorWorker, model="m", pipeline_parallel=2),  # pyright: ignore[reportArgumentType]
            "actor",
            Place(ResourcePool("a", cpus=3), ranks=3),
        )  # pyright: ignore
    with pytest.raises(UserError, match="a replica of 'actor' has 4 ranks, which do not divide its 6"):
        _replica(handle, "actor", Place(ResourcePool("a", cpus=6), ranks=6))
