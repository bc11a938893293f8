"""Claims: which rows a node gets, what becomes of groups that are too old for it, and what its quorum does without.

A quorum is chosen when its group is claimed for the first time: the first n rows win. The others are cancelled, and so is work for them
that nobody else needs. A parent of which more rows were to come is finished without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .leases import Leases, Staleness, Taken
from .live_rows import LiveRows
from .rows import MAX_CHILDREN, Group, Ids, LevelRows, places_in


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
    ) -> tuple[list[tuple[Group, int]], frozenset[int]]:
        """The rows that node i gets, as masks by group in the order of the groups, and the ids of those among them that are to be
        masked."""
        level = self._live.wiring.level[i]
        if not self._live.wiring.takes_groups[i]:
            return self._live.readiness.take_rows(i, max_rows, self._live.groups), frozenset()
        if staleness is not None:
            self._offer_too_old(i, staleness)
        taken: list[tuple[Group, int]] = []
        masked: list[int] = []
        readiness, groups = self._live.readiness, self._live.groups
        while (max_groups is None or len(taken) < max_groups) and (
            group := readiness.next_group(i, groups)
        ) is not None:
            mask = readiness.offered_rows(group, i)
            if staleness is not None and (old := staleness.too_old(group.levels[level], mask)):
                self.stale[staleness.fate] += 1
                if staleness.fate != "mask":
                    self._pass_over(group, i, mask, staleness)
                    continue
                masked += [group.levels[level].ids[place] for place in old]
            taken.append((group, mask))
            readiness.claim_group(group, i)
            if self._live.wiring.quorum[i]:
                self._close_quorum(group, i, mask)
        return taken, frozenset(masked)

    def set_ids_aside(self, taken: Sequence[Taken], level: int) -> None:
        """Sample ids for the rows of a level that will be made of these; a row of which some were made before keeps its own."""
        new: list[tuple[LevelRows, int]] = []
        for group, of, _, places in taken:
            made = set(group.levels[level].parents)
            new += [(group.levels[of], place) for place in places if place not in made]
        first = self._ids.take(len(new) * MAX_CHILDREN)
        for k, (rows, place) in enumerate(new):
            rows.aside = rows.aside or {}
            rows.aside[place, level] = first + k * MAX_CHILDREN

    def _offer_too_old(self, i: int, staleness: Staleness) -> None:
        """Groups that were too old for node i are ready again if this bound allows them."""
        readiness = self._live.readiness
        for group in [self._live.groups[id] for id in readiness.too_old_groups[i]]:
            if not staleness.too_old(group.levels[self._live.wiring.level[i]], readiness.offered_rows(group, i)):
                readiness.clear_too_old(group, i)
                readiness.offer_group(group, i)

    def _pass_over(self, group: Group, i: int, mask: int, staleness: Staleness) -> None:
        """A group is too old for node i, which does not get it."""
        if staleness.fate == "wait":
            self._live.readiness.set_too_old(group, i)
            return
        if staleness.fate == "requeue":
            self._live.issue_again(group)
        self._live.drop(group, mask, i, f"stale at {self._live.graph.nodes[i].name}")
        self._live.retire_if_finished(group)

    def _close_quorum(self, group: Group, i: int, chosen: int) -> None:
        """The first n rows have won, if they had not before; the others of the group are cancelled."""
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
        """Node i is done with the rows of its level, though more rows were to come of them: nobody would wait for these."""
        level, makes = self._live.wiring.level[i], self._live.graph.nodes[i].makes_level
        rows = group.levels[level]
        assert makes is not None
        left = rows.awaiting(i)
        for place in places_in(left & rows.leased[i]):
            self._leases.give_up(rows, place, makes)
        self._live.readiness.num_rows[i] -= rows.ready(i).bit_count()
        if left:
            self._live.finish({group: left}, i)
