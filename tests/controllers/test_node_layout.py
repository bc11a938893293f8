"""Placement arithmetic: pools over nodes, the nodes of ranks, and the devices they see."""

from dataclasses import replace
from typing import Any

import pytest
from toy import ToyActor, ToyConfig

from weft.controllers.node_layout import (
    Nodes,
    bundles,
    devices,
    lay_out,
    position,
    start_turns,
)
from weft.controllers.placement import OWN, Place, ResourcePool, resolve
from weft.dataflow.errors import UserError
from weft.dataflow.graph import ParameterEdge, group
from weft.workers.reward import RewardWorker


def scored(response: str) -> float:
    return 0.0


async def asked(response: str) -> float:
    return 0.0


EIGHTS = Nodes([(64, 8)] * 16, "the cluster")


class ParallelConfig(ToyConfig):
    tensor_parallel: int = 1

    @property
    def replica_ranks(self) -> int:
        return self.tensor_parallel


class Parallel(ToyActor):
    Config = ParallelConfig


def laid_out(placement: dict[str, Place], nodes: Nodes = EIGHTS, **settings: Any) -> dict[str, Place]:
    handles: dict[str, Any] = {name: group(Parallel, name=name, **settings) for name in placement}
    return lay_out(resolve(placement, handles), handles, nodes)


def nodes_of(pool: ResourcePool, ranks: int = 1, nodes: Nodes = EIGHTS, **settings: Any) -> int | None:
    return laid_out({"actor": Place(pool, ranks)}, nodes, **settings)["actor"].pool.nodes


def test_a_pool_gets_as_few_nodes_as_can_hold_it():
    assert nodes_of(ResourcePool("p", gpus=128), 128) == 16
    assert nodes_of(ResourcePool("p", gpus=4), 4) == 1
    assert nodes_of(ResourcePool("p", gpus=12), 12) == 2, "six on each of two"
    assert nodes_of(ResourcePool("p", gpus=24), 12) == 3
    assert nodes_of(ResourcePool("p", gpus=24), 4) == 4, "as many ranks on each node"
    assert nodes_of(ResourcePool("p", gpus=24), 8) == 4
    assert nodes_of(ResourcePool("p", cpus=96), 4) == 2
    assert nodes_of(ResourcePool("p", nodes=4, gpus_per_node=2), 8) == 4, "as the user says"


def test_an_elastic_group_has_a_bundle_per_rank_and_needs_room_for_the_minimum():
    place = Place(ResourcePool("spot", gpus=8, cpus=16), 4, min_ranks=2)
    small = Nodes([(8, 5)], "the cluster")
    pool = laid_out({"reward": place}, small)["reward"].pool
    assert pool.nodes == 4 and [(b.cpus, b.gpus) for b in bundles([pool])["spot"]] == [(4, 2)] * 4
    assert position(replace(place, pool=pool), 3) == (3, 0, 4)
    with pytest.raises(UserError, match=r"asks for 4 GPUs \(spot: 4\), but the cluster has 3"):
        laid_out({"reward": place}, Nodes([(8, 3)], "the cluster"))
    said = "'spot' needs 4 CPUs and 2 GPUs for each of at least 2 ranks, but the cluster has room for 1"
    with pytest.raises(UserError, match=said):
        laid_out({"reward": place}, Nodes([(8, 2), (3, 2)], "the cluster"))
    assert (
        laid_out({"reward": place}, Nodes([(1, 0)], "the cluster", grow=True))["reward"].pool.nodes == 4
    )


def test_a_pool_that_no_node_can_hold_is_refused_by_name():
    with pytest.raises(
        UserError, match=r"asks for 2 CPUs \(p: 2\), but this machine has 1; make a pool smaller"
    ):
        nodes_of(ResourcePool("p", cpus=2), nodes=Nodes([(1, 0)], "this machine"))
    with pytest.raises(UserError, match=r"asks for 4 GPUs \(p: 4\), but this machine has 0"):
        nodes_of(ResourcePool("p", cpus=1, gpus=4), nodes=Nodes([(1, 0)], "this machine"))
    small = Nodes([(1, 0), (2, 0)], "the cluster")
    with pytest.raises(
        UserError,
        match="'p' asks for 3 CPUs and 0 GPUs on one node, but no node of the cluster has both",
    ):
        nodes_of(ResourcePool("p", cpus=3), nodes=small)
    with pytest.raises(
        UserError,
        match="asks for 9 CPUs and 9 GPUs on each of 2 nodes, but no node of the cluster has both",
    ):
        nodes_of(ResourcePool("p", nodes=2, gpus_per_node=9), 2)
    few = Nodes([(64, 8), (64, 8), (64, 4), (64, 4)], "the cluster")
    with pytest.raises(
        UserError, match="8 GPUs on each of 3 nodes, but only 2 of the cluster can hold that"
    ):
        nodes_of(ResourcePool("p", nodes=3, gpus_per_node=8), 3, nodes=few)


def test_groups_without_a_place_do_not_count():
    places = {"actor": Place(ResourcePool("p", cpus=2)), "reward": Place(ResourcePool(f"reward{OWN}"))}
    handles: dict[str, Any] = {name: group(ToyActor, name=name) for name in places}
    found = lay_out(places, handles, Nodes([(2, 0)], "this machine"))
    assert found["reward"].pool.nodes == 1


def test_a_reward_without_a_place_has_several_processes_on_nodes_with_gpus():
    settings: dict[str, Any] = {"tokenizer": "a"}
    handles = {
        "actor": group(ToyActor, name="actor"),
        "reward": group(RewardWorker, name="reward", function=scored, **settings),
        "judge": group(RewardWorker, name="judge", function=asked, **settings),
        "other": group(ToyActor, name="other"),
    }

    def ranks(sizes: list[tuple[int, int]], placement: dict[str, Place]) -> list[tuple[int, int]]:
        found = lay_out(resolve(placement, handles), handles, Nodes(sizes, "the cluster"))
        return [(found[name].ranks, found[name].pool.cpus) for name in ("reward", "judge", "other")]

    train = {"actor": Place(ResourcePool("train", cpus=8, gpus=1))}
    assert ranks([(32, 0)], {"actor": Place(ResourcePool("train", cpus=8))}) == [(1, 1)] * 3
    assert ranks([(64, 0), (16, 2)], train) == [(4, 4), (1, 1), (1, 1)]
    assert ranks([(208, 8)] * 2, train)[0] == (8, 8)
    assert ranks([(208, 8)], {**train, "reward": Place(ResourcePool("score"))})[0] == (1, 1)


def test_a_cluster_that_grows_need_not_be_large_enough_yet():
    growing = Nodes([(8, 0), (64, 8)], "the cluster", grow=True)
    assert nodes_of(ResourcePool("p", nodes=16, gpus_per_node=8), 128, growing) == 16
    assert nodes_of(ResourcePool("p", gpus=8), 8, growing) == 1
    with pytest.raises(
        UserError,
        match=r"no node of the cluster has both .*; for nodes that will join later, give the layout",
    ):
        nodes_of(ResourcePool("p", gpus=16), 1, growing)


def test_a_replica_spans_nodes_only_if_it_is_larger_than_one():
    assert nodes_of(ResourcePool("p", gpus=24), 24, tensor_parallel=8) == 3
    assert nodes_of(ResourcePool("p", gpus=12), 12, tensor_parallel=4) == 3, (
        "six on each of two would cut replicas"
    )
    assert nodes_of(ResourcePool("p", gpus=32), 32, tensor_parallel=16) == 4, (
        "each replica has two whole nodes"
    )
    with pytest.raises(
        UserError, match="a replica of 'actor' has 4 ranks, but pool 'p' has 6 of them on each of its 4"
    ):
        nodes_of(ResourcePool("p", nodes=4, gpus_per_node=6), 24, tensor_parallel=4)
    with pytest.raises(UserError, match="tensor_parallel=3 does not divide the 4 ranks of 'actor'"):
        nodes_of(ResourcePool("p", gpus=4), 4, tensor_parallel=3)


def test_adjacent_pools_share_nodes_but_no_device():
    train, rollout = ResourcePool("train", gpus=4), ResourcePool("rollout", gpus=4, beside="train")
    found = laid_out({"actor": Place(train, 4), "rollout": Place(rollout, 2)})
    (bundle,) = bundles(place.pool for place in found.values())["train"]
    assert (bundle.cpus, bundle.gpus, bundle.first_gpu) == (8, 8, {"train": 0, "rollout": 4})

    found = laid_out({"actor": Place(ResourcePool("train", gpus=8), 8), "rollout": Place(rollout, 4)})
    assert {place.pool.nodes for place in found.values()} == {2}, "together they do not fit on one"
    assert [b.first_gpu for b in bundles(p.pool for p in found.values())["train"]] == [
        {"train": 0, "rollout": 4}
    ] * 2

    train, rollout = (
        ResourcePool("train", nodes=2, gpus_per_node=4),
        ResourcePool("rollout", gpus=2, nodes=1, beside="train"),
    )
    found = laid_out({"actor": Place(train, 8), "rollout": Place(rollout)})
    assert [b.gpus for b in bundles(p.pool for p in found.values())["train"]] == [6, 4], (
        "on the first of them alone"
    )

    with pytest.raises(
        UserError, match=r"'train' \(with 'rollout' beside it\) cannot be spread evenly over 2 nodes"
    ):
        laid_out(
            {"actor": Place(train, 8), "rollout": Place(ResourcePool("rollout", gpus=3, beside="train"))}
        )


def test_ranks_go_to_nodes_in_blocks_and_see_their_own_devices():
    place = Place(ResourcePool("p", nodes=2, gpus_per_node=4), 4)
    assert [position(place, rank) for rank in range(4)] == [
        (0, 0, 2),
        (0, 1, 2),
        (1, 0, 2),
        (1, 1, 2),
    ]
    on_each = ["4", "5", "6", "7"]
    assert [devices(place, rank, on_each) for rank in range(4)] == [("4", "5"), ("6", "7")] * 2
    assert devices(Place(ResourcePool("cpus", nodes=2), 4), 3, ()) == ()


def test_groups_on_a_pool_with_gpus_start_in_turn_and_followers_last():
    gpu, other, cpu = (
        ResourcePool("gpu", gpus=2),
        ResourcePool("other", gpus=1),
        ResourcePool("cpu", cpus=2),
    )
    places = {
        "rollout": Place(gpu),
        "reference": Place(gpu),
        "judge": Place(other),
        "actor": Place(gpu),
        "reward": Place(cpu),
        "functions": Place(cpu),
    }
    assert start_turns(places, [ParameterEdge("rollout", "actor", 1)]) == [
        ["reference", "judge", "reward", "functions"],
        ["actor"],
        ["rollout"],
    ]
