"""Sequence-parallel groups of several sizes for rows of uneven length, against exhaustive
search."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.controllers.simulation.sequence_groups import (
    SequenceCost,
    SequenceGroups,
    equal_groups,
    plan_groups,
)
from weft.dataflow.errors import UserError
from weft.workers.dispatch import RowCost

COST = SequenceCost(
    memory_tokens=1000, per_token_s=1e-3, row_cost=RowCost(2000), exchange_s={2: 1e-4, 4: 2e-4, 8: 6e-4}
)


def best_of_all(lengths: list[int], ranks: int, cost: SequenceCost) -> float:
    sizes = range(1, ranks + 1)
    ways = {
        way
        for number in range(1, ranks + 1)
        for way in itertools.combinations_with_replacement(sizes, number)
        if sum(way) == ranks
    }
    found = math.inf
    for way in ways:
        for dealt in itertools.product(range(len(way)), repeat=len(lengths)):
            loads = [0.0] * len(way)
            for length, group in zip(lengths, dealt, strict=True):
                held = length <= way[group] * cost.memory_tokens
                loads[group] += (
                    float(cost.seconds(np.array([length]), way[group])[0]) if held else math.inf
                )
            found = min(found, max(loads))
    return found


def check(plan: SequenceGroups, lengths: list[int], ranks: int, cost: SequenceCost) -> None:
    """Check the invariants of every plan."""
    assert sum(plan.degrees) == ranks
    assert sorted(row for own in plan.rows for row in own) == list(range(len(lengths)))
    for degree, own, seconds in zip(plan.degrees, plan.rows, plan.group_s, strict=True):
        assert all(lengths[row] <= degree * cost.memory_tokens for row in own), "memory"
        assert seconds == pytest.approx(
            sum(float(cost.seconds(np.array([lengths[row]]), degree)[0]) for row in own)
        )
    assert plan.seconds == max(plan.group_s, default=0) >= plan.bound_s * (1 - 1e-9)


def test_plans_of_small_batches_are_near_the_best_of_all():
    chance, gaps, bounds = np.random.default_rng(0), [], []
    for number in range(60):
        ranks = (2, 3, 4)[number % 3]
        most = COST.memory_tokens * ranks
        lengths = np.clip(chance.lognormal(6, 1.2, 5).astype(int) + 1, 1, most).tolist()
        plan = plan_groups(lengths, ranks, COST)
        check(plan, lengths, ranks, COST)
        best = best_of_all(lengths, ranks, COST)
        gaps.append(plan.seconds / best - 1)
        bounds.append(plan.bound_s / best)
    assert max(gaps) < 0.1 and np.mean(gaps) < 0.01, (max(gaps), np.mean(gaps))
    assert max(bounds) <= 1 + 1e-9, "the bound is one"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 16_000), max_size=40), st.sampled_from([16, 17, 24, 40]))
def test_no_plan_exceeds_memory_or_beats_the_bound(lengths: list[int], ranks: int):
    plan = plan_groups(lengths, ranks, COST)
    check(plan, lengths, ranks, COST)
    if ranks % 16 == 0:
        equal = equal_groups(lengths, ranks, 16, COST)
        check(equal, lengths, ranks, COST)
        assert plan.seconds <= equal.seconds * (1 + 1e-9)


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 12, 24])
def test_a_row_may_need_all_ranks_of_any_number(ranks: int):
    """One long row: groups of one size beat neither the bound nor the plan."""
    cost = SequenceCost(memory_tokens=3000, per_token_s=1e-3, exchange_s={2: 1e-4, 4: 3e-4})
    longest = 3000 * ranks
    plan = plan_groups([longest], ranks, cost)
    check(plan, [longest], ranks, cost)
    assert (
        plan.degrees == (ranks,) and plan.seconds == equal_groups([longest], ranks, ranks, cost).seconds
    )
    lengths = [longest // 2, 100, 200]
    for degree in (
        size for size in range(1, ranks + 1) if ranks % size == 0 and size * 3000 >= lengths[0]
    ):
        plan, equal = plan_groups(lengths, ranks, cost), equal_groups(lengths, ranks, degree, cost)
        assert plan.bound_s <= plan.seconds * (1 + 1e-9) <= equal.seconds * (1 + 2e-9)


def test_long_tails_are_quicker_in_groups_of_different_sizes():
    lengths = np.clip(np.random.default_rng(1).lognormal(5.5, 1.0, 512).astype(int), 1, 7_500)
    for ranks in (32, 64):
        plan, equal = plan_groups(lengths, ranks, COST), equal_groups(lengths, ranks, 8, COST)
        check(plan, lengths.tolist(), ranks, COST)
        assert plan.seconds < 0.9 * equal.seconds and plan.gap < 0.1 and len(set(plan.degrees)) > 1


def test_by_hand():
    cost = SequenceCost(memory_tokens=100, per_token_s=0.01, row_cost=RowCost(100), exchange_s={2: 0.01})
    assert cost.seconds(np.array([100, 50]), 1).tolist() == pytest.approx([2.0, 0.75])
    assert cost.seconds(np.array([100]), 4).tolist() == pytest.approx(
        [(2.0 + 1.0) / 4]
    )  # the exchange time of the next smaller degree
    assert replace(cost, exchange_s={1: 1.0}).seconds(np.array([100]), 1).tolist() == [2.0], (
        "one rank exchanges nothing"
    )
    plan = plan_groups([200, 40, 40], 4, cost)
    # 200 tokens need two ranks: (6 + 2) / 2 s. On all four ranks they take 2 s, and the other rows
    # 2 * (0.56 + 0.4) / 4 s more.
    assert (plan.degrees, plan.rows) == ((4,), ((0, 1, 2),))
    assert plan.seconds == pytest.approx(2.0 + 2 * 0.24)
    assert plan_groups([], 4, cost).seconds == 0 == plan_groups([], 4, cost).gap


def test_rows_are_exchanged_where_the_longest_first_is_not_the_best():
    cost = SequenceCost(memory_tokens=1000, per_token_s=0.01, exchange_s={2: 0.01})
    plan = plan_groups(
        [300, 300, 200, 200, 200], 2, cost
    )  # longest first gives 300 + 200 + 200 and 300 + 200
    assert (
        plan.degrees == (1, 1)
        and plan.group_s == pytest.approx((6, 6))
        and plan.seconds == pytest.approx(plan.bound_s)
    )


def test_layouts_that_fit_nowhere_are_named():
    with pytest.raises(
        UserError, match="a row of 8,001 tokens does not fit on 8 ranks of 1,000 tokens each"
    ):
        plan_groups([1, 8001], 8, COST)
    with pytest.raises(UserError, match="a row of 2,001 tokens does not fit on 2 ranks"):
        equal_groups([2001], 8, 2, COST)
    with pytest.raises(UserError, match="groups of 3 ranks do not divide 8 ranks"):
        equal_groups([1], 8, 3, COST)
    with pytest.raises(UserError, match="0 ranks: at least 1"):
        plan_groups([1], 0, COST)


def test_groups_of_one_size_need_not_be_powers_of_two():
    cost = SequenceCost(memory_tokens=100, per_token_s=0.01)
    found = equal_groups([300, 300, 30], 6, 3, cost)
    assert found.degrees == (3, 3) and found.seconds == pytest.approx(1.1)
