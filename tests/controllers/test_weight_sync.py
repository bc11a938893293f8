"""A leader publishes its weights, and its followers receive each version once."""

from typing import Any

import pytest
from toy import ToyWeights
from worker_groups import Asked, answer, rollout_and_actor

from weft.controllers.group import Call, WorkerGroup
from weft.controllers.request import CallRequest
from weft.controllers.weight_sync import WeightSync
from weft.dataflow.errors import WeightSyncError
from weft.dataflow.graph import ParameterEdge


def synced(every: int = 1, partial: Any = "continue") -> tuple[WeightSync, dict[str, WorkerGroup], list[Call]]:
    groups = rollout_and_actor(Asked())
    cancelled: list[Call] = []
    edges = [ParameterEdge("rollout", "actor", every)]
    return WeightSync(edges, groups, partial, cancelled.append), groups, cancelled


def over(request: CallRequest, value: Any) -> list[CallRequest]:
    """What follows when every rank has answered with this value."""
    return list(request.then(answer(request.call(), value)))


def test_a_version_is_published_and_received_and_then_the_next_may_be():
    weights, groups, _ = synced()
    (publish,) = weights.publish("actor")
    assert publish.on_device and (publish.method, publish.arguments) == ("publish_weights", {"version": 0})
    assert weights.under_way and not weights.publish("actor"), "one version at a time"
    (receive,) = over(publish, ToyWeights(0))
    assert (receive.group.name, receive.method) == ("rollout", "receive_weights") and weights.under_way
    assert not over(receive, ToyWeights(0).checksum)
    assert not weights.under_way and not weights.publish("actor"), "it has this version"
    groups["actor"].version = 1
    assert weights.lag(["rollout"]) == 1 and weights.coming(["rollout"]) == {"rollout": 1}
    assert weights.publish("actor")


def test_what_was_updated_meanwhile_is_published_when_its_followers_have_the_version_before():
    weights, groups, _ = synced()
    (publish,) = weights.publish("actor")
    groups["actor"].version = 1
    (receive,) = over(publish, ToyWeights(0))
    (again,) = over(receive, ToyWeights(0).checksum)
    assert again.arguments == {"version": 1} and groups["rollout"].version == 0


def test_a_group_whose_update_is_under_way_publishes_when_it_is_over():
    weights, groups, _ = synced()
    groups["actor"].updating = True
    assert not weights.publish("actor") and not weights.under_way
    groups["actor"].updating = False
    assert weights.publish("actor")


def test_a_follower_of_every_second_version_receives_no_other():
    weights, groups, _ = synced(every=2)
    (publish,) = weights.publish("actor")
    (receive,) = over(publish, ToyWeights(0))
    assert not over(receive, ToyWeights(0).checksum)
    for version, due in ((1, 0), (2, 1)):
        groups["actor"].version = version
        assert weights.coming(["rollout"]) == {"rollout": version if due else 0}
        assert len(weights.publish("actor")) == due


def test_a_rank_that_was_replaced_receives_the_version_that_the_others_have():
    weights, groups, _ = synced()
    (publish,) = weights.publish("actor")
    (receive,) = over(publish, ToyWeights(0))
    over(receive, ToyWeights(0).checksum)
    (publish,) = weights.resend(groups["rollout"], 0)
    assert groups["rollout"].lacking == {0} and not groups["rollout"].replicas
    (receive,) = over(publish, ToyWeights(0))
    over(receive, ToyWeights(0).checksum)
    assert not groups["rollout"].lacking and groups["rollout"].replicas == [0]


def test_a_wrong_checksum_ends_the_run_and_names_the_rank():
    weights, _, _ = synced()
    (publish,) = weights.publish("actor")
    (receive,) = over(publish, ToyWeights(0))
    with pytest.raises(WeightSyncError, match=r"version 0 arrived at rollout\[0\] with checksum garbled"):
        over(receive, "garbled")
