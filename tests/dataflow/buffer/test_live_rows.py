"""Queries of a ledger about its rows and groups in flight, with numbers worked out by hand."""

import gc

import numpy as np
import pytest
from ledgers import (
    Clock,
    Drawing,
    aged,
    claim,
    dapo,
    do,
    expand,
    first_two,
    forgotten,
    generated,
    grpo,
    node,
    publish,
    segment,
)

from weft.dataflow.buffer.leases import Published
from weft.dataflow.buffer.ledger import Ledger
from weft.dataflow.buffer.recovery import load, save
from weft.dataflow.buffer.rows import Group, LevelRows
from weft.dataflow.buffer.staleness import Staleness
from weft.dataflow.errors import LeaseError
from weft.dataflow.graph import Graph
from weft.dataflow.operation import FINISHED_GROUPS, Shape, TrainingBatch


def recorded() -> Graph:
    """A graph that generates, filters and updates, with another node after that."""
    draw = Drawing()
    samples = draw.add(draw.prompts, "generate", Shape.EXPAND, reads=("prompt",))
    kept = draw.add(samples, "keep", Shape.FILTER, reads=("generate_c",))
    draw.add(kept, "update", reads=("generate_c",), takes=TrainingBatch())
    draw.add(kept, "record", Shape.GROUP, reads=("generate_c",), takes=FINISHED_GROUPS, writes=())
    return draw.graph()


def test_a_group_rests_when_only_following_nodes_remain():
    ledger = generated(recorded())
    record = node(ledger, "record")
    lease = claim(ledger, "keep")
    publish(ledger, lease, [1000, 1003, 1004, 1005])
    ledger.finish(lease)
    assert (ledger.live.groups_at_work, ledger.live.groups_behind, ledger.live.ids_at_work) == (
        2,
        0,
        [0, 1],
    )
    assert ledger.live.largest_group == 0, "none is finished"
    lease = claim(ledger, "update", max_groups=1)
    assert lease.ids.tolist() == [1000] and ledger.readiness.ready_groups(record) == 0
    publish(ledger, lease)
    ledger.finish(lease, step=4)
    assert (ledger.live.groups_at_work, ledger.live.groups_behind, ledger.live.ids_at_work) == (
        1,
        1,
        [1],
    )
    assert ledger.live.groups_of_step == {0: 1} and ledger.readiness.ready_groups(record) == 1
    assert ledger.live.groups[0].trained_in == 4 and not ledger.lose(0, "its file is gone"), (
        "it was trained on"
    )
    assert ledger.live.dropped == {"keep": 2, "given up": 4} and list(ledger.live.groups) == [1]
    do(ledger, "update")
    assert (ledger.live.groups_at_work, ledger.live.groups_behind) == (
        0,
        1,
    ) and not ledger.live.groups_of_step
    lease = claim(ledger, "record")
    assert lease.ids.tolist() == [1003, 1004, 1005]
    publish(ledger, lease)
    ledger.finish(lease)
    assert forgotten(ledger) and (ledger.live.groups_behind, ledger.live.largest_group) == (0, 4)


def test_groups_of_a_version_are_counted_until_an_update_claims_them():
    ledger = Ledger(grpo())
    ledger.issue([0, 1], [1, 1], step=0)
    update = node(ledger, "update")

    def not_offered() -> list[tuple[int, int]]:
        return ledger.readiness.not_offered_until(update)

    first = claim(ledger, "generate", max_rows=1, version=3)
    second = claim(ledger, "generate", version=5)
    assert not_offered() == [(3, 1), (5, 2)]
    expand(ledger, first, 2)
    ledger.finish(first)
    ledger.release(second)
    assert not_offered() == [(3, 1)], "the generation of the second group begins again"
    do(ledger, "score")
    do(ledger, "advantages")
    assert not_offered() == [(3, 0)]
    lease = claim(ledger, "update")
    assert not_offered() == []
    ledger.release(lease)
    assert not_offered() == [(3, 0)]


@pytest.mark.parametrize(("claimed", "found"), [(None, [(1, 1), (4, 2)]), (0, [(0, 3)])])
def test_a_group_ages_from_the_version_of_its_claim_or_else_of_its_oldest_row(
    claimed: int | None, found: list[tuple[int, int]]
):
    ledger = Ledger(grpo())
    ledger.issue([0, 1, 2], [1, 1, 1], step=0)
    lease, one = claim(ledger, "generate", version=claimed), np.ones(1, np.int64)
    for k, (parent, version) in enumerate([(0, 4), (1, 3), (1, 1), (1, 2), (0, -1)]):
        ids = lease.first_children[[parent]] + k
        ledger.publish(lease, Published(ids, one, version * one, lease.ids[[parent]]), None)
    assert ledger.readiness.not_offered_until(node(ledger, "update")) == found


def test_some_rows_of_a_lease_go_back_and_it_holds_the_others():
    ledger = generated(grpo())
    lease = claim(ledger, "score")
    ledger.release(lease, ids=[1001, 1004])
    assert ledger.leases.holds(lease) and list(lease.open) == [1000, 1002, 1003, 1005]
    again = claim(ledger, "score")
    assert again.ids.tolist() == [1001, 1004]
    with pytest.raises(LeaseError, match="node 'score' does not hold row 1001"):
        ledger.release(lease, ids=[1000, 1001])
    publish(ledger, lease, [1000, 1002, 1003, 1005])
    ledger.finish(lease)
    publish(ledger, again)
    ledger.finish(again)
    whole = claim(ledger, "advantages")
    with pytest.raises(LeaseError, match="takes complete groups"):
        ledger.release(whole, ids=[1000])


def test_rows_lack_siblings_while_more_of_their_group_may_come():
    ledger = Ledger(dapo())
    ledger.issue([0], [1], step=0)
    score, keep = node(ledger, "score"), node(ledger, "keep")
    assert not ledger.live.lacks_siblings(score), "nothing is ready for it"
    lease = claim(ledger, "generate")
    expand(ledger, lease, 3, finished=[])
    assert ledger.live.lacks_siblings(score)
    ledger.finish(lease)
    assert not ledger.live.lacks_siblings(score)
    lease = claim(ledger, "score", max_rows=1)
    publish(ledger, lease)
    assert ledger.live.lacks_siblings(keep), "two rows are not scored yet"
    do(ledger, "score")
    assert not ledger.live.lacks_siblings(keep)


def test_rows_of_a_quorum_do_not_wait_for_their_siblings():
    ledger = Ledger(first_two())
    ledger.issue([0], [1], step=0)
    expand(ledger, claim(ledger, "generate"), 2, finished=[])
    assert ledger.readiness.ready(node(ledger, "score")) == 2
    assert not ledger.live.lacks_siblings(node(ledger, "score"))


def test_ready_metrics_are_reported_with_the_first_step():
    ledger = Ledger(grpo())
    generate, advantages = node(ledger, "generate"), node(ledger, "advantages")
    assert ledger.live.ready_in_step(generate) == (-1, 0)
    ledger.issue([8, 0], [1, 1], step=3)
    ledger.issue([1, 2], [1, 1], step=4)
    assert ledger.live.ready_in_step(generate) == (3, 2)
    assert ledger.drop(generate, [0], "it fails") == 1
    assert ledger.live.ready_in_step(generate) == (3, 1), "a row that was dropped counts no more"
    lease = claim(ledger, "generate", max_rows=1)
    assert ledger.live.ready_in_step(generate) == (4, 2)
    expand(ledger, lease, 2)
    ledger.finish(lease)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 2, first=2000)
    ledger.finish(lease)
    do(ledger, "score")
    assert ledger.live.ready_in_step(advantages) == (3, 1)
    claim(ledger, "advantages", max_groups=2)
    assert ledger.live.ready_in_step(advantages) == (4, 1)


def test_positions_of_groups_that_no_node_has_claimed():
    ledger = Ledger(grpo())
    ledger.issue([7, 3], [1, 1], step=0)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 1)
    ledger.finish(lease)
    do(ledger, "score")
    takers = [node(ledger, "advantages"), node(ledger, "update")]
    assert ledger.live.positions_before(takers) == [7, 3]
    lease = claim(ledger, "advantages", max_groups=1)
    assert ledger.live.positions_before(takers) == [3] and ledger.live.positions_before(takers[1:]) == [
        7,
        3,
    ]
    assert (ledger.leases.num_groups(takers[0]), ledger.leases.num_groups(takers[1])) == (1, 0)
    ledger.release(lease)
    assert ledger.live.positions_before(takers) == [7, 3] and ledger.leases.num_groups(takers[0]) == 0


def test_the_oldest_version_of_the_groups_that_are_held_back():
    ledger = aged([4, 2, 9])
    update = node(ledger, "update")
    assert ledger.live.oldest_too_old(update) is None
    assert claim(ledger, "update", staleness=Staleness(9, 4)).rows[0].version == 9
    assert (ledger.live.oldest_too_old(update), ledger.readiness.too_old(update)) == (2, 2)
    assert claim(ledger, "update", staleness=Staleness(9, 5)).rows[0].version == 4
    assert (ledger.live.oldest_too_old(update), ledger.readiness.too_old(update)) == (2, 1)


def test_the_groups_that_have_columns_in_a_segment():
    ledger = generated(grpo())
    children = segment("children")
    assert ledger.live.groups_in({children}) == [(0, children), (1, children)]
    assert ledger.live.groups_in({segment("other")}) == []


def test_a_token_is_void_when_its_lease_was_released_or_never_granted():
    ledger = generated(grpo())
    first = claim(ledger, "score")
    assert not ledger.leases.is_void(first.token) and ledger.leases.is_void(first.token + 1)
    for _ in range(1000):
        ledger.release(claim(ledger, "score") if not ledger.leases.holds(first) else first)
    assert ledger.leases.is_void(first.token)
    ledger.release(claim(ledger, "score"))
    assert not ledger.leases.is_void(first.token) and ledger.leases.is_void(first.token + 1), (
        "1000 are remembered"
    )
    done = claim(ledger, "score")
    publish(ledger, done)
    ledger.finish(done)
    assert not ledger.leases.is_void(done.token)


def test_rows_of_no_policy_are_never_too_old():
    groups = aged([3, 4, -1]).live.groups.values()
    prompts, samples = ([group.levels[level] for group in groups] for level in (0, 1))
    assert [Staleness(5, 1).too_old(rows, rows.all) for rows in samples] == [[0], [], []]
    assert not any(Staleness(5, 2).too_old(rows, rows.all) for rows in samples)
    assert not any(Staleness(5, 0).too_old(rows, rows.all) for rows in prompts), (
        "prompts have no version"
    )


def test_a_child_is_published_under_a_policy_or_has_the_version_of_its_parent():
    ledger = Ledger(first_two(dialogues=True))
    ledger.issue([0], [1], step=0)
    lease = claim(ledger, "dialogues")
    expand(ledger, lease, 2, versions=np.array([6, 7]))
    ledger.finish(lease)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 1, first=2000)
    assert [row.version for row in ledger.live.rows.values()] == [None, 6, 7, 6, 7]
    assert [row.tokens for row in ledger.live.rows.values()] == [1, 6, 6, 11, 11]


def test_quorums_that_gather_have_their_whole_deadline_when_a_ledger_is_loaded():
    clock = Clock()
    ledger = generated(first_two(5.0))
    lease = claim(ledger, "score")
    # one row of group 0, two of group 1, which completes it
    publish(ledger, lease, [1000, 1003, 1004])
    clock.now = 3.0
    loaded = Ledger(ledger.graph, clock=clock)
    load(loaded, list(save(ledger)))
    first = node(loaded, "first")
    assert loaded.next_deadline == 8.0 and loaded.readiness.ready_groups(first) == 1
    clock.now = 7.9
    assert not loaded.expire() and loaded.readiness.ready(first) == 2
    clock.now = 8.0
    assert not loaded.expire() and loaded.readiness.ready(first) == 3 and loaded.next_deadline is None


def test_rows_that_a_quorum_does_without_are_not_ready_for_it_any_more():
    ledger = generated(first_two(), prompts=1)
    do(ledger, "score")
    first = ledger.live.wiring.index["first"]
    assert ledger.live.groups[0].num_ready(first) == 3
    lease = claim(ledger, "first")
    assert ledger.live.groups[0].num_ready(first) == 2 and ledger.live.dropped == {
        "over-issued at first": 1
    }
    ledger.release(lease)
    assert ledger.readiness.ready(node(ledger, "first")) == 2


def test_a_finished_group_is_freed_without_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(o, Group | LevelRows) for o in gc.get_objects())
        ledger = Ledger(grpo())
        ledger.issue([0, 1], [1, 1], step=0)
        expand(ledger, claim(ledger, "generate"), 3)
        ledger.finish(next(iter(ledger.leases)))
        for name in ("score", "advantages", "update"):
            do(ledger, name)
        assert forgotten(ledger)
        assert sum(isinstance(o, Group | LevelRows) for o in gc.get_objects()) == before
    finally:
        gc.enable()
