"""LiveRows: the rows and groups of a graph that are not finished, and what becomes of a row when a node is done with it, does
without it, or drops it. Leases are `leases.py`, the log is the ledger's (`ledger.py`)."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence

from ..graph import Graph
from ..node import SOURCE, Node
from .readiness import Readiness
from .rows import Group, GroupState, Ids, Row, RowState
from .segments import Segment
from .stored_parts import StoredParts
from .wiring import Wiring


class LiveRows:
    """Rows and groups by id, what is ready of them, and where their columns lie.

    - A row is ready for a node when everything in the node's `after` is done with it and its ancestors.
    - A level of a group is complete when all that makes its rows is done with all that it makes them of.
    - A group retires when nothing is left to do with it: its rows are counted as done or dropped, and forgotten.
    """

    def __init__(self, graph: Graph, ids: Ids, clock: Callable[[], float]) -> None:
        """
        Args:
            ids: of the run.
            clock: seconds, for the deadlines of quorums.
        """
        self.graph = graph
        self.wiring = Wiring(graph)
        self.rows: dict[int, Row] = {}
        """In flight, by sample id."""
        self.groups: dict[int, Group] = {}
        """In flight, by group id, oldest first."""
        self.readiness = Readiness(self.wiring)
        self.parts = StoredParts()
        self.groups_of_step: Counter[int] = Counter()
        """Groups at work, by the step in which they were issued."""
        self.groups_behind = 0
        """Groups with which nothing is left to do but what follows behind."""
        self.largest_group = 0
        """Most rows that a finished group had, on all levels."""
        self._whole: list[set[int]] = [set() for _ in graph.nodes]
        """Node that takes rows -> groups of which rows may be ready for it and no more can become so. Others may be among them."""
        self.quorum_deadlines: list[tuple[float, int, int]] = []
        """Heap of (when, node, group) of quorums that were not reached yet."""
        self.issued = 0
        """Rows that were ever issued or made."""
        self.done = 0
        """Retired rows that were not dropped."""
        self.dropped: Counter[str] = Counter()
        """Rows dropped so far, by reason: the filter that dropped them, or "over-issued at", "late at", "stale at" a node."""
        self._ids = ids
        self._clock = clock

    # Rows come

    def issue(self, position: int, tokens: int, step: int) -> None:
        """A row of the source comes in, the root of a new group."""
        group = Group(self._ids.take_group(), position, step, tokens, self.wiring.num_levels, len(self.graph.nodes))
        self.groups[group.id] = group
        self.groups_of_step[step] += 1
        self.readiness.open_group()
        group.complete[SOURCE] = True
        self.add([Row(self._ids.take(1), group, None, SOURCE, tokens, None)])
        self.retire_if_finished(group)

    def issue_again(self, group: Group) -> None:
        """The prompt of a group that is lost or too old comes in once more."""
        self.issue(group.position, group.tokens, group.issued_in)

    def restore(self, group: Group) -> None:
        """A group that was in flight when it was saved is in flight again; its quorums have their whole deadlines."""
        self.groups[group.id] = group
        self.groups_behind += group.rested
        for i in range(len(self.graph.nodes)):
            self.note_if_whole(group, i)
        if not group.rested:
            self.groups_of_step[group.issued_in] += 1
        for i, quorum in enumerate(self.wiring.quorum):
            if quorum and group.ready[i] and group.state(i) is GroupState.GATHERING:
                self._set_quorum_deadline(group, i)

    def add(self, rows: Sequence[Row]) -> None:
        """Rows of one level are there, and what waits for nothing else may claim them."""
        if not rows:
            return
        level, wiring, known = rows[0].level, self.wiring, self.rows
        nodes, first, behind = wiring.on_level[level], wiring.first_on_level[level], wiring.behind_on_level[level]
        self.issued += len(rows)
        for i in nodes:
            self.readiness.todo[i] += len(rows)
        for row in rows:
            group = row.group
            known[row.id] = row
            group.levels[level].append(row)
            group.open += len(nodes)
            group.behind += behind
            for i in nodes if group.closed else ():
                if group.closed >> i & 1 and row.awaits(i):
                    # a quorum after another one does not see what is late at the first
                    self.cancel(row, i, f"late at {self.graph.nodes[i].name}")
            if row.parent is not None and (row.parent.skipped or row.parent.parent is not None):
                self._skip_what_is_cut_off(row)
        for i in first:
            self._offer_if_ready(rows, i)

    def _skip_what_is_cut_off(self, row: Row) -> None:
        """Skip the nodes that wait for something which the row's ancestors will never be through: they were dropped before it came."""
        above, cut = row.parent, 0
        while above is not None:
            above, cut = above.parent, cut | above.skipped
        for i in self.wiring.on_level[row.level] if cut else ():
            if self.wiring.is_cut_off(row, i):
                for j in (i, *self.wiring.downstream[i]):
                    node = self.graph.nodes[j]
                    if node.level == row.level and not row.skipped >> j & 1:
                        self.skip(row, j)
                        if node.makes_level is not None:
                            self._finish_level_if_complete(row.group, node.makes_level)

    def _offer_if_ready(self, rows: Iterable[Row], i: int) -> None:
        """Offer those of these rows to node i for which nothing else is left to be done before it."""
        wiring, bit, own, above = self.wiring, 1 << i, self.wiring.needs_of_row[i], self.wiring.needs_above[i]
        ready: list[Row] = []
        for row in rows:
            done = row.done
            if done & own != own or (row.offered | row.skipped | done) & bit or (above and not wiring.is_ready(row, i)):
                continue
            row.offered |= bit
            ready.append(row)
        if wiring.quorum[i]:
            for row in ready:
                self._offer_to_quorum(row, i)
        elif wiring.takes_groups[i]:
            counts = Counter([row.group for row in ready])
            for group, number in counts.items():
                group.ready[i] += number
                self._offer_group_if_ready(group, i)
        elif ready:
            self.readiness.offer_rows(ready, i)
            level = wiring.level[i]
            for group in {row.group: None for row in ready if row.group.complete[level]}:
                self.note_if_whole(group, i)

    def _offer_to_quorum(self, row: Row, i: int) -> None:
        group = row.group
        group.ready[i] += 1
        group.order = group.order or {}
        group.order.setdefault(i, []).append(row)
        if group.ready[i] == 1:
            self._set_quorum_deadline(group, i)
        self.readiness.num_rows[i] += group.offered >> i & 1 and group.ready[i] <= self.wiring.quorum[i]
        self._offer_group_if_ready(group, i)

    def _set_quorum_deadline(self, group: Group, i: int) -> None:
        """From now on a quorum waits no longer than its deadline says for more rows of a group."""
        quorum = self.graph.nodes[i].operation.quorum
        if quorum and quorum.deadline_s is not None:
            heapq.heappush(self.quorum_deadlines, (self._clock() + quorum.deadline_s, i, group.id))

    def _offer_group_if_ready(self, group: Group, i: int) -> None:
        if not self.wiring.takes_groups[i] or group.offered >> i & 1:
            return
        if self.wiring.behind[i] and not group.rested:
            return
        level = self.wiring.level[i]
        expected = len(group.levels[level]) - group.skipped[i]
        whole = group.complete[level] and group.ready[i] == expected > 0
        if whole or 0 < self.wiring.quorum[i] <= group.ready[i]:
            self.readiness.offer_group(group, i)

    def _finish_level_if_complete(self, group: Group, level: int) -> None:
        """Mark a level complete when nothing that makes its rows is left to do, then look one level further."""
        i = self.wiring.maker[level]
        above = self.wiring.level[i]
        finished = group.expanded[i] + group.skipped[i]
        if group.complete[level] or not group.complete[above] or finished < len(group.levels[above]):
            return
        group.complete[level] = True
        self.readiness.unfinished_levels[level] -= 1
        for j in self.wiring.on_level[level]:
            self._offer_group_if_ready(group, j)
            self.note_if_whole(group, j)
            makes = self.graph.nodes[j].makes_level
            if makes is not None:
                self._finish_level_if_complete(group, makes)

    def cancel(self, row: Row, i: int, reason: str) -> None:
        """Node i has its quorum without this row; work on it for the quorum alone is over, too, unless it is under way."""
        self.drop(row, i, reason)
        row.cancelled |= 1 << i
        for j in self.wiring.upstream_only[i]:
            if row.awaits(j) and not row.leased >> j & 1:
                self.skip(row, j)

    def finish(self, rows: Sequence[Row], i: int) -> None:
        """Node i is done with some rows."""
        wiring, bit, behind = self.wiring, 1 << i, self.wiring.behind[i]
        others = ~bit
        self.readiness.todo[i] -= len(rows)
        for row in rows:
            row.done |= bit
            row.leased &= others
        groups = Counter([row.group for row in rows])
        for group, number in groups.items():
            group.open -= number
            group.behind -= number * behind
        for j in wiring.then[i]:
            level = wiring.level[j]
            if level == wiring.level[i]:
                self._offer_if_ready(rows, j)
            else:
                self._offer_if_ready([below for row in rows for below in wiring.descendants(row, level)], j)
        made = self.graph.nodes[i].makes_level
        if made is not None:
            for group, number in groups.items():
                group.expanded[i] += number
                self._finish_level_if_complete(group, made)
        for group in groups:
            if group.open == group.behind:
                self.retire_if_finished(group)

    def drop(self, row: Row, i: int, reason: str) -> None:
        """Take a row away from node i, which has not seen it, and from everything downstream of it."""
        self.skip(row, i)
        makes = self.graph.nodes[i].makes_level
        if makes is not None:
            self._finish_level_if_complete(row.group, makes)
        self.drop_downstream(row, i, reason)

    def drop_downstream(self, row: Row, i: int, reason: str) -> None:
        """Take a row, and what was made of it, away from everything downstream of node i."""
        self.dropped[reason] += 1
        for j in self.wiring.downstream[i]:
            node = self.graph.nodes[j]
            for lost in self.wiring.descendants(row, node.level):
                if lost.awaits(j):
                    self.skip(lost, j)
            if node.makes_level is not None:
                self._finish_level_if_complete(row.group, node.makes_level)

    def skip(self, row: Row, j: int) -> None:
        """Node j will never see a row."""
        bit = 1 << j
        row.skipped |= bit
        self.readiness.todo[j] -= 1
        group = row.group
        group.open -= 1
        group.behind -= self.wiring.behind[j]
        group.skipped[j] += 1
        if row.offered & bit:
            if self.wiring.takes_groups[j]:
                group.ready[j] -= 1
            elif not row.leased & bit:
                self.readiness.num_rows[j] -= 1
        self._offer_group_if_ready(group, j)
        self.note_if_whole(group, j)

    def lose(self, group: Group, reason: str) -> None:
        """Nothing more is done with a group: all its rows count as dropped, whatever was done with them."""
        readiness = self.readiness
        readiness.set_version(group, None)  # what becomes of it below is counted no more
        for i, node in enumerate(self.graph.nodes):
            if self.wiring.takes_groups[i]:
                if group.state(i) is GroupState.HELD:
                    readiness.unhold_group(group, i)
                elif group.state(i) is GroupState.READY:
                    readiness.withdraw_group(group, i)
            group.offered |= 1 << i  # never again
            for row in group.levels[node.level]:
                if row.awaits(i):
                    self.skip(row, i)
        for level, complete in enumerate(group.complete):
            readiness.unfinished_levels[level] -= not complete
            group.complete[level] = True
        rows = [row for level in group.levels for row in level]
        for row in rows:
            row.skipped |= 1 << len(self.graph.nodes)  # a bit of no node
        self.dropped[reason] += len(rows)

    def retire_if_finished(self, group: Group) -> None:
        """Forget a group with which nothing is left to do."""
        if group.open != group.behind or not all(group.complete) or group.id not in self.groups:
            return
        if not group.rested:
            self._rest(group)
        if group.open:
            return
        rows = [row for level in group.levels for row in level]
        self.parts.finish(rows)
        known = self.rows
        for row in rows:
            row.children = None
            del known[row.id]
        self.done += len([1 for row in rows if not row.skipped])
        self.readiness.close_group(group)
        group.levels, group.order = [[] for _ in group.levels], None  # without circles its memory is free at once
        self.largest_group = max(self.largest_group, len(rows))
        self.groups_behind -= 1
        del self.groups[group.id]

    def _rest(self, group: Group) -> None:
        """Nothing is left to do with a group but what follows behind."""
        group.rested = True
        self.groups_behind += 1
        self.groups_of_step[group.issued_in] -= 1
        if not self.groups_of_step[group.issued_in]:
            del self.groups_of_step[group.issued_in]
        for i, behind in enumerate(self.wiring.behind):
            if behind:
                self._offer_group_if_ready(group, i)

    # What may be asked

    @property
    def groups_at_work(self) -> int:
        """How many groups still have work for a node that does not follow behind."""
        return len(self.groups) - self.groups_behind

    @property
    def ids_at_work(self) -> list[int]:
        """Ids of the groups at work, oldest first."""
        return [id for id, group in self.groups.items() if not group.rested]

    def positions_before(self, nodes: Iterable[Node]) -> list[int]:
        """Rows of the source of those groups in flight that none of these nodes has claimed, oldest first."""
        mask = sum(1 << self.wiring.index[node.name] for node in nodes)
        return [group.position for group in self.groups.values() if not group.claimed & mask]

    def note_if_whole(self, group: Group, i: int) -> None:
        """Note if rows of a group may be ready for node i, which takes rows, and no more rows of it can become ready there."""
        if self.wiring.takes_groups[i] or not group.complete[self.wiring.level[i]]:
            return
        bit = 1 << i
        if all((row.offered | row.skipped | row.done) & bit for row in group.levels[self.wiring.level[i]]):
            self._whole[i].add(group.id)

    def is_awaited(self, node: Node) -> bool:
        """Whether a quorum may be waiting for rows of a node."""
        return any(self.wiring.quorum[j] for j in self.wiring.downstream[self.wiring.index[node.name]])

    def lacks_siblings(self, node: Node) -> bool:
        """Whether rows are ready for a node that takes rows, each of a group of which more rows may come to it, and no quorum may be
        waiting for one of them."""
        i = self.wiring.index[node.name]
        if not self.readiness.num_rows[i] or self.is_awaited(node):
            return False
        level, whole = self.wiring.level[i], self._whole[i]
        while whole:
            id = next(iter(whole))
            group = self.groups.get(id)
            if group is not None and any(row.state(i) is RowState.READY for row in group.levels[level]):
                return False
            whole.discard(id)  # it is looked at once, and noted again if a row is given back
        return True

    def ready_in_step(self, node: Node) -> tuple[int, int]:
        """The step of what a claim on this node would get first, and how much it could get of that step alone: rows, or groups,
        whichever the node takes. It looks at all that is ready for the node."""
        i = self.wiring.index[node.name]
        if self.wiring.takes_groups[i]:
            queued = [self.groups.get(id) for id in sorted(self.readiness.group_queues[i])]
            groups = [group for group in queued if group is not None and group.state(i) is GroupState.READY]
        else:
            rows = [self.rows.get(id) for _, id in self.readiness.queued_rows(i)]
            groups = [row.group for row in rows if row is not None and row.awaits(i)]
        if not groups:
            return -1, 0
        step = groups[0].issued_in
        return step, sum(1 for _ in itertools.takewhile(lambda group: group.issued_in == step, groups))

    def oldest_held(self, node: Node) -> int | None:
        """Oldest policy version among the groups that are too old for this node and wait; None: there is none."""
        i = self.wiring.index[node.name]
        rows = (r for g in self.readiness.held_groups[i] for r in self.readiness.offered_rows(self.groups[g], i))
        return min((r.version for r in rows if r.version is not None and r.version >= 0), default=None)

    def groups_in(self, segments: Container[Segment]) -> list[tuple[int, Segment]]:
        """Groups with columns in one of these segments, each with the first that it has."""
        found: dict[int, Segment] = {}
        for row in self.rows.values():
            for part in row.parts:
                if part is not None and part.segment in segments:
                    found.setdefault(row.group.id, part.segment)
        return list(found.items())

    def is_in_training(self, group_id: int) -> bool:
        """Whether an update has begun with a group, and something other than what follows behind is still to be done with it."""
        group = self.groups[group_id]
        return not group.rested and any(group.claimed >> i & 1 for i in self.wiring.updates)

    def counts(self) -> dict[str, int]:
        """The conservation law: every row ever issued is exactly one of waiting, leased, done, or dropped."""
        leased = sum(1 for r in self.rows.values() if r.leased)
        dropped_live = sum(1 for r in self.rows.values() if r.skipped and not r.leased)
        retired = self.issued - len(self.rows)
        return {
            "issued": self.issued,
            "waiting": len(self.rows) - leased - dropped_live,
            "leased": leased,
            "done": self.done,
            "dropped": retired - self.done + dropped_live,
        }
