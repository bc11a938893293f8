"""Placements and the run directory's own rules."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from weft.controllers.placement import Place, ResourcePool, require_nodes, resolve
from weft.controllers.run_directory import RunDirectory
from weft.dataflow.errors import UserError


def test_ranks_share_the_devices_of_their_pool():
    place = Place(ResourcePool("p", cpus=8, gpus=4), ranks=4)
    assert (place.threads, place.gpus) == (2, 1)
    assert Place(ResourcePool("p", cpus=1), ranks=3).threads == 1


def test_impossible_pools_and_places_are_refused():
    with pytest.raises(UserError, match="resource pool 'p' needs at least one CPU and no negative GPUs, not cpus=0"):
        ResourcePool("p", cpus=0)
    with pytest.raises(UserError, match="a group on pool 'p' needs at least one rank, not 0"):
        Place(ResourcePool("p"), ranks=0)
    with pytest.raises(UserError, match="3 ranks do not divide the 4 GPUs of pool 'p' evenly"):
        Place(ResourcePool("p", gpus=4), ranks=3)


def test_a_group_without_a_place_has_a_pool_of_its_own_which_does_not_count():
    shared = Place(ResourcePool("p", cpus=2))
    places = resolve({"a": shared, "b": shared}, {"a": 0, "b": 0, "c": 0})
    assert places["a"].pool is places["b"].pool and places["c"] == Place(ResourcePool("c's own"))
    require_nodes(places, [(2, 0)], "this machine")
    with pytest.raises(UserError, match=r"asks for 2 CPUs \(p: 2\), but this machine has 1; make a pool smaller"):
        require_nodes(places, [(1, 0)], "this machine")
    with pytest.raises(UserError, match=r"asks for 4 GPUs \(p: 4\), but this machine has 0"):
        require_nodes({"a": Place(ResourcePool("p", cpus=1, gpus=4))}, [(1, 0)], "this machine")
    with pytest.raises(
        UserError, match="'p' asks for 3 CPUs and 0 GPUs on one node, but no node of the cluster has both"
    ):
        require_nodes({"a": Place(ResourcePool("p", cpus=3))}, [(1, 0), (2, 0)], "the cluster")


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
    assert sorted(p.name for p in run.path.iterdir()) == ["lock", "logs", "metrics.parquet"], "nothing half-written"
