"""Groups on one GPU pool take turns on its devices."""

from worker_groups import Asked

from weft.controllers.group import Call, CallRequest
from weft.controllers.loop.calls import _DeviceTurns
from weft.controllers.placement import ResourcePool

GPUS = ResourcePool("gpus", gpus=1)


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
    asked, turns = Asked(), _DeviceTurns()
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
    asked, turns = Asked(), _DeviceTurns()
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
    asked, turns = Asked(), _DeviceTurns()
    a, b, cpu = asked.group("a", GPUS), asked.group("b", GPUS), asked.group("cpu", ResourcePool("cpus"))
    assert named(turns.ask(CallRequest(a, "update", on_device=True))) == ["a.onload"]
    assert named(turns.ask(CallRequest(b, "save"))) == ["b.save"]
    assert named(turns.ask(CallRequest(cpu, "score", on_device=True))) == ["cpu.score"]
