"""A leader publishes its weights, and its followers receive each version once."""

from dataclasses import replace
from typing import Any

import pytest
from toy import SlowRollout, ToyActor, ToyConfig, ToyTeacher, ToyWeights, prompts, toy_reinforce
from worker_groups import Asked, answer

from weft.controllers.group import Call, CallRequest, WorkerGroup
from weft.controllers.loop.calls import _DeviceTurns
from weft.controllers.placement import ResourcePool
from weft.controllers.ranks.tasks import Reply
from weft.controllers.weight_sync import WeightSync
from weft.dataflow.errors import WeightSyncError
from weft.dataflow.graph import ParameterEdge
from weft.dataflow.graph import group as handle
from weft.dataflow.metrics import Max
from weft.workers.dispatch import Dispatch
from weft.workers.worker import remote

EDGE = ParameterEdge("rollout", "actor", 1)


class Middle(ToyActor):
    """A follower that is also a leader."""

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def receive_weights(self, weights: ToyWeights) -> str:
        return weights.checksum


class SendingConfig(ToyConfig):
    vllm_backend: str = "nccl"


class Sending(ToyActor):
    """Sends to its followers, as a worker with NCCL transfers does."""

    Config = SendingConfig

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def send_weights(self, version: int) -> None:
        """Send nothing."""


class Comparing(ToyActor):
    """Has a method to compare the canaries of its followers."""

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def compare_canaries(self, canaries: dict[str, str], version: int) -> None:
        """Find no difference."""


class Sampling(SlowRollout):
    """Has a method to sample canaries for its leader."""

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def canary(self) -> str:
        return "sampled"


def synced(
    every: int = 1,
    partial: Any = "continue",
    pool: ResourcePool = ResourcePool(),
    actor: type = ToyActor,
) -> tuple[WeightSync, dict[str, WorkerGroup], list[Call]]:
    asked = Asked()
    groups = {
        "actor": asked.group("actor", pool, actor),
        "rollout": asked.group("rollout", pool, SlowRollout),
        "teacher": asked.group("teacher", pool, ToyTeacher),
    }
    cancelled: list[Call] = []
    edges = [ParameterEdge("rollout", "actor", every)]
    return WeightSync(edges, groups, partial, cancelled.append), groups, cancelled


def over(request: CallRequest, value: Any = None) -> list[CallRequest]:
    """Return the requests that follow when every rank answers with this value."""
    return list(request.then(answer(request.make(), value)))


def sent(publish: CallRequest) -> list[CallRequest]:
    """Return the requests that follow when one follower has received the published version."""
    version = publish.arguments["version"]
    (receive,) = over(publish, ToyWeights(version))
    (finish,) = over(receive, ToyWeights(version).checksum)
    return over(finish, ToyWeights(version))


def generating(group: WorkerGroup) -> Call:
    """Return a `generate` call in progress."""
    source = prompts()
    graph = toy_reinforce(source, rollout=group.handle, actor=handle(ToyActor, name="actor"))
    call = Call(group, "generate", (0,), node=graph.nodes[0])
    assert call.interruptible
    group.watch(call)
    return call


def test_a_version_is_published_and_received_and_then_the_next_may_be():
    weights, groups, _ = synced()
    (publish,) = weights.publish("actor")
    assert publish.on_device and publish.method == "publish_weights"
    assert publish.arguments == {"version": 0, "receivers": ["rollout[0]"]}
    assert weights.under_way and not weights.publish("actor"), "one version at a time"
    assert weights.is_read(groups["actor"]), "it is not updated meanwhile"
    (receive,) = over(publish, ToyWeights(0))
    assert (receive.group.name, receive.method) == ("rollout", "receive_weights") and receive.on_device
    (finish,) = over(receive, ToyWeights(0).checksum)
    assert (finish.group.name, finish.method) == ("actor", "finish_publishing")
    assert weights.under_way and weights.is_read(groups["actor"])
    assert not over(finish, ToyWeights(0))
    assert not weights.under_way and not weights.publish("actor"), "it has this version"
    assert not weights.is_read(groups["actor"])
    groups["actor"].version = 1
    assert weights.lag(["rollout"]) == 1 and weights.coming(["rollout"]) == {EDGE: 1}
    assert weights.publish("actor")


def test_a_leader_sends_while_its_followers_take_where_its_transport_is_one_of_vllms():
    weights, groups, _ = synced(actor=Sending)
    (publish,) = weights.publish("actor")
    send, receive = over(publish, ToyWeights(0))
    assert (send.group, send.method, send.arguments) == (groups["actor"], "send_weights", {"version": 0})
    assert (receive.group.name, receive.method) == ("rollout", "receive_weights") and send.on_device
    assert not over(send), "it is over when all followers have answered"
    (finish,) = over(receive, "checksum")
    assert (finish.group.name, finish.method) == ("actor", "finish_publishing")
    weights, groups, _ = synced(pool=ResourcePool("one", gpus=1), actor=Sending)
    (register,) = weights.publish("actor")
    (publish,) = over(register)
    send, receive = over(publish, ToyWeights(0))
    assert not send.on_device and receive.on_device, (
        "the follower has the device, and the leader no turn on it"
    )


def test_the_longest_transfer_its_pause_and_its_size_are_metrics():
    weights, _, _ = synced()
    (publish,) = weights.publish("actor")
    (receive,) = over(publish, ToyWeights(0))
    call = receive.make()
    call.take_reply(
        0,
        Reply(
            value=ToyWeights(0).checksum, metrics={"weights_pause_s": Max(0.25)}, done=True, seconds=1.0
        ),
        0.0,
    )
    (finish,) = (one for one in receive.then(call) if one.method == "finish_publishing")
    assert not over(finish, ToyWeights(0))
    assert weights.take_metrics() == {
        "rollout/weights_transfer_s": 1.0,
        "rollout/weights_pause_s": 0.25,
        "actor/weights_bytes": 8.0,
    }
    assert weights.take_metrics() == {}


def test_several_followers_take_one_version_together():
    weights, groups, _ = synced()
    weights._edges = [*weights._edges, ParameterEdge("teacher", "actor", 1)]
    (publish,) = weights.publish("actor")
    assert publish.arguments["receivers"] == ["rollout[0]", "teacher[0]"]
    first, second = over(publish, ToyWeights(0))
    assert not over(first, ToyWeights(0).checksum) and weights.is_read(groups["actor"])
    (finish,) = over(second, ToyWeights(0).checksum)
    assert not over(finish, ToyWeights(0)) and not weights.under_way


def test_a_follower_that_finishes_its_responses_first_does_not_hold_up_the_leader():
    weights, groups, _ = synced(partial="finish")
    call = generating(groups["rollout"])
    assert not weights.publish("actor") and weights.under_way
    assert weights.holds_back(groups["rollout"]) and not weights.is_read(groups["actor"])
    groups["actor"].version = 1
    assert not weights.receive_when_idle()
    groups["rollout"].forget(call)
    (publish,) = weights.receive_when_idle()
    assert publish.arguments["version"] == 1, "it takes what there is by then"
    assert not weights.holds_back(groups["rollout"])
    sent(publish)
    assert not weights.under_way and groups["rollout"].version == 1


def test_a_follower_on_the_leaders_own_devices_has_them_first():
    weights, _, _ = synced(pool=ResourcePool("shared", gpus=1))
    (turn,) = weights.publish("actor")
    assert (turn.group.name, turn.on_device) == ("rollout", True)
    (publish,) = over(turn)
    assert (publish.group.name, publish.method, publish.on_device) == ("actor", "publish_weights", False)
    (receive,) = over(publish, ToyWeights(0))
    assert (receive.group.name, receive.on_device) == ("rollout", True)


def test_followers_of_a_follower_take_its_weights_before_it_takes_others():
    weights, groups, _ = synced()
    groups["middle"] = Asked().group("middle", ResourcePool(), Middle)
    weights._edges = [ParameterEdge("middle", "actor", 1), ParameterEdge("teacher", "middle", 1)]
    (publish,) = weights.publish("actor")
    (receive,) = over(publish, ToyWeights(0))
    onward, finish = over(receive, ToyWeights(0).checksum)
    assert (onward.group.name, onward.method) == ("middle", "publish_weights")
    groups["actor"].version = 1
    assert not over(finish, ToyWeights(0)) and weights.under_way
    (again,) = sent(onward)
    assert (again.group.name, again.arguments["version"]) == ("actor", 1)


def test_later_updates_are_published_once_followers_have_the_previous_version():
    weights, groups, _ = synced()
    (publish,) = weights.publish("actor")
    groups["actor"].version = 1
    (again,) = sent(publish)
    assert again.arguments["version"] == 1 and groups["rollout"].version == 0


def test_a_group_publishes_after_its_running_update():
    weights, groups, _ = synced()
    groups["actor"].updating = True
    assert not weights.publish("actor") and not weights.under_way
    groups["actor"].updating = False
    assert weights.publish("actor")


def test_a_follower_of_every_second_version_receives_no_other():
    weights, groups, _ = synced(every=2)
    assert not sent(*weights.publish("actor"))
    for version, due in ((1, 0), (2, 1)):
        groups["actor"].version = version
        assert list(weights.coming(["rollout"]).values()) == [version if due else 0]
        assert len(weights.publish("actor")) == due


def test_a_rank_that_was_replaced_receives_the_version_that_the_others_have():
    weights, groups, _ = synced()
    sent(*weights.publish("actor"))
    (publish,) = weights.resend(groups["rollout"], 0)
    assert groups["rollout"].lacking == {0} and not groups["rollout"].replicas
    assert publish.arguments["receivers"] == ["rollout[0]"]
    sent(publish)
    assert not groups["rollout"].lacking and groups["rollout"].replicas == [0]


def test_a_rank_that_is_replaced_while_others_receive_is_given_the_weights_afterwards():
    weights, groups, _ = synced()
    (publish,) = weights.publish("actor")
    (receive,) = over(publish, ToyWeights(0))
    call = receive.make()
    call.lose(0)
    assert not weights.resend(groups["rollout"], 0), "the leader is giving away"
    (finish,) = receive.then(call)
    (again,) = over(finish, ToyWeights(0))
    assert again.method == "publish_weights" and groups["rollout"].lacking == {0}


def test_a_rank_is_compared_with_its_leader_at_first_and_after_a_replacement():
    weights, groups, _ = synced()
    asked = Asked()
    groups["actor"] = asked.group("actor", ResourcePool(), Comparing)
    groups["rollout"] = asked.group("rollout", ResourcePool(), Sampling, ranks=2)
    groups["rollout"].lacking |= {0, 1}
    for version, fresh in ((0, [0, 1]), (1, []), (2, [1])):
        groups["actor"].version = version
        if version == 2:
            weights.resend(groups["rollout"], 1)
        else:
            assert weights.publish("actor")
        given = ToyWeights(version)
        receive = CallRequest(groups["rollout"], "receive_weights", {"weights": given})
        followed = list(weights._received(answer(receive.make(), given.checksum), EDGE, given))
        if fresh:
            (canary,) = followed
            assert (canary.method, list(canary.ranks or ())) == ("canary", fresh)
            assert set(fresh) <= groups["rollout"].lacking, "it answers no prompt of the run before"
            (compare,) = over(canary, "sampled")
            assert (compare.group.name, compare.method) == ("actor", "compare_canaries")
            assert compare.arguments["canaries"] == {f"rollout[{rank}]": "sampled" for rank in fresh}
            assert weights.is_read(groups["actor"]), "it still has this version"
            followed = over(compare)
        assert not groups["rollout"].lacking
        (finish,) = followed
        assert not over(finish, given) and not weights.under_way


def test_groups_that_take_turns_on_gpus_are_compared_one_after_the_other():
    weights, groups, _ = synced(pool=(shared := ResourcePool("shared", gpus=1)))
    groups["actor"] = Asked().group("actor", shared, Comparing)
    groups["rollout"] = Asked().group("rollout", shared, Sampling)
    turns = _DeviceTurns(weights)

    def run(request: CallRequest, result: Any = None) -> list[str]:
        """Return the calls that the request causes, including onload and offload."""
        made: list[str] = []
        for allowed in turns.ask(request):
            made.append(f"{allowed.group.name}.{allowed.method}")
            followed = list(allowed.then(answer(allowed.make(), result)))
            while followed and followed[0].method in ("onload", "offload", request.method):
                one = followed.pop(0)
                made.append(f"{one.group.name}.{one.method}")
                followed += one.then(answer(one.make(), result))
            asked.extend(followed)
        return made

    asked: list[CallRequest] = weights.publish("actor")
    seen: list[str] = []
    results = {
        "publish_weights": ToyWeights(0),
        "receive_weights": ToyWeights(0).checksum,
        "canary": "sampled",
    }
    while asked:
        request = asked.pop(0)
        seen += run(request, results.get(request.method, ToyWeights(0)))
    assert seen == [
        "rollout.onload",
        "rollout.register",
        "actor.publish_weights",
        "rollout.receive_weights",
        "rollout.canary",
        "rollout.offload",
        "actor.onload",
        "actor.compare_canaries",
        "actor.finish_publishing",
    ]
    assert not weights.under_way


def test_a_wrong_checksum_ends_the_run_and_names_the_rank():
    weights, _, _ = synced()
    (publish,) = weights.publish("actor")
    (receive,) = over(publish, ToyWeights(0))
    (finish,) = over(receive, "garbled")
    with pytest.raises(
        WeightSyncError, match=r"version 0 arrived at rollout\[0\] with checksum garbled"
    ):
        over(finish, ToyWeights(0))


# Several leaders with an adapter each


def of_two(**settings: Any) -> tuple[WeightSync, dict[str, WorkerGroup], list[Call]]:
    """Return the weights of a rollout group that follows the actors `a` and `b`."""
    asked = Asked()
    groups = {name: asked.group(name, ResourcePool()) for name in ("a", "b")}
    groups["rollout"] = asked.group("rollout", ResourcePool(), SlowRollout)
    groups["rollout"].handle.follows(groups["a"].handle, groups["b"].handle)
    cancelled: list[Call] = []
    edges = [ParameterEdge("rollout", name, 1) for name in ("a", "b")]
    partial = settings.pop("partial", "continue")
    return WeightSync(edges, groups, partial, cancelled.append, **settings), groups, cancelled


def sampling_with(group: WorkerGroup, policy: str) -> Call:
    """Return a `generate` call in progress that samples with one policy."""
    call = generating(group)
    group.forget(call)
    assert call.node is not None
    call.node = replace(call.node, arguments={**call.node.arguments, "policy": policy})
    group.watch(call)
    return call


def test_a_follower_of_two_leaders_has_a_version_of_each():
    weights, groups, _ = of_two()
    groups["a"].version, groups["b"].version = 4, 7
    (first,), (second,) = weights.publish("a"), weights.publish("b")
    (receive,) = over(first, ToyWeights(4))
    assert receive.arguments["policy"] == "a"
    assert not sent(second), "they do not wait for each other"
    (finish,) = over(receive, ToyWeights(4).checksum)
    assert not over(finish, ToyWeights(4)) and not weights.under_way
    rollout = groups["rollout"]
    assert (rollout.version_of("a"), rollout.version_of("b"), rollout.version) == (4, 7, 7)
    groups["b"].version = 9
    assert weights.lag(["rollout"]) == 2 and not weights.publish("a")
    assert weights.followers("a") == {"rollout": 4} and weights.followers("b") == {"rollout": 7}
    assert list(weights.coming(["rollout"]).values()) == [4, 9]


def test_a_replaced_rank_gets_rows_once_it_has_the_adapters_of_all_leaders():
    weights, groups, _ = of_two()
    for name in ("a", "b"):
        sent(*weights.publish(name))
    rollout = groups["rollout"]
    first, second = weights.resend(rollout, 0)
    assert first.arguments["receivers"] == second.arguments["receivers"] == ["rollout[0]"]
    sent(first)
    assert rollout.lacking == {0} and not rollout.replicas
    rollout.lacking.discard(0)  # it dies again, and its next process lacks both
    first, *_ = weights.resend(rollout, 0)
    sent(first)
    assert rollout.lacking == {0}, "the adapter that came before is lost"
    sent(second)
    assert not rollout.lacking and rollout.replicas == [0]


def test_a_version_waits_for_or_requeues_only_the_responses_of_its_policy():
    weights, groups, _ = of_two(partial="finish")
    call = sampling_with(groups["rollout"], "a")
    assert not weights.publish("a") and weights.publish("b")
    assert weights.holds_back(groups["rollout"]) and not weights.is_read(groups["a"])
    groups["rollout"].forget(call)
    (publish,) = weights.receive_when_idle()
    assert publish.group.name == "a" and not weights.holds_back(groups["rollout"])
    weights, groups, _ = of_two(partial="requeue")
    sampling_with(groups["rollout"], "a")
    edges = [ParameterEdge("rollout", name, 1) for name in ("a", "b")]
    assert [len(weights._unfinished(edge, 0)) for edge in edges] == [1, 0]


def test_an_evaluation_keeps_only_the_versions_that_have_arrived():
    """If it kept the others too, it would wait for weights that wait for it."""
    wanted = {"a": 1, "b": 1}
    weights, groups, _ = of_two(keeps=lambda edge, version: version >= wanted[edge.leader])
    for name in ("a", "b"):
        sent(*weights.publish(name))
    groups["a"].version = groups["b"].version = 1
    assert not sent(*weights.publish("a"))
    groups["a"].version = 2
    assert not weights.publish("a"), "version 1 is to be evaluated"
    assert not sent(*weights.publish("b")), "version 1 of b arrives"
