"""The benchmark of the planner: operations of twelve families, against torch's count."""

from typing import Any

import pytest

from weft.workers.models.transformer import Transformer


def test_operations_of_twelve_families_are_those_that_torch_counts(load: Any):
    flops = load("planner/flops")
    assert len(flops.FAMILIES) == 12
    found = flops.measure()
    assert found["flops_error"] <= 0.02 and found["parameters_error"] <= 0.02


def test_a_wrong_size_shows_in_the_error(load: Any, monkeypatch: pytest.MonkeyPatch):
    flops, of = load("planner/flops"), Transformer.of
    monkeypatch.setattr(Transformer, "of", lambda settings: of({**settings, "num_key_value_heads": 4}))
    errors = flops.errors_of(*flops.FAMILIES["Qwen3"])
    assert errors["forward"] > 0.02 and errors["training"] > 0.02
