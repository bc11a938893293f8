"""Readiness: the rows and groups that each node can claim, and its remaining work.

    a row at a node that takes rows        RowState:    blocked ──offer_rows─> ready ──take_rows──> leased ──> done
    a group at a node that takes groups    GroupState:  gathering ──offer_group──> ready ──claim_group──> claimed
                                                            too old <──set_too_old──┘

Invariant: the state kept event by event equals what `Readiness.of` computes from the groups in
flight.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate

from ..graph import SOURCE, Graph, Node
from .rows import Group, GroupState, Row, mask_of, places_in

# Wiring


class Wiring:
    """Dependencies between the nodes of a graph.

    Nodes are indexes into `graph.nodes`. Lists are indexed by node or by level; bit i of a mask is
    node i.
    """

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
        """Rows in each node's quorum; 0 without a quorum."""
        self.updates = [i for i, n in enumerate(nodes) if n.operation.updates]
        self.above = [SOURCE, *(graph.parent_level(lv) for lv in range(1, self.num_levels))]
        """Level -> the level of its parents."""
        needs = [self._needs(n) for n in nodes]
        self.needs_of_row = [[j for lv, j in needs[i] if lv == n.level] for i, n in enumerate(nodes)]
        """Node -> nodes that must be done with a row before it is ready."""
        self.needs_above = [[(lv, j) for lv, j in needs[i] if lv != n.level] for i, n in enumerate(nodes)]
        """Node -> (level, node) of nodes that must be done with an ancestor of a row before it is
        ready."""
        self.first_on_level = [[i for i in own if not self.needs_of_row[i]] for own in self.on_level]
        """Level -> nodes that a new row may be ready for."""
        self.may_be_cut_off = [any(self.needs_above[i] for i in own) for own in self.on_level]
        """Level -> whether one of its nodes depends on ancestors of its rows."""
        self.behind_on_level = [sum(self.behind[i] for i in own) for own in self.on_level]
        self.then = [
            [j for j, m in enumerate(nodes) if n.name in m.after and n.makes_level != m.level]
            for n in nodes
        ]
        """Node -> nodes that may become ready when it finishes a row, on the same level or deeper
        ones."""
        self.downstream = [self._downstream(n) for n in nodes]
        """Node -> nodes that only see rows that it lets through: its dependents, and theirs. Nodes
        that see the rows it makes are not included, because existing rows continue if it makes no
        more."""
        self.upstream_only = [self._upstream_only(i) if self.quorum[i] else [] for i in range(len(nodes))]
        """Quorum -> nodes of its level whose results only the quorum and its downstream nodes use."""
        self.served = [
            [i for i, own in enumerate(self.upstream_only) if j in own] for j in range(len(nodes))
        ]
        """Node -> quorums that it is upstream-only of."""
        self.makes_for = [self._makes_for(i) if self.quorum[i] else None for i in range(len(nodes))]
        """Quorum -> the node that makes its rows, if only the quorum, its upstream-only nodes and
        its downstream nodes use them."""

    def ends_in_quorum(self, i: int) -> bool:
        """Return whether rows that node i finishes may go to a quorum, so that their order matters."""
        return any(self.quorum[j] for j in self.then[i])

    def through_above(self, group: Group, i: int, mask: int) -> int:
        """Return the rows whose ancestors are done at all nodes that node i waits for."""
        for level, j in self.needs_above[i]:
            mask &= self.below(group, level, group.levels[level].done[j], self.level[i])
        return mask

    def cut_off(self, group: Group, i: int) -> int:
        """Return the mask of rows that never become ready for node i, because an ancestor was
        skipped."""
        mask = 0
        for level, j in self.needs_above[i]:
            mask |= self.below(group, level, group.levels[level].skipped[j], self.level[i])
        return mask

    def has_passed(self, row: Row, name: str) -> bool:
        node = self.graph[name]
        if self._makes_ancestor(node, row.level):
            return True
        owner = row.ancestor(node.level)
        return bool(owner.group.levels[owner.level].done[self.index[name]] >> owner.place & 1)

    def below(self, group: Group, level: int, mask: int, made: int) -> int:
        """Return the mask of the rows on level `made` that descend from these rows, or the rows
        themselves."""
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
        for other in self.graph.nodes:  # dependencies come first
            made = self._makes_ancestor(node, other.level)
            if any(a in reached and not (a == node.name and made) for a in other.after):
                reached.add(other.name)
        return [self.index[name] for name in reached if name != node.name]

    def _users(self, node: Node) -> set[int]:
        return {k for k, m in enumerate(self.graph.nodes) if node.name in m.after}

    def _upstream_only(self, i: int) -> list[int]:
        served = {i, *self.downstream[i]}
        found: list[int] = []
        for j in reversed(range(len(self.graph.nodes))):  # a branch may also come after node i
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


# Readiness

FEW = 8
"""If a heap is more than this times as large as the list of new groups, push them one by one;
otherwise heapify all."""


YOUNGEST = 1 << 62
"""Sort key for rows that no policy generated: after all others, because they never become too old."""


class Readiness:
    """Counts and queues by node, updated at each event.

    Stale entries stay in a queue until they reach its head, and are not counted.
    """

    def __init__(self, wiring: Wiring) -> None:
        number = len(wiring.graph.nodes)
        self._wiring = wiring
        self.row_queues: list[list[int]] = [[] for _ in range(number)]
        """Heaps of ids of groups that may have ready rows. A node claims rows of the oldest group
        first."""
        self.fresh_row_queues: list[list[int]] = [[] for _ in range(number)]
        """Groups that got ready rows since the last claim, unsorted."""
        self.in_row_queues: list[set[int]] = [set() for _ in range(number)]
        self.group_queues: list[list[tuple[int, int]]] = [[] for _ in range(number)]
        """Heaps of (age, group id), sorted by `_order`."""
        self.num_rows = [0] * number
        """Ready rows; for a node that takes groups, rows of ready groups."""
        self.num_groups = [0] * number
        self.num_unclaimed = [0] * number
        """Groups in flight that a node which takes groups has not claimed."""
        self.too_old_groups: list[set[int]] = [set() for _ in range(number)]
        self.unclaimed_of: list[Counter[int]] = [Counter() for _ in range(number)]
        """For an update: version when generation began -> unclaimed groups."""
        self.offered_of: list[Counter[int]] = [Counter() for _ in range(number)]
        """The part of `unclaimed_of` that was offered."""
        self.todo = [0] * number
        self.unfinished_levels = [0] * wiring.num_levels
        """Number of groups that can get more rows on a level."""

    @classmethod
    def of(cls, wiring: Wiring, groups: Iterable[Group]) -> Readiness:
        """Compute the readiness of groups from the states of their rows."""
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

    # Open and close groups

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
        """Set the policy version when a group's generation began; None if it has not begun."""
        self.tally(group, -1)
        group.version = version
        self.tally(group, 1)

    def tally(self, group: Group, by: int) -> None:
        """Remove a group from the counts by version (-1) before a change, and add it again (1)
        afterwards."""
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
        if group.id not in self.in_row_queues[i]:
            self.in_row_queues[i].add(group.id)
            self.fresh_row_queues[i].append(group.id)
        self.num_rows[i] += number

    def take_rows(
        self, i: int, number: int | None, known: Mapping[int, Group]
    ) -> list[tuple[Group, int]]:
        """Take up to `number` ready rows for node i, in order of group and id, as masks by group."""
        queue, fresh, level = self.row_queues[i], self.fresh_row_queues[i], self._wiring.level[i]
        taken: list[tuple[Group, int]] = []
        # Taking everything needs no heap.
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
        """Return the rows of a group that node i gets when it claims the group."""
        quorum = self._wiring.quorum[i]
        if quorum:
            return mask_of((group.order or {})[i][:quorum])
        rows = group.levels[self._wiring.level[i]]
        return rows.all & ~rows.skipped[i]

    def num_offered(self, group: Group, i: int) -> int:
        """Return how many rows node i gets when it claims the group."""
        quorum = self._wiring.quorum[i]
        return min(group.num_ready(i), quorum) if quorum else self.offered_rows(group, i).bit_count()

    def offer_group(self, group: Group, i: int) -> None:
        self.tally(group, -1)
        group.offered |= 1 << i
        self.tally(group, 1)
        self._enqueue(group, i)

    def _enqueue(self, group: Group, i: int) -> None:
        heapq.heappush(self.group_queues[i], self._order(group, i))
        self.num_groups[i] += 1
        self.num_rows[i] += self.num_offered(group, i)

    def _order(self, group: Group, i: int) -> tuple[int, int]:
        """Return the sort key of a group in the queue of node i.

        An update takes the groups with the oldest tokens first, because they become too old first.
        Group ids do not tell the age, because a group may be generated again.
        """
        return (self.oldest_version(group, i) if i in self._wiring.updates else 0), group.id

    def oldest_version(self, group: Group, i: int) -> int:
        """Return the oldest policy version in the rows that a group offers to node i; YOUNGEST if
        no policy generated them."""
        versions = group.levels[self._wiring.level[i]].versions
        offered = places_in(self.offered_rows(group, i))
        return min(
            (v for place in offered if (v := versions[place]) is not None and v >= 0), default=YOUNGEST
        )

    def first_group(self, i: int, known: Mapping[int, Group]) -> Group | None:
        queue = self.group_queues[i]
        while queue:
            group = known.get(queue[0][1])
            if group is not None and group.state(i) is GroupState.READY:
                return group
            # A stale entry: the group was claimed, dropped or set aside.
            heapq.heappop(queue)
        return None

    def ready_ids(self, i: int, known: Mapping[int, Group]) -> list[int]:
        """Return the sorted ids of the groups that are ready for node i, which takes groups."""
        queued = {id for _, id in self.group_queues[i]}
        return sorted(id for id in queued if id in known and known[id].state(i) is GroupState.READY)

    def withdraw_group(self, group: Group, i: int) -> None:
        """Mark a group as no longer ready for node i. Its queue entry becomes stale."""
        self.num_rows[i] -= self.num_offered(group, i)
        self.num_groups[i] -= 1

    def set_too_old(self, group: Group, i: int) -> None:
        """Mark a withdrawn group as too old for node i, so that it waits for a larger bound."""
        group.too_old |= 1 << i
        self.too_old_groups[i].add(group.id)

    def clear_too_old(self, group: Group, i: int) -> None:
        group.too_old &= ~(1 << i)
        self.too_old_groups[i].remove(group.id)

    def claim_group(self, group: Group, i: int) -> None:
        self._set_claimed(group, group.claimed | 1 << i)
        self.num_unclaimed[i] -= 1

    def unclaim_group(self, group: Group, i: int) -> None:
        self._set_claimed(group, group.claimed & ~(1 << i))
        self.num_unclaimed[i] += 1
        self.offer_group(group, i)

    def _set_claimed(self, group: Group, mask: int) -> None:
        self.tally(group, -1)
        group.claimed = mask
        self.tally(group, 1)

    # Queries

    def ready(self, node: Node) -> int:
        """Return how many rows a claim on this node could get."""
        return self.num_rows[self._wiring.index[node.name]]

    def ready_groups(self, node: Node) -> int:
        """Return how many groups a claim on this node could get (nodes that take groups or
        batches)."""
        return self.num_groups[self._wiring.index[node.name]]

    def unclaimed(self, node: Node) -> int:
        """Return how many groups in flight this node (which takes groups or batches) has not
        claimed."""
        return self.num_unclaimed[self._wiring.index[node.name]]

    def too_old(self, node: Node) -> int:
        """Return how many groups are too old for this node and wait for a larger bound."""
        return len(self.too_old_groups[self._wiring.index[node.name]])

    def settled(self, node: Node) -> bool:
        """Return whether all rows issued so far that will reach this node are ready there, and none
        is leased."""
        i = self._wiring.index[node.name]
        if self._wiring.quorum[i]:
            return self.num_groups[i] == self.num_unclaimed[i] > 0
        return (
            self.todo[i] > 0
            and self.unfinished_levels[node.level] == 0
            and self.num_rows[i] == self.todo[i]
        )

    def exhausted(self, node: Node) -> bool:
        """Return whether this node has no work left for the rows issued so far."""
        return self.todo[self._wiring.index[node.name]] == 0 and self.unfinished_levels[node.level] == 0

    def not_offered_until(self, node: Node) -> list[tuple[int, int]]:
        """Count the unclaimed groups that were not yet offered to an update, by version.

        Returns:
            For each version of an unclaimed group, ascending: the number of such groups that began
                at this version or before.
        """
        i = self._wiring.index[node.name]
        unclaimed, offered = self.unclaimed_of[i], self.offered_of[i]
        versions = sorted(unclaimed)
        return list(
            zip(versions, accumulate(unclaimed[v] - offered.get(v, 0) for v in versions), strict=True)
        )
