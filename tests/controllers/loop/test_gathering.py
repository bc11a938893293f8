"""Single rows wait for others of their groups, up to the batching delay."""

from typing import Any, cast

import numpy as np
import pytest
from toy import ToyActor, ToyReward, ToyRollout, prompts, toy_evaluation, toy_grpo

from weft.algorithms.grpo import first_of_group
from weft.controllers.graph_run import TrainingRun
from weft.controllers.group import MANY_RANKS, Call, UnderWay, gather_s
from weft.controllers.loop.dispatcher import MAX_ROWS, MAX_WAIT_S, _Gathering
from weft.dataflow.buffer.leases import Published
from weft.dataflow.buffer.ledger import Ledger
from weft.dataflow.graph import Graph, group
from weft.dataflow.source import positions
from weft.dataflow.tracing import graph

SAMPLES = 4


@graph
def raced(prompts: Any, *, rollout: Any, reward: Any, actor: Any) -> Any:
    rows = first_of_group(reward.score(rollout.generate(prompts, n=SAMPLES)), n=2)
    return actor.logprobs(rows)


class Generation:
    """A graph with prompts in generation, and a clock that the test sets."""

    def __init__(self, made: Graph, number: int = 3) -> None:
        self.now = 100.0
        self.ledger = Ledger(made, name="train")
        order = positions(number, 0, shuffle=False)
        self.run = TrainingRun("train", made, self.ledger, order, np.full(number, 2))
        self.run.issue(number, 1)
        lease = self.ledger.claim(made["rollout.generate"])
        assert lease is not None
        self.lease = lease
        self.under_way = UnderWay(
            [Call(cast(Any, None), "generate", (0,), ledger=self.ledger, lease=lease)]
        )
        self.gathering = _Gathering(lambda: self.now)
        self._answered = [0] * number

    def answer(self, prompt: int, responses: int = 1, *, finished: bool = False) -> None:
        first = self.lease.first_children[prompt] + self._answered[prompt]
        self._answered[prompt] += responses
        parent = self.lease.rows[prompt].id
        published = Published(
            np.arange(first, first + responses),
            np.ones(responses, np.int64),
            None,
            np.full(responses, parent),
            np.array([parent] if finished else [], np.int64),
        )
        self.ledger.publish(self.lease, published, None)

    def holds(self, node: str = "reward.score", *, replicas: int = 1) -> bool:
        return self.gathering.holds(self.run, self.run.graph[node], replicas, self.under_way)

    def begin(self) -> None:
        self.gathering.forget(self.run, self.run.graph["reward.score"])

    def look(self) -> None:
        self.gathering.look(self.run, self.run.graph["reward.score"], self.under_way)


def generation(made: Any = toy_grpo, number: int = 3) -> Generation:
    workers = {"rollout": group(ToyRollout), "reward": group(ToyReward), "actor": group(ToyActor)}
    return Generation(made(prompts(number), **workers), number)


def test_rows_of_incomplete_groups_wait_and_never_longer_than_they_may():
    run = generation()
    run.answer(0)
    assert run.holds() and run.gathering.next_end_s == 100 + MAX_WAIT_S
    run.now += MAX_WAIT_S / 2
    run.answer(1)
    assert run.holds() and run.gathering.next_end_s == 100 + MAX_WAIT_S, (
        "the first row is not kept waiting by the second"
    )
    run.now = 100 + MAX_WAIT_S
    assert run.gathering.next_end_s is None and not run.holds()
    run.begin()
    assert run.holds(), "the rows that come after the call wait anew"


def test_a_complete_group_waits_for_nothing():
    run = generation()
    run.answer(0)
    run.answer(1, SAMPLES)
    assert run.holds(), "more responses may come of both prompts"
    run.answer(1, 0, finished=True)
    assert not run.holds()
    run.begin()
    assert run.gathering.next_end_s is None


@pytest.mark.parametrize("made", [toy_grpo, raced])
def test_where_many_ranks_bring_rows_complete_groups_wait_for_more_unless_a_quorum_waits(made: Any):
    run = generation(made)
    ranks = tuple(range(MANY_RANKS))
    run.under_way = UnderWay(
        [Call(cast(Any, None), "generate", ranks, ledger=run.ledger, lease=run.lease)]
    )
    run.answer(0, SAMPLES, finished=True)
    assert run.holds() == (made is toy_grpo)
    run.now += MAX_WAIT_S
    assert run.holds() == (made is toy_grpo), "so many ranks may take longer"
    run.now = 100 + gather_s(MANY_RANKS)
    assert not run.holds()


def test_rows_that_get_no_additions_do_not_wait():
    run = generation()
    run.answer(0)
    run.under_way = UnderWay()
    assert not run.holds(), "no call of the graph is under way"
    other = generation()
    run.under_way = other.under_way
    assert not run.holds(), "another graph's calls bring nothing"


def test_a_call_that_is_large_enough_waits_for_nothing():
    run = generation(number=40)
    for prompt in range(MAX_ROWS - 1):
        run.answer(prompt)
    assert run.holds()
    run.answer(MAX_ROWS - 1)
    assert not run.holds() and run.holds(replicas=2), "each replica gets its part"


def test_rows_that_came_while_their_group_was_busy_have_waited_already():
    run = generation()
    run.look()
    run.answer(0)
    run.now += 1.0
    run.look()
    run.now += MAX_WAIT_S
    assert not run.holds()
    run.look()
    lease = run.ledger.claim(run.run.graph["reward.score"])
    assert lease is not None
    run.look()
    assert run.gathering.next_end_s is None, "nothing is ready any more"


def test_rows_that_a_quorum_waits_for_do_not_wait():
    run = generation(raced)
    run.answer(0)
    assert not run.holds()


@pytest.mark.parametrize("node", ["rollout.generate", "centred", "actor.update"])
def test_only_maps_and_filters_of_rows_gather(node: str):
    run = generation()
    run.run.issue(0, 1)
    assert not run.holds(node)


def test_a_group_of_one_response_is_complete_with_it():
    made = toy_evaluation(prompts(2), rollout=group(ToyRollout), reward=group(ToyReward))
    run = Generation(made, 2)
    run.answer(0, finished=True)
    run.answer(1)
    assert not run.holds(), "the only response to the first prompt is there"
