"""Placement search against the results of HybridFlow's mapper, and against brute force."""

from __future__ import annotations

import itertools
import math
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from weft.controllers.planner.options import Strategy, meshes, options, strategies
from weft.controllers.planner.placement_search import (
    FoundPlacement,
    PlacementSearch,
    allocations,
    generation_tensor_parallel,
    set_partitions,
)
from weft.dataflow.errors import UserError

sys.path.insert(0, str(Path(__file__).parent))
from search_cases import CASES, MODELS, hybridflow_bytes, hybridflow_search, hybridflow_seconds


def name_of(found: FoundPlacement) -> str:
    return " | ".join(sorted("+".join(sorted(each.strategies)) for each in found.sets))


def gpus_of(found: FoundPlacement) -> dict[str, int]:
    return {"+".join(sorted(each.strategies)): each.gpus for each in found.sets}


def test_set_partitions_are_counted_by_bell_numbers():
    assert [len(list(set_partitions(range(k)))) for k in range(1, 7)] == [1, 2, 5, 15, 52, 203]


def test_meshes_strategies_and_options_are_as_many_as_in_realhf():
    for nodes, number in CASES["real_meshes"].items():
        assert len(meshes(int(nodes), 8, smallest=4)) == number
    for gpus, number in CASES["real_strategies"].items():
        assert len(strategies(int(gpus), 8)) == number
    for nodes, number in CASES["real_options"].items():
        assert len(options(int(nodes), 8, smallest=4)) == number


def test_stages_are_even_parts_of_a_node_or_whole_nodes_where_that_is_possible():
    assert {way.tp * way.dp for way in strategies(48, 8)} == {1, 2, 4, 8, 16, 24, 48}
    assert strategies(12, 8, pipelines=(1, 2)) == tuple(
        Strategy(pp, tp, 12 // pp // tp) for pp in (1, 2) for tp in (1, 2, 4) if 12 % (pp * tp) == 0
    )
    assert strategies(3, 8) == (Strategy(1, 1, 3), Strategy(3, 1, 1))
    assert max(way.tp for way in strategies(64, 4)) == 4


@pytest.mark.parametrize("models", CASES["hf_min_alloc"])
def test_sets_of_models_need_hybridflows_smallest_allocation(models: str):
    assert hybridflow_search(8).min_gpus(models.split("+"), 16) == CASES["hf_min_alloc"][models]


@pytest.mark.parametrize("key", CASES["hf_map"])
def test_every_set_partition_has_the_cost_of_hybridflows_mapper(key: str):
    gpus, node_gpus, step = map(int, re.findall(r"\d+", key))
    wanted = CASES["hf_map"][key]
    search = hybridflow_search(node_gpus)
    found = {name_of(each): each for each in search.placements(gpus, step)}
    assert len(found) == wanted["placements_that_fit"]
    for name, (cost, split) in wanted["best_of_placement"].items():
        assert found[name].seconds == pytest.approx(cost, abs=1e-6), name
        assert gpus_of(found[name]) == split, name
    best = next(iter(found.values()))
    assert best.seconds == pytest.approx(wanted["cost"], abs=1e-6)
    assert {
        "+".join(sorted(each.strategies)): {
            "gpus": each.gpus,
            "plans": {name: list(way) for name, way in each.strategies.items()},
        }
        for each in best.sets
    } == wanted["plan"]


@pytest.mark.parametrize("key", CASES["hf_map"])
def test_as_many_allocations_are_tried_as_by_hybridflows_mapper(key: str):
    gpus, node_gpus, step = map(int, re.findall(r"\d+", key))
    search, tried = hybridflow_search(node_gpus), 0
    for partition in set_partitions(tuple(MODELS)):
        least = [search.min_gpus(models, gpus) for models in partition]
        if None not in least:
            tried += len(list(allocations(gpus, [number or 0 for number in least], step)))
    assert tried == CASES["hf_map"][key]["pairs"]


def test_a_model_is_simulated_once_for_each_of_its_strategies():
    asked: list[tuple[str, Strategy]] = []

    def seconds(model: str, way: Strategy) -> list[float]:
        asked.append((model, way))
        return hybridflow_seconds(model, way)

    given: dict[str, Any] = {"held_bytes": hybridflow_bytes, "node_gpus": 8, "gpu_bytes": 80}
    PlacementSearch(tuple(MODELS), seconds=seconds, **given).placements(gpus=64, step=8)
    assert len(asked) == len(set(asked))


def test_models_share_small_clusters_and_the_critic_leaves_large_ones():
    placements = {gpus: hybridflow_search(8).placements(gpus, gpus // 4) for gpus in (16, 32, 64)}
    assert len(placements[16][0].sets) == 1
    assert name_of(placements[64][0]) == "actor+reference+reward | critic"


@pytest.mark.parametrize("case", CASES["hf_gen_tp"])
def test_generation_takes_the_smallest_shards_that_fit_beside_training(case: dict[str, Any]):
    cached = 2 * 2 * case["layers"] * case["kv_heads"] * case["head"] * case["batch"] * case["length"]
    sizes = {"weight_bytes": case["params_bytes"], "cache_bytes": cached, "free_bytes": case["free"]}
    assert generation_tensor_parallel(case["train_tp"], gpus=case["gpus"], **sizes) == case["t_g"]


def test_generation_without_room_has_no_shards():
    assert (
        generation_tensor_parallel(8, weight_bytes=16, cache_bytes=64, gpus=16, free_bytes=5.9) is None
    )


def test_a_model_may_need_more_memory_in_its_turn():
    given: dict[str, Any] = {
        "seconds": lambda model, way: (1.0,),
        "held_bytes": lambda model, way: 1.0,
        "active_bytes": lambda model, way: {"actor": 4.0, "critic": 3.0}[model] / way.tp,
        "node_gpus": 2,
    }
    # Both hold 1, and the actor needs 4 more in its turn, or half of it with two shards.
    for gpu_bytes, needed in ((6, 1), (5.9, 2), (4, 2)):
        search = PlacementSearch(("actor", "critic"), gpu_bytes=gpu_bytes, **given)
        assert search.min_gpus(("actor", "critic"), 2) == needed
    assert PlacementSearch(("actor",), gpu_bytes=2.9, **given).min_gpus(("actor",), 2) is None


def test_a_model_that_cannot_run_with_a_strategy_does_not():
    search = PlacementSearch(
        ("actor", "critic"),
        seconds=lambda model, way: (1.0 if way.tp == 2 else math.inf,),
        held_bytes=lambda model, way: 0.0,
        node_gpus=2,
        gpu_bytes=1,
    )
    with pytest.raises(UserError, match="no placement of actor, critic fits on 5 devices"):
        search.placements(gpus=5)
    assert search.min_gpus(("actor",), 4) == 2
    best = search.placements(gpus=4)[0]
    assert {way.tp for each in best.sets for way in each.strategies.values()} == {2}


def test_models_that_fit_nowhere_are_refused():
    search = PlacementSearch(
        ("actor", "critic"),
        seconds=lambda model, way: (1.0,),
        held_bytes=lambda model, way: 3.0,
        node_gpus=1,
        gpu_bytes=2,
    )
    with pytest.raises(UserError, match="no placement of actor, critic fits on 4 devices of 2 bytes"):
        search.placements(gpus=4)


def brute_force(
    models: Sequence[str], gpus: int, seconds: Any, held: Any, active: Any, gpu_bytes: float
) -> float:
    """Try every assignment of models to sets, every allocation, and every strategy of every model."""
    best = math.inf
    for sets in itertools.product(range(len(models)), repeat=len(models)):
        if sorted(set(sets)) != list(range(len(set(sets)))):
            continue
        for split in itertools.product(range(1, gpus + 1), repeat=len(set(sets))):
            if sum(split) != gpus:
                continue
            for ways in itertools.product(*(strategies(split[own], 2) for own in sets)):
                own = [
                    [k for k, each in enumerate(sets) if each == number] for number in range(len(split))
                ]
                memory = (
                    sum(held(models[k], ways[k]) for k in members)
                    + max(active(models[k], ways[k]) for k in members)
                    for members in own
                )
                if max(memory) <= gpu_bytes:
                    stages = [
                        max(sum(seconds(models[k], ways[k])[stage] for k in members) for members in own)
                        for stage in range(2)
                    ]
                    best = min(best, sum(stages))
    return best


@pytest.mark.parametrize("seed", range(50))
def test_the_search_equals_brute_force_in_random_small_spaces(seed: int):
    chance = random.Random(seed)
    models = ("a", "b", "c")[: chance.randint(2, 3)]
    gpus = chance.randint(len(models), 4)
    drawn: dict[Any, Any] = {}

    def seconds(model: str, way: Strategy) -> list[int]:
        return drawn.setdefault((model, way), [chance.randint(1, 20), chance.randint(1, 20)])

    def held(model: str, way: Strategy) -> int:
        return drawn.setdefault((model, way, "held"), chance.randint(1, 6))

    def active(model: str, way: Strategy) -> int:
        return drawn.setdefault((model, way, "active"), chance.randint(0, 6))

    wanted = brute_force(models, gpus, seconds, held, active, gpu_bytes=10)
    search = PlacementSearch(
        models, seconds=seconds, held_bytes=held, active_bytes=active, node_gpus=2, gpu_bytes=10
    )
    if math.isinf(wanted):
        with pytest.raises(UserError):
            search.placements(gpus)
    else:
        assert search.placements(gpus)[0].seconds == wanted
