"""Gathering: rows that come one by one wait a moment for others of their groups, so that a call has more than one row."""

from __future__ import annotations

from collections.abc import Callable

from ...dataflow.node import Node
from ...dataflow.operation import Shape
from ..gather_time import MANY_RANKS, gather_s
from ..graph_run import GraphRun
from ..group import UnderWay

MAX_WAIT_S = 0.25
"""Longest time for which rows wait for others, by the run's clock, where few ranks are at work; many may take longer (`gather_s`)."""
MAX_ROWS = 32
"""Rows for each replica with which a call is large enough: they wait for no others."""
CLOCK_S = 1e-6
"""A wait of less is over: a clock that is moved to the end of it may be off by its rounding."""


class Gathering:
    """Until when the rows that are ready for each node may wait.

    - Only a map or a filter that takes rows gathers them, and only while no group is complete there: what follows could not begin
      with a part of a group. Where MANY_RANKS or more are at work, complete groups wait, too.
    - No row waits longer than MAX_WAIT_S, or `gather_s` of many ranks, which runs while the node's worker group is busy, too.
    - Rows that a quorum may be waiting for do not wait.
    - Nothing waits when no other call of the graph is under way: nobody would bring more.

    Args:
        clock: of the run, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[tuple[str, str], float] = {}
        """Graph and node with rows that are ready -> until when they may wait."""

    @property
    def next_end_s(self) -> float | None:
        """When the first of the waits that are not over ends, by the run's clock; None: there is none."""
        now = self._clock()
        return min((until for until in self._until.values() if until - now > CLOCK_S), default=None)

    def look(self, graph_run: GraphRun, node: Node, under_way: UnderWay) -> None:
        """Note whether rows are ready for a node, which cannot begin now."""
        if not gathers(node):
            return
        if graph_run.ledger.readiness.ready(node):
            self._until.setdefault((graph_run.name, node.name), self._clock() + _wait_s(under_way))
        else:
            self._until.pop((graph_run.name, node.name), None)

    def holds(self, graph_run: GraphRun, node: Node, replicas: int, under_way: UnderWay) -> bool:
        """Whether the rows that are ready for a node wait for others.

        Args:
            replicas: of the node's worker group, among which the rows are spread.
            under_way: all calls of the run.
        """
        if not gathers(node):
            return False
        key, ledger, now = (graph_run.name, node.name), graph_run.ledger, self._clock()
        left_s = self._until.setdefault(key, now + _wait_s(under_way)) - now
        if left_s <= CLOCK_S or ledger.readiness.ready(node) >= MAX_ROWS * replicas or ledger.live.is_awaited(node):
            return False
        if not any(call.ledger is ledger for call in under_way):
            return False
        return under_way.ranks >= MANY_RANKS or ledger.live.lacks_siblings(node)

    def begin(self, graph_run: GraphRun, node: Node) -> None:
        """Note that a node begins with the rows that are ready for it."""
        self._until.pop((graph_run.name, node.name), None)


def _wait_s(under_way: UnderWay) -> float:
    return max(MAX_WAIT_S, gather_s(under_way.ranks))


def gathers(node: Node) -> bool:
    """Whether rows that are ready for a node may wait for others."""
    return not node.operation.takes_groups and node.operation.shape in (Shape.MAP, Shape.FILTER)
