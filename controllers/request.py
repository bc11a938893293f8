"""Requests: calls to make, as values. Each reply leads to requests, which a later turn of the loop
sends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..dataflow.buffer.leases import Lease
from ..dataflow.buffer.ledger import Ledger
from .group import Call, WorkerGroup

Then = Callable[[Call], "Iterable[CallRequest]"]
"""Returns the requests that follow the last reply of a call."""


def nothing(call: Call) -> Iterable[CallRequest]:
    """No request follows."""
    return ()


@dataclass(frozen=True, eq=False)
class CallRequest:
    """Request to call a method without rows, on some ranks or on all that its dispatch protocol
    names."""

    group: WorkerGroup
    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    ranks: Sequence[int] | None = None
    then: Then = nothing
    on_device: bool = False
    """The call needs the devices of the group's pool, so other groups must give them up."""

    def call(self) -> Call:
        return self.group.call(self.method, ranks=self.ranks, **self.arguments)


@dataclass(frozen=True, eq=False)
class NodeRequest(CallRequest):
    """Request to call a node's method on the rows of a lease."""

    ledger: Ledger | None = None
    lease: Lease | None = None
    by_load: Mapping[int, int] | None = None
    """Data-parallel replica -> number of rows; None lets the dispatch protocol spread them over all
    replicas."""
    last: bool = True
    """These rows complete the batch of an update."""
    on_device: bool = True

    def call(self) -> Call:
        assert self.ledger is not None and self.lease is not None
        call = self.group.call_node(self.ledger, self.lease, by_load=self.by_load, **self.arguments)
        call.last = self.last
        return call
