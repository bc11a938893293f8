"""Ledger: which columns of each row exist, where they are stored, and which nodes have processed
the row. The ledger never holds tokens. Each event costs O(1) per row.

Invariants:

- Each row is exactly one of waiting, leased, done or dropped, and each node consumes it at most
  once (`LevelRows`, in `rows.py`).
- A row is ready for a node when all nodes in the node's `after` are done with it. A node that takes
  groups gets a group when all rows of the group exist and are ready, or when its quorum is reached.
- Children arrive one by one. A parent finishes by a separate event, at the end of its lease, or
  when a quorum needs no more children. A requeued parent keeps its children and their ids.
- An update sets aside groups that are too old. `_set_aside` keeps, requeues or drops their rows.
- A claim creates a lease, and only the holder of its token may publish. Results of a node that
  takes groups take effect when its lease is finished. Releasing the lease requeues whole groups.

The ledger logs each event (`events.py`) before applying it. The events alone determine its state,
so `recovery.py` can replay them. `live` holds rows, groups and readiness, `parts` holds column
locations, and `leases` holds leases.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from ..errors import LeaseError
from ..graph import SOURCE, Graph, Node
from ..operation import Shape
from ..runs.log import Log, Record
from .events import publish_json, to_json
from .leases import Lease, Leases, Published, PublishedLists, Spread, Written
from .live_rows import LiveRows, Readiness
from .rows import MAX_CHILDREN, Group, GroupState, Ids, LevelRows, StoredPart, places_in, union
from .segments import Segment
from .staleness import Staleness, VersionOf

REQUEST = ("rows", "groups", "stale", "version")
"""Fields of a claim's log record that describe the request."""


class _Choice(NamedTuple):
    """The rows that a claim takes, and the groups that it sets aside."""

    taken: list[tuple[Group, int]]
    """Pairs of a group and the mask of its taken rows."""
    masked: frozenset[int] = frozenset()
    """Sample ids of taken rows that are too old, so that their tokens must be masked."""
    too_old: list[int] | None = None
    """Ids of groups set aside as too old; None without a staleness bound."""
    offered: bool = False
    """Whether the claim made groups ready that an earlier claim had set aside."""


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
            ids: id counters, shared by all graphs of a run.
            source: segment with the rows of the graph's source.
            name: name of the graph in the log. Default: the graph's own name.
            log: log to write events to; None writes no log.
            clock: returns the time in seconds, for deadlines.
        """
        self.graph = graph
        self.name = name or graph.name
        self.source = source
        self.log = log
        self.prompts_issued = 0
        """Number of source rows issued so far, and the position in the source."""
        self.ids = ids or Ids()
        self.live = LiveRows(graph, self.ids, clock)
        self.parts = self.live.parts
        makers = {graph.nodes[i].name for i in self.live.wiring.makes_for if i is not None}
        self.leases = Leases(makers)
        self.stale: Counter[str] = Counter()
        """Number of groups that were too old at a claim, keyed by fate."""
        self.version_of: VersionOf = "oldest_token"
        """How ranks compute the versions of the rows that they publish."""
        self._index = self.live.wiring.index
        self._takes_groups = self.live.wiring.takes_groups
        self._clock = clock

    @property
    def readiness(self) -> Readiness:
        return self.live.readiness

    def _note(self, do: str, **fields: Any) -> None:
        if self.log is not None:
            self.log.append_json(to_json(do, self.name, **fields))

    # Issue rows

    def set_source(self, segment: Segment) -> None:
        self._note("source", segment=segment.to_json())
        self.source = segment

    def issue(self, positions: Sequence[int], num_tokens: Sequence[int], *, step: int) -> None:
        """Issue the source rows at these positions for a step. Each row starts a group."""
        positions, tokens = [int(p) for p in positions], [int(t) for t in num_tokens]
        if len(positions) != len(tokens):
            raise ValueError(
                f"{len(positions)} rows were issued, but {len(tokens)} token counts were given"
            )
        first, group = self.ids.next_id, self.ids.next_group
        self._note("issue", first=first, group=group, step=step, positions=positions, tokens=tokens)
        self.prompts_issued += len(positions)
        for position, number in zip(positions, tokens, strict=True):
            self.live.issue(position, number, step)

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
        """Lease ready rows to a node, in order of group and sample id. Return None if no row is
        ready. An update gets the groups with the oldest versions first.

        Args:
            max_rows: maximum number of rows, for a node that takes rows.
            max_groups: maximum number of groups, for a node that takes groups. 0 only sets aside
                groups that are too old.
            holder: name of the worker, for messages.
            deadline_s: [s] time after which `expire` requeues the rows.
            staleness: for an update, the staleness bound and the fate of older groups.
            version: policy version of a node that generates, to record in new groups.
        """
        choice = self._choose(self._index[node.name], max_rows, max_groups, staleness)
        # Also log a claim that only sets groups aside or offers them again: it changes the state.
        if not (choice.taken or choice.too_old or choice.offered):
            return None
        deadline = None if deadline_s is None else self._clock() + deadline_s
        stale = [staleness.version, staleness.bound, staleness.fate] if staleness else None
        asked = {"rows": max_rows, "groups": max_groups, "stale": stale, "version": version}
        self.leases.next_token += 1
        return self._grant(node, self.leases.next_token - 1, choice, asked, holder, deadline)

    def claim_again(self, record: Record) -> None:
        """Replay a claim from its log record. Raises a ValueError if it would take other rows."""
        node, token, ids = self.graph[record["node"]], record["lease"], record["ids"]
        i, asked = self._index[node.name], {name: record.get(name) for name in REQUEST}
        self.leases.next_token = token + 1
        if self._takes_groups[i]:
            staleness = Staleness(*asked["stale"]) if asked["stale"] else None
            choice = self._choose_again(i, ids, asked["groups"], staleness, record.get("too_old"))
        else:
            choice = self._choose(i, asked["rows"], None)
        lease = self._grant(node, token, choice, asked, record.get("holder", ""))
        if (lease.ids.tolist() if lease else []) != ids:
            what = f"has rows {ids[:3]}..., which are not those that are ready"
            raise ValueError(f"lease {token} of node {node.name!r} {what}")

    def set_too_old_aside(self, node: Node, staleness: Staleness) -> int:
        before = self.stale.total()
        self.claim(node, max_groups=0, staleness=staleness)
        return self.stale.total() - before

    def _grant(
        self,
        node: Node,
        token: int,
        choice: _Choice,
        asked: Record,
        holder: str,
        deadline: float | None = None,
    ) -> Lease | None:
        i, taken, version = self._index[node.name], choice.taken, asked["version"]
        lease = Lease.of(token, node, taken, holder=holder, deadline=deadline, masked=choice.masked)
        if node.makes_level is not None:
            self._reserve_ids(lease, node.makes_level)
        named = {"too_old": choice.too_old, "holder": holder or None}
        self._note("claim", lease=token, node=node.name, ids=list(lease.open), **asked, **named)
        if not taken:
            return None
        for group, mask in taken:
            group.levels[node.level].leased[i] |= mask
            if version is not None:
                self.readiness.lower_version(group, version)
        self.leases.grant(lease)
        return lease

    def _reserve_ids(self, lease: Lease, level: int) -> None:
        """Reserve sample ids for children of a lease's rows that have no children yet."""
        new: list[tuple[LevelRows, int]] = []
        for group, of, _, places in lease.taken:
            made = set(group.levels[level].parents)
            new += [(group.levels[of], place) for place in places if place not in made]
        first = self.ids.reserve(len(new) * MAX_CHILDREN)
        for k, (rows, place) in enumerate(new):
            rows.aside = rows.aside or {}
            rows.aside[place, level] = first + k * MAX_CHILDREN

    # Choose rows for a claim
    #
    # An update first sets aside all groups that are too old, then takes the groups with the oldest
    # versions. The first claim of a group for a quorum takes the first n ready rows, cancels the
    # other rows and all work that only they need, and finishes the parents.

    def _choose(
        self, i: int, max_rows: int | None, max_groups: int | None, staleness: Staleness | None = None
    ) -> _Choice:
        readiness, groups = self.readiness, self.live.groups
        if not self.live.wiring.takes_groups[i]:
            return _Choice(readiness.take_rows(i, max_rows, groups))
        offered = staleness is not None and self._offer_again(i, staleness)
        too_old: list[int] = []
        while staleness is not None and (group := readiness.first_group(i, groups)) is not None:
            # The oldest groups come first, so stop at the first group within the bound.
            if staleness.fate == "mask" or not self._is_too_old(group, i, staleness):
                break
            too_old.append(group.id)
            self._set_aside(group, i, staleness)
        taken: list[tuple[Group, int]] = []
        masked: list[int] = []
        while max_groups is None or len(taken) < max_groups:
            group = readiness.first_group(i, groups)
            if group is None:
                break
            taken.append(self._take_group(group, i, staleness, masked))
        taken.sort(key=lambda one: one[0].id)
        return _Choice(taken, frozenset(masked), None if staleness is None else too_old, offered)

    def _choose_again(
        self,
        i: int,
        ids: Iterable[int],
        max_groups: int | None,
        staleness: Staleness | None,
        too_old: Sequence[int] | None,
    ) -> _Choice:
        """Replay the choice of a claim by node i, which takes groups: take the groups of the rows
        `ids`. `too_old` is None in logs of format 5 and earlier, which checked groups in order of
        ids. Raises a ValueError or LookupError if a group is not ready or not in flight."""
        groups = list(dict.fromkeys(self.live.group_of[id] for id in ids))
        if staleness is not None:
            self._offer_again(i, staleness, wait=too_old is None)
            if too_old is None:
                too_old = self._too_old_by_id(i, groups, max_groups, staleness)
            for id in too_old:
                self._check_ready(self.live.groups[id], i)
                self._set_aside(self.live.groups[id], i, staleness)
        masked: list[int] = []
        for group in groups:
            self._check_ready(group, i)
        taken = [self._take_group(group, i, staleness, masked) for group in groups]
        return _Choice(taken, frozenset(masked))

    def _check_ready(self, group: Group, i: int) -> None:
        if group.state(i) is not GroupState.READY:
            name = self.live.graph.nodes[i].name
            raise ValueError(f"group {group.id} is {group.state(i).value} at node {name!r}, not ready")

    def _too_old_by_id(
        self, i: int, taken: Sequence[Group], max_groups: int | None, staleness: Staleness
    ) -> list[int]:
        """Return the ids of the groups that a claim of log format 5 or earlier set aside."""
        if staleness.fate == "mask":
            return []
        full = max_groups is not None and len(taken) >= max_groups
        groups, last = self.live.groups, max((group.id for group in taken), default=-1)
        ready = [id for id in self.readiness.ready_ids(i, groups) if id < last or not full]
        return [id for id in ready if self._is_too_old(groups[id], i, staleness)]

    def _offer_again(self, i: int, staleness: Staleness, *, wait: bool = False) -> bool:
        """Offer groups that waited for a larger bound. Return whether there are any. With `wait`,
        groups that are still too old keep waiting whatever the fate, as in log formats up to 5."""
        readiness, waits = self.readiness, wait or staleness.fate == "wait"
        held = [self.live.groups[id] for id in sorted(readiness.too_old_groups[i])]
        again = [group for group in held if not (waits and self._is_too_old(group, i, staleness))]
        for group in again:
            readiness.clear_too_old(group, i)
            readiness.offer_group(group, i)
        return bool(again)

    def _is_too_old(self, group: Group, i: int, staleness: Staleness) -> bool:
        rows = group.levels[self.live.wiring.level[i]]
        return bool(staleness.too_old(rows, self.readiness.offered_rows(group, i)))

    def _set_aside(self, group: Group, i: int, staleness: Staleness) -> None:
        self.stale[staleness.fate] += 1
        self.readiness.withdraw_group(group, i)
        if staleness.fate == "wait":
            self.readiness.set_too_old(group, i)
            return
        if staleness.fate == "requeue":
            self.live.issue_again(group)
        mask = self.readiness.offered_rows(group, i)
        self.live.drop(group, mask, i, f"stale at {self.live.graph.nodes[i].name}")
        self.live.retire_if_finished(group)

    def _take_group(
        self, group: Group, i: int, staleness: Staleness | None, masked: list[int]
    ) -> tuple[Group, int]:
        rows = group.levels[self.live.wiring.level[i]]
        mask = self.readiness.offered_rows(group, i)
        if staleness is not None and (old := staleness.too_old(rows, mask)):
            self.stale[staleness.fate] += 1
            masked += [rows.ids[place] for place in old]
        self.readiness.claim_group(group, i)
        if self.live.wiring.quorum[i] and not group.closed >> i & 1:
            self._close_quorum(group, i, mask)
        return group, mask

    def _close_quorum(self, group: Group, i: int, chosen: int) -> None:
        group.closed |= 1 << i
        wiring, nodes = self.live.wiring, self.live.graph.nodes
        if others := group.levels[wiring.level[i]].awaiting(i) & ~chosen:
            self.live.cancel_rows(group, others, i, f"over-issued at {nodes[i].name}")
        maker = wiring.makes_for[i]
        if maker is None:
            return
        rows = group.levels[wiring.level[maker]]
        left = rows.awaiting(maker)
        for place in places_in(left & rows.leased[maker]):
            self.leases.give_up_parent(nodes[maker], rows.ids[place])
        # The maker's ready rows are finished without a claim, so subtract them from its count here.
        self.readiness.num_rows[maker] -= rows.ready(maker).bit_count()
        if left:
            self.live.finish_rows({group: left}, maker)

    # Publish rows

    def publish(self, lease: Lease, published: Published, written: Written) -> None:
        """Record that a node has finished rows of its lease, and where it wrote their columns. For
        EXPAND, the rows are new, and the parents in `finished` get no more children. The ledger
        discards new rows of a parent that a quorum finished.

        Raises:
            LeaseError: rows or parents are not in the lease, or were published before. The ledger
                does not change.
        """
        self.leases.check(lease)
        if lease.given_up and published.parents is not None:
            if isinstance(written, Spread):
                written = written.only(published.not_of(lease.given_up))
            published = published.without(lease.given_up)
        lists = published.lists
        ids, tokens, versions, parents, finished = lists
        # Common case: all rows of the lease at once need no individual check.
        if not (lease.is_whole(published) and len(tokens) == lease.num_rows and versions is None):
            lease.check(lists, self.live.group_of)
        if parents is not None and finished is None:
            finished = []
        if self.log is not None:
            one = written.to_json() if isinstance(written, Segment) else None
            several = written.to_json() if isinstance(written, Spread) else None
            made = ids, tokens, one, versions, parents, finished, several
            self.log.append_json(publish_json(self.name, lease.token, *made))
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
        """Add new rows, and mark the rows `through` as done; with `at_once`, the whole lease."""
        node, i = lease.node, self._index[lease.node.name]
        ids, tokens, versions, parents, _ = published
        parts = self._parts_of(node, written, len(ids))
        if parents is not None:
            self.live.add_children(i, ids, parents, tokens, versions, parts)
            # Tokens and parts belong to the children; the code below handles the parents.
            tokens, parts = [], []
        elif not any(tokens):
            tokens = []
        ordered = self.live.wiring.ends_in_quorum(i)
        if at_once and not tokens and not ordered:
            # Common case: update whole masks.
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
            self.live.finish_rows({group: mask for group, _, mask, _ in lease.taken}, i)
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
        self.live.finish_rows(masks, i, order if ordered else None)

    def _parts_of(self, node: Node, written: Written, rows: int) -> list[StoredPart]:
        """Return the stored parts of published rows: one per row, one for all rows, or none."""
        if written is None:
            return []
        spread = written if isinstance(written, Spread) else Spread((written,), (rows,))
        if not node.writes:  # no node can read undeclared columns
            for segment in spread.segments:
                self.parts.discard(segment)
            return []
        parts = list(map(self.parts.add_segment, spread.segments, spread.counts))
        if len(parts) == 1:
            return parts
        return [part for part, number in zip(parts, spread.counts, strict=True) for _ in range(number)]

    # End leases

    def finish(self, lease: Lease, *, step: int | None = None) -> None:
        """Finish a lease. A FILTER drops its unpublished rows; an EXPAND finishes its remaining
        parents. Raises a LeaseError if a MAP or GROUP did not publish all rows. `step` is the step
        of an update."""
        self.leases.check(lease)
        node, shape = lease.node, lease.node.operation.shape
        i = self._index[node.name]
        if lease.open and shape in (Shape.MAP, Shape.GROUP):
            some = list(lease.open)[:3]
            raise LeaseError(
                f"node {node.name!r} returned no row for {len(lease.open)} of its rows (sample ids {some})"
            )
        self._note("finish", lease=lease.token, step=step)
        if step is not None:
            for group in lease.groups:
                group.trained_in = step
        for ids, published, segment in lease.staged:
            self._accept(lease, ids, published.lists, segment, at_once=len(ids) == lease.num_rows)
        left = self._masks(node, lease.open)
        if shape is Shape.FILTER:
            for group, mask in left.items():
                self.live.drop_downstream(group, mask, i, node.name)
        self.live.finish_rows(left, i)
        lease.open = {}
        self.leases.close(lease)

    def release(
        self, lease: Lease, why: str = "given back", *, ids: Collection[int] | None = None
    ) -> None:
        """Void a lease, and requeue its unpublished rows, or all its rows if the node takes groups.

        Args:
            why: reason, for the log and for errors of the holder.
            ids: for a node that takes rows, sample ids to requeue instead of all; the lease stays
                open and keeps the others.

        Raises:
            LeaseError: the lease is void, or some of these rows are not in it.
        """
        self.leases.check(lease)
        i = self._index[lease.node.name]
        takes_groups = self._takes_groups[i]
        if ids is not None:
            wrong = next((id for id in ids if id not in lease.open), None)
            if wrong is not None or takes_groups:
                what = "takes complete groups" if wrong is None else f"does not hold row {wrong}"
                raise LeaseError(
                    f"rows of lease {lease.token} are released, but node {lease.node.name!r} {what}"
                )
        given_back = list(lease.open if ids is None else ids)
        self._note("release", lease=lease.token, why=why, ids=None if ids is None else given_back)
        if not takes_groups:
            self._give_back(given_back, i)
        else:
            for group, level, mask, _ in lease.taken:
                group.levels[level].leased[i] &= ~mask
                self.readiness.unclaim_group(group, i)
            for _, _, segment in lease.staged:
                if segment is not None:
                    self.parts.discard(segment)
        if ids is None:
            self.leases.void(lease, why)
        else:
            for id in given_back:
                del lease.open[id]

    def _give_back(self, ids: Sequence[int], i: int) -> None:
        node, wiring = self.graph.nodes[i], self.live.wiring
        for group, mask in self._masks(node, ids).items():
            rows = group.levels[node.level]
            rows.leased[i] &= ~mask
            if node.makes_level is not None and node.level == SOURCE and not any(group.levels[1:]):
                self.readiness.set_version(group, None)  # its generation begins again
            # Include rows that are skipped below: `skip` subtracts them again.
            self.readiness.offer_rows(group, mask.bit_count(), i)
            self.live.note_if_whole(group, i)
            if given_up := union([rows.cancelled[j] for j in wiring.served[i]]) & mask:
                self.live.skip(group, given_up, i)
                self.live.retire_if_finished(group)

    def _masks(self, node: Node, ids: Iterable[int]) -> dict[Group, int]:
        """Return the mask of these rows of the node's level, keyed by group."""
        group_of, level = self.live.group_of, node.level
        masks: dict[Group, int] = {}
        for id in ids:
            group = group_of[id]
            masks[group] = masks.get(group, 0) | 1 << group.levels[level].place(id)
        return masks

    # Drop rows

    def drop(self, node: Node, ids: Iterable[int], why: str) -> int:
        """Drop ready rows on which a node failed, and return their number. A node that takes groups
        drops all rows of their groups. Raises a LeaseError, and changes nothing, if a row is
        claimed or not ready."""
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
        if takes_groups:
            masks = {group: self.readiness.offered_rows(group, i) for group in masks}
        levels = [(group.levels[level], mask) for group, mask in masks.items()]
        dropped = [rows.ids[place] for rows, mask in levels for place in rows.in_order(mask)]
        self._note("drop", node=node.name, ids=dropped, why=why)
        for group, mask in masks.items():
            if takes_groups:
                self.readiness.withdraw_group(group, i)
            self.live.drop(group, mask, i, f"failed at {node.name}")
            self.live.retire_if_finished(group)
        return len(dropped)

    def lose(self, group_id: int, why: str, *, issue_again: bool = True) -> bool:
        """Drop a group whose columns are lost, or that is not needed. `issue_again` issues its
        prompt again, unless only recording was left to do. Return whether the ledger issued the
        prompt again. Raises a LeaseError if rows of the group are leased."""
        group = self.live.groups[group_id]
        issue_again = issue_again and not group.rested  # a rested group was already trained on
        if group.num_leased:
            raise LeaseError(
                f"group {group_id} of graph {self.name!r} is lost ({why}) while rows of it are leased"
            )
        self._note("lose", group=group_id, why=why, again=None if issue_again else False)
        self.live.lose(group, "lost" if issue_again else "given up")
        if issue_again:
            self.live.issue_again(group)
        self.live.retire_if_finished(group)
        return issue_again

    # Deadlines

    def offer(self, node: Node, group: Group) -> None:
        """Offer a group to a quorum that missed its deadline."""
        i = self._index[node.name]
        if group.state(i) is GroupState.GATHERING:
            self._note("offer", node=node.name, group=group.id)
            self.readiness.offer_group(group, i)

    def expire(self) -> list[Lease]:
        """Release leases past their deadline, and offer groups to quorums past theirs. Return the
        released leases."""
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
        """[s] Clock time of the next deadline; None if there is none."""
        quorums, due = self.live.quorum_deadlines, self.leases.next_deadline
        times = [quorums[0][0]] if quorums else []
        return min(times if due is None else [*times, due], default=None)
