"""Metrics merge exactly, in any order."""

import math
import random
import statistics
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.dataflow.errors import UserError
from weft.dataflow.metrics import Max, Mean, Std, Sum, merge


def test_a_mean_is_weighted_and_nan_without_weight():
    assert (Mean(6.0, 3.0) + Mean(2.0, 1.0)).value == 2.0
    assert math.isnan(Mean(0.0, 0.0).value)
    assert (Mean(0.0, 0.0) + Mean(3.0, 2.0)).value == 1.5


def test_nan_is_not_lost_in_a_maximum():
    assert math.isnan((Max(math.nan) + Max(1.0)).value) and math.isnan((Max(1.0) + Max(math.nan)).value)


def test_merging_nothing_is_nothing():
    assert merge([]) == {} and merge([{}, {}]) == {}


def test_a_name_has_one_kind():
    with pytest.raises(UserError, match="metric 'loss' is a Mean in one part and a Sum in another"):
        merge([{"loss": Mean(1.0)}, {"loss": Sum(1.0)}])


@given(
    values=st.lists(st.tuples(st.integers(-50, 50), st.integers(1, 9)), min_size=1),
    cut=st.integers(0, 20),
)
def test_merging_in_parts_or_at_once_is_the_same(values: list[tuple[int, int]], cut: int):
    parts = [{"mean": Mean(v, w), "max": Max(v), "sum": Sum(v)} for v, w in values]
    at_once = merge(parts)
    assert merge([merge(parts[:cut]), merge(parts[cut:])]) == at_once == merge(parts[::-1])
    assert at_once["mean"].value == sum(v for v, _ in values) / sum(w for _, w in values)
    assert at_once["max"].value == max(v for v, _ in values) and at_once["sum"].value == sum(
        v for v, _ in values
    )


@given(
    values=st.lists(st.integers(-50, 50), min_size=1),
    cut=st.integers(0, 20),
    offset=st.sampled_from([0, 10**8]),
)
def test_a_deviation_is_that_of_all_values_however_they_were_cut(
    values: list[int], cut: int, offset: int
):
    moved = [float(value + offset) for value in values]
    found = (Std.of(moved[:cut]) + Std.of(moved[cut:])).value
    assert found == pytest.approx(statistics.pstdev(values), abs=1e-6), (
        "also of values that are far from 0"
    )
    assert math.isnan(Std.of([]).value) and (Std.of([]) + Std.of([])) == Std.of([])


@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    seed=st.integers(0, 9),
)
def test_metrics_are_bit_identical_however_rows_arrive(values: list[float], cuts: list[int], seed: int):
    mixed = random.Random(seed).sample(values, len(values))
    ends = sorted({0, *cuts, len(values)})
    parts = [mixed[start:end] for start, end in pairwise(ends)]
    found = merge(
        {"mean": Mean.of(part), "std": Std.of(part), "sum": Sum(sum(part[:1]))} for part in parts
    )
    assert found["mean"] == Mean.of(values) and found["std"] == Std.of(values)
    assert merge({"mean": Mean(value), "sum": Sum(value)} for value in values) == merge(
        {"mean": Mean(value), "sum": Sum(value)} for value in mixed
    )


@settings(deadline=None)
@given(
    episodes=st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(1, 9)), min_size=1, max_size=5),
    cut=st.integers(0, 20),
    seed=st.integers(0, 9),
)
def test_rows_that_share_a_weight_of_one_count_as_one_value(
    episodes: list[tuple[float, int]], cut: int, seed: int
):
    rows = [(value, 1 / number) for value, number in episodes for _ in range(number)]
    rows = random.Random(seed).sample(rows, len(rows))
    for kind in (Mean, Std):
        one, other = (
            kind.of([value for value, _ in part], [weight for _, weight in part])
            for part in (rows[:cut], rows[cut:])
        )
        expected = kind.of([value for value, _ in episodes]).value
        # Rounded weights of a few values hardly move a mean, but may move the rest of a deviation.
        assert merge([{"m": one}, {"m": other}])["m"].value == pytest.approx(
            expected, rel=1e-9, abs=1e-2
        )
    same = Std.of([0.1] * len(rows), [weight for _, weight in rows])
    assert same.value == 0 and same.number == pytest.approx(len(episodes))


def test_values_beyond_floats_are_no_error():
    assert math.isnan(Std.of([math.nan, 1.0]).value) and math.isnan(Std.of([math.inf]).value)
    assert (
        math.isnan(Std.of([1e200, 1.0]).value)
        and merge([{"x": Mean(math.inf)}, {"x": Mean(1.0)}])["x"].value == math.inf
    )
    assert math.isnan(Mean.of([math.inf, -math.inf]).value) and Mean.of([1e308, 1e308]).value == math.inf
