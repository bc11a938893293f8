"""LiveRows: unfinished rows and groups of a graph, and how they change when a node finishes, skips
or drops rows.

Leases are in `leases.py`; the ledger (`ledger.py`) writes the log.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from ..graph import SOURCE, Graph, Node
from .readiness import Readiness, Wiring
from .rows import Group, GroupState, Ids, Part, Row, places_in
from .segments import Segment

# Stored parts


class StoredParts:
    """The segments that rows in flight need, with counts. A segment is freed with its last row."""

    def __init__(self) -> None:
        self._parts: dict[Part, None] = {}
        self._freed: list[Segment] = []
        self.num_bytes = 0
        self.published_bytes = 0
        self.finished_bytes = 0.0
        """Published bytes of finished groups. Groups that share a segment have their share by rows."""
        self.largest_group_bytes = 0

    @property
    def segments(self) -> list[Segment]:
        return [part.segment for part in self._parts]

    def add(self, segment: Segment, rows: int) -> Part:
        """Add a segment that a call wrote, with its number of rows."""
        self.published_bytes += segment.num_bytes
        part = Part(segment, rows, rows)
        self.put(part)
        if not rows:  # no row will ever need it
            self.finished_bytes += segment.num_bytes
            self._free(part)
        return part

    def put(self, part: Part) -> None:
        self._parts[part] = None
        self.num_bytes += part.segment.num_bytes

    def discard(self, segment: Segment) -> None:
        self._freed.append(segment)

    def finish(self, group: Group) -> None:
        """Count a finished group, and free the segments that only it needed."""
        num_bytes = 0.0
        columns = [column for rows in group.levels for _, column in sorted(rows.parts.items()) if column]
        for column in columns:  # in a fixed order, so that a replayed ledger frees in the same order
            for part, rows in _counted(column):
                num_bytes += part.row_bytes * rows
                part.in_flight -= rows
                if not part.in_flight:
                    self._free(part)
        self.finished_bytes += num_bytes
        self.largest_group_bytes = max(self.largest_group_bytes, round(num_bytes))

    def _free(self, part: Part) -> None:
        del self._parts[part]
        self.num_bytes -= part.segment.num_bytes
        self._freed.append(part.segment)

    def take_freed(self) -> list[Segment]:
        """Return segments that no row in flight refers to, each once."""
        freed, self._freed = self._freed, []
        return freed


def _counted(column: list[Part | None]) -> list[tuple[Part, int]]:
    first = column[0]
    if first is not None and column.count(first) == len(column):
        return [(first, len(column))]
    return [(part, number) for part, number in Counter(column).items() if part is not None]


# Live rows

Orders: TypeAlias = Mapping[Group, Sequence[int]]


class RowsById(Mapping[int, Row]):
    """View of the rows in flight by sample id, in order of arrival.

    Args:
        group_of: sample id -> its group.
    """

    def __init__(self, group_of: Mapping[int, Group]) -> None:
        self._group_of = group_of

    def __getitem__(self, id: int) -> Row:
        return self._group_of[id].find(id)

    def __iter__(self) -> Iterator[int]:
        return iter(self._group_of)

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, id: object) -> bool:
        return id in self._group_of


class LiveRows:
    """Unfinished rows and groups of a graph. Methods take the rows of one group at a time, as a
    mask.

    - A row is ready for a node when all nodes in `after` are done with it and its ancestors.
    - A level of a group is complete when its maker is done with all rows of the level above.
    - A group retires when no work on it is left: its rows are counted as done or dropped, and
      forgotten.
    """

    def __init__(self, graph: Graph, ids: Ids, clock: Callable[[], float]) -> None:
        """
        Args:
            ids: id counters of the run.
            clock: seconds, for the deadlines of quorums.
        """
        self.graph = graph
        self.wiring = Wiring(graph)
        self.group_of: dict[int, Group] = {}
        self.rows = RowsById(self.group_of)
        self.groups: dict[int, Group] = {}
        """Groups in flight by id, oldest first."""
        self.readiness = Readiness(self.wiring)
        self.parts = StoredParts()
        self.groups_of_step: Counter[int] = Counter()
        """Step of issue -> groups with work left, other than recording."""
        self.groups_behind = 0
        """Groups with only background nodes (recorders) left to run."""
        self.largest_group = 0
        self._whole: list[set[int]] = [set() for _ in graph.nodes]
        """Node that takes rows -> groups that may have ready rows and get no more. Some may have
        none."""
        self.quorum_deadlines: list[tuple[float, int, int]] = []
        """Heap of (time, node, group) of quorums that are not reached yet."""
        self.issued = 0
        self.done = 0
        """Retired rows that were not dropped."""
        self.dropped: Counter[str] = Counter()
        """Reason -> rows dropped so far. Reasons are the name of a filter, or "over-issued at",
        "late at" or "stale at" a node."""
        self.finished = [0] * len(graph.nodes)
        self._ids = ids
        self._clock = clock

    # Add rows

    def issue(self, position: int, tokens: int, step: int) -> None:
        group = Group(
            self._ids.take_group(), position, step, tokens, self.wiring.above, len(self.graph.nodes)
        )
        self.groups[group.id] = group
        self.groups_of_step[step] += 1
        self.readiness.open_group()
        group.complete[SOURCE] = True
        id = self._ids.take(1)
        group.levels[SOURCE].add(id, 0, tokens, None)
        self.group_of[id] = group
        self._begin({group: 1}, SOURCE)
        self.retire_if_finished(group)

    def issue_again(self, group: Group) -> None:
        self.issue(group.position, group.tokens, group.issued_in)

    def restore(self, group: Group) -> None:
        """Add a saved group. Its quorums get their full deadlines again."""
        self.groups[group.id] = group
        self.groups_behind += group.rested
        for i in range(len(self.graph.nodes)):
            self.note_if_whole(group, i)
        if not group.rested:
            self.groups_of_step[group.issued_in] += 1
        for i, quorum in enumerate(self.wiring.quorum):
            if quorum and group.num_ready(i) and group.state(i) is GroupState.GATHERING:
                self._set_quorum_deadline(group, i)

    def add(
        self,
        i: int,
        ids: Sequence[int],
        parents: Sequence[int],
        tokens: Sequence[int],
        versions: Sequence[int] | None,
        parts: Sequence[Part],
    ) -> None:
        """Add rows that node i made, and offer them to the next nodes.

        Args:
            i: the node.
            ids: sample ids of the rows.
            parents: sample ids of their parents.
            tokens: tokens that each row has beyond its parent's.
            versions: oldest policy version in each row; None takes the parents' versions.
            parts: parts that the node wrote: one per row, a single one for all rows, or none.
        """
        group_of, above, level = self.group_of, self.wiring.level[i], self.graph.nodes[i].makes_level
        assert level is not None
        one, several = parts[0] if parts else None, len(parts) > 1
        new: dict[Group, int] = {}
        for k, id in enumerate(ids):
            group = group_of[parents[k]]
            source, rows = group.levels[above], group.levels[level]
            parent = source.place(parents[k]) if above != SOURCE else 0
            version = source.versions[parent] if versions is None else versions[k]
            bit = rows.add(id, parent, source.tokens[parent] + tokens[k], version)
            if one is not None:
                rows.column(i)[-1] = parts[k] if several else one
            group_of[id] = group
            new[group] = new[group] | bit if group in new else bit
        self._begin(new, level)

    def _begin(self, new: Mapping[Group, int], level: int) -> None:
        wiring = self.wiring
        nodes, behind, counted = wiring.on_level[level], wiring.behind_on_level[level], 0
        for group, mask in new.items():
            number = mask.bit_count()
            counted += number
            group.open += number * len(nodes)
            group.behind += number * behind
        self.issued += counted
        for i in nodes:
            self.readiness.todo[i] += counted
        for group, mask in new.items():
            for i in nodes if group.closed else ():
                if group.closed >> i & 1 and (late := mask & group.levels[level].awaiting(i)):
                    # a later quorum must not see rows that are late at an earlier one
                    self.cancel(group, late, i, f"late at {self.graph.nodes[i].name}")
            if wiring.may_be_cut_off[level]:
                self._skip_what_is_cut_off(group, level, mask)
        for i in wiring.first_on_level[level]:
            self._offer_if_ready(new, i)

    def _skip_what_is_cut_off(self, group: Group, level: int, new: int) -> None:
        """Skip nodes that wait for an ancestor that was dropped before these rows came."""
        rows = group.levels[level]
        for i in self.wiring.on_level[level]:
            cut = new & self.wiring.cut_off(group, i) if self.wiring.needs_above[i] else 0
            for j in (i, *self.wiring.downstream[i]) if cut else ():
                node = self.graph.nodes[j]
                left = cut & ~rows.skipped[j]
                if node.level == level and left:
                    self.skip(group, left, j)
                    if node.makes_level is not None:
                        self._finish_level_if_complete(group, node.makes_level)

    def _offer_if_ready(self, masks: Mapping[Group, int], i: int, order: Orders | None = None) -> None:
        """Offer rows to node i if all earlier nodes are done with them.

        Args:
            order: places of each group's rows in order of becoming ready; None means
                in order of arrival.
        """
        wiring, level = self.wiring, self.wiring.level[i]
        needs, above, takes_groups = wiring.needs_of_row[i], wiring.needs_above[i], wiring.takes_groups[i]
        queued, fresh = self.readiness.in_row_queues[i], self.readiness.fresh_row_queues[i]
        counted = 0
        for group, mask in masks.items():
            rows = group.levels[level]
            mask &= ~(rows.offered[i] | rows.skipped[i] | rows.done[i])
            for j in needs:
                mask &= rows.done[j]
            if above and mask:
                mask = wiring.through_above(group, i, mask)
            if not mask:
                continue
            if wiring.quorum[i]:
                for place in order[group] if order is not None else places_in(mask):
                    if mask >> place & 1:
                        self._offer_to_quorum(group, place, i)
                continue
            rows.offered[i] |= mask
            if takes_groups:
                if group.complete[level]:
                    self._offer_group_if_ready(group, i)
                continue
            if group.id not in queued:
                queued.add(group.id)
                fresh.append(group.id)
            counted += mask.bit_count()
            if group.complete[level]:
                self.note_if_whole(group, i)
        self.readiness.num_rows[i] += counted

    def _offer_to_quorum(self, group: Group, place: int, i: int) -> None:
        group.levels[self.wiring.level[i]].offered[i] |= 1 << place
        group.order = group.order or {}
        group.order.setdefault(i, []).append(place)
        ready = group.num_ready(i)
        if ready == 1:
            self._set_quorum_deadline(group, i)
        # A quorum takes at most its number of rows; later ones do not count.
        self.readiness.num_rows[i] += group.offered >> i & 1 and ready <= self.wiring.quorum[i]
        self._offer_group_if_ready(group, i)

    def _set_quorum_deadline(self, group: Group, i: int) -> None:
        quorum = self.graph.nodes[i].operation.quorum
        if quorum and quorum.deadline_s is not None:
            heapq.heappush(self.quorum_deadlines, (self._clock() + quorum.deadline_s, i, group.id))

    def _offer_group_if_ready(self, group: Group, i: int) -> None:
        if not self.wiring.takes_groups[i] or group.offered >> i & 1:
            return
        if self.wiring.behind[i] and not group.rested:
            return
        level = self.wiring.level[i]
        rows = group.levels[level]
        expected = rows.all & ~rows.skipped[i]
        ready = rows.offered[i] & expected
        whole = group.complete[level] and ready == expected and expected
        if whole or 0 < self.wiring.quorum[i] <= ready.bit_count():
            self.readiness.offer_group(group, i)

    def _finish_level_if_complete(self, group: Group, level: int) -> None:
        """Mark a level complete when its maker has no work left, and continue with the levels
        below."""
        i = self.wiring.maker[level]
        above = self.wiring.level[i]
        if group.complete[level] or not group.complete[above] or group.levels[above].awaiting(i):
            return
        group.complete[level] = True
        self.readiness.unfinished_levels[level] -= 1
        for j in self.wiring.on_level[level]:
            self._offer_group_if_ready(group, j)
            self.note_if_whole(group, j)
            makes = self.graph.nodes[j].makes_level
            if makes is not None:
                self._finish_level_if_complete(group, makes)

    def cancel(self, group: Group, mask: int, i: int, reason: str) -> None:
        """Drop rows that a quorum does not need, with pending work that only the quorum needs."""
        self.drop(group, mask, i, reason)
        rows = group.levels[self.wiring.level[i]]
        rows.cancelled[i] |= mask
        for j in self.wiring.upstream_only[i]:
            self.skip(group, mask & rows.awaiting(j) & ~rows.leased[j], j)

    def finish(self, masks: Mapping[Group, int], i: int, order: Orders | None = None) -> None:
        """Mark rows as done at node i, and offer them to the next nodes.

        Args:
            masks: the rows of each group.
            order: places in order of finishing; None means in order of arrival.
        """
        wiring, level = self.wiring, self.wiring.level[i]
        behind, counted = wiring.behind[i], 0
        for group, mask in masks.items():
            rows, number = group.levels[level], mask.bit_count()
            counted += number
            rows.done[i] |= mask
            rows.leased[i] &= ~mask
            group.open -= number
            group.behind -= number * behind
        self.readiness.todo[i] -= counted
        self.finished[i] += counted
        for j in wiring.then[i]:
            if wiring.level[j] == level:
                self._offer_if_ready(masks, j, order)
            else:
                below = {
                    group: wiring.below(group, level, mask, wiring.level[j])
                    for group, mask in masks.items()
                }
                self._offer_if_ready(below, j)
        made = self.graph.nodes[i].makes_level
        for group in masks:
            if made is not None:
                self._finish_level_if_complete(group, made)
            # Only recording is left, or nothing.
            if group.open == group.behind:
                self.retire_if_finished(group)

    def drop(self, group: Group, mask: int, i: int, reason: str) -> None:
        """Take rows away from node i, which has not seen them, and from all downstream nodes."""
        self.skip(group, mask, i)
        makes = self.graph.nodes[i].makes_level
        if makes is not None:
            self._finish_level_if_complete(group, makes)
        self.drop_downstream(group, mask, i, reason)

    def drop_downstream(self, group: Group, mask: int, i: int, reason: str) -> None:
        """Take rows and their descendants away from all nodes downstream of node i."""
        self.dropped[reason] += mask.bit_count()
        level = self.wiring.level[i]
        for j in self.wiring.downstream[i]:
            node = self.graph.nodes[j]
            self.skip(
                group,
                self.wiring.below(group, level, mask, node.level) & group.levels[node.level].awaiting(j),
                j,
            )
            if node.makes_level is not None:
                self._finish_level_if_complete(group, node.makes_level)

    def skip(self, group: Group, mask: int, j: int) -> None:
        if not mask:
            return
        rows, number = group.levels[self.wiring.level[j]], mask.bit_count()
        rows.skipped[j] |= mask
        self.readiness.todo[j] -= number
        group.open -= number
        group.behind -= number * self.wiring.behind[j]
        if not self.wiring.takes_groups[j]:
            self.readiness.num_rows[j] -= (mask & rows.offered[j] & ~rows.leased[j]).bit_count()
        self._offer_group_if_ready(group, j)
        self.note_if_whole(group, j)

    def lose(self, group: Group, reason: str) -> None:
        """Give up a group: all its rows count as dropped."""
        readiness = self.readiness
        readiness.set_version(group, None)  # the changes below must not count by version
        for i, node in enumerate(self.graph.nodes):
            if self.wiring.takes_groups[i]:
                if group.state(i) is GroupState.TOO_OLD:
                    readiness.clear_too_old(group, i)
                elif group.state(i) is GroupState.READY:
                    readiness.withdraw_group(group, i)
            group.offered |= 1 << i  # so that it is never offered again
            self.skip(group, group.levels[node.level].awaiting(i), i)
        for level, complete in enumerate(group.complete):
            readiness.unfinished_levels[level] -= not complete
            group.complete[level] = True
        for rows in group.levels:
            rows.lost = rows.all
        self.dropped[reason] += group.num_rows

    def retire_if_finished(self, group: Group) -> None:
        """Forget a group if no work on it is left."""
        if group.open != group.behind or not all(group.complete) or group.id not in self.groups:
            return
        if not group.rested:
            self._rest(group)
        if group.open:
            return
        self.parts.finish(group)
        group_of = self.group_of
        for rows in group.levels:
            for id in rows.ids:
                del group_of[id]
        number = group.num_rows
        self.done += number - group.num_dropped
        self.readiness.close_group(group)
        self.largest_group = max(self.largest_group, number)
        self.groups_behind -= 1
        del self.groups[group.id]

    def _rest(self, group: Group) -> None:
        """Mark a group that only has background nodes (recorders) left to run."""
        group.rested = True
        self.groups_behind += 1
        self.groups_of_step[group.issued_in] -= 1
        if not self.groups_of_step[group.issued_in]:
            del self.groups_of_step[group.issued_in]
        for i, behind in enumerate(self.wiring.behind):
            if behind:
                self._offer_group_if_ready(group, i)

    # Queries

    @property
    def groups_at_work(self) -> int:
        """How many groups have work left, other than recording."""
        return len(self.groups) - self.groups_behind

    @property
    def ids_at_work(self) -> list[int]:
        return [id for id, group in self.groups.items() if not group.rested]

    def positions_before(self, nodes: Iterable[Node]) -> list[int]:
        """Return the source rows of groups in flight that none of these nodes has claimed, oldest
        first."""
        mask = sum(1 << self.wiring.index[node.name] for node in nodes)
        return [group.position for group in self.groups.values() if not group.claimed & mask]

    def note_if_whole(self, group: Group, i: int) -> None:
        """Note a group if all its rows have reached node i (which takes rows), and some may be
        ready."""
        if self.wiring.takes_groups[i] or not group.complete[self.wiring.level[i]]:
            return
        rows = group.levels[self.wiring.level[i]]
        if rows.all == rows.offered[i] | rows.skipped[i] | rows.done[i]:
            self._whole[i].add(group.id)

    def is_awaited(self, node: Node) -> bool:
        return any(self.wiring.quorum[j] for j in self.wiring.downstream[self.wiring.index[node.name]])

    def lacks_siblings(self, node: Node) -> bool:
        """Return whether all ready rows of a node (which takes rows) should wait for siblings.

        That is the case if more rows of each group may come to the node, and no quorum waits for
        it.
        """
        i = self.wiring.index[node.name]
        if not self.readiness.num_rows[i] or self.is_awaited(node):
            return False
        level, whole = self.wiring.level[i], self._whole[i]
        # Entries may be stale: drop those without ready rows.
        while whole:
            id = next(iter(whole))
            group = self.groups.get(id)
            if group is not None and group.levels[level].ready(i):
                return False
            whole.discard(id)  # noted again if a row is given back
        return True

    def ready_in_step(self, node: Node) -> tuple[int, int]:
        """Return the step of the first row or group that a claim would get, and how many of that
        step are ready.

        It scans all that is ready for the node.
        """
        i = self.wiring.index[node.name]
        groups, level = self.groups, self.wiring.level[i]
        step, number = -1, 0
        if self.wiring.takes_groups[i]:
            queued = [(groups[id], 1) for id in self.readiness.ready_ids(i, groups)]
        else:
            waiting = sorted(self.readiness.in_row_queues[i])
            queued = [
                (g, g.levels[level].ready(i).bit_count()) for id in waiting if (g := groups.get(id))
            ]
        for group, ready in queued:
            if ready and step not in (-1, group.issued_in):
                break
            step, number = group.issued_in if ready else step, number + ready
        return step, number

    def oldest_too_old(self, node: Node) -> int | None:
        """Return the oldest policy version among the groups that wait as too old for a node; None
        if there are none."""
        i = self.wiring.index[node.name]
        versions = (
            group.levels[node.level].versions[place]
            for group in (self.groups[id] for id in self.readiness.too_old_groups[i])
            for place in places_in(self.readiness.offered_rows(group, i))
        )
        return min((v for v in versions if v is not None and v >= 0), default=None)

    def groups_in(self, segments: Collection[Segment]) -> list[tuple[int, Segment]]:
        """Return the groups with columns in these segments, each with the first such segment."""
        found: dict[int, Segment] = {}
        for group in self.groups.values() if segments else ():
            columns = (column for rows in group.levels for column in rows.parts.values())
            parts = dict.fromkeys(
                part for column in columns for part in dict.fromkeys(column) if part is not None
            )
            there = next((part.segment for part in parts if part.segment in segments), None)
            if there is not None:
                found[group.id] = there
        return list(found.items())

    def is_in_training(self, group_id: int) -> bool:
        """Return whether an update has claimed a group that still has work left other than
        recording."""
        group = self.groups[group_id]
        return not group.rested and any(group.claimed >> i & 1 for i in self.wiring.updates)

    def counts(self) -> dict[str, int]:
        """Return counts of rows. Each issued row is exactly one of waiting, leased, done or
        dropped."""
        groups = self.groups.values()
        leased = sum([group.num_leased for group in groups])
        dropped_live = sum([group.num_dropped for group in groups])
        retired = self.issued - len(self.rows)
        return {
            "issued": self.issued,
            "waiting": len(self.rows) - leased - dropped_live,
            "leased": leased,
            "done": self.done,
            "dropped": retired - self.done + dropped_live,
        }
