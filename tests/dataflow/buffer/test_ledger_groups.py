"""The ledger, rule by rule: quorums, streamed children, and stale groups."""

import numpy as np
import pytest
from ledgers import (
    Clock,
    Drawing,
    aged,
    claim,
    do,
    expand,
    first_two,
    forgotten,
    generated,
    grpo,
    node,
    publish,
)

from weft.dataflow.buffer.leases import Published
from weft.dataflow.buffer.ledger import Ledger
from weft.dataflow.buffer.live_rows import Readiness
from weft.dataflow.buffer.staleness import Staleness
from weft.dataflow.errors import LeaseError
from weft.dataflow.operation import Quorum, Shape

# Quorum


def test_the_first_rows_that_are_ready_win_and_the_others_are_cancelled():
    ledger = generated(first_two(), prompts=1, samples=5)
    lease = claim(ledger, "score")
    publish(ledger, lease, [1003])
    assert ledger.readiness.ready_groups(node(ledger, "first")) == 0
    publish(ledger, lease, [1004, 1001])
    assert ledger.readiness.ready(node(ledger, "first")) == 2
    winners = claim(ledger, "first")
    assert winners.ids.tolist() == [1003, 1004]
    ledger.release(winners)
    assert claim(ledger, "first").ids.tolist() == [1003, 1004], "the choice stands"
    assert ledger.live.dropped == {"over-issued at first": 3}
    ledger.release(lease)
    assert ledger.claim(node(ledger, "score")) is None, "nobody works for a row that was cancelled"


def test_after_the_deadline_a_quorum_takes_the_ready_rows():
    clock = Clock()
    ledger = Ledger(first_two(5.0), clock=clock)
    ledger.issue([0], [1], step=0)
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
    ledger.issue([0], [1], step=0)
    lease = claim(ledger, "dialogues")
    expand(ledger, lease, 2)
    ledger.finish(lease)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 2, first=2000, only=[1000])
    do(ledger, "score")
    do(ledger, "first")
    expand(ledger, lease, 3, first=3000, only=[1001])
    assert ledger.live.dropped == {"late at first": 3} and ledger.claim(node(ledger, "score")) is None
    ledger.finish(lease)
    assert len(ledger.live.groups) == 1 and not ledger.leases.take_given_up(), (
        "another branch wants them"
    )
    do(ledger, "look")
    assert len(ledger.live.groups) == 0 and ledger.live.counts()["dropped"] == 3


def test_a_late_row_of_two_quorums_in_a_row_is_dropped_once():
    draw = Drawing()
    samples = draw.add(draw.add(draw.prompts, "dialogues", Shape.EXPAND), "generate", Shape.EXPAND)
    draw.add(samples, "look", reads=("generate_c",))
    first = draw.add(samples, "first", Shape.FILTER, reads=("generate_c",), takes=Quorum(2))
    draw.add(draw.add(first, "second", Shape.FILTER, takes=Quorum(2)), "advantages", Shape.GROUP)
    ledger = Ledger(draw.graph())
    ledger.issue([0], [1], step=0)
    lease = claim(ledger, "dialogues")
    expand(ledger, lease, 2)
    ledger.finish(lease)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 2, first=2000, only=[1000])
    do(ledger, "first")
    do(ledger, "second")
    expand(ledger, lease, 3, first=3000, only=[1001])
    live = ledger.live
    assert ledger.readiness.todo == Readiness.of(live.wiring, live.groups.values()).todo
    assert live.dropped == {"late at first": 3}
    for name in ("advantages", "look"):
        do(ledger, name)
    ledger.finish(lease)
    assert forgotten(ledger)


def test_a_complete_quorum_gives_up_work_that_only_it_needed():
    ledger = Ledger(first_two())
    ledger.issue([0, 1], [1, 1], step=0)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 2, only=[0], finished=[])
    assert not ledger.readiness.settled(node(ledger, "first"))
    do(ledger, "score")
    assert claim(ledger, "first").ids.tolist() == [1000, 1001]
    assert ledger.leases.take_given_up() == [(lease.token, 0)] and ledger.leases.take_given_up() == []
    assert list(lease.open) == [1]
    expand(ledger, lease, 1, first=3000, only=[0], finished=[0])  # it was in progress
    expand(ledger, lease, 1, first=4000, only=[0, 1])
    assert claim(ledger, "score").ids.tolist() == [4001], "what comes all the same is let go"
    ledger.finish(lease)
    assert ledger.live.counts() == {"issued": 5, "waiting": 2, "leased": 3, "done": 0, "dropped": 0}


def test_a_parent_that_was_requeued_is_finished_by_a_quorum_too():
    ledger = Ledger(first_two())
    ledger.issue([0], [1], step=0)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 2, finished=[])
    ledger.release(lease)
    do(ledger, "score")
    assert ledger.readiness.ready(node(ledger, "generate")) == 1
    do(ledger, "first")
    assert (
        ledger.readiness.ready(node(ledger, "generate")) == 0
        and ledger.claim(node(ledger, "generate")) is None
    )
    assert ledger.leases.take_given_up() == [] and len(ledger.live.groups) == 0


# Streamed children


def test_children_are_there_before_their_parent_is_finished():
    ledger = Ledger(grpo())
    ledger.issue([0], [2], step=0)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 2, finished=[])
    do(ledger, "score")
    assert ledger.readiness.ready_groups(node(ledger, "advantages")) == 0, (
        "more rows of the group can come"
    )
    expand(ledger, lease, 1, first=3000, finished=[])
    do(ledger, "score")
    assert ledger.readiness.ready_groups(node(ledger, "advantages")) == 0
    none = np.empty(0, np.int64)
    ledger.publish(lease, Published(none, none, None, none, lease.ids), None)
    assert claim(ledger, "advantages").ids.tolist() == [1000, 1001, 3000]
    with pytest.raises(LeaseError, match="finished row 0, which is not"):
        ledger.publish(lease, Published(none, none, None, none, lease.ids), None)
    ledger.finish(lease)


def test_the_end_of_a_lease_finishes_its_parents():
    ledger = Ledger(grpo())
    ledger.issue([0], [2], step=0)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 2, finished=[])
    ledger.finish(lease)
    do(ledger, "score")
    assert claim(ledger, "advantages").ids.tolist() == [1000, 1001]


def test_a_parent_that_is_requeued_keeps_the_children_that_were_published_and_its_ids():
    ledger = Ledger(grpo())
    ledger.issue([0, 1], [2, 2], step=0)
    lease = claim(ledger, "generate", version=3)
    first, second = lease.first_children.tolist()
    expand(ledger, lease, 1, first=first + 1, only=[0], finished=[])
    ledger.release(lease, "its worker died")
    again = claim(ledger, "generate", version=4)
    assert again.ids.tolist() == [0, 1] and again.first_children.tolist() == [first, second + 4096]
    assert [[child.number for child in row.made(1)] for row in again.rows] == [[1], []]
    assert [row.group.version for row in again.rows] == [3, 4], (
        "its generation began under the older weights"
    )
    with pytest.raises(LeaseError, match="published a row twice"):
        expand(ledger, again, 1, first=first + 1, only=[0])
    expand(ledger, again, 1, first=first, only=[0])
    do(ledger, "score")
    assert claim(ledger, "advantages").ids.tolist() == [first, first + 1]
    assert [row.draw(2) for row in list(ledger.leases)[-1].rows] == [[2, 0, 1], [2, 1, 1]]


def test_a_parent_that_is_given_up_leaves_the_children_that_it_has():
    ledger = Ledger(grpo())
    ledger.issue([0], [2], step=0)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 2, finished=[])
    scored = claim(ledger, "score", max_rows=1)
    ledger.release(lease)
    assert ledger.drop(node(ledger, "generate"), [0], "it fails") == 1
    publish(ledger, scored)
    ledger.finish(scored)
    for name in ("score", "advantages", "update"):
        do(ledger, name)
    assert ledger.live.counts() == {"issued": 3, "waiting": 0, "leased": 0, "done": 2, "dropped": 1}


# Staleness


def test_a_group_that_is_too_old_waits_for_a_larger_bound():
    ledger = aged([5, 3, 5])
    update = node(ledger, "update")
    assert ledger.live.oldest_too_old(update) is None
    assert claim(ledger, "update", staleness=Staleness(6, 2)).ids.tolist() == [1000, 1002]
    assert (ledger.readiness.too_old(update), ledger.readiness.ready(update), ledger.stale) == (
        1,
        0,
        {"wait": 1},
    )
    assert ledger.live.oldest_too_old(update) == 3
    assert ledger.claim(update, staleness=Staleness(6, 2)) is None and ledger.claim(update) is None
    assert claim(ledger, "update", staleness=Staleness(6, 3)).ids.tolist() == [1001]
    assert ledger.stale == {"wait": 1} and ledger.readiness.too_old(update) == 0


def test_a_group_that_is_too_old_is_masked():
    ledger = aged([5, 3, 5])
    lease = claim(ledger, "update", staleness=Staleness(6, 2, "mask"))
    assert (
        lease.ids.tolist() == [1000, 1001, 1002]
        and lease.masked == {1001}
        and ledger.stale == {"mask": 1}
    )


def test_the_prompt_of_a_group_that_is_too_old_is_issued_again():
    ledger = aged([5, 3, 5])
    lease = claim(ledger, "update", max_groups=2, staleness=Staleness(6, 2, "requeue"))
    assert lease.ids.tolist() == [1000, 1002] and list(ledger.live.groups) == [0, 2, 3]
    assert [r.position for r in claim(ledger, "generate").rows] == [1]
    assert ledger.stale == {"requeue": 1} and ledger.live.dropped == {"stale at updater.update": 1}


def test_a_group_that_is_too_old_is_dropped():
    ledger = aged([3])
    assert ledger.claim(node(ledger, "update"), staleness=Staleness(6, 2, "drop")) is None
    assert (
        list(ledger.live.groups) == []
        and ledger.stale == {"drop": 1}
        and ledger.live.counts()["dropped"] == 1
    )


def test_an_update_takes_the_groups_with_the_oldest_tokens_first():
    ledger = aged([5, 3, 4])
    assert claim(ledger, "update", max_groups=1).ids.tolist() == [1001]
    assert claim(ledger, "update", max_groups=2).ids.tolist() == [1000, 1002], (
        "a lease has its groups in the order of ids"
    )


def test_every_ready_group_that_is_too_old_is_set_aside_before_a_claim_takes_any():
    ledger = aged([5, 3, 5, 3])
    update = node(ledger, "update")
    assert ledger.set_too_old_aside(update, Staleness(6, 2)) == 2
    assert (
        ledger.readiness.ready_groups(update),
        ledger.readiness.too_old(update),
        len(ledger.leases),
    ) == (2, 2, 0)
    assert claim(ledger, "update", max_groups=1, staleness=Staleness(6, 2)).num_groups == 1


def test_groups_that_waited_meet_another_fate_when_the_next_claim_has_one():
    ledger = aged([3])
    update = node(ledger, "update")
    ledger.set_too_old_aside(update, Staleness(6, 2))
    assert ledger.set_too_old_aside(update, Staleness(6, 2, "requeue")) == 1
    assert list(ledger.live.groups) == [1] and ledger.readiness.too_old(update) == 0
