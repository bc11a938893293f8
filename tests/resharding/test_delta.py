"""Deltas: decoding inverts encoding, 1 % of the elements cost less than 3 % of the bytes, and
damage is refused."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.dataflow.errors import WeightSyncError
from weft.resharding.deltas import _MOST_CHANGED, Shadow, apply_delta, bits_of, delta_of, within
from weft.resharding.weights import Box


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([1, 2, 4, 8]))
def test_the_version_before_and_the_delta_make_the_version_after(rng: random.Random, item_bytes: int):
    generator = np.random.default_rng(rng.randrange(1 << 30))
    count = rng.choice([0, 1, 2, 255, 256, 257, 5000])
    before = generator.integers(
        0, 1 << 8 * item_bytes, count, dtype=np.dtype(f"u{item_bytes}"), endpoint=False
    )
    after = before.copy()
    after[generator.random(count) < rng.choice([0, 0.001, 0.01, 0.5, 1])] += 1
    changed = np.flatnonzero(before != after)
    shadow = Shadow()
    assert shadow.changed(0, before) is None
    found = shadow.changed(0, after)
    if found is None:
        assert len(changed) > _MOST_CHANGED * count
    else:
        np.testing.assert_array_equal(found, changed)
    assert (shadow.compared, shadow.differed) == (count, len(changed))
    gaps, values = delta_of(after, changed)
    assert len(values) == len(changed)
    apply_delta(before, gaps, values)
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize(("dtype", "largest"), [(torch.bfloat16, 0.0156), (torch.float32, 0.0129)])
def test_one_element_in_a_hundred_takes_less_than_three_bytes_in_a_hundred(
    dtype: torch.dtype, largest: float
):
    torch.manual_seed(0)
    tensor = torch.randn(1000, 1000).to(dtype)
    changed = np.flatnonzero((torch.rand(1_000_000) < 0.01).numpy())
    num_bytes = sum(part.nbytes for part in delta_of(bits_of(tensor), changed))
    share = num_bytes / (tensor.numel() * tensor.element_size())
    assert 0.01 < share < largest


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False))
def test_positions_in_a_part_of_a_box_are_those_of_its_elements(rng: random.Random):
    outer = Box.full(tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 3))))
    pairs = [sorted(rng.sample(range(extent + 1), 2)) for extent in outer.shape]
    inner = Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))
    marked = np.array([rng.random() < 0.4 for _ in range(outer.numel)], bool).reshape(outer.shape)
    expected = np.flatnonzero(marked[inner.within(outer)])
    np.testing.assert_array_equal(within(np.flatnonzero(marked), outer, inner), expected)


def test_a_shadow_finds_changes_since_the_previous_version():
    shadow, tensor = Shadow(), torch.zeros(30)
    assert shadow.changed(0, bits_of(tensor)) is None  # there is no previous version
    tensor[[3, 29]] *= -1
    found = shadow.changed(0, bits_of(tensor))
    assert found is not None and found.tolist() == [3, 29]  # a zero has changed its sign
    found = shadow.changed(0, bits_of(tensor))
    assert found is not None and found.tolist() == []
    tensor += 1
    assert shadow.changed(0, bits_of(tensor)) is None  # too much has changed
    assert shadow.changed(0, bits_of(tensor.bfloat16())) is None and shadow._bits[0].nbytes == 60
    shadow.forget()
    assert not shadow._bits


@pytest.mark.parametrize(
    ("gaps", "values", "message"),
    [
        ([3], [1, 2], "2 values and positions for 1"),
        ([3, 255], [1], "1 values and positions for 1"),
        ([255], [], "0 values and positions for 0"),
        ([255, 7], [1], "changes element 262 of a box that has 10"),
    ],
)
def test_a_damaged_delta_is_refused_and_nothing_is_written(
    gaps: list[int], values: list[int], message: str
):
    bits = np.zeros(10, np.uint16)
    with pytest.raises(WeightSyncError, match=message):
        apply_delta(bits, np.array(gaps, np.uint8), np.array(values, np.uint16))
    assert not bits.any()
