"""Rows in flight: which rows and groups each node can claim.

a row at a node that takes rows        blocked ──offer_rows─> ready ──take_rows──> leased ──> done
a group at a node that takes groups    gathering ──offer_group──> ready ──claim_group──> claimed
                                            too old <──set_too_old──┘
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

from ..graph import SOURCE, Graph, Node
from .rows import Group, GroupState, Ids, Row, StoredPart, Wiring, mask_of, places_in
from .segments import Segment

# Readiness

YOUNGEST = 1 << 62
"""Sort key of rows that no policy generated, which never become too old."""


class Readiness:
    """Counts and queues for each node. Lists are indexed by node. Queues may contain stale entries,
    which counts do not include. Invariant: after each event, the state equals what `of` computes
    from the groups in flight."""

    def __init__(self, wiring: Wiring) -> None:
        number = len(wiring.graph.nodes)
        self._wiring = wiring
        self.row_queues: list[list[int]] = [[] for _ in range(number)]
        """Heaps of ids of groups that may have ready rows. A node claims from the oldest first."""
        self.in_row_queues: list[set[int]] = [set() for _ in range(number)]
        self.group_queues: list[list[tuple[int, int]]] = [[] for _ in range(number)]
        """Heaps of (oldest version of a row, group id). An update takes the groups with the oldest
        versions first, because they become too old first."""
        self.num_rows = [0] * number
        """Number of ready rows or, for a node that takes groups, of rows in ready groups."""
        self.num_groups = [0] * number
        self.num_unclaimed = [0] * number
        """For nodes that take groups: number of unclaimed groups in flight."""
        self.too_old_groups: list[set[int]] = [set() for _ in range(number)]
        self.unclaimed_of: list[Counter[int]] = [Counter() for _ in range(number)]
        """For updates: number of unclaimed groups, keyed by `Group.version`."""
        self.offered_of: list[Counter[int]] = [Counter() for _ in range(number)]
        """Like `unclaimed_of`, but only for groups offered to the node."""
        self.todo = [0] * number
        self.unfinished_levels = [0] * wiring.num_levels
        """For each level: number of groups that may get more rows."""

    @classmethod
    def of(cls, wiring: Wiring, groups: Iterable[Group]) -> Readiness:
        readiness = cls(wiring)
        for group in groups:
            readiness._count(group)
        return readiness

    def _count(self, group: Group) -> None:
        self._tally(group, 1)
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
        self._tally(group, -1)
        for i, takes_groups in enumerate(self._wiring.takes_groups):
            self.num_unclaimed[i] -= takes_groups and not group.claimed >> i & 1

    def set_version(self, group: Group, version: int | None) -> None:
        """Set `Group.version`."""
        self._tally(group, -1)
        group.version = version
        self._tally(group, 1)

    def lower_version(self, group: Group, version: int) -> None:
        if group.version is None or version < group.version:
            self.set_version(group, version)

    def _tally(self, group: Group, by: int) -> None:
        """Add a group to the counts by version (`by=1`), or remove it (`by=-1`)."""
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
            heapq.heappush(self.row_queues[i], group.id)
        self.num_rows[i] += number

    def take_rows(
        self, i: int, number: int | None, known: Mapping[int, Group]
    ) -> list[tuple[Group, int]]:
        """Take up to `number` ready rows for node i, in order of id, as pairs (group, mask)."""
        queue, queued, level = self.row_queues[i], self.in_row_queues[i], self._wiring.level[i]
        taken: list[tuple[Group, int]] = []
        # Taking all rows does not need the heap.
        if number is None or number >= self.num_rows[i]:
            for id in sorted(queue):
                group = known.get(id)
                if group is not None and (mask := group.levels[level].ready(i)):
                    taken.append((group, mask))
            queue.clear()
            queued.clear()
            self.num_rows[i] = 0
            return taken
        self.num_rows[i] -= number
        while number:
            group = known.get(queue[0])
            mask = group.levels[level].ready(i) if group is not None else 0
            if mask.bit_count() > number and group is not None:  # the group stays in the queue
                mask = mask_of(group.levels[level].in_order(mask)[:number])
            else:
                queued.remove(heapq.heappop(queue))
            number -= mask.bit_count()
            if group is not None and mask:
                taken.append((group, mask))
        return taken

    # Groups

    def offered_rows(self, group: Group, i: int) -> int:
        """Return the mask of the rows that node i gets by claiming a group."""
        quorum = self._wiring.quorum[i]
        if quorum:
            return mask_of((group.order or {})[i][:quorum])
        rows = group.levels[self._wiring.level[i]]
        return rows.all & ~rows.skipped[i]

    def _num_offered(self, group: Group, i: int) -> int:
        quorum = self._wiring.quorum[i]
        return min(group.num_ready(i), quorum) if quorum else self.offered_rows(group, i).bit_count()

    def offer_group(self, group: Group, i: int) -> None:
        self._tally(group, -1)
        group.offered |= 1 << i
        self._tally(group, 1)
        self._enqueue(group, i)

    def _enqueue(self, group: Group, i: int) -> None:
        age = self.oldest_version(group, i) if i in self._wiring.updates else 0
        heapq.heappush(self.group_queues[i], (age, group.id))
        self.num_groups[i] += 1
        self.num_rows[i] += self._num_offered(group, i)

    def oldest_version(self, group: Group, i: int) -> int:
        """Return the oldest version among a group's rows offered to node i, or YOUNGEST."""
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
            # Stale entry: the group was claimed, dropped or set aside.
            heapq.heappop(queue)
        return None

    def ready_ids(self, i: int, known: Mapping[int, Group]) -> list[int]:
        """Return the sorted ids of groups that are ready for node i, which takes groups."""
        queued = {id for _, id in self.group_queues[i]}
        return sorted(id for id in queued if id in known and known[id].state(i) is GroupState.READY)

    def withdraw_group(self, group: Group, i: int) -> None:
        """Stop counting a group as ready for node i. Its queue entry becomes stale."""
        self.num_rows[i] -= self._num_offered(group, i)
        self.num_groups[i] -= 1

    def set_too_old(self, group: Group, i: int) -> None:
        group.too_old |= 1 << i
        self.too_old_groups[i].add(group.id)

    def clear_too_old(self, group: Group, i: int) -> None:
        group.too_old &= ~(1 << i)
        self.too_old_groups[i].remove(group.id)

    def claim_group(self, group: Group, i: int) -> None:
        self.withdraw_group(group, i)
        self._set_claimed(group, group.claimed | 1 << i)
        self.num_unclaimed[i] -= 1

    def unclaim_group(self, group: Group, i: int) -> None:
        self._set_claimed(group, group.claimed & ~(1 << i))
        self.num_unclaimed[i] += 1
        self.offer_group(group, i)

    def _set_claimed(self, group: Group, mask: int) -> None:
        self._tally(group, -1)
        group.claimed = mask
        self._tally(group, 1)

    # Queries

    def ready(self, node: Node) -> int:
        """Return how many rows this node could claim."""
        return self.num_rows[self._wiring.index[node.name]]

    def ready_groups(self, node: Node) -> int:
        return self.num_groups[self._wiring.index[node.name]]

    def unclaimed(self, node: Node) -> int:
        """Return how many groups in flight this node, which takes groups, has not claimed."""
        return self.num_unclaimed[self._wiring.index[node.name]]

    def too_old(self, node: Node) -> int:
        """Return how many groups are too old for this node and wait for a larger bound."""
        return len(self.too_old_groups[self._wiring.index[node.name]])

    def settled(self, node: Node) -> bool:
        """Return whether all remaining rows of this node are ready, so that it need not wait."""
        i = self._wiring.index[node.name]
        if self._wiring.quorum[i]:
            return self.num_groups[i] == self.num_unclaimed[i] > 0
        complete = self.unfinished_levels[node.level] == 0
        return complete and self.num_rows[i] == self.todo[i] > 0

    def exhausted(self, node: Node) -> bool:
        """Return whether this node has finished all issued rows."""
        return self.todo[self._wiring.index[node.name]] == 0 and self.unfinished_levels[node.level] == 0

    def not_offered_until(self, node: Node) -> list[tuple[int, int]]:
        """Return cumulative counts of the groups that were not offered to an update yet: a pair
        (version, number of such groups of this or an earlier version) for each `Group.version` of
        an unclaimed group, in ascending order."""
        i = self._wiring.index[node.name]
        unclaimed, offered = self.unclaimed_of[i], self.offered_of[i]
        versions = sorted(unclaimed)
        counts = accumulate(unclaimed[v] - offered.get(v, 0) for v in versions)
        return list(zip(versions, counts, strict=True))


# Stored parts


class _StoredParts:
    """Counts the references of rows in flight to segments. Frees unreferenced segments."""

    def __init__(self) -> None:
        self._parts: dict[StoredPart, None] = {}
        self._freed: list[Segment] = []
        self.num_bytes = 0
        self.published_bytes = 0
        self.finished_bytes = 0.0
        """[bytes] Published bytes of finished groups. Groups share a segment's bytes in proportion
        to their rows."""
        self.largest_group_bytes = 0

    @property
    def segments(self) -> list[Segment]:
        return [part.segment for part in self._parts]

    def add_segment(self, segment: Segment, rows: int) -> StoredPart:
        """Add a segment with this number of rows."""
        self.published_bytes += segment.num_bytes
        part = StoredPart(segment, rows, rows)
        self.restore(part)
        if not rows:  # no row will ever need the segment
            self.finished_bytes += segment.num_bytes
            self._free(part)
        return part

    def restore(self, part: StoredPart) -> None:
        self._parts[part] = None
        self.num_bytes += part.segment.num_bytes

    def discard(self, segment: Segment) -> None:
        self._freed.append(segment)

    def finish_group(self, group: Group) -> None:
        """Count the bytes of a finished group, and free segments that no other group needs."""
        num_bytes = 0.0
        columns = [column for rows in group.levels for _, column in sorted(rows.parts.items()) if column]
        for column in columns:  # in a fixed order, so that a replay frees in the same order
            first = column[0]
            whole = first is not None and column.count(first) == len(column)
            for part, rows in ((first, len(column)),) if whole else Counter(column).items():
                if part is not None:
                    num_bytes += part.segment.num_bytes / part.written * rows
                    part.in_flight -= rows
                    if not part.in_flight:
                        self._free(part)
        self.finished_bytes += num_bytes
        self.largest_group_bytes = max(self.largest_group_bytes, round(num_bytes))

    def _free(self, part: StoredPart) -> None:
        del self._parts[part]
        self.num_bytes -= part.segment.num_bytes
        self._freed.append(part.segment)

    def take_freed(self) -> list[Segment]:
        """Return the segments freed since the last call."""
        freed, self._freed = self._freed, []
        return freed


# Live rows

Orders: TypeAlias = Mapping[Group, Sequence[int]]


class _RowsById(Mapping[int, Row]):
    """Maps sample ids to the rows in flight, in order of arrival."""

    def __init__(self, group_of: Mapping[int, Group]) -> None:
        self._group_of = group_of

    def __getitem__(self, id: int) -> Row:
        group = self._group_of[id]
        level = next(level for level, rows in enumerate(group.levels) if id in rows.ids)
        return Row(group, level, group.levels[level].place(id))

    def __iter__(self) -> Iterator[int]:
        return iter(self._group_of)

    def __len__(self) -> int:
        return len(self._group_of)


class LiveRows:
    """Unfinished rows and groups of a graph.

    - A row is ready for a node when all nodes in the node's `after` are done with the row or its
      ancestor.
    - A level of a group is complete when the node that creates its rows is done with all rows of
      the level above.
    - A group retires when all work on it is finished: `LiveRows` counts and forgets its rows.
    """

    def __init__(self, graph: Graph, ids: Ids, clock: Callable[[], float]) -> None:
        """
        Args:
            ids: id counters, shared by all graphs of a run.
            clock: returns the time in seconds, for quorum deadlines.
        """
        self.graph = graph
        self.wiring = Wiring(graph)
        self.group_of: dict[int, Group] = {}
        """Maps the sample ids of rows in flight to groups."""
        self.rows = _RowsById(self.group_of)
        self.groups: dict[int, Group] = {}
        """Groups in flight by id, oldest first."""
        self.readiness = Readiness(self.wiring)
        self.parts = _StoredParts()
        self.groups_of_step: Counter[int] = Counter()
        """Number of groups with work left other than recording, keyed by step of issue."""
        self.groups_behind = 0
        """Number of groups with only recording left."""
        self.largest_group = 0
        self._whole: list[set[int]] = [set() for _ in graph.nodes]
        """For each node that takes rows: ids of groups whose rows have all reached the node,
        including stale entries (see `lacks_siblings`)."""
        self.quorum_deadlines: list[tuple[float, int, int]] = []
        """Heap of (deadline, node, group id) of incomplete quorums."""
        self.issued = 0
        self.done = 0
        """Number of retired rows, except dropped ones."""
        self.dropped: Counter[str] = Counter()
        """Number of dropped rows, keyed by reason, such as a filter's name or "stale at NODE"."""
        self.finished = [0] * len(graph.nodes)
        self._ids = ids
        self._clock = clock

    # Add rows

    def issue(self, position: int, tokens: int, step: int) -> None:
        number, self._ids.next_group = self._ids.next_group, self._ids.next_group + 1
        group = Group(number, position, step, tokens, self.wiring.above, len(self.graph.nodes))
        self.groups[group.id] = group
        self.groups_of_step[step] += 1
        self.readiness.open_group()
        group.complete[SOURCE] = True
        id = self._ids.reserve(1)
        group.levels[SOURCE].append(id, 0, tokens, None)
        self.group_of[id] = group
        self._begin({group: 1}, SOURCE)
        self.retire_if_finished(group)

    def issue_again(self, group: Group) -> None:
        self.issue(group.position, group.tokens, group.issued_in)

    def restore(self, group: Group) -> None:
        """Add a group from a checkpoint. Restarts the deadlines of its quorums."""
        self.groups[group.id] = group
        self.groups_behind += group.rested
        for i in range(len(self.graph.nodes)):
            self.note_if_whole(group, i)
        if not group.rested:
            self.groups_of_step[group.issued_in] += 1
        for i, quorum in enumerate(self.wiring.quorum):
            if quorum and group.num_ready(i) and group.state(i) is GroupState.GATHERING:
                self._set_quorum_deadline(group, i)

    def add_children(
        self,
        i: int,
        ids: Sequence[int],
        parents: Sequence[int],
        tokens: Sequence[int],
        versions: Sequence[int] | None,
        parts: Sequence[StoredPart],
    ) -> None:
        """Add rows that node i created, and offer them to the next nodes.

        Args:
            tokens: number of tokens that each row adds to its parent's.
            versions: policy version of each row. None takes the parents' versions.
            parts: stored parts of the rows: one per row, one for all rows, or none.
        """
        group_of, above, level = self.group_of, self.wiring.level[i], self.graph.nodes[i].makes_level
        assert level is not None
        one, several = parts[0] if parts else None, len(parts) > 1
        new: dict[Group, int] = {}
        for k, id in enumerate(ids):
            group = group_of[parents[k]]
            source, rows = group.levels[above], group.levels[level]
            # A group has one row on the source's level.
            parent = source.place(parents[k]) if above != SOURCE else 0
            version = source.versions[parent] if versions is None else versions[k]
            if versions is not None and versions[k] >= 0:
                self.readiness.lower_version(group, versions[k])
            bit = rows.append(id, parent, source.tokens[parent] + tokens[k], version)
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
                    # A later quorum must not get rows that were late for an earlier one.
                    self.cancel_rows(group, late, i, f"late at {self.graph.nodes[i].name}")
            if wiring.may_be_cut_off[level]:
                self._skip_what_is_cut_off(group, level, mask)
        for i in wiring.first_on_level[level]:
            self._offer_if_ready(new, i)

    def _skip_what_is_cut_off(self, group: Group, level: int, new: int) -> None:
        """Skip new rows at nodes that wait for a dropped ancestor."""
        rows = group.levels[level]
        for i in self.wiring.on_level[level]:
            cut = new & self.wiring.cut_off(group, i) if self.wiring.needs_above[i] else 0
            for j in (i, *self.wiring.downstream[i]) if cut else ():
                left = cut & ~rows.skipped[j]
                if self.wiring.level[j] == level and left:
                    self.skip(group, left, j)
                    self._finish_level_made_by(group, j)

    # Offer rows

    def _offer_if_ready(self, masks: Mapping[Group, int], i: int, order: Orders | None = None) -> None:
        """Offer rows to node i if all earlier nodes are done with them. `order` lists the places of
        each group's rows in the order in which they became ready. Default: order of arrival."""
        wiring, level = self.wiring, self.wiring.level[i]
        needs, above, takes_groups = (
            wiring.needs_of_row[i],
            wiring.needs_above[i],
            wiring.takes_groups[i],
        )
        queued, queue = self.readiness.in_row_queues[i], self.readiness.row_queues[i]
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
            # `Readiness.offer_rows`, inlined to avoid a call for each group.
            if group.id not in queued:
                queued.add(group.id)
                heapq.heappush(queue, group.id)
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
        # Rows beyond the quorum do not count.
        self.readiness.num_rows[i] += group.offered >> i & 1 and ready <= self.wiring.quorum[i]
        self._offer_group_if_ready(group, i)

    def _set_quorum_deadline(self, group: Group, i: int) -> None:
        quorum = self.graph.nodes[i].operation.quorum
        if quorum and quorum.deadline_s is not None:
            heapq.heappush(self.quorum_deadlines, (self._clock() + quorum.deadline_s, i, group.id))

    def _offer_group_if_ready(self, group: Group, i: int) -> None:
        if not self.wiring.takes_groups[i] or group.offered >> i & 1:
            return
        # A recorder only gets groups that all other nodes finished.
        if self.wiring.behind[i] and not group.rested:
            return
        level = self.wiring.level[i]
        rows = group.levels[level]
        expected = rows.all & ~rows.skipped[i]
        ready = rows.offered[i] & expected
        whole = group.complete[level] and ready == expected and expected
        if whole or 0 < self.wiring.quorum[i] <= ready.bit_count():
            self.readiness.offer_group(group, i)

    def note_if_whole(self, group: Group, i: int) -> None:
        """Note a group if all its rows have reached node i, unless node i takes groups."""
        if self.wiring.takes_groups[i] or not group.complete[self.wiring.level[i]]:
            return
        rows = group.levels[self.wiring.level[i]]
        if rows.all == rows.offered[i] | rows.skipped[i] | rows.done[i]:
            self._whole[i].add(group.id)

    # Finish rows

    def finish_rows(self, masks: Mapping[Group, int], i: int, order: Orders | None = None) -> None:
        """Mark rows as done at node i, and offer them to the next nodes. `order` lists the places
        of each group's rows in the order in which they finished. Default: order of arrival."""
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
                below = {g: wiring.below(g, level, mask, wiring.level[j]) for g, mask in masks.items()}
                self._offer_if_ready(below, j)
        for group in masks:
            self._finish_level_made_by(group, i)
            # At most recording is left to do.
            if group.open == group.behind:
                self.retire_if_finished(group)

    def _finish_level_made_by(self, group: Group, i: int) -> None:
        """Mark the level that node i creates as complete if it can get no more rows, and then the
        levels below it."""
        level, above = self.graph.nodes[i].makes_level, self.wiring.level[i]
        if level is None or group.complete[level]:
            return
        if not group.complete[above] or group.levels[above].awaiting(i):
            return
        group.complete[level] = True
        self.readiness.unfinished_levels[level] -= 1
        for j in self.wiring.on_level[level]:
            self._offer_group_if_ready(group, j)
            self.note_if_whole(group, j)
            self._finish_level_made_by(group, j)

    # Drop rows

    def cancel_rows(self, group: Group, mask: int, i: int, reason: str) -> None:
        """Drop rows that node i's quorum does not need, and skip work that only it needs."""
        self.drop(group, mask, i, reason)
        rows = group.levels[self.wiring.level[i]]
        rows.cancelled[i] |= mask
        for j in self.wiring.upstream_only[i]:
            self.skip(group, mask & rows.awaiting(j) & ~rows.leased[j], j)

    def drop(self, group: Group, mask: int, i: int, reason: str) -> None:
        """Drop rows at node i, which has not processed them, and downstream of it."""
        self.skip(group, mask, i)
        self._finish_level_made_by(group, i)
        self.drop_downstream(group, mask, i, reason)

    def drop_downstream(self, group: Group, mask: int, i: int, reason: str) -> None:
        """Drop rows and their descendants downstream of node i."""
        self.dropped[reason] += mask.bit_count()
        level = self.wiring.level[i]
        for j in self.wiring.downstream[i]:
            lower = self.wiring.level[j]
            left = self.wiring.below(group, level, mask, lower) & group.levels[lower].awaiting(j)
            self.skip(group, left, j)
            self._finish_level_made_by(group, j)

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
        """Give up a group, and count all its rows as dropped."""
        readiness = self.readiness
        readiness.set_version(group, None)  # keeps the changes below out of the counts by version
        for i, node in enumerate(self.graph.nodes):
            if self.wiring.takes_groups[i]:
                if group.state(i) is GroupState.TOO_OLD:
                    readiness.clear_too_old(group, i)
                elif group.state(i) is GroupState.READY:
                    readiness.withdraw_group(group, i)
            group.offered |= 1 << i  # prevents offering the group again
            self.skip(group, group.levels[node.level].awaiting(i), i)
        for level, complete in enumerate(group.complete):
            readiness.unfinished_levels[level] -= not complete
            group.complete[level] = True
        for rows in group.levels:
            rows.lost = rows.all
        self.dropped[reason] += group.num_rows

    def retire_if_finished(self, group: Group) -> None:
        if group.open != group.behind or not all(group.complete) or group.id not in self.groups:
            return
        if not group.rested:
            self._rest(group)
        if group.open:
            return
        self.parts.finish_group(group)
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
        return len(self.groups) - self.groups_behind

    @property
    def ids_at_work(self) -> list[int]:
        return [id for id, group in self.groups.items() if not group.rested]

    def positions_before(self, nodes: Iterable[Node]) -> list[int]:
        """Return source positions of groups that none of these nodes has claimed, oldest first."""
        mask = mask_of(self.wiring.index[node.name] for node in nodes)
        return [group.position for group in self.groups.values() if not group.claimed & mask]

    def is_awaited(self, node: Node) -> bool:
        return any(self.wiring.quorum[j] for j in self.wiring.downstream[self.wiring.index[node.name]])

    def lacks_siblings(self, node: Node) -> bool:
        """Return whether a node that takes rows should wait before it claims: more rows may arrive
        for each group with ready rows, and no quorum waits for the node."""
        i = self.wiring.index[node.name]
        if not self.readiness.num_rows[i] or self.is_awaited(node):
            return False
        whole = self._whole[i]
        while whole:
            id = next(iter(whole))
            group = self.groups.get(id)
            if group is not None and group.levels[node.level].ready(i):
                return False
            whole.discard(id)  # it is noted again if one of its rows is requeued
        return True

    def ready_in_step(self, node: Node) -> tuple[int, int]:
        """Return the step of a node's first ready row or group, and how many of that step are
        ready."""
        i, groups = self.wiring.index[node.name], self.groups
        if self.wiring.takes_groups[i]:
            queued = [(groups[id], 1) for id in self.readiness.ready_ids(i, groups)]
        else:
            waiting = [groups[id] for id in sorted(self.readiness.in_row_queues[i]) if id in groups]
            queued = [(group, group.levels[node.level].ready(i).bit_count()) for group in waiting]
        step, number = -1, 0
        for group, ready in queued:
            if ready and step not in (-1, group.issued_in):
                break
            step, number = group.issued_in if ready else step, number + ready
        return step, number

    def oldest_too_old(self, node: Node) -> int | None:
        """Return the oldest policy version of groups too old for a node; None if there are none."""
        i = self.wiring.index[node.name]
        waiting = (self.groups[id] for id in self.readiness.too_old_groups[i])
        oldest = min((self.readiness.oldest_version(group, i) for group in waiting), default=YOUNGEST)
        return None if oldest == YOUNGEST else oldest

    def groups_in(self, segments: Collection[Segment]) -> list[tuple[int, Segment]]:
        """Return (group id, first segment) for each group with columns in these segments."""
        found: list[tuple[int, Segment]] = []
        for group in self.groups.values() if segments else ():
            columns = (column for rows in group.levels for column in rows.parts.values())
            parts = (part for column in columns for part in dict.fromkeys(column) if part is not None)
            there = next((part.segment for part in parts if part.segment in segments), None)
            if there is not None:
                found.append((group.id, there))
        return found

    def is_in_training(self, group_id: int) -> bool:
        """Return whether an update has claimed a group that has work left other than recording."""
        group = self.groups[group_id]
        return not group.rested and any(group.claimed >> i & 1 for i in self.wiring.updates)

    def counts(self) -> dict[str, int]:
        """Return the number of rows issued, waiting, leased, done and dropped."""
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

    def waits_for(self, group_id: int) -> str:
        """Describe what a group waits for: one line per node that has not finished it."""
        group = self.groups.get(group_id)
        if group is None:
            return f"group {group_id} is not in flight: it is finished, or it was never issued"
        return "\n".join(
            f"{node.name}: {line}"
            for i, node in enumerate(self.graph.nodes)
            if (line := self._work_left(group, node, i))
        )

    def _work_left(self, group: Group, node: Node, i: int) -> str:
        rows, complete = group.levels[node.level], group.complete[node.level]
        left = [Row(group, node.level, place) for place in places_in(rows.awaiting(i))]
        if not left and complete:
            return ""
        leased = (rows.leased[i] & rows.awaiting(i)).bit_count()
        missing = sorted({a for r in left for a in node.after if not self.wiring.has_passed(r, a)})
        if not complete:
            missing.append(f"the rest of the group from {self.graph.levels[node.level]!r}")
        if node.operation.behind and not group.rested:
            missing.append("all else to be done with the group")
        state = f"waits for {', '.join(missing)}" if missing else "ready, not claimed"
        if leased:
            state = f"{leased} leased"
        if group.too_old >> i & 1:
            oldest = min(
                (r.version for r in left if r.version is not None and r.version >= 0), default=None
            )
            state = f"too old, of version {oldest}; waits for a larger bound"
        return f"{len(left)} of {len(rows)} rows to do; {state}"
