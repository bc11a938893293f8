"""Groups on one GPU pool take turns on its devices."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from toy import ToyActor, ToyRollout
from worker_groups import Asked

from weft.controllers.group import Call, CallRequest, WorkerGroup
from weft.controllers.loop.calls import _DeviceTurns
from weft.controllers.placement import ResourcePool
from weft.controllers.weight_sync import WeightSync
from weft.dataflow.graph import ParameterEdge

GPUS = ResourcePool("gpus", gpus=1)


def turns_of(
    groups: Mapping[str, WorkerGroup] = {},
    *edges: ParameterEdge,
    keeps: Callable[[ParameterEdge, int], bool] | None = None,
) -> _DeviceTurns:
    return _DeviceTurns(WeightSync(edges, groups, "continue", lambda call: None, keeps))


def named(requests: list[CallRequest]) -> list[str]:
    return [f"{request.group.name}.{request.method}" for request in requests]


def ended(turns: _DeviceTurns, request: CallRequest) -> list[CallRequest]:
    """End a request's call, and return the requests that may follow."""
    return [
        ready
        for after in request.then(Call(request.group, request.method, (0,)))
        for ready in turns.ask(after)
    ]


def test_the_holder_is_offloaded_before_the_next_is_onloaded():
    asked, turns = Asked(), turns_of()
    a, b = asked.group("a", GPUS), asked.group("b", GPUS)
    (onload,) = turns.ask(CallRequest(a, "update", on_device=True))
    assert named([onload]) == ["a.onload"], "nobody holds the devices"
    assert named(ended(turns, onload)) == ["a.update"]
    assert named(turns.ask(CallRequest(a, "again", on_device=True))) == ["a.again"], "it holds them"
    (offload,) = turns.ask(CallRequest(b, "generate", on_device=True))
    assert named([offload]) == ["a.offload"]
    (onload,) = ended(turns, offload)
    assert named([onload]) == ["b.onload"] and named(ended(turns, onload)) == ["b.generate"]


def test_requests_wait_in_order_while_devices_change_hands():
    asked, turns = Asked(), turns_of()
    a, b = asked.group("a", GPUS), asked.group("b", GPUS)
    (onload,) = turns.ask(CallRequest(a, "first", on_device=True))
    assert not turns.ask(CallRequest(b, "second", on_device=True)) and not turns.ask(
        CallRequest(a, "third", on_device=True)
    )
    ready = ended(turns, onload)
    assert named(ready) == ["a.first", "a.offload"], "the second is another group's"
    (onload,) = ended(turns, ready[-1])
    ready = ended(turns, onload)
    assert named(ready) == ["b.second", "b.offload"]
    (onload,) = ended(turns, ready[-1])
    assert named(ended(turns, onload)) == ["a.third"]


def test_a_request_that_needs_no_device_waits_for_none():
    asked, turns = Asked(), turns_of()
    a, b, cpu = asked.group("a", GPUS), asked.group("b", GPUS), asked.group("cpu", ResourcePool("cpus"))
    assert named(turns.ask(CallRequest(a, "update", on_device=True))) == ["a.onload"]
    assert named(turns.ask(CallRequest(b, "save"))) == ["b.save"]
    assert named(turns.ask(CallRequest(cpu, "score", on_device=True))) == ["cpu.score"]


class DiscardingRollout(ToyRollout):
    @classmethod
    def discards_weights(cls, config: Any) -> bool:
        return True


EVALUATED: dict[str, Callable[[ParameterEdge, int], bool] | None] = {
    "no": lambda group, version: False,
    "yes": lambda group, version: True,
    "unknown": None,
}


@pytest.mark.parametrize("worker", [DiscardingRollout, ToyRollout])
@pytest.mark.parametrize("evaluated", EVALUATED)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("updating", [True, False])
@pytest.mark.parametrize("has_followers", [True, False])
def test_a_follower_discards_weights_only_if_an_update_surely_replaces_them(
    worker: Any, evaluated: str, every: int, updating: bool, has_followers: bool
):
    asked = Asked()
    groups = {
        "actor": asked.group("actor", GPUS, ToyActor),
        "rollout": asked.group("rollout", GPUS, worker),
    }
    edges = [ParameterEdge("rollout", "actor", every=every)]
    if has_followers:
        edges.append(ParameterEdge("teacher", "rollout", every=1))
    turns = turns_of(groups, *edges, keeps=EVALUATED[evaluated])
    (onload,) = turns.ask(CallRequest(groups["rollout"], "generate", on_device=True))
    ended(turns, onload)
    groups["actor"].updating = updating
    (offload,) = turns.ask(CallRequest(groups["actor"], "update", on_device=True))
    sure = worker is DiscardingRollout and evaluated == "no" and every == 1 and updating
    assert offload.arguments == ({"discard_weights": True} if sure and not has_followers else {})


def test_groups_that_work_together_have_their_turn_together():
    asked = Asked()
    rollout, env, actor = (asked.group(name, GPUS) for name in ("rollout", "env", "actor"))
    weights = WeightSync((), {}, "continue", lambda call: None, None)
    turns = _DeviceTurns(weights, {"rollout": [env]})
    (onload,) = turns.ask(CallRequest(rollout, "interact", on_device=True))
    assert named([onload]) == ["rollout.onload"]
    (onload,) = ended(turns, onload)
    assert named([onload]) == ["env.onload"]
    assert named(ended(turns, onload)) == ["rollout.interact"]
    (offload,) = turns.ask(CallRequest(actor, "update", on_device=True))
    assert named([offload]) == ["rollout.offload"]
    (offload,) = ended(turns, offload)
    assert named([offload]) == ["env.offload"]
    (onload,) = ended(turns, offload)
    assert named([onload]) == ["actor.onload"]
    assert named(ended(turns, onload)) == ["actor.update"]
