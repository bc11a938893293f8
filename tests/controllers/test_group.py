"""Worker groups as the driver sees them: the cost of a question does not grow with the open calls."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from toy import ToyRollout

from weft.controllers.group import Call, UnderWay, WorkerGroup, _Loads
from weft.controllers.placement import Place, ResourcePool
from weft.dataflow.graph import Handle, group
from weft.workers.dispatch import Coordinates


def calls_made(do: Callable[[], Any]) -> int:
    """Count the Python functions that `do` calls: a measure of work that does not depend on load."""
    made = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        do()
    finally:
        sys.setprofile(None)
    return made


def many(replicas: int, ranks: int = 1) -> WorkerGroup:
    mesh = [Coordinates(dp=k // ranks, tp=k % ranks) for k in range(replicas * ranks)]
    rollout: Any = group(ToyRollout)
    assert isinstance(rollout, Handle)
    return WorkerGroup(
        "rollout", rollout, Place(ResourcePool("p"), len(mesh)), mesh, lambda rank, task, call: None
    )


def test_rows_are_spread_over_replicas_without_looking_at_all_of_them_for_each():
    few, most = (calls_made(lambda n=n: many(512).least_loaded(n)) for n in (0, 4096))
    assert (most - few) / 4096 < 25, "each row costs about log(replicas), not 512"


def test_rows_go_to_the_least_loaded_ranks():
    loads = _Loads(range(4))
    for replica, rows in enumerate((5, 0, 3, 1)):
        loads.add_rows(replica, rows)
    assert loads.spread(6) == {1: 4, 3: 2}
    assert loads.spread(6) == {1: 4, 3: 2}, "nothing is added by asking"
    loads.add_rows(1, 9)
    assert loads.spread(2) == {3: 2}
    for _ in range(1000):
        loads.add_rows(0, 1)
        loads.add_rows(0, -1)
    assert loads.spread(1) == {3: 1}


def test_calls_under_way_are_counted_as_they_come_and_go():
    rollout, under_way = many(1), UnderWay()
    calls = [Call(rollout, "receive_weights", (0,)) for _ in range(3)]
    for call in calls:
        under_way.add(call)
    assert (len(under_way), under_way.beside_the_graph, under_way.interruptible) == (3, 3, 0)
    under_way.remove(calls[1])
    assert list(under_way) == [calls[0], calls[2]] and under_way.beside_the_graph == 2


@pytest.mark.parametrize("number", [1, 500])
def test_a_call_is_taken_off_without_searching_for_it(number: int):
    rollout, under_way = many(1), UnderWay()
    calls = [Call(rollout, "receive_weights", (0,)) for _ in range(number)]
    for call in calls:
        under_way.add(call)
    assert calls_made(lambda: under_way.remove(calls[-1])) < 10
