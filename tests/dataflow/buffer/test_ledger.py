"""The ledger, rule by rule: claims and leases, filters and losses, and freed segments."""

import numpy as np
import pytest
from counting import calls_of
from ledgers import (
    Clock,
    Drawing,
    claim,
    dapo,
    do,
    expand,
    forgotten,
    generated,
    grpo,
    node,
    publish,
    segment,
)

from weft.dataflow.buffer.leases import Published, Spread, column_pieces
from weft.dataflow.buffer.ledger import Ledger
from weft.dataflow.buffer.rows import Ids
from weft.dataflow.errors import LeaseError
from weft.dataflow.operation import Shape

# Claims and readiness


def test_rows_are_offered_when_their_inputs_are_done():
    ledger = generated(grpo())
    assert (
        ledger.readiness.ready(node(ledger, "score")) == 6
        and ledger.readiness.ready(node(ledger, "advantages")) == 0
    )
    assert ledger.claim(node(ledger, "advantages")) is None
    do(ledger, "score")
    assert ledger.readiness.ready_groups(node(ledger, "advantages")) == 2


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
    assert ledger.readiness.ready_groups(node(ledger, "advantages")) == 1


def test_a_group_is_not_offered_while_one_of_its_rows_is_missing():
    ledger = generated(grpo())
    lease = claim(ledger, "score")
    publish(ledger, lease, [1000, 1002, 1003, 1004, 1005])
    assert claim(ledger, "advantages").ids.tolist() == [1003, 1004, 1005]
    publish(ledger, lease, [1001])
    assert claim(ledger, "advantages").ids.tolist() == [1000, 1001, 1002]


def test_groups_are_streamed_as_their_parents_finish():
    ledger = Ledger(grpo())
    ledger.issue([0, 1], [2, 2], step=0)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 2, only=[1])
    assert claim(ledger, "score").ids.tolist() == [1000, 1001]
    assert ledger.live.counts() == {"issued": 4, "waiting": 1, "leased": 3, "done": 0, "dropped": 0}


def test_rows_of_several_ranks_are_published_together_in_the_segments_of_their_ranks():
    ledger = generated(grpo())
    ranks = [segment("first rank"), segment("second rank"), segment("of a rank without rows")]
    publish(ledger, claim(ledger, "score"), into=Spread(ranks, [2, 4, 0]))
    score = ledger.live.wiring.index["score"]
    parts = [
        part
        for row in ledger.live.rows.values()
        if (part := row.group.levels[row.level].parts.get(score, {row.place: None})[row.place])
    ]
    rows = [part.segment.file for part in parts if part is not None]
    assert rows == ["first rank"] * 2 + ["second rank"] * 4
    assert [s.file for s in ledger.parts.take_freed()] == ["of a rank without rows"], (
        "nobody will ever need it"
    )
    for name in ("advantages", "update"):
        do(ledger, name)
    assert {"first rank", "second rank"} <= {s.file for s in ledger.parts.take_freed()}


def test_rows_of_abandoned_parents_can_be_removed_from_a_spread():
    ranks = Spread([segment("first rank"), segment("second rank")], [2, 2])
    assert ranks.only(np.array([True, False, False, False])).counts == [1, 0]
    assert Spread.from_json(ranks.to_json()).segments == ranks.segments


def test_a_lease_knows_its_rows():
    ledger = Ledger(grpo())
    ledger.issue([7, 3], [2, 4], step=0)
    lease = claim(ledger, "generate")
    assert lease.parent_ids.tolist() == lease.ids.tolist() == [0, 1]
    expand(ledger, lease, 2, versions=np.array([4, 4, 5, 6]))
    ledger.finish(lease)
    lease = claim(ledger, "score")
    assert lease.num_tokens.tolist() == [7, 7, 9, 9] and [row.version for row in lease.rows] == [
        4,
        4,
        5,
        6,
    ]
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


def test_children_need_parents_of_the_lease_and_new_ids():
    ledger = Ledger(grpo())
    ledger.issue([0, 1], [2, 2], step=0)
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
        LeaseError,
        match=r"node 'score' returned no row for 5 of its rows \(sample ids \[1001, 1002, 1003\]\)",
    ):
        ledger.finish(lease)


def test_a_lease_past_its_deadline_gives_its_rows_back():
    clock = Clock()
    ledger = Ledger(grpo(), clock=clock)
    ledger.issue([0, 1], [1, 1], step=0)
    late = claim(ledger, "generate", max_rows=1, deadline_s=3.0, holder="rollout 0")
    claim(ledger, "generate", deadline_s=5.0)
    assert ledger.next_deadline == 3.0 and ledger.expire() == []
    clock.now = 3.0
    assert ledger.expire() == [late] and ledger.next_deadline == 5.0
    with pytest.raises(
        LeaseError, match=r"released or finished before \(rollout 0 did not finish by its deadline\)"
    ):
        expand(ledger, late, 2)
    assert ledger.readiness.ready(node(ledger, "generate")) == 1


def test_columns_of_different_lengths_are_refused_before_they_are_noted():
    ledger = generated(grpo())
    lease = claim(ledger, "score")
    with pytest.raises(LeaseError, match=r"node 'score' published columns of \[1, 2\] rows"):
        ledger.publish(lease, Published(lease.ids[:2], np.ones(1, np.int64)), None)
    with pytest.raises(ValueError, match="2 rows were issued, but 1 token counts were given"):
        ledger.issue([0, 1], [1], step=0)
    do_again = lease.ids.tolist()
    publish(ledger, lease, do_again)
    ledger.finish(lease)


# Losses, and freed segments


def test_a_lost_group_is_reissued_unless_a_lease_holds_it():
    ledger = generated(grpo())
    lease = claim(ledger, "score", max_rows=1)
    with pytest.raises(
        LeaseError,
        match=r"group 0 of graph 'drawn' is lost \(its file is gone\) while rows of it are leased",
    ):
        ledger.lose(0, "its file is gone")
    ledger.release(lease)
    ledger.lose(0, "its file is gone")
    assert list(ledger.live.groups) == [1, 2] and ledger.live.dropped == {"lost": 4}
    assert claim(ledger, "generate").rows[0].position == 0


def test_a_segment_is_given_free_once_when_its_last_row_retires():
    ledger = generated(grpo())
    assert ledger.parts.num_bytes == 10 and ledger.parts.take_freed() == []
    for name in ("score", "advantages"):
        do(ledger, name)
    lease = claim(ledger, "update", max_groups=1)
    publish(ledger, lease, into=segment("of nobody"))
    ledger.finish(lease)
    assert [s.file for s in ledger.parts.take_freed()] == ["of nobody"], "an update writes no columns"
    assert len(ledger.live.groups) == 1 and ledger.parts.num_bytes == 30
    do(ledger, "update")
    assert sorted(s.file for s in ledger.parts.take_freed()) == ["children", "data", "data", "data"]
    assert ledger.parts.num_bytes == 0 and ledger.parts.take_freed() == []
    assert ledger.parts.published_bytes == 30 and ledger.parts.largest_group_bytes == 15
    assert ledger.parts.finished_bytes == pytest.approx(30)


# Filters and expansions


def test_rows_that_a_filter_leaves_out_are_dropped_and_counted():
    ledger = generated(dapo())
    do(ledger, "score")
    lease = claim(ledger, "keep")
    publish(ledger, lease, [1000, 1002])
    ledger.finish(lease)
    assert ledger.live.dropped == {"keep": 4}
    lease = claim(ledger, "advantages")
    assert lease.ids.tolist() == [1000, 1002], "the group is what is left of it"
    publish(ledger, lease)
    ledger.finish(lease)
    do(ledger, "update")
    assert ledger.live.counts() == {"issued": 8, "waiting": 0, "leased": 0, "done": 4, "dropped": 4}


def test_rows_whose_inputs_were_dropped_are_dropped():
    draw = Drawing()
    prompts = draw.add(draw.prompts, "difficulty", reads=("prompt",))
    samples = draw.add(prompts, "generate", Shape.EXPAND, reads=("prompt",))
    joined = draw.add(samples, "join", reads=("difficulty_c", "generate_c"))
    draw.add(joined, "after", reads=("join_c",))
    ledger = Ledger(draw.graph())
    ledger.issue([0, 1], [1, 1], step=0)
    lease = claim(ledger, "generate")
    assert ledger.drop(node(ledger, "difficulty"), [0], "it fails") == 1
    expand(ledger, lease, 2)
    ledger.finish(lease)
    assert list(ledger.live.groups) == [1] and ledger.live.counts()["dropped"] == 3, (
        "the prompt and both samples"
    )
    assert not ledger.readiness.settled(node(ledger, "join")), "the other prompt's difficulty is to come"
    for name in ("difficulty", "join", "after"):
        do(ledger, name)
    assert len(ledger.live.groups) == 0


def test_a_parent_without_children_is_done():
    ledger = Ledger(grpo())
    ledger.issue([0, 1], [2, 2], step=0)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 2, only=[1])
    ledger.finish(lease)
    assert list(ledger.live.groups) == [1] and ledger.live.waits_for(0).startswith(
        "group 0 is not in flight"
    )


def test_settled_and_exhausted_say_whether_more_can_come():
    ledger = Ledger(dapo())
    update, keep = node(ledger, "update"), node(ledger, "keep")
    assert not ledger.readiness.settled(update) and ledger.readiness.exhausted(update), (
        "nothing was issued"
    )
    ledger.issue([0], [2], step=0)
    assert not ledger.readiness.settled(update) and not ledger.readiness.exhausted(update)
    lease = claim(ledger, "generate")
    expand(ledger, lease, 2)
    ledger.finish(lease)
    do(ledger, "score")
    assert (
        ledger.readiness.settled(keep)
        and not ledger.readiness.settled(update)
        and not ledger.readiness.exhausted(update)
    )
    lease = claim(ledger, "keep", max_rows=1)
    assert not ledger.readiness.settled(keep), "a row is under way"
    ledger.finish(lease)
    assert ledger.readiness.settled(keep) and not ledger.readiness.exhausted(update)
    ledger.finish(claim(ledger, "keep"))
    assert (
        ledger.readiness.exhausted(keep)
        and ledger.readiness.exhausted(update)
        and not ledger.readiness.settled(update)
    )


# Columns and their segments


def test_pieces_lead_to_the_ancestor_that_has_the_column():
    draw = Drawing()
    prompts = draw.add(draw.prompts, "difficulty", reads=("prompt",))
    samples = draw.add(prompts, "generate", Shape.EXPAND, reads=("prompt",))
    draw.add(samples, "join", reads=("prompt", "difficulty_c", "generate_c"))
    ledger = Ledger(draw.graph(), source=segment("source"))
    ledger.issue([5, 9], [1, 1], step=0)
    lease = claim(ledger, "generate")
    for parent, first in ((1, 200), (0, 100)):
        parents = np.full(2, parent)
        ledger.publish(
            lease,
            Published(first + np.arange(2), np.zeros(2, int), None, parents),
            segment(f"of {parent}"),
        )
    ledger.finish(lease)
    assert ledger.claim(node(ledger, "join")) is None, "the prompts' difficulty is not known yet"
    do(ledger, "difficulty")
    lease = claim(ledger, "join")
    [pieces] = column_pieces(ledger.graph, ledger.source, lease, [[1, 2, 3]], np.array([1, 2, 3]))
    found = {piece.columns: piece for piece in pieces}
    assert lease.ids.tolist() == [100, 101, 200, 201]
    assert found[("prompt",)].by_position and found[("prompt",)].keys.tolist() == [5, 9, 9]
    assert found[("difficulty_c",)].keys.tolist() == [0, 1, 1]
    assert found[("generate_c",)].keys.tolist() == [101, 200, 201]
    assert [s.file for s in found[("generate_c",)].segments] == ["of 0", "of 1"]


# Inspection


def test_why_names_the_nodes_a_group_waits_for():
    ledger = Ledger(grpo())
    ledger.issue([0], [1], step=0)
    assert ledger.live.waits_for(0).splitlines() == [
        "generate: 1 of 1 rows to do; ready, not claimed",
        "score: 0 of 0 rows to do; waits for the rest of the group from 'generate'",
        "advantages: 0 of 0 rows to do; waits for the rest of the group from 'generate'",
        "updater.update: 0 of 0 rows to do; waits for the rest of the group from 'generate'",
    ]
    lease = claim(ledger, "generate")
    assert ledger.live.waits_for(0).startswith("generate: 1 of 1 rows to do; 1 leased")
    expand(ledger, lease, 2)
    ledger.finish(lease)
    lease = claim(ledger, "score")
    publish(ledger, lease, [1000])
    assert ledger.live.waits_for(0).splitlines() == [
        "score: 1 of 2 rows to do; 1 leased",
        "advantages: 2 of 2 rows to do; waits for score",
        "updater.update: 2 of 2 rows to do; waits for advantages",
    ]


def test_ids_are_shared_by_the_graphs_of_a_run():
    ids = Ids()
    first, second = Ledger(grpo(), ids=ids), Ledger(dapo(), ids=ids)
    first.issue([0, 1], [1, 1], step=0)
    second.issue([0], [1], step=0)
    assert claim(second, "generate").ids.tolist() == [2] and list(second.live.groups) == [2]


def test_a_finished_group_leaves_nothing_behind():
    ledger = generated(grpo())
    for name in ("score", "advantages", "update"):
        assert len(ledger.live.groups) == 2
        do(ledger, name)
    assert forgotten(ledger) and len(ledger.live.groups) == 0
    assert ledger.live.counts() == {"issued": 8, "waiting": 0, "leased": 0, "done": 8, "dropped": 0}


def test_the_work_of_an_event_does_not_grow_with_the_number_of_rows():
    ledger, made = Ledger(grpo()), {}

    def work(size: int) -> None:
        ledger.issue(range(size), [1] * size, step=size)
        children = 10_000_000 * size
        while lease := ledger.claim(node(ledger, "generate"), max_rows=50):
            expand(ledger, lease, 4, first=children)
            children += 200
            ledger.finish(lease)
        for name in ("score", "advantages", "update"):
            where = node(ledger, name)
            while lease := ledger.claim(where, max_rows=100, max_groups=25):
                publish(ledger, lease)
                ledger.finish(lease)
                assert ledger.readiness.settled(where) or ledger.readiness.exhausted(where)

    for size in (200, 1_800):  # prompts, with four samples each
        made[size] = calls_of(lambda size=size: work(size))[1] / size
        assert forgotten(ledger)
    assert made[1_800] < 1.1 * made[200], made
