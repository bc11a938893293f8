"""The metrics of each step list the memory of each process."""

from pathlib import Path

from toy_runs import drive, training

from weft.controllers.backends.process_diagnostics import Memory, _ProcessMemory, memory_metrics
from weft.dataflow.metric_names import undeclared
from weft.workers.node_memory import NodeMemory

NODES = {
    "a": Memory(
        {
            "driver": _ProcessMemory(5, 1),
            "actor[0]": _ProcessMemory(10, 7),
            "actor[1]": _ProcessMemory(30, 6),
        },
        NodeMemory(60, 100, "the machine"),
        8,
    ),
    "b": Memory({"actor[2]": _ProcessMemory(2, 3)}, NodeMemory(90, 120, "the limit of cgroup job"), 1),
}


def test_groups_are_summed_over_nodes_and_the_fullest_node_counts():
    metrics = memory_metrics(NODES, 11.0)
    assert metrics == {
        "driver/resident_bytes": 5,
        "driver/shared_bytes": 1,
        "actor/resident_bytes": 42,
        "actor/shared_bytes": 7,
        "segment_bytes": 11,
        "object_store_bytes": 9,
        "host_free_bytes": 30,
        "host_limit_bytes": 120,
    }
    assert undeclared(metrics) == []


def test_every_step_of_a_run_has_them(tmp_path: Path):
    with drive(training(), tmp_path) as driver:
        rows = driver.run()
    assert all(row["driver/resident_bytes"] > 1 << 20 and row["host_free_bytes"] > 0 for row in rows)
