"""Costs of pipeline-parallel training: by hand, by the schedule, and in a simulated run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_runs import apart, calls, costs
from simulated_runs import run as simulated
from toy import ToyActor, centred, prompts

from weft.controllers.prechecks.plan_sizes import UpdateSizes, pipeline_plan
from weft.controllers.ranks.row_io import num_tokens
from weft.controllers.schedule import Synchronous
from weft.controllers.simulation.backend import Simulated
from weft.controllers.simulation.costs import (
    CostModel,
    LinearCost,
    PipelineCost,
    SequenceParallelCost,
)
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.dataflow.graph import group
from weft.dataflow.tracing import graph
from weft.workers.actor import ActorConfig, ActorWorker
from weft.workers.training.microbatch_plan import OptimizerSteps
from weft.workers.training.pipeline_schedule import interleaved, one_forward_one_backward, run


def test_equal_microbatches_take_the_ideal_time_and_the_bubble():
    # 1,000 tokens at 1 ms take 1 s on the whole model: 0.25 s on each of 4 stages. With 10
    # microbatches, the bubble adds 3 / 10.
    cost = PipelineCost(fixed_s=5, stages=4, microbatch_tokens=100, per_token_s=1e-3)
    assert cost.seconds(10, 1000) == pytest.approx(5 + 0.25 * 1.3)
    assert cost.seconds(0, 0) == 5
    # Interleaved: 12 microbatches are three rounds of four, with a bubble of 3 / 24. With 10, the
    # last two slots are empty.
    two = cost.model_copy(update={"chunks": 2})
    assert two.seconds(12, 1200) == pytest.approx(5 + 0.3 * (1 + 3 / 24))
    assert 5 + 0.25 < two.seconds(10, 1000) < two.seconds(12, 1200)


@settings(deadline=None)
@given(st.integers(1, 100), st.floats(0.01, 1), st.floats(1e-4, 0.01))
def test_times_are_rounded_alike_on_every_machine(tokens: int, per_row_s: float, per_token_s: float):
    cost = PipelineCost(stages=2, microbatch_tokens=100, per_row_s=per_row_s, per_token_s=per_token_s)
    passes = np.full((2, 1), 0.5 * (per_row_s + per_token_s * tokens))
    played = run(interleaved(2, 1, 1), 1 / 3 * passes, (1 - 1 / 3) * passes, [0.0])
    assert cost.seconds(1, tokens) == played.seconds


def test_rows_of_one_length_take_the_same_whether_counted_or_listed():
    cost = PipelineCost(
        stages=2, microbatch_tokens=100, per_token_s=1e-2, per_row_s=0.1, transfer_s=1e-3
    )
    steps = OptimizerSteps(epochs=2, minibatches=2)
    for rows, length in ((7, 30), (8, 100), (5, 101), (1, 1)):
        for chunks in (1, 2):
            made = cost.model_copy(update={"chunks": chunks})
            listed = made.seconds_of_steps(np.full(rows, length), [np.arange(rows)])
            assert made.seconds(rows, rows * length) == pytest.approx(listed.sum())
            twice = made.seconds_of_steps(
                np.full(2 * rows, length), steps.cut(np.arange(2 * rows), (0,))
            )
            assert made.seconds(2 * rows, 2 * rows * length, steps) == pytest.approx(twice.sum())


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 120), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 3),
)
def test_no_lengths_beat_the_least_time(lengths: list[int], stages: int, chunks: int, minibatches: int):
    own, steps = np.array(lengths), OptimizerSteps(2, minibatches)
    shares = tuple(range(1, stages * chunks + 1))
    for cost in (
        LinearCost(fixed_s=1, per_token_s=0.1, per_row_s=1),
        PipelineCost(
            stages=stages,
            chunks=chunks,
            microbatch_tokens=100,
            per_token_s=0.1,
            per_row_s=1,
            shares=shares,
        ),
        SequenceParallelCost(
            ranks=stages, memory_tokens=120, per_token_s=0.1, per_row_s=1, attention_length=50
        ),
    ):
        least = cost.least_s(len(own), float(own.sum()), steps)
        assert least <= cost.seconds_of_steps(own, steps.cut(np.arange(len(own)), (0,))).sum() * (
            1 + 1e-9
        )


def test_rows_are_cut_as_the_engine_cuts_them():
    lengths = np.array([90, 60, 30, 10, 100])
    cost = PipelineCost(
        stages=2, microbatch_tokens=100, per_token_s=1e-2, per_row_s=0.1, transfer_s=1e-3
    )
    # Packed by decreasing length: [100], [90], [60, 30, 10].
    times, tokens = np.array([1.1, 1.0, 1.3]), np.array([100, 90, 100])
    played = run(one_forward_one_backward(2, 3), times / 6, times / 3, tokens * 1e-3)
    assert cost.seconds_of_steps(lengths, [np.arange(5)]).tolist() == [pytest.approx(played.seconds)]
    # Rounds of two need a fourth microbatch, which is empty.
    times, tokens = np.append(times, 0), np.append(tokens, 0)
    played = run(interleaved(2, 4, 2), times / 12, times / 6, tokens * 1e-3)
    assert cost.model_copy(update={"chunks": 2}).seconds_of_steps(lengths, [np.arange(5)]).tolist() == [
        pytest.approx(played.seconds)
    ]


def test_a_stage_with_the_head_holds_up_the_others():
    even = PipelineCost(stages=2, microbatch_tokens=10, per_token_s=0.1)
    uneven = PipelineCost(stages=2, microbatch_tokens=10, per_token_s=0.1, shares=(1, 3))
    assert even.seconds(8, 80) == pytest.approx(4.0 * (1 + 1 / 8))
    assert uneven.seconds(8, 80) == pytest.approx(
        6.0 + 0.25
    )  # the first and last passes of the first stage come before and after
    for wrong in ((1.0,), (0.0, 0.0), (-1.0, 2.0)):
        with pytest.raises(UserError, match="shares must be 2 numbers"):
            PipelineCost(stages=2, microbatch_tokens=10, shares=wrong)


@graph
def several_steps(source: Any, *, rollout: Any, reward: Any, actor: Any, n: int):
    samples = centred(reward.score(rollout.generate(source, n=n)))
    return actor.update(samples, epochs=2, minibatches=2)


def seconds_of_an_update(root: Path, cost: LinearCost, ranks: int, tokens: Sequence[int]) -> float:
    """Return the seconds of four optimizer steps on one replica.

    Each of two prompts has four rows. `tokens` are the lengths of prompt plus response.
    """
    lengths = zip(num_tokens(Batch.of_table(prompts(2).table)).tolist(), tokens, strict=True)
    known = costs(tuple((whole - prompt,) for prompt, whole in lengths))
    backend = Simulated(CostModel(nodes={**known.nodes, "actor.update": cost}))
    schedule = Synchronous(steps=1, prompts_per_step=2, shuffle=False)
    ((began, ended),) = calls(
        simulated(root, schedule, backend, apart(1, ranks), graph=several_steps, number=2, n=4),
        "actor.update",
    )
    return ended - began


def test_each_optimizer_step_fills_and_drains_the_pipeline_in_plan_and_simulation(tmp_path: Path):
    cost = PipelineCost(fixed_s=3, stages=2, microbatch_tokens=20, per_token_s=0.1)
    seconds = seconds_of_an_update(tmp_path, cost, 2, (20, 20))
    # Two epochs of two steps with 4 rows, one per microbatch: 4 s per stage plus a quarter of idle
    # time.
    assert seconds == pytest.approx(3 + 4 * 4 * 1.25)
    sizes = UpdateSizes("actor.update", 8, 1, 8, 160, 1, 16, 4, epochs=2)
    known = CostModel(nodes={"actor.update": cost})
    plan = pipeline_plan(ActorConfig(model="m", pipeline_parallel=2), sizes, known)
    assert plan is not None and (plan.microbatches, plan.bubble) == (4, pytest.approx(1 / 4))
    assert cost.seconds(8, 160, sizes.steps) == pytest.approx(seconds)


def test_groups_of_ranks_are_chosen_for_each_optimizer_step(tmp_path: Path):
    cost = SequenceParallelCost(
        fixed_s=3, ranks=4, memory_tokens=100, per_token_s=0.01, exchange_s={2: 0.01, 4: 0.03}
    )
    # In one step, each of two groups of two ranks has long rows of 2 s each. In steps of four rows,
    # some steps have more long rows than others.
    seconds = seconds_of_an_update(tmp_path, cost, 4, (200, 20))
    cuts = OptimizerSteps(2, 2).cut(np.arange(8), key=(0, 0))
    lengths = np.repeat([200, 20], 4)
    assert seconds == pytest.approx(3 + sum(cost.groups(lengths[cut]).seconds for cut in cuts))
    assert seconds > 3 + 2 * cost.groups(lengths).seconds, "of each epoch's rows at once"


def test_costs_of_other_ranks_are_refused_before_anything_starts(tmp_path: Path):
    pipeline = PipelineCost(stages=2, microbatch_tokens=12, per_token_s=0.1)
    with pytest.raises(
        UserError, match="costs of 'actor': replicas of 2 ranks do not divide the 1 of 'actor'"
    ):
        seconds_of_an_update(tmp_path, pipeline, 1, (20, 20))
    shared = SequenceParallelCost(ranks=4, memory_tokens=100, per_token_s=0.01)
    with pytest.raises(UserError, match="replicas of 4 ranks do not divide the 2 of 'actor'"):
        seconds_of_an_update(tmp_path, shared, 2, (20, 20))
    pair: Any = group(ActorWorker, model="m", tensor_parallel=2)
    with pytest.raises(UserError, match="is for 4 ranks, but a replica of 'actor' has 2 ranks"):
        Simulated(CostModel(nodes={"actor.update": shared})).check(apart(1, 4), {"actor": pair})
    own: Any = group(ToyActor, ranks_per_replica=3)
    with pytest.raises(
        UserError, match="for a pipeline of 2 stages, but a replica of 'actor' has 3 ranks"
    ):
        Simulated(CostModel(nodes={"actor.update": pipeline})).check(apart(1, 3), {"actor": own})
    actor: Any = group(ActorWorker, model="m")
    with pytest.raises(UserError, match="is for 4 ranks, but a replica of 'actor' has 1 ranks"):
        Simulated(CostModel(nodes={"actor.update": shared})).check(apart(1, 4), {"actor": actor})
    with pytest.raises(
        UserError, match="for a pipeline of 2 stages, but its group has pipeline_parallel=1"
    ):
        Simulated(CostModel(nodes={"actor.update": pipeline})).check(apart(1, 1), {"actor": actor})
