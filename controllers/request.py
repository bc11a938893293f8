"""Requests: calls that are to be made, as values. Everything that follows from a reply is a request, sent on a later turn of the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..dataflow.buffer.leases import Lease
from ..dataflow.buffer.ledger import Ledger
from .group import Call, WorkerGroup

Then = Callable[[Call], "Iterable[CallRequest]"]
"""What follows when the last reply of a call has come."""


def nothing(call: Call) -> Iterable[CallRequest]:
    """Nothing follows."""
    return ()


@dataclass(frozen=True, eq=False)
class CallRequest:
    """A call of a method without rows, on some ranks or on all that its dispatch protocol names."""

    group: WorkerGroup
    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    ranks: Sequence[int] | None = None
    then: Then = nothing
    on_device: bool = False
    """The group needs the devices of its pool, which others may hold."""

    def call(self) -> Call:
        """Submit it to the ranks; returns at once."""
        return self.group.call(self.method, ranks=self.ranks, **self.arguments)


@dataclass(frozen=True, eq=False)
class NodeRequest(CallRequest):
    """A call of a node's method on the rows of a lease."""

    ledger: Ledger | None = None
    lease: Lease | None = None
    by_load: Mapping[int, int] | None = None
    """Data-parallel replica -> how many of the rows it gets; None: the dispatch protocol spreads them over all."""
    last: bool = True
    """The batch of an update is complete with these rows."""
    on_device: bool = True

    def call(self) -> Call:
        assert self.ledger is not None and self.lease is not None
        call = self.group.call_node(self.ledger, self.lease, by_load=self.by_load, **self.arguments)
        call.last = self.last
        return call
