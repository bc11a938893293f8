"""DeviceTurns: which group has its model on the devices of a pool that several groups share."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ..group import Call, WorkerGroup
from ..request import CallRequest


@dataclass
class _Pool:
    holder: WorkerGroup | None = None
    """The group whose model is on the devices, or will be when the change is over."""
    changing: bool = False
    waiting: deque[CallRequest] = field(default_factory=deque)


class DeviceTurns:
    """Groups on one pool with GPUs take turns: the holder is offloaded before the next group is onloaded.

        nobody ──request of b──────────────────────> onloading b ──> held by b
        held by a ──request of b──> offloading a ──> onloading b ──> held by b

    A request that needs the devices waits while they change hands. Requests of one pool are made in the order in which they came.
    """

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}

    def ask(self, request: CallRequest) -> list[CallRequest]:
        """Requests that may be made now: this one, if its group has the devices or needs none, or the change that it waits for."""
        place = request.group.place.pool
        if not request.on_device or not place.gpus:
            return [request]
        pool = self._pools.setdefault(place.name, _Pool())
        pool.waiting.append(request)
        return [] if pool.changing else self._next(pool)

    def _next(self, pool: _Pool) -> list[CallRequest]:
        ready: list[CallRequest] = []
        while pool.waiting and pool.waiting[0].group is pool.holder:
            ready.append(replace(pool.waiting.popleft(), on_device=False))
        if pool.waiting:
            before, pool.holder, pool.changing = pool.holder, pool.waiting[0].group, True
            onload = CallRequest(pool.holder, "onload", then=lambda call: self._onloaded(pool, call))
            ready.append(CallRequest(before, "offload", then=lambda call: [onload]) if before else onload)
        return ready

    def _onloaded(self, pool: _Pool, call: Call) -> Iterable[CallRequest]:
        pool.changing = False
        return self._next(pool)
