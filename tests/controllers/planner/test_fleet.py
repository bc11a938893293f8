"""The cheapest fleet against Mélange's cases, and against brute force."""

from __future__ import annotations

import itertools
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from weft.controllers.planner.fleet import GpuKind, cheapest_fleet
from weft.dataflow.errors import UserError

sys.path.insert(0, str(Path(__file__).parent))
from search_cases import CASES


@pytest.mark.parametrize("case", CASES["melange"])
def test_the_cheapest_fleet_is_melanges(case: dict[str, Any]):
    kinds = {name: GpuKind(price, rates) for name, (price, rates) in case["kinds"].items()}
    found = cheapest_fleet(kinds, case["slices"])
    assert found.price == pytest.approx(case["cost"]) and found.gpus == case["fleet"]


def test_a_slice_is_refused_if_no_kind_serves_it():
    kinds = {"small": GpuKind(1, (2, 0)), "large": GpuKind(3, (5, 0))}
    with pytest.raises(UserError, match="no kind of GPU serves slice 1"):
        cheapest_fleet(kinds, (1, 1))
    with pytest.raises(UserError, match="kind 'small' has 2 rates for 3 slices"):
        cheapest_fleet(kinds, (1, 1, 1))


@pytest.mark.parametrize("seed", range(50))
def test_the_search_equals_brute_force_in_random_small_spaces(seed: int):
    chance = random.Random(seed)
    slices = range(chance.randint(1, 5))
    load = [chance.randint(1, 30) for _ in slices]
    kinds = {
        f"kind{k}": GpuKind(chance.randint(1, 6), [chance.choice((0, 1, 2, 5, 20)) for _ in slices])
        for k in range(2)
    } | {"any": GpuKind(chance.randint(4, 9), [chance.choice((1, 4, 10)) for _ in slices])}
    best = math.inf
    for chosen in itertools.product(kinds, repeat=len(load)):
        if all(kinds[name].rates[k] for k, name in enumerate(chosen)):
            needs = {
                name: sum(load[k] / kinds[name].rates[k] for k in slices if chosen[k] == name)
                for name in kinds
            }
            best = min(best, sum(kinds[n].price * math.ceil(gpus - 1e-9) for n, gpus in needs.items()))
    found = cheapest_fleet(kinds, load)
    assert found.price == pytest.approx(best)
    assert sum(kinds[name].price * number for name, number in found.gpus.items()) == found.price
