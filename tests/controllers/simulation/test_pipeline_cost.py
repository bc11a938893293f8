"""Training nodes that are pipelines: seconds by hand, by the schedule, and in a simulated run."""

from pathlib import Path

import numpy as np
import pytest
from simulated_runs import calls, costs
from simulated_runs import run as simulated
from toy import prompts

from weft.controllers.ranks.row_io import num_tokens
from weft.controllers.schedule import Synchronous
from weft.controllers.simulation.costs import CostModel, FixedLengths, PipelineCost
from weft.controllers.simulation.simulated import Simulated
from weft.dataflow.batch import Batch
from weft.dataflow.errors import UserError
from weft.workers.training.pipeline_schedule import interleaved, one_forward_one_backward, run


def test_equal_microbatches_take_the_ideal_time_and_the_bubble():
    # 1,000 tokens at 1 ms are 1 s for the whole model; in 10 microbatches on 4 stages 0.25 s and 3 / 10 of it.
    cost = PipelineCost(fixed_s=5, stages=4, microbatch_tokens=100, per_token_s=1e-3)
    assert cost.seconds(10, 1000) == pytest.approx(5 + 0.25 * 1.3)
    assert cost.seconds(10, 1000, fixed=False) == pytest.approx(0.25 * 1.3)
    assert cost.seconds(0, 0) == 5
    # Interleaved, they become 12 microbatches, and the bubble 3 / 24.
    two = cost.model_copy(update={"chunks": 2})
    assert two.seconds(10, 1000) == pytest.approx(5 + 0.25 * (1 + 3 / 24))


def test_rows_are_cut_as_the_engine_cuts_them():
    lengths = np.array([90, 60, 30, 10, 100])
    cost = PipelineCost(stages=2, microbatch_tokens=100, per_token_s=1e-2, per_row_s=0.1, transfer_s=1e-3)
    # The longest first, packed: [100], [90], [60, 30, 10].
    times, tokens = np.array([1.1, 1.0, 1.3]), np.array([100, 90, 100])
    played = run(one_forward_one_backward(2, 3), times / 6, times / 3, tokens * 1e-3)
    assert cost.seconds_of(lengths) == pytest.approx(played.seconds)
    # In rounds of two stages there is a fourth one, which is empty.
    times, tokens = np.append(times, 0), np.append(tokens, 0)
    played = run(interleaved(2, 4, 2), times / 12, times / 6, tokens * 1e-3)
    assert cost.model_copy(update={"chunks": 2}).seconds_of(lengths) == pytest.approx(played.seconds)


def test_a_stage_with_the_head_holds_up_the_others():
    even = PipelineCost(stages=2, microbatch_tokens=10, per_token_s=0.1)
    uneven = PipelineCost(stages=2, microbatch_tokens=10, per_token_s=0.1, shares=(1, 3))
    assert even.seconds(8, 80) == pytest.approx(4.0 * (1 + 1 / 8))
    assert uneven.seconds(8, 80) == pytest.approx(
        6.0 + 0.25
    )  # the first stage's first and last passes come before and after
    for wrong in ((1.0,), (0.0, 0.0), (-1.0, 2.0)):
        with pytest.raises(UserError, match="shares must be 2 numbers"):
            PipelineCost(stages=2, microbatch_tokens=10, shares=wrong)


def test_a_simulated_update_takes_what_its_rows_take_in_the_pipeline(tmp_path: Path):
    pipeline = PipelineCost(stages=2, microbatch_tokens=12, per_token_s=0.1)
    known = costs(FixedLengths(lengths=((9, 3), (5, 7))))
    nodes = {**known.nodes, "actor.update": pipeline}
    driver = simulated(
        tmp_path, Synchronous(steps=1, prompts_per_step=2, shuffle=False), Simulated(CostModel(nodes=nodes)), number=2
    )
    first, second = num_tokens(Batch.of_table(prompts(2).table)).tolist()
    expected = pipeline.seconds_of(np.array([first + 9, first + 3, second + 5, second + 7]))
    ((began, ended),) = calls(driver, "actor.update")
    assert ended - began == pytest.approx(expected)
