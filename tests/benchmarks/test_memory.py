"""The figures of memory, in small."""

from typing import Any

import pytest


def test_the_head_in_chunks_takes_less_than_logits_made_at_once(load: Any):
    found = load("memory/head_chunks").measure(quick=True)
    assert found["lean_peak_ratio"] < 0.6 and found["lean_time_ratio"] > 0


def test_planned_bytes_are_near_those_of_an_engine(load: Any):
    assert load("operate/plan_memory").measure(quick=True)["plan_memory_error"] < 0.1


@pytest.mark.slow
def test_replayed_routes_bring_the_trainer_nearer_to_its_generator(load: Any):
    assert load("memory/routes").measure(quick=True)["replayed_gap_ratio"] < 1
