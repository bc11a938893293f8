"""Readiness: what the nodes of a graph can claim now, and what is left for them to do.

    a row at a node that takes rows        RowState:    blocked ──offer_rows─> ready ──take_rows──> leased ──> done
    a group at a node that takes groups    GroupState:  gathering ──offer_group──> ready ──claim_group──> claimed
                                                                too old <──set_too_old──┘

Invariant: all of it follows from the groups in flight. What `Readiness.of` makes of them is what was kept event by event.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate

from ..graph import SOURCE, Graph, Node
from .rows import Group, GroupState, Row, mask_of, places_in

# Wiring
#
# Wiring: how the nodes of a graph depend on each other, as the ledger needs it. Nodes are numbers:
# their places in `graph.nodes`.


class Wiring:
    """What the structure of a graph implies. Lists are indexed by node or by level; bit i of a mask is node i."""

    def __init__(self, graph: Graph) -> None:
        nodes = graph.nodes
        self.graph = graph
        self.index = {n.name: i for i, n in enumerate(nodes)}
        self.level = [n.level for n in nodes]
        self.num_levels = max([SOURCE, *(n.makes_level for n in nodes if n.makes_level is not None)]) + 1
        self.maker = {n.makes_level: i for i, n in enumerate(nodes) if n.makes_level is not None}
        """Level -> the node that makes its rows."""
        self.on_level = [
            [i for i, n in enumerate(nodes) if n.level == lv] for lv in range(self.num_levels)
        ]
        self.takes_groups = [n.operation.takes_groups for n in nodes]
        self.behind = [n.operation.behind for n in nodes]
        self.quorum = [n.operation.quorum.n if n.operation.quorum else 0 for n in nodes]
        """Number of rows in each node's quorum; 0 for a node without one."""
        self.updates = [i for i, n in enumerate(nodes) if n.operation.updates]
        self.above = [SOURCE, *(graph.parent_level(lv) for lv in range(1, self.num_levels))]
        """Level -> the level of the rows that its rows are made of."""
        needs = [self._needs(n) for n in nodes]
        self.needs_of_row = [[j for lv, j in needs[i] if lv == n.level] for i, n in enumerate(nodes)]
        """For each node, those that must be done with a row before the row is ready."""
        self.needs_above = [[(lv, j) for lv, j in needs[i] if lv != n.level] for i, n in enumerate(nodes)]
        """For each node, (level, node) of those that must be done with an ancestor of the row."""
        self.first_on_level = [[i for i in own if not self.needs_of_row[i]] for own in self.on_level]
        """Level -> its nodes that a new row may be ready for."""
        self.may_be_cut_off = [any(self.needs_above[i] for i in own) for own in self.on_level]
        """Level -> whether one of its nodes waits for something to be done with an ancestor of its rows."""
        self.behind_on_level = [sum(self.behind[i] for i in own) for own in self.on_level]
        """Level -> how many of its nodes follow behind."""
        self.then = [
            [j for j, m in enumerate(nodes) if n.name in m.after and n.makes_level != m.level]
            for n in nodes
        ]
        """For each node, the nodes that a row may become ready for when it is done: on the row's level, and on deeper ones."""
        self.downstream = [self._downstream(n) for n in nodes]
        """For each node, the nodes that see only the rows that it lets through: its dependents, and theirs. The nodes that see the rows it
        makes are not included: existing rows go on when it makes no more."""
        self.upstream_only = [self._upstream_only(i) if self.quorum[i] else [] for i in range(len(nodes))]
        """For each quorum, the nodes of its level whose results are only used by it and by what comes after it."""
        self.served = [
            [i for i, own in enumerate(self.upstream_only) if j in own] for j in range(len(nodes))
        ]
        """For each node, the quorums that it is upstream-only of."""
        self.makes_for = [self._makes_for(i) if self.quorum[i] else None for i in range(len(nodes))]
        """For each quorum, the node that makes its rows, if only the quorum, its upstream-only nodes and what comes after it use them."""

    def ends_in_quorum(self, i: int) -> bool:
        """Whether rows that node i finishes may become ready for a quorum, which takes them in the order in which they do."""
        return any(self.quorum[j] for j in self.then[i])

    def through_above(self, group: Group, i: int, mask: int) -> int:
        """Those of these rows with whose ancestors all nodes are done that node i waits for."""
        for level, j in self.needs_above[i]:
            mask &= self.below(group, level, group.levels[level].done[j], self.level[i])
        return mask

    def cut_off(self, group: Group, i: int) -> int:
        """Mask of the rows of which node i waits for a node that will never be done with an ancestor."""
        mask = 0
        for level, j in self.needs_above[i]:
            mask |= self.below(group, level, group.levels[level].skipped[j], self.level[i])
        return mask

    def has_passed(self, row: Row, name: str) -> bool:
        """Whether a node is done with a row or its ancestor."""
        node = self.graph[name]
        if self._makes_ancestor(node, row.level):
            return True
        owner = row.ancestor(node.level)
        return bool(owner.group.levels[owner.level].done[self.index[name]] >> owner.place & 1)

    def below(self, group: Group, level: int, mask: int, made: int) -> int:
        """Mask of the rows of the level `made` that come from these rows of a level: the rows themselves, or their descendants."""
        path: list[int] = []
        while made not in (SOURCE, level):
            path.append(made)
            made = self.above[made]
        if made != level:
            return 0
        for lower in reversed(path):
            rows = group.levels[lower]
            if mask == group.levels[rows.above].all:
                mask = rows.all
            elif mask:
                mask = mask_of([place for place, parent in enumerate(rows.parents) if mask >> parent & 1])
        return mask

    def _needs(self, node: Node) -> list[tuple[int, int]]:
        """Level and number of the nodes that must be done with a row, or its ancestor, before the row is ready for a node."""
        found: set[tuple[int, int]] = set()
        for name in node.after:
            before = self.graph[name]
            if before.makes_level != node.level and not self._makes_ancestor(before, node.level):
                found.add((before.level, self.index[name]))
        return sorted(found)

    def _makes_ancestor(self, node: Node, level: int) -> bool:
        while level != SOURCE:
            if node.makes_level == level:
                return True  # the row exists, so this node made it
            level = self.above[level]
        return False

    def _downstream(self, node: Node) -> list[int]:
        reached = {node.name}
        for other in self.graph.nodes:  # recorded in an order in which dependencies come first
            made = self._makes_ancestor(node, other.level)
            if any(a in reached and not (a == node.name and made) for a in other.after):
                reached.add(other.name)
        return [self.index[name] for name in reached if name != node.name]

    def _users(self, node: Node) -> set[int]:
        return {k for k, m in enumerate(self.graph.nodes) if node.name in m.after}

    def _upstream_only(self, i: int) -> list[int]:
        served = {i, *self.downstream[i]}
        found: list[int] = []
        for j in reversed(
            range(len(self.graph.nodes))
        ):  # recorded before node i or after it, on a branch of its own
            node = self.graph.nodes[j]
            users = self._users(node)
            alike = (
                node.level == self.graph.nodes[i].level
                and node.makes_level is None
                and not self.takes_groups[j]
            )
            if j not in served and alike and users and users <= served:
                served.add(j)
                found.append(j)
        return found

    def _makes_for(self, i: int) -> int | None:
        j = self.maker.get(self.graph.nodes[i].level)
        if j is None or self.takes_groups[j]:
            return None
        alone = self._users(self.graph.nodes[j]) <= {i, *self.downstream[i], *self.upstream_only[i]}
        return j if alone else None


FEW = 8
"""Groups that are fewer than one in so many of a heap are pushed on it one by one; of more, the heap is made anew."""


YOUNGEST = 1 << 62
"""Sorts rows that no policy generated behind all others: they never become too old."""


class Readiness:
    """Counts and queues by node, kept at each event.

    An entry of a queue whose row or group was taken away stays until it comes up, and counts for nothing.
    """

    def __init__(self, wiring: Wiring) -> None:
        number = len(wiring.graph.nodes)
        self._wiring = wiring
        self.row_queues: list[list[int]] = [[] for _ in range(number)]
        """Heaps of the ids of groups that may have rows which are ready: a node claims those of the oldest group first."""
        self.fresh_row_queues: list[list[int]] = [[] for _ in range(number)]
        """The same of groups whose rows have come since the last claim, in no order yet."""
        self.in_row_queues: list[set[int]] = [set() for _ in range(number)]
        """All of these, to look one up."""
        self.group_queues: list[list[tuple[int, int]]] = [[] for _ in range(number)]
        """Heaps of (age, group id), as `_order` sorts them."""
        self.num_rows = [0] * number
        """Rows that are ready; of a node that takes groups, those of groups that are ready."""
        self.num_groups = [0] * number
        """Groups that are ready."""
        self.num_unclaimed = [0] * number
        """Groups in flight that a node which takes groups has not claimed."""
        self.too_old_groups: list[set[int]] = [set() for _ in range(number)]
        """Groups that are too old and wait for a larger bound."""
        self.unclaimed_of: list[Counter[int]] = [Counter() for _ in range(number)]
        """Of an update: unclaimed groups by the version at which their generation began."""
        self.offered_of: list[Counter[int]] = [Counter() for _ in range(number)]
        """The groups among these that were offered."""
        self.todo = [0] * number
        """Rows in flight that a node has still to finish."""
        self.unfinished_levels = [0] * wiring.num_levels
        """Number of groups in which more rows of a level can come."""

    @classmethod
    def of(cls, wiring: Wiring, groups: Iterable[Group]) -> Readiness:
        """The readiness of these groups, computed from the states of their rows."""
        readiness = cls(wiring)
        for group in groups:
            readiness._add(group)
        return readiness

    def _add(self, group: Group) -> None:
        self.tally(group, 1)
        for level, complete in enumerate(group.complete):
            self.unfinished_levels[level] += not complete
        for i, node in enumerate(self._wiring.graph.nodes):
            rows = group.levels[node.level]
            self.todo[i] += rows.awaiting(i).bit_count()
            if not self._wiring.takes_groups[i]:
                if number := rows.ready(i).bit_count():
                    self.offer_rows(group, number, i)
                continue
            state = group.state(i)
            self.num_unclaimed[i] += state is not GroupState.CLAIMED
            if state is GroupState.TOO_OLD:
                self.too_old_groups[i].add(group.id)
            elif state is GroupState.READY:
                self._enqueue(group, i)

    # Groups and rows come and go

    def open_group(self) -> None:
        for level in range(1, len(self.unfinished_levels)):
            self.unfinished_levels[level] += 1
        for i, takes_groups in enumerate(self._wiring.takes_groups):
            self.num_unclaimed[i] += takes_groups

    def close_group(self, group: Group) -> None:
        self.tally(group, -1)
        for i, takes_groups in enumerate(self._wiring.takes_groups):
            self.num_unclaimed[i] -= takes_groups and not group.claimed >> i & 1

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

    def offer_rows(self, group: Group, number: int, i: int) -> None:
        """So many rows of a group are ready for node i."""
        if group.id not in self.in_row_queues[i]:
            self.in_row_queues[i].add(group.id)
            self.fresh_row_queues[i].append(group.id)
        self.num_rows[i] += number

    def take_rows(
        self, i: int, number: int | None, known: Mapping[int, Group]
    ) -> list[tuple[Group, int]]:
        """At most so many of the rows that are ready for node i, in the order of their groups and ids: masks of the rows by group."""
        queue, fresh, level = self.row_queues[i], self.fresh_row_queues[i], self._wiring.level[i]
        taken: list[tuple[Group, int]] = []
        if number is None or number >= self.num_rows[i]:
            ids, self.row_queues[i], self.in_row_queues[i] = sorted(queue + fresh), [], set()
            number = self.num_rows[i]
            for id in ids:
                group = known.get(id)
                if group is None:
                    continue
                rows = group.levels[level]
                if mask := rows.ready(i):
                    taken.append((group, mask))
        else:
            taken = self._take_some(i, number, known)
        fresh.clear()
        self.num_rows[i] -= number
        return taken

    def _take_some(self, i: int, number: int, known: Mapping[int, Group]) -> list[tuple[Group, int]]:
        queue, fresh, level = self.row_queues[i], self.fresh_row_queues[i], self._wiring.level[i]
        if len(fresh) * FEW > len(queue):
            queue += fresh
            heapq.heapify(queue)
        else:
            for id in fresh:
                heapq.heappush(queue, id)
        taken: list[tuple[Group, int]] = []
        while number:
            group = known.get(queue[0])
            mask = group.levels[level].ready(i) if group is not None else 0
            if mask.bit_count() > number and group is not None:  # the others of the group stay
                rows = group.levels[level]
                mask = mask_of(rows.in_order(mask)[:number])
            else:
                self.in_row_queues[i].remove(heapq.heappop(queue))
            number -= mask.bit_count()
            if group is not None and mask:
                taken.append((group, mask))
        return taken

    # Groups

    def offered_rows(self, group: Group, i: int) -> int:
        """The rows of a group that node i, to which it is offered, gets."""
        quorum = self._wiring.quorum[i]
        if quorum:
            return mask_of((group.order or {})[i][:quorum])
        rows = group.levels[self._wiring.level[i]]
        return rows.all & ~rows.skipped[i]

    def num_offered(self, group: Group, i: int) -> int:
        """How many these are."""
        quorum = self._wiring.quorum[i]
        return min(group.num_ready(i), quorum) if quorum else self.offered_rows(group, i).bit_count()

    def offer_group(self, group: Group, i: int) -> None:
        """A group is ready for node i."""
        self.tally(group, -1)
        group.offered |= 1 << i
        self.tally(group, 1)
        self._enqueue(group, i)

    def _enqueue(self, group: Group, i: int) -> None:
        heapq.heappush(self.group_queues[i], self._order(group, i))
        self.num_groups[i] += 1
        self.num_rows[i] += self.num_offered(group, i)

    def _order(self, group: Group, i: int) -> tuple[int, int]:
        """Sort key of the groups that node i claims. An update takes the groups with the oldest tokens first, because they are the first
        to become too old. Group ids do not tell the age: a group that is generated again is younger than its id."""
        return (self.oldest_version(group, i) if i in self._wiring.updates else 0), group.id

    def oldest_version(self, group: Group, i: int) -> int:
        """Oldest policy version in the rows that a group offers to node i; YOUNGEST if no policy generated them."""
        versions = group.levels[self._wiring.level[i]].versions
        offered = places_in(self.offered_rows(group, i))
        return min(
            (v for place in offered if (v := versions[place]) is not None and v >= 0), default=YOUNGEST
        )

    def first_group(self, i: int, known: Mapping[int, Group]) -> Group | None:
        """The next ready group of node i, or None."""
        queue = self.group_queues[i]
        while queue:
            group = known.get(queue[0][1])
            if group is not None and group.state(i) is GroupState.READY:
                return group
            heapq.heappop(queue)
        return None

    def ready_ids(self, i: int, known: Mapping[int, Group]) -> list[int]:
        """Ids of the groups in flight that are ready for node i, which takes groups, in order of their ids."""
        queued = {id for _, id in self.group_queues[i]}
        return sorted(id for id in queued if id in known and known[id].state(i) is GroupState.READY)

    def withdraw_group(self, group: Group, i: int) -> None:
        """A group is not ready for node i any more. Its entry in the queue counts for nothing."""
        self.num_rows[i] -= self.num_offered(group, i)
        self.num_groups[i] -= 1

    def set_too_old(self, group: Group, i: int) -> None:
        """A group that was withdrawn is too old for node i, and waits for a larger bound."""
        group.too_old |= 1 << i
        self.too_old_groups[i].add(group.id)

    def clear_too_old(self, group: Group, i: int) -> None:
        """A group waits no longer for a larger bound of node i."""
        group.too_old &= ~(1 << i)
        self.too_old_groups[i].remove(group.id)

    def claim_group(self, group: Group, i: int) -> None:
        """Node i has a group that was withdrawn."""
        self._set_claimed(group, group.claimed | 1 << i)
        self.num_unclaimed[i] -= 1

    def unclaim_group(self, group: Group, i: int) -> None:
        """Node i gives a group back, which is ready for it again."""
        self._set_claimed(group, group.claimed & ~(1 << i))
        self.num_unclaimed[i] += 1
        self.offer_group(group, i)

    def _set_claimed(self, group: Group, mask: int) -> None:
        self.tally(group, -1)
        group.claimed = mask
        self.tally(group, 1)

    # What may be asked

    def ready(self, node: Node) -> int:
        """Rows that a claim on this node could get now."""
        return self.num_rows[self._wiring.index[node.name]]

    def ready_groups(self, node: Node) -> int:
        """Groups that a claim on this node could get now (nodes that take groups or batches)."""
        return self.num_groups[self._wiring.index[node.name]]

    def unclaimed(self, node: Node) -> int:
        """Groups in flight that this node (which takes groups or batches) has not claimed."""
        return self.num_unclaimed[self._wiring.index[node.name]]

    def too_old(self, node: Node) -> int:
        """Groups that are too old for this node and wait for a larger bound."""
        return len(self.too_old_groups[self._wiring.index[node.name]])

    def settled(self, node: Node) -> bool:
        """Everything issued so far that will reach this node is ready for it, and none of it is leased."""
        i = self._wiring.index[node.name]
        if self._wiring.quorum[i]:
            return self.num_groups[i] == self.num_unclaimed[i] > 0
        return (
            self.todo[i] > 0
            and self.unfinished_levels[node.level] == 0
            and self.num_rows[i] == self.todo[i]
        )

    def exhausted(self, node: Node) -> bool:
        """Nothing issued so far is left for this node to do."""
        return self.todo[self._wiring.index[node.name]] == 0 and self.unfinished_levels[node.level] == 0

    def not_offered_until(self, node: Node) -> list[tuple[int, int]]:
        """Groups that this node (which updates) has not claimed and that were not offered to it: for each version at which the
        generation of some unclaimed group began, how many of them began at it or before, in the order of the versions."""
        i = self._wiring.index[node.name]
        unclaimed, offered = self.unclaimed_of[i], self.offered_of[i]
        versions = sorted(unclaimed)
        return list(
            zip(versions, accumulate(unclaimed[v] - offered.get(v, 0) for v in versions), strict=True)
        )
