"""Claims: which rows a node gets, what becomes of groups that are too old for it, and what its quorum does without.

A quorum is chosen when its group is claimed for the first time: the first n rows win. The others are cancelled, and so is work for them
that nobody else needs. A parent of which more rows were to come is finished without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .leases import Leases, Staleness
from .live_rows import LiveRows
from .rows import MAX_CHILDREN, Group, Ids, Row, RowState


class Claims:
    """Chooses rows for the claims of one ledger."""

    def __init__(self, live: LiveRows, leases: Leases, ids: Ids) -> None:
        self._live = live
        self._leases = leases
        self._ids = ids
        self.stale: Counter[str] = Counter()
        """Groups that were too old when an update claimed them, by their fate."""

    def take(
        self, i: int, max_rows: int | None, max_groups: int | None, staleness: Staleness | None
    ) -> tuple[list[Row], frozenset[int]]:
        """The rows that node i gets, in order of group and sample id, and the ids of those among them that are to be masked."""
        if not self._live.wiring.takes_groups[i]:
            return self._live.readiness.take_rows(i, max_rows, self._live.rows), frozenset()
        if staleness is not None:
            self._offer_held(i, staleness)
        rows: list[Row] = []
        masked: list[int] = []
        taken = 0
        readiness, groups = self._live.readiness, self._live.groups
        while (max_groups is None or taken < max_groups) and (group := readiness.next_group(i, groups)) is not None:
            own = readiness.offered_rows(group, i)
            if staleness is not None and not staleness.allows(own):
                self.stale[staleness.fate] += 1
                if staleness.fate != "mask":
                    self._pass_over(group, i, own, staleness)
                    continue
                masked += [row.id for row in own if not staleness.allows((row,))]
            taken += 1
            rows += own
            readiness.claim_group(group, i)
            if self._live.wiring.quorum[i]:
                self._close_quorum(group, i, own)
        return rows, frozenset(masked)

    def set_ids_aside(self, rows: Iterable[Row], level: int) -> None:
        """Sample ids for the rows of a level that will be made of these; a row of which some were made before keeps its own."""
        new = [row for row in rows if not row.made(level)]
        first = self._ids.take(len(new) * MAX_CHILDREN)
        for k, row in enumerate(new):
            row.first_children = {**(row.first_children or {}), level: first + k * MAX_CHILDREN}

    def _offer_held(self, i: int, staleness: Staleness) -> None:
        """Groups that were too old for node i are ready again if this bound allows them."""
        readiness = self._live.readiness
        for group in [self._live.groups[id] for id in readiness.held_groups[i]]:
            if staleness.allows(readiness.offered_rows(group, i)):
                readiness.unhold_group(group, i)
                readiness.offer_group(group, i)

    def _pass_over(self, group: Group, i: int, rows: list[Row], staleness: Staleness) -> None:
        """A group is too old for node i, which does not get it."""
        if staleness.fate == "wait":
            self._live.readiness.hold_group(group, i)
            return
        if staleness.fate == "requeue":
            self._live.issue_again(group)
        for row in rows:
            self._live.drop(row, i, f"stale at {self._live.graph.nodes[i].name}")
        self._live.retire_if_finished(group)

    def _close_quorum(self, group: Group, i: int, chosen: list[Row]) -> None:
        """The first n rows have won, if they had not before; the others of the group are cancelled."""
        if group.closed >> i & 1:
            return
        group.closed |= 1 << i
        winners = {row.id for row in chosen}
        wiring = self._live.wiring
        for row in group.levels[wiring.level[i]]:
            if row.id not in winners and row.awaits(i):
                self._live.cancel(row, i, f"over-issued at {self._live.graph.nodes[i].name}")
        maker = wiring.makes_for[i]
        if maker is not None:
            for parent in group.levels[wiring.level[maker]]:
                self._cut_short(parent, maker)

    def _cut_short(self, parent: Row, i: int) -> None:
        """Node i is done with a parent, though more rows were to come of it: nobody would wait for them."""
        state = parent.state(i)
        if state in (RowState.DONE, RowState.DROPPED):
            return
        if state is RowState.LEASED:
            makes = self._live.graph.nodes[i].makes_level
            assert makes is not None
            self._leases.give_up(parent, makes)
        elif state is RowState.READY:
            self._live.readiness.num_rows[i] -= 1
        self._live.finish([parent], i)
