"""Readiness: what the nodes of a graph can claim now, and what is left for them to do.

    a row at a node that takes rows          blocked ──offer_row──> ready ──take_rows──> leased ──> done
    a group at a node that takes groups      gathering ──offer_group──> ready ──claim_group──> claimed
                                                           ^              │ └──hold──> held (too old for the bound) ──offer_group──> ready
                                                           └─unclaim_group┘

Everything here follows from the rows and groups in flight: a ledger that is loaded from them has the same (`==`).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from .rows import Group, Row
from .wiring import Wiring


def row_order(row: Row) -> tuple[int, int]:
    """The smallest is the first of the rows that a node claims: those of the oldest group come first, in order of their sample ids."""
    return row.group.id, row.id


def group_order(group: Group) -> int:
    """The smallest is the first of the groups that a node claims: the oldest. The checker's rules and the replay of a log rely on it."""
    return group.id


class Readiness:
    """Counts and queues by node, kept at each event. An entry of a queue whose row or group was taken away stays until it comes up."""

    def __init__(self, wiring: Wiring) -> None:
        number = len(wiring.graph.nodes)
        self._wiring = wiring
        self.row_queues: list[list[tuple[int, int]]] = [[] for _ in range(number)]
        """Heaps of `row_order`."""
        self.group_queues: list[list[int]] = [[] for _ in range(number)]
        """Heaps of `group_order`."""
        self.rows = [0] * number
        """Rows that are ready; of a node that takes groups, those of groups that are ready."""
        self.groups = [0] * number
        """Groups that are ready."""
        self.held: list[list[int]] = [[] for _ in range(number)]
        """Groups that are too old and wait for a larger bound."""
        self.unclaimed = [0] * number
        """Groups in flight that a node which takes groups has not claimed."""
        self.unclaimed_of: list[Counter[int]] = [Counter() for _ in range(number)]
        """Of an update: unclaimed groups by the version at which their generation began."""
        self.offered_of: list[Counter[int]] = [Counter() for _ in range(number)]
        """Those of them that were offered."""
        self.todo = [0] * number
        """Rows in flight that a node is not done with, and will see."""
        self.unfinished_levels = [0] * wiring.num_levels
        """Groups of which more rows of a level can come."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Readiness) and self.counts() == other.counts()

    def counts(self) -> Mapping[str, Any]:
        """All but the queues, in which entries may be left over."""
        return {name: value for name, value in vars(self).items() if not name.endswith("_queues") and name != "_wiring"}

    # Groups and rows come and go

    def open_group(self) -> None:
        for level in range(1, len(self.unfinished_levels)):
            self.unfinished_levels[level] += 1
        for i, takes_groups in enumerate(self._wiring.takes_groups):
            self.unclaimed[i] += takes_groups

    def close_group(self, group: Group) -> None:
        self.tally(group, -1)
        for i, takes_groups in enumerate(self._wiring.takes_groups):
            self.unclaimed[i] -= takes_groups and not group.claimed >> i & 1

    def set_version(self, group: Group, version: int | None) -> None:
        """The generation of a group begins under the weights of this version; None: it has not begun."""
        self.tally(group, -1)
        group.version = version
        self.tally(group, 1)

    def tally(self, group: Group, by: int) -> None:
        """Take a group out of the counts by version (-1) before what they count changes, and in again (1) afterwards."""
        if group.version is None:
            return
        for i in self._wiring.updates:
            if not group.claimed >> i & 1:
                for counts in (self.unclaimed_of[i], self.offered_of[i])[: 1 + (group.offered >> i & 1)]:
                    counts[group.version] += by
                    if not counts[group.version]:
                        del counts[group.version]

    # Rows

    def offer_row(self, row: Row, i: int) -> None:
        """A row is ready for node i."""
        heapq.heappush(self.row_queues[i], row_order(row))
        self.rows[i] += 1

    def take_rows(self, i: int, number: int | None, known: Mapping[int, Row]) -> list[Row]:
        """At most so many of the rows in flight that are ready for node i, in `row_order`."""
        queue, rows = self.row_queues[i], []
        if number is None or number >= len(queue):
            entries, queue[:] = sorted(queue), []
        else:
            entries = _popped(queue)
        for _, id in entries:
            row = known.get(id)
            if row is not None and not (row.skipped | row.done) >> i & 1:
                rows.append(row)
                if len(rows) == number:
                    break
        self.rows[i] -= len(rows)
        return rows

    # Groups

    def rows_of(self, group: Group, i: int) -> int:
        """Rows of a group that are ready for node i, to which it is offered."""
        if self._wiring.quorum[i]:
            return min(group.ready[i], self._wiring.quorum[i])
        return len(group.levels[self._wiring.graph.nodes[i].level]) - group.skipped[i]

    def offer_group(self, group: Group, i: int) -> None:
        """A group is ready for node i."""
        self.tally(group, -1)
        group.offered |= 1 << i
        self.tally(group, 1)
        heapq.heappush(self.group_queues[i], group_order(group))
        self.groups[i] += 1
        self.rows[i] += self.rows_of(group, i)

    def withdraw_group(self, group: Group, i: int) -> None:
        """A group is not ready for node i any more."""
        self.rows[i] -= self.rows_of(group, i)
        self.groups[i] -= 1

    def claim_group(self, group: Group, i: int) -> None:
        """Node i has a group that was withdrawn."""
        self._set_claimed(group, group.claimed | 1 << i)
        self.unclaimed[i] -= 1

    def unclaim_group(self, group: Group, i: int) -> None:
        """Node i gives a group back, which is ready for it again."""
        self._set_claimed(group, group.claimed & ~(1 << i))
        self.unclaimed[i] += 1
        self.offer_group(group, i)

    def _set_claimed(self, group: Group, mask: int) -> None:
        self.tally(group, -1)
        group.claimed = mask
        self.tally(group, 1)

    # What may be asked

    def is_settled(self, i: int) -> bool:
        """Everything issued so far that will reach node i is ready for it, and none of it is leased."""
        if self._wiring.quorum[i]:
            return self.groups[i] == self.unclaimed[i] > 0
        return self.todo[i] > 0 and self._no_more_rows(i) and self.rows[i] == self.todo[i]

    def is_exhausted(self, i: int) -> bool:
        """Nothing issued so far is left for node i to do."""
        return self.todo[i] == 0 and self._no_more_rows(i)

    def _no_more_rows(self, i: int) -> bool:
        return self.unfinished_levels[self._wiring.graph.nodes[i].level] == 0

    def groups_until(self, i: int, version: int) -> tuple[int, int]:
        """Unclaimed groups whose generation began at this version or before, and how many of them were offered to node i."""
        unclaimed, offered = self.unclaimed_of[i], self.offered_of[i]
        return sum(unclaimed[v] for v in unclaimed if v <= version), sum(offered[v] for v in offered if v <= version)

    def is_empty(self, but: Collection[str] = ()) -> bool:
        """Nothing of any row is left, in the queues neither."""
        return not any(any(value) for name, value in vars(self).items() if name not in ("_wiring", *but))


def _popped(heap: list[Any]) -> Iterator[Any]:
    """The entries of a heap, smallest first, each taken off when it is asked for."""
    while heap:
        yield heapq.heappop(heap)
