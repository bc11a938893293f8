"""Replies that a rank holds back briefly, on a fake clock."""

import numpy as np

from weft.controllers.group import MANY_RANKS, MAX_S, gather_s
from weft.controllers.ranks.row_io import _Gathered
from weft.dataflow.batch import Batch
from weft.dataflow.metrics import Sum
from weft.workers.worker import Children


def children(parent: int, number: int, *, last: bool = False, **columns: list[int]) -> Children:
    rows = Batch.of(parent_id=np.array([parent]), length=np.array([10 * parent + number]), **columns)
    return Children(rows, np.array([number]), np.array([parent] * last, np.int64))


def test_rows_wait_until_the_first_of_them_has_waited_long_enough():
    now = [0.0]
    gathered = _Gathered(1.0, lambda: now[0])
    assert gathered.take_due() == [], "nothing waits yet"
    assert gathered.add_part((children(3, 0), {"rows": Sum(1.0)})) == [] == gathered.take_due()
    now[0] = 0.9
    assert gathered.add_part(children(4, 7, last=True, seen=[1])) == []
    now[0] = 1.0
    [(made, metrics)] = gathered.take_due()
    assert made.rows.columns == ("parent_id", "length"), "what only some rows have cannot be written"
    assert made.rows.numpy("length").tolist() == [30, 47] and made.numbers.tolist() == [0, 7]
    assert made.finished.tolist() == [4] and metrics == {"rows": Sum(1.0)}
    assert gathered.take_due() == [] == gathered.take_all()
    now[0] = 1.5
    assert gathered.add_part(children(3, 1)) == [], "the next rows wait anew"
    now[0] = 2.5
    [(made, _)] = gathered.add_part(children(3, 2))
    assert made.numbers.tolist() == [1, 2]


def test_rows_that_are_not_children_are_published_at_once_after_waiting_ones():
    gathered = _Gathered(1.0, lambda: 0.0)
    batch = Batch.of(parent_id=np.array([1]))
    first = children(3, 0)
    assert gathered.add_part(first) == []
    (before, _), after = gathered.add_part(batch)
    assert before is first and after is batch
    assert _Gathered(0.0, lambda: 0.0).add_part(first) == [first]


def test_rows_wait_only_where_many_ranks_bring_them():
    assert gather_s(MANY_RANKS - 1) == 0.0 < gather_s(MANY_RANKS) < gather_s(512) == MAX_S
