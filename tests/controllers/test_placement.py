"""Placements, and rules of the run directory."""

import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from toy_runs import training

from weft.controllers.backends.local import Local
from weft.controllers.backends.ray_backend import RayBackend
from weft.controllers.driver import Driver
from weft.controllers.placement import Place, ResourcePool, resolve
from weft.controllers.schedule import Synchronous
from weft.dataflow.errors import UserError
from weft.dataflow.graph import group
from weft.dataflow.runs.directory import RunDirectory
from weft.workers.rollout import RolloutWorker


def test_ranks_share_the_devices_of_their_pool():
    place = Place(ResourcePool("p", cpus=8, gpus=4), ranks=4)
    assert (place.threads, place.gpus) == (2, 1)
    assert Place(ResourcePool("p", cpus=1), ranks=3).threads == 1


def test_a_pool_is_sized_in_all_or_by_node():
    by_node = ResourcePool("train", nodes=16, gpus_per_node=8)
    assert by_node == ResourcePool("train", cpus=128, gpus=128, nodes=16)
    assert (by_node.cpus, by_node.gpus, by_node.nodes) == (128, 128, 16), "a CPU for each GPU"
    assert ResourcePool("score", nodes=2, cpus_per_node=4) == ResourcePool("score", cpus=8, nodes=2)
    assert ResourcePool("train", gpus=128).nodes is None, "the cluster decides"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cpus": 0}, "resource pool 'p' needs at least one CPU and no negative GPUs, not cpus=0"),
        ({"gpus": -1, "cpus": 1}, "no negative GPUs, not cpus=1, gpus=-1"),
        ({"nodes": 0}, "'p' needs at least one node, not nodes=0"),
        ({"nodes": 2, "cpus_per_node": 0}, "at least one CPU on each of its nodes"),
        ({"nodes": "2"}, "'p': nodes is a whole number, not '2'"),
        ({"gpus": 2.0}, "'p': gpus is a whole number, not 2.0"),
        (
            {"gpus_per_node": 8},
            "gpus_per_node=8 needs the number of nodes; give nodes=... as well, or gpus=",
        ),
        (
            {"nodes": 2, "gpus": 16, "gpus_per_node": 8},
            "gpus=16 and gpus_per_node=8 set the same number",
        ),
        (
            {"nodes": 3, "gpus": 8},
            "gpus=8 is not a multiple of nodes=3; the nearest multiple is 9",
        ),
        ({"beside": "p"}, "'p' cannot share nodes with itself"),
        ({"gpu_per_node": 8}, "did you mean 'gpus_per_node'"),
    ],
)
def test_an_impossible_pool_is_refused_where_it_is_made(settings: dict[str, Any], message: str):
    with pytest.raises(UserError, match=re.escape(message)):
        ResourcePool("p", **settings)


def test_an_impossible_place_is_refused_where_it_is_made():
    with pytest.raises(UserError, match="a group on pool 'p' needs at least one rank, not 0"):
        Place(ResourcePool("p"), ranks=0)
    with pytest.raises(UserError, match="3 ranks do not divide the 4 GPUs of pool 'p' evenly"):
        Place(ResourcePool("p", gpus=4), ranks=3)
    with pytest.raises(
        UserError,
        match="5 ranks do not divide over the 2 nodes of pool 'p' evenly; the nearest number that does is 4",
    ):
        Place(ResourcePool("p", nodes=2), ranks=5)


@pytest.mark.parametrize(
    ("pool", "ranks", "least", "message"),
    [
        ({"cpus": 4}, 4, 5, "on pool 'p': min_ranks is a whole number from 1 to ranks=4, not 5"),
        ({"cpus": 4}, 4, 0, "min_ranks is a whole number from 1 to ranks=4, not 0"),
        ({"cpus": 4}, 4, 1.5, "min_ranks is a whole number from 1 to ranks=4, not 1.5"),
        ({"cpus": 3}, 4, 1, "4 ranks do not divide its 3 CPUs evenly; take cpus=4, say"),
        (
            {"gpus": 4, "nodes": 2},
            4,
            1,
            "cannot have nodes=2, because each of its 4 ranks runs on any node with room",
        ),
        (
            {"gpus": 4, "beside": "train"},
            4,
            1,
            "cannot have beside='train', because each of its 4 ranks runs on any node",
        ),
    ],
)
def test_an_impossible_elastic_group_is_refused_where_it_is_made(
    pool: dict[str, Any], ranks: int, least: Any, message: str
):
    with pytest.raises(UserError, match=re.escape(message)):
        Place(ResourcePool("p", **pool), ranks, min_ranks=least)
    assert not Place(ResourcePool("p", cpus=4), 4).is_elastic
    assert Place(ResourcePool("p", nodes=4, gpus_per_node=8), 4, min_ranks=1).is_elastic, (
        "a rank on each of four"
    )


def test_an_elastic_group_does_not_share_its_pool():
    spot = ResourcePool("spot", cpus=2)
    with pytest.raises(
        UserError, match="group 'a' has min_ranks=1, but shares pool 'spot' with 'b'; give"
    ):
        resolve({"a": Place(spot, 2, 1), "b": Place(spot, 2)}, {"a": 0, "b": 0})
    with pytest.raises(UserError, match="shares pool 'spot' with 'b'"):
        resolve({"a": Place(spot, 2, 1), "b": Place(ResourcePool("p", beside="spot"))}, {"a": 0, "b": 0})


def test_a_group_without_a_place_gets_a_separate_pool():
    shared = Place(ResourcePool("p", cpus=2))
    places = resolve({"a": shared, "b": shared}, {"a": 0, "b": 0, "c": 0})
    assert places["a"].pool is places["b"].pool and places["c"] == Place(ResourcePool("c's own"))


def test_a_pool_beside_another_needs_an_existing_one_without_cycles():
    def besides(**beside: str | None) -> dict[str, Place]:
        placement = {name: Place(ResourcePool(name, beside=other)) for name, other in beside.items()}
        return resolve(placement, placement)

    assert besides(train=None, rollout="train", reward="rollout")["reward"].pool.beside == "rollout"
    with pytest.raises(
        UserError,
        match=r"'rollout' shares nodes with 'trian', but no group is placed on a pool of that name; did you mean 'train'\?",
    ):
        besides(train=None, rollout="trian")
    with pytest.raises(
        UserError, match="in a circle: 'a' beside 'c' beside 'b' beside 'a'; leave out one beside="
    ):
        besides(a="c", b="a", c="b")
    with pytest.raises(
        UserError, match="'b' has nodes=2, more than the 1 nodes of 'a', which it shares"
    ):
        places = {
            "a": Place(ResourcePool("a", nodes=1)),
            "b": Place(ResourcePool("b", nodes=2, beside="a"), 2),
        }
        resolve(places, places)


def test_an_unnamed_run_gets_a_name_that_is_free(tmp_path: Path):
    first, second = RunDirectory.create(tmp_path, None), RunDirectory.create(tmp_path, None)
    assert first.path != second.path and first.path.parent == second.path.parent == tmp_path.resolve()


def test_an_empty_directory_can_be_used_and_a_used_one_cannot(tmp_path: Path):
    (tmp_path / "run").mkdir()
    RunDirectory.create(tmp_path, "run")
    with pytest.raises(UserError, match="is used already"):
        RunDirectory.create(tmp_path, "run")


@pytest.mark.parametrize(
    ("root", "why"), [("/proc/x", "nothing can be written into /proc"), ("file/x", "is no folder")]
)
def test_a_root_that_cannot_be_written_is_refused_with_the_reason(tmp_path: Path, root: str, why: str):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=f"^root '.*{root}' cannot be used: .*{why}"):
        RunDirectory.create(tmp_path / root, "run")


def test_metrics_that_come_later_leave_holes_before(tmp_path: Path):
    run = RunDirectory.create(tmp_path, "run")
    run.flush()
    run.add_metrics({"step": 0.0})
    run.add_metrics({"step": 1.0, "loss": 0.5})
    run.close()
    assert pq.read_table(run.path / "metrics.parquet").to_pylist() == [
        {"step": 0.0, "loss": None},
        {"step": 1.0, "loss": 0.5},
    ]
    assert sorted(p.name for p in run.path.iterdir()) == ["lock", "logs", "metrics.parquet"], (
        "nothing half-written"
    )


def test_parts_of_a_placement_that_local_ignores_are_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    pool, schedule = ResourcePool("p", cpus=2, gpus=2), Synchronous(steps=1, prompts_per_step=4)
    for name, placement in {
        "two": {"actor": Place(pool, ranks=2), "rollout": Place(pool)},
        "one": None,
    }.items():
        with Driver(
            training(), schedule=schedule, placement=placement, backend=Local(), root=tmp_path, name=name
        ) as driver:
            driver.run()
        said = " ".join(capfd.readouterr().out.split())
        assert ("(rollout: 2 GPUs; actor: 2 ranks, 2 GPUs); use weft.RayBackend()" in said) == (
            placement is not None
        )
        assert ("without the devices of the placement" in said) == (placement is not None)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_kv_cache_larger_than_memory_is_refused_before_anything_starts(
    ranks: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    placement = {"rollout": Place(ResourcePool("p", cpus=ranks), ranks=ranks)}
    handles: Any = {"rollout": group(RolloutWorker, model="nowhere", kv_cache_gib=50_000)}
    said = r"kv_cache_gib=50000: .* and this machine has [\d.]+ GiB of memory free; lower it below"
    with pytest.raises(
        UserError, match=said.replace(".*", r"2 ranks take 100000 GiB .*" if ranks == 2 else ".*")
    ):
        RayBackend().check(placement, handles)
    with pytest.raises(UserError, match=said):
        Local().check(placement, handles)
    slow: Any = {
        "rollout": group(RolloutWorker, model="nowhere", engine="transformers", kv_cache_gib=50_000)
    }
    Local().check(placement, slow)
