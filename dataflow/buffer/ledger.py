"""Ledger: the control plane of the sample buffer. It knows which columns of each row exist, where they are, and what each node has
done with the row; it never holds a token. Every event costs O(1) per row and pushes readiness.

The law of rows:

- A row is exactly one of waiting, leased, done or dropped, and each node consumes it at most once (`RowState`, in `rows.py`).
- A row is ready for a node when everything in the node's `after` is done with it. A node that takes groups gets a group when no more
  rows of it can come and all are ready, or when its quorum is there.
- Rows made of a parent come one by one. The parent is finished by a word of its own, by the end of its lease, or by a quorum that
  does without the rest. A parent that is requeued keeps the rows that were made of it, and their ids.
- A claim is a lease, and only the holder of its token may publish. What a node that takes groups publishes counts when its lease is
  finished: a lease that is released before that gives complete groups back.

A lease:    claim ──> open ──finish──> finished
                       └──release, or its deadline passes──> void: its rows are ready again, and whoever holds it is refused

Each event (`events.py`) is noted in the log before it takes effect, and the ledger is what its events make of it: `replay` them, and it
stands where it stood. `ledger_state.py` saves and loads the same state, so that a log need not be read from its beginning.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import LeaseError
from ..graph import Graph
from ..node import SOURCE, Node
from ..operation import Shape
from .events import Claim, Drop, Event, Finish, Issue, Lose, Offer, Publish, Release, SetSource, from_record, to_record
from .live_rows import LiveRows
from .log import Log, Record
from .rows import MAX_CHILDREN, Group, Ids, Lease, Part, Piece, Published, Row, Staleness
from .segments import Segment

REMEMBERED_LEASES = 1000
"""How many voided leases are remembered, to tell a late holder what became of its own."""


class Ledger(LiveRows):
    """Rows of one graph of a run, from issue to retirement.

    >>> import pyarrow as pa
    >>> from weft.dataflow.graph import Graph
    >>> from weft.dataflow.source import TableSource
    >>> ledger = Ledger(Graph("empty", TableSource("prompts", pa.table({"prompt_ids": [[1]]})), ()))
    >>> ledger.issue([0], [1], round=0)
    >>> ledger.counts()
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
            source: where the rows of the graph's source lie.
            name: what the graph is called in the log.
            log: where every event is noted before it takes effect; None keeps no log.
            clock: seconds, for deadlines.
        """
        super().__init__(graph, ids or Ids(), clock)
        self.name = name or graph.name
        self.source = source
        self.log = log
        self._leases: dict[int, Lease] = {}
        self._next_token = 1
        self._leased_groups = [0] * len(graph.nodes)
        self._void: dict[int, str] = {}
        self._given_up: list[tuple[int, int]] = []
        """(token, parent) of what a quorum finished while it was leased, until `take_given_up`."""
        self.cut_short: Counter[str] = Counter()
        """Parents that a quorum finished without the rest of their rows, by the node that was making these."""
        self.prompts_issued = 0
        """Rows of the source that `issue` was called with so far: the place in the source."""
        self.stale: Counter[str] = Counter()
        """Groups that were too old when an update claimed them, by their fate."""
        self.late = 0
        """Refused uses of leases that were void."""

    # The log

    def _note(self, event: Event) -> None:
        if self.log is not None:
            self.log.append(to_record(event, self.name))

    def replay(self, record: Record) -> None:
        """Do again what a record says.

        Raises:
            ValueError: when this ledger is not where it was when the record was written.
        """
        log, self.log = self.log, None
        try:
            self.apply(from_record(record))
        finally:
            self.log = log

    def apply(self, event: Event) -> None:
        """Do what an event says, by the verb that noted it."""
        match event:
            case Issue():
                if (event.first, event.group) != (self._ids.next_id, self._ids.next_group):
                    raise ValueError(f"rows were issued from id {event.first}, but {self._ids.next_id} is next")
                self.issue(event.positions, event.tokens, round=event.round)
            case SetSource():
                self.set_source(Segment.from_json(event.segment))
            case Claim():
                self._claim_again(event)
            case Publish():
                arrays = (event.ids, event.tokens, event.versions, event.parents, event.finished)
                segment = Segment.from_json(event.segment) if event.segment else None
                self.publish(self._leases[event.lease], Published(*map(int64_array, arrays)), segment)
            case Finish():
                self.finish(self._leases[event.lease], step=event.step)
            case Release():
                self.release(self._leases[event.lease], event.why, ids=event.ids)
            case Drop():
                self.drop(self.graph[event.node], event.ids, event.why)
            case Lose():
                self.lose(event.group, event.why, issue_again=event.again)
            case Offer():
                self._offer_short(self._index[event.node], self._groups[event.group])

    def _claim_again(self, event: Claim) -> None:
        self._next_token = event.lease
        lease = self.claim(
            self.graph[event.node],
            max_rows=event.rows,
            max_groups=event.groups,
            holder=event.holder,
            staleness=Staleness(*event.stale) if event.stale else None,
            version=event.version,
        )
        if (lease.ids.tolist() if lease else []) != event.ids:
            raise ValueError(
                f"lease {event.lease} of node {event.node!r} has rows {event.ids[:3]}..., which are not those that are ready"
            )

    # Rows come in

    def set_source(self, segment: Segment) -> None:
        """Where the rows of the graph's source lie from now on."""
        self._note(SetSource(segment.to_json()))
        self.source = segment

    def issue(self, positions: Sequence[int], num_tokens: Sequence[int], *, round: int) -> None:
        """New rows from these rows of the source; each is the root of a group of its own."""
        positions, num_tokens = [int(p) for p in positions], [int(t) for t in num_tokens]
        if len(positions) != len(num_tokens):
            raise ValueError(f"{len(positions)} rows were issued with the tokens of {len(num_tokens)}")
        self._note(Issue(self._ids.next_id, self._ids.next_group, round, positions, num_tokens))
        self.prompts_issued += len(positions)
        for position, tokens in zip(positions, num_tokens, strict=True):
            self._issue(position, tokens, round)

    # Readiness

    def _offer_short(self, i: int, group: Group) -> None:
        """A group whose quorum did not come in time is offered with the rows that did."""
        if not (group.offered | group.closed) >> i & 1:
            self._note(Offer(self.graph.nodes[i].name, group.id))
            self.readiness.offer_group(group, i)

    def leased_groups(self, node: Node) -> int:
        """Groups that this node (which takes groups or batches) has claimed and not finished."""
        return self._leased_groups[self._index[node.name]]

    # Rows are worked on

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
        """Lease ready rows to this node, in order of group and sample id; None when there are none.

        Args:
            max_rows: where the node takes rows; of a node that takes groups, `max_groups`.
            deadline_s: seconds from now after which the rows go back (see `expire`).
            version: of a node that generates: of its weights now, which the groups are noted to begin with.
            staleness: of an update: which groups are too old, and what becomes of them.
        """
        i = self._index[node.name]
        token, too_old = self._next_token, self.stale.total()
        masked: list[int] = []
        if self._wiring.takes_groups[i]:
            rows = self._claim_groups(i, max_groups, staleness, masked)
        else:
            rows = self.readiness.take_rows(i, max_rows, self._rows)
        if not rows and self.stale.total() == too_old:
            return None
        self._next_token += 1
        lease = Lease(token, node, rows, holder, masked=frozenset(masked))
        if node.operation.shape is Shape.EXPAND:
            assert node.makes_level is not None
            self._set_ids_aside(rows, node.makes_level)
        stale = [staleness.version, staleness.bound, staleness.fate] if staleness else None
        self._note(Claim(token, node.name, [r.id for r in rows], max_rows, max_groups, stale, version, holder))
        if not rows:
            return None
        bit = 1 << i
        for row in rows:
            row.leased |= bit
            if version is not None and row.group.version is None:
                self.readiness.set_version(row.group, version)
        lease.open = {r.id: r for r in rows}
        if deadline_s is not None:
            lease.deadline = self._clock() + deadline_s
            heapq.heappush(self._deadlines, (lease.deadline, -1, token))
        self._begin(lease)
        return lease

    def _set_ids_aside(self, rows: Iterable[Row], level: int) -> None:
        """Sample ids for the rows that will be made of these; a row of which some were made before keeps its own."""
        new = [row for row in rows if not row.made(level)]
        first = self._ids.take(len(new) * MAX_CHILDREN)
        for k, row in enumerate(new):
            row.first_children = {**(row.first_children or {}), level: first + k * MAX_CHILDREN}

    def _claim_groups(self, i: int, number: int | None, staleness: Staleness | None, masked: list[int]) -> list[Row]:
        rows: list[Row] = []
        taken = 0
        if staleness is not None and self.readiness.held[i]:
            self._offer_held(i, staleness)
        queue = self.readiness.group_queues[i]
        while queue and (number is None or taken < number):
            group = self._groups.get(heapq.heappop(queue))
            if group is None:  # it was lost
                continue
            own = self._rows_offered(group, i)
            if not own:  # its rows were dropped
                continue
            self.readiness.withdraw_group(group, i)
            if staleness is not None and not staleness.allows(own):
                self.stale[staleness.fate] += 1
                if staleness.fate == "wait":
                    self.readiness.held[i].append(group.id)
                    continue
                if staleness.fate != "mask":
                    self._drop_stale(group, i, own, issue_again=staleness.fate == "requeue")
                    continue
                masked += [r.id for r in own if not staleness.allows((r,))]
            taken += 1
            rows += own
            self.readiness.claim_group(group, i)
            if self._wiring.quorum[i]:
                self._close_quorum(group, i, own)
        return rows

    def _offer_held(self, i: int, staleness: Staleness) -> None:
        held, self.readiness.held[i] = self.readiness.held[i], []
        for id in held:
            group = self._groups[id]
            if staleness.allows(self._rows_offered(group, i)):
                self.readiness.offer_group(group, i)
            else:
                self.readiness.held[i].append(id)

    def _drop_stale(self, group: Group, i: int, rows: list[Row], *, issue_again: bool) -> None:
        root = group.levels[SOURCE][0]
        if issue_again:
            self._issue(root.position, group.tokens, group.round)
        for row in rows:
            self._drop(row, i, f"stale at {self.graph.nodes[i].name}")
        self._retire_if_finished(group)

    def _close_quorum(self, group: Group, i: int, chosen: list[Row]) -> None:
        """The first n rows have won; the others of the group are cancelled, and so is work on them alone."""
        if group.closed >> i & 1:
            return
        group.closed |= 1 << i
        winners = {r.id for r in chosen}
        for row in list(group.levels[self.graph.nodes[i].level]):
            if row.id not in winners and not (row.skipped | row.done) >> i & 1:
                self._cancel(row, i, f"over-issued at {self.graph.nodes[i].name}")
        maker = self._wiring.makes_for[i]
        if maker is not None:
            for parent in group.levels[self.graph.nodes[maker].level]:
                if not (parent.skipped | parent.done) >> maker & 1:
                    self._cut_short(parent, maker)

    def _cut_short(self, parent: Row, i: int) -> None:
        """Node i is done with a parent, though more rows were to come of it: nobody would wait for them."""
        if parent.leased >> i & 1:
            node = self.graph.nodes[i]
            lease = next(lease for lease in self._leases.values() if lease.node is node and parent.id in lease.open)
            del lease.open[parent.id]
            lease.given_up.add(parent.id)
            self._given_up.append((lease.token, parent.id))
        elif parent.offered >> i & 1:
            self.readiness.rows[i] -= 1
        self.cut_short[self.graph.nodes[i].name] += 1
        parent.group.expanded[i] += 1
        self._finish(parent, i)

    def take_given_up(self) -> list[tuple[int, int]]:
        """(token of a lease, parent in it) of what is not wanted any more though its holder works on it, each said once."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def lose(self, group_id: int, why: str, *, issue_again: bool = True) -> bool:
        """Columns of a group cannot be read any more: its rows are dropped, and its prompt is issued again; or nobody wants
        them any more. Returns whether it is issued again: what waited for its record alone is not.

        Raises:
            LeaseError: when somebody works on it.
        """
        group = self._groups[group_id]
        issue_again = (
            issue_again and not group.rested
        )  # what was trained on is not trained on again: its record is lost
        rows = [r for level in group.levels for r in level]
        if any(r.leased for r in rows):
            raise LeaseError(f"group {group_id} of graph {self.name!r} is lost ({why}) while rows of it are leased")
        self._note(Lose(group_id, why, issue_again))
        self.readiness.set_version(group, None)  # what becomes of it below is counted no more
        for i, node in enumerate(self.graph.nodes):
            offered = group.offered & ~group.claimed & 1 << i
            if offered and group_id in self.readiness.held[i]:
                self.readiness.held[i].remove(group_id)
            elif offered and group.ready[i]:  # else it was too old, and dropped
                self.readiness.withdraw_group(group, i)
            group.offered |= 1 << i  # never again
            for row in group.levels[node.level]:
                if not (row.done | row.skipped) >> i & 1:
                    self._skip(row, i)
        for level in range(self._wiring.num_levels):
            self.readiness.unfinished_levels[level] -= not group.complete[level]
            group.complete[level] = True
        for row in rows:
            row.skipped |= 1 << len(self.graph.nodes)  # counted as dropped, whatever was done with it
        self._dropped["lost" if issue_again else "given up"] += len(rows)
        if issue_again:
            self._issue(group.levels[SOURCE][0].position, group.tokens, group.round)
        self._retire_if_finished(group)
        return issue_again

    def pieces(self, node: Node, rows: Sequence[Row]) -> list[Piece]:
        """Where a consumer finds the columns that this node reads of these rows."""
        by_writer: dict[str, list[str]] = {}
        for column in node.reads:
            by_writer.setdefault(node.writers[column], []).append(column)
        pieces: list[Piece] = []
        for writer, columns in by_writer.items():
            if not writer:
                assert self.source is not None, f"graph {self.name!r} has no segment with the rows of its source"
                keys = np.fromiter((r.ancestor(SOURCE).position for r in rows), np.int64, len(rows))
                pieces.append(Piece(tuple(columns), keys, (self.source,), by_position=True))
                continue
            level = self.graph.level_of(writer)
            owners = [r.ancestor(level) for r in rows]
            keys = np.fromiter((r.id for r in owners), np.int64, len(rows))
            parts = dict.fromkeys(r.parts[writer] for r in owners)
            pieces.append(Piece(tuple(columns), keys, tuple(p.segment for p in parts)))
        return pieces

    def publish(self, lease: Lease, published: Published, segment: Segment | None) -> None:
        """Rows of a lease that its node has finished, all or some of them, with what it wrote (None: nothing).

        Of an EXPAND these are new rows, as they come; of the parents that are `finished` no more do. What comes of a parent that a
        quorum has finished is let go.

        Raises:
            LeaseError: for rows (or parents) that are not in the lease, or were published before; nothing is changed then.
        """
        self._check(lease)
        node = lease.node
        if lease.given_up and published.parents is not None:
            published = published.without(lease.given_up)
        ids = published.ids.tolist()
        finished = [] if published.finished is None else published.finished.tolist()
        held = ids if published.parents is None else published.parents.tolist()
        wrong = next((id for id in (*held, *finished) if id not in lease.open), None)
        if wrong is not None:
            what = (
                "published row" if published.parents is None else "made a row of" if wrong in held else "finished row"
            )
            raise LeaseError(f"node {node.name!r} {what} {wrong}, which is not (or no longer) in lease {lease.token}")
        lengths = {len(a) for a in (ids, held, published.num_tokens, published.versions) if a is not None}
        if len(lengths) != 1:
            raise LeaseError(f"node {node.name!r} published columns of {sorted(lengths)} rows in lease {lease.token}")
        taken = {id for _, p, _ in lease.staged for id in p.ids.tolist()} if published.parents is not None else ()
        if (
            len(set(ids)) != len(ids)
            or len(set(finished)) != len(finished)
            or (published.parents is not None and any(id in self._rows or id in taken for id in ids))
        ):
            raise LeaseError(f"node {node.name!r} published a row twice in lease {lease.token}")
        self._note(
            Publish(
                lease.token,
                ids,
                published.num_tokens.tolist(),
                segment.to_json() if segment is not None else None,
                published.versions.tolist() if published.versions is not None else None,
                held if published.parents is not None else None,
                finished if published.parents is not None else None,
            )
        )
        through = ids if published.parents is None else finished
        if self._wiring.takes_groups[self._index[node.name]]:
            for id in through:
                del lease.open[id]
            lease.staged.append((through, published, segment))
        else:
            parents = {} if published.parents is None else {id: lease.open[id] for id in held}
            self._accept(node, [lease.open.pop(id) for id in through], parents, published, segment)

    def _accept(
        self, node: Node, rows: list[Row], parents: dict[int, Row], published: Published, segment: Segment | None
    ) -> None:
        """Rows are done, and rows made of these parents are there."""
        i = self._index[node.name]
        part = None
        if node.writes and segment is not None:
            part = Part(segment, len(published.ids), len(published.ids))
            self.num_bytes += segment.num_bytes
            self.published_bytes += segment.num_bytes
        elif segment is not None:  # nobody reads what a node wrote without saying so
            self._freed.append(segment)
        if published.parents is not None:
            self._accept_children(node, parents, published, part)
            for parent in rows:
                parent.group.expanded[i] += 1
                self._finish(parent, i)
        else:
            if part is not None:  # before any row is finished: a finished row may be the last of its group
                for row in rows:
                    row.parts[node.name] = part
            for row, tokens in zip(rows, published.num_tokens.tolist(), strict=True):
                row.tokens += tokens
                self._finish(row, i)
        if part is not None and not part.written:
            self.finished_bytes += part.segment.num_bytes
            self._free(part)

    def _accept_children(self, node: Node, parents: dict[int, Row], published: Published, part: Part | None) -> None:
        assert published.parents is not None and node.makes_level is not None
        versions = published.versions.tolist() if published.versions is not None else None
        for k, (id, parent_id, tokens) in enumerate(
            zip(published.ids.tolist(), published.parents.tolist(), published.num_tokens.tolist(), strict=True)
        ):
            parent = parents[parent_id]
            version = parent.version if versions is None else versions[k]
            row = Row(id, parent.group, parent, node.makes_level, parent.position, parent.tokens + tokens, version)
            if part is not None:
                row.parts[node.name] = part
            parent.children = parent.children or []
            parent.children.append(row)
            self._add(row)

    def finish(self, lease: Lease, *, step: int | None = None) -> None:
        """The node is through with the lease. Rows that a FILTER did not publish are dropped; an EXPAND made nothing of
        the parents that it did not mention.

        Args:
            step: of an update: the step that it is part of.

        Raises:
            LeaseError: when a map or group left rows out.
        """
        self._check(lease)
        shape = lease.node.operation.shape
        i = self._index[lease.node.name]
        if lease.open and shape in (Shape.MAP, Shape.GROUP):
            some = list(lease.open)[:3]
            raise LeaseError(
                f"node {lease.node.name!r} returned no row for {len(lease.open)} of its rows (sample ids {some})"
            )
        self._note(Finish(lease.token, step))
        if step is not None:
            for row in lease.rows:
                row.group.step = step
        by_id = {r.id: r for r in lease.rows} if lease.staged else {}
        for ids, published, segment in lease.staged:
            self._accept(lease.node, [by_id[id] for id in ids], by_id, published, segment)
        for row in lease.open.values():
            if shape is Shape.FILTER:
                self._drop_downstream(row, i, lease.node.name)
            else:
                row.group.expanded[i] += 1
            self._finish(row, i)
        lease.open = {}
        self._end(lease)

    def release(self, lease: Lease, why: str = "given back", *, ids: Collection[int] | None = None) -> None:
        """Give the rows of a lease back that were not published (of a node that takes groups: all of them): they are ready
        again, and the lease is void.

        Args:
            ids: of a node that takes rows: give back these alone, of which none was published; the lease holds the others.

        Raises:
            LeaseError: the lease is void, or some of these rows are not in it.
        """
        self._check(lease)
        i = self._index[lease.node.name]
        if ids is not None:
            self._give_back(lease, i, ids, why)
            return
        self._note(Release(lease.token, why))
        for row in lease.rows if self._wiring.takes_groups[i] else lease.open.values():
            row.leased &= ~(1 << i)
        if self._wiring.takes_groups[i]:
            for group in dict.fromkeys(r.group for r in lease.rows):
                self.readiness.unclaim_group(group, i)
            for _, _, segment in lease.staged:
                if segment is not None:
                    self._freed.append(segment)
        else:
            for row in lease.open.values():
                self._offer_again(row, i)
        self._end(lease)
        self._void[lease.token] = why
        if len(self._void) > REMEMBERED_LEASES:
            del self._void[next(iter(self._void))]

    def _give_back(self, lease: Lease, i: int, ids: Collection[int], why: str) -> None:
        wrong = next((id for id in ids if id not in lease.open), None)
        if wrong is not None or self._wiring.takes_groups[i]:
            what = "whole groups" if wrong is None else f"not row {wrong}"
            raise LeaseError(f"rows of lease {lease.token} are given back, but node {lease.node.name!r} has {what}")
        self._note(Release(lease.token, why, list(ids)))
        for id in ids:
            row = lease.open.pop(id)
            row.leased &= ~(1 << i)
            self._offer_again(row, i)

    def _offer_again(self, row: Row, i: int) -> None:
        """A row that node i had claimed is ready for it as before."""
        if self.graph.nodes[i].makes_level is not None and row.level == SOURCE and not any(row.group.levels[1:]):
            self.readiness.set_version(row.group, None)  # its generation begins again
        self.readiness.offer_row(row, i)
        if row.cancelled & self._wiring.serves[i]:  # meanwhile
            self._skip(row, i)
            self._retire_if_finished(row.group)

    def drop(self, node: Node, ids: Iterable[int], why: str) -> int:
        """Rows that are ready for a node which cannot do them are dropped before it, and what comes after it goes on with the
        rest of their groups; a node that takes groups loses the whole of these. Returns how many rows.

        Raises:
            LeaseError: one of them is not ready for the node, or is claimed; nothing is changed then.
        """
        i = self._index[node.name]
        if self._wiring.quorum[i]:
            raise LeaseError(f"node {node.name!r} has a quorum: it takes what comes, and no row of it is dropped")
        rows = [row for id in ids if (row := self._rows.get(id)) is not None]
        groups = list(dict.fromkeys(row.group for row in rows))
        if self._wiring.takes_groups[i]:
            rows = [row for group in groups for row in self._rows_offered(group, i)]
        for row in rows:
            offers = row.group.offered if self._wiring.takes_groups[i] else row.offered
            on_offer = offers >> i & 1 and row.group.id not in self.readiness.held[i]
            if not on_offer or (row.leased | row.done | row.skipped) >> i & 1:
                raise LeaseError(
                    f"row {row.id} is dropped at node {node.name!r}, for which it is not ready, or which has it"
                )
        self._note(Drop(node.name, [row.id for row in rows], why))
        for group in groups if self._wiring.takes_groups[i] else ():
            self.readiness.withdraw_group(group, i)  # its entry among the offers has no rows any more
        for row in rows:
            self._drop(row, i, f"failed at {node.name}")
        for group in groups:
            self._retire_if_finished(group)
        return len(rows)

    def expire(self) -> list[Lease]:
        """What is due by the clock: leases past their deadline are released (and returned), and groups whose quorum did
        not come in time are offered as they are."""
        now, released = self._clock(), []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, i, id = heapq.heappop(self._deadlines)
            if i < 0:
                lease = self._leases.get(id)
                if lease is not None:
                    self.release(lease, f"{lease.holder or 'its holder'} did not finish by its deadline")
                    released.append(lease)
            elif id in self._groups and self._groups[id].ready[i]:
                self._offer_short(i, self._groups[id])
        return released

    @property
    def next_deadline(self) -> float | None:
        """When `expire` has something to look at, in seconds of the clock."""
        return self._deadlines[0][0] if self._deadlines else None

    def _begin(self, lease: Lease) -> None:
        """A lease is open from here on."""
        self._leases[lease.token] = lease
        i = self._index[lease.node.name]
        self._leased_groups[i] += lease.num_groups if self._wiring.takes_groups[i] else 0

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.token]
        i = self._index[lease.node.name]
        self._leased_groups[i] -= lease.num_groups if self._wiring.takes_groups[i] else 0

    def holds(self, lease: Lease) -> bool:
        """Whether the lease is neither finished nor released."""
        return self._leases.get(lease.token) is lease

    def is_void(self, token: int) -> bool:
        """Whether a lease of this number was released, or is not granted yet (it was in a future that was given up)."""
        return token in self._void or token >= self._next_token

    @property
    def leases(self) -> list[Lease]:
        """Leases that are neither finished nor released, oldest first."""
        return list(self._leases.values())

    def _check(self, lease: Lease) -> None:
        if not self.holds(lease):
            self.late += 1
            why = self._void.get(lease.token)
            raise LeaseError(
                f"lease {lease.token} of node {lease.node.name!r} was released or finished before{f' ({why})' if why else ''}"
            )


def int64_array(numbers: Sequence[int] | None) -> Any:
    return None if numbers is None else np.array(numbers, np.int64)
