"""Ledger: the control plane of the sample buffer.

It knows which columns of each row exist, where they are, and which nodes have processed the row. It
never holds tokens. Every event costs O(1) per row and updates which rows are ready.

Invariants:

- Each row is exactly one of waiting, leased, done or dropped, and each node consumes it at most
  once (`RowState`, in `rows.py`).
- A row is ready for a node when all nodes in `after` are done with it. A node that takes groups
  gets a group when all its rows exist and are ready, or when its quorum is reached.
- Children arrive one by one. A parent is finished by a separate event, by the end of its lease, or
  by a quorum that does not need more children. A requeued parent keeps its children and their ids.
- A claim is a lease, and only the holder of its token may publish. Results of a node that takes
  groups count when its lease is finished; a release before that gives complete groups back.

Each event (`events.py`) is logged before it takes effect, and the events determine the ledger's
state. `recovery.py` replays them, and saves and loads the state, so that recovery need not read the
whole log.

The parts own the state: rows and groups (`live`), ready rows (`readiness`), column locations
(`parts`), leases (`leases`), and the choice of rows for a claim (`claims`).
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..errors import LeaseError
from ..graph import SOURCE, Graph, Node
from ..operation import Shape
from ..runs.log import Log
from .events import Claim, Drop, Event, Finish, Issue, Lose, Offer, Publish, Release, SetSource, to_json
from .leases import Lease, Leases, Published, PublishedLists, Spread, Staleness, Taken, Written
from .live_rows import LiveRows
from .readiness import Readiness
from .rows import MAX_CHILDREN, Group, GroupState, Ids, LevelRows, Part, places_in, union
from .segments import Segment

# Claims
#
# A quorum is chosen when its group is first claimed: the first n ready rows win. The others are
# cancelled, with all work that only they need. Their parent is finished without more children.


class Taking(NamedTuple):
    """The groups that a claim takes, and the groups that it sets aside."""

    taken: list[tuple[Group, int]]
    """Groups, each with the mask of its rows."""
    masked: frozenset[int] = frozenset()
    """Ids of the taken rows to mask because they are too old."""
    too_old: list[int] | None = None
    """Ids of groups that were set aside as too old. None without a staleness bound."""
    offered: bool = False
    """Whether groups that were set aside earlier are ready again."""


class Claims:
    """Chooses rows for the claims of one ledger.

    An update first sets aside all groups that are too old, then takes the groups with the oldest
    tokens.
    """

    def __init__(self, live: LiveRows, leases: Leases, ids: Ids) -> None:
        self._live = live
        self._leases = leases
        self._ids = ids
        self.stale: Counter[str] = Counter()
        """Fate -> groups that were too old when an update claimed them."""

    def take(
        self, i: int, max_rows: int | None, max_groups: int | None, staleness: Staleness | None = None
    ) -> Taking:
        readiness, groups = self._live.readiness, self._live.groups
        if not self._live.wiring.takes_groups[i]:
            return Taking(readiness.take_rows(i, max_rows, groups))
        offered = staleness is not None and self._offer_again(i, staleness)
        too_old: list[int] = []
        while staleness is not None and (group := readiness.first_group(i, groups)) is not None:
            if staleness.fate == "mask" or not self._is_too_old(group, i, staleness):
                break
            too_old.append(group.id)
            self._set_aside(group, i, staleness)
        taken: list[tuple[Group, int]] = []
        masked: list[int] = []
        while (max_groups is None or len(taken) < max_groups) and (
            group := readiness.first_group(i, groups)
        ) is not None:
            taken.append(self._take_group(group, i, staleness, masked))
        taken.sort(key=lambda one: one[0].id)
        return Taking(taken, frozenset(masked), None if staleness is None else too_old, offered)

    def take_again(
        self,
        i: int,
        ids: Iterable[int],
        max_groups: int | None,
        staleness: Staleness | None,
        too_old: Sequence[int] | None,
    ) -> Taking:
        """Take the groups that a log record names, for node i, which takes groups.

        Args:
            ids: sample ids of the rows in the record.
            too_old: ids of the groups that it set aside; None in logs of format 5 and earlier,
                which checked groups in order of their ids.

        Raises:
            ValueError: a group is not ready for the node.
            LookupError: a row or group is not in flight.
        """
        groups = list(dict.fromkeys(self._live.group_of[id] for id in ids))
        offered = False
        if staleness is not None:
            offered = self._offer_again(i, staleness, wait=too_old is None)
            if too_old is None:
                too_old = self._too_old_by_id(i, groups, max_groups, staleness)
            for id in too_old:
                self._check_ready(self._live.groups[id], i)
                self._set_aside(self._live.groups[id], i, staleness)
        masked: list[int] = []
        for group in groups:
            self._check_ready(group, i)
        taken = [self._take_group(group, i, staleness, masked) for group in groups]
        return Taking(taken, frozenset(masked), None if too_old is None else list(too_old), offered)

    def _check_ready(self, group: Group, i: int) -> None:
        if group.state(i) is not GroupState.READY:
            name = self._live.graph.nodes[i].name
            raise ValueError(f"group {group.id} is {group.state(i).value} at node {name!r}, not ready")

    def _too_old_by_id(
        self, i: int, taken: Sequence[Group], max_groups: int | None, staleness: Staleness
    ) -> list[int]:
        """Return the groups that a claim of format 5 or earlier set aside."""
        if staleness.fate == "mask":
            return []
        full = max_groups is not None and len(taken) >= max_groups
        groups, last = self._live.groups, max((group.id for group in taken), default=-1)
        ready = self._live.readiness.ready_ids(i, groups)
        return [
            id for id in ready if (id < last or not full) and self._is_too_old(groups[id], i, staleness)
        ]

    def _take_group(
        self, group: Group, i: int, staleness: Staleness | None, masked: list[int]
    ) -> tuple[Group, int]:
        readiness, rows = self._live.readiness, group.levels[self._live.wiring.level[i]]
        mask = readiness.offered_rows(group, i)
        if staleness is not None and (old := staleness.too_old(rows, mask)):
            self.stale[staleness.fate] += 1
            masked += [rows.ids[place] for place in old]
        readiness.withdraw_group(group, i)
        readiness.claim_group(group, i)
        if self._live.wiring.quorum[i]:
            self._close_quorum(group, i, mask)
        return group, mask

    def set_ids_aside(self, taken: Sequence[Taken], level: int) -> None:
        """Reserve sample ids for the children of these rows. Rows with children keep the ids
        reserved earlier."""
        new: list[tuple[LevelRows, int]] = []
        for group, of, _, places in taken:
            made = set(group.levels[level].parents)
            new += [(group.levels[of], place) for place in places if place not in made]
        first = self._ids.take(len(new) * MAX_CHILDREN)
        for k, (rows, place) in enumerate(new):
            rows.aside = rows.aside or {}
            rows.aside[place, level] = first + k * MAX_CHILDREN

    def _is_too_old(self, group: Group, i: int, staleness: Staleness) -> bool:
        rows = group.levels[self._live.wiring.level[i]]
        return bool(staleness.too_old(rows, self._live.readiness.offered_rows(group, i)))

    def _offer_again(self, i: int, staleness: Staleness, *, wait: bool = False) -> bool:
        """Offer groups again that waited for a larger bound, if this bound allows them or the fate
        is not `wait`. Return whether there are any.

        Args:
            wait: keep groups that are still too old waiting, whatever the fate, as in logs of
                format 5 and earlier.
        """
        readiness, waits = self._live.readiness, wait or staleness.fate == "wait"
        held = [self._live.groups[id] for id in sorted(readiness.too_old_groups[i])]
        again = [group for group in held if not (waits and self._is_too_old(group, i, staleness))]
        for group in again:
            readiness.clear_too_old(group, i)
            readiness.offer_group(group, i)
        return bool(again)

    def _set_aside(self, group: Group, i: int, staleness: Staleness) -> None:
        self.stale[staleness.fate] += 1
        self._live.readiness.withdraw_group(group, i)
        if staleness.fate == "wait":
            self._live.readiness.set_too_old(group, i)
            return
        if staleness.fate == "requeue":
            self._live.issue_again(group)
        mask = self._live.readiness.offered_rows(group, i)
        self._live.drop(group, mask, i, f"stale at {self._live.graph.nodes[i].name}")
        self._live.retire_if_finished(group)

    def _close_quorum(self, group: Group, i: int, chosen: int) -> None:
        """Choose the quorum's rows once, and cancel the others."""
        if group.closed >> i & 1:
            return
        group.closed |= 1 << i
        wiring = self._live.wiring
        if others := group.levels[wiring.level[i]].awaiting(i) & ~chosen:
            self._live.cancel(group, others, i, f"over-issued at {self._live.graph.nodes[i].name}")
        maker = wiring.makes_for[i]
        if maker is not None:
            self._cut_short(group, maker)

    def _cut_short(self, group: Group, i: int) -> None:
        """Finish the parents at node i: the chosen quorum does not need more of their children."""
        level, makes = self._live.wiring.level[i], self._live.graph.nodes[i].makes_level
        rows = group.levels[level]
        assert makes is not None
        left = rows.awaiting(i)
        for place in places_in(left & rows.leased[i]):
            self._leases.give_up(rows, place, makes)
        self._live.readiness.num_rows[i] -= rows.ready(i).bit_count()
        if left:
            self._live.finish({group: left}, i)


# Ledger


class Ledger:
    """Rows of one graph of a run, from issue to retirement.

    >>> import pyarrow as pa
    >>> from weft.dataflow.graph import Graph
    >>> from weft.dataflow.source import TableSource
    >>> ledger = Ledger(Graph("empty", TableSource("prompts", pa.table({"prompt_ids": [[1]]})), ()))
    >>> ledger.issue([0], [1], step=0)
    >>> ledger.live.counts()
    {'issued': 1, 'waiting': 0, 'leased': 0, 'done': 1, 'dropped': 0}
    """

    def __init__(
        self,
        graph: Graph,
        *,
        ids: Ids | None = None,
        source: Segment | None = None,
        name: str | None = None,
        log: Log | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            ids: shared by all graphs of a run.
            source: segment with the rows of the graph's source.
            name: name of the graph in the log.
            log: where to log every event before it takes effect; None keeps no log.
            clock: seconds, for deadlines.
        """
        self.graph = graph
        self.name = name or graph.name
        self.source = source
        self.log = log
        self.prompts_issued = 0
        """Rows of the source issued so far, which is the position in the source."""
        self.ids = ids or Ids()
        self.live = LiveRows(graph, self.ids, clock)
        self.parts = self.live.parts
        self.leases = Leases()
        self.claims = Claims(self.live, self.leases, self.ids)
        self._index = self.live.wiring.index
        self._takes_groups = self.live.wiring.takes_groups
        self._clock = clock

    @property
    def readiness(self) -> Readiness:
        return self.live.readiness

    def _note(self, event: Event) -> None:
        if self.log is not None:
            self.log.append_json(to_json(event, self.name))

    # Issue rows

    def set_source(self, segment: Segment) -> None:
        self._note(SetSource(segment.to_json()))
        self.source = segment

    def issue(self, positions: Sequence[int], num_tokens: Sequence[int], *, step: int) -> None:
        """Issue rows of the source. Each starts a group.

        Args:
            positions: rows of the source.
            num_tokens: tokens of each row.
            step: the step that they are issued for.
        """
        positions, num_tokens = [int(p) for p in positions], [int(t) for t in num_tokens]
        if len(positions) != len(num_tokens):
            raise ValueError(
                f"{len(positions)} rows were issued, but {len(num_tokens)} token counts were given"
            )
        self._note(Issue(self.ids.next_id, self.ids.next_group, step, positions, num_tokens))
        self.prompts_issued += len(positions)
        for position, tokens in zip(positions, num_tokens, strict=True):
            self.live.issue(position, tokens, step)

    # Claim rows

    def claim(
        self,
        node: Node,
        *,
        max_rows: int | None = None,
        max_groups: int | None = None,
        holder: str = "",
        deadline_s: float | None = None,
        staleness: Staleness | None = None,
        version: int | None = None,
    ) -> Lease | None:
        """Lease ready rows to a node, in order of group and sample id; return None if there are
        none.

        If `max_groups` excludes some ready groups, an update gets the oldest ones.

        Args:
            max_rows: most rows, for a node that takes rows.
            max_groups: most groups, for a node that takes groups. With 0, only set aside groups
                that are too old.
            holder: name of the worker, for messages.
            deadline_s: seconds from now until the rows are requeued (see `expire`).
            staleness: for an update: the staleness bound, and the fate of older groups.
            version: for a node that generates: its policy version, to note as the version of new
                groups.
        """
        taking = self.claims.take(self._index[node.name], max_rows, max_groups, staleness)
        if not (taking.taken or taking.too_old or taking.offered):
            return None
        deadline = None if deadline_s is None else self._clock() + deadline_s
        stale = [staleness.version, staleness.bound, staleness.fate] if staleness else None
        asked = Claim(
            self.leases.take_token(),
            node.name,
            [],
            max_rows,
            max_groups,
            stale,
            version=version,
            holder=holder,
        )
        return self._grant(asked, taking, deadline)

    def claim_again(self, event: Claim) -> None:
        """Replay a claim from the log.

        Raises:
            ValueError: the ready rows differ from the record.
        """
        i = self._index[event.node]
        self.leases.next_token = event.lease + 1
        if self._takes_groups[i]:
            staleness = Staleness(*event.stale) if event.stale else None
            taking = self.claims.take_again(i, event.ids, event.groups, staleness, event.too_old)
        else:
            taking = self.claims.take(i, event.rows, event.groups)
        lease = self._grant(event, taking, None)
        if (lease.ids.tolist() if lease else []) != event.ids:
            what = f"has rows {event.ids[:3]}..., which are not those that are ready"
            raise ValueError(f"lease {event.lease} of node {event.node!r} {what}")

    def set_too_old_aside(self, node: Node, staleness: Staleness) -> int:
        """Set aside the ready groups that are too old for an update, so that it knows how many are
        left. Return how many there were."""
        before = self.claims.stale.total()
        self.claim(node, max_groups=0, staleness=staleness)
        return self.claims.stale.total() - before

    def _grant(self, asked: Claim, taking: Taking, deadline: float | None) -> Lease | None:
        node, level = self.graph[asked.node], self.graph[asked.node].level
        i, taken = self._index[node.name], taking.taken
        lease = Lease.of(
            asked.lease, node, taken, holder=asked.holder, deadline=deadline, masked=taking.masked
        )
        if node.makes_level is not None:
            self.claims.set_ids_aside(lease.taken, node.makes_level)
        self._note(replace(asked, ids=list(lease.open), too_old=taking.too_old))
        if not taken:
            return None
        for group, mask in taken:
            group.levels[level].leased[i] |= mask
            if asked.version is not None and group.version is None:
                self.readiness.set_version(group, asked.version)
        self.leases.begin(lease)
        return lease

    # Publish rows

    def publish(self, lease: Lease, published: Published, written: Written) -> None:
        """Report rows of a lease that the node has finished, with the columns that it wrote.

        For an EXPAND, these are new rows, and `finished` parents get no more. New rows of a parent
        that a quorum finished are discarded.

        Raises:
            LeaseError: rows (or parents) are not in the lease, or were published before. Nothing
                changes then.
        """
        self.leases.check(lease)
        if lease.given_up and published.parents is not None:
            if isinstance(written, Spread):
                written = written.only(published.not_of(lease.given_up))
            published = published.without(lease.given_up)
        lists = published.lists
        whole = (
            lease.is_whole(published)
            and len(lists.num_tokens) == lease.num_rows
            and lists.versions is None
        )
        if not whole:
            lease.check(lists, self.live.group_of)
        ids, tokens, versions, parents, finished = lists
        if parents is not None and finished is None:
            finished = []
        one = written.to_json() if isinstance(written, Segment) else None
        several = written.to_json() if isinstance(written, Spread) else None
        self._note(Publish(lease.token, ids, tokens, one, versions, parents, finished, several))
        through = ids if finished is None else finished
        at_once = len(through) == lease.num_rows
        if len(through) == len(lease.open):
            lease.open.clear()
        else:
            for id in through:
                del lease.open[id]
        if lease.node.operation.takes_groups:
            assert not isinstance(written, Spread), "a node that takes groups publishes rank by rank"
            lease.staged.append((through, published, written))
            return
        self._accept(lease, through, lists, written, at_once=at_once)

    def _accept(
        self,
        lease: Lease,
        through: Sequence[int],
        published: PublishedLists,
        written: Written,
        *,
        at_once: bool,
    ) -> None:
        """Add new rows and mark rows as done.

        Args:
            through: the rows that are done.
            at_once: whether they are all rows of the lease.
        """
        node, i = lease.node, self._index[lease.node.name]
        parts = self._parts_of(node, written, len(published.ids))
        ids, tokens, versions, parents, _ = published
        if parents is not None:
            self.live.add(i, ids, parents, tokens, versions, parts)
            tokens, parts = [], []
        elif not any(tokens):
            tokens = []
        ordered = self.live.wiring.ends_in_quorum(i)
        if at_once and not tokens and not ordered:
            if len(parts) == 1:
                for group, level, mask, _ in lease.taken:
                    group.levels[level].put(parts[0], i, mask)
            elif parts:
                part_of = dict(zip(ids, parts, strict=True))
                for group, level, _, places in lease.taken:
                    rows = group.levels[level]
                    column = rows.column(i)
                    for place in places:
                        column[place] = part_of[rows.ids[place]]
            self.live.finish({group: mask for group, _, mask, _ in lease.taken}, i)
            return
        group_of, level, several = self.live.group_of, node.level, len(parts) > 1
        masks: dict[Group, int] = {}
        order: dict[Group, list[int]] = {}
        for k, id in enumerate(through):
            group = group_of[id]
            rows = group.levels[level]
            place = rows.place(id)
            if parts:
                rows.column(i)[place] = parts[k] if several else parts[0]
            if tokens:
                rows.tokens[place] += tokens[k]
            masks[group] = masks[group] | 1 << place if group in masks else 1 << place
            if ordered:
                order.setdefault(group, []).append(place)
        self.live.finish(masks, i, order if ordered else None)

    def _masks(self, node: Node, ids: Iterable[int]) -> dict[Group, int]:
        """Return the groups of rows of a node's level, each with the mask of these rows."""
        group_of, level = self.live.group_of, node.level
        masks: dict[Group, int] = {}
        for id in ids:
            group = group_of[id]
            masks[group] = masks.get(group, 0) | 1 << group.levels[level].place(id)
        return masks

    def _parts_of(self, node: Node, written: Written, rows: int) -> list[Part]:
        """Return the parts that published rows were written to: one per row, or a single one for
        all of them. Empty if no later node reads them."""
        if written is None:
            return []
        spread = written if isinstance(written, Spread) else Spread((written,), (rows,))
        if not node.writes:  # no node reads columns that this one does not declare
            for segment in spread.segments:
                self.parts.discard(segment)
            return []
        parts = [
            self.parts.add(segment, number)
            for segment, number in zip(spread.segments, spread.counts, strict=True)
        ]
        if len(parts) == 1:
            return parts
        return [part for part, number in zip(parts, spread.counts, strict=True) for _ in range(number)]

    # End leases

    def finish(self, lease: Lease, *, step: int | None = None) -> None:
        """Finish a lease. A FILTER drops the rows that it did not publish; an EXPAND makes no
        children for parents that it did not mention.

        Args:
            step: for an update: the step that it is part of.

        Raises:
            LeaseError: a map or group left rows out.
        """
        self.leases.check(lease)
        node, shape = lease.node, lease.node.operation.shape
        i = self._index[node.name]
        if lease.open and shape in (Shape.MAP, Shape.GROUP):
            some = list(lease.open)[:3]
            raise LeaseError(
                f"node {node.name!r} returned no row for {len(lease.open)} of its rows (sample ids {some})"
            )
        self._note(Finish(lease.token, step))
        if step is not None:
            for group in lease.groups:
                group.trained_in = step
        for ids, published, segment in lease.staged:
            self._accept(lease, ids, published.lists, segment, at_once=len(ids) == lease.num_rows)
        left = self._masks(node, lease.open)
        if shape is Shape.FILTER:
            for group, mask in left.items():
                self.live.drop_downstream(group, mask, i, node.name)
        self.live.finish(left, i)
        lease.open = {}
        self.leases.finish(lease)

    def release(
        self, lease: Lease, why: str = "given back", *, ids: Collection[int] | None = None
    ) -> None:
        """Requeue the unpublished rows of a lease, and void the lease. A node that takes groups
        gives back all of its rows.

        Args:
            ids: unpublished rows to give back, for a node that takes rows; the lease keeps the
                others. None gives back all of them.

        Raises:
            LeaseError: the lease is void, or some of these rows are not in it.
        """
        self.leases.check(lease)
        i = self._index[lease.node.name]
        if ids is not None:
            self._release_some(lease, i, ids, why)
            return
        self._note(Release(lease.token, why))
        if self._takes_groups[i]:
            for group, level, mask, _ in lease.taken:
                group.levels[level].leased[i] &= ~mask
                self.readiness.unclaim_group(group, i)
            for _, _, segment in lease.staged:
                if segment is not None:
                    self.parts.discard(segment)
        else:
            self._give_back(list(lease.open), i)
        self.leases.release(lease, why)

    def _release_some(self, lease: Lease, i: int, ids: Collection[int], why: str) -> None:
        wrong = next((id for id in ids if id not in lease.open), None)
        if wrong is not None or self._takes_groups[i]:
            what = "takes complete groups" if wrong is None else f"does not hold row {wrong}"
            raise LeaseError(
                f"rows of lease {lease.token} are released, but node {lease.node.name!r} {what}"
            )
        self._note(Release(lease.token, why, list(ids)))
        for id in ids:
            del lease.open[id]
        self._give_back(list(ids), i)

    def _give_back(self, ids: Sequence[int], i: int) -> None:
        node, wiring = self.graph.nodes[i], self.live.wiring
        for group, mask in self._masks(node, ids).items():
            rows = group.levels[node.level]
            rows.leased[i] &= ~mask
            if node.makes_level is not None and node.level == SOURCE and not any(group.levels[1:]):
                self.readiness.set_version(group, None)  # its generation begins again
            self.readiness.offer_rows(group, mask.bit_count(), i)
            self.live.note_if_whole(group, i)
            given_up = (
                union([rows.cancelled[j] for j in wiring.served[i]]) & mask
            )  # while they were leased
            if given_up:
                self.live.skip(group, given_up, i)
                self.live.retire_if_finished(group)

    # Drop rows

    def drop(self, node: Node, ids: Iterable[int], why: str) -> int:
        """Drop ready rows that a node fails on. Later nodes continue with the rest of their groups.
        A node that takes groups drops all rows of these groups.

        Returns:
            The number of dropped rows.

        Raises:
            LeaseError: a row is not ready for the node, or is claimed. Nothing changes then.
        """
        i = self._index[node.name]
        if self.live.wiring.quorum[i]:
            raise LeaseError(
                f"node {node.name!r} has a quorum, so rows cannot be dropped at it; release them"
            )
        level, takes_groups = node.level, self._takes_groups[i]
        there = [row for id in ids if (row := self.live.rows.get(id)) is not None]
        for group, at, place in there:
            ready = at == level and group.levels[level].ready(i) >> place & 1
            if not ready or (takes_groups and group.state(i) is not GroupState.READY):
                who = f"row {group.levels[at].ids[place]} is dropped at node {node.name!r}"
                raise LeaseError(f"{who}, but it is not ready there, or is leased")
        masks = self._masks(node, [row.id for row in there])
        offered = self.readiness.offered_rows
        found = [(group, offered(group, i) if takes_groups else mask) for group, mask in masks.items()]
        dropped = [
            group.levels[level].ids[place]
            for group, mask in found
            for place in group.levels[level].in_order(mask)
        ]
        self._note(Drop(node.name, dropped, why))
        for group, mask in found:
            if takes_groups:
                self.readiness.withdraw_group(group, i)
            self.live.drop(group, mask, i, f"failed at {node.name}")
            self.live.retire_if_finished(group)
        return len(dropped)

    def lose(self, group_id: int, why: str, *, issue_again: bool = True) -> bool:
        """Drop the rows of a group whose columns are lost, or that is not needed. Issue its prompt
        again, unless only recording was left to do.

        Returns:
            Whether its prompt was issued again.

        Raises:
            LeaseError: some of its rows are leased.
        """
        group = self.live.groups[group_id]
        issue_again = issue_again and not group.rested  # it was trained on already
        if group.num_leased:
            raise LeaseError(
                f"group {group_id} of graph {self.name!r} is lost ({why}) while rows of it are leased"
            )
        self._note(Lose(group_id, why, issue_again))
        self.live.lose(group, "lost" if issue_again else "given up")
        if issue_again:
            self.live.issue_again(group)
        self.live.retire_if_finished(group)
        return issue_again

    # Deadlines

    def offer(self, node: Node, group: Group) -> None:
        """Offer the rows of a group whose quorum missed its deadline."""
        i = self._index[node.name]
        if group.state(i) is GroupState.GATHERING:
            self._note(Offer(node.name, group.id))
            self.readiness.offer_group(group, i)

    def expire(self) -> list[Lease]:
        """Apply deadlines: release overdue leases and return them, and offer groups whose quorum is
        late."""
        now, quorums = self._clock(), self.live.quorum_deadlines
        while quorums and quorums[0][0] <= now:
            _, i, id = heapq.heappop(quorums)
            group = self.live.groups.get(id)
            if group is not None and group.num_ready(i):
                self.offer(self.graph.nodes[i], group)
        released = self.leases.take_overdue(now)
        for lease in released:
            self.release(lease, f"{lease.holder or 'its holder'} did not finish by its deadline")
        return released

    @property
    def next_deadline(self) -> float | None:
        """Time when to call `expire` next, in seconds of the clock."""
        quorums = self.live.quorum_deadlines
        due = [quorums[0][0]] if quorums else []
        if self.leases.next_deadline is not None:
            due.append(self.leases.next_deadline)
        return min(due, default=None)


# Capacity


UNBOUNDED = 1 << 30


@dataclass(frozen=True)
class Capacity:
    """Number of groups that may be issued, and the limit that allows no more."""

    groups: int
    reason: str = ""


def capacity(
    ledger: Ledger,
    *,
    max_rows: int | None = None,
    max_bytes: int | None = None,
    groups_per_update: int = 1,
    staleness: int | None = None,
    lag: int = 0,
    taken: int = 0,
) -> Capacity:
    """Return how many groups of a ledger's graph may be issued.

    Assumes that each group is as large as the largest finished one; `max_bytes` has no effect
    before a group is finished.

    Args:
        ledger: the rows in flight.
        max_rows: most rows in flight, on all levels together.
        max_bytes: most bytes of their columns.
        groups_per_update: groups in an update. One update's groups are always admitted, even beyond
            the limits, because rows are only freed after training.
        staleness: most updates that a row may lag the weights that it trains. Groups are only
            admitted if they will be trained on within it, so that rows need not be discarded. None
            sets no bound.
        lag: number of updates that the generating weights are behind the trained ones.
        taken: groups that the current update has claimed so far, finished or not.

    Returns:
        The smallest of the limits, at least 0, and the reason.
    """
    updates = [n for n in ledger.graph.nodes if n.operation.updates]
    missing = (
        groups_per_update
        - ledger.live.groups_at_work
        + max(map(ledger.readiness.too_old, updates), default=0)
    )
    bounds: list[tuple[int, str]] = []
    if max_rows is not None:
        each = max(expected_rows(ledger.graph), ledger.live.largest_group)
        free = max_rows // each - len(ledger.live.groups)
        free = max(free, missing) if ledger.live.largest_group > expected_rows(ledger.graph) else free
        bounds.append(
            (free, f"{len(ledger.live.rows)} rows in flight, max_rows={max_rows}, {each} a group")
        )
    if max_bytes is not None:
        each_bytes = ledger.parts.largest_group_bytes
        written = round(ledger.parts.published_bytes - ledger.parts.finished_bytes)  # by groups in flight
        expected = ledger.parts.num_bytes + max(0, each_bytes * len(ledger.live.groups) - written)
        free = (max_bytes - expected) // each_bytes if each_bytes else UNBOUNDED
        reason = (
            f"{ledger.parts.num_bytes} bytes in flight, max_bytes={max_bytes}, up to {each_bytes} a group"
        )
        bounds.append((max(free, missing), reason))
    if staleness is not None and updates:
        ahead = max(
            ledger.readiness.unclaimed(n) + max(taken, ledger.leases.num_groups(n)) for n in updates
        )
        free = (staleness + 1 - lag) * groups_per_update - ahead
        bounds.append((free, f"{ahead} groups wait to be trained on, max_staleness={staleness}"))
    free, reason = min(bounds, default=(UNBOUNDED, ""))
    return Capacity(max(0, free), reason)


def expected_rows(graph: Graph) -> int:
    """Estimate the rows of a group on all levels together, from the argument `n` of its expansions."""
    sizes = {0: 1}
    for node in graph.nodes:
        if node.operation.shape is Shape.EXPAND and node.makes_level is not None:
            number = node.arguments.get("n", 1)
            sizes[node.makes_level] = sizes[node.level] * (
                number if isinstance(number, int) and number > 0 else 1
            )
    return sum(sizes.values())
