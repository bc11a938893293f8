"""Plans against runs: examples take the planned memory."""

from typing import Any

import pytest


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
def test_examples_take_the_planned_memory_with_two_ranks_per_group(load: Any):
    assert load("operate/plan_runs").measure()["plan_resident_error"] < 0.1


@pytest.mark.slow
def test_tensors_of_an_engine_take_the_planned_bytes(load: Any):
    assert load("operate/plan_memory").measure()["plan_memory_error"] < 0.1
