"""Pools over several Ray nodes: places and devices of ranks, and groups on shared GPUs start in
turn."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from sharded import make_model, updated

from weft.controllers.backends.local import Local
from weft.controllers.backends.ray_backend import RayBackend
from weft.dataflow.errors import UserError


def test_a_wait_that_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(
        UserError, match=r"RayBackend\(wait_s=0\): wait_s must be a number of seconds above 0"
    ):
        RayBackend("head:6379", wait_s=0)
    with pytest.raises(
        UserError,
        match=r"waits for a cluster to grow, but a local cluster does not grow; give an address",
    ):
        RayBackend(wait_s=60)


@pytest.fixture
def result(scenes: Any) -> Mapping[str, Any]:
    return scenes["pools"]


def column(looks: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return [look[name] for look in looks]


@pytest.mark.slow
@pytest.mark.ray
def test_a_pool_over_two_nodes_has_a_block_of_ranks_on_each(result: Mapping[str, Any]):
    actor, reward = result["grown"]["looks"]["actor"], result["grown"]["looks"]["reward"]
    assert column(actor, "rank") == [[r, 4, r % 2, r // 2, 2] for r in range(4)]
    assert column(actor, "devices") == [[str(r % 2)] for r in range(4)], (
        "each its own, from the first on each node"
    )
    assert column(actor, "visible") == [str(r % 2) for r in range(4)]
    nodes = column(actor, "node")
    assert len({*nodes[:2]}) == len({*nodes[2:]}) == 1 and nodes[0] != nodes[2]
    assert {*column(actor, "host")} == {"127.0.0.1"}, "both nodes are this machine"
    assert column(reward, "rank") == [[0, 2, 0, 0, 2], [1, 2, 0, 1, 2]]
    assert len({*column(reward, "node")}) == 2
    assert result["grown"]["rows"] == [8, 8]


@pytest.mark.slow
@pytest.mark.ray
def test_two_training_ranks_on_two_nodes_make_the_updates_of_one_process(
    result: Mapping[str, Any], tmp_path: Path
):
    there = result["trained"]
    assert column(there["actor"], "rank") == [[0, 2, 0, 0, 2], [1, 2, 0, 1, 2]]
    assert there["actor"][0]["squares"] == there["actor"][1]["squares"]
    here = updated(tmp_path, "here", make_model(tmp_path / "model"), {}, Local())
    for name in ("loss", "grad_norm"):
        assert there[name] == pytest.approx(here[name], rel=1e-5)
    assert there["actor"][0]["squares"] == pytest.approx(here["actor"][0]["squares"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.ray
def test_a_rank_without_gpus_sees_none_on_a_node_that_has_some(result: Mapping[str, Any]):
    reward = result["grown"]["looks"]["reward"]
    assert {*column(reward, "node")} & {*column(result["grown"]["looks"]["actor"], "node")}, (
        "on a node with GPUs"
    )
    assert column(reward, "visible") == [""] * 2 and column(reward, "devices") == [[]] * 2
    assert {*column(reward, "host")} == {"127.0.0.1"}


@pytest.mark.slow
@pytest.mark.ray
def test_groups_that_share_gpus_start_in_turn_on_the_same_devices(result: Mapping[str, Any]):
    looks = result["shared"]["looks"]
    order = [line for line in result["shared"]["order"] if not line.startswith("reward")]
    assert column(looks["actor"], "visible") == column(looks["rollout"], "visible") == ["0", "1"]
    begun = order.index(next(line for line in order if line.startswith("rollout")))
    assert sorted(order[:begun]) == sorted(
        f"actor[{r}] {what}" for r in (0, 1) for what in ("begins", "made", "offloaded")
    )
    assert sorted(order[begun : begun + 6]) == sorted(
        f"rollout[{r}] {what}" for r in (0, 1) for what in ("begins", "made", "offloaded")
    )
    assert result["shared"]["rows"] == [8, 8]


@pytest.mark.slow
@pytest.mark.ray
def test_adjacent_pools_are_on_one_node_with_separate_devices(result: Mapping[str, Any]):
    looks = result["shared"]["looks"]
    assert column(looks["actor"], "visible") == ["0", "1"] and column(looks["reward"], "visible") == [
        "2"
    ]
    assert len({*column(looks["actor"], "node"), *column(looks["reward"], "node")}) == 1
    of_reward = [line for line in result["shared"]["order"] if line.startswith("reward")]
    assert of_reward == ["reward[0] made"], "it has devices of its own, and is not offloaded"


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("name", ["spare", "full"])
def test_a_group_without_a_place_has_its_default_ranks_with_or_without_free_cpus(
    result: Mapping[str, Any], name: str
):
    reward = result[name]["looks"]["reward"]
    assert column(reward, "rank") == [[rank, 3, rank, 0, 1] for rank in range(3)]
    assert column(reward, "visible") == [""] * 3 and len({*column(reward, "node")}) == 1
    assert result[name]["rows"] == [8, 8]


@pytest.mark.slow
@pytest.mark.ray
def test_weights_travel_between_nodes(result: Mapping[str, Any]):
    actor, reference = result["trained"]["actor"], result["trained"]["reference"]
    assert reference == [{"version": 2, "squares": actor[0]["squares"]}]


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_waits_for_a_growing_cluster_and_reports_missing_resources(
    result: Mapping[str, Any],
):
    assert "asks for 4 GPUs (train: 4), but the cluster at" in result["too_large"]
    assert (
        "resource pool 'train' (2 CPUs, 2 GPUs on each of 2 nodes) did not get the requested devices within 1 s"
        in result["in_vain"]
    )
    assert "the cluster has 2 nodes with 10 CPUs" in result["in_vain"] and "3 GPUs" in result["in_vain"]
    first = result["told"][0]
    assert first.startswith("waiting for resource pool 'train' (2 CPUs, 2 GPUs on each of 2 nodes), ")
    assert "the cluster has 2 nodes with 10 CPUs" in first
