"""The memory figures at small size."""

from typing import Any

import pytest
import torch


def test_the_head_in_chunks_takes_less_than_logits_made_at_once(load: Any):
    found = load("memory/head_chunks").measure(quick=True)
    assert found["lean_peak_ratio"] < 0.6 and found["lean_time_ratio"] > 0


def test_planned_bytes_are_near_those_of_an_engine(load: Any):
    assert load("operate/plan_memory").measure(quick=True)["plan_memory_error"] < 0.1


def test_a_failed_check_is_one_line_with_the_largest_difference(load: Any):
    models = load("memory/models")
    expected = {"a": torch.zeros(2, 3), "b": torch.full((2,), 4.0)}
    found = {"a": torch.zeros(2, 3), "b": torch.tensor([4.0, 5.0])}
    result = {
        "gradient": models.difference(found, expected),
        "saved": models.Error(0.0),
        "gap": "TimeoutError: late",
    }
    assert models.failures(result, ("saved", "gradient", "LoRA", "gap")) == [
        "gradient: 1.8e-01 and not 0.0001 at most; b[1] is 5, not 4",
        "LoRA: was not reached",
        "gap: TimeoutError: late",
    ]
    assert models.difference({"a": expected["a"]}, expected).where == "only one has b"


@pytest.mark.slow
def test_replayed_routes_bring_the_trainer_nearer_to_its_generator(load: Any):
    assert load("memory/routes").measure(quick=True)["replayed_gap_ratio"] < 1
