"""A rank's side of agents: which call gets an episode, and which turns it samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from weft.algorithms.sampling import Sampling
from weft.dataflow.batch import Batch
from weft.workers.agents.harness import Function
from weft.workers.agents.link import Close, Ended, EpisodeRequest, Open, Rest, Sample, Sampled
from weft.workers.agents.serving import EpisodeCall, EpisodeServer

from .toy_engine import ToyEngine
from .words import WordRenderer


class FakeLink:
    """A link whose gateway is the test."""

    def __init__(self) -> None:
        self.came: list[Any] = []
        self.sent: list[Any] = []

    def send(self, record: Any) -> None:
        self.sent.append(record)

    def take(self) -> list[Any]:
        came, self.came = self.came, []
        return came

    def wait(self, seconds: float) -> None:
        pass


async def unused(row: Any, *, base_url: str, api_key: str) -> float:
    return 0.0


def call_on(*episodes: int) -> Open:
    requests = tuple(EpisodeRequest(each, each, {}) for each in episodes)
    return Open("model", 100, Sampling(max_tokens=5), Function(function=unused).plan(), requests)


def turn(number: int) -> Sample:
    return Sample(number, np.array([1], np.int32), 0, Sampling(max_tokens=5))


@pytest.fixture
def rank() -> tuple[EpisodeServer, FakeLink]:
    link = FakeLink()
    engine: Any = ToyEngine(WordRenderer(), lambda prompt: "x")
    return EpisodeServer(engine, lambda: link), link  # pyright: ignore[reportReturnType, reportArgumentType]


def test_a_call_that_is_cancelled_late_keeps_no_episode_of_the_next(
    rank: tuple[EpisodeServer, FakeLink],
):
    server, link = rank
    cancelled, following = call_on(1, 2), call_on(2, 3)
    server.open(cancelled)
    server.open(following)
    server.close(cancelled, [1, 2])
    assert [record for record in link.sent if isinstance(record, Close)] == [Close((1,))]
    assert not any(isinstance(record, Rest) for record in link.sent)
    link.came = [Ended(2), Ended(3)]
    server.work()
    assert server.take_ended(cancelled) == []
    assert [ended.episode_id for ended in server.take_ended(following)] == [2, 3]


def test_a_turn_that_comes_between_the_end_of_a_call_and_the_next_call_is_sampled(
    rank: tuple[EpisodeServer, FakeLink],
):
    server, link = rank
    first, second = call_on(1), call_on(2)
    server.open(first)
    link.came = [Ended(1), turn(9)]  # of a session of another rank
    server.work()
    server.open(second)  # before the first call ends, so that the rank does not rest
    server.close(first, ())
    for _ in range(3):
        server.work()
    sampled = [record.turn for record in link.sent if isinstance(record, Sampled)]
    assert sampled == [9] and not any(isinstance(record, Rest) for record in link.sent)


def test_a_rank_that_rests_gives_up_its_turns(rank: tuple[EpisodeServer, FakeLink]):
    server, link = rank
    only = call_on(1)
    server.open(only)
    link.came = [turn(9), Ended(1)]
    server.work()
    server.close(only, ())
    assert isinstance(link.sent[-1], Rest) and not server.is_sampling


class Noting(ToyEngine):
    """Notes the policies of its requests."""

    def __init__(self) -> None:
        super().__init__(WordRenderer(), lambda prompt: "x")
        self.policies: list[str] = []

    def submit(self, request: Any, sampling: Sampling) -> int:
        self.policies.append(request.policy)
        return super().submit(request, sampling)


def test_the_turns_of_a_call_are_sampled_with_its_policy():
    ids = np.array([7])
    prompts = Batch.of(sample_id=ids, group_id=ids, parent_id=ids)
    harness = Function(function=unused)
    call = EpisodeCall(prompts, harness, 1, Sampling(max_tokens=5), lambda *_: 0, "terse")
    assert call.opened("model", 100, "auto", "auto").policy == "terse"
    link, engine = FakeLink(), Noting()
    server = EpisodeServer(engine, lambda: link)  # pyright: ignore[reportReturnType, reportArgumentType]
    server.open(call_on(1))
    link.came = [turn(9), replace(turn(10), policy="terse")]
    server.work()
    assert engine.policies == ["", "terse"]
