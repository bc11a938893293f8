"""Claims: which rows a node gets, what becomes of groups that are too old for it, and what its quorum does without.

An update first sets aside every ready group that is too old for it. It then takes the groups with the oldest tokens.

A quorum is chosen when its group is claimed for the first time: the first n rows win. The others are cancelled, and so is work for them
that nobody else needs. A parent of which more rows were to come is finished without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .leases import Leases, Staleness, Taken
from .live_rows import LiveRows
from .rows import MAX_CHILDREN, Group, GroupState, Ids, LevelRows, places_in


class Taking(NamedTuple):
    """The groups that a claim takes, and the groups that it sets aside."""

    taken: list[tuple[Group, int]]
    """Groups, each with the mask of its rows."""
    masked: frozenset[int] = frozenset()
    """Ids of the rows among these whose tokens are masked because they are too old."""
    too_old: list[int] | None = None
    """Ids of the groups that were set aside because they are too old. None without a staleness bound."""
    offered: bool = False
    """Groups that were set aside before are ready again."""


class Claims:
    """Chooses rows for the claims of one ledger."""

    def __init__(self, live: LiveRows, leases: Leases, ids: Ids) -> None:
        self._live = live
        self._leases = leases
        self._ids = ids
        self.stale: Counter[str] = Counter()
        """Groups that were too old when an update claimed them, by their fate."""

    def take(self, i: int, max_rows: int | None, max_groups: int | None, staleness: Staleness | None = None) -> Taking:
        """Choose the rows that node i gets."""
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
        """Take the groups that a record of the log names, for node i, which takes groups.

        Args:
            ids: sample ids of the rows in the record.
            too_old: ids of the groups that it set aside; None in a log of format 5 or earlier, where groups were looked at in order of
                their ids until there were enough.

        Raises:
            ValueError: one of the groups is not ready for the node.
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

    def _too_old_by_id(self, i: int, taken: Sequence[Group], max_groups: int | None, staleness: Staleness) -> list[int]:
        """The groups that a claim of an earlier format set aside."""
        if staleness.fate == "mask":
            return []
        full = max_groups is not None and len(taken) >= max_groups
        groups, last = self._live.groups, max((group.id for group in taken), default=-1)
        ready = self._live.readiness.ready_ids(i, groups)
        return [id for id in ready if (id < last or not full) and self._is_too_old(groups[id], i, staleness)]

    def _take_group(self, group: Group, i: int, staleness: Staleness | None, masked: list[int]) -> tuple[Group, int]:
        """Node i gets a ready group."""
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
        """Sample ids for the rows of a level that will be made of these; a row of which some were made before keeps its own."""
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
        """Offer the groups again that wait for a larger bound, if this bound allows them or they are to wait no longer. Returns whether
        there are any.

        Args:
            wait: keep groups that are still too old waiting, whatever the fate, as in logs of format 5 and earlier.
        """
        readiness, waits = self._live.readiness, wait or staleness.fate == "wait"
        held = [self._live.groups[id] for id in sorted(readiness.too_old_groups[i])]
        again = [group for group in held if not (waits and self._is_too_old(group, i, staleness))]
        for group in again:
            readiness.clear_too_old(group, i)
            readiness.offer_group(group, i)
        return bool(again)

    def _set_aside(self, group: Group, i: int, staleness: Staleness) -> None:
        """A ready group is too old for node i, which does not get it."""
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
