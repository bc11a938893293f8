"""Live rows: the rows and groups of a graph that are not finished, and what becomes of a row when a node is done with it, does
without it, or drops it. Claims, leases and the log are the ledger's (`ledger.py`)."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable

from ..graph import Graph
from ..node import SOURCE, Node
from .readiness import Readiness
from .rows import Group, Ids, Part, Row
from .segments import Segment
from .wiring import Wiring


class LiveRows:
    """The rows of a graph by id, their groups, and what is ready of them."""

    def __init__(self, graph: Graph, ids: Ids, clock: Callable[[], float]) -> None:
        self.graph = graph
        self._clock = clock
        self._ids = ids
        self._wiring = Wiring(graph)
        self._index = self._wiring.index
        self._rows: dict[int, Row] = {}
        self._groups: dict[int, Group] = {}
        self.rounds: Counter[int] = Counter()
        """Groups at work, by the round that they were issued in."""
        self.groups_behind = 0
        """Groups with which nothing is left to do but what follows behind."""
        self.readiness = Readiness(self._wiring)
        self._deadlines: list[tuple[float, int, int]] = []
        """(when, node, group) of quorums that are not reached, and (when, -1, token) of leases."""
        self._freed: deque[Segment] = deque()
        self.num_bytes = 0
        """Bytes of the segments that rows in flight lie in."""
        self.published_bytes: int = 0
        """Bytes published so far."""
        self.finished_bytes: float = 0.0
        """Those of finished groups: of a segment that several groups share, each has its rows' part."""
        self.largest_group = 0
        """Most rows that a finished group had, on all levels."""
        self.largest_group_bytes = 0
        """Most bytes that a finished group had."""
        self.groups_finished = 0
        self._issued = self._done = 0
        self._dropped: Counter[str] = Counter()

    def _issue(self, position: int, tokens: int, round: int) -> None:
        group = Group(self._ids.take_group(), round, tokens, self._wiring.num_levels, len(self.graph.nodes))
        self._groups[group.id] = group
        self.rounds[round] += 1
        self.readiness.open_group()
        group.complete[SOURCE] = True
        self._add(Row(self._ids.take(1), group, None, SOURCE, position, tokens, None))
        self._retire_if_finished(group)

    def _add(self, row: Row) -> None:
        self._rows[row.id] = row
        self._issued += 1
        row.group.levels[row.level].append(row)
        nodes = self._wiring.on_level[row.level]
        row.group.open += len(nodes)
        for i in nodes:
            self.readiness.todo[i] += 1
            row.group.behind += self._wiring.behind[i]
        for i in nodes:
            if row.group.closed >> i & 1:
                self._cancel(row, i, f"late at {self.graph.nodes[i].name}")
        self._skip_what_is_cut_off(row)
        for i in nodes:
            self._offer_if_ready(row, i)

    def _skip_what_is_cut_off(self, row: Row) -> None:
        """Skip the nodes that wait for something which the row's ancestors will never be through: they were dropped before it came."""
        above, cut = row.parent, 0
        while above is not None:
            above, cut = above.parent, cut | above.skipped
        for i in self._wiring.on_level[row.level] if cut else ():
            if self._wiring.is_cut_off(row, i):
                for j in (i, *self._wiring.downstream[i]):
                    node = self.graph.nodes[j]
                    if node.level == row.level and not row.skipped >> j & 1:
                        self._skip(row, j)
                        if node.makes_level is not None:
                            self._finish_level_if_complete(row.group, node.makes_level)

    def _offer_if_ready(self, row: Row, i: int) -> None:
        bit = 1 << i
        if (row.offered | row.skipped | row.done) & bit:
            return
        if not self._wiring.is_ready(row, i):
            return
        row.offered |= bit
        if self._wiring.takes_groups[i]:
            group = row.group
            group.ready[i] += 1
            if self._wiring.quorum[i]:
                self._await_quorum(row, i)
                self.readiness.rows[i] += group.offered >> i & 1 and group.ready[i] <= self._wiring.quorum[i]
            self._offer_group_if_ready(group, i)
        else:
            self.readiness.offer_row(row, i)

    def _await_quorum(self, row: Row, i: int) -> None:
        group = row.group
        group.order = group.order or {}
        group.order.setdefault(i, []).append(row)
        quorum = self.graph.nodes[i].operation.quorum
        if quorum and quorum.deadline_s is not None and group.ready[i] == 1:
            heapq.heappush(self._deadlines, (self._clock() + quorum.deadline_s, i, group.id))

    def _offer_group_if_ready(self, group: Group, i: int) -> None:
        if not self._wiring.takes_groups[i] or (group.offered | group.closed) >> i & 1:
            return
        if self._wiring.behind[i] and not group.rested:
            return
        level = self.graph.nodes[i].level
        expected = len(group.levels[level]) - group.skipped[i]
        whole = group.complete[level] and group.ready[i] == expected > 0
        if whole or 0 < self._wiring.quorum[i] <= group.ready[i]:
            self.readiness.offer_group(group, i)

    def _finish_level_if_complete(self, group: Group, level: int) -> None:
        """Mark a level complete when nothing that makes its rows is left to do, then look one level further."""
        i = self._wiring.maker[level]
        above = self.graph.nodes[i].level
        finished = group.expanded[i] + group.skipped[i]
        if group.complete[level] or not group.complete[above] or finished < len(group.levels[above]):
            return
        group.complete[level] = True
        self.readiness.unfinished_levels[level] -= 1
        for j in self._wiring.on_level[level]:
            self._offer_group_if_ready(group, j)
            makes = self.graph.nodes[j].makes_level
            if makes is not None:
                self._finish_level_if_complete(group, makes)

    def ready(self, node: Node) -> int:
        """Rows that a claim on this node could get now."""
        return self.readiness.rows[self._index[node.name]]

    def ready_groups(self, node: Node) -> int:
        """Groups that a claim on this node could get now (nodes that take groups or batches)."""
        return self.readiness.groups[self._index[node.name]]

    def ready_in_round(self, node: Node) -> tuple[int, int]:
        """The round of what a claim on this node would get first, and how much it could get of that round alone: rows, or groups,
        whichever the node takes. It looks at all that is ready for the node."""
        i = self._index[node.name]
        if self._wiring.takes_groups[i]:
            offered = [g for id in sorted(self.readiness.group_queues[i]) if (g := self._groups.get(id)) is not None]
            groups = [group for group in offered if self.readiness.rows_of(group, i)]
        else:
            rows = [self._rows.get(id) for _, id in sorted(self.readiness.row_queues[i])]
            groups = [row.group for row in rows if row is not None and not (row.skipped | row.done) >> i & 1]
        if not groups:
            return -1, 0
        round = groups[0].round
        return round, sum(1 for _ in itertools.takewhile(lambda group: group.round == round, groups))

    def unclaimed(self, node: Node) -> int:
        """Groups in flight that this node (which takes groups or batches) has not claimed."""
        return self.readiness.unclaimed[self._index[node.name]]

    def oldest_held(self, node: Node) -> int | None:
        """Oldest policy version among the groups that are too old for this node and wait (see `held`); None: there is none."""
        i = self._index[node.name]
        groups = (self._groups[g] for g in self.readiness.held[i])
        made = (r.version for g in groups for r in self._rows_offered(g, i) if r.version is not None and r.version >= 0)
        return min(made, default=None)

    def groups_until(self, node: Node, version: int) -> tuple[int, int]:
        """Groups whose generation began at this version or before and that this node (which updates) has not claimed:
        how many, and how many of them are ready for it."""
        return self.readiness.groups_until(self._index[node.name], version)

    def held(self, node: Node) -> int:
        """Groups that are too old for this node and wait for a larger bound."""
        return len(self.readiness.held[self._index[node.name]])

    def settled(self, node: Node) -> bool:
        """Everything issued so far that will reach this node is ready for it, and none of it is leased."""
        return self.readiness.is_settled(self._index[node.name])

    def exhausted(self, node: Node) -> bool:
        """Nothing issued so far is left for this node to do."""
        return self.readiness.is_exhausted(self._index[node.name])

    @property
    def group_ids(self) -> list[int]:
        """Groups in flight, oldest first."""
        return list(self._groups)

    def positions_before(self, nodes: Iterable[Node]) -> list[int]:
        """Rows of the source of those groups in flight that none of these nodes has claimed, oldest first."""
        mask = sum(1 << self._index[node.name] for node in nodes)
        return [group.levels[SOURCE][0].position for group in self._groups.values() if not group.claimed & mask]

    @property
    def groups_in_flight(self) -> int:
        """Groups issued and not yet finished by every node."""
        return len(self._groups)

    @property
    def groups_at_work(self) -> int:
        """How many groups still have work for a node that does not follow behind."""
        return len(self._groups) - self.groups_behind

    @property
    def ids_at_work(self) -> list[int]:
        """Ids of the groups at work, oldest first."""
        return [id for id, group in self._groups.items() if not group.rested]

    @property
    def rows_in_flight(self) -> int:
        """Rows issued and not yet retired with their group."""
        return len(self._rows)

    def _rows_offered(self, group: Group, i: int) -> list[Row]:
        if self._wiring.quorum[i]:
            return sorted((group.order or {})[i][: self._wiring.quorum[i]], key=_id)
        return sorted((r for r in group.levels[self.graph.nodes[i].level] if not r.skipped >> i & 1), key=_id)

    def _cancel(self, row: Row, i: int, reason: str) -> None:
        """Node i has its quorum without this row."""
        self._drop(row, i, reason)
        row.cancelled |= 1 << i
        for j in self._wiring.upstream_only[i]:
            if not (row.done | row.leased | row.skipped) >> j & 1:
                self._skip(row, j)

    def _finish(self, row: Row, i: int) -> None:
        bit = 1 << i
        row.done |= bit
        row.leased &= ~bit
        self.readiness.todo[i] -= 1
        group = row.group
        group.open -= 1
        group.behind -= self._wiring.behind[i]
        for j in self._wiring.then[i]:
            level = self.graph.nodes[j].level
            if level == row.level:
                self._offer_if_ready(row, j)
            else:
                for descendant in self._wiring.descendants(row, level):
                    self._offer_if_ready(descendant, j)
        made = self.graph.nodes[i].makes_level
        if made is not None:
            self._finish_level_if_complete(group, made)
        if group.open == group.behind:
            self._retire_if_finished(group)

    def _drop(self, row: Row, i: int, reason: str) -> None:
        """Take a row away from node i, which has not seen it, and from everything downstream of it."""
        self._skip(row, i)
        makes = self.graph.nodes[i].makes_level
        if makes is not None:
            self._finish_level_if_complete(row.group, makes)
        self._drop_downstream(row, i, reason)

    def _drop_downstream(self, row: Row, i: int, reason: str) -> None:
        self._dropped[reason] += 1
        for j in self._wiring.downstream[i]:
            node = self.graph.nodes[j]
            for lost in self._wiring.descendants(row, node.level):
                if not (lost.skipped | lost.done) >> j & 1:
                    self._skip(lost, j)
            if node.makes_level is not None:
                self._finish_level_if_complete(row.group, node.makes_level)

    def _skip(self, row: Row, j: int) -> None:
        bit = 1 << j
        row.skipped |= bit
        self.readiness.todo[j] -= 1
        group = row.group
        group.open -= 1
        group.behind -= self._wiring.behind[j]
        group.skipped[j] += 1
        if row.offered & bit:
            if self._wiring.takes_groups[j]:
                group.ready[j] -= 1
            elif not row.leased & bit:
                self.readiness.rows[j] -= 1
        self._offer_group_if_ready(group, j)

    def _retire_if_finished(self, group: Group) -> None:
        if group.open != group.behind or not all(group.complete) or group.id not in self._groups:
            return
        if not group.rested:
            self._rest(group)
        if group.open:
            return
        num_bytes = 0.0
        for level in group.levels:
            for row in level:
                self._done += not row.skipped
                for part in row.parts.values():
                    num_bytes += part.segment.num_bytes / part.written
                    part.rows -= 1
                    if not part.rows:
                        self._free(part)
                del self._rows[row.id]
        self.readiness.close_group(group)
        self.largest_group = max(self.largest_group, sum(map(len, group.levels)))
        self.largest_group_bytes = max(self.largest_group_bytes, round(num_bytes))
        self.finished_bytes += num_bytes
        self.groups_finished += 1
        self.groups_behind -= 1
        del self._groups[group.id]

    def _rest(self, group: Group) -> None:
        """Nothing is left to do with a group but what follows behind."""
        group.rested = True
        self.groups_behind += 1
        self.rounds[group.round] -= 1
        if not self.rounds[group.round]:
            del self.rounds[group.round]
        for i, behind in enumerate(self._wiring.behind):
            if behind:
                self._offer_group_if_ready(group, i)

    def _free(self, part: Part) -> None:
        self.num_bytes -= part.segment.num_bytes
        self._freed.append(part.segment)

    def live_segments(self) -> list[Segment]:
        """Segments that rows in flight refer to."""
        return [p.segment for p in dict.fromkeys(p for r in self._rows.values() for p in r.parts.values())]

    def groups_in(self, segments: Container[Segment]) -> list[tuple[int, Segment]]:
        """Groups with columns in one of these segments, each with the first that it has."""
        found: dict[int, Segment] = {}
        for row in self._rows.values():
            for part in row.parts.values():
                if part.segment in segments:
                    found.setdefault(row.group.id, part.segment)
        return list(found.items())

    def take_freed(self) -> list[Segment]:
        """Segments to which no row in flight refers any more, each given once."""
        freed, self._freed = list(self._freed), deque()
        return freed

    def counts(self) -> dict[str, int]:
        """The conservation law: every row ever issued is exactly one of waiting, leased, done, or dropped."""
        leased = sum(1 for r in self._rows.values() if r.leased)
        dropped_live = sum(1 for r in self._rows.values() if r.skipped and not r.leased)
        waiting = len(self._rows) - leased - dropped_live
        retired = self._issued - len(self._rows)
        return {
            "issued": self._issued,
            "waiting": waiting,
            "leased": leased,
            "done": self._done,
            "dropped": retired - self._done + dropped_live,
        }

    @property
    def dropped(self) -> dict[str, int]:
        """Rows dropped so far, by reason: the filter that dropped them, or "over-issued at", "late at", "stale at" a node."""
        return dict(self._dropped)


def _id(row: Row) -> int:
    return row.id
