"""The resharding benchmark: its counts, and its small setting."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weft.resharding.formulas import Parallelism, Parameter, nodes_of, replicas, three_dimensional
from weft.resharding.weights import ReshardPlan

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "resharding.py"


def test_the_lower_bound_counts_needed_bytes_that_the_device_lacks(load: Any):
    plans = load("resharding/plans")
    source = three_dimensional(
        [Parameter("w", (8, 4), 0)], Parallelism(tp=4)
    )  # two rows of eight bytes per rank
    bounds = plans.lower_bounds(source, replicas([Parameter("w", (8, 4), 0)], 2, 1))
    assert bounds == [16, 32]  # rank 0 has two of its four rows, and rank 1 none
    elsewhere = replicas([Parameter("w", (8, 4), 0)], 2, 1, nodes_of(2, first_node=5))
    assert plans.lower_bounds(source, elsewhere) == [32, 32]


def test_plans_of_small_layouts_move_the_minimum(load: Any):
    found = load("resharding/plans").plan_equals_bound((1, 2))
    assert found == {"plan_equals_bound": True, "plan_pairs": 96, "hybridflow_redundant_bytes": 0}


def test_the_projection_counts_the_busiest_gpu_over_each_link(load: Any):
    plans = load("resharding/plans")
    parameters = [Parameter("w", (8, 4), 0)]
    source = three_dimensional(parameters, Parallelism(tp=2))
    near = ReshardPlan(source, replicas(parameters, 1, 1, nodes_of(3)[2:]))
    assert plans.seconds_of(near) == 64 / plans.NVLINK  # the receiver takes two times 32 bytes
    far = ReshardPlan(source, replicas(parameters, 1, 1, nodes_of(1, first_node=1)))
    assert plans.seconds_of(far) == 64 / plans.NETWORK
    assert plans.seconds_of(far, through_host=True) == 64 / plans.NETWORK + 2 * 64 / plans.HOST


def test_the_delta_of_a_small_step_is_a_small_part_of_the_bytes(load: Any):
    assert 0.01 < load("resharding/deltas").measure(1, small=True)["delta_bytes_share"] < 0.03


@pytest.mark.slow
def test_every_way_carries_weights_in_the_small_setting():
    command = [sys.executable, str(PROGRAM), "--small", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["wire_equals_plan"] is True and figures["plan_equals_bound"] is True
    assert all(seconds > 0 for seconds in figures["seconds"].values())
    assert None not in figures.values()
