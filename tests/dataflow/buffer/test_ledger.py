"""The ledger: each rule by itself, and all of them together against a model that works everything out from scratch."""

import json
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.dataflow.buffer.ledger import Ledger
from weft.dataflow.buffer.ledger_state import load, save
from weft.dataflow.buffer.ledger_view import table, why
from weft.dataflow.buffer.log import Log, LogReader
from weft.dataflow.buffer.rows import Fate, Ids, Lease, Published, Staleness
from weft.dataflow.buffer.segments import Segment
from weft.dataflow.config import Config
from weft.dataflow.errors import LeaseError
from weft.dataflow.graph import Graph
from weft.dataflow.handle import Handle
from weft.dataflow.node import SOURCE, Node
from weft.dataflow.operation import Declaration, Shape
from weft.dataflow.source import TableSource
from weft.dataflow.takes import GROUPS, ROWS, Quorum, Takes, TrainingBatch
from weft.dataflow.tracing import SymbolicRows, Trace
from weft.workers.worker import Worker

PROMPTS = TableSource("prompts", pa.table({"prompt": ["a"]}))


def segment(file: str = "data", num_bytes: int = 10) -> Segment:
    return Segment("node", file, 0, num_bytes, 0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Trainer(Worker):
    Config = Config


class Drawing:
    """A graph made node by node."""

    def __init__(self) -> None:
        self.recording = Trace("drawn", PROMPTS)
        self.prompts = SymbolicRows(self.recording, SOURCE, {"prompt": ""})

    def add(self, rows: SymbolicRows, name: str, shape: Shape = Shape.MAP, **rule: Any) -> SymbolicRows:
        updates = isinstance(rule.get("takes"), TrainingBatch)
        rule.setdefault("writes", () if shape is Shape.FILTER or updates else (f"{name}_c",))
        declaration = Declaration(name, shape, **rule)
        if updates:  # on a worker group of its own
            return self.recording.add(rows, Handle(Trainer, Config(), f"{name}r"), method, declaration, (), {})
        return self.recording.add(rows, None, function, declaration, (), {})

    def graph(self) -> Graph:
        return self.recording.finish()


def function(rows: object) -> None: ...
def first_of_each_group(rows: object, n: int, deadline_s: float | None = None) -> None: ...
def method(self: object, rows: object) -> None: ...


def grpo() -> Graph:
    draw = Drawing()
    samples = draw.add(draw.prompts, "generate", Shape.EXPAND, reads=("prompt",))
    samples = draw.add(samples, "score", reads=("generate_c",))
    samples = draw.add(samples, "advantages", Shape.GROUP, reads=("score_c",))
    draw.add(samples, "update", reads=("generate_c", "advantages_c"), takes=TrainingBatch())
    return draw.graph()


def dapo() -> Graph:
    draw = Drawing()
    samples = draw.add(draw.prompts, "generate", Shape.EXPAND, reads=("prompt",))
    kept = draw.add(samples, "keep", Shape.FILTER, reads=("generate_c",))
    samples = draw.add(kept, "advantages", Shape.GROUP, reads=("generate_c",))
    draw.add(samples, "update", reads=("advantages_c",), takes=TrainingBatch())
    return draw.graph()


def claim(ledger: Ledger, name: str, **limits: Any) -> Lease:
    lease = ledger.claim(node(ledger, name), **limits)
    assert lease is not None
    return lease


def node(ledger: Ledger, name: str) -> Node:
    return next(n for n in ledger.graph.nodes if n.name in (name, f"{name}r.{name}"))


def publish(ledger: Ledger, lease: Lease, ids: Any = None, into: Segment = segment()) -> None:
    ids = lease.ids if ids is None else np.asarray(ids, np.int64)
    ledger.publish(lease, Published(ids, np.ones(len(ids), np.int64)), into)


def expand(
    ledger: Ledger,
    lease: Lease,
    number: int,
    *,
    first: int = 1000,
    only: Any = None,
    versions: Any = None,
    finished: Any = None,
) -> None:
    parents = np.repeat(lease.ids if only is None else np.asarray(only, np.int64), number)
    ids = first + np.arange(len(parents))
    finished = np.unique(parents) if finished is None else np.array(finished, np.int64)
    made = Published(ids, np.full(len(ids), 5), versions, parents, finished)
    ledger.publish(lease, made, segment("children"))


def do(ledger: Ledger, name: str) -> None:
    lease = claim(ledger, name)
    publish(ledger, lease)
    ledger.finish(lease)


def generated(graph: Graph, prompts: int = 2, samples: int = 3) -> Ledger:
    """A ledger after generation: samples 1000, 1001, ... in groups 0, 1, ..."""
    ledger = Ledger(graph)
    ledger.issue(range(prompts), [2] * prompts, round=0)
    lease = claim(ledger, "generate")
    expand(ledger, lease, samples)
    ledger.finish(lease)
    return ledger


# Claims and readiness


def test_rows_are_offered_when_what_they_wait_for_is_done():
    ledger = generated(grpo())
    assert ledger.ready(node(ledger, "score")) == 6 and ledger.ready(node(ledger, "advantages")) == 0
    assert ledger.claim(node(ledger, "advantages")) is None
    do(ledger, "score")
    assert ledger.ready_groups(node(ledger, "advantages")) == 2


def test_a_claim_takes_the_oldest_rows_and_no_row_twice():
    ledger = generated(grpo())
    assert claim(ledger, "score", max_rows=2).ids.tolist() == [1000, 1001]
    assert claim(ledger, "score").ids.tolist() == [1002, 1003, 1004, 1005]
    assert ledger.claim(node(ledger, "score")) is None


def test_a_claim_can_be_limited_to_a_number_of_groups():
    ledger = generated(grpo())
    do(ledger, "score")
    lease = claim(ledger, "advantages", max_groups=1)
    assert lease.ids.tolist() == [1000, 1001, 1002] and set(lease.group_ids.tolist()) == {0}
    assert ledger.ready_groups(node(ledger, "advantages")) == 1


def test_a_group_is_not_offered_while_one_of_its_rows_is_missing():
    ledger = generated(grpo())
    lease = claim(ledger, "score")
    publish(ledger, lease, [1000, 1002, 1003, 1004, 1005])
    assert claim(ledger, "advantages").ids.tolist() == [1003, 1004, 1005]
    publish(ledger, lease, [1001])
    assert claim(ledger, "advantages").ids.tolist() == [1000, 1001, 1002]


def test_groups_are_streamed_as_their_parents_finish():
    ledger = Ledger(grpo())
    ledger.issue([0, 1], [2, 2], round=0)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 2, only=[1])
    assert claim(ledger, "score").ids.tolist() == [1000, 1001]
    assert ledger.counts() == {"issued": 4, "waiting": 1, "leased": 3, "done": 0, "dropped": 0}


def test_a_lease_knows_its_rows():
    ledger = Ledger(grpo())
    ledger.issue([7, 3], [2, 4], round=0)
    lease = claim(ledger, "generate")
    assert lease.versions.tolist() == [-1, -1] and lease.parent_ids.tolist() == lease.ids.tolist() == [0, 1]
    expand(ledger, lease, 2, versions=np.array([4, 4, 5, 6]))
    ledger.finish(lease)
    lease = claim(ledger, "score")
    assert lease.num_tokens.tolist() == [7, 7, 9, 9] and lease.versions.tolist() == [4, 4, 5, 6]
    assert lease.parent_ids.tolist() == [0, 0, 1, 1] and lease.group_ids.tolist() == [0, 0, 1, 1]


# Leases


def test_a_released_lease_gives_its_unpublished_rows_back_and_is_void():
    ledger = generated(grpo())
    lease = claim(ledger, "score")
    publish(ledger, lease, [1001])
    ledger.release(lease)
    again = claim(ledger, "score")
    assert again.ids.tolist() == [1000, 1002, 1003, 1004, 1005]
    for late in (ledger.release, ledger.finish, lambda stale: publish(ledger, stale, [1000])):
        with pytest.raises(LeaseError, match="lease 2 of node 'score' was released or finished before"):
            late(lease)


def test_a_released_group_comes_back_whole():
    ledger = generated(grpo())
    do(ledger, "score")
    lease = claim(ledger, "advantages")
    publish(ledger, lease, [1000, 1001])
    ledger.release(lease)
    assert claim(ledger, "advantages").ids.tolist() == list(range(1000, 1006))


def test_only_rows_of_the_lease_can_be_published_and_only_once():
    ledger = generated(grpo())
    lease = claim(ledger, "score", max_rows=2)
    with pytest.raises(LeaseError, match="node 'score' published row 1005, which is not"):
        publish(ledger, lease, [1000, 1005])
    publish(ledger, lease, [1000])  # the refused publication changed nothing
    with pytest.raises(LeaseError, match="published row 1000, which is not"):
        publish(ledger, lease, [1000])
    with pytest.raises(LeaseError, match="published a row twice"):
        publish(ledger, lease, [1001, 1001])


def test_children_need_parents_of_the_lease_and_ids_of_their_own():
    ledger = Ledger(grpo())
    ledger.issue([0, 1], [2, 2], round=0)
    lease = claim(ledger, "generate", max_rows=1)
    with pytest.raises(LeaseError, match="node 'generate' made a row of 1, which is not"):
        expand(ledger, lease, 2, only=[1])
    with pytest.raises(LeaseError, match="published a row twice"):
        expand(ledger, lease, 2, first=1)
    expand(ledger, lease, 2)
    with pytest.raises(LeaseError, match="made a row of 0, which is not"):
        expand(ledger, lease, 2, first=2000)


def test_a_map_must_return_every_row():
    ledger = generated(grpo())
    lease = claim(ledger, "score")
    publish(ledger, lease, [1000])
    with pytest.raises(
        LeaseError, match=r"node 'score' returned no row for 5 of its rows \(sample ids \[1001, 1002, 1003\]\)"
    ):
        ledger.finish(lease)


def test_a_lease_past_its_deadline_gives_its_rows_back():
    clock = Clock()
    ledger = Ledger(grpo(), clock=clock)
    ledger.issue([0, 1], [1, 1], round=0)
    late = claim(ledger, "generate", max_rows=1, deadline_s=3.0, holder="rollout 0")
    claim(ledger, "generate", deadline_s=5.0)
    assert ledger.next_deadline == 3.0 and ledger.expire() == []
    clock.now = 3.0
    assert ledger.expire() == [late] and ledger.next_deadline == 5.0
    assert ledger.late == 0
    with pytest.raises(LeaseError, match=r"released or finished before \(rollout 0 did not finish by its deadline\)"):
        expand(ledger, late, 2)
    assert ledger.late == 1 and ledger.ready(node(ledger, "generate")) == 1


def test_columns_of_different_lengths_are_refused_before_they_are_noted():
    ledger = generated(grpo())
    lease = claim(ledger, "score")
    with pytest.raises(LeaseError, match=r"node 'score' published columns of \[1, 2\] rows"):
        ledger.publish(lease, Published(lease.ids[:2], np.ones(1, np.int64)), None)
    with pytest.raises(ValueError, match="2 rows were issued with the tokens of 1"):
        ledger.issue([0, 1], [1], round=0)
    do_again = lease.ids.tolist()
    publish(ledger, lease, do_again)
    ledger.finish(lease)


# Quorum


def first_two(deadline_s: float | None = None, *, dialogues: bool = False) -> Graph:
    draw = Drawing()
    samples = draw.add(draw.prompts, "dialogues", Shape.EXPAND) if dialogues else draw.prompts
    samples = draw.add(samples, "generate", Shape.EXPAND, reads=("prompt",))
    if dialogues:
        draw.add(samples, "look", reads=("generate_c",))
    samples = draw.add(samples, "score", reads=("generate_c",))
    draw.add(samples, "first", Shape.FILTER, reads=("score_c",), takes=Quorum(2, deadline_s))
    return draw.graph()


def test_the_first_rows_that_are_ready_win_and_the_others_are_cancelled():
    ledger = generated(first_two(), prompts=1, samples=5)
    lease = claim(ledger, "score")
    publish(ledger, lease, [1003])
    assert ledger.ready_groups(node(ledger, "first")) == 0
    publish(ledger, lease, [1004, 1001])
    assert ledger.ready(node(ledger, "first")) == 2
    winners = claim(ledger, "first")
    assert winners.ids.tolist() == [1003, 1004]
    ledger.release(winners)
    assert claim(ledger, "first").ids.tolist() == [1003, 1004], "the choice stands"
    assert ledger.dropped == {"over-issued at first": 3}
    ledger.release(lease)
    assert ledger.claim(node(ledger, "score")) is None, "nobody works for a row that was cancelled"


def test_after_the_deadline_a_quorum_takes_what_there_is():
    clock = Clock()
    ledger = Ledger(first_two(5.0), clock=clock)
    ledger.issue([0], [1], round=0)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 3)
    ledger.finish(lease)
    clock.now = 7.0
    publish(ledger, claim(ledger, "score"), [1002])
    clock.now = 11.9
    assert ledger.expire() == [] and ledger.claim(node(ledger, "first")) is None
    clock.now = 12.0
    assert ledger.expire() == [] and claim(ledger, "first").ids.tolist() == [1002]


def test_rows_that_come_when_the_quorum_is_chosen_are_late():
    ledger = Ledger(first_two(dialogues=True))
    ledger.issue([0], [1], round=0)
    lease = claim(ledger, "dialogues")
    expand(ledger, lease, 2)
    ledger.finish(lease)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 2, first=2000, only=[1000])
    do(ledger, "score")
    do(ledger, "first")
    expand(ledger, lease, 3, first=3000, only=[1001])
    assert ledger.dropped == {"late at first": 3} and ledger.claim(node(ledger, "score")) is None
    ledger.finish(lease)
    assert ledger.groups_in_flight == 1 and not ledger.take_given_up(), "another branch wants them"
    do(ledger, "look")
    assert ledger.groups_in_flight == 0 and ledger.counts()["dropped"] == 3


def test_a_quorum_that_is_there_gives_up_what_is_still_to_be_made_for_it_alone():
    ledger = Ledger(first_two())
    ledger.issue([0, 1], [1, 1], round=0)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 2, only=[0], finished=[])
    assert not ledger.settled(node(ledger, "first"))
    do(ledger, "score")
    assert claim(ledger, "first").ids.tolist() == [1000, 1001]
    assert ledger.take_given_up() == [(lease.token, 0)] and ledger.take_given_up() == []
    assert ledger.cut_short == {"generate": 1} and list(lease.open) == [1]
    expand(ledger, lease, 1, first=3000, only=[0], finished=[0])  # it was under way
    expand(ledger, lease, 1, first=4000, only=[0, 1])
    assert claim(ledger, "score").ids.tolist() == [4001], "what comes all the same is let go"
    ledger.finish(lease)
    assert ledger.counts() == {"issued": 5, "waiting": 2, "leased": 3, "done": 0, "dropped": 0}


def test_a_parent_that_was_requeued_is_finished_by_a_quorum_too():
    ledger = Ledger(first_two())
    ledger.issue([0], [1], round=0)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 2, finished=[])
    ledger.release(lease)
    do(ledger, "score")
    assert ledger.ready(node(ledger, "generate")) == 1
    do(ledger, "first")
    assert ledger.ready(node(ledger, "generate")) == 0 and ledger.claim(node(ledger, "generate")) is None
    assert ledger.take_given_up() == [] and ledger.groups_in_flight == 0


# Children come one by one


def test_children_are_there_before_their_parent_is_finished():
    ledger = Ledger(grpo())
    ledger.issue([0], [2], round=0)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 2, finished=[])
    do(ledger, "score")
    assert ledger.ready_groups(node(ledger, "advantages")) == 0, "more rows of the group can come"
    expand(ledger, lease, 1, first=3000, finished=[])
    do(ledger, "score")
    assert ledger.ready_groups(node(ledger, "advantages")) == 0
    none = np.empty(0, np.int64)
    ledger.publish(lease, Published(none, none, None, none, lease.ids), None)
    assert claim(ledger, "advantages").ids.tolist() == [1000, 1001, 3000]
    with pytest.raises(LeaseError, match="finished row 0, which is not"):
        ledger.publish(lease, Published(none, none, None, none, lease.ids), None)
    ledger.finish(lease)


def test_the_end_of_a_lease_finishes_its_parents():
    ledger = Ledger(grpo())
    ledger.issue([0], [2], round=0)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 2, finished=[])
    ledger.finish(lease)
    do(ledger, "score")
    assert claim(ledger, "advantages").ids.tolist() == [1000, 1001]


def test_a_parent_that_is_requeued_keeps_the_children_that_were_published_and_its_ids():
    ledger = Ledger(grpo())
    ledger.issue([0, 1], [2, 2], round=0)
    lease = claim(ledger, "generate", version=3)
    first, second = lease.first_children.tolist()
    expand(ledger, lease, 1, first=first + 1, only=[0], finished=[])
    ledger.release(lease, "its worker died")
    again = claim(ledger, "generate", version=4)
    assert again.ids.tolist() == [0, 1] and again.first_children.tolist() == [first, second + 4096]
    assert [[child.number for child in row.made(1)] for row in again.rows] == [[1], []]
    assert [row.group.version for row in again.rows] == [3, 4], "its generation began under the older weights"
    with pytest.raises(LeaseError, match="published a row twice"):
        expand(ledger, again, 1, first=first + 1, only=[0])
    expand(ledger, again, 1, first=first, only=[0])
    do(ledger, "score")
    assert claim(ledger, "advantages").ids.tolist() == [first, first + 1]
    assert [row.draw(2) for row in ledger.leases[-1].rows] == [[2, 0, 1], [2, 1, 1]]


def test_a_parent_that_is_given_up_leaves_the_children_that_it_has():
    ledger = Ledger(grpo())
    ledger.issue([0], [2], round=0)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 2, finished=[])
    scored = claim(ledger, "score", max_rows=1)
    ledger.release(lease)
    assert ledger.drop(node(ledger, "generate"), [0], "it fails") == 1
    publish(ledger, scored)
    ledger.finish(scored)
    for name in ("score", "advantages", "update"):
        do(ledger, name)
    assert ledger.counts() == {"issued": 3, "waiting": 0, "leased": 0, "done": 2, "dropped": 1}


# Staleness


def aged(versions: list[int]) -> Ledger:
    """A ledger with a group of one row, ready for its update, of each of these versions."""
    ledger = Ledger(grpo())
    ledger.issue(range(len(versions)), [1] * len(versions), round=0)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 1, versions=np.array(versions))
    ledger.finish(lease)
    do(ledger, "score")
    do(ledger, "advantages")
    return ledger


def test_a_group_that_is_too_old_waits_for_a_larger_bound():
    ledger = aged([5, 3, 5])
    update = node(ledger, "update")
    assert ledger.oldest_held(update) is None
    assert claim(ledger, "update", staleness=Staleness(6, 2)).ids.tolist() == [1000, 1002]
    assert (ledger.held(update), ledger.ready(update), ledger.stale) == (1, 0, {"wait": 1})
    assert ledger.oldest_held(update) == 3
    assert ledger.claim(update, staleness=Staleness(6, 2)) is None and ledger.claim(update) is None
    assert claim(ledger, "update", staleness=Staleness(6, 3)).ids.tolist() == [1001]
    assert ledger.stale == {"wait": 1} and ledger.held(update) == 0


def test_a_group_that_is_too_old_is_masked():
    ledger = aged([5, 3, 5])
    lease = claim(ledger, "update", staleness=Staleness(6, 2, "mask"))
    assert lease.ids.tolist() == [1000, 1001, 1002] and lease.masked == {1001} and ledger.stale == {"mask": 1}


def test_the_prompt_of_a_group_that_is_too_old_is_issued_again():
    ledger = aged([5, 3, 5])
    lease = claim(ledger, "update", max_groups=2, staleness=Staleness(6, 2, "requeue"))
    assert lease.ids.tolist() == [1000, 1002] and ledger.group_ids == [0, 2, 3]
    assert [r.position for r in claim(ledger, "generate").rows] == [1]
    assert ledger.stale == {"requeue": 1} and ledger.dropped == {"stale at updater.update": 1}


def test_a_group_that_is_too_old_is_dropped():
    ledger = aged([3])
    assert ledger.claim(node(ledger, "update"), staleness=Staleness(6, 2, "drop")) is None
    assert ledger.group_ids == [] and ledger.stale == {"drop": 1} and ledger.counts()["dropped"] == 1


# Losses, and what is given free


def test_a_lost_group_is_issued_again_unless_somebody_works_on_it():
    ledger = generated(grpo())
    lease = claim(ledger, "score", max_rows=1)
    with pytest.raises(
        LeaseError, match=r"group 0 of graph 'drawn' is lost \(its file is gone\) while rows of it are leased"
    ):
        ledger.lose(0, "its file is gone")
    ledger.release(lease)
    ledger.lose(0, "its file is gone")
    assert ledger.group_ids == [1, 2] and ledger.dropped == {"lost": 4}
    assert claim(ledger, "generate").rows[0].position == 0


def test_a_segment_is_given_free_once_when_its_last_row_retires():
    ledger = generated(grpo())
    assert ledger.num_bytes == 10 and ledger.take_freed() == []
    for name in ("score", "advantages"):
        do(ledger, name)
    lease = claim(ledger, "update", max_groups=1)
    publish(ledger, lease, into=segment("of nobody"))
    ledger.finish(lease)
    assert [s.file for s in ledger.take_freed()] == ["of nobody"], "an update writes no columns"
    assert ledger.groups_in_flight == 1 and ledger.num_bytes == 30
    do(ledger, "update")
    assert sorted(s.file for s in ledger.take_freed()) == ["children", "data", "data", "data"]
    assert ledger.num_bytes == 0 and ledger.take_freed() == []
    assert ledger.published_bytes == 30 and ledger.largest_group_bytes == 15
    assert ledger.finished_bytes == pytest.approx(30)


# Filters and expansions


def test_rows_that_a_filter_leaves_out_are_dropped_and_counted():
    ledger = generated(dapo())
    lease = claim(ledger, "keep")
    publish(ledger, lease, [1000, 1002])
    ledger.finish(lease)
    assert ledger.dropped == {"keep": 4}
    lease = claim(ledger, "advantages")
    assert lease.ids.tolist() == [1000, 1002], "the group is what is left of it"
    publish(ledger, lease)
    ledger.finish(lease)
    do(ledger, "update")
    assert ledger.counts() == {"issued": 8, "waiting": 0, "leased": 0, "done": 4, "dropped": 4}


def test_rows_that_come_after_what_they_wait_for_was_dropped_are_dropped_too():
    draw = Drawing()
    prompts = draw.add(draw.prompts, "difficulty", reads=("prompt",))
    samples = draw.add(prompts, "generate", Shape.EXPAND, reads=("prompt",))
    joined = draw.add(samples, "join", reads=("difficulty_c", "generate_c"))
    draw.add(joined, "after", reads=("join_c",))
    ledger = Ledger(draw.graph())
    ledger.issue([0, 1], [1, 1], round=0)
    lease = claim(ledger, "generate")
    assert ledger.drop(node(ledger, "difficulty"), [0], "it fails") == 1
    expand(ledger, lease, 2)
    ledger.finish(lease)
    assert ledger.group_ids == [1] and ledger.counts()["dropped"] == 3, "the prompt and both samples"
    assert not ledger.settled(node(ledger, "join")), "the other prompt's difficulty is to come"
    for name in ("difficulty", "join", "after"):
        do(ledger, name)
    assert ledger.groups_in_flight == 0


def test_a_parent_of_which_nothing_was_made_is_done():
    ledger = Ledger(grpo())
    ledger.issue([0, 1], [2, 2], round=0)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 2, only=[1])
    ledger.finish(lease)
    assert ledger.group_ids == [1] and why(ledger, 0).startswith("group 0 is not in flight")


def test_settled_and_exhausted_say_whether_more_can_come():
    ledger = Ledger(dapo())
    update, keep = node(ledger, "update"), node(ledger, "keep")
    assert not ledger.settled(update) and ledger.exhausted(update), "nothing was issued"
    ledger.issue([0], [2], round=0)
    assert not ledger.settled(update) and not ledger.exhausted(update)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 2)
    ledger.finish(lease)
    assert ledger.settled(keep) and not ledger.settled(update) and not ledger.exhausted(update)
    lease = claim(ledger, "keep", max_rows=1)
    assert not ledger.settled(keep), "a row is under way"
    ledger.finish(lease)
    assert ledger.settled(keep) and not ledger.exhausted(update)
    ledger.finish(claim(ledger, "keep"))
    assert ledger.exhausted(keep) and ledger.exhausted(update) and not ledger.settled(update)


# Where columns are


def test_pieces_lead_to_the_ancestor_that_has_the_column():
    draw = Drawing()
    prompts = draw.add(draw.prompts, "difficulty", reads=("prompt",))
    samples = draw.add(prompts, "generate", Shape.EXPAND, reads=("prompt",))
    draw.add(samples, "join", reads=("prompt", "difficulty_c", "generate_c"))
    ledger = Ledger(draw.graph(), source=segment("source"))
    ledger.issue([5, 9], [1, 1], round=0)
    lease = claim(ledger, "generate")
    for parent, first in ((1, 200), (0, 100)):
        parents = np.full(2, parent)
        ledger.publish(lease, Published(first + np.arange(2), np.zeros(2, int), None, parents), segment(f"of {parent}"))
    ledger.finish(lease)
    assert ledger.claim(node(ledger, "join")) is None, "the prompts' difficulty is not known yet"
    do(ledger, "difficulty")
    lease = claim(ledger, "join")
    found = {p.columns: p for p in ledger.pieces(lease.node, lease.rows[1:])}
    assert lease.ids.tolist() == [100, 101, 200, 201]
    assert found[("prompt",)].by_position and found[("prompt",)].keys.tolist() == [5, 9, 9]
    assert found[("difficulty_c",)].keys.tolist() == [0, 1, 1]
    assert found[("generate_c",)].keys.tolist() == [101, 200, 201]
    assert [s.file for s in found[("generate_c",)].segments] == ["of 0", "of 1"]


# Inspection


def test_why_names_what_a_group_waits_for():
    ledger = Ledger(grpo())
    ledger.issue([0], [1], round=0)
    assert why(ledger, 0).splitlines() == [
        "generate: 1 of 1 rows to do; ready, not claimed",
        "score: 0 of 0 rows to do; waits for the rest of the group from 'generate'",
        "advantages: 0 of 0 rows to do; waits for the rest of the group from 'generate'",
        "updater.update: 0 of 0 rows to do; waits for the rest of the group from 'generate'",
    ]
    lease = claim(ledger, "generate")
    assert why(ledger, 0).startswith("generate: 1 of 1 rows to do; 1 leased")
    expand(ledger, lease, 2)
    ledger.finish(lease)
    lease = claim(ledger, "score")
    publish(ledger, lease, [1000])
    assert why(ledger, 0).splitlines() == [
        "score: 1 of 2 rows to do; 1 leased",
        "advantages: 2 of 2 rows to do; waits for score",
        "updater.update: 2 of 2 rows to do; waits for advantages",
    ]


def test_the_table_shows_every_row_in_flight():
    ledger = generated(grpo(), prompts=1, samples=1)
    claim(ledger, "score")
    prompt, sample = table(ledger).to_pylist()
    assert prompt == {
        "sample_id": 0,
        "group_id": 0,
        "parent_id": 0,
        "level": "prompts",
        "round": 0,
        "tokens": 2,
        "version": None,
        "done": ["generate"],
        "leased": [],
        "dropped": [],
    }
    assert (sample["sample_id"], sample["parent_id"], sample["tokens"], sample["leased"]) == (1000, 0, 7, ["score"])


def test_ids_are_shared_by_the_graphs_of_a_run():
    ids = Ids()
    first, second = Ledger(grpo(), ids=ids), Ledger(dapo(), ids=ids)
    first.issue([0, 1], [1, 1], round=0)
    second.issue([0], [1], round=0)
    assert claim(second, "generate").ids.tolist() == [2] and second.group_ids == [2]


def forgotten(ledger: Ledger) -> bool:
    """Nothing of any row is left."""
    left = [ledger._rows, ledger._groups, ledger._leases, *ledger._offers, *ledger._group_offers]
    return not any(left) and not any(ledger._todo) and not any(ledger._ready) and not any(ledger._unfinished_levels)


def test_a_finished_group_leaves_nothing_behind():
    ledger = generated(grpo())
    for name in ("score", "advantages", "update"):
        assert ledger.groups_in_flight == 2
        do(ledger, name)
    assert forgotten(ledger) and ledger.groups_in_flight == 0
    assert ledger.counts() == {"issued": 8, "waiting": 0, "leased": 0, "done": 8, "dropped": 0}


def test_two_hundred_thousand_rows_take_seconds_in_small_claims():
    ledger, took = Ledger(grpo()), {}
    for size in (5_000, 45_000):  # prompts, four samples each: the time of an event must not grow with their number
        started = time.process_time()
        ledger.issue(range(size), [1] * size, round=size)
        children = 10_000_000 * size
        while lease := ledger.claim(node(ledger, "generate"), max_rows=50):
            expand(ledger, lease, 4, first=children)
            children += 200
            ledger.finish(lease)
        for name in ("score", "advantages", "update"):
            while lease := ledger.claim(node(ledger, name), max_rows=100, max_groups=25):
                publish(ledger, lease)
                ledger.finish(lease)
                assert ledger.settled(node(ledger, name)) or ledger.exhausted(node(ledger, name))
        assert forgotten(ledger)
        took[size] = (time.process_time() - started) / size
    assert took[45_000] < 4 * took[5_000], took


# Against a model


@dataclass
class Model:
    """Every answer worked out from the history of all rows, with no state of its own to go wrong."""

    graph: Graph
    level: dict[int, int] = field(default_factory=dict)
    parent: dict[int, int] = field(default_factory=dict)
    group: dict[int, int] = field(default_factory=dict)
    position: dict[int, int] = field(default_factory=dict)
    version: dict[int, int | None] = field(default_factory=dict)
    members: dict[int, list[int]] = field(default_factory=dict)
    round: dict[int, int] = field(default_factory=dict)
    """Of each group."""
    done: dict[int, set[str]] = field(default_factory=dict)
    leased: dict[int, set[str]] = field(default_factory=dict)
    dropped_by: dict[int, set[str]] = field(default_factory=dict)
    """Filters that have seen the row and left it out."""
    kept_from: dict[int, set[str]] = field(default_factory=dict)
    """Nodes that never get to see the row: it was too late for their quorum, or too old."""
    arrived: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    """Group and node with a quorum -> its rows in the order in which they became ready."""
    since: dict[tuple[int, str], float] = field(default_factory=dict)
    chosen: dict[tuple[int, str], set[int]] = field(default_factory=dict)
    short: set[tuple[int, str]] = field(default_factory=set)
    held: set[tuple[int, str]] = field(default_factory=set)
    claimed: set[tuple[int, str]] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    past: set[int] = field(default_factory=set)
    """Groups that were found finished: they stay it."""
    dropped: Counter[str] = field(default_factory=Counter)
    stale: Counter[str] = field(default_factory=Counter)
    used: Counter[tuple[int, str]] = field(default_factory=Counter)
    cut_short: Counter[str] = field(default_factory=Counter)
    late: int = 0

    def __post_init__(self) -> None:
        self.nodes = list(self.graph.nodes)
        self.node = {n.name: n for n in self.nodes}
        self.quorums = [n for n in self.nodes if n.operation.quorum]
        self.lines = {lv: self.line(lv) for lv in self.graph.levels}
        self.above = {n.name: self.upstream(n.name) for n in self.nodes}
        self.filters = {
            n.name: [self.node[f] for f in self.above[n.name] if self.node[f].operation.shape is Shape.FILTER]
            for n in self.nodes
        }
        self.keepers = {  # without those that made the row: it is there
            n.name: [
                k for f in (n.name, *self.above[n.name]) if (k := self.node[f]).makes_level not in self.lines[n.level]
            ]
            for n in self.nodes
        }
        self.masters = {n.name: [q for q in self.quorums if self.serves(n, q)] for n in self.nodes}
        self.maker = {n.makes_level: n for n in self.nodes if n.makes_level is not None}
        self.makes_for = {q.name: self.maker.get(q.level) for q in self.quorums}
        for q in self.quorums:
            maker = self.makes_for[q.name]
            users = [m for m in self.nodes if maker is not None and maker.name in m.after]
            alone = all(m is q or q.name in self.above[m.name] or self.serves(m, q) for m in users)
            if maker is not None and (maker.operation.takes_groups or not alone):
                self.makes_for[q.name] = None

    # What follows from the graph

    def line(self, level: int) -> list[int]:
        """This level and those that it was expanded from."""
        return [level] if level == SOURCE else [level, *self.line(self.graph.parent_level(level))]

    def upstream(self, name: str) -> set[str]:
        found: set[str] = set()
        for before in self.node[name].after:
            found |= {before} | self.upstream(before)
        return found

    def serves(self, n: Node, q: Node) -> bool:
        """Whatever comes after n is the quorum q, or comes after that, or serves it in its turn."""
        users = [m for m in self.nodes if n.name in m.after]
        alike = n.level == q.level and n.makes_level is None and not n.operation.takes_groups
        return bool(alike and users) and all(
            m is q or q.name in self.upstream(m.name) or self.serves(m, q) for m in users
        )

    # What follows from the history

    def add(
        self, id: int, level: int, parent: int, group: int, position: int, version: int | None, round: int, now: float
    ) -> None:
        self.level[id], self.parent[id], self.group[id], self.position[id] = level, parent, group, position
        self.version[id], self.round[group] = version, round
        self.members.setdefault(group, []).append(id)
        self.done[id], self.leased[id], self.dropped_by[id], self.kept_from[id] = set(), set(), set(), set()
        for q in self.quorums:
            if q.level == level and (group, q.name) in self.chosen:
                self.kept_from[id].add(q.name)
                self.dropped[f"late at {q.name}"] += 1
        self.see_arrivals(group, now)

    def mark(self, n: Node, id: int, now: float) -> None:
        self.done[id].add(n.name)
        self.leased[id].discard(n.name)
        self.used[id, n.name] += 1
        self.see_arrivals(self.group[id], now)

    def see_arrivals(self, group: int, now: float) -> None:
        for q in self.quorums:
            if (group, q.name) in self.chosen:
                continue
            known = self.arrived.setdefault((group, q.name), [])
            new = [i for i in self.members[group] if self.level[i] == q.level and i not in known]
            new = [i for i in new if not self.skipped(i, q) and all(self.passed(i, a) for a in q.after)]
            if new and not known:
                self.since[group, q.name] = now
            known += sorted(new, key=self.path)

    def path(self, id: int) -> list[int]:
        """Where the row stands in the tree of its group."""
        order = self.members[self.group[id]].index(id)
        return [order] if self.level[id] == SOURCE else [*self.path(self.parent[id]), order]

    def ancestor(self, id: int, level: int) -> int:
        while self.level[id] != level:
            id = self.parent[id]
        return id

    def skipped(self, id: int, n: Node) -> bool:
        line = self.lines[self.level[id]]
        for f in self.filters[n.name]:
            if f.level in line and f.name in self.dropped_by[self.ancestor(id, f.level)]:
                return True
        for k in self.keepers[n.name]:
            if k.level in line and k.name in self.kept_from[self.ancestor(id, k.level)]:
                return True
        for q in self.masters[n.name]:
            cancelled = q.name in self.kept_from[id]
            if cancelled and n.name not in self.done[id] and n.name not in self.leased[id]:
                return True
        return False

    def passed(self, id: int, name: str) -> bool:
        before = self.node[name]
        if before.makes_level in self.lines[self.level[id]]:
            return True
        return name in self.done[self.ancestor(id, before.level)]

    def rows(self, group: int, level: int) -> list[int]:
        return sorted(i for i in self.members[group] if self.level[i] == level)

    def todo(self, group: int, n: Node) -> list[int]:
        if group in self.lost:
            return []
        return [i for i in self.rows(group, n.level) if n.name not in self.done[i] and not self.skipped(i, n)]

    def ready(self, group: int, n: Node) -> list[int]:
        """SymbolicRows of a group that a claim can get."""
        if (group, n.name) in self.held:
            return []
        todo = self.todo(group, n)
        if n.operation.quorum and (group, n.name) in self.chosen:
            return [] if any(n.name in self.leased[i] for i in todo) else todo
        ready = [i for i in todo if n.name not in self.leased[i] and all(self.passed(i, a) for a in n.after)]
        whole = len(ready) == len(todo) and self.whole(group, n.level)
        if n.operation.quorum:
            arrived, number = self.arrived.get((group, n.name), []), n.operation.quorum.n
            assert sorted(arrived) == ready or group in self.lost
            enough = len(arrived) >= number or whole or (group, n.name) in self.short
            return sorted(arrived[:number]) if ready and enough else []
        return ready if whole or not n.operation.takes_groups else []

    def whole(self, group: int, level: int) -> bool:
        if level == SOURCE or group in self.lost:
            return True
        return self.whole(group, self.maker[level].level) and not self.todo(group, self.maker[level])

    def finished(self, group: int) -> bool:
        if group in self.past:
            return True
        whole = all(self.whole(group, lv) for lv in self.graph.levels)
        if whole and not any(self.todo(group, n) for n in self.nodes):
            self.past.add(group)
        return group in self.past

    def flying(self) -> list[int]:
        return [g for g in self.members if g not in self.past and not self.finished(g)]

    def too_old(self, ids: list[int], bound: Staleness) -> list[int]:
        made = [(i, v) for i in ids if (v := self.version[i]) is not None]
        return [i for i, version in made if bound.version - version > bound.bound]


@dataclass
class Play:
    """The ledger and the model, played against each other by chance."""

    graph: Graph
    chance: random.Random
    folder: Path
    clock: Clock = field(default_factory=Clock)
    operations: int = 0
    leases: list[Lease] = field(default_factory=list)
    deadlines: dict[int, float] = field(default_factory=dict)
    void: list[Lease] = field(default_factory=list)
    staged: dict[int, list[tuple[list[int], list[int], str]]] = field(default_factory=dict)
    """Token -> what was published of a lease that does not count yet, with its file."""
    stored: dict[str, dict[int, dict[str, str]]] = field(default_factory=dict)
    """File of a segment -> sample id -> its columns."""
    segments: dict[str, Segment] = field(default_factory=dict)
    lies_in: dict[str, list[int]] = field(default_factory=dict)
    """File of a segment that counts -> rows that have columns in it."""
    void_files: set[str] = field(default_factory=set)
    """Of what was published and never counted."""
    freed: list[str] = field(default_factory=list)
    policy: int = 0
    round: int = 0

    def __post_init__(self) -> None:
        self.log = Log(self.folder / "ledger.log", clock=self.clock)
        self.ledger = Ledger(self.graph, source=segment(), log=self.log, clock=self.clock)
        self.model = Model(self.graph)

    def issue(self) -> None:
        if self.ledger.groups_in_flight > 4:
            return
        number = self.chance.randint(1, 2)
        positions = [self.chance.randrange(100) for _ in range(number)]
        self.round += self.chance.random() < 0.3
        ids = self.ledger._ids.next_id, self.ledger._ids.next_group
        self.ledger.issue(positions, [1] * number, round=self.round)
        for k, position in enumerate(positions):
            self.model.add(ids[0] + k, SOURCE, ids[0] + k, ids[1] + k, position, None, self.round, self.clock.now)
        self.operations += 1

    def claim(self, *, bound: int | None = None) -> None:
        n = self.chance.choice(self.graph.nodes)
        limit = self.chance.choice([None, 1, 2, 5])
        limits = {"max_groups": limit} if n.operation.takes_groups else {"max_rows": limit}
        fate: Fate = self.chance.choice(["wait", "mask", "requeue", "drop"])
        staleness = None
        if n.operation.updates and (bound is not None or self.chance.random() < 0.8):
            staleness = Staleness(self.policy, self.chance.randint(0, 3) if bound is None else bound, fate)
        patience = self.chance.choice([None, None, 1.0, 4.0])
        first, first_group = self.ledger._ids.next_id, self.ledger._ids.next_group
        open_before = {x.token: set(x.open) for x in self.leases}
        expected, masked = self.expect_claim(n, limit, staleness, first, first_group)
        lease = self.ledger.claim(n, **limits, deadline_s=patience, staleness=staleness, holder="somebody")
        assert (lease.ids.tolist() if lease else []) == expected, n
        given_up = {(x.token, i) for x in self.leases for i in open_before[x.token] - x.open.keys()}
        assert given_up == set(self.ledger.take_given_up())
        assert all(x.node.name in self.model.done[i] for x in self.leases for i in x.given_up)
        self.operations += 1
        if lease is None:
            return
        assert lease.masked == masked
        for id in expected:
            self.model.leased[id].add(n.name)
            assert self.model.used[id, n.name] == 0, "consumed twice"
        self.check_columns(lease)
        self.leases.append(lease)
        self.staged[lease.token] = []
        if patience is not None:
            self.deadlines[lease.token] = self.clock.now + patience

    def expect_claim(
        self, n: Node, limit: int | None, staleness: Staleness | None, next_id: int, next_group: int
    ) -> tuple[list[int], set[int]]:
        """The rows of the claim and the masked among them; what becomes of groups that are too old."""
        model, masked = self.model, set[int]()
        if staleness is not None:
            for group, _ in [h for h in model.held if h[1] == n.name]:
                if not model.too_old(model.todo(group, n), staleness):
                    model.held.remove((group, n.name))
        ready = [(g, r) for g in model.flying() if (r := model.ready(g, n))]
        if not n.operation.takes_groups:
            return [i for _, r in ready for i in r][:limit], masked
        rows: list[int] = []
        for group, own in ready:
            if limit == 0:
                break
            old = model.too_old(own, staleness) if staleness is not None else []
            if staleness is not None and old:
                model.stale[staleness.fate] += 1
                if staleness.fate == "wait":
                    model.held.add((group, n.name))
                    continue
                if staleness.fate == "mask":
                    masked |= set(old)
                else:
                    if staleness.fate == "requeue":
                        position, round = model.position[own[0]], model.round[group]
                        model.add(next_id, SOURCE, next_id, next_group, position, None, round, self.clock.now)
                        next_id, next_group = next_id + 1, next_group + 1
                    for id in own:
                        model.kept_from[id].add(n.name)
                    model.dropped[f"stale at {n.name}"] += len(own)
                    continue
            limit = None if limit is None else limit - 1
            rows += own
            model.claimed.add((group, n.name))
            if n.operation.quorum and (group, n.name) not in model.chosen:
                cancelled = [i for i in model.todo(group, n) if i not in own]
                model.chosen[group, n.name] = set(own)
                for id in cancelled:
                    model.kept_from[id].add(n.name)
                model.dropped[f"over-issued at {n.name}"] += len(cancelled)
                maker = model.makes_for[n.name]
                if maker is not None:
                    for id in model.todo(group, maker):
                        model.mark(maker, id, self.clock.now)
                        model.cut_short[maker.name] += 1
        return rows, masked

    def check_columns(self, lease: Lease) -> None:
        model, n = self.model, lease.node
        columns: set[str] = set()
        for piece in self.ledger.pieces(n, lease.rows):
            columns |= set(piece.columns)
            store: dict[Any, Any] = {}
            for found in piece.segments:
                store |= self.stored.get(found.file, {})
            for id, key in zip(lease.ids.tolist(), piece.keys.tolist(), strict=True):
                for column in piece.columns:
                    writer = n.writers[column]
                    if not writer:
                        assert piece.by_position and key == model.position[model.ancestor(id, SOURCE)]
                    else:
                        owner = model.ancestor(id, self.graph.level_of(writer))
                        assert store[key][column] == f"{column} of {owner}"
        assert columns == set(n.reads)

    def publish(self) -> None:
        if not self.leases:
            return
        lease = self.chance.choice(self.leases)
        open_ids = sorted(lease.open)
        chosen = [i for i in open_ids if self.chance.random() < 0.6]
        self.chance.shuffle(chosen)
        if lease.node.makes_level is None:
            self.give(lease, chosen, chosen)
        else:
            chosen += [i for i in lease.given_up if self.chance.random() < 0.3]
            children = [p for p in chosen for _ in range(self.chance.randint(1, 3))]
            self.chance.shuffle(children)
            first, level = (
                dict(zip(lease.ids.tolist(), lease.first_children.tolist(), strict=True)),
                lease.node.makes_level,
            )
            ids: list[int] = []
            for parent in children:
                free = [first[parent] + k for k in range(40) if first[parent] + k not in (*self.model.level, *ids)]
                taken = {i for made, _, _ in self.staged[lease.token] for i in made}
                ids.append(self.chance.choice([i for i in free if i not in taken][:3]))
            assert level is not None
            self.give(lease, ids, children, [p for p in chosen if self.chance.random() < 0.5])

    def give(self, lease: Lease, ids: list[int], held: list[int], finished: list[int] | None = None) -> None:
        n = lease.node
        makes = n.makes_level is not None
        into = segment(f"{len(self.stored)}", self.chance.randint(1, 99))
        self.segments[into.file] = into
        self.stored[into.file] = {id: {c: f"{c} of {id}" for c in n.writes} for id in ids}
        made_by = [self.chance.choice([self.policy, max(0, self.policy - 2)]) for _ in ids]
        versions = np.array(made_by, np.int64) if makes else None
        parents = np.array(held, np.int64) if makes else None
        through = np.array(finished, np.int64) if makes else None
        self.ledger.publish(
            lease, Published(np.array(ids, np.int64), np.ones(len(ids), np.int64), versions, parents, through), into
        )
        if versions is not None:
            self.model.version |= dict(zip(ids, versions.tolist(), strict=True))
        self.operations += 1
        wanted = [k for k, parent in enumerate(held) if parent not in lease.given_up]  # the others are let go
        ids, held = [ids[k] for k in wanted], [held[k] for k in wanted]
        done = held if finished is None else [p for p in finished if p not in lease.given_up]
        if n.operation.takes_groups:
            self.staged[lease.token].append((ids, held, into.file))
        else:
            self.count(n, ids, held, into.file, done)

    def count(self, n: Node, ids: list[int], held: list[int], file: str, done: list[int]) -> None:
        model = self.model
        if n.writes:
            self.lies_in[file] = ids
        else:
            self.void_files.add(file)
        if n.makes_level is not None:
            for id, parent in zip(ids, held, strict=True):
                group = model.group[parent]
                position, round = model.position[parent], model.round[group]
                model.add(id, n.makes_level, parent, group, position, model.version[id], round, self.clock.now)
        for id in done:
            model.mark(n, id, self.clock.now)

    def finish(self) -> None:
        if not self.leases:
            return
        lease = self.chance.choice(self.leases)
        n = lease.node
        left = list(lease.open)
        if left and n.operation.shape in (Shape.MAP, Shape.GROUP):
            with pytest.raises(LeaseError, match="returned no row"):
                self.ledger.finish(lease)
            self.give(lease, left, left)
            left = []
        self.ledger.finish(lease)
        for ids, held, file in self.staged[lease.token]:
            self.count(n, ids, held, file, held if n.makes_level is None else [])
        if n.operation.takes_groups and n.makes_level is not None:
            left = lease.ids.tolist()
        for id in left:
            if n.operation.shape is Shape.FILTER:
                self.model.dropped_by[id].add(n.name)
                self.model.dropped[n.name] += 1
            self.model.mark(n, id, self.clock.now)
        self.close(lease)

    def release(self) -> None:
        if self.leases:
            lease = self.chance.choice(self.leases)
            self.ledger.release(lease)
            self.released(lease)

    def give_some_back(self) -> None:
        """Some rows of a lease are ready again, and it holds the others."""
        leases = [lease for lease in self.leases if lease.open]
        if not leases:
            return
        lease = self.chance.choice(leases)
        ids = [i for i in lease.open if self.chance.random() < 0.4]
        self.operations += 1
        if lease.node.operation.takes_groups:
            with pytest.raises(LeaseError, match="has whole groups"):
                self.ledger.release(lease, ids=ids)
            return
        self.ledger.release(lease, ids=ids)
        for id in ids:
            self.model.leased[id].discard(lease.node.name)

    def drop(self) -> None:
        """A node has failed at some rows that are ready for it, and does without them."""
        n = self.chance.choice(self.graph.nodes)
        ready = [i for g in self.model.flying() for i in self.model.ready(g, n)]
        if not ready or self.chance.random() < 0.6:
            return
        self.operations += 1
        id = self.chance.choice(ready)
        if n.operation.quorum:
            with pytest.raises(LeaseError, match="has a quorum"):
                self.ledger.drop(n, [id], "it fails")
            return
        dropped = self.model.ready(self.model.group[id], n) if n.operation.takes_groups else [id]
        assert self.ledger.drop(n, [id], "it fails") == len(dropped)
        for one in dropped:
            self.model.kept_from[one].add(n.name)
        self.model.dropped[f"failed at {n.name}"] += len(dropped)

    def released(self, lease: Lease) -> None:
        for id in lease.ids.tolist() if lease.node.operation.takes_groups else lease.open:
            self.model.leased[id].discard(lease.node.name)
            if lease.node.operation.takes_groups:
                self.model.claimed.discard((self.model.group[id], lease.node.name))
        self.void_files |= {file for _, _, file in self.staged[lease.token]}
        self.close(lease)

    def close(self, lease: Lease) -> None:
        self.leases.remove(lease)
        self.deadlines.pop(lease.token, None)
        self.void.append(lease)
        self.operations += 1

    def wait(self) -> None:
        """Time passes, and what is due is done."""
        model = self.model
        self.clock.now += self.chance.choice([0.5, 1.0, 3.0])
        due = {token for token, deadline in self.deadlines.items() if deadline <= self.clock.now}
        expired = self.ledger.expire()
        assert {x.token for x in expired} == due and len(expired) == len(due)
        for lease in expired:
            self.released(lease)
        for (group, name), since in model.since.items():
            quorum = model.node[name].operation.quorum
            late = quorum and quorum.deadline_s is not None and since + quorum.deadline_s <= self.clock.now
            if late and (group, name) not in model.chosen and group not in model.lost:
                model.short.add((group, name))
        self.operations += 1

    def lose(self) -> None:
        flying = self.model.flying()
        if not flying or self.chance.random() < 0.7:
            return
        group = self.chance.choice(flying)
        self.operations += 1
        if any(self.model.leased[i] for i in self.model.members[group]):
            with pytest.raises(LeaseError, match="is lost"):
                self.ledger.lose(group, "the disk is gone")
            return
        id, new = self.ledger._ids.next_id, self.ledger._ids.next_group
        self.ledger.lose(group, "the disk is gone")
        model = self.model
        model.lost.add(group)
        model.held = {h for h in model.held if h[0] != group}
        model.dropped["lost"] += len(model.members[group])
        position, round = model.position[model.members[group][0]], model.round[group]
        model.add(id, SOURCE, id, new, position, None, round, self.clock.now)

    def use_a_void_lease(self) -> None:
        if not self.void:
            return
        lease = self.chance.choice(self.void)
        parents = lease.ids[:1] if lease.node.makes_level is not None else None
        publication = Published(lease.ids[:1], np.ones(1, np.int64), None, parents)
        for late in (self.ledger.finish, self.ledger.release, lambda x: self.ledger.publish(x, publication, None)):
            with pytest.raises(LeaseError, match="released or finished before"):
                late(lease)
            self.model.late += 1
            self.operations += 1

    def train(self) -> None:
        self.policy += 1

    def restart(self) -> None:
        """Go on with a copy: one that the log was played to, or one of what is saved of the ledger."""
        self.log.commit()
        self.take_freed()
        replayed = Ledger(self.graph, ids=Ids(), source=segment(), clock=self.clock)
        reader = LogReader(self.log.path)
        for record in reader:
            replayed.replay(record)
        assert reader.damage is None and reader.end == self.log.position
        assert [s.file for s in replayed.take_freed()] == self.freed
        replayed.take_given_up()  # said before
        replayed.late = self.ledger.late  # refusals are no events
        state = json.loads(json.dumps(list(save(self.ledger))))
        ids = Ids(self.ledger._ids.next_id, self.ledger._ids.next_group)
        loaded = Ledger(self.graph, ids=ids, clock=self.clock)
        load(loaded, state)
        for copy in (replayed, loaded):
            self.compare(copy, state)
        self.ledger = self.chance.choice([replayed, loaded])
        self.ledger.log = self.log
        by_token = {x.token: x for x in self.ledger.leases}
        assert list(by_token) == sorted(x.token for x in self.leases)
        self.leases = [by_token[x.token] for x in self.leases]
        self.deadlines.clear()
        for key in self.model.since:
            self.model.since[key] = self.clock.now

    def compare(self, copy: Ledger, state: list[Any]) -> None:
        one = self.ledger
        assert json.loads(json.dumps(list(save(copy)))) == state
        assert table(copy) == table(one)
        assert (copy._ids.next_id, copy._ids.next_group) == (one._ids.next_id, one._ids.next_group)
        of_rows = [Ledger.ready, Ledger.settled, Ledger.exhausted]
        of_groups = [Ledger.ready_groups, Ledger.unclaimed, Ledger.held]
        of_groups += [Ledger.oldest_held, Ledger.leased_groups]
        for n in self.graph.nodes:
            for ask in [*of_rows, *(of_groups if n.operation.takes_groups else [])]:
                assert ask(copy, n) == ask(one, n), ask.__name__
            if n.operation.updates:
                assert all(copy.groups_until(n, v) == one.groups_until(n, v) for v in range(6))
        assert copy.counts() == one.counts() and copy.dropped == one.dropped
        assert copy.num_bytes == one.num_bytes and copy.group_ids == one.group_ids
        assert [why(copy, g) for g in one.group_ids] == [why(one, g) for g in one.group_ids]
        assert set(copy.live_segments()) == set(one.live_segments())
        assert len(copy.live_segments()) == len(one.live_segments())

    def take_freed(self) -> None:
        self.freed += [s.file for s in self.ledger.take_freed()]

    def check(self) -> None:
        ledger, model = self.ledger, self.model
        flying = model.flying()
        assert ledger.group_ids == flying
        rows = {i for g in flying for i in model.members[g]}
        assert set(ledger._rows) == rows
        for n in ledger.graph.nodes:
            ready = [r for g in flying if (r := model.ready(g, n))]
            todo = sum(len(model.todo(g, n)) for g in flying)
            all_here = all(model.whole(g, n.level) for g in flying)
            number = sum(map(len, ready))
            assert ledger.ready(n) == number, n
            assert ledger.exhausted(n) == (all_here and not todo)
            settled = all_here and todo > 0 and number == todo
            if n.operation.takes_groups:
                unclaimed = sum((g, n.name) not in model.claimed for g in flying)
                assert ledger.unclaimed(n) == unclaimed
                assert ledger.ready_groups(n) == len(ready)
                held = sum(name == n.name for _, name in model.held)
                assert ledger.held(n) == held
                leased = {model.group[i] for i in rows if n.name in model.leased[i]}
                assert ledger.leased_groups(n) == len(leased)
                settled = len(ready) == unclaimed > 0 if n.operation.quorum else settled
            if n.operation.updates:
                i = ledger._index[n.name]
                groups = [ledger._groups[g] for g in flying if (g, n.name) not in model.claimed]
                for version in range(-1, 6):
                    due = [g for g in groups if g.version is not None and g.version <= version]
                    on_offer = sum(g.offered >> i & 1 for g in due)
                    assert ledger.groups_until(n, version) == (len(due), on_offer)
            assert ledger.settled(n) == settled
        counts = ledger.counts()
        assert counts["issued"] == len(model.level) == sum(v for k, v in counts.items() if k != "issued")
        assert counts["leased"] == sum(1 for i in rows if model.leased[i])
        here = {lv: [n for n in model.nodes if n.level == lv] for lv in self.graph.levels}
        gone = [i for i in model.level if i not in rows and model.group[i] not in model.lost]
        assert counts["done"] == sum(1 for i in gone if not any(model.skipped(i, n) for n in here[model.level[i]]))
        assert ledger.dropped == {k: v for k, v in model.dropped.items() if v}
        assert ledger.stale == model.stale and ledger.late == model.late
        assert ledger.cut_short == model.cut_short
        for group in flying:
            explained = why(ledger, group)
            waiting = [n.name for n in ledger.graph.nodes if model.todo(group, n) or not model.whole(group, n.level)]
            assert [line.split(":")[0] for line in explained.splitlines()] == waiting
        self.take_freed()
        unused = {f for f, ids in self.lies_in.items() if not rows.intersection(ids)}
        assert len(self.freed) == len(set(self.freed)), "freed twice"
        assert set(self.freed) == unused | self.void_files
        live = [f for f in self.lies_in if f not in unused]
        assert ledger.num_bytes == sum(self.segments[f].num_bytes for f in live)
        assert sorted(s.file for s in ledger.live_segments()) == sorted(live)


def random_graph(chance: random.Random) -> Graph:
    """Maps, groups, filters, quorums, expansions and updates on branches that part and join."""
    draw = Drawing()
    branches = [draw.prompts]
    if chance.random() < 0.2:  # rows come late for a quorum, and some of them are under way to it
        turns = draw.add(draw.add(draw.prompts, "dialogues", Shape.EXPAND), "turns", Shape.EXPAND)
        scored = draw.add(turns, "score", reads=("turns_c",))
        draw.add(scored, "first", Shape.FILTER, reads=("score_c",), takes=Quorum(chance.randint(1, 3), 1.0))
        branches = [turns, scored]
    for number in range(chance.randint(1, 7)):
        rows = chance.choice(branches)
        others = [b for b in branches if b.level == rows.level]
        if chance.random() < 0.3:
            rows = rows | chance.choice(others)
        kinds: list[tuple[Shape, Takes]] = [
            (Shape.MAP, ROWS),
            (Shape.FILTER, ROWS),
            (Shape.FILTER, GROUPS),
            (Shape.FILTER, Quorum(chance.randint(1, 4), chance.choice([None, 1.0, 5.0]))),
            (Shape.EXPAND, ROWS),
            (Shape.EXPAND, GROUPS),
            (Shape.GROUP, GROUPS),
            (Shape.MAP, TrainingBatch()),
        ]
        shape, takes = chance.choice(kinds)
        reads = tuple(chance.sample(rows.columns, chance.randint(0, len(rows.columns))))
        rule: dict[str, Any] = {"reads": reads, "takes": takes}
        if shape is Shape.FILTER and chance.random() < 0.3:
            rule["writes"] = (f"{'abcdefgh'[number]}_c",)
        made = draw.add(rows, "abcdefgh"[number], shape, **rule)
        if not isinstance(takes, TrainingBatch):
            branches.append(made)
    return draw.graph()


def play(seed: int, number: int) -> int:
    """So many operations, and then until nothing is left."""
    chance = random.Random(seed)
    graph = random_graph(chance)
    with tempfile.TemporaryDirectory() as folder:
        play = Play(graph, chance, Path(folder))
        moves = [
            *(play.issue, play.claim, play.claim, play.claim, play.claim, play.publish, play.publish, play.finish),
            *(play.finish, play.release, play.use_a_void_lease, play.wait, play.lose, play.train),
            *(play.give_some_back, play.drop),
        ]
        turn = 0
        while play.operations < number:
            chance.choice(moves)()
            turn += 1
            if turn % 25 == 0:
                play.check()
            if turn % 120 == 0:
                play.restart()
                play.check()
        for _ in range(10_000):
            if not play.ledger.groups_in_flight and not play.leases:
                break
            chance.choice([lambda: play.claim(bound=1_000_000), play.publish, play.finish, play.wait])()
        play.check()
        play.restart()
        play.log.close()
    assert [play.ledger.claim(n) for n in graph.nodes] == [None] * len(graph.nodes)  # offers of rows taken away go
    assert forgotten(play.ledger)
    model = play.model
    for id in model.level:
        for n in graph.nodes:
            if n.level == model.level[id] and model.group[id] not in model.lost:
                assert model.used[id, n.name] == (0 if model.skipped(id, n) else 1)
    return play.operations


@pytest.mark.parametrize("histories", [80, pytest.param(340, marks=pytest.mark.slow)])
def test_the_ledger_agrees_with_a_model_that_has_no_state_whatever_is_done(histories: int):
    operations = 0

    @settings(max_examples=histories, deadline=None, database=None)
    @given(seed=st.integers(0, 2**32))
    def agree(seed: int) -> None:
        nonlocal operations
        operations += play(seed, 300)

    agree()
    assert operations >= 290 * histories, operations
