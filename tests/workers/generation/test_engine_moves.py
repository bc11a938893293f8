"""Responses that an engine begins and a second engine continues: nothing is lost, and a move changes
no greedy token."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_model import all_of, largest_and_mean_gap, mask_of, prompts_of, published, requests_of

from weft.algorithms.sampling import Sampling
from weft.resharding.publisher import WeightPublisher
from weft.workers.generation.engine import (
    EMPTY,
    GenerationEngine,
    GenerationRequest,
    Requests,
    Response,
    continued,
    generate,
    joined,
)
from weft.workers.generation.longest_first import HandOver
from weft.workers.generation.transformers_engine import TransformersEngine

GREEDY = Sampling(max_tokens=40, temperature=0)


def begun_by(
    engine: GenerationEngine,
    requests: list[GenerationRequest],
    sampling: Sampling,
    steps: int,
    *,
    begun: list[Response] | None = None,
) -> tuple[dict[int, Response], dict[int, Response]]:
    """Decode some steps, then hand over all that is left but one. Return finished and unfinished responses by request."""
    generation = generate(engine, requests, sampling, begun=begun or ())
    finished = [response for _ in range(steps) for response in next(generation, [])]
    given = generation.send(HandOver(parts=1000)) if len(finished) < len(requests) else []
    finished += [response for step in generation for response in step]
    return by_request(finished), by_request(given)


def by_request(responses: Iterable[Response]) -> dict[int, Response]:
    found = list(responses)
    assert len({response.request_id for response in found}) == len(found), "each response comes once"
    return {response.request_id: response for response in found}


def moved(
    first: GenerationEngine,
    second: GenerationEngine,
    requests: list[GenerationRequest],
    sampling: Sampling,
    steps: int,
) -> dict[int, Response]:
    finished, given = begun_by(first, requests, sampling, steps)
    assert finished.keys() | given.keys() == {request.request_id for request in requests}
    assert all(one.finish_reason == "unfinished" for one in given.values())
    rest = [request for request in requests if request.request_id in given]
    begun = [given[request.request_id] for request in rest]
    found = by_request(r for step in generate(second, rest, sampling, begun=begun) for r in step)
    assert found.keys() == given.keys() and not finished.keys() & found.keys()
    return finished | found


def assert_equal(found: dict[int, Response], whole: dict[int, Response]) -> None:
    assert found.keys() == whole.keys()
    for id, response in found.items():
        other = whole[id]
        assert response.token_ids.tolist() == other.token_ids.tolist()
        assert response.finish_reason == other.finish_reason
        assert response.versions.tolist() == other.versions.tolist()
        np.testing.assert_allclose(response.logprobs, other.logprobs, atol=5e-5)


@pytest.mark.parametrize("steps", [1, 7, 20])
def test_greedy_responses_that_move_have_the_tokens_of_those_that_stay(
    engine: GenerationEngine, folder: Path, steps: int
):
    requests = requests_of(prompts_of(6), samples=1)
    other = TransformersEngine(str(folder))
    assert_equal(moved(engine, other, requests, GREEDY, steps), all_of(engine, requests, GREEDY))
    assert_equal(moved(other, engine, requests, GREEDY, steps), all_of(engine, requests, GREEDY))


def test_sampled_responses_that_move_are_samples_of_the_model(engine: GenerationEngine, model: Any):
    requests, sampling = requests_of(prompts_of(6)), Sampling(max_tokens=24, temperature=0.7)
    found = moved(engine, engine, requests, sampling, 5)
    again = moved(engine, engine, requests, sampling, 5)
    largest, _ = largest_and_mean_gap(model, requests, found.values(), sampling)
    assert largest < 5e-4
    for id, response in found.items():
        assert response.token_ids.tolist() == again[id].token_ids.tolist(), (
            "the same move, the same tokens"
        )


def test_random_numbers_are_not_used_again_after_a_move(engine: GenerationEngine):
    prompt = prompts_of(1)[0]
    requests = [GenerationRequest(k, prompt, seed=k) for k in range(64)]
    sampling = Sampling(max_tokens=2, temperature=2.0, stop=None)
    responses = moved(engine, engine, requests, sampling, 1)
    pairs = [one.token_ids.tolist() for one in responses.values()]
    # With the random numbers of the first token, most of the second ones would be the same.
    assert sum(first == second for first, second in pairs) < 20


def test_transformers_samples_the_tokens_that_it_would_have_sampled_without_a_move(folder: Path):
    first, second = (TransformersEngine(str(folder)) for _ in range(2))
    requests, sampling = requests_of(prompts_of(6)), Sampling(max_tokens=24)
    assert_equal(moved(first, second, requests, sampling, 9), all_of(first, requests, sampling))


def test_a_moved_response_keeps_the_versions_of_its_tokens(
    engine: GenerationEngine, model: Any, publisher: WeightPublisher
):
    requests = requests_of(prompts_of(2), samples=1)
    sampling = Sampling(max_tokens=12, stop=None)
    _, given = begun_by(engine, requests, sampling, 5)
    engine.update_weights(published(model, publisher, version=4, scale=1.0))
    rest = [request for request in requests if request.request_id in given]
    begun = [given[request.request_id] for request in rest]
    (response,) = (r for step in generate(engine, rest, sampling, begun=begun) for r in step)
    assert response.versions.tolist() == [0] * 5 + [4] * 7


def test_a_response_that_moves_several_times_keeps_its_limits_and_kept_sets(engine: GenerationEngine):
    requests = requests_of(prompts_of(2), samples=2)
    sampling = Sampling(max_tokens=20, min_tokens=10, top_k=5, temperature=1.5)
    begun = [EMPTY] * len(requests)
    found: dict[int, Response] = {}
    while requests:
        finished, given = begun_by(engine, requests, sampling, 3, begun=begun)
        assert not found.keys() & (finished.keys() | given.keys())
        found |= finished
        requests = [request for request in requests if request.request_id in given]
        begun = [given[request.request_id] for request in requests]
    assert len(found) == 4
    for response in found.values():
        assert 10 <= len(response.token_ids) <= 20
        assert (response.finish_reason == "length") == (len(response.token_ids) == 20)
        assert response.kept_sets is not None
        masks = mask_of(response.kept_sets, 32)
        assert len(masks) == len(response.token_ids) and (masks.sum(1) <= 5).all()
        assert masks[np.arange(len(masks)), response.token_ids].all()


def test_responses_that_have_just_finished_or_belong_to_others_do_not_move(engine: GenerationEngine):
    requests, sampling = requests_of(prompts_of(2)), Sampling(max_tokens=3, stop=None)
    own, other = Requests(engine), Requests(engine)
    tickets = [own.submit(request, sampling) for request in requests[:4]]
    others = [other.submit(request, sampling) for request in requests[4:]]
    for _ in range(3):
        other.step()
    assert own.take_unfinished([*tickets, *others]) == []
    assert len(own.step()) == 4 and not other.num_unfinished


def test_an_engine_that_cannot_give_up_responses_gives_only_those_that_wait(folder: Path):
    class Keeping:
        """An engine of a user, without `take_unfinished`."""

        def __init__(self) -> None:
            self._engine = TransformersEngine(str(folder))

        def __getattr__(self, name: str) -> Any:
            if name == "take_unfinished":
                raise AttributeError(name)
            return getattr(self._engine, name)

    engine: Any = Keeping()
    requests = requests_of(prompts_of(2))
    generation = generate(engine, requests, GREEDY, slots=5)
    next(generation)
    given = generation.send(HandOver(parts=8))
    assert [len(one.token_ids) for one in given] == [0, 0, 0]
    finished = [response for step in generation for response in step]
    assert len(finished) == 5


@pytest.mark.thorough
def test_two_hundred_random_moves_between_two_engines_change_no_greedy_token(folder: Path):
    chance = random.Random(0)
    engines = [TransformersEngine(str(folder), max_num_seqs=8) for _ in range(2)]
    sampling = Sampling(max_tokens=100, temperature=0, stop=None)
    requests = requests_of(prompts_of(12), samples=1)
    whole = all_of(engines[0], requests, sampling)
    callers = [Requests(engine) for engine in engines]
    begun = {request.request_id: EMPTY for request in requests}
    held: list[dict[int, int]] = [{}, {}]
    """Ticket -> request of each engine."""

    def submit(at: int, id: int) -> None:
        ticket = callers[at].submit(*continued(requests[id], sampling, begun[id]))
        held[at][ticket] = id

    found: list[Response] = []
    moves = 0
    for id in begun:
        submit(chance.randrange(2), id)
    while any(held):
        at = chance.randrange(2)
        for _ in range(chance.randint(0, 2)):
            for response in callers[at].step() if held[at] else ():
                id = held[at].pop(response.ticket)
                found.append(joined(begun[id], response, id))
        for response in callers[at].take_unfinished(chance.sample([*held[at]], min(1, len(held[at])))):
            id = held[at].pop(response.ticket)
            begun[id] = joined(begun[id], response, id)
            submit(1 - at, id)
            moves += 1
    assert moves >= 200
    assert_equal(by_request(found), whole)


@pytest.mark.thorough
@pytest.mark.vllm
def test_two_hundred_random_moves_into_vllm_change_no_greedy_token(engine: GenerationEngine):
    chance = random.Random(1)
    sampling = Sampling(max_tokens=100, temperature=0, stop=None)
    requests = requests_of(prompts_of(12), samples=1)
    whole = all_of(engine, requests, sampling)
    own, found, moves = Requests(engine), list[Response](), 0
    begun = {request.request_id: EMPTY for request in requests}
    held = {own.submit(request, sampling): request.request_id for request in requests}
    while held:
        for response in own.step():
            id = held.pop(response.ticket)
            found.append(joined(begun[id], response, id))
        for response in own.take_unfinished(chance.sample([*held], min(3, len(held)))):
            id = held.pop(response.ticket)
            begun[id] = joined(begun[id], response, id)
            held[own.submit(*continued(requests[id], sampling, begun[id]))] = id
            moves += 1
    assert moves >= 200
    assert_equal(by_request(found), whole)
