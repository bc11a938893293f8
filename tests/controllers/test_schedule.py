"""Schedules asked by hand: groups they want, claims they allow, and the end of a step."""

from functools import partial
from typing import Any

import graph_steps
import pytest

from weft.controllers.schedule import (
    Asynchronous,
    Pipelined,
    Share,
    Synchronous,
    Training,
    share_of_evaluation,
)
from weft.dataflow.errors import UserError


def test_a_new_step_wants_its_batch_and_later_replaces_filtered_groups():
    train, schedule = graph_steps.training(), Synchronous(steps=2, prompts_per_step=5)
    assert schedule.admit(train) == 5 and not schedule.over(train), "nothing is open yet"
    train.issue(5, 1)
    graph_steps.work(train, "answered")
    assert schedule.admit(train) == 0, "the filter may still let all of them through"
    graph_steps.work(train, "kept", drop=2)
    assert schedule.lacks(train) == 2 and schedule.admit(train) == 2
    graph_steps.work(train, "watched")
    assert not schedule.over(train)


def test_synchronous_gives_a_node_all_rows_of_the_step_and_an_update_its_complete_batch():
    train, schedule = graph_steps.training(), Synchronous(steps=2, prompts_per_step=4)
    train.issue(4, 1)
    assert graph_steps.share(schedule, train, "answered") == Share()
    graph_steps.work(train, "answered", 3)
    assert graph_steps.share(schedule, train, "kept") is None, "one row is still to come"
    graph_steps.work(train, "answered")
    assert graph_steps.share(schedule, train, "kept") == Share()
    graph_steps.work(train, "kept", drop=1)
    assert graph_steps.share(schedule, train, "actor.update") is None, "a group is lacking"
    train.issue(1, 1)
    for name in ("answered", "kept"):
        graph_steps.work(train, name)
    assert graph_steps.share(schedule, train, "actor.update") == Share()
    graph_steps.work(train, "actor.update")
    graph_steps.work(train, "watched")
    assert schedule.over(train) and schedule.max_staleness == 0 and not schedule.overlaps


@pytest.mark.parametrize(
    "schedule",
    [
        Pipelined(prompts_per_step=5, groups_per_part=2),
        Asynchronous(prompts_per_step=5, groups_per_part=2, max_staleness=1),
    ],
)
def test_an_update_takes_parts_of_at_least_the_least_size_and_the_rest_of_its_batch(schedule: Training):
    train = graph_steps.training()
    train.issue(7, 1)
    assert graph_steps.share(schedule, train, "answered") == Share()
    found: list[Share | None] = []
    for _ in range(6):
        graph_steps.work(train, "answered", 1, version=0)
        graph_steps.work(train, "kept", 1)
        found.append(graph_steps.share(schedule, train, "actor.update"))
        if found[-1] is not None:
            graph_steps.work(train, "actor.update", found[-1].max_groups)
    part, rest = Share(2, last=False), Share(1, last=True)
    assert found == [None, part, None, part, rest, None], "the sixth is of the next batch"


@pytest.mark.parametrize(
    "schedule",
    [
        Pipelined(prompts_per_step=8),
        Asynchronous(prompts_per_step=8, groups_per_part=2, max_staleness=1),
    ],
)
def test_every_replica_gets_a_group_of_each_part_if_there_are_enough(schedule: Training):
    train = graph_steps.training()
    train.issue(12, 1)
    found: list[int] = []
    for _ in range(8):
        graph_steps.work(train, "answered", 1, version=0)
        graph_steps.work(train, "kept", 1)
        share = graph_steps.share(schedule, train, "actor.update", replicas=3)
        found.append((share.max_groups or 0) * (-1 if share.last else 1) if share else 0)
        if share is not None:
            graph_steps.work(train, "actor.update", share.max_groups)
    assert found == [0, 0, 3, 0, 0, 0, 0, -5], (
        "after a second part of three, two groups would be left for three replicas"
    )
    graph_steps.work(train, "answered", version=0)
    graph_steps.work(train, "kept")
    train.taken.clear()
    assert graph_steps.share(schedule, train, "actor.update", replicas=9) is None, (
        "the batch is not complete"
    )
    assert graph_steps.share(schedule, train, "actor.update", replicas=2) == Share(4, last=False)


def test_groups_that_are_due_are_kept_for_later_batches():
    train, schedule = graph_steps.training(), Asynchronous(prompts_per_step=2, max_staleness=2)
    train.issue(6, 1)
    old = train.ledger.claim(train.graph["answered"], max_rows=3, version=0)
    graph_steps.work(train, "answered", version=0)
    graph_steps.work(train, "kept")
    assert old is not None
    found = [
        graph_steps.share(schedule, train, "actor.update", version=version) for version in (0, 1, 2)
    ]
    assert found == [Share(2), Share(1, last=False), None], (
        "three that began with version 0 must be trained by version 2"
    )


def test_an_update_that_is_ready_at_once_takes_no_more_than_its_batch():
    train, schedule = graph_steps.training(), Pipelined(prompts_per_step=3)
    train.issue(5, 1)
    assert graph_steps.share(schedule, train, "kept") is None, "nothing is ready"
    for name in ("answered", "kept"):
        graph_steps.work(train, name)
    assert graph_steps.share(schedule, train, "actor.update") == Share(3, last=True)


def test_nodes_without_columns_wait_for_the_end_of_the_rows():
    train, schedule = graph_steps.training(), Pipelined(prompts_per_step=3)
    train.issue(5, 1)
    graph_steps.work(train, "answered")
    graph_steps.work(train, "kept", 4)
    assert graph_steps.share(schedule, train, "watched") is None, "the last one may come too"
    graph_steps.work(train, "kept")
    assert graph_steps.share(schedule, train, "watched") == Share()


def test_an_update_keeps_places_for_groups_that_would_be_too_old_for_the_next():
    train, schedule = graph_steps.training(), Asynchronous(steps=9, prompts_per_step=4, max_staleness=1)
    train.issue(6, 1)
    assert train.ledger.claim(train.graph["answered"], max_rows=3, version=0), (
        "they are generated for long"
    )
    graph_steps.work(train, "answered", 3, version=1)
    graph_steps.work(train, "kept")
    taken = graph_steps.share(schedule, train, "actor.update", version=1)
    assert taken == Share(1, last=False), "three of the four places are for the groups of version 0"
    assert graph_steps.share(schedule, train, "actor.update", version=0) == Share(3, last=False)


def test_asynchronous_wants_only_groups_that_the_run_will_train_on():
    train, schedule = graph_steps.training(), Asynchronous(steps=3, prompts_per_step=2, max_staleness=1)
    assert schedule.overlaps and schedule.admit(train) == 6
    train.issue(4, 1)
    assert schedule.admit(train) == 2
    for name in ("answered", "kept"):
        graph_steps.work(train, name)
    graph_steps.work(train, "actor.update", 1)
    assert schedule.admit(train) == 2 and not schedule.over(train), (
        "what an update has claimed counts too"
    )
    graph_steps.work(train, "actor.update", 1)
    assert schedule.over(train)
    train.close(overlaps=True)
    assert schedule.admit(train) == 2
    train.issue(4, 2)
    assert schedule.admit(train) == 0, "never less than none"
    assert Asynchronous(prompts_per_step=2, max_staleness=0).admit(graph_steps.training()) == 2


def test_an_evaluation_during_training_claims_rows_of_one_step_at_a_time():
    run = graph_steps.evaluation()
    beside, alone = (
        partial(share_of_evaluation, run, overlaps=True),
        partial(share_of_evaluation, run, overlaps=False),
    )
    node = run.graph["answered"]
    assert beside(node) is None
    for step in (0, 2):
        run.mark(step, {})
        run.begin_evaluation(step)
    assert beside(node) == Share(max_rows=4) and alone(node) == Share()
    graph_steps.work(run, "answered", 3)
    assert beside(node) == Share(max_rows=1)
    logprobs = run.graph["actor.logprobs"]
    assert beside(logprobs) == Share(max_rows=3), "it need not wait for the step's last row"
    assert alone(logprobs) is None, "training waits, so it sees everything at once"


def test_limits_of_schedules_are_checked():
    wrong: dict[str, Any]
    for wrong in ({"steps": 0}, {"prompts_per_step": 0}, {"groups_per_part": 0}):
        with pytest.raises(UserError):
            Pipelined(**wrong)
    with pytest.raises(UserError):
        Asynchronous(max_staleness=-1)
    with pytest.raises(UserError):
        Asynchronous(groups_per_part=0)
    right: dict[str, Any]
    for right in ({"steps": 1}, {"prompts_per_step": 1}, {"groups_per_part": 1}):
        assert Pipelined(**right)
    default = Asynchronous()
    assert (default.steps, default.prompts_per_step) == (100, 64)
    assert (default.max_staleness, default.groups_per_part, default.shuffle) == (1, 1, True)
    assert Pipelined().groups_per_part == 1 and Pipelined().max_staleness == 0
