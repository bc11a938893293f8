"""Length bias: numbers by hand, invariance under merging, and the bias of taking the first
responses."""

import math

import numpy as np
import pytest

from weft.algorithms.grpo import length_bias
from weft.dataflow.metrics import merge


def ratio(*parts: tuple[list[int], list[int]]) -> float:
    metric = merge(length_bias(*part) for part in parts)["length_ratio"]
    return metric.value


def test_by_hand():
    assert ratio(([2, 4], [2, 4, 6, 12])) == 0.5
    assert ratio(([6, 12], [2, 4, 6, 12])) == 1.5
    assert ratio(([2, 4, 6, 12], [2, 4, 6, 12])) == 1.0


def test_windows_of_unlike_lengths_do_not_mix():
    """Both windows draw evenly, but most draws come from short prompts. Pooled means would give
    0.28."""
    short, long = ([10] * 90, [10] * 100), ([100] * 10, [100] * 100)
    assert ratio(short, long) == 1.0
    assert ratio(([5, 15], [5, 15]), ([50], [50, 150])) == pytest.approx((20 + 50) / (20 + 100))


@pytest.mark.parametrize("empty", [([], []), ([], [3, 4]), ([], [0, 0]), ([0], [0])])
def test_an_empty_window_reports_and_changes_nothing(empty: tuple[list[int], list[int]]):
    assert math.isnan(ratio(empty))
    assert ratio(empty, ([2, 4], [2, 4, 6, 12])) == 0.5


def test_training_on_the_first_finished_is_seen():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 1000, size=(50, 16))
    first = np.sort(lengths, axis=1)[:, :8]  # the shortest finish first
    biased, fair = (
        length_bias(first, lengths)["length_ratio"],
        length_bias(lengths[:, :8], lengths)["length_ratio"],
    )
    assert biased.value < 0.6 and fair.value == pytest.approx(1.0, abs=0.1)


def test_a_negative_length_is_refused():
    with pytest.raises(ValueError, match="negative length"):
        length_bias([1, -1], [1])
