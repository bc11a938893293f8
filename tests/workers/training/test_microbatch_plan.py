"""Microbatches of ranks in lockstep, against a lower bound."""

import itertools
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from weft.workers.dispatch import RowCost, balance
from weft.workers.training.microbatch_plan import (
    even_microbatches,
    level_microbatches,
    plan_microbatches,
)

LIMIT = 16_384
COST = RowCost(70_000)  # Qwen2.5-7B


def lockstep(plans: Sequence[Sequence[np.ndarray]], costs: Sequence[np.ndarray]) -> float:
    """Return the cost of a step: the sum over k of the most expensive k-th microbatch of any
    rank."""
    of_parts = np.zeros((len(plans), max(map(len, plans))))
    for rank, (plan, of_rows) in enumerate(zip(plans, costs, strict=True)):
        of_parts[rank, : len(plan)] = [of_rows[part].sum() for part in plan]
    return of_parts.max(0).sum()


@pytest.mark.parametrize(
    ("rows", "median", "full", "level", "even"),
    [(64, 500, 1.03, 1.04, 1.005), (64, 1500, 1.09, 1.06, 1.05), (16, 3000, 1.12, 1.08, 1.07)],
)
def test_microbatches_of_ranks_in_lockstep_are_near_the_bound(
    rows: int, median: int, full: float, level: float, even: float
):
    chance, ranks = np.random.default_rng(0), 8
    found: list[list[float]] = []
    for _ in range(5):
        lengths = np.clip(chance.lognormal(np.log(median), 1.0, rows * ranks), 64, LIMIT).astype(int)
        shares = [lengths[share] for share in balance(COST(lengths), ranks)]
        costs = [COST(own) for own in shares]
        cuts = [partial(plan_microbatches, own, packed=True) for own in shares]
        plans = [[cut(LIMIT) for cut in cuts]]
        number = max(map(len, plans[0]))
        plans.append([])
        for cut, own in zip(cuts, costs, strict=True):
            plans[1].append(
                level_microbatches(cut, lambda part, own=own: own[part].sum(), number, LIMIT)
            )
        plans.append([])
        for own, of_rows in zip(shares, costs, strict=True):
            plan = even_microbatches(own, of_rows, number, LIMIT, pads=False)
            assert plan is not None
            plans[2].append(plan)
        for own, plan in itertools.chain(
            zip(shares, plans[1], strict=True), zip(shares, plans[2], strict=True)
        ):
            assert len(plan) <= number and sorted(np.concatenate(plan)) == list(range(len(own)))
            assert all(own[part].sum() <= LIMIT for part in plan)
        found.append([lockstep(each, costs) * ranks / COST(lengths).sum() for each in plans])
    assert np.min(found) > 1 - 1e-9, "the bound is one"
    gaps = np.mean(found, axis=0)
    assert gaps[0] > full and gaps[1] < level and gaps[2] < even, gaps


def test_rows_that_attention_pads_and_groups_keep_to_their_limits():
    lengths = np.array([80, *[10] * 12])
    fitting = even_microbatches(lengths, lengths, 3, 100, pads=True)
    assert fitting is not None and all(len(part) * lengths[part].max() <= 200 for part in fitting)
    assert even_microbatches(np.array([80, *[5] * 24]), np.ones(25), 2, 100, pads=True) is None
    groups = np.array([4, 4, 9, 9, 9])
    together = even_microbatches(
        np.array([3, 2, 1, 1, 1]), np.array([3, 2, 1, 1, 1]), 2, 5, pads=True, groups=groups
    )
    assert together is not None and [part.tolist() for part in together] == [[0, 1], [2, 3, 4]]
    alone = even_microbatches(np.array([50, 1]), np.array([50, 1]), 2, 10, pads=True)
    assert alone is not None and [part.tolist() for part in alone] == [[0], [1]], (
        "one row is more than the limit"
    )


def test_too_long_or_missing_rows_make_fewer_microbatches():
    cut = partial(plan_microbatches, np.array([50, 70, 1]), packed=True)
    assert [part.tolist() for part in level_microbatches(cut, len, number=4, max_tokens=10)] == [
        [1],
        [0],
        [2],
    ]
    none = partial(plan_microbatches, np.zeros(0, np.int64), packed=True)
    assert level_microbatches(none, len, number=3, max_tokens=10) == []
    assert even_microbatches(np.zeros(0, np.int64), np.zeros(0), 3, 10, pads=True) == []
