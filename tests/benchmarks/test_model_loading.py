"""Bytes that a rank reads and holds while it loads a model."""

from typing import Any

import pytest


@pytest.mark.slow
def test_each_of_two_ranks_reads_and_holds_little_more_than_its_half_of_a_model(load: Any):
    found = load("model_loading").measure(ranks=2, small=True)
    assert 0.9 < found["read_ratio"] < 1.1
    assert 1 <= found["held_ratio"] < 1.3
    assert found["start_held_ratio"] >= found["held_ratio"]
