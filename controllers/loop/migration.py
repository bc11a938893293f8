"""Migration: moves unfinished responses of a generating call from busy replicas to idle ones.

    busy rank ──hand_over──> unplaced ──the next idle rank──> busy rank

- A rank is idle once it has answered its part of the call. The driver then asks the ranks with the
  most unfinished responses to hand some over. Only the rank knows how far its responses are, so it
  chooses them (`LongestFirst.to_give`), as soon as it has some that are worth a move.
- Moves stay within a call and its lease: the ledger and the log see only finished responses.
- Several ranks may hold responses to one prompt. The prompt is finished once all of them have
  finished their part.
- If a rank fails, its unfinished responses begin again, as without moves. If another rank holds
  responses to the same prompt, the other rows of the lease begin again too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...dataflow.buffer.leases import Published
from ...dataflow.buffer.segments import Segment
from ...dataflow.column import BEGUN_NUMBER, PROMPT_IDS
from ...dataflow.errors import UserError
from ..group import BegunRow, Call, CallRequest
from ..ranks.tasks import HandedOver

MIN_TOKENS = 64
"""[tokens] Move a running response only if at least this many are expected to follow: the next
replica first computes the tokens so far, which takes as long as some steps."""


@dataclass
class _Moves:
    """The moves of one call."""

    finished: Counter[int] = field(default_factory=Counter)
    """Rank -> number of responses that it has published or handed over."""
    received: Counter[int] = field(default_factory=Counter)
    """Rank -> number of responses that it continues for others."""
    held: dict[int, Counter[int]] = field(default_factory=dict)
    """Rank -> parent -> number of input rows of the rank with unfinished responses. Empty before
    the first request."""
    holders: Counter[int] = field(default_factory=Counter)
    """Parent -> number of such rows of all ranks, and of unplaced responses."""
    asked: set[int] = field(default_factory=set)
    """Ranks that are to hand responses over."""
    unplaced: list[BegunRow] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    """Segments with the tokens so far of moved responses."""


class Migration:
    def __init__(self, *, on: bool) -> None:
        self._on = on
        self._moves: dict[Call, _Moves] = {}

    @property
    def calls(self) -> list[Call]:
        """Running calls whose rows may move."""
        return [*self._moves]

    def begin(self, call: Call) -> None:
        """Watch a call, if its method can continue the rows of other ranks."""
        operation = call.node.operation if call.node is not None else None
        # Episodes of agents read all columns, but stay on their rank.
        if (
            self._on
            and operation is not None
            and str(BEGUN_NUMBER) in operation.may_read
            and str(PROMPT_IDS) in operation.reads
        ):
            self._moves[call] = _Moves()

    def end(self, call: Call) -> Sequence[Segment]:
        """Forget a call. Return the segments that it needs no longer."""
        moves = self._moves.pop(call, None)
        return () if moves is None else moves.segments

    def publishes(self, call: Call, rank: int, published: Published) -> Published:
        """Note the rows that a rank has finished. Return the report without parents that get further
        rows from other ranks."""
        moves = self._moves.get(call)
        if moves is None:
            return published
        moves.finished[rank] += len(published.ids)
        if not moves.held or published.finished is None:
            return published
        over = [id for id in published.finished.tolist() if self._leave(call, moves, rank, id)]
        return replace(published, finished=np.array(over, np.int64))

    def hands_over(self, call: Call, rank: int, given: HandedOver, segment: Segment) -> None:
        moves = self._moves.get(call)
        if moves is None or not moves.held:
            raise UserError(
                f"{call.group.name}[{rank}] handed over rows of {call.method}() unasked; let the method "
                "yield Unfinished only after a call of its hand_over(), under Synchronous(migrate=True)"
            )
        moves.asked.discard(rank)
        moves.finished[rank] += len(given.ids)
        moves.segments.append(segment)
        columns = given.parents.tolist(), given.numbers.tolist(), given.ids.tolist()
        rows = [BegunRow(*row, segment) for row in zip(*columns, strict=True)]
        moves.unplaced += rows
        call.unplaced = len(moves.unplaced)
        moves.holders.update(row.parent for row in rows)
        for parent in given.left.tolist():
            self._leave(call, moves, rank, parent)

    def place(self, call: Call) -> None:
        """Give unplaced responses to idle ranks, if there are any."""
        moves = self._moves[call]
        open_ids = call.lease.open if call.lease is not None and call.holds_lease else ()
        rows = [row for row in moves.unplaced if row.parent in open_ids]
        idle = self._idle(call)
        if rows and not idle and call.waiting:
            return
        moves.unplaced, call.unplaced = [], 0
        if rows and not idle:
            assert call.ledger is not None and call.lease is not None
            why = "no rank is left that could continue their responses"
            call.ledger.release(call.lease, why, ids={row.parent for row in rows})
            return
        # The longest ones come first, so deal them one by one.
        shares = {rank: rows[k :: len(idle)] for k, rank in enumerate(idle) if rows[k :: len(idle)]}
        for rank, own in shares.items():
            moves.asked.discard(rank)
            moves.received[rank] += len(own)
            moves.held.setdefault(rank, Counter()).update(row.parent for row in own)
            call.group.continue_rows(call, rank, own)

    def requests(self, call: Call) -> list[CallRequest]:
        """Return calls that ask busy ranks to hand responses over to idle ones."""
        moves = self._moves[call]
        if moves.unplaced or not call.holds_lease:
            return []
        moves.asked &= call.waiting
        free = len(self._idle(call)) - len(moves.asked)
        if free <= 0:
            return []
        left = {rank: self._left(call, moves, rank) for rank in call.waiting - moves.asked}
        givers = sorted((rank for rank in left if left[rank] > 1), key=lambda rank: (-left[rank], rank))
        givers = givers[:free]
        if givers and not moves.held:
            self._count_rows(call, moves)
        moves.asked.update(givers)
        return [
            CallRequest(
                call.group,
                "hand_over",
                {"parts": 1 + free // len(givers), "min_tokens": MIN_TOKENS},
                ranks=(rank,),
            )
            for rank in givers
        ]

    @staticmethod
    def _idle(call: Call) -> list[int]:
        """Return the ranks that have answered and can get further rows."""
        if len(call.waiting) == len(call.ranks):
            return []
        alone = call.group.lone_ranks
        return [
            rank
            for rank in call.ranks
            if rank in alone and rank not in call.waiting and rank not in call.lost
        ]

    @staticmethod
    def _left(call: Call, moves: _Moves, rank: int) -> int:
        """Return the number of unfinished responses of a rank, or slightly more."""
        assert call.node is not None
        given = int(call.node.arguments.get("n", 1)) * call.num_rows.get(rank, 0)
        return given + moves.received[rank] - moves.finished[rank]

    @staticmethod
    def _count_rows(call: Call, moves: _Moves) -> None:
        assert call.lease is not None
        for rank, ids in call.shares.items():
            moves.held[rank] = Counter(id for id in ids if id in call.lease.open)
            moves.holders.update(moves.held[rank])

    @staticmethod
    def _leave(call: Call, moves: _Moves, rank: int, parent: int) -> bool:
        """Note that a rank has finished one of its input rows. Return whether this parent gets no
        more rows from any rank."""
        moves.holders[parent] -= 1
        moves.held[rank][parent] -= 1
        if not moves.held[rank][parent]:
            # If the rank fails, this parent is not affected.
            call.shares[rank] = tuple(id for id in call.shares[rank] if id != parent)
        return moves.holders[parent] <= 0
